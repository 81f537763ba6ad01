"""Conditions written in Python, which rank 0 evaluates for all servers."""

from __future__ import annotations

import threading
from typing import Any, Callable

import numpy as np
import pytest

import paramill as pm

ONES = np.ones(4, np.float32)
# Where the function is to decide, however busy the machine is.
LONG = 30.0


class Pair:
    """A job of two workers in this process; both say the same."""

    def __init__(self, server: pm.Server, timeout: float, function: Callable[[pm.Pull], bool], **said: Any) -> None:
        self.jobs = [pm.init(server.url, rank=rank, timeout=timeout) for rank in (0, 1)]
        texts = [job.condition(function, **said) for job in self.jobs]
        self.tables = [job.table("w", init=np.zeros(4, np.float32), sync=text) for job, text in zip(self.jobs, texts)]
        other = threading.Thread(target=self.jobs[1].start, args=(LONG,))
        other.start()
        self.jobs[0].start(LONG)
        other.join()

    def push(self, rank: int) -> pm.Handle:
        handle = self.tables[rank].push_pull(ONES)
        self.jobs[rank].clock()
        return handle

    def advance(self, rank: int, most: int) -> tuple[int, str]:
        """As many iterations as it may make while the other worker does nothing, up to `most`, and why it made no more."""
        for made in range(most):
            try:
                self.push(rank).wait()
            except TimeoutError as error:
                return made, str(error)
        return most, ""

    def stats(self) -> dict[str, int]:
        """Counts of the servers, added up."""
        tables = [table for shard in self.jobs[0].status(LONG)["shards"] for table in shard["tables"]]
        return {name: sum(table["stats"][name] for table in tables) for name in ("questions", "fallbacks", "dprs")}

    def abandon(self) -> None:
        for job in self.jobs:
            job._abandon()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("lead", "made"), [(0, 1), (1, 2), (-1, 0), (9, 5)])
def test_a_function_says_of_each_pull_whether_it_is_answered(rank: int, lead: int, made: int) -> None:
    seen: list[pm.Pull] = []

    def near(pull: pm.Pull) -> bool:
        seen.append(pull)
        return pull.gap <= lead

    with pm.Server(workers=2, cores=1) as server:
        pair = Pair(server, 1.0, near, deadline=LONG)
        count, why = pair.advance(rank, 5)
        assert count == made, why
        assert made == 5 or "`near` of worker 0 did not hold" in why, why
        assert pair.stats()["fallbacks"] == 0
        pair.abandon()
    first = seen[0]
    assert (first.table, first.worker, first.progress, first.v_train) == ("w", rank, 0, 0)
    assert (first.n, first.count, first.slowest, first.fastest, first.staleness) == (2, 1, -1, 0, 1)
    assert first.significance is None
    progress = {worker.rank: worker.progress for worker in first.workers}
    assert progress == {rank: 0, 1 - rank: -1}


def test_a_pull_that_waits_is_judged_again_when_somebody_has_pushed() -> None:
    with pm.Server(workers=2, cores=1) as server:
        pair = Pair(server, LONG, lambda pull: pull.progress - pull.slowest <= 1, name="near", deadline=LONG)
        pair.push(1).wait()
        ahead = pair.push(1)
        pair.push(0).wait()
        ahead.wait()
        stats = pair.stats()
        assert stats["questions"] >= 2 and stats["fallbacks"] == 0
        pair.abandon()


def test_a_condition_may_look_at_the_size_of_gradients() -> None:
    seen: list[Any] = []

    def small(pull: pm.Pull) -> bool:
        seen.append(pull.significance)
        return True

    with pm.Server(workers=2, cores=1) as server:
        pair = Pair(server, LONG, small, deadline=LONG, significance=True)
        pair.advance(1, 2)
        pair.abandon()
    assert all(isinstance(significance, float) for significance in seen[1:]), seen


def test_the_fallback_decides_when_the_function_is_late() -> None:
    never = threading.Event()

    def slow(pull: pm.Pull) -> bool:
        return never.wait(LONG)

    with pm.Server(workers=2, cores=1) as server:
        pair = Pair(server, 2.0, slow, deadline=0.05, fallback="ssp:s=3")
        count, why = pair.advance(1, 5)
        assert count == 3 and "worker 0 did not evaluate the condition in time" in why, why
        assert pair.stats()["fallbacks"] >= 3
        never.set()
        pair.abandon()


@pytest.mark.parametrize("answer", [None, 2])
def test_the_fallback_decides_when_the_function_fails(answer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def wrong(pull: pm.Pull) -> bool:
        if answer is None:
            raise ValueError("a bug in the condition")
        return answer  # type: ignore[no-any-return]

    with pm.Server(workers=2, cores=1) as server:
        pair = Pair(server, 2.0, wrong, deadline=LONG, fallback="ssp:s=1")
        count, why = pair.advance(1, 5)
        assert count == 1 and "worker 0 could not evaluate the condition" in why, why
        # Read while nobody writes: a line that a thread writes while the capture is read takes the place of another.
        said = capfd.readouterr().err
        pair.abandon()
    expected = "ValueError: a bug in the condition" if answer is None else "a condition returns True or False, not int"
    assert said.count("condition `wrong` failed, its fallback decides") == 1, said
    assert expected in said and ("line" in said or answer is not None), said


def test_what_cannot_be_said_is_refused() -> None:
    with pm.init() as job:
        for said, why in [
            ({"name": "near", "fallback": "bsp"}, "expected asp, ssp, dsps, pssp or when"),
            ({"name": "near", "deadline": 0}, "expected more than 0"),
            ({}, "a lambda has no name of its own: give name= too"),
            ({"name": "a b"}, "expected at most"),
        ]:
            with pytest.raises(pm.errors.PolicyError, match=why):
                job.condition(lambda pull: True, **said)  # type: ignore[arg-type]


def test_a_process_that_trains_alone_has_nobody_to_wait_for() -> None:
    with pm.init() as job:
        w = job.table("w", init=np.zeros(4, np.float32), sync=job.condition(lambda pull: False, name="never"))
        for _ in range(3):
            w.update(ONES)
            job.clock()
            w.sync()
        assert job.iteration == 3


def test_servers_of_a_launcher_ask_rank_0(launch: Callable[..., list[Any]]) -> None:
    program = """
        import time
        job = pm.init()
        near = job.condition(lambda pull: pull.progress - pull.slowest <= 2, name="near", deadline=30)
        w = job.table("w", init=np.zeros(3, np.float32), sync=near, optimizer="sgd:lr=3")
        gradient = np.zeros(3, np.float32)
        gradient[job.rank] = -1
        leads = []
        for step in range(20):
            if job.rank == 2:
                time.sleep(0.005)
            w.update(gradient)
            job.clock()
            w.sync()
            # Each element counts the pushes of one worker.
            leads.append(float(w.values[job.rank] - w.values.min()))
        job.barrier("done")
        tables = [table for shard in job.status()["shards"] for table in shard["tables"]]
        stats = {name: sum(table["stats"][name] for table in tables) for name in ("questions", "fallbacks", "dprs")}
        job.barrier("seen")
        report([max(leads), stats])
        job.close()
    """
    for lead, stats in launch(program, 3, 2):
        assert 0 <= lead <= 2
        assert stats["questions"] > 0 and stats["dprs"] > 0 and stats["fallbacks"] == 0, stats


def test_the_fallback_decides_when_rank_0_has_left(launch: Callable[..., list[Any]]) -> None:
    program = """
        job = pm.init()
        never = job.condition(lambda pull: pull.worker == 0, name="never", deadline=30, fallback="asp")
        w = job.table("w", init=np.zeros(4, np.float32), sync=never)
        job.start()
        if job.rank == 0:
            report(None)
            job.close()
        else:
            for step in range(5):
                w.update(np.ones(4, np.float32))
                job.clock()
                if job.rank == 1:
                    w.sync()
            job.barrier("done")
            report(sum(table["stats"]["fallbacks"] for shard in job.status()["shards"] for table in shard["tables"]))
            job.barrier("seen")
            job.close()
    """
    _, counted, _ = launch(program, 3, 2)
    assert counted > 0
