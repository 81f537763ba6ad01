"""Real server processes and real worker processes, started by the command that users start them with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

import paramill as pm

# Long enough for a busy machine, short enough that a test that hangs is noticed.
DEADLINE_S = 120


@pytest.fixture(scope="session")
def command() -> str:
    """The `paramill` that came with the package, or the one on the path."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("paramill", path=places)
    assert found, "the command `paramill` is not installed; run `cargo xtask python`"
    return found


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher started the tests."""
    for name in list(os.environ):
        if name.startswith(("PARAMILL_", "OMPI_", "PMI_", "SLURM_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def serve(command: str) -> Iterator[Callable[..., str]]:
    """Starts server processes; returns the job's URL."""
    started: list[subprocess.Popen[str]] = []

    def start(workers: int = 1, *arguments: str) -> str:
        line = [command, "--json", "serve", "--listen=127.0.0.1:0", f"--workers={workers}", "--servers=1", *arguments]
        server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        started.append(server)
        assert server.stdout
        return str(json.loads(server.stdout.readline())["url"])

    yield start
    for server in started:
        server.terminate()
        server.wait(DEADLINE_S)


@pytest.fixture
def launch(command: str, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs a program as several workers with `paramill launch`; returns what each one gave to `report`, by rank."""

    def run(program: str, workers: int = 2, servers: int = 1, *arguments: str) -> list[Any]:
        path = tmp_path / "program.py"
        prelude = """
            import json, os, sys
            import numpy as np
            import paramill as pm
            def report(value):
                rank = os.environ["PARAMILL_RANK"]
                with open(os.path.join(os.path.dirname(__file__), f"report.{rank}"), "w") as file:
                    json.dump(value, file)
        """
        path.write_text(textwrap.dedent(prelude) + textwrap.dedent(program))
        line = [command, "launch", f"-n{workers}", f"-s{servers}", *arguments, "--", sys.executable, str(path)]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(workers)]

    return run


@pytest.fixture
def distributed() -> Iterator[Callable[..., Any]]:
    """Optimizers of jobs of their own, closed at the end of the test."""
    made: list[Any] = []

    def make(of: Any, *arguments: Any, **options: Any) -> Any:
        own = {} if "job" in options else {"job": pm.init()}
        averages = hasattr(of, "param_groups")
        kind: Any = pm.torch.AveragingOptimizer if averages else pm.torch.DistributedOptimizer
        made.append(kind(of, *arguments, **own, **options))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are carried by the pump of a device that is emulated: its memory is not that of the slabs, as a GPU's is."""
    pytest.importorskip("torch")
    monkeypatch.setattr("paramill.torch.devices.number_of", lambda device: -1)
