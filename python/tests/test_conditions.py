"""Consistency models written in Python."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import paramill as pm


def advance(server: pm.Server, called: threading.Event, ahead: int, timeout: float = 0.5) -> int:
    """Rank 1 does nothing, rank 0 makes as many iterations as it may, up to `ahead`; returns how many those were."""
    jobs = [pm.init(server.url, rank=rank, timeout=timeout) for rank in (0, 1)]
    tables = [job.table("w", init=np.zeros(4, np.float32)) for job in jobs]
    other = threading.Thread(target=jobs[1].start)
    other.start()
    jobs[0].start()
    other.join()
    assert called.wait(30), "the callable is asked about the state at the start"
    jobs[0].status()
    made = 0
    try:
        for _ in range(ahead):
            tables[0].push_pull(np.ones(4, np.float32)).wait()
            jobs[0].clock()
            made += 1
    except TimeoutError as error:
        assert "says of table" in str(error), error
    for job in jobs:
        job._abandon()
    return made


@pytest.mark.parametrize(("answer", "made"), [(2, 2), (False, 0), (True, 5)])
def test_a_callable_says_how_far_ahead_a_worker_may_be(answer: Any, made: int) -> None:
    seen: list[dict[str, Any]] = []
    called = threading.Event()

    def condition(state: dict[str, Any]) -> Any:
        seen.append(state)
        called.set()
        return answer

    with pm.Server(workers=2, sync="python:mine", conditions={"mine": pm.Condition(condition)}) as server:
        assert advance(server, called, 5) == made
    assert seen[0]["v_train"] == 0 and seen[0]["n"] == 2
    assert [worker["progress"] for worker in seen[0]["workers"]] == [-1, -1]


def test_the_fallback_decides_when_the_callable_is_late_or_fails(capfd: pytest.CaptureFixture[str]) -> None:
    called, never = threading.Event(), threading.Event()

    def slow(state: dict[str, Any]) -> Any:
        called.set()
        never.wait(30)

    with pm.Server(
        workers=2, sync="python:slow", conditions={"slow": pm.Condition(slow, deadline=0, fallback="ssp:s=3")}
    ) as server:
        assert advance(server, called, 5) == 3
    never.set()
    called.clear()

    def wrong(state: dict[str, Any]) -> Any:
        called.set()
        raise ValueError("a bug in the condition")

    with pm.Server(
        workers=2, sync="python:wrong", conditions={"wrong": pm.Condition(wrong, fallback="ssp:s=1")}
    ) as server:
        assert advance(server, called, 5) == 1
    assert "a bug in the condition" in capfd.readouterr().err


def test_a_fallback_must_make_the_same_steps() -> None:
    with pytest.raises(pm.errors.PolicyError, match="makes steps of rounds"):
        pm.Server(conditions={"mine": pm.Condition(lambda state: 1, fallback="bsp")})
