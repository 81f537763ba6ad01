"""A torch job is killed whole, and goes on from its checkpoint with another number of workers, moments of Adam included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

# Long enough for a busy machine, short enough that a test that hangs is noticed.
DEADLINE_S = 120
STEPS, EVERY = 60, 10

# Every worker takes an equal part of the same batch: the mean of their gradients is that of the batch, however many they are.
PROGRAM = """
import json, os, sys, time
import torch
import paramill as pm
from torch import nn

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(24, 2, generator=torch.Generator().manual_seed(2))

def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

def loss_of(model, x=X, y=Y):
    return (model(x) - y).square().mean()

if __name__ == "__main__":
    steps, path, pause = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    job, model = pm.init(), network()
    # Without moments the steps of a job that is resumed would be much longer at first.
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "adam:lr=0.02", job=job)
    rank, workers = job.rank, job.workers
    x, y = X[rank::workers], Y[rank::workers]
    for step in range(job.iteration, steps):
        if rank == 0:
            with open(path, "a") as file, torch.no_grad():
                file.write(json.dumps([step, loss_of(model).item()]) + "\\n")
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        time.sleep(pause)
    optimizer.close()
"""


def kill_all(mark: str) -> None:
    """Ends all processes that have this in their environment as kill -9 does."""
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if mark.encode() in variables:
                    found.append(int(entry.name))
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)


def complete(archive: Path) -> list[str]:
    return sorted(path.parent.name for path in archive.glob("step-*/manifest.json"))


def curve(path: Path) -> dict[int, float]:
    """Loss by step. A line that was torn by the kill is left out."""
    losses = {}
    for line in path.read_text().splitlines():
        if line.endswith("]"):
            step, loss = json.loads(line)
            losses[step] = loss
    return losses


def reference(forgets_at: int = -1) -> dict[int, float]:
    """The losses of torch's own Adam, which forgets its moments at a step."""
    space: dict[str, object] = {"__name__": "program"}
    exec(PROGRAM, space)
    model, loss_of = space["network"](), space["loss_of"]  # type: ignore[operator]
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = {}
    for step in range(STEPS):
        if step == forgets_at:
            adam = torch.optim.Adam(model.parameters(), lr=0.02)
        adam.zero_grad()
        loss = loss_of(model)  # type: ignore[operator]
        losses[step] = loss.item()
        loss.backward()
        adam.step()
    return losses


@pytest.mark.parametrize("workers, servers", [(3, 1), (1, 3)])
def test_moments_of_adam_survive_the_death_of_all(command: str, tmp_path: Path, workers: int, servers: int) -> None:
    program, archive = tmp_path / "program.py", tmp_path / "checkpoints"
    program.write_text(PROGRAM)
    first, second = tmp_path / "first", tmp_path / "second"
    keeping = [f"--checkpoint={archive}", f"--every={EVERY}"]
    training = [sys.executable, str(program), str(STEPS)]
    mark = f"RESUME_TEST=mark-{os.getpid()}-{workers}"
    name, value = mark.split("=")
    line = [command, "launch", "-n2", "-s2", *keeping, "--", *training, str(first), "0.02"]
    job = subprocess.Popen(line, env={**os.environ, name: value})
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(complete(archive)) < 2:
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.01)
    finally:
        kill_all(mark)
        job.wait(DEADLINE_S)
    clock = int(complete(archive)[-1].split("-")[1])
    assert EVERY <= clock < STEPS
    line = [command, "launch", f"-n{workers}", f"-s{servers}", *keeping, "--resume", "--", *training, str(second), "0"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected, resumed = reference(), curve(second)
    assert sorted(resumed) == list(range(clock, STEPS))
    for step, loss in {**curve(first), **resumed}.items():
        assert loss == pytest.approx(expected[step], rel=0.01), step
    # The comparison tells the difference: an Adam without its moments is elsewhere.
    forgetful = reference(forgets_at=clock)
    assert any(forgetful[step] != pytest.approx(expected[step], rel=0.01) for step in resumed)


SAMPLER = """
import json, sys, time
import torch
import paramill as pm

SIZE, EPOCHS, BATCH = 100, 3, 4

if __name__ == "__main__":
    path, pause = sys.argv[1], float(sys.argv[2])
    job, w = pm.init(), torch.nn.Parameter(torch.zeros(3))
    optimizer = pm.torch.DistributedOptimizer([("w", w)], "sgd:lr=0.1", job=job)
    sampler = pm.torch.ShardSampler(range(SIZE), optimizer, per_step=BATCH)
    loader = torch.utils.data.DataLoader(range(SIZE), BATCH, sampler=sampler, drop_last=True)
    with open(f"{path}-{job.rank}", "a") as file:
        for epoch in range(sampler.epoch, EPOCHS):
            for batch in loader:
                file.write(json.dumps([job.iteration, epoch, batch.tolist()]) + "\\n")
                file.flush()
                optimizer.zero_grad()
                w.sum().backward()
                optimizer.step()
                time.sleep(pause)
    optimizer.close()
"""


def batches(path: Path, rank: int) -> list[tuple[int, int, list[int]]]:
    """Step, epoch and samples of every batch that a worker took. A line that was torn by the kill is left out."""
    lines = Path(f"{path}-{rank}").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines if line.endswith("]]")]


@pytest.mark.parametrize("workers", [2, 3])
def test_samplers_go_on_where_they_were(command: str, tmp_path: Path, workers: int) -> None:
    program, archive = tmp_path / "program.py", tmp_path / "checkpoints"
    program.write_text(SAMPLER)
    first, second = tmp_path / "first", tmp_path / "second"
    keeping = [f"--checkpoint={archive}", "--every=5"]
    mark = f"RESUME_TEST=samplers-{os.getpid()}-{workers}"
    name, value = mark.split("=")
    line = [command, "launch", "-n2", *keeping, "--", sys.executable, str(program), str(first), "0.02"]
    job = subprocess.Popen(line, env={**os.environ, name: value})
    try:
        deadline = time.monotonic() + DEADLINE_S
        # In the second epoch, of 12 steps each.
        while not any(name.startswith("step-0000000015") for name in complete(archive)):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.005)
    finally:
        kill_all(mark)
        job.wait(DEADLINE_S)
    clock = int(complete(archive)[-1].split("-")[1])
    line = [command, "launch", f"-n{workers}", *keeping, "--resume", "--", sys.executable, str(program), str(second), "0"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    before = [taken for rank in range(2) for taken in batches(first, rank) if taken[0] < clock]
    after = [taken for rank in range(workers) for taken in batches(second, rank)]
    assert min(step for step, _, _ in after) == clock
    for epoch in range(3):
        taken = [sample for _, of, samples in before + after if of == epoch for sample in samples]
        assert len(taken) == len(set(taken)), "no sample twice in an epoch"
        # What does not make a step of all workers is left out.
        assert len(taken) > 100 - 2 * 4 * workers, epoch
    if workers == 2:
        for rank in range(2):
            whole = [taken for taken in batches(first, rank) if taken[0] < clock] + batches(second, rank)
            orders = [torch.randperm(100, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(3)]
            mine = [order[rank::2][:48] for order in orders]
            assert [sample for _, _, samples in whole for sample in samples] == sum(mine, [])
