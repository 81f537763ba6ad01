#!/usr/bin/env python3
"""How soon `dvf:low=...,up=...` follows a link that is halved and restored: a server and three workers with shaped links.

    sudo bench/lab.py run --hosts 4 --mbit 100 -- bench/thresholds.py --lab '{enter}' --address '{address0}'

Each run trains an MLP of 1.6 MB in broadcast mode, its step times replayed (`--step-ms`), and changes the link of worker 2. The
threshold that pushes of that worker follow, and the one that the server's broadcasts follow, change some time later: the status says
when, and how many versions were published in between.
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
WORKERS = 3
WATCHED = 2
CODEC = "dvf:low=1e-9,up=10,need=80"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", required=True, metavar="CMD", help="the command that enters a host of the lab")
    parser.add_argument("--address", required=True, help="the server's address, host 0's")
    parser.add_argument("--paramill", default="target/release/paramill", metavar="PATH")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=0, help="how long a step computes (default: as long as it takes)")
    parser.add_argument("--broadcast", default="star")
    parser.add_argument("--mbit", type=float, nargs=2, default=[100, 50], metavar=("FULL", "HALF"))
    parser.add_argument("--hold-s", type=float, default=12, help="seconds before, between and after the changes")
    arguments = parser.parse_args()
    for number in range(arguments.runs):
        print(json.dumps({"run": number, "step_ms": arguments.step_ms, **measure(arguments)}), flush=True)


def measure(arguments):
    with tempfile.TemporaryDirectory() as folder, Job(arguments, pathlib.Path(folder)) as job:
        job.await_progress()
        time.sleep(arguments.hold_s)
        found = {}
        for name, rate, lacks_room in (("halved", arguments.mbit[1], True), ("restored", arguments.mbit[0], False)):
            subprocess.run([HERE / "lab.py", "rate", str(WATCHED + 1), str(rate)], check=True, stdout=subprocess.DEVNULL)
            changed = time.monotonic()
            time.sleep(arguments.hold_s)
            found[name] = {
                who: job.followed(who, changed, lacks_room) for who in ("worker", "server")
            }
        return found


class Job:
    """A server in host 0 and workers in hosts 1 to 3, watched through its status."""

    def __init__(self, arguments, folder):
        self.arguments, self.folder, self.processes = arguments, folder, []
        # (time, version, changes of each threshold)
        self.samples, self.over = [], threading.Event()

    def __enter__(self):
        policies = ["--codec", CODEC, "--answer-codec", CODEC, "--broadcast", self.arguments.broadcast]
        if self.arguments.step_ms:
            steps = self.folder / "steps.csv"
            steps.write_text(f"worker,step,seconds\n0,0,{self.arguments.step_ms / 1000}\n")
            policies += ["--inject", f"trace={steps}"]
        words = ["config", "mlp", "--workers", str(WORKERS), "--servers", "1", "--epochs", "1000", "--transport", "tcp", *policies]
        config = subprocess.run([self.arguments.paramill, *words], check=True, capture_output=True, text=True).stdout
        where = ["--host", self.arguments.address, "--listen", f"{self.arguments.address}:7070"]
        self.start(0, ["serve", *where, "--config", "-"], config, {})
        url = f"paramill://{self.arguments.address}:7070/job"
        for rank in range(WORKERS):
            self.start(rank + 1, ["worker-process"], config, {"PARAMILL_URL": url, "PARAMILL_RANK": str(rank)})
        self.url = url
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()
        return self

    def start(self, host, words, config, environment):
        enter = shlex.split(self.arguments.lab.replace("{}", str(host)))
        variables = [f"{name}={value}" for name, value in environment.items()]
        line = [*enter, "env", *variables, self.arguments.paramill, *words]
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        process.stdin.write(config)
        process.stdin.close()
        self.processes.append(process)

    def watch(self):
        while not self.over.wait(0.1):
            asked = time.monotonic()
            answer = subprocess.run(
                [self.arguments.paramill, "status", self.url, "--json"], capture_output=True, text=True
            )
            if answer.returncode != 0:
                continue
            status = json.loads(answer.stdout)
            if not status["shards"]:
                continue
            # Nodes report every half second: their own times are what counts.
            shard = status["shards"][0]
            versions = [table["version"] for table in shard["tables"]]
            worker = next(worker for worker in status["workers"] if worker["worker"] == WATCHED)
            changes = {
                "server": self.changes(asked, shard["links"]),
                "worker": self.changes(asked, worker["report"]["links"]),
            }
            if versions:
                self.samples.append((asked, min(versions), changes))

    @staticmethod
    def changes(now, links):
        return [(now - change["seconds_ago"], change["lacks_room"]) for change in (links or {"last": []})["last"]]

    def await_progress(self):
        deadline = time.monotonic() + 30
        while not self.samples or self.samples[-1][1] < 5:
            if time.monotonic() > deadline:
                sys.exit("error: the job made no progress within 30 s")
            time.sleep(0.1)

    def followed(self, who, changed, lacks_room):
        """Seconds and versions until the threshold followed, and how often it changed since."""
        _, _, changes = self.samples[-1]
        after = [(at, holds) for at, holds in changes[who] if at > changed]
        at = next((at for at, holds in after if holds == lacks_room), None)
        if at is None:
            return None
        return {
            "seconds": round(at - changed, 2),
            "updates": round(self.version_at(at) - self.version_at(changed), 1),
            "changes": len(after),
        }

    def version_at(self, moment):
        """Versions published by then, between the reports beside it."""
        before = [sample for sample in self.samples if sample[0] <= moment][-1]
        after = next((sample for sample in self.samples if sample[0] > moment and sample[1] > before[1]), before)
        if after[0] == before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])

    def __exit__(self, *_):
        self.over.set()
        self.watcher.join()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(10)


if __name__ == "__main__":
    main()
