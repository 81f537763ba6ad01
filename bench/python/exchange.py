"""What Python adds to an exchange: `paramill bench exchange` with one worker and one server, and the same from Python, in turns.

Like is compared with like: slabs, which are written where they leave from, with the same; arrays of one's own, which are
copied, with `--copy`. Needs the package `paramill`, and nothing else.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np


def sizes(elements, tensors):
    """As many tensors of about the same size as `paramill bench exchange --elements E --tensors T` cuts."""
    return [elements * (i + 1) // tensors - elements * i // tensors for i in range(tensors)]


def work(args):
    """The worker: exchanges all tables, with slabs or with arrays of its own."""
    import paramill as pm

    with pm.init() as job:
        tables = [
            job.table(f"t{i}", init=np.full(size, 0.5, np.float32)) for i, size in enumerate(sizes(args.elements, args.tensors))
        ]
        if args.work == "slabs":
            slabs = [table.slab() for table in tables]
            for slab in slabs:
                slab.gradient[:] = 0.001

            def iterate():
                exchange = job.exchange(slabs)
                job.clock()
                exchange.wait()
        else:
            arrays = [np.full(table.shape, 0.001, np.float32) for table in tables]

            def iterate():
                handles = [table.push_pull(array) for table, array in zip(tables, arrays)]
                job.clock()
                for handle in handles:
                    handle.wait()

        for seconds in (args.warmup, args.seconds):
            count, began = 0, time.perf_counter()
            while time.perf_counter() < began + seconds:
                iterate()
                count += 1
            rate = count / (time.perf_counter() - began)
        print("RATE", rate, flush=True)


def from_python(args, way):
    line = ["paramill", "launch", "-n1", "-s1", f"--cores={args.cores}", f"--transport={args.transport}"]
    line += ["--optimizer=sgd:lr=0.001", "--", sys.executable, __file__, f"--work={way}"]
    line += [f"--{name}={getattr(args, name)}" for name in ("elements", "tensors", "seconds", "warmup")]
    text = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(text.split("RATE ")[1].split()[0])


def from_rust(args, *more):
    line = ["paramill", "--json", "bench", "exchange", "--workers=1", "--servers=1", f"--cores={args.cores}", "--rounds=1"]
    line += [f"--{name}={getattr(args, name)}" for name in ("elements", "tensors", "seconds", "warmup", "transport")]
    report = json.loads(subprocess.run([*line, *more], stdout=subprocess.PIPE, text=True, check=True).stdout)
    return find(report, "iterations_per_s")


def find(report, key):
    """The first value under this key, however deep."""
    if isinstance(report, dict):
        report = [report[key]] if key in report else list(report.values())
    if isinstance(report, list):
        return next((found for found in (find(item, key) for item in report) if found is not None), None)
    return report if isinstance(report, float) else None


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--elements", type=int, default=25_557_032, help="parameters [default: those of ResNet-50]")
    options.add_argument("--tensors", type=int, default=161)
    options.add_argument("--cores", type=int, default=1)
    options.add_argument("--transport", default="shm", choices=["shm", "tcp"])
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--warmup", type=float, default=0.5)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--work", choices=["slabs", "arrays"], help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.work:
        return work(args)
    contenders = {
        "bench exchange": lambda: from_rust(args),
        "slabs": lambda: from_python(args, "slabs"),
        "bench exchange --copy": lambda: from_rust(args, "--copy"),
        "arrays": lambda: from_python(args, "arrays"),
    }
    rates = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, measure in contenders.items():
            rates[name].append(measure())
    medians = {name: statistics.median(seen) for name, seen in rates.items()}
    for name, rate in medians.items():
        reference = "bench exchange --copy" if name in ("arrays", "bench exchange --copy") else "bench exchange"
        print(f"{name:<22}{rate:8.1f} iterations/s, {1000 / rate:7.2f} ms, {medians[reference] / rate:.2f}x of {reference}")


if __name__ == "__main__":
    main()
