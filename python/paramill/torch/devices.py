"""How gradients come from a device into the host's memory, and parameters back."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Iterable, Optional

import torch
from torch import Tensor


PAGE_BYTES = 4096


def copier_of(device: torch.device, size: int) -> DeviceCopier:
    """The copier between the host's memory and a device."""
    return CudaCopier(device, size) if device.type == "cuda" else DeviceCopier()


class DeviceCopier:
    """Copies gradients to the host's memory and parameters back. The host's own tensors need no copy; this class also serves
    devices that have no copier of their own."""

    def adopt(self, gradient: Tensor, values: Tensor) -> None:
        """Sets the host's memory."""

    def outgoing(self, gradient: Tensor) -> Tensor:
        """The tensor to put gradients into."""
        return gradient

    def aside(self) -> ContextManager[Any]:
        """Runs device work beside the device's main stream, after the work queued there so far."""
        return contextlib.nullcontext()

    def bring_out(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Begins to copy from the device's memory into the host's."""
        for source, target in copies:
            if source is not target:
                target.copy_(source)

    def is_out(self, block: bool) -> bool:
        """Whether the last :meth:`bring_out` has finished; waits for it with ``block``."""
        return True

    def home(self) -> Optional[Tensor]:
        """The device's own memory that :meth:`incoming` fills, if it does."""
        return None

    def incoming(self, values: Tensor) -> Tensor:
        """The parameters that are in the host's memory, where they can be copied from."""
        return values

    def close(self) -> None:
        """Undoes :meth:`adopt`."""


class CudaCopier(DeviceCopier):
    """Copies on a stream of its own, from and to pinned memory, beside what the device computes."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._size = size
        self._outgoing: Optional[Tensor] = None
        self._incoming = torch.empty(size, dtype=torch.float32, device=device)
        self._stream = _side_stream(device)
        self._out = torch.cuda.Event()
        self._pinned: list[Tensor] = []

    def adopt(self, gradient: Tensor, values: Tensor) -> None:
        self.close()
        for memory in (gradient, values):
            # Memory that begins at a page is the worker's own, and shared with servers of this host: it is pinned where it
            # is. What is smaller has others on its page.
            if memory.data_ptr() % PAGE_BYTES == 0:
                status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * 4, 0)
                if int(status) == 0:
                    self._pinned.append(memory)

    def outgoing(self, gradient: Tensor) -> Tensor:
        if self._outgoing is None:
            # Zeros stay between the tensors of a pack.
            self._outgoing = torch.zeros(self._size, dtype=torch.float32, device=self._device)
        return self._outgoing

    def aside(self) -> ContextManager[Any]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        aside: ContextManager[Any] = torch.cuda.stream(self._stream)
        return aside

    def bring_out(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        with self.aside():
            for source, target in copies:
                target.copy_(source, non_blocking=True)
            self._out.record(self._stream)

    def is_out(self, block: bool) -> bool:
        if block:
            self._out.synchronize()
            return True
        return bool(self._out.query())

    def home(self) -> Tensor:
        return self._incoming

    def incoming(self, values: Tensor) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        # What was computed with the last parameters must be through before they are written over.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._incoming.copy_(values, non_blocking=True)
        current.wait_stream(self._stream)
        return self._incoming

    def close(self) -> None:
        for memory in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._pinned = []


_streams: dict[Optional[int], Any] = {}


def _side_stream(device: torch.device) -> Any:
    index = device.index
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(device)
    return _streams[index]
