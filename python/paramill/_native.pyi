"""The native part: private to the package, which says what it all means."""

from typing import Any, Callable, Mapping, Optional, Sequence, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Exchange",
    "Handle",
    "Job",
    "Pull",
    "Pump",
    "Reader",
    "Server",
    "Slab",
    "Table",
    "WorkerProgress",
    "check_policies",
    "codec_keeps_residual",
    "codec_stages",
    "environment_url",
    "identity",
    "models_of_rounds",
    "optimizer_parameters",
    "pulls_partially",
    "steps_in_rounds",
]

_Floats = npt.NDArray[np.float32]
_Policies = Mapping[str, Any]
_Rows = npt.NDArray[np.uint32]

def identity() -> Optional[tuple[int, Optional[int], str]]: ...
def environment_url() -> Optional[str]: ...
def check_policies(policies: _Policies) -> None: ...
def optimizer_parameters(text: str) -> tuple[str, list[tuple[str, str]]]: ...
def pulls_partially(sync: str) -> bool: ...
def models_of_rounds() -> list[str]: ...
def steps_in_rounds(sync: str) -> bool: ...
def codec_stages(text: str) -> list[tuple[str, str, list[tuple[str, Optional[str]]]]]: ...
def codec_keeps_residual(text: str) -> bool: ...
@final
class Pull:
    """A pull that a server asks about, and the state of its table on the data core that asks."""

    @property
    def table(self) -> str:
        """The table's name; where small tables travel together, that of their pack."""
    @property
    def worker(self) -> int:
        """The rank of the worker that pulls."""
    @property
    def progress(self) -> int:
        """The last iteration that it completed."""
    @property
    def significance(self) -> Optional[float]:
        """`|g| / |w|` of its last push, where the condition asks for it."""
    @property
    def v_train(self) -> int:
        """The table's version: every round below it is closed."""
    @property
    def gap(self) -> int:
        """`progress - v_train`."""
    @property
    def staleness(self) -> int:
        """Rounds that an answer would lack."""
    @property
    def n(self) -> int:
        """Live workers."""
    @property
    def count(self) -> int:
        """Those that have pushed the open round, which is round `v_train`."""
    @property
    def fastest(self) -> int:
        """Progress of the worker that is furthest ahead, -1 when none has pushed."""
    @property
    def slowest(self) -> int:
        """Progress of the worker that is furthest behind, -1 before its first push."""
    @property
    def imbalance(self) -> float:
        """Share of its time that the fastest worker would wait for the slowest in lockstep; 0 when not known."""
    @property
    def workers(self) -> list[WorkerProgress]:
        """All workers that take part."""

@final
class WorkerProgress:
    """How far a worker is."""

    @property
    def rank(self) -> int: ...
    @property
    def progress(self) -> int: ...
    @property
    def interval_s(self) -> Optional[float]:
        """Seconds that it needs for an iteration, on average, when known."""

@final
class Job:
    def __new__(
        cls,
        url: Optional[str],
        *,
        rank: Optional[int],
        timeout: float,
        transport: Optional[str],
        aggregator: Optional[str],
        write_only: bool = False,
    ) -> Job: ...
    @property
    def url(self) -> str: ...
    @property
    def timeout(self) -> float: ...
    @property
    def rank(self) -> Optional[int]: ...
    @property
    def workers(self) -> Optional[int]: ...
    @property
    def iteration(self) -> int: ...
    def set_samples(self, samples: int) -> None: ...
    @property
    def closed(self) -> bool: ...
    def report(self) -> str: ...
    def table(
        self,
        name: str,
        shape: Sequence[int],
        initial: _Floats,
        *,
        rows: bool,
        policies: _Policies,
        alone: bool,
        layers: Optional[Sequence[tuple[str, int, Sequence[int]]]] = None,
    ) -> Table: ...
    def groups(self, tensors: Sequence[tuple[str, int]], *, policies: _Policies) -> list[int]: ...
    def condition(self, name: str, function: Callable[[Pull], bool]) -> None: ...
    def start(self, timeout: Optional[float]) -> None: ...
    def exchange(self, slabs: Sequence[Slab]) -> Exchange: ...
    def clock(self) -> None: ...
    def arrive(self, name: str) -> Handle: ...
    def status(self, timeout: Optional[float]) -> str: ...
    def set(self, table: str, server: Optional[int], policies: _Policies) -> str: ...
    def close(self, timeout: Optional[float]) -> None: ...
    def abandon(self) -> None: ...

@final
class Table:
    def push(self, gradient: _Floats, *, factors: Optional[tuple[_Floats, _Floats]], want: bool) -> Handle: ...
    def push_rows(self, rows: _Rows, values: _Floats) -> Handle: ...
    def pull(self) -> Handle: ...
    def pull_now(self) -> Handle: ...
    def rows(self, rows: _Rows) -> Handle: ...
    def values(self) -> _Floats: ...
    def read_into(self, out: _Floats) -> None: ...
    def slab(self) -> Slab: ...

@final
class Handle:
    def wait(self, timeout: Optional[float]) -> Optional[_Floats]: ...
    def is_due(self) -> bool: ...

@final
class Slab:
    def gradient(self) -> _Floats: ...
    def values(self) -> _Floats: ...
    def values_type(self) -> str: ...
    def codec(self) -> str: ...
    def contains(self, content: str, count: int, codec: str) -> None: ...
    def lacks(self, ranges: list[tuple[int, int]]) -> None: ...
    def moves(self) -> int: ...

@final
class Exchange:
    def wait(self, timeout: Optional[float]) -> None: ...
    def is_due(self) -> bool: ...

@final
class Pump:
    def __new__(cls, job: Job, device: int, timeout: float) -> Pump: ...
    def add(self, slab: Slab, incoming: int) -> int: ...
    def submit(
        self,
        lane: int,
        stream: int,
        content: str,
        parts: Sequence[tuple[int, int]],
        count: int,
        codec: str,
        absent: Sequence[tuple[int, int]],
    ) -> None: ...
    @staticmethod
    def choice_needs(tiles: int, layers: int) -> tuple[int, int]: ...
    def choose(
        self,
        stream: int,
        values: int,
        residual: int,
        tiles: tuple[int, int],
        layers: tuple[int, int],
        work: int,
        places: int,
        packed: int,
        half: int,
    ) -> None: ...
    def turn(self, stream: int, clock: bool) -> None: ...
    def enter(self, stream: int) -> None: ...
    def flush(self) -> None: ...
    def wait(self, stream: int) -> None: ...
    def failures(self) -> list[tuple[int, bool, Exception]]: ...
    def close(self) -> None: ...

@final
class Reader:
    def __new__(cls, url: str, *, timeout: float, transport: Optional[str]) -> Reader: ...
    @property
    def version(self) -> Optional[int]: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    def wait(self, version: int, timeout: float) -> int: ...
    def read(self) -> tuple[int, list[tuple[str, list[int], str, npt.NDArray[np.uint8]]]]: ...
    def close(self) -> None: ...

@final
class Server:
    def __new__(
        cls,
        job: str,
        *,
        listen: str,
        workers: int,
        servers: int,
        cores: Optional[int],
        policies: _Policies,
        seed: int,
        quiet: bool,
        topology: Optional[str] = None,
        digest_every: Optional[int] = None,
    ) -> Server: ...
    @staticmethod
    def joining(url: str, *, cores: Optional[int], seed: int, quiet: bool) -> Server: ...
    @property
    def url(self) -> str: ...
    def stop(self) -> None: ...
    def join(self, timeout: Optional[float] = None) -> None: ...
