"""A worker's membership in a job, its tables, and what is under way."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from . import _native
from ._native import Pull
from .arrays import FloatArray, as_array, as_output, as_rows
from .errors import EnvironmentError, PolicyError, ShapeError
from .policies import Policies

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Two matrices whose product a gradient is.
Factors = Tuple[Any, Any]
# What a handle's wait returns, from what the native one brought.
Bring = Callable[[Optional[FloatArray]], FloatArray]

DEFAULT_TIMEOUT = 60.0
_told_alone = False


def init(
    url: Optional[str] = None,
    *,
    rank: Optional[int] = None,
    timeout: float = DEFAULT_TIMEOUT,
    transport: Optional[str] = None,
    aggregator: Optional[str] = None,
    rate: Optional[str] = None,
) -> Job:
    """Joins the job at `url`, such as ``paramill://host:7070/run42``.

    Without a URL the environment of a launcher names the job (``PARAMILL_URL``). Without that, this process trains alone,
    with a server inside, and says so once. The rank is the one given, or the launcher's (``paramill launch``, torchrun,
    MPI, Slurm), or the coordinator's choice. `timeout` is in seconds, and holds for every wait that is given none of its own.
    `rate`, such as ``"800Mbit"``, is what this worker sends at most over TCP; what goes through shared memory does not count.

    Create tables next. The first push, pull or ``start`` waits until all workers and servers are here.
    """
    identity = _native.identity()
    if url is not None or _names_a_job():
        return Job(
            _native.Job(url, rank=rank, timeout=timeout, transport=transport, aggregator=aggregator, rate=rate)
        )
    if identity is not None and (identity[1] or 1) > 1:
        raise EnvironmentError(
            f"{identity[2]} started {identity[1]} workers, but no server is named: run `paramill serve --workers "
            f"{identity[1]}` (with `--host ADDRESS` for workers on other machines) and set PARAMILL_URL to what it prints"
        )
    server = _native.Server(
        "alone",
        listen="127.0.0.1:0",
        workers=1,
        servers=1,
        cores=None,
        policies={},
        seed=1,
        quiet=True,
    )
    _say_alone()
    native = _native.Job(server.url, rank=0, timeout=timeout, transport=transport, aggregator=None, rate=rate)
    return Job(native, server)


def _names_a_job() -> bool:
    return _native.environment_url() is not None


def _say_alone() -> None:
    global _told_alone
    if not _told_alone:
        _told_alone = True
        text = "no server is named: this process trains alone (paramill launch -n 4 -- python ..., or PARAMILL_URL)"
        _say(text)


def _say(text: str) -> None:
    """Writes a line to stderr. Where that fails (its reader is gone, its disk full), the line is lost and training goes on."""
    line = f"paramill: {text}\n"
    if sys.stderr is None:
        return
    is_the_interpreter_s = sys.stderr is sys.__stderr__
    with contextlib.suppress(OSError, ValueError):
        if is_the_interpreter_s:
            # Past the buffer: the interpreter would try to write what is left there when it ends, and exit with 120.
            os.write(sys.stderr.fileno(), line.encode())
        else:
            sys.stderr.write(line)


class Job:
    """A worker of a job. Made by :func:`init`; closed at the end of a ``with`` block, or when the program ends.

    >>> import paramill as pm
    >>> with pm.init() as job:
    ...     w = job.table("w", init=[1.0, 2.0])
    ...     w.values.tolist()
    [1.0, 2.0]
    """

    def __init__(self, native: _native.Job, server: Optional[_native.Server] = None) -> None:
        self._native = native
        self._server = server
        self._started = False
        self._tables: dict[str, Table] = {}
        # Set by an optimizer that trains in this job: there is no room for a second one.
        self._has_optimizer = False
        # What is under way is waited for before the others are left.
        self._before_close: list[Callable[[], None]] = []
        open_jobs.add(self)

    @property
    def url(self) -> str:
        """Where the job is."""
        return self._native.url

    @property
    def alone(self) -> bool:
        """Whether this process trains alone, with a server inside."""
        return self._server is not None

    @property
    def timeout(self) -> float:
        """Seconds that waits take at most, unless they are given a time-out of their own."""
        return self._native.timeout

    @property
    def rank(self) -> int:
        """This worker's number, from 0. Waits for the start if the coordinator chooses it."""
        rank = self._native.rank
        if rank is None:
            self.start()
            rank = self._native.rank
        assert rank is not None, "a worker that started has a rank"
        return rank

    @property
    def workers(self) -> int:
        """How many workers the job has. Waits for the start."""
        self.start()
        workers = self._native.workers
        assert workers is not None, "a job that started has workers"
        return workers

    @property
    def iteration(self) -> int:
        """The iteration that the next gradients are of: completed ones, and those left out, as `quorum` does with closed rounds."""
        return self._native.iteration

    def set_samples(self, samples: int) -> None:
        """Gradients pushed from now on are the mean of so many samples: their weight in the mean over workers, 1 unless set.

        Tables with `reduce="sum"`, and aggregators, refuse other weights than 1.
        """
        self._native.set_samples(samples)

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables, by name."""
        return self._tables

    def table(
        self,
        name: str,
        *,
        init: Any,
        rows: bool = False,
        alone: bool = False,
        layers: Optional[Sequence[tuple[str, int, Sequence[int]]]] = None,
        **policies: Unpack[Policies],
    ) -> Table:
        """Creates a table with its initial values; those of rank 0 count. All workers create the same, in the same order.

        Policies (:class:`paramill.policies.Policies`) that are not given are the job's. A table with `rows` is pushed and pulled by single rows of its first
        dimension. Several tensors may travel as one table of one dimension: `layers` are then their names, first elements and shapes.
        Policies by name, norms of an optimizer and codecs of layers know them.

        Eight or more small tables (at most 4096 elements, without `rows`) travel together. Their gradients leave when all of them are
        given, at :meth:`clock`, at a barrier, or when one of them is waited for; a table that is given one later in the same
        iteration refuses it. A table that is used at other times than the rest, or is lent as a slab, is created `alone`.

        >>> import paramill as pm
        >>> job = pm.init()
        >>> job.table("w", init=[0.0], sync="sps")
        Traceback (most recent call last):
        paramill.errors.PolicyError: unknown consistency model `sps`; known: bsp, asp, ssp, dsps, drop, pssp, psp, quorum, when, remote
        >>> job.close()
        """
        if isinstance(init, (list, tuple, float, int)):
            init = np.asarray(init, np.float32)
        initial = as_array(init, f"the initial value of table `{name}`")
        shape = tuple(int(side) for side in np.shape(initial))
        if rows and len(shape) < 2:
            raise ShapeError(f"table `{name}` of shape {shape}: a table with rows has at least two dimensions")
        native = self._native.table(name, list(shape), initial, rows=rows, policies=policies, alone=alone, layers=layers)
        table = Table(self, native, name, shape, rows)
        self._tables[name] = table
        return table

    def condition(
        self,
        function: Callable[[Pull], bool],
        *,
        name: Optional[str] = None,
        deadline: float = 0.1,
        fallback: str = "ssp:s=3",
        significance: bool = False,
    ) -> str:
        """A consistency model of your own: `function` says of each pull whether it is answered now (True) or waits (False).

        Returns the text of the model, for ``sync`` of a table or of :meth:`set`. All workers say the same; the function is called in
        the process of rank 0, for all servers, wherever they run. It sees the pull and the state of its table on the server that asks
        (:class:`Pull`), and is asked again about a pull that waits whenever a worker has pushed since.

        It runs on a thread of its own, one pull after another. Where it takes longer than `deadline` seconds, raises, or rank 0
        is gone, the model `fallback` decides about the pull, and :meth:`status` says so. A pull that nothing is missing for is answered
        without being asked about. With `significance`, servers measure ``|g| / |w|`` of every push.

        >>> import paramill as pm
        >>> job = pm.init()
        >>> near = job.condition(lambda pull: pull.progress - pull.slowest <= 2, name="near", fallback="asp")
        >>> near
        'remote:near,deadline=0.1,fallback=(asp)'
        >>> w = job.table("w", init=[0.0], sync=near)
        >>> job.close()
        """
        name = name or str(getattr(function, "__name__", "condition"))
        if name == "<lambda>":
            raise PolicyError("a lambda has no name of its own: give name= too")
        text = f"remote:{name},deadline={deadline},fallback=({fallback})" + (",significance=true" if significance else "")
        _native.check_policies({"sync": text})
        self._native.condition(name, function)
        return text

    def _groups(self, tensors: Sequence[tuple[str, int]], policies: Policies) -> list[int]:
        """For each name and number of elements the number of its group: tensors of one group may be the layers of one table."""
        return self._native.groups(list(tensors), policies=policies)

    def start(self, timeout: Optional[float] = None) -> None:
        """Waits until all workers and servers are here and initial values are exchanged; does nothing when they are."""
        if not self._started:
            self._native.start(timeout)
            self._started = True

    def clock(self) -> None:
        """Ends the iteration."""
        self.start()
        self._native.clock()

    def flush(self) -> None:
        """Sends the updates that the policy ``hold`` holds back, in an iteration of their own.

        All workers call it after the same iteration, at the end of training. Without that policy it does nothing, and
        :meth:`close` sends what is held back too.
        """
        self.start()
        self._native.flush()

    def exchange(self, slabs: Sequence[Slab]) -> Handle:
        """Sends the gradients in `slabs` and asks for the parameters that follow them, without copying either.

        >>> import paramill as pm
        >>> job = pm.init()
        >>> slab = job.table("w", init=[1.0, 2.0], optimizer="sgd:lr=1").slab()
        >>> slab.gradient[:] = [0.5, 0.5]
        >>> exchange = job.exchange([slab])
        >>> job.clock()
        >>> exchange.wait()
        >>> slab.values.tolist()
        [0.5, 1.5]
        >>> job.close()
        """
        self.start()
        taken = list(slabs)

        def look() -> None:
            for slab in taken:
                slab._look()

        return Handle(self._native.exchange([slab._native for slab in taken]), done=look)

    def barrier(self, name: str = "barrier", timeout: Optional[float] = None) -> None:
        """Waits for all live workers to come to the same name."""
        self.arrive(name).wait(timeout)

    def arrive(self, name: str = "barrier") -> Handle:
        """Says that this worker is at a barrier; the handle is due when all live workers are."""
        self.start()
        return Handle(self._native.arrive(name))

    def status(self, timeout: Optional[float] = None) -> dict[str, Any]:
        """How the job stands: workers, servers, tables, who waits and why."""
        status: dict[str, Any] = json.loads(self._native.status(timeout))
        return status

    def report(self) -> dict[str, Any]:
        """What this worker did so far: ``bytes_pushed`` and ``bytes_pulled`` (of gradients and of parameters), ``clock``, ...
        Where tables are broadcast, ``bytes_relayed`` were passed on to other workers.

        >>> import paramill as pm
        >>> job = pm.init()
        >>> job.report()["bytes_pushed"]
        0
        >>> job.close()
        """
        report: dict[str, Any] = json.loads(self._native.report())
        return report

    def set(self, *, table: str = "*", server: Optional[int] = None, **policies: Unpack[Policies]) -> str:
        """Changes policies of the tables that match, for all workers, while the job runs. Returns what was done, in words.

        On return all servers follow them. What cannot change while a job runs is refused, with the reason.

        >>> import paramill as pm
        >>> job = pm.init()
        >>> w = job.table("w", init=[0.0])
        >>> job.set(sync="asp", optimizer="sgd:lr=0.01")
        '1 table now has sync=asp, optimizer=sgd:lr=0.01 on all servers'
        >>> job.close()
        """
        self.start()
        return self._native.set(table, server, policies)

    def checkpoint(self, file: Optional[Union[str, os.PathLike[str]]] = None, *, timeout: Optional[float] = None) -> str:
        """Has the job make a checkpoint where its servers keep them (``--checkpoint DIR``), or in a `file` of this machine, also where
        they keep none (``--resume FILE`` goes on from it). Returns its name, in words, once it is complete.

        Saved is a version that comes soon, or the present one where all workers rest: call it on one worker, and let the others go on.
        """
        self.start()
        return self._native.checkpoint(timeout, None if file is None else os.fspath(file))

    def note(self, name: str, note: bytes) -> None:
        """Has a few bytes saved with checkpoints from now on, in place of those of the same `name`: a position in the data, say.

        A checkpoint of an iteration has what was noted when :meth:`clock` began it. No bytes remove the note.
        """
        self._native.note(name, note)

    def noted(self, name: str) -> Optional[bytes]:
        """What was noted under a `name` when the checkpoint was made that the job goes on from (``--resume``), if there is one.

        It is the note of the same rank; where there were fewer workers, that of the rank modulo their number.
        """
        self.start()
        return self._native.noted(name)

    def close(self, timeout: Optional[float] = None) -> None:
        """Leaves in good order; the others go on without this worker. Closing twice is one close."""
        open_jobs.discard(self)
        try:
            while self._before_close and not self.closed:
                self._before_close.pop()()
        except BaseException:
            # The others are not to wait for a worker that will not come back.
            self._abandon()
            raise
        try:
            self._native.close(timeout)
        finally:
            if self._server is not None:
                self._server.stop()

    @property
    def closed(self) -> bool:
        """Whether the job was closed here."""
        return self._native.closed

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            # The others are to know that this worker failed.
            self._abandon()

    def _abandon(self) -> None:
        open_jobs.discard(self)
        self._native.abandon()
        if self._server is not None:
            self._server.stop()

    def __repr__(self) -> str:
        return f"<paramill.Job {self.url}{' (closed)' if self.closed else ''}>"


class Table:
    """What is trained: an array that lives on the servers. Made by :meth:`Job.table`.

    Pushes and pulls return at once, with a :class:`Handle`; :meth:`sync` waits for all of them.

    >>> import numpy as np, paramill as pm
    >>> job = pm.init()
    >>> w = job.table("w", init=np.ones((2, 2), np.float32), optimizer="sgd:lr=1")
    >>> out = np.empty((2, 2), np.float32)
    >>> _ = w.push(np.full((2, 2), 0.25, np.float32)), w.pull(out)
    >>> job.clock()
    >>> w.sync()
    >>> out.tolist()
    [[0.75, 0.75], [0.75, 0.75]]
    >>> job.close()
    """

    def __init__(self, job: Job, native: _native.Table, name: str, shape: tuple[int, ...], sparse: bool) -> None:
        self._job = job
        self._native = native
        self._pending: list[Handle] = []
        self.name = name
        self.shape = shape
        #: Whether it is pushed and pulled by single rows.
        self.sparse = sparse

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)

    @property
    def values(self) -> FloatArray:
        """The parameters as last pulled, to be read. They are not copied, and do not change."""
        self._job.start()
        return self._native.values().reshape(self.shape)

    def push(self, gradient: Any, *, rows: Any = None, factors: Optional[Factors] = None) -> Handle:
        """Sends a gradient of the current iteration; of single `rows` of a sparse table.

        `factors` are two matrices whose product the gradient is, row by row: of shapes (rows, K) and (K, columns). They travel
        instead of it where the table's codec is ``factors`` and they are shorter.

        >>> import numpy as np, paramill as pm
        >>> job = pm.init()
        >>> w = job.table("w", init=np.zeros((2, 3), np.float32), optimizer="sgd:lr=1", codec="factors")
        >>> errors, inputs = np.array([[1], [2]], np.float32), np.array([[1, 0, -1]], np.float32)
        >>> w.update(errors @ inputs, factors=(errors, inputs))
        >>> job.clock()
        >>> w.sync()
        >>> w.values.tolist()
        [[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0]]
        >>> job.close()
        """
        if rows is None:
            return self._send(gradient, factors, want=False)
        if factors is not None:
            raise ShapeError(f"table `{self.name}`: a gradient is of single rows or a product, not both")
        self._job.start()
        array = as_array(gradient, f"the gradient of table `{self.name}`")
        return self._remember(Handle(self._native.push_rows(as_rows(rows), array)))

    def push_pull(self, gradient: Any, out: Any = None, *, factors: Optional[Factors] = None) -> Handle:
        """Sends a gradient and asks for the parameters that follow it, in one round."""
        target = None if out is None else as_output(out, self.shape, "`out`")
        handle = self._send(gradient, factors, want=True)
        handle._bring = self._brings(target)
        return handle

    def pull(self, out: Any = None) -> Handle:
        """Asks for the parameters; they are in `out` after the wait, and what the handle's ``wait`` returns."""
        self._job.start()
        target = None if out is None else as_output(out, self.shape, "`out`")
        return self._remember(Handle(self._native.pull(), self._brings(target)))

    def pull_now(self, out: Any = None) -> Handle:
        """Like :meth:`pull`, for what is there now, whatever the consistency model; for evaluation."""
        return self._ask(self._native.pull_now, self.shape, out)

    def rows(self, rows: Any, out: Any = None) -> Handle:
        """Like :meth:`pull`, for single rows of a sparse table, strictly ascending.

        >>> import numpy as np, paramill as pm
        >>> job = pm.init()
        >>> e = job.table("e", init=np.arange(6, dtype=np.float32).reshape(3, 2), rows=True)
        >>> e.rows([0, 2]).wait().tolist()
        [[0.0, 1.0], [4.0, 5.0]]
        >>> job.close()
        """
        numbers = as_rows(rows)
        return self._ask(lambda: self._native.rows(numbers), (len(numbers), *self.shape[1:]), out)

    def update(self, gradient: Any, *, factors: Optional[Factors] = None) -> None:
        """Like :meth:`push_pull`, for those who read :attr:`values` after :meth:`sync`.

        What it raises is about this gradient, which was then not sent. An update that was sent and failed later is
        raised by :meth:`sync`, one at a time: those after it are waited for by the next :meth:`sync`.
        """
        self.push_pull(gradient, factors=factors)

    def sync(self, timeout: Optional[float] = None) -> None:
        """Waits for everything of this table that is under way. After a time-out it may be called again.

        Under ``ssp``, ``dsps`` and ``pssp`` an update is waited for only when the parameters that are here are older than the model
        allows. One that fails meanwhile is raised by a later call, or by :meth:`Job.close`.
        """
        while self._pending:
            self._pending[0].wait(timeout)

    def slab(self) -> Slab:
        """Lends the table's gradient and parameters, to be exchanged without being copied (:meth:`Job.exchange`)."""
        self._job.start()
        return Slab(self, self._native.slab())

    def _send(self, gradient: Any, factors: Optional[Factors], want: bool) -> Handle:
        self._job.start()
        array = as_array(gradient, f"the gradient of table `{self.name}`")
        self._check_shape(array)
        matrices = None
        if factors is not None:
            left, right = factors
            matrices = (as_array(left, "the left factor"), as_array(right, "the right factor"))
        return self._remember(Handle(self._native.push(array, factors=matrices, want=want)))

    def _ask(self, ask: Callable[[], _native.Handle], shape: tuple[int, ...], out: Any) -> Handle:
        """Asks for values that the native handle brings."""
        self._job.start()
        target = None if out is None else as_output(out, shape, "`out`")

        def bring(brought: Optional[FloatArray]) -> FloatArray:
            assert brought is not None, "a pull of rows brings them"
            if target is None:
                return brought.reshape(shape)
            target[...] = brought.reshape(target.shape)
            return target

        return self._remember(Handle(ask(), bring))

    def _brings(self, target: Optional[FloatArray]) -> Bring:
        """After a pull of the whole table the worker has its parameters."""

        def bring(_: Optional[FloatArray]) -> FloatArray:
            if target is None:
                return self.values
            self._native.read_into(target)
            return target

        return bring

    def _check_shape(self, array: FloatArray) -> None:
        if array.shape != self.shape and not (array.ndim == 1 and array.size == self.size):
            raise ShapeError(f"table `{self.name}`: expected a gradient of shape {self.shape}, got {array.shape}")

    def _remember(self, handle: Handle) -> Handle:
        self._pending = [other for other in self._pending if not other._done]
        self._pending.append(handle)
        handle._settled = self._forget
        return handle

    def _forget(self, handle: Handle) -> None:
        if handle in self._pending:
            self._pending.remove(handle)

    def __repr__(self) -> str:
        return f"<paramill.Table {self.name!r} {self.shape}>"


class Handle:
    """A push, a pull, an exchange or a barrier under way."""

    def __init__(
        self,
        native: Union[_native.Handle, _native.Exchange],
        bring: Optional[Bring] = None,
        done: Optional[Callable[[], None]] = None,
    ) -> None:
        self._native = native
        self._bring = bring
        self._when_done = done
        self._settled: Optional[Callable[[Handle], None]] = None
        self._done = False
        self._result: Optional[FloatArray] = None

    @property
    def due(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._done or self._native.is_due()

    def wait(self, timeout: Optional[float] = None) -> Optional[FloatArray]:
        """Waits, and returns the parameters that a pull brought. After a time-out it may be called again."""
        if self._done:
            return self._result
        try:
            brought = self._native.wait(timeout)
        except TimeoutError:
            raise
        except Exception:
            # The error may be that of an earlier update, which the application did not wait for: this one is still under way then.
            if self._native.is_due():
                self._settle()
            raise
        self._settle()
        if self._bring is not None:
            self._result = self._bring(brought)
        return self._result

    def _settle(self) -> None:
        self._done = True
        if self._settled is not None:
            self._settled(self)
        if self._when_done is not None:
            self._when_done()


class Slab:
    """A table's gradient and parameters in memory that frames leave from and arrive in.

    Where a server of this host shares that memory, an exchange copies nothing. Write :attr:`gradient`, read :attr:`values`;
    between :meth:`Job.exchange` and the end of its wait do neither. The table has no other pushes and pulls while it
    is lent.
    """

    def __init__(self, table: Table, native: _native.Slab) -> None:
        self._native = native
        self._moves = -1
        self.table = table
        self._look()

    @property
    def gradient(self) -> FloatArray:
        """The gradient that the next exchange sends."""
        return self._gradient

    @property
    def values(self) -> FloatArray:
        """The parameters that the last exchange brought."""
        return self._values

    def _look(self) -> bool:
        """Makes the arrays anew if the buffers moved, which only an exchange that failed makes them do."""
        moves = self._native.moves()
        if moves == self._moves:
            return False
        self._moves = moves
        self._gradient = self._native.gradient().reshape(self.table.shape)
        self._values = self._native.values().reshape(self.table.shape)
        return True


# The jobs of this process that were neither closed nor abandoned.
open_jobs: weakref.WeakSet[Job] = weakref.WeakSet()


def _close_all() -> None:
    # The interpreter writes the error that ends a program down here.
    failed = hasattr(sys, "last_value")
    for job in list(open_jobs):
        try:
            if failed:
                job._abandon()
            else:
                job.close()
        except Exception as error:  # The program is over; what is left to do is to say it.
            _say(f"the job at {job.url} was not left in good order: {error}")


# A program that ends by an error dies, as far as the others can tell; one that ends otherwise leaves in good order.
atexit.register(_close_all)
