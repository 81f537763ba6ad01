"""How gradients of a GPU come to the servers, and parameters back, beside what the GPU and Python do."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Iterator, Optional

import torch
from torch import Tensor

from .. import _native
from ..errors import ParamillError
from ..job import Job, Slab
from .compression import Encoded

if TYPE_CHECKING:
    from .buckets import Bucket


def number_of(device: torch.device) -> Optional[int]:
    """The number by which a pump knows a device; None for devices that have none."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


class Pumps:
    """The pumps of a job: one for each device that has some of its parameters."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pumps: dict[torch.device, Optional[Pump]] = {}

    def of(self, device: torch.device) -> Optional[Pump]:
        """The pump of a device. What has none is copied by torch, which waits for it."""
        if device not in self._pumps:
            self._pumps[device] = self._make(device)
        return self._pumps[device]

    def __iter__(self) -> Iterator[Pump]:
        return (pump for pump in self._pumps.values() if pump is not None)

    def _make(self, device: torch.device) -> Optional[Pump]:
        number = number_of(device)
        if number is None:
            return None
        try:
            return Pump(_native.Pump(self._job._native, number, self._job.timeout), device)
        except ParamillError as error:
            warnings.warn(f"gradients of {device} are copied one after the other, and waited for: {error}", stacklevel=2)
            return None


class Pump:
    """Carries buckets of one device. Nothing waits for the servers but the device."""

    def __init__(self, native: _native.Pump, device: torch.device) -> None:
        self._native = native
        self._device = device
        self._buckets: list[Bucket] = []
        self._errors: list[Exception] = []
        #: Whether new parameters were asked for that nothing waits for yet.
        self.is_ahead = False

    def add(self, bucket: Bucket, slab: Slab) -> Lane:
        """Takes on a bucket."""
        home = torch.empty(bucket.size, dtype=torch.float32, device=self._device)
        number = self._native.add(slab._native, home.data_ptr())
        assert number == len(self._buckets), "lanes are numbered in the order in which they are added"
        self._buckets.append(bucket)
        return Lane(self, number, home)

    def stream(self) -> int:
        """The stream that torch computes on."""
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0

    def choose(self, *arguments: Any) -> None:
        """Chooses entries on the stream that torch computes on (:class:`paramill.torch.compression.Choice`)."""
        self._native.choose(self.stream(), *arguments)

    def flush(self) -> None:
        """Waits until all gradients have left."""
        self._native.flush()
        self._look()

    def turn(self, clock: bool) -> None:
        """Ends the iteration: new parameters replace those that were computed with until now. `clock` ends the job's too."""
        self._native.turn(self.stream(), clock)
        self.is_ahead = True

    def enter(self, rows: Optional[Tensor] = None) -> None:
        """Before a forward pass: it has the new parameters, and what was written to them meanwhile is refused."""
        if self.is_ahead:
            self.order()
            for bucket in self._buckets:
                bucket.enter()

    def order(self) -> None:
        """What is computed from now on has the new parameters."""
        if self.is_ahead:
            self._native.enter(self.stream())
            self.is_ahead = False

    def wait(self) -> None:
        """Waits until the parameters of the last iteration are here, or something failed."""
        self._native.wait(self.stream())
        self.is_ahead = False
        self._look()

    def errors(self) -> list[Exception]:
        """What failed since this was asked last."""
        self._look()
        errors, self._errors = self._errors, []
        return errors

    def close(self) -> None:
        """Ends its threads."""
        self._native.close()

    def _look(self) -> None:
        for number, is_refusal, error in self._native.failures():
            self._buckets[number].fail(is_refusal)
            self._errors.append(error)


class Lane:
    """A bucket's way through a pump."""

    def __init__(self, pump: Pump, number: int, home: Tensor) -> None:
        self.pump = pump
        self._number = number
        #: The device's memory that answers are put into.
        self.home = home
        self._outgoing: Optional[Tensor] = None
        # What the device copies from must stay until it has.
        self._sent: Optional[Encoded] = None

    @property
    def outgoing(self) -> Tensor:
        """Where gradients are to be put that no codec changes."""
        if self._outgoing is None:
            # Zeros stay between the tensors of a pack.
            self._outgoing = torch.zeros_like(self.home)
        return self._outgoing

    def submit(self, encoded: Encoded, codec: str, absent: list[tuple[int, int]]) -> None:
        """Sends it, once what was asked of the device before is done."""
        self._sent = encoded
        parts = [(part.data_ptr(), part.numel() * part.element_size()) for part in encoded.parts]
        pump = self.pump
        pump._native.submit(self._number, pump.stream(), encoded.content, parts, encoded.entries, codec, absent)
