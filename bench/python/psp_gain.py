"""What partial pulling (psp with b < 1) saves when answers are late: the same job in Rust and in PyTorch, each against bsp.

The job is the network of `paramill train mlp` with two workers and four servers, as processes. Needs the packages `paramill` and
`torch`, and the command `paramill`.

    python bench/python/psp_gain.py --b 0.9 --inject 'pull:delay=100ms,p=0.05'
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

WORKERS, SERVERS, BATCH, PIXELS, CLASSES = 2, 4, 32, 784, 10
COMMON = [f"--servers={SERVERS}", "--placement=uniform", "--cores=1"]


def work(args):
    """A worker of the PyTorch job; rank 0 prints how long its steps took."""
    import torch

    import paramill as pm

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(PIXELS, args.hidden), torch.nn.ReLU(), torch.nn.Linear(args.hidden, CLASSES)
    )
    # Every weight and every bias is a table, as in the Rust job.
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "adam:lr=0.001", pack_bytes=4)
    images, labels = torch.rand(BATCH, PIXELS), torch.randint(CLASSES, (BATCH,))
    began = time.perf_counter()
    for _ in range(args.steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    if os.environ["PARAMILL_RANK"] == "0":
        print("SECONDS", time.perf_counter() - began, flush=True)
    optimizer.close()


def run(line):
    ended = subprocess.run(line, capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(line)} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def in_rust(args, sync):
    examples = args.steps * BATCH * WORKERS
    line = [args.command, "train", "mlp", "--processes", "--transport=tcp", f"--workers={WORKERS}", *COMMON, "--epochs=1", f"--batch={BATCH}"]
    line += [f"--examples={examples}", f"--sync={sync}", "--optimizer=adam:lr=0.001", f"--inject={args.inject}", "--json"]
    return json.loads(run(line))["seconds"]


def in_torch(args, sync):
    """As `paramill launch` does it, with faults on the servers."""
    serve = [args.command, "--json", "serve", f"--inject={args.inject}", "--transport=tcp"]
    line = [*serve, "--listen=127.0.0.1:0", f"--workers={WORKERS}", *COMMON, f"--sync={sync}"]
    processes = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True)]
    try:
        url = json.loads(processes[0].stdout.readline())["url"]
        for _ in range(1, SERVERS):
            line = [*serve, f"--join={url}", "--cores=1"]
            processes.append(subprocess.Popen(line, stdout=subprocess.DEVNULL))
        line = [sys.executable, __file__, "--work", f"--steps={args.steps}", f"--hidden={args.hidden}"]
        workers = []
        for rank in range(WORKERS):
            said = {"PARAMILL_URL": url, "PARAMILL_RANK": str(rank), "PARAMILL_WORKERS": str(WORKERS)}
            own = {**os.environ, **said, "PARAMILL_TRANSPORT": "tcp"}
            workers.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=own))
        processes += workers
        output = workers[0].communicate()[0]
        return float(output.split("SECONDS", 1)[1].split()[0])
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--b", default="0.9")
    parser.add_argument("--tau2", default="0")
    parser.add_argument("--inject", default="pull:delay=100ms,p=0.05")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--command", default="paramill")
    args = parser.parse_args()
    if args.work:
        return work(args)
    psp = f"psp:c={WORKERS},b={args.b},tau2={args.tau2}"
    gains = {}
    for name, job in (("Rust", in_rust), ("PyTorch", in_torch)):
        # In turns, so that a busy moment of the machine meets both.
        times = [(job(args, "bsp"), job(args, psp)) for _ in range(args.repeat)]
        bsp, partial = (statistics.median(each) for each in zip(*times))
        gains[name] = 1 - partial / bsp
        print(f"{name}: bsp {bsp:.2f} s, {psp} {partial:.2f} s for {args.steps} steps: {gains[name]:.0%} saved", flush=True)
    print(f"PyTorch saves {gains['PyTorch'] / gains['Rust']:.2f} of what Rust does")


if __name__ == "__main__":
    main()
