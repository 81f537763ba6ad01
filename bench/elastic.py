#!/usr/bin/env python3
"""Shards that move while a model is exchanged, between hosts with slow links (network namespaces, see lab.py).

    sudo bench/elastic.py scale --json       one server, a second and a third join: the exchange rate, and the bytes moved
    sudo bench/elastic.py migrate --json     a server is drained: how much slower iterations are while its shards move

Workers exchange as `paramill bench exchange` does. Rates are counted by the workers' clocks and bytes, as `paramill status` tells them. Where a move
is no longer than a few iterations, bytes in its time depend on what part of an iteration it begins in: `iterations_slower` compares whole iterations.
Needs what lab.py needs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

import lab as labs

# How often the job is asked how it stands.
EVERY_S = 0.25
# How long the job may take to begin.
BEGIN_S = 60.0


def main():
    arguments = parse_arguments()
    if os.geteuid() != 0:
        sys.exit("error: network namespaces need root; run this with sudo")
    if not os.access(arguments.paramill, os.X_OK):
        sys.exit(f"error: {arguments.paramill} is no program; build it: cargo build --release")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    arguments.action(arguments)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    scale = commands.add_parser("scale", help="servers join: how much faster the exchange becomes")
    scale.set_defaults(action=measure_scale)
    scale.add_argument("--servers", type=int, default=3, metavar="N", help="servers in the end (default: %(default)s)")
    scale.add_argument("--within", type=float, default=10, metavar="S", help="seconds after its start from which a server's effect is measured (default: %(default)s)")
    migrate = commands.add_parser("migrate", help="a server is drained: how much slower iterations become meanwhile")
    migrate.set_defaults(action=measure_migration)
    for command, cores, elements in ((scale, 6, 4_000_000), (migrate, 1, 25_557_032)):
        command.add_argument("--paramill", default="target/release/paramill", metavar="PATH", help="the program")
        command.add_argument("--mbit", type=labs.rate, default=200, metavar="R", help="rate of a link, each way (default: %(default)s)")
        command.add_argument("--buffer-ms", type=labs.rate, default=10, metavar="N", help="what a port of the switch can hold (default: %(default)s)")
        command.add_argument("--workers", type=labs.hosts, default=4, metavar="N", help="default: %(default)s")
        command.add_argument("--cores", type=labs.hosts, default=cores, metavar="K", help="shards that the job begins with (default: %(default)s)")
        command.add_argument("--elements", type=int, default=elements, metavar="N", help="parameters (default: %(default)s)")
        command.add_argument("--seconds", type=float, default=10, metavar="S", help="how long each rate is measured (default: %(default)s)")
        command.add_argument("--compute", metavar="TIME", help="a computation to wait out in each iteration, of ResNet-50, instead of --elements")
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


class Run:
    """A job of one server and several workers, and servers that join it, each on a host."""

    def __init__(self, arguments, joiners):
        self.arguments = arguments
        self.lab = labs.Lab.own(1 + arguments.workers + joiners)
        self.processes = []
        self.bench = None
        self.url = None
        self.samples = []

    def __enter__(self):
        self.lab.build((self.arguments.mbit,), self.arguments.buffer_ms)
        return self

    def __exit__(self, *_):
        for process in [self.bench, *self.processes]:
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()
        self.lab.remove()

    def command(self, host, *words):
        return ["ip", "netns", "exec", self.lab.namespace(host), os.path.abspath(self.arguments.paramill), *words]

    def begin(self):
        arguments = self.arguments
        model = ["--model", "resnet50", "--compute", arguments.compute, "--send", "end"] if arguments.compute else ["--elements", str(arguments.elements)]
        words = [
            "bench", "exchange", "--quiet", "--json", "--workers", str(arguments.workers), "--servers", "1", "--cores", str(arguments.cores),
            "--transport", "tcp", "--placement", "uniform", "--pin", "off", "--rounds", "1", "--seconds", "3600", "--warmup", "0.1",
            "--run-with", self.lab.enter(), "--host", self.lab.address(0), *model,
        ]
        self.bench = subprocess.Popen([os.path.abspath(arguments.paramill), *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + BEGIN_S
        while self.url is None or not self.clocks(self.sample()):
            if time.monotonic() > deadline or self.bench.poll() is not None:
                sys.exit("error: the job did not begin")
            time.sleep(EVERY_S)
            self.url = self.url or self.coordinator()

    def coordinator(self):
        """The job's address: one of the ports on the first host, which is the only one that answers a command."""
        listed = labs.run("ip", "netns", "exec", self.lab.namespace(0), "ss", "-Hltn")
        addresses = [line.split()[3] for line in listed.splitlines()]
        for address in sorted(addresses, key=lambda address: int(address.rsplit(":", 1)[1])):
            if subprocess.run(self.command(0, "status", address, "--json"), capture_output=True, check=False).returncode == 0:
                return address
        return None

    def sample(self):
        """How the job stands."""
        asked = subprocess.run(self.command(0, "status", self.url, "--json"), capture_output=True, text=True, check=False)
        if asked.returncode != 0:
            return None
        status = json.loads(asked.stdout)
        sample = {
            "time": time.monotonic(),
            "clocks": [worker["report"]["clock"] for worker in status["workers"]],
            "pulled": sum(worker["report"]["bytes_pulled"] for worker in status["workers"]),
            "moves": status["moves"],
        }
        self.samples.append(sample)
        return sample

    def clocks(self, sample):
        return sample is not None and sample["clocks"] and min(sample["clocks"]) > 1

    def watch(self, seconds):
        """Samples for so long. Returns the first and the last."""
        first = last = self.sample()
        while last["time"] - first["time"] < seconds:
            time.sleep(EVERY_S)
            last = self.sample() or last
        return first, last

    def iterations(self, first, last, outside=False):
        """Whole iterations of all workers between two samples, or those that overlap with the time between them, and how long they took."""
        turns = [after for before, after in zip(self.samples, self.samples[1:]) if min(after["clocks"]) > min(before["clocks"])]
        begun = [sample for sample in turns if sample["time"] <= first["time"]]
        between = [sample for sample in turns if first["time"] < sample["time"] <= last["time"]]
        ended = [sample for sample in turns if sample["time"] > last["time"]]
        turns = begun[-1:] + between + ended[:1] if outside else between
        return min(turns[-1]["clocks"]) - min(turns[0]["clocks"]), turns[-1]["time"] - turns[0]["time"]

    def rate(self, seconds):
        """Bytes of parameters that workers receive, per second."""
        return rate(*self.watch(seconds))

    def join(self, host):
        words = ["serve", "--join", f"paramill://{self.url}/bench", "--cores", "1", "--host", self.lab.address(host), "--transport", "tcp", "--pin", "off", "--quiet"]
        self.processes.append(subprocess.Popen(self.command(host, *words), stdout=subprocess.DEVNULL))


def rate(first, last):
    return (last["pulled"] - first["pulled"]) / (last["time"] - first["time"])


# ---- elastic.py scale ----


def measure_scale(arguments):
    with Run(arguments, arguments.servers - 1) as run:
        run.begin()
        run.watch(3)
        alone = run.rate(arguments.seconds)
        steps = [{"servers": 1, "mb_s": alone / 1e6, "speedup": 1.0}]
        for servers in range(2, arguments.servers + 1):
            before = run.sample()["moves"]
            began = time.monotonic()
            run.join(arguments.workers + servers - 1)
            _, last = run.watch(arguments.within)
            balanced = [sample["time"] for sample in run.samples if sample["time"] > began and is_balanced(sample, before)]
            found = run.rate(arguments.seconds)
            after = run.sample()["moves"]
            must = 4 * arguments.elements / servers
            steps.append({
                "servers": servers,
                "mb_s": found / 1e6,
                "speedup": found / alone,
                "balanced_after_s": balanced[0] - began if balanced else None,
                "shards_moved": after["shards"] - before["shards"],
                "bytes_moved": after["bytes"] - before["bytes"],
                "bytes_of_parameters_that_must_move": must,
            })
    if arguments.json:
        print(json.dumps({"mbit": arguments.mbit, "workers": arguments.workers, "shards": arguments.cores, "elements": arguments.elements, "steps": steps}))
        return
    print(f"{arguments.workers} workers, {arguments.elements} parameters in {arguments.cores} shards, {arguments.mbit} Mbit/s a link")
    for step in steps:
        line = f"{step['servers']} servers: {step['mb_s']:.1f} MB/s, {step['speedup']:.2f}x"
        if "shards_moved" in step:
            when = "not balanced" if step["balanced_after_s"] is None else f"balanced after {step['balanced_after_s']:.1f} s"
            line += f"; {when}, {step['shards_moved']} shards moved, {step['bytes_moved'] / 1e6:.2f} MB for {step['bytes_of_parameters_that_must_move'] / 1e6:.2f} MB of parameters"
        print(line)


def is_balanced(sample, before):
    moves = sample["moves"]
    return moves["planned"] == 0 and moves["under_way"] == 0 and moves["shards"] > before["shards"]


# ---- elastic.py migrate ----


def measure_migration(arguments):
    with Run(arguments, 1) as run:
        run.begin()
        run.join(arguments.workers + 1)
        run.watch(3)
        before = run.watch(arguments.seconds)
        usual = rate(*before)
        first = run.sample()
        labs.run(*run.command(0, "drain", run.url, "--server", "0"))
        last = first
        while last["moves"]["shards"] - first["moves"]["shards"] < arguments.cores:
            time.sleep(EVERY_S)
            last = run.sample() or last
            if last["time"] - first["time"] > 600:
                sys.exit("error: the shards did not move")
        # Iterations that the end of the move holds up are of it.
        _, last = run.watch(2)
        report = {
            "mbit": arguments.mbit,
            "workers": arguments.workers,
            "shards": arguments.cores,
            "mb_s": usual / 1e6,
            "mb_s_meanwhile": rate(first, last) / 1e6,
            "slower": 1 - rate(first, last) / usual,
            "seconds": last["time"] - first["time"],
            "bytes_moved": last["moves"]["bytes"] - first["moves"]["bytes"],
        }
        report["mb_s_after"] = run.rate(arguments.seconds) / 1e6
        iterations, seconds = run.iterations(*before)
        overlapping, taken = run.iterations(first, last, outside=True)
        report["iteration_s"] = seconds / iterations
        report["iterations_meanwhile"] = overlapping
        report["iteration_s_meanwhile"] = taken / overlapping
        report["iterations_slower"] = 1 - report["iteration_s"] / report["iteration_s_meanwhile"]
    if arguments.json:
        print(json.dumps(report))
        return
    print(
        f"{report['mb_s']:.1f} MB/s; {report['mb_s_meanwhile']:.1f} MB/s while {report['bytes_moved'] / 1e6:.1f} MB moved in {report['seconds']:.1f} s "
        f"({report['slower']:.0%} slower); {report['mb_s_after']:.1f} MB/s after; {report['iterations_meanwhile']} iterations overlapped with it, of "
        f"{report['iteration_s_meanwhile']:.2f} s instead of {report['iteration_s']:.2f} s ({report['iterations_slower']:.0%} slower)"
    )


if __name__ == "__main__":
    main()
