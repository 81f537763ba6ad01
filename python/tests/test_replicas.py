"""Servers of a Python process keep copies of each other's shards."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import paramill as pm

# Long enough for a busy machine, short enough that a test that hangs is noticed.
DEADLINE_S = 60

OTHER = """
import sys, paramill as pm
pm.Server.joining(sys.argv[1], cores=1, quiet=True).join()
"""


def test_a_server_that_is_killed_takes_nothing_with_it() -> None:
    with pm.Server(servers=2, replicas=1, cores=1, placement="round_robin", quiet=True) as first:
        other = subprocess.Popen([sys.executable, "-c", OTHER, first.url])
        try:
            with pm.init(first.url) as job:
                tables = [job.table(name, init=np.zeros(8, np.float32), optimizer="sgd:lr=1") for name in "ab"]

                def step() -> None:
                    for table in tables:
                        table.update(np.ones(8, np.float32))
                    job.clock()
                    for table in tables:
                        table.sync()

                for _ in range(3):
                    step()
                deadline = time.monotonic() + DEADLINE_S
                while any(shard["copy"] is None for shard in job.status()["served"]):
                    assert time.monotonic() < deadline, job.status()["served"]
                    step()
                    time.sleep(0.05)
                other.send_signal(signal.SIGKILL)
                for _ in range(3):
                    step()
                assert {shard["server"] for shard in job.status()["served"]} == {0}
                for table in tables:
                    assert table.values.tolist() == [-job.iteration] * 8
        finally:
            other.kill()
            other.wait(DEADLINE_S)


@pytest.mark.parametrize("servers, replicas", [(1, 1), (3, 2)])
def test_copies_that_cannot_be_kept_are_refused(servers: int, replicas: int) -> None:
    with pytest.raises(pm.errors.ParamillError, match=f"replicas = {replicas}: expected 0, or 1 with at least two servers"):
        pm.Server(servers=servers, replicas=replicas)
