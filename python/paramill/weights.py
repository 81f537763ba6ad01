"""Published weights: one process publishes versions of named tensors, and any number of others have the newest one."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any, Iterator, Mapping, Optional

import numpy as np

from . import _native
from .errors import ClosedError, DeadlineError, DtypeError, NonFiniteError, NotAMemberError, ShapeError, TableError
from .job import DEFAULT_TIMEOUT, Job, Table

# How a publisher names element types, by the names of torch's and numpy's.
_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# How often a publisher asks who has its versions.
_LOOK_EVERY = 0.02


class Publisher:
    """Publishes versions of named tensors, from numpy or torch, to any number of subscribers (:class:`Subscriber`).

    >>> import numpy as np
    >>> import paramill as pm
    >>> weights = {"w": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float16)}
    >>> with pm.Publisher(weights) as publisher, pm.Subscriber(publisher.url) as subscriber:
    ...     weights["w"][0, 1] = 5
    ...     version = publisher.publish(weights)
    ...     publisher.wait(version, readers=1)
    ...     subscriber.commit()["w"].tolist()
    [[0.0, 5.0], [0.0, 0.0]]

    The tensors that it is made with are version 0; each :meth:`publish` is the next. They keep their names, shapes and element types (float32,
    float16, bfloat16). Of a version only the entries travel that have changed in the tensor's own type, as what they are now, with a
    digest that every subscriber compares. A subscriber that comes late gets all of the newest version.

    A server in this process holds the versions; only this machine reaches it, unless `listen` is an address that others reach
    (``"10.0.0.1:7070"``). There is no authentication yet. With `url` the servers of a job of one worker hold them instead (``paramill serve
    --workers 1``), and `name`, `listen` and `cores` are theirs.

    Memory here: 12 bytes a parameter (the server's parameters, the values that were published, what is pushed), and 4 for each
    parameter of the largest tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        name: Optional[str] = None,
        listen: Optional[str] = None,
        url: Optional[str] = None,
        cores: Optional[int] = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if not tensors:
            raise TableError("there are no tensors to publish")
        self._types = {name: _type_of(name, tensor) for name, tensor in tensors.items()}
        _check_finite(tensors)
        self._server: Optional[_native.Server] = None
        if url is None:
            self._server = _native.Server(
                name or "weights",
                listen=listen or "127.0.0.1:0",
                workers=1,
                servers=1,
                cores=cores,
                policies={"chunk": "256KB"},
                seed=1,
                quiet=True,
                digest_every=1,
            )
            url = self._server.url
        else:
            ours = [("name", name), ("listen", listen), ("cores", cores)]
            if given := [f"`{option}`" for option, value in ours if value is not None]:
                raise TypeError(f"{' and '.join(given)}: of a server in this process, and with `url` there is none")
        # Rank 0 is there once: a second publisher is told so.
        native = _native.Job(url, rank=0, timeout=timeout, transport=None, aggregator=None, write_only=True)
        self._job = Job(native)
        self._version = 0
        self._broken = False
        self._tables: dict[str, Table] = {}
        try:
            for tensor_name, tensor in tensors.items():
                dtype = self._types[tensor_name]
                self._tables[tensor_name] = self._job.table(
                    tensor_name,
                    init=_floats(tensor),
                    optimizer="assign:lr=1",
                    codec="none" if dtype == "f32" else dtype,
                    answer_codec=f"delta:dtype={dtype}",
                    broadcast="star",
                )
            self._job.start()
            if self._job.workers != 1:
                raise TableError(f"the job at {url} has {self._job.workers} workers; one of a single worker publishes (`paramill serve --workers 1`)")
        except BaseException:
            self._job._abandon()
            self._end()
            raise

    @property
    def url(self) -> str:
        """Where subscribers find it."""
        return self._job.url

    @property
    def version(self) -> int:
        """The version that was published last."""
        return self._version

    def publish(self, tensors: Mapping[str, Any], timeout: Optional[float] = None) -> int:
        """Publishes the next version, of all tensors, and returns its number. Subscribers get it in the background (:meth:`wait`).

        After an error in the tensors nothing was published. After one of the server (:class:`errors.ParamillError`) nobody sees a part of the version, and
        nothing more can be published.
        """
        if self._broken:
            raise ClosedError("a version was published in part, so that no more can follow; make another publisher")
        if tensors.keys() != self._tables.keys():
            raise TableError(f"a version is all tensors: {_difference(set(self._tables), set(tensors))}")
        for name, tensor in tensors.items():
            if _type_of(name, tensor) != self._types[name]:
                raise DtypeError(f"tensor `{name}` is {_type_of(name, tensor)}, and was {self._types[name]}")
            if tuple(tensor.shape) != self._tables[name].shape:
                raise ShapeError(f"tensor `{name}` has the shape {tuple(tensor.shape)}, not {self._tables[name].shape}")
        _check_finite(tensors)
        self._broken = True
        handles = [self._tables[name].push(_floats(tensor)) for name, tensor in tensors.items()]
        self._job.clock()
        for handle in handles:
            handle.wait(timeout)
        self._broken = False
        self._version += 1
        return self._version

    def readers(self) -> dict[int, Optional[int]]:
        """The subscribers that are connected, by number, and the version that each of them has; None before its first."""
        return {reader["reader"]: reader["version"] for reader in self._job.status()["readers"]}

    def wait(self, version: Optional[int] = None, *, readers: int = 1, timeout: Optional[float] = None) -> None:
        """Waits until so many subscribers have a version, or a later one; without one, the one that was published last."""
        wanted = self._version if version is None else version
        limit = self._job.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while True:
            have = self.readers()
            if sum(held is not None and held >= wanted for held in have.values()) >= readers:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(f"version {wanted} is not with {readers} subscribers after {limit} s; they have {have}")
            time.sleep(_LOOK_EVERY)

    def status(self) -> dict[str, Any]:
        """How its job stands, as ``paramill status`` says it."""
        return self._job.status()

    def close(self, timeout: Optional[float] = None) -> None:
        """Ends. Subscribers keep what they have, and hear that there will be no more."""
        limit = self._job.timeout if timeout is None else timeout
        try:
            if not self._job.closed:
                self._job.close(limit)
            if self._server is not None:
                self._server.join(limit)
        finally:
            self._end()

    def _end(self) -> None:
        if self._server is not None:
            self._server.stop()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()


class Subscriber:
    """Has the newest version of what a job at `url` broadcasts: that of a :class:`Publisher`, or of training with ``--broadcast``.

    Versions arrive in the background and are staged whole: every version is of one number over all tensors and servers. :meth:`commit` takes the newest
    one over. Nobody waits for a subscriber; it may come and go at any time.

    >>> import numpy as np
    >>> import paramill as pm
    >>> with pm.Publisher({"w": np.zeros(3, np.float32)}) as publisher, pm.Subscriber(publisher.url) as subscriber:
    ...     for version in subscriber:
    ...         w = subscriber.commit()["w"]
    ...         if version == 2:
    ...             break
    ...         _ = publisher.publish({"w": w + 1})
    >>> w.tolist()
    [2.0, 2.0, 2.0]

    Tensors are torch's where torch is imported (or `torch` says so), in the publisher's element types; otherwise numpy's, where bfloat16 is
    float32. Memory: 4 bytes a parameter, the versions that are not whole yet, and what :meth:`commit` returns.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        torch: Optional[bool] = None,
        transport: Optional[str] = None,
    ) -> None:
        self._timeout = timeout
        self._torch = "torch" in sys.modules if torch is None else torch
        self._committed: Optional[int] = None
        self._native = _native.Reader(url, timeout=timeout, transport=transport)

    @property
    def version(self) -> Optional[int]:
        """The newest version that is here whole; None before the first."""
        return self._native.version

    @property
    def committed(self) -> Optional[int]:
        """The version that :meth:`commit` gave last."""
        return self._committed

    @property
    def bytes_received(self) -> int:
        """Bytes of tensors that came so far."""
        return self._native.bytes_received

    @property
    def memory_bytes(self) -> int:
        """Bytes held for tensors and for versions that are not whole."""
        return self._native.memory_bytes

    def wait(self, version: Optional[int] = None, timeout: Optional[float] = None) -> int:
        """Waits until a version is staged, or a later one, and returns which one is; without one, one that was not committed."""
        if version is None:
            version = 0 if self._committed is None else self._committed + 1
        return self._wait(version, self._timeout if timeout is None else timeout)

    def _wait(self, version: int, timeout: float) -> int:
        try:
            return self._native.wait(version, timeout)
        except NotAMemberError:
            # What came before the job ended is here.
            staged = self._native.version
            if staged is None or staged < version:
                raise
            return staged

    def commit(self, into: Optional[Mapping[str, Any]] = None) -> dict[str, Any]:
        """The newest version that is staged, as tensors by name: copies, which are the caller's.

        With `into`, tensors of the same names and shapes (such as a module's ``state_dict()``) get the values, and are returned.
        """
        self.wait(0)
        version, read = self._native.read()
        tensors = {name: self._tensor(shape, dtype, array) for name, shape, dtype, array in read}
        if into is not None:
            tensors = self._put(tensors, into)
        self._committed = version
        return tensors

    def _tensor(self, shape: list[int], dtype: str, array: Any) -> Any:
        if not self._torch:
            if dtype == "bf16":
                halves = array.view(np.uint16).astype(np.uint32) << np.uint32(16)
                return halves.view(np.float32).reshape(shape)
            return array.view(np.float32 if dtype == "f32" else np.float16).reshape(shape)
        import torch

        types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        return torch.from_numpy(array).view(types[dtype]).reshape(shape)

    @staticmethod
    def _put(tensors: dict[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        if missing := tensors.keys() - into.keys():
            raise TableError(f"there is no place for {', '.join(sorted(missing))}")
        for name, tensor in tensors.items():
            if tuple(into[name].shape) != tuple(tensor.shape):
                raise ShapeError(f"tensor `{name}` has the shape {tuple(tensor.shape)}, not {tuple(into[name].shape)}")
        for name, tensor in tensors.items():
            if hasattr(into[name], "copy_"):
                into[name].detach().copy_(tensor)
            else:
                np.copyto(into[name], np.asarray(tensor))
        return {name: into[name] for name in tensors}

    def __iter__(self) -> Iterator[int]:
        """Versions as they come, each newer than what was committed, until the job is over. Versions that came in between are left out."""
        seen = -1 if self._committed is None else self._committed
        while True:
            try:
                seen = self._wait(seen + 1, math.inf)
            except NotAMemberError as error:
                if str(error) == "the job is over":
                    return
                raise
            yield seen

    def close(self) -> None:
        """Leaves."""
        self._native.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


def _type_of(name: str, tensor: Any) -> str:
    text = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if text not in _TYPES:
        raise DtypeError(f"tensor `{name}` is {text}; what is published is {', '.join(_TYPES)}")
    return _TYPES[text]


def _floats(tensor: Any) -> Any:
    """The same values as float32, on the CPU: every type that is published fits."""
    if hasattr(tensor, "detach"):
        return tensor.detach().float().cpu().contiguous().numpy()
    return np.ascontiguousarray(tensor, dtype=np.float32)


def _check_finite(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        is_finite = tensor.detach().isfinite() if hasattr(tensor, "isfinite") else np.isfinite(tensor)
        if not bool(is_finite.all()):
            raise NonFiniteError(f"tensor `{name}` has NaN or Inf")


def _difference(known: set[str], given: set[str]) -> str:
    lacks = [f"`{name}` is missing" for name in sorted(known - given)]
    unknown = [f"`{name}` is not one of them" for name in sorted(given - known)]
    return ", ".join(lacks + unknown)
