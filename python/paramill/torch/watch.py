"""Parameters that a script writes to, or reads too early: servers' answers would make it wrong in silence."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..errors import OrderError
from .buckets import Bucket, Slot, SparseSlot
from .devices import Pump

# Changes of `.data` are not counted by torch. They are found by comparing values, which is done for so many answers only.
COMPARED_ANSWERS = 3


class Watch:
    """What a parameter was when an answer had been put in place.

    torch counts changes in place (``load_state_dict``, ``torch.nn.init``, ``p.clamp_``). It does not count those that go by
    ``.data``: during the first iterations a norm of the values tells of them.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._mark: Optional[tuple[int, int]] = None
        self._norm: Optional[float] = None

    def record(self, with_norm: bool) -> None:
        """An answer is in place."""
        self._mark = self._marks()
        self._norm = self._measure() if with_norm else None

    def forget(self) -> None:
        """Whatever was written is of no account."""
        self._mark = None

    @property
    def written(self) -> bool:
        """Whether torch has counted a change since."""
        return self._mark is not None and self._mark != self._marks()

    @property
    def moved(self) -> bool:
        """Whether something else wrote to the parameter since, or may have."""
        if self._mark is None:
            return False
        return self.written or (self._norm is not None and self._norm != self._measure())

    def _marks(self) -> tuple[int, int]:
        parameter = self.slot.parameter
        return parameter._version, parameter.data_ptr()

    def _measure(self) -> float:
        parameter = self.slot.parameter.detach()
        # Halves overflow in a sum of squares, and torch does not narrow doubles.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return float(torch.linalg.vector_norm(parameter.nan_to_num(), dtype=dtype))


class WatchedBucket(Bucket):
    """A bucket that refuses to write over what it did not deliver."""

    # At the end the model is the script's own: what was changed stays.
    closing = False

    def begin(self, device_codec: Optional[bool] = None, pump: Optional[Pump] = None) -> None:
        self._watches = [Watch(slot) for slot in self.slots]
        self._answers = 0
        self._is_delivered = False
        # Whether an answer is here that was refused to be put in place.
        self._is_held = False
        # What was written to before a pump put an answer in place.
        self._moved: list[Slot] = []
        super().begin(device_codec, pump)

    def check(self) -> None:
        """Before gradients leave: parameters must be what the last answer made them."""
        if self._is_held:
            self._deliver()
        if self.under_way or self.sent or not self._is_delivered:
            return
        compares = self._answers <= COMPARED_ANSWERS
        if not compares and not any(watch.moved for watch in self._watches):
            return
        if self.lane is not None:
            # The answer is to be here before it is looked at.
            self.lane.pump.wait()
            self._look()
            if not self._is_delivered:
                return
        for watch, value in zip(self._watches, self._views(self._received)):
            if not (compares or watch.moved):
                continue
            parameter = watch.slot.parameter.detach()
            if not torch.equal(value.to(parameter.device, parameter.dtype).nan_to_num(), parameter.nan_to_num()):
                raise OrderError(
                    f"`{watch.slot.name}` was changed here after the optimizer was made (load_state_dict, clipping of "
                    "weights, averages swapped in?). The servers hold the parameters, and their next answer would undo it. "
                    "Load a checkpoint before you make the optimizer; put back what you swap in before the next step"
                )
            # Written to, and the same as before: an average that was swapped in and out again.
            watch.record(compares)

    def check_read(self) -> None:
        """Before gradients leave: they must not be of a forward pass that did not wait for the last answer."""
        is_ahead = self.lane is not None and self.lane.pump.is_ahead
        if self.sent or not (self.under_way or is_ahead):
            return
        for slot in self.slots:
            gradient = slot.parameter.grad
            is_new = slot.fired > 0 or slot.changed()
            if gradient is not None and is_new and _has_values(gradient):
                raise OrderError(
                    f"`{slot.name}` has a new gradient, but nothing has waited for its new values: a part of the model was "
                    "called by itself, or a model that was compiled after the first step. Call optimizer.synchronize() before"
                )

    def send(self, step: int, scale: Optional[Tensor] = None, skip: bool = False) -> None:
        self.check_read()
        super().send(step, scale, skip)

    def receive(self) -> None:
        # After an exchange that failed nobody knows what is in the memory of the last answer.
        self._is_delivered = self._is_delivered and not self.under_way
        super().receive()
        if self._is_held:
            self._deliver()

    def fail(self, is_refusal: bool) -> None:
        super().fail(is_refusal)
        self._is_delivered = self._is_delivered and is_refusal

    def give_way(self) -> None:
        """What was changed while an answer was on its way, and refused for that, is given up for the answer."""
        if self._is_held and not self.closing:
            self._moved = []
            for watch in self._watches:
                watch.forget()

    def enter(self) -> None:
        # Values cannot be compared: the answer has changed them.
        self._moved = [watch.slot for watch in self._watches if watch.written]
        self._refuse_moved()

    def depart(self) -> None:
        self._moved = [watch.slot for watch in self._watches if watch.moved]

    def _refuse_moved(self) -> None:
        if self._moved and not self.closing:
            self._is_held = True
            raise OrderError(
                f"`{self._moved[0].name}` was changed here while its new values were on their way, and they would undo it. Call "
                "optimizer.synchronize() after step() before you write to parameters, and put them back before the next "
                "step; load a checkpoint before you make the optimizer. To have the servers' values instead of what was "
                "written, call optimizer.synchronize() now"
            )

    def _deliver(self) -> None:
        if self.lane is None:
            self.depart()
        self._refuse_moved()
        if self.lane is not None and self._is_held:
            # What the script wrote is where the answer was.
            self.lane.home.copy_(self._received)
        moved = self._moved
        self._is_held = False
        kept = [(slot.parameter, slot.parameter.detach().clone()) for slot in moved]
        super()._deliver()
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
        self._is_delivered = True
        self._answers += 1
        compares = self._answers <= COMPARED_ANSWERS
        if compares and self.lane is not None:
            self.lane.pump.order()
        for watch in self._watches:
            watch.record(compares)


class WatchedRows(SparseSlot):
    """The same for a parameter of rows. Which of them were changed is not known: any change in place is refused."""

    closing = False

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot)
        self._watch = Watch(slot)

    def pull_all(self) -> None:
        if self.check():
            super().pull_all()
            self._watch.record(with_norm=False)

    def pull(self, indices: Optional[Tensor]) -> None:
        if self._stale and self.check():
            super().pull(indices)
            self._watch.record(with_norm=False)

    def check(self) -> bool:
        """Whether rows may be written to. Before gradients leave, and before each pull."""
        if not self._watch.moved:
            return True
        if self.closing:
            return False
        raise OrderError(
            f"`{self.slot.name}` was changed here after the optimizer was made (load_state_dict, an embedding's max_norm?). "
            "The servers hold its rows, and the next pull would undo it. Load a checkpoint before you make the optimizer"
        )


def _has_values(gradient: Tensor) -> bool:
    """Whether there is more than the zeros that ``zero_grad(set_to_none=False)`` leaves."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any())
