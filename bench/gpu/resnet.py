"""Steps per second of ResNet-20 on a GPU: plain PyTorch, Paramill, and DistributedDataParallel over gloo, in turns.

All workers share one GPU. Every contender runs the same model, the same batches and the same number of steps; the median of
several rounds counts. `paired` is Paramill and plain PyTorch in one process, some steps of each in turns: two processes are
not equally fast, even when they do the same. Needs `paramill` installed, beside torch.
"""

import argparse
import importlib.util
import os
import pathlib
import statistics
import sys
import time

import contest
import torch
from torch import nn

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/python/resnet_cifar.py"
WARM_UP = 30
PAIRED_TURNS = 4


def example():
    """The model and the reader of examples/python/resnet_cifar.py."""
    spec = importlib.util.spec_from_file_location("resnet_cifar", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Trainer:
    """A model with its optimizer, of one kind of contender."""

    def __init__(self, kind, args, source, device, data):
        torch.manual_seed(0)
        self.x, self.y = data
        self.batch, self.device = args.batch, device
        self.model = source.resnet(args.depth).to(device)
        self.barrier, self.settle, rank = (lambda: None), (lambda: None), 0
        if kind == "paramill":
            import paramill as pm

            text = "momentum:lr=0.01,weight_decay=1e-4"
            self.optimizer = pm.torch.DistributedOptimizer(self.model.named_parameters(), text, non_blocking=True)
            self.barrier, rank = self.optimizer.job.barrier, self.optimizer.job.rank
            self.settle = self.optimizer.synchronize
        else:
            if kind == "ddp":
                torch.distributed.init_process_group("gloo")
                self.model = nn.parallel.DistributedDataParallel(self.model)
                self.barrier, rank = torch.distributed.barrier, torch.distributed.get_rank()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.rank, self.generator = rank, torch.Generator().manual_seed(rank)

    def run(self, steps):
        """Seconds of so many steps."""
        synchronize(self.device)
        self.barrier()
        began = time.monotonic()
        for _ in range(steps):
            batch = torch.randint(len(self.x), (self.batch,), generator=self.generator).to(self.device)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.x[batch]), self.y[batch])
            loss.backward()
            self.optimizer.step()
        self.settle()
        synchronize(self.device)
        self.loss = loss.item()
        return time.monotonic() - began


def work(args):
    """One worker: trains, and prints how long its steps took."""
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = example()
    data, _ = source.load(args.data, device)
    kinds = ["paramill", "plain"] if args.work == "paired" else [args.work]
    trainers = [Trainer(kind, args, source, device, data) for kind in kinds]
    rates = [[] for _ in trainers]
    for trainer in trainers:
        trainer.run(WARM_UP)
    turns = PAIRED_TURNS if args.work == "paired" else 1
    for _ in range(turns):
        for trainer, seen in zip(trainers, rates):
            seen.append(args.steps // turns / trainer.run(args.steps // turns))
    result = {"rank": trainers[0].rank, "loss": trainers[0].loss, "rate": statistics.median(rates[0])}
    result["plain"] = statistics.median(rates[-1])
    contest.report(result)
    trainers[0].barrier()
    if args.work == "ddp":
        torch.distributed.destroy_process_group()


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def contend(contender, args):
    """Runs one contender; returns steps per second of its slowest worker, and of plain PyTorch beside it."""
    kind, workers, servers, codec = contender
    mine = contest.own_line(
        __file__, work=kind, steps=args.steps, batch=args.batch, depth=args.depth, data=args.data or None
    )
    if kind in ("paramill", "paired"):
        line = contest.launch_line(workers, servers, mine, f"--codec={codec}")
        reports = contest.run_launched(str(contender), line, workers, args.deadline)
    else:
        reports = contest.run_ranked(str(contender), mine, workers, args.deadline)
    return min(report["rate"] for report in reports), reports[0]["plain"]


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", help="an .npz file with CIFAR-10, as examples/python/resnet_cifar.py reads it; noise otherwise")
    options.add_argument("--depth", type=int, default=20)
    options.add_argument("--batch", type=int, default=128, help="pictures per worker and step")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    options.add_argument("--codecs", nargs="*", default=["f16", "topk:0.01"], help="codecs that are compressed by on the GPU")
    options.add_argument("--minutes", type=float, default=60, help="no contender is begun after so many")
    options.add_argument("--deadline", type=float, default=180, help="seconds that one run may take")
    options.add_argument("--work", choices=["plain", "paramill", "paired", "ddp"], help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.work:
        return work(args)
    contenders = [("plain", 1, 0, "none")]
    contenders += [("paired", 1, servers, "none") for servers in args.servers]
    contenders += [("paired", 1, args.servers[0], codec) for codec in args.codecs]
    for workers in args.workers:
        contenders += [("paramill", workers, servers, "none") for servers in args.servers] + [("ddp", workers, 0, "none")]
    rates = {contender: [] for contender in contenders}
    until = time.monotonic() + 60 * args.minutes
    for _ in range(args.rounds):
        for contender in contenders:
            if time.monotonic() < until:
                rates[contender].append(contend(contender, args))
                print(contender, *(f"{rate:.1f}" for rate in rates[contender][-1]), "steps/s", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} CPUs; ResNet-{args.depth}, {args.batch} pictures per worker")
    print("| contender | workers | servers | codec | steps/s, by round | samples/s | of plain |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    # The time may have been over before all had their turn.
    rates = {contender: seen for contender, seen in rates.items() if seen}
    for (kind, workers, servers, codec), seen in rates.items():
        plain = statistics.median(rate for rate, _ in rates[contenders[0]])
        rounds = ", ".join(f"{rate:.1f}" for rate, _ in seen)
        samples = statistics.median(rate for rate, _ in seen) * workers * args.batch
        of_plain = samples / (plain * args.batch)
        if kind == "paired":
            of_plain = statistics.median(rate / beside for rate, beside in seen)
        print(f"| {kind} | {workers} | {servers} | {codec} | {rounds} | {samples:.0f} | {of_plain:.2f} |")


if __name__ == "__main__":
    main()
