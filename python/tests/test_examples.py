"""The examples run, stay short, and say how they are run; so do the benchmarks of whole models."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Long enough for a busy machine.
DEADLINE_S = 120
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/python").glob("*.py"))


def run(*line: str, **environment: str) -> str:
    variables = {**os.environ, **environment}
    ended = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, env=variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_short_and_has_help(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 80
    assert "--" in run(sys.executable, str(example), "--help")


def test_a_script_becomes_distributed_by_the_lines_that_the_readme_shows() -> None:
    single, many = (
        (ROOT / "examples/python" / name).read_text().splitlines() for name in ("fashion_mnist_single.py", "fashion_mnist.py")
    )
    changes = [line for line in difflib.ndiff(single, many) if line[0] in "+-"]
    added = [line[2:].strip() for line in changes if line[0] == "+"]
    assert 1 <= len(added) <= 4
    readme = (ROOT / "README.md").read_text()
    for change in changes:
        assert change[0] + change[2:].strip() in readme


def test_numpy_alone_trains_with_two_workers(command: str) -> None:
    program = str(ROOT / "examples/python/numpy_lr.py")
    text = run(command, "launch", "-n2", "-s2", "--", sys.executable, program, "--steps=100")
    accuracies = [float(line.rpartition(" ")[2]) for line in text.splitlines() if "accuracy" in line]
    assert len(accuracies) == 2 and min(accuracies) > 0.9, text


def test_the_cnn_learns_alone() -> None:
    text = run(sys.executable, str(ROOT / "examples/python/fashion_mnist.py"))
    assert float(text.split("accuracy ")[1]) > 0.5, text


def test_the_gpt_benchmark_compares_the_default_with_named_data_cores(command: str) -> None:
    small = ["--layers=1", "--width=64", "--vocabulary=64", "--length=8", "--batch=1", "--steps=2", "--warm-up=1"]
    path = os.pathsep.join([str(Path(command).parent), os.environ["PATH"]])
    line = [sys.executable, str(ROOT / "bench/gpu/gpt.py"), *small, "--rounds=1", "--workers", "1", "--cores", "1"]
    report = json.loads(run(*line, "--skip", "ddp", "--json", PATH=path))
    contenders = [(row["kind"], row["workers"], row["cores"]) for row in report["rows"]]
    assert contenders == [("plain", 1, None), ("paramill", 1, None), ("paramill", 1, 1)]
    assert all(rate > 0 for row in report["rows"] for rate in row["rates"])
    default, named = (row["rates"][0] for row in report["rows"][1:])
    assert report["default_of_best"] == {"1": default / named}
