"""A worker's membership in a job, its tables, and what is under way."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence

import numpy as np

from . import _native
from .arrays import FloatArray, as_array, as_output, as_rows
from .errors import EnvironmentError, ShapeError
from .policies import Policies

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_TIMEOUT = 60.0
_told_alone = False


def init(
    url: Optional[str] = None,
    *,
    rank: Optional[int] = None,
    timeout: float = DEFAULT_TIMEOUT,
    transport: Optional[str] = None,
    aggregator: Optional[str] = None,
) -> Job:
    """Joins the job at `url`, such as ``paramill://host:7070/run42``.

    Without a URL the environment of a launcher names the job (``PARAMILL_URL``). Without that, this process trains alone,
    with a server inside, and says so once. The rank is the one given, or the launcher's (``paramill launch``, torchrun,
    MPI, Slurm), or the coordinator's choice. `timeout` is in seconds, and holds for every wait.

    Create tables next. The first push, pull or ``start`` waits until all workers and servers are here.
    """
    identity = _native.identity()
    if url is not None or _names_a_job():
        native = _native.Job(url, rank=rank, timeout=timeout, transport=transport, aggregator=aggregator)
        return Job(native, timeout)
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
    native = _native.Job(server.url, rank=0, timeout=timeout, transport=transport, aggregator=None)
    return Job(native, timeout, server)


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
    ...     w.value.tolist()
    [1.0, 2.0]
    """

    def __init__(self, native: _native.Job, timeout: float, server: Optional[_native.Server] = None) -> None:
        self._native = native
        self._timeout = timeout
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
        """Seconds that waits take at most."""
        return self._timeout

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
        """Iterations completed."""
        return self._native.current_clock

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of gradients sent and of parameters received by this worker."""
        return self._native.traffic()

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
        **policies: Unpack[Policies],
    ) -> Table:
        """Creates a table with its initial values; those of rank 0 count. All workers create the same, in the same order.

        Policies (:class:`paramill.policies.Policies`) that are not given are the job's. A table with `rows` is pushed and pulled by single rows of its first
        dimension.

        >>> import paramill as pm
        >>> job = pm.init()
        >>> job.table("w", init=[0.0], sync="sps")
        Traceback (most recent call last):
        paramill.errors.PolicyError: unknown consistency model `sps`; known: bsp, asp, ssp, dsps, drop, pssp, psp, when, python
        >>> job.close()
        """
        if isinstance(init, (list, tuple, float, int)):
            init = np.asarray(init, np.float32)
        initial = as_array(init, f"the initial value of table `{name}`")
        shape = tuple(int(side) for side in np.shape(initial))
        if rows and len(shape) < 2:
            raise ShapeError(f"table `{name}` of shape {shape}: a table with rows has at least two dimensions")
        number = self._native.create_table(name, list(shape), initial, rows=rows, policies=policies)
        table = Table(self, number, name, shape, rows)
        self._tables[name] = table
        return table

    def start(self) -> None:
        """Waits until all workers and servers are here and initial values are exchanged; does nothing when they are."""
        if not self._started:
            self._native.start()
            self._started = True

    def clock(self) -> None:
        """Ends the iteration."""
        self.start()
        self._native.clock()

    def exchange(self, slabs: Sequence[Slab]) -> Exchange:
        """Sends the gradients in `slabs` and asks for the parameters that follow them, without copying either.

        >>> import paramill as pm
        >>> job = pm.init()
        >>> slab = job.table("w", init=[1.0, 2.0], optimizer="sgd:lr=1").slab()
        >>> slab.grad[:] = [0.5, 0.5]
        >>> exchange = job.exchange([slab])
        >>> job.clock()
        >>> exchange.wait()
        >>> slab.value.tolist()
        [0.5, 1.5]
        >>> job.close()
        """
        self.start()
        return Exchange(self, self._native.exchange([slab._native for slab in slabs]), list(slabs))

    def barrier(self, name: str = "barrier", timeout: Optional[float] = None) -> None:
        """Waits for all live workers to come to the same name."""
        self.start()
        self._native.arrive(name).wait(self._timeout if timeout is None else timeout)

    def status(self) -> dict[str, Any]:
        """How the job stands: workers, servers, tables, who waits and why."""
        status: dict[str, Any] = json.loads(self._native.status())
        return status

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

    def close(self) -> None:
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
            self._native.close()
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

    def __init__(self, job: Job, number: int, name: str, shape: tuple[int, ...], rows: bool) -> None:
        self._job = job
        self._number = number
        self._pending: list[Handle] = []
        self.name = name
        self.shape = shape
        self.rows = rows

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)

    @property
    def value(self) -> FloatArray:
        """The parameters as last pulled, to be read. They are not copied, and do not change."""
        self._job.start()
        return self._job._native.values(self._number).reshape(self.shape)

    def push(self, gradient: Any, rows: Any = None) -> Handle:
        """Sends a gradient of the current iteration; of single `rows` of a table that has them."""
        self._job.start()
        array = as_array(gradient, f"the gradient of table `{self.name}`")
        if rows is None:
            self._check_shape(array)
            native = self._job._native.push(self._number, array, False)
        else:
            native = self._job._native.push_rows(self._number, as_rows(rows), array)
        return self._remember(Handle(self, native))

    def pull(self, out: Any = None, *, rows: Any = None, now: bool = False) -> Handle:
        """Asks for the parameters; they are in `out` after the wait, and what the handle's ``wait`` returns.

        With `rows` only these, strictly ascending. With `now` what is there, whatever the consistency model says.
        """
        self._job.start()
        if rows is not None:
            numbers = as_rows(rows)
            shape = (len(numbers), *self.shape[1:])
            native = self._job._native.pull_rows(self._number, numbers)
        else:
            shape = self.shape
            native = self._job._native.pull(self._number, now)
        target = None if out is None else as_output(out, shape, "`out`")
        return self._remember(Handle(self, native, shape, target, brings_rows=rows is not None or self.rows))

    def push_pull(self, gradient: Any, out: Any = None) -> Handle:
        """Sends a gradient and asks for the parameters that follow it, in one round."""
        self._job.start()
        array = as_array(gradient, f"the gradient of table `{self.name}`")
        self._check_shape(array)
        target = None if out is None else as_output(out, self.shape, "`out`")
        native = self._job._native.push(self._number, array, True)
        return self._remember(Handle(self, native, self.shape, target))

    def update(self, gradient: Any) -> None:
        """Like :meth:`push_pull`, for those who read :attr:`value` after :meth:`sync`.

        What it raises is about this gradient, which was then not sent. An update that was sent and failed later is
        raised by :meth:`sync`, one at a time: those after it are waited for by the next :meth:`sync`.
        """
        self.push_pull(gradient)

    def sync(self, timeout: Optional[float] = None) -> None:
        """Waits for everything of this table that is under way. After a time-out it may be called again."""
        while self._pending:
            self._pending[0].wait(timeout)

    def slab(self) -> Slab:
        """Lends the table's gradient and parameters, to be exchanged without being copied (:meth:`Job.exchange`)."""
        self._job.start()
        return Slab(self, self._job._native.slab(self._number))

    def _check_shape(self, array: FloatArray) -> None:
        if array.shape != self.shape and not (array.ndim == 1 and array.size == self.size):
            raise ShapeError(f"table `{self.name}`: expected a gradient of shape {self.shape}, got {array.shape}")

    def _remember(self, handle: Handle) -> Handle:
        self._pending = [other for other in self._pending if not other._done]
        self._pending.append(handle)
        return handle

    def __repr__(self) -> str:
        return f"<paramill.Table {self.name!r} {self.shape}>"


class Handle:
    """A push or pull under way."""

    def __init__(
        self,
        table: Table,
        native: _native.Handle,
        shape: Optional[tuple[int, ...]] = None,
        out: Optional[FloatArray] = None,
        brings_rows: bool = False,
    ) -> None:
        self._table = table
        self._native = native
        self._shape = shape
        self._out = out
        self._brings_rows = brings_rows
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
        seconds = self._table._job._timeout if timeout is None else timeout
        try:
            if self._brings_rows:
                self._result = self._native.wait_rows(seconds)
            else:
                self._native.wait(seconds)
        except TimeoutError:
            raise
        except Exception:
            self._settle()
            raise
        self._settle()
        if self._shape is None:
            return None
        if self._brings_rows:
            assert self._result is not None
            self._result = self._result.reshape(self._shape)
            if self._out is not None:
                self._out[...] = self._result.reshape(self._out.shape)
                self._result = self._out
        elif self._out is not None:
            self._table._job._native.read_into(self._table._number, self._out)
            self._result = self._out
        else:
            self._result = self._table.value
        return self._result

    def _settle(self) -> None:
        self._done = True
        if self in self._table._pending:
            self._table._pending.remove(self)


class Slab:
    """A table's gradient and parameters in memory that frames leave from and arrive in.

    Where a server of this host shares that memory, an exchange copies nothing. Write :attr:`grad`, read :attr:`value`;
    between :meth:`Job.exchange` and the end of its wait do neither. The table has no other pushes and pulls while it
    is lent.
    """

    def __init__(self, table: Table, native: _native.Slab) -> None:
        self._native = native
        self._moves = -1
        self.table = table
        self._look()

    @property
    def grad(self) -> FloatArray:
        """The gradient that the next exchange sends."""
        return self._grad

    @property
    def value(self) -> FloatArray:
        """The parameters that the last exchange brought."""
        return self._value

    def _look(self) -> bool:
        """Makes the arrays anew if the buffers moved, which only an exchange that failed makes them do."""
        moves = self._native.moves()
        if moves == self._moves:
            return False
        self._moves = moves
        self._grad = self._native.gradient().reshape(self.table.shape)
        self._value = self._native.values().reshape(self.table.shape)
        return True


class Exchange:
    """Slabs under way together."""

    def __init__(self, job: Job, native: _native.Exchange, slabs: list[Slab]) -> None:
        self._job = job
        self._native = native
        self._slabs = slabs
        self._done = False

    @property
    def due(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._done or self._native.is_due()

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits until all parameters are here. After a time-out it may be called again."""
        if self._done:
            return
        try:
            self._native.wait(self._job._timeout if timeout is None else timeout)
        except TimeoutError:
            raise
        except Exception:
            self._settle()
            raise
        self._settle()

    def _settle(self) -> None:
        self._done = True
        for slab in self._slabs:
            slab._look()


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
