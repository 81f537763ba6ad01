"""Servers inside of a Python process."""

from __future__ import annotations

from typing import Any, Optional

from . import _native


class Server:
    """The first server of a job, as threads of this process. ``paramill serve`` is the same as a program of its own.

    >>> import paramill as pm
    >>> with pm.Server(workers=1) as server:
    ...     with pm.init(server.url) as job:
    ...         job.table("w", init=[1.0]).value.tolist()
    [1.0]
    """

    def __init__(
        self,
        job: str = "job",
        *,
        listen: str = "127.0.0.1:0",
        workers: int = 1,
        servers: int = 1,
        cores: int = 1,
        sync: Optional[str] = None,
        optimizer: Optional[str] = None,
        seed: int = 1,
        quiet: bool = False,
    ) -> None:
        self._native = _native.Server(
            job,
            listen=listen,
            workers=workers,
            servers=servers,
            cores=cores,
            sync=sync,
            optimizer=optimizer,
            seed=seed,
            quiet=quiet,
        )

    @property
    def url(self) -> str:
        """Where workers and further servers join."""
        return self._native.url

    def join(self) -> None:
        """Waits until the job is over."""
        self._native.join()

    def stop(self) -> None:
        """Ends it, whatever the job does."""
        self._native.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.stop()
