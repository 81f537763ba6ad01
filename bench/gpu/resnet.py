"""Steps per second of ResNet-20 on a GPU: plain PyTorch, Paramill, and DistributedDataParallel over gloo, in turns.

All workers share one GPU. Every contender runs the same model, the same batches and the same number of steps; the median of
several rounds counts. Needs `paramill` installed, beside torch.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/python/resnet_cifar.py"
WARM_UP = 30


def example():
    """The model and the reader of examples/python/resnet_cifar.py."""
    spec = importlib.util.spec_from_file_location("resnet_cifar", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(args):
    """One worker: trains, and prints how long its steps took."""
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = example()
    model = source.resnet(args.depth).to(device)
    (x, y), _ = source.load(args.data, device)
    barrier, rank = (lambda: None), 0
    if args.work == "paramill":
        import paramill as pm

        optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "momentum:lr=0.01,weight_decay=1e-4")
        barrier, rank = optimizer.job.barrier, optimizer.job.rank
    else:
        if args.work == "ddp":
            torch.distributed.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(model)
            barrier, rank = torch.distributed.barrier, torch.distributed.get_rank()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(rank)
    for step in range(WARM_UP + args.steps):
        if step == WARM_UP:
            synchronize(device)
            barrier()
            began = time.monotonic()
        batch = torch.randint(len(x), (args.batch,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    if args.work == "paramill":
        optimizer.synchronize()
    synchronize(device)
    seconds = time.monotonic() - began
    print("RESULT", json.dumps({"rank": rank, "seconds": seconds, "loss": loss.item()}), flush=True)
    barrier()
    if args.work == "ddp":
        torch.distributed.destroy_process_group()


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def contend(contender, args):
    """Runs one contender and returns steps per second of its slowest worker."""
    kind, workers, servers = contender
    mine = [sys.executable, __file__, f"--work={kind}", f"--steps={args.steps}", f"--batch={args.batch}"]
    mine += [f"--depth={args.depth}"] + ([f"--data={args.data}"] if args.data else [])
    if kind == "paramill":
        line = ["paramill", "launch", f"-n{workers}", f"-s{servers}", "--", *mine]
        processes = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True)]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(workers)}
        processes = [
            subprocess.Popen(mine, stdout=subprocess.PIPE, text=True, env={**os.environ, **shared, "RANK": str(rank)})
            for rank in range(workers)
        ]
    texts = [process.communicate(timeout=args.deadline)[0] for process in processes]
    results = [json.loads(line.split("RESULT ")[1]) for text in texts for line in text.splitlines() if "RESULT " in line]
    if len(results) != workers or any(process.returncode for process in processes):
        raise SystemExit(f"{contender}: {len(results)} of {workers} workers ended well\n" + "\n".join(texts))
    return args.steps / max(result["seconds"] for result in results)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", help="an .npz file with CIFAR-10, as examples/python/resnet_cifar.py reads it; noise otherwise")
    options.add_argument("--depth", type=int, default=20)
    options.add_argument("--batch", type=int, default=128, help="pictures per worker and step")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    options.add_argument("--deadline", type=float, default=180, help="seconds that one run may take")
    options.add_argument("--work", choices=["plain", "paramill", "ddp"], help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.work:
        return work(args)
    contenders = [("plain", 1, 0)]
    for workers in args.workers:
        contenders += [("paramill", workers, servers) for servers in args.servers] + [("ddp", workers, 0)]
    rates = {contender: [] for contender in contenders}
    for _ in range(args.rounds):
        for contender in contenders:
            rates[contender].append(contend(contender, args))
            print(contender, f"{rates[contender][-1]:.1f} steps/s", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} CPUs; ResNet-{args.depth}, {args.batch} pictures per worker")
    print("| contender | workers | servers | steps/s | samples/s | of plain |\n| --- | --- | --- | --- | --- | --- |")
    plain = statistics.median(rates[contenders[0]])
    for (kind, workers, servers), seen in rates.items():
        rate = statistics.median(seen)
        samples = rate * workers * args.batch
        print(f"| {kind} | {workers} | {servers} | {rate:.1f} | {samples:.0f} | {samples / (plain * args.batch):.2f} |")


if __name__ == "__main__":
    main()
