"""What goes wrong is said in words, and in time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import paramill as pm
from paramill import errors


def test_an_unreachable_server_is_named() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        job = pm.init(f"paramill://{address}/run", timeout=0.3)
        job.table("w", init=[0.0])
        with pytest.raises(errors.DeadlineError, match=f"timed out after 0.3 s.*the job to start.*{address}"):
            job.start()
        job._abandon()


def test_a_missing_worker_is_a_deadline(serve: Callable[..., str]) -> None:
    job = pm.init(serve(2), timeout=0.3)
    w = job.table("w", init=[0.0])
    with pytest.raises(TimeoutError, match="waiting for the job to start"):
        w.push(np.ones(1, np.float32))
    job._abandon()


@contextlib.contextmanager
def ctrl_c_is_pressed() -> Iterator[None]:
    # A shell's background jobs ignore the signal, and the tests may be in one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_wait(serve: Callable[..., str]) -> None:
    job = pm.init(serve(2), timeout=60)
    job.table("w", init=[0.0])
    with ctrl_c_is_pressed():
        job.start()
    job._abandon()


def test_arrays_that_do_not_fit(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        w = job.table("w", init=np.zeros((2, 3), np.float32))
        with pytest.raises(errors.ShapeError, match=r"table `w`: expected a gradient of shape \(2, 3\), got \(3, 2\)"):
            w.push(np.zeros((3, 2), np.float32))
        with pytest.raises(errors.DtypeError, match="has dtype float64, expected float32"):
            w.push(np.zeros((2, 3)))
        with pytest.raises(errors.ShapeError, match=r"`out` has shape \(5,\), expected \(2, 3\)"):
            w.pull(np.zeros(5, np.float32))
        with pytest.raises(errors.NonFiniteError, match="has NaN or Inf"):
            w.push(np.full((2, 3), np.nan, np.float32))


def test_tables_that_cannot_be() -> None:
    with pm.init() as job:
        job.table("w", init=[0.0])
        with pytest.raises(errors.TableError, match="table `w` is created twice"):
            job.table("w", init=[0.0])
        with pytest.raises(errors.PolicyError, match="unknown optimizer `sdg`; known: sgd"):
            job.table("v", init=[0.0], optimizer="sdg")
        with pytest.raises(errors.PolicyError, match="reduce: `average`: expected `mean` or `sum`"):
            job.table("v", init=[0.0], reduce="average")
        job.start()
        with pytest.raises(errors.OrderError, match="tables are created before `start`"):
            job.table("v", init=[0.0])


def test_workers_that_declare_different_tables(launch: Callable[..., list[Any]]) -> None:
    program = """
        job = pm.init(timeout=3)
        job.table("w", init=np.zeros(2 + int(os.environ["PARAMILL_RANK"]), np.float32))
        try:
            job.start()
            report("started")
        except pm.errors.TableError as error:
            report(str(error))
        except pm.ParamillError as error:
            report(type(error).__name__)
        job._abandon()
    """
    assert any("declared" in said or "differ" in said for said in launch(program, 2)), "one of them is told"


def test_use_after_close(serve: Callable[..., str]) -> None:
    job = pm.init(serve())
    w = job.table("w", init=[0.0])
    job.start()
    job.close()
    job.close()
    with pytest.raises(errors.ClosedError, match="was closed here"):
        w.push(np.zeros(1, np.float32))
    assert job.closed


def _use_in_child(use: Callable[[], Any], answers: Any) -> None:
    try:
        use()
    except errors.ForkError as error:
        answers.put(str(error))
    else:
        answers.put("no error")


def test_a_fork_is_told_to_spawn(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        w = job.table("w", init=[0.0])
        slab = job.table("lent", init=[0.0]).slab()
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        handle, exchange = w.push_pull(np.ones(1, np.float32)), job.exchange([slab])
        for use in (job.clock, handle.wait, exchange.wait, lambda: handle.due, lambda: exchange.due):
            child = context.Process(target=_use_in_child, args=(use, answers))
            child.start()
            assert "`spawn`" in answers.get(timeout=30)
            child.join(30)
            assert child.exitcode == 0
        job.clock()
        handle.wait()
        exchange.wait()


def test_a_wait_for_a_server_can_be_ended() -> None:
    server = pm.Server(workers=2, quiet=True)
    with ctrl_c_is_pressed():
        server.join()
    joined = threading.Thread(target=server.join, daemon=True)
    joined.start()
    server.stop()
    joined.join(30)
    assert not joined.is_alive(), "another thread may stop it"


def test_a_worker_that_was_declared_dead_is_told(serve: Callable[..., str]) -> None:
    url = serve(2, "--sync=asp")
    program = f"""
import paramill as pm, numpy as np, sys, time
job = pm.init({url!r}, rank=1, timeout=60)
w = job.table("w", init=[0.0])
job.start()
print("ready", flush=True)
sys.stdin.readline()
try:
    while True:
        w.push_pull(np.ones(1, np.float32)).wait()
        job.clock()
except pm.errors.NotAMemberError as error:
    print("told:", error, flush=True)
job._abandon()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin and other.stdout
    with pm.init(url, rank=0) as job:
        w = job.table("w", init=[0.0])
        job.start()
        assert other.stdout.readline() == "ready\n"
        other.send_signal(signal.SIGSTOP)
        # Those who are silent for ten seconds are declared dead; the barrier waits for the living.
        job.barrier("without the other", timeout=60)
        other.send_signal(signal.SIGCONT)
        other.stdin.write("\n")
        other.stdin.flush()
        said = other.stdout.readline()
        assert said.startswith("told:") and "worker 1" in said, said
        other.wait(30)
        w.push_pull(np.ones(1, np.float32)).wait()


def test_what_is_no_url() -> None:
    with pytest.raises(errors.UrlError, match="expected paramill://HOST"):
        pm.init("http://host/job")


def test_codecs_that_do_not_exist_are_refused() -> None:
    with pm.init() as job, pytest.raises(errors.PolicyError, match="unknown codec `zip`; known: "):
        job.table("w", init=[0.0], codec="topk:0.01+zip")
