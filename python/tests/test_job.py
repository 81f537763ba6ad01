"""Tables, pushes and pulls over real servers, with numpy alone."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable

import numpy as np
import pytest

import paramill as pm


def test_a_worker_trains_against_a_server_process(serve: Callable[..., str]) -> None:
    with pm.init(serve(1, "--optimizer=sgd:lr=0.5")) as job:
        w = job.table("w", init=np.zeros((4, 3), np.float32))
        target = np.arange(12, dtype=np.float32).reshape(4, 3)
        for _ in range(30):
            w.update(w.values - target)
            job.clock()
            w.sync()
        np.testing.assert_allclose(w.values, target, atol=1e-3)
        assert (job.rank, job.workers, job.iteration, job.alone) == (0, 1, 30, False)
        pushed, pulled = (job.report()[key] for key in ("bytes_pushed", "bytes_pulled"))
        assert pushed == 30 * 48 and pulled >= 30 * 48


def test_push_pull_clock_sync_as_in_the_manual(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        w = job.table("w", init=np.ones(5, np.float32), sync="ssp:s=3", optimizer="sgd:lr=1")
        out = np.zeros(5, np.float32)
        w.push(np.full(5, 0.5, np.float32))
        w.pull(out)
        job.clock()
        w.sync()
        assert out.tolist() == [0.5] * 5


def test_two_workers_take_the_mean_of_their_gradients(launch: Callable[..., list[Any]]) -> None:
    program = """
        job = pm.init()
        w = job.table("w", init=np.full(3, float(os.environ["PARAMILL_RANK"]), np.float32), optimizer="sgd:lr=1")
        before = w.values.tolist()
        w.update(np.full(3, 1.0 + 2 * job.rank, np.float32))
        job.clock()
        w.sync()
        job.barrier("end")
        report([before, w.values.tolist(), job.rank, job.workers])
    """
    for rank, (before, after, said, workers) in enumerate(launch(program, 2, 2)):
        assert before == [0.0] * 3, "the initial values of rank 0 count"
        assert after == [-2.0] * 3
        assert (said, workers) == (rank, 2)


def test_a_worker_that_comes_late_begins_where_the_job_is(serve: Callable[..., str]) -> None:
    url = serve(1, "--optimizer=sgd:lr=1")

    def train(job: pm.Job, w: pm.Table, until: int) -> None:
        while job.iteration < until:
            w.update(np.ones(5, np.float32))
            job.clock()
            w.sync()

    began: list[tuple[int, int]] = []

    def join() -> None:
        with pm.init(url) as late:
            own = late.table("w", init=np.ones(5, np.float32))
            late.start()
            began.append((late.rank, late.iteration))
            train(late, own, 40)

    with pm.init(url) as first:
        w = first.table("w", init=np.zeros(5, np.float32))
        first.start()
        train(first, w, 3)
        thread = threading.Thread(target=join)
        thread.start()
        # Two epochs later its first clock is known, and it is waited for from then on.
        while first.status()["epoch"] < 3:
            time.sleep(0.01)
        train(first, w, 40)
        thread.join()
        (rank, iteration) = began[0]
        assert rank == 1 and 3 <= iteration < 40
        assert w.values.tolist() == [-40.0] * 5, "every round made one step, whoever took part in it"


def test_slabs_are_exchanged_where_they_are(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        tables = [job.table(f"t{i}", init=np.zeros(10_000, np.float32), optimizer="sgd:lr=1") for i in range(3)]
        slabs = [table.slab() for table in tables]
        grads, values = [slab.gradient for slab in slabs], [slab.values for slab in slabs]
        for step in range(1, 4):
            for number, grad in enumerate(grads):
                grad[:] = -number
            exchange = job.exchange(slabs)
            job.clock()
            exchange.wait()
            for number, value in enumerate(values):
                assert (value == step * number).all(), "the same array has the new parameters"
        with pytest.raises(pm.errors.OrderError, match="lent as a slab"):
            tables[0].push(grads[0])


def test_updates_are_held_back_and_flushed(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        table = job.table("w", init=np.zeros(10_000, np.float32), optimizer="sgd:lr=1", hold="when:true,most=2")
        lent = job.table("v", init=np.zeros(10_000, np.float32), optimizer="sgd:lr=1", hold="when:held < 1")
        slab, found = lent.slab(), []
        for _ in range(4):
            table.update(np.full(10_000, -1, np.float32))
            slab.gradient[:] = -1
            exchange = job.exchange([slab])
            job.clock()
            exchange.wait()
            table.sync()
            found.append((table.values[0], slab.values[0]))
        assert found == [(0, 0), (0, 2), (3, 2), (3, 4)]
        report = job.report()
        assert report["updates"] == {"sent": 3, "held": 5, "longest": 2}
        assert report["holding"].startswith("holds an update of table `w` back")
        job.flush()
        assert (table.pull_now().wait() == 4).all(), "nothing is lost"
        assert job.report()["holding"] is None and job.iteration == 5


def test_small_tables_travel_together_and_are_used_as_others(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        own = job.table("own", init=np.ones(2, np.float32), alone=True, optimizer="sgd:lr=1")
        tables = [job.table(f"t{i}", init=np.full((2, 3), i, np.float32), optimizer="sgd:lr=1") for i in range(12)]
        before = tables[7].values
        for number, table in enumerate(tables):
            assert (table.values == number).all() and table.values.shape == (2, 3)
            table.update(np.full((2, 3), -1, np.float32))
        job.clock()
        for number, table in enumerate(tables):
            table.sync()
            assert (table.values == number + 1).all()
        assert (before == 7).all() and tables[7].values.base is not None
        assert [pack["layers"] for pack in job.status()["packs"]] == [[f"t{i}" for i in range(12)]]
        out = np.empty((2, 3), np.float32)
        tables[3].push(np.ones((2, 3), np.float32)).wait()
        assert (tables[3].pull(out).wait() == 3).all() and (tables[4].pull_now().wait() == 5).all()
        with pytest.raises(pm.errors.OrderError, match="`t4` is given its gradient too late.*create the table `alone`"):
            tables[4].update(np.ones((2, 3), np.float32))
        with pytest.raises(pm.errors.OrderError, match="create it `alone`"):
            tables[4].slab()
        slab = own.slab()
        slab.gradient[:] = 1
        job.exchange([slab]).wait()
        assert slab.values.tolist() == [0.0, 0.0]


def test_arrays_outlive_slabs_tables_and_the_job(serve: Callable[..., str]) -> None:
    job = pm.init(serve())
    table = job.table("w", init=np.arange(100_000, dtype=np.float32))
    slab = table.slab()
    value, grad = slab.values, slab.gradient
    job.close()
    del job, table, slab
    grad[:] = 7
    assert value[-1] == 99_999 and grad.sum() == 700_000


def test_values_are_a_snapshot_and_not_to_be_written(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        w = job.table("w", init=np.ones(2000, np.float32), optimizer="sgd:lr=1")
        before = w.values
        w.update(np.ones(2000, np.float32))
        job.clock()
        w.sync()
        assert before.max() == 1 and w.values.max() == 0
        with pytest.raises(ValueError, match="read-only"):
            before[0] = 3


def test_rows_of_a_sparse_table(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        e = job.table("e", init=np.zeros((10, 4), np.float32), rows=True, optimizer="sgd:lr=1")
        e.push(np.full((2, 4), -1, np.float32), rows=[2, 7])
        job.clock()
        e.sync()
        rows = e.rows([1, 2, 7]).wait()
        assert rows is not None and rows[:, 0].tolist() == [0, 1, 1]
        whole = e.pull_now().wait()
        assert whole is not None and whole.sum() == 8
        with pytest.raises(pm.errors.ShapeError, match="strictly ascending"):
            e.rows([3, 1])


@pytest.mark.parametrize("codec", ["none", "dvf:delta=1e-4", "f16"])
def test_rows_of_a_table_that_is_broadcast(launch: Callable[..., list[Any]], codec: str) -> None:
    program = """
        job = pm.init()
        e = job.table("e", init=np.zeros((10, 4), np.float32), rows=True)
        d = job.table("d", init=np.zeros(3, np.float32))
        for _ in range(3):
            e.push(np.full((2, 4), -1.0, np.float32), rows=[2 + job.rank, 7])
            d.update(np.full(3, -1.0, np.float32))
            job.clock()
            d.sync()
            rows = e.rows([1, 2, 3, 7]).wait()
        report([rows[:, 0].tolist(), d.values.tolist()])
    """
    arguments = ("--broadcast=chain", "--optimizer=sgd:lr=1", f"--answer-codec={codec}")
    for rows, dense in launch(program, 2, 2, *arguments):
        assert rows == [0, 1.5, 1.5, 3] and dense == [3] * 3


def test_what_is_pulled_is_put_where_it_is_wanted(serve: Callable[..., str]) -> None:
    with pm.init(serve()) as job:
        w = job.table("w", init=np.ones((2, 3), np.float32), optimizer="sgd:lr=1")
        e = job.table("e", init=np.arange(8, dtype=np.float32).reshape(4, 2), rows=True)
        assert (w.sparse, e.sparse) == (False, True)
        out, rows = np.zeros(6, np.float32), np.zeros((2, 2), np.float32)
        assert w.push_pull(np.ones((2, 3), np.float32), out).wait() is out and out.tolist() == [0.0] * 6
        out[:] = 5
        assert w.pull_now(out).wait() is out and out.tolist() == [0.0] * 6
        handle = e.rows([1, 3], rows)
        assert handle.wait() is rows and rows.tolist() == [[2, 3], [6, 7]]
        assert handle.due and handle.wait() is rows, "once it was waited for, it knows what it brought"
        with pytest.raises(pm.errors.ShapeError, match="`out` has shape"):
            e.rows([1], rows)


def test_factors_travel_instead_of_their_product(serve: Callable[..., str]) -> None:
    generator = np.random.default_rng(0)
    errors = generator.standard_normal((64, 2)).astype(np.float32)
    inputs = generator.standard_normal((2, 64)).astype(np.float32)
    with pm.init(serve(1, "--optimizer=sgd:lr=1")) as job:
        w = job.table("w", init=np.zeros((64, 64), np.float32), codec="factors")
        w.update(errors @ inputs, factors=(errors, inputs))
        job.clock()
        w.sync()
        np.testing.assert_allclose(w.values, -(errors @ inputs), rtol=1e-5, atol=1e-6)
        assert job.report()["bytes_pushed"] < 64 * 64 * 4 / 4
        with pytest.raises(pm.errors.ShapeError, match=r"expected factors of shapes \(64, K\) and \(K, 64\)"):
            w.push(errors @ inputs, factors=(errors[:3], inputs))
        with pytest.raises(pm.errors.ShapeError, match="of single rows or a product"):
            w.push(errors @ inputs, rows=[1], factors=(errors, inputs))


def test_every_wait_takes_a_time_out_of_its_own(serve: Callable[..., str]) -> None:
    url = serve(2)
    jobs = [pm.init(url, rank=rank, timeout=600) for rank in (0, 1)]
    tables = [job.table("w", init=[0.0]) for job in jobs]
    assert jobs[0].timeout == 600
    with pytest.raises(pm.errors.DeadlineError, match="timed out after 0.1 s"):
        jobs[0].start(timeout=0.1)
    other = threading.Thread(target=jobs[1].start)
    other.start()
    jobs[0].start()
    other.join()
    tables[0].update(np.ones(1, np.float32))
    arrived = jobs[0].arrive("here")
    for wait in (tables[0].sync, arrived.wait, lambda timeout: jobs[0].barrier("there", timeout)):
        with pytest.raises(pm.errors.DeadlineError, match="timed out after 0.1 s"):
            wait(timeout=0.1)
    tables[1].update(np.ones(1, np.float32))
    jobs[1].barrier("here", timeout=60)
    tables[0].sync(timeout=60)
    arrived.wait(timeout=60)
    assert jobs[0].status(timeout=60)["phase"] == "running with 2 workers"
    for job in jobs:
        job.close(timeout=60)


def test_placement_says_which_server_holds_what() -> None:
    with pm.Server(servers=2, cores=1, placement="round_robin", quiet=True) as first:
        with pm.Server.joining(first.url, cores=1, quiet=True), pm.init(first.url) as job:
            for name in ("a", "b", "c"):
                job.table(name, init=np.zeros(100, np.float32))
            job.start()
            held = [sorted(table["name"] for table in shard["tables"]) for shard in job.status()["shards"]]
            assert held == [["a", "c"], ["b"]]
            with pytest.raises(pm.errors.PolicyError, match="parameters stay on the servers"):
                job.set(placement="greedy")


def test_a_push_condition_closes_rounds_early(serve: Callable[..., str]) -> None:
    url = serve(2, "--optimizer=sgd:lr=1")
    jobs = [pm.init(url, rank=rank, timeout=60) for rank in (0, 1)]
    tables = [job.table("w", init=[0.0], sync="when:pull=gap < 0,push=count >= n - 1") for job in jobs]
    other = threading.Thread(target=jobs[1].start)
    other.start()
    jobs[0].start()
    other.join()
    for _ in range(3):
        tables[0].update(np.ones(1, np.float32))
        jobs[0].clock()
        tables[0].sync()
    version = [table["version"] for shard in jobs[0].status()["shards"] for table in shard["tables"]]
    assert version == [3], "the rounds closed without the other worker"
    for job in jobs:
        job.close()


def test_anything_with_a_buffer_or_dlpack_is_an_array() -> None:
    from paramill.arrays import as_array, as_output

    memory = bytearray(16)
    view = as_array(memoryview(memory).cast("f"), "x")
    memory[3] = 0x40
    assert view[0] == 2.0, "the buffer itself, not a copy of it"

    class Exporter:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    own = np.ones(3, np.float32)
    assert np.shares_memory(as_array(Exporter(own), "x"), own)
    assert np.shares_memory(as_output(own, (3,), "x"), own)


def test_chunks_of_any_size_train_the_same() -> None:
    def train(chunk: str) -> list[float]:
        with pm.Server(chunk=chunk) as server, pm.init(server.url) as job:
            w = job.table("w", init=np.zeros(5000, np.float32), optimizer="sgd:lr=0.5")
            for _ in range(2):
                w.update(w.values - np.arange(5000, dtype=np.float32))
                job.clock()
                w.sync()
            values: list[float] = w.values.tolist()
            return values

    assert train("4KB") == train("32KB") == train("1MB")
    with pytest.raises(pm.errors.PolicyError, match="chunk: `3MB`: expected 4B to 2MB"):
        pm.Server(chunk="3MB")
    with pm.init() as job, pytest.raises(pm.errors.PolicyError, match="unknown policy `cdoec`; known: sync, placement"):
        job.table("w", init=[0.0], cdoec="none")  # type: ignore[call-arg]


def test_optimizers_can_be_changed_while_running(serve: Callable[..., str]) -> None:
    with pm.init(serve(1, "--optimizer=momentum:lr=1")) as job:
        w = job.table("w", init=np.zeros(2, np.float32))
        job.start()
        sentence = job.set(optimizer="momentum:lr=0.25,beta=0")
        assert sentence == "1 table now has optimizer=momentum:lr=0.25,beta=0 on all servers"
        w.update(np.ones(2, np.float32))
        job.clock()
        w.sync()
        assert w.values.tolist() == [-0.25, -0.25]
        with pytest.raises(pm.errors.PolicyError, match="but not the rule"):
            job.set(optimizer="adam:lr=1")
        assert "1 table now has sync=asp on server 0" in job.set(sync="asp", table="w*", server=0)
        with pytest.raises(pm.errors.PolicyError, match="`reduce` cannot be changed while a job runs: gradients of the open"):
            job.set(reduce="sum")
        with pytest.raises(pm.errors.PolicyError, match="unknown policy `snyc`; known: sync, placement, optimizer"):
            job.set(snyc="asp")  # type: ignore[call-arg]
        assert job.status()["shards"][0]["tables"][0]["name"] == "w"


def test_codecs_can_be_changed_while_running(serve: Callable[..., str]) -> None:
    with pm.init(serve(1, "--optimizer=sgd:lr=1", "--codec=topk:0.01")) as job:
        w = job.table("w", init=np.zeros(1000, np.float32))
        job.start()

        def step(gradient: float) -> int:
            before = job.status()["shards"][0]["bytes_pushed"]
            w.update(np.full(1000, gradient, np.float32))
            job.clock()
            w.sync()
            return int(job.status()["shards"][0]["bytes_pushed"]) - int(before)

        assert step(1.0) < 400
        assert job.set(codec="none", answer_codec="f16") == "1 table now has codec=none, answer_codec=f16 on all servers"
        # The worker may hear of it after the first of these. What was kept back arrives with the second at the latest.
        sent = [step(1.0) for _ in range(3)]
        assert sent[-1] == 4000 and w.values.tolist() == [-4.0] * 1000
        with pytest.raises(pm.errors.PolicyError, match="unknown codec `toppk`"):
            job.set(codec="toppk:0.1")


def test_waits_let_other_threads_run(serve: Callable[..., str]) -> None:
    job = pm.init(serve(2), timeout=30)
    job.table("w", init=[0.0])
    ran = threading.Event()
    waiter = threading.Thread(target=lambda: (ran.wait(20), job._abandon()))
    waiter.start()
    ran.set()
    with pytest.raises(pm.errors.ClosedError):
        job.start()  # The other worker never comes; the other thread ends the wait.
    waiter.join()


def test_a_job_that_cannot_be_closed_in_good_order_is_left(serve: Callable[..., str]) -> None:
    job = pm.init(serve())
    job.table("w", init=[0.0])
    job.start()

    def fail() -> None:
        raise pm.errors.DeadlineError("no answer")

    job._before_close.append(fail)
    with pytest.raises(pm.errors.DeadlineError, match="no answer"):
        job.close()
    assert job.closed, "the others do not wait for it"


def test_a_star_import_needs_no_torch() -> None:
    assert "torch" not in pm.__all__


@pytest.mark.parametrize("optimizer", ["lars:lr=0.1", "sgd:lr=0.1,clip=1"])
def test_the_number_of_cpus_does_not_change_what_norms_are_of(optimizer: str) -> None:
    """A table was cut over data cores, and its gradient clipped once for each of them."""

    def train(cores: int) -> np.ndarray:
        with pm.Server(optimizer=optimizer, cores=cores) as server, pm.init(server.url) as job:
            table = job.table("w", init=np.linspace(-1, 2, 100_000, dtype=np.float32))
            for step in range(3):
                table.update(np.linspace(3, step, 100_000, dtype=np.float32))
                job.clock()
                table.sync()
            return table.values.copy()

    np.testing.assert_allclose(train(4), train(1), rtol=1e-6)
