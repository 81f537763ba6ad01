"""Servers inside of a Python process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from . import _native
from .policies import JobPolicies

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Server:
    """The first server of a job, as threads of this process. ``paramill serve`` is the same as a program of its own.

    >>> import paramill as pm
    >>> with pm.Server(workers=1) as server:
    ...     with pm.init(server.url) as job:
    ...         job.table("w", init=[1.0]).values.tolist()
    [1.0]

    Only this machine can join it, unless `listen` is an address that others reach (``"10.0.0.1:7070"``). There is no
    authentication yet: whoever reaches it can read and change parameters and end the job.

    `cores` are its data cores: if not given, what the CPUs of this process allow when all workers and servers run here too, or
    elsewhere if `listen` is not on loopback.

    `replicas` are the copies of every shard that other servers keep: with 1 the job survives the loss of a server that does not
    coordinate it. Copies need at least two servers, and exist once all parameters were copied: a status has none without one then.

    `topology` is a file that says which hosts are below which switches, for the trees of `broadcast`.

    `policies` are those of every table that does not say its own (:class:`paramill.policies.JobPolicies`).
    """

    def __init__(
        self,
        job: str = "job",
        *,
        listen: str = "127.0.0.1:0",
        workers: int = 1,
        servers: int = 1,
        replicas: int = 0,
        cores: Optional[int] = None,
        seed: int = 1,
        quiet: bool = False,
        topology: Optional[Union[str, os.PathLike[str]]] = None,
        **policies: Unpack[JobPolicies],
    ) -> None:
        text = None if topology is None else Path(topology).read_text(encoding="utf-8")
        self._native = _native.Server(
            job,
            listen=listen,
            workers=workers,
            servers=servers,
            cores=cores,
            policies=policies,
            seed=seed,
            quiet=quiet,
            replicas=replicas,
            topology=text,
        )

    @classmethod
    def joining(cls, url: str, *, cores: Optional[int] = None, seed: int = 1, quiet: bool = False) -> Server:
        """A further server of the job at `url`, which was made for several. `placement` of the first says which holds what.

        >>> import paramill as pm
        >>> with pm.Server(servers=2, cores=1, placement="round_robin") as first, pm.Server.joining(first.url, cores=1):
        ...     with pm.init(first.url) as job:
        ...         names = [job.table(name, init=[1.0] * 8).name for name in ("a", "b")]
        ...         job.start()
        ...         [sorted(t["name"] for t in shard["tables"]) for shard in job.status()["shards"]]
        [['a'], ['b']]
        """
        server = cls.__new__(cls)
        server._native = _native.Server.joining(url, cores=cores, seed=seed, quiet=quiet)
        return server

    @property
    def url(self) -> str:
        """Where workers and further servers join."""
        return self._native.url

    def join(self, timeout: Optional[float] = None) -> None:
        """Waits until the job is over; as long as that takes, unless there is a time-out."""
        self._native.join(timeout)

    def stop(self) -> None:
        """Ends it, whatever the job does."""
        self._native.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.stop()
