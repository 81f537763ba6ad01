"""Runs the contenders of a benchmark in processes of their own, and collects what each worker prints."""

import json
import os
import signal
import socket
import subprocess
import sys

RESULT = "RESULT "


def report(result):
    """A worker's last word: a dictionary for the process that runs the contest."""
    print(RESULT + json.dumps(result), flush=True)


def launch_line(workers, servers, mine, *options):
    """The command line that has `mine` run by workers of one job on this machine."""
    return ["paramill", "launch", f"-n{workers}", f"-s{servers}", *options, "--", *mine]


def run_launched(name, line, workers, deadline):
    """Runs a line that starts all workers itself; returns their reports."""
    return _run(name, line, [{}], workers, deadline)


def run_ranked(name, line, workers, deadline):
    """Runs a line once per rank, with the variables that torch.distributed reads; returns the reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(workers)}
    return _run(name, line, [{**shared, "RANK": str(rank)} for rank in range(workers)], workers, deadline)


def own_line(script, **options):
    """The command line of one worker: the script itself, with these options; those that are None are left out."""
    given = ((name.replace("_", "-"), value) for name, value in options.items() if value is not None)
    return [sys.executable, script, *(f"--{name}={value}" for name, value in given)]


def _run(name, line, environments, workers, deadline):
    processes = [
        subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, **each}, start_new_session=True)
        for each in environments
    ]
    try:
        texts = [process.communicate(timeout=deadline)[0] for process in processes]
    finally:
        # A run that took too long would be in the way of the next, with all the processes that it started.
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = [line for text in texts for line in text.splitlines() if RESULT in line]
    reports = [json.loads(line.split(RESULT)[1]) for line in lines]
    if len(reports) != workers or any(process.returncode for process in processes):
        raise SystemExit(f"{name}: {len(reports)} of {workers} workers ended well\n" + "\n".join(texts))
    return reports
