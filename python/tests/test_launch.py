"""Who a worker is, and what happens where nobody said so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any, Callable

import pytest

import paramill as pm

ALONE = """
import numpy as np, paramill as pm
for name in ("a", "b"):
    with pm.init() as job:
        w = job.table("w", init=np.zeros(2, np.float32), optimizer="sgd:lr=1")
        w.update(np.ones(2, np.float32)); job.clock(); w.sync()
        assert job.alone and job.workers == 1 and w.values.tolist() == [-1, -1]
"""


def test_without_a_server_it_runs_alone_and_says_so_once() -> None:
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("trains alone") == 1 and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("reader", ["full", "gone"])
def test_a_stderr_that_refuses_lines_does_not_end_the_program(reader: str) -> None:
    if reader == "full":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        end, stderr = os.pipe()
        os.close(end)
    ended = subprocess.run([sys.executable, "-c", ALONE], stderr=stderr, timeout=60)
    os.close(stderr)
    assert ended.returncode == 0


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_other_launchers_give_the_rank(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pm.errors.EnvironmentError, match="started 2 workers, but no server is named"):
        pm.init()
    monkeypatch.setenv("PARAMILL_URL", serve(2))
    job = pm.init()
    assert job.rank == 1
    job._abandon()


def test_launched_workers_know_who_they_are(launch: Callable[..., list[Any]]) -> None:
    program = """
        job = pm.init()
        job.table("w", init=[0.0])
        job.start()
        report([job.rank, job.workers, job.alone])
    """
    assert launch(program, 3, 2) == [[rank, 3, False] for rank in range(3)]


def test_a_worker_that_fails_is_dead_to_the_others(serve: Callable[..., str]) -> None:
    url = serve(2)
    program = f"""
import paramill as pm
job = pm.init({url!r}, rank=1)
job.table("w", init=[0.0])
job.start()
raise ValueError("the program's own")
"""
    other = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    with pm.init(url, rank=0) as job:
        job.table("w", init=[0.0])
        job.start()
        _, stderr = other.communicate(timeout=60)
        assert "the program's own" in stderr and "paramill:" not in stderr
        job.barrier("the living", timeout=60)
        states = {worker["worker"]: worker["state"] for worker in job.status()["workers"]}
        assert "ead" in str(states[1]), states


def test_importing_it_does_not_import_torch() -> None:
    program = "import sys, paramill; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_server_waits_for_workers_that_are_started_anew(serve: Callable[..., str]) -> None:
    url = serve(1, "--restart-grace=60s")
    program = f"""
import os, signal, sys
import numpy as np, paramill as pm
job = pm.init({url!r}, rank=0)
w = job.table("w", init=np.zeros(2, np.float32), optimizer="sgd:lr=1")
w.values
for step in range(job.iteration, 4):
    if step == 2 and sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    w.update(np.ones(2, np.float32)); job.clock(); w.sync()
print(w.values.tolist())
job.close()
"""

    def run(fate: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program, fate], capture_output=True, text=True, timeout=60)

    # The only worker dies, and for a while nobody is there.
    assert run("dies").returncode == -signal.SIGKILL
    time.sleep(4)
    ended = run("lives")
    # It goes on in the round that was open at its death.
    assert (ended.returncode, ended.stdout) == (0, "[-4.0, -4.0]\n"), ended.stderr
