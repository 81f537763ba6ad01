"""Steps per second of a GPT-2-small-sized model on one GPU: plain PyTorch, DistributedDataParallel over gloo, and Paramill.

124 million parameters, so 496 MB of gradients per worker and step: what the exchange costs decides. All workers share
one GPU. Contenders run in turns, and the median of their rounds counts. `default` is `paramill launch` without a flag; others
name the data cores of the server (`--cores`), or a codec (`--codecs`), without a flag otherwise. Needs `paramill` installed, beside torch.
"""

import argparse
import json
import os
import statistics
import sys
import time

import contest
import torch
from torch import nn
from torch.nn import functional

LR = 0.01


class Block(nn.Module):
    """Attention and a perceptron, each after a normalisation and with a way around it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A decoder; the embedding of tokens is also the last layer."""

    def __init__(self, layers, width, vocabulary, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def work(args):
    """One worker: trains, and reports its steps per second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Gpt(args.layers, args.width, args.vocabulary, args.length).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    barrier, settle, rank = (lambda: None), (lambda: None), 0
    if args.work == "paramill":
        import paramill as pm

        options = {} if args.codec is None else {"codec": args.codec}
        optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), f"sgd:lr={LR}", non_blocking=True, **options)
        barrier, settle, rank = optimizer.job.barrier, optimizer.synchronize, optimizer.job.rank
    else:
        if args.work == "ddp":
            torch.distributed.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            barrier, rank = torch.distributed.barrier, torch.distributed.get_rank()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(rank)

    def train(steps):
        for _ in range(steps):
            text = torch.randint(args.vocabulary, (args.batch, args.length + 1), generator=generator).to(device)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                logits = model(text[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
            loss.backward()
            optimizer.step()
        settle()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    train(args.warm_up)
    barrier()
    began = time.monotonic()
    loss = train(args.steps)
    contest.report({"rank": rank, "parameters": parameters, "loss": loss, "rate": args.steps / (time.monotonic() - began)})
    barrier()
    if args.work == "ddp":
        torch.distributed.destroy_process_group()


def contend(contender, args):
    """Runs one contender; returns the steps per second of its slowest worker."""
    kind, workers, cores, codec = contender
    shape = {name: getattr(args, name) for name in ("layers", "width", "vocabulary", "length", "batch", "steps", "warm_up")}
    mine = contest.own_line(__file__, work=kind, codec=codec, **shape)
    name = words(contender)
    if kind == "paramill":
        options = [] if cores is None else [f"--cores={cores}"]
        line = contest.launch_line(workers, args.servers, mine, *options)
        reports = contest.run_launched(name, line, workers, args.deadline)
    else:
        reports = contest.run_ranked(name, mine, workers, args.deadline)
    return min(report["rate"] for report in reports)


def words(contender):
    kind, workers, cores, codec = contender
    parts = [kind, f"{workers} workers", kind == "paramill" and ("default" if cores is None else f"{cores} data cores"), codec]
    return ", ".join(part for part in parts if part)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--width", type=int, default=768, help="a multiple of 64, the width of a head")
    options.add_argument("--vocabulary", type=int, default=50257)
    options.add_argument("--length", type=int, default=256, help="tokens of a text")
    options.add_argument("--batch", type=int, default=4, help="texts per worker and step")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--warm-up", type=int, default=4, help="steps before those that count")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--servers", type=int, default=1)
    options.add_argument("--cores", type=int, nargs="*", default=[1, 2, 4, 8, 12], help="data cores to try beside the default")
    options.add_argument("--codecs", nargs="*", default=[], help="codecs to try beside none")
    options.add_argument("--codec", help=argparse.SUPPRESS)
    options.add_argument("--skip", nargs="*", default=[], choices=["plain", "ddp"], help="contenders to leave out")
    options.add_argument("--minutes", type=float, default=60, help="no contender is begun after so many")
    options.add_argument("--deadline", type=float, default=180, help="seconds that one run may take")
    options.add_argument("--json", action="store_true", help="print the rates as one JSON object")
    options.add_argument("--work", choices=["plain", "paramill", "ddp"], help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.work:
        return work(args)
    contenders = [] if "plain" in args.skip else [("plain", 1, None, None)]
    for workers in args.workers:
        contenders += [] if "ddp" in args.skip else [("ddp", workers, None, None)]
        contenders += [("paramill", workers, cores, None) for cores in (None, *args.cores)]
        contenders += [("paramill", workers, None, codec) for codec in args.codecs]
    rates = {contender: [] for contender in contenders}
    until = time.monotonic() + 60 * args.minutes
    for _ in range(args.rounds):
        for contender in contenders:
            if time.monotonic() < until:
                rates[contender].append(contend(contender, args))
                print(words(contender), f"{rates[contender][-1]:.2f} steps/s", file=sys.stderr, flush=True)
    # The time may have been over before all had their turn.
    rates = {contender: seen for contender, seen in rates.items() if seen}
    if args.json:
        rows = [
            {"kind": kind, "workers": workers, "cores": cores, "codec": codec, "rates": seen}
            for (kind, workers, cores, codec), seen in rates.items()
        ]
        return print(json.dumps({"rows": rows, "default_of_best": default_of_best(rates)}))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} CPUs; {args.batch} x {args.length} tokens per worker")
    print("| contender | workers | data cores | codec | steps/s, by round | median |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (kind, workers, cores, codec), seen in rates.items():
        data_cores = "" if kind != "paramill" else "default" if cores is None else cores
        rounds = ", ".join(f"{rate:.2f}" for rate in seen)
        print(f"| {kind} | {workers} | {data_cores} | {codec or ''} | {rounds} | {statistics.median(seen):.2f} |")
    for workers, ratio in default_of_best(rates).items():
        print(f"{workers} workers: without a flag {ratio:.2f} of the best --cores")


def default_of_best(rates):
    """By number of workers: the median rate without a flag over the best median of a named number of data cores."""
    ratios = {}
    medians = {contender: statistics.median(seen) for contender, seen in rates.items() if contender[0] == "paramill"}
    for workers in sorted({workers for _, workers, _, _ in medians}):
        named = [rate for (_, count, cores, _), rate in medians.items() if count == workers and cores is not None]
        default = medians.get(("paramill", workers, None, None))
        if named and default is not None:
            ratios[workers] = default / max(named)
    return ratios


if __name__ == "__main__":
    main()
