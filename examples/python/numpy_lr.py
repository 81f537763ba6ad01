"""Logistic regression with numpy alone: `paramill launch -n 4 -s 2 -- python numpy_lr.py`, or alone."""

import argparse
import gzip

import numpy as np

import paramill as pm

try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
try:
    from tqdm import trange
except ImportError:
    trange = range


def load(path, features):
    """Examples in libsvm form (`+1 3:1 11:0.5 ...`); without a path, made ones."""
    if path is None:
        rng = np.random.default_rng(1)
        x = rng.normal(size=(20_000, features)).astype(np.float32)
        y = x @ rng.normal(size=features) + rng.normal(size=len(x)) > 0
        return x, y.astype(np.float32)
    with (gzip.open if path.endswith(".gz") else open)(path, "rt") as file:
        lines = [line.split() for line in file]
    x = np.zeros((len(lines), features), np.float32)
    for row, line in enumerate(lines):
        for pair in line[1:]:
            index, value = pair.split(":")
            x[row, int(index) - 1] = float(value)
    return x, np.array([float(line[0]) > 0 for line in lines], np.float32)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", help="a file in libsvm form, .gz or not; made data otherwise")
    options.add_argument("--features", type=int, default=123)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--batch", type=int, default=256)
    options.add_argument("--optimizer", default="adagrad:lr=0.1")
    options.add_argument("--sync", help="consistency model, such as ssp:s=3; the job's otherwise")
    options.add_argument("--plot", help="where the curve of the loss goes, if matplotlib is there")
    args = options.parse_args()
    with pm.init() as job:
        w = job.table("w", init=np.zeros(args.features, np.float32), optimizer=args.optimizer, sync=args.sync)
        x, y = load(args.data, args.features)
        x, y = x[job.rank :: job.workers], y[job.rank :: job.workers]
        rng = np.random.default_rng(job.rank)
        losses = []
        for _ in trange(args.steps):
            batch = rng.integers(len(x), size=args.batch)
            p = 1 / (1 + np.exp(-(x[batch] @ w.values)))
            losses.append(-np.log(np.where(y[batch] > 0, p, 1 - p) + 1e-9).mean())
            w.update((x[batch].T @ (p - y[batch]) / args.batch).astype(np.float32))
            job.clock()
            w.sync()
        right = ((x @ w.values > 0) == (y > 0)).mean()
        print(f"worker {job.rank} of {job.workers}: loss {np.mean(losses[-20:]):.4f}, accuracy {right:.4f}")
        if plt and args.plot and job.rank == 0:
            plt.plot(losses)
            plt.savefig(args.plot)


if __name__ == "__main__":
    main()
