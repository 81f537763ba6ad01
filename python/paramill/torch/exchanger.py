"""What both optimizers do alike: gradients leave as they become ready, and everything is waited for once."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Callable, Iterator, Optional, Sequence

from torch import Tensor

from ..errors import NonFiniteError, OrderError, ParamillError
from ..job import Job
from .buckets import Bucket, Slot, SparseSlot
from .forward import FEW


class Exchanger:
    """Buckets and sparse parameters of a job, and where they are in the current iteration.

    `overlap` says whether gradients leave during the backward pass. If it is not given, they do not where there are `FEW`
    buckets, which would gain less than listening costs. Otherwise the first iteration tells: not where gradients are changed
    between the backward pass and the step (clipping, GradScaler), or added to by more backward passes than `accumulate` says.
    """

    def __init__(
        self,
        job: Job,
        buckets: Sequence[Bucket],
        sparse: Sequence[SparseSlot],
        buffers: Sequence[Bucket],
        *,
        accumulate: int,
        overlap: Optional[bool],
        device_codec: Optional[bool],
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        self.job = job
        self.buckets = list(buckets)
        self.sparse = list(sparse)
        self.buffers = list(buffers)
        self.overlap = False if overlap is None and len(buckets) <= FEW else overlap
        self._accumulate = accumulate
        self._device_codec = device_codec
        self._before_first = before_first
        self._began = False
        self._holding = False
        self._hooks: list[Any] = []
        # What was sent and has not left yet: its copy to the host's memory is under way.
        self._leaving: list[Bucket] = []
        # Whether nothing was sent since the last time that everything was waited for.
        self.is_settled = False

    def start(self) -> None:
        """Waits for the others, takes the values of rank 0, and begins to listen to gradients."""
        self.job.start()
        self.job._before_close.append(self.synchronize)
        for bucket in [*self.buckets, *self.buffers]:
            bucket.begin(self._device_codec)
        for sparse in self.sparse:
            sparse.pull_all()
        for bucket in self.buckets if self.overlap is not False else []:
            for slot in bucket.slots:
                hook = partial(self._on_gradient, bucket, slot)
                self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(hook))

    def finish(self, grad_scale: Optional[Tensor], found_inf: Optional[Tensor]) -> Optional[NonFiniteError]:
        """Sends what has not left yet, and ends the iteration. Returns why some gradients did not leave."""
        self.is_settled = False
        skip = found_inf is not None and bool(found_inf.item())
        scale = None if grad_scale is None else 1.0 / grad_scale
        self._settle_overlap(with_scaler=found_inf is not None)
        # If the last step failed this says so, while nothing of the new one has left.
        self.receive()
        for bucket in self.buckets:
            if bucket.sent:
                self._check_unchanged(bucket)
        for bucket in self.buckets:
            if not bucket.sent:
                self._send(bucket, scale, skip)
        for sparse in self.sparse:
            self._begin_iteration()
            sparse.send(scale, skip)
        # Whose gradients are refused is known once they have left, and :class:`PresenceBucket` tells of it.
        for bucket in self.buckets:
            bucket.leave(block=True)
        for bucket in self.buffers:
            self._send(bucket)
        for bucket in self.buffers:
            bucket.leave(block=True)
        self._leaving.clear()
        self.job.clock()
        self._began = False
        refused = [bucket.refused for bucket in self.buckets] + [sparse.refused for sparse in self.sparse]
        for bucket in [*self.buckets, *self.buffers]:
            bucket.reset()
        return next((why for why in refused if why is not None), None)

    def receive(self) -> None:
        """Waits for everything that is under way.

        What one bucket has to refuse, others often have too: it is told once, when all of them have been waited for.
        """
        self._receive_all([])

    def wait_for(self, bucket: Bucket) -> None:
        """Waits for one bucket before its parameters are used, and for all if it has to refuse something.

        Between the backward pass and the step, parameters are those that the gradients were computed with.
        """
        if bucket.sent:
            return
        try:
            bucket.receive()
        except (NonFiniteError, OrderError) as error:
            self._receive_all([error])

    def synchronize(self) -> None:
        """Waits for everything that is under way, and pulls all rows of sparse parameters."""
        self.receive()
        for sparse in self.sparse:
            sparse.pull_all()
        self.is_settled = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here are added up, and leave with the first one after it."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def close(self) -> None:
        """Stops listening."""
        self._stop_listening()
        for bucket in [*self.buckets, *self.buffers]:
            bucket.close()

    def _stop_listening(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _receive_all(self, refusals: list[ParamillError]) -> None:
        for bucket in [*self.buckets, *self.buffers]:
            if bucket.sent:
                continue
            try:
                bucket.receive()
            except (NonFiniteError, OrderError) as error:
                refusals.append(error)
        if refusals:
            for sparse in self.sparse:
                with contextlib.suppress(NonFiniteError):
                    sparse.settle_push()
            # What is out of order is refused again at the next wait.
            raise next((error for error in refusals if isinstance(error, NonFiniteError)), refusals[0])

    def _on_gradient(self, bucket: Bucket, slot: Slot, parameter: Tensor) -> None:
        if self._holding:
            return
        if bucket.sent:
            raise OrderError(
                f"the gradient of `{slot.name}` was added to after it had left; give accumulate=K for K backward passes a "
                "step, or use no_sync() for all but the last"
            )
        slot.fired += 1
        slot.look(keep=self.overlap is None)
        if slot.fired != self._accumulate or not self.overlap:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            self._send(bucket)
            self._let_go()

    def _send(self, bucket: Bucket, scale: Optional[Tensor] = None, skip: bool = False) -> None:
        self._begin_iteration()
        bucket.send(scale, skip)
        self._leaving.append(bucket)

    def _let_go(self) -> None:
        """Hands on what has reached the host's memory meanwhile."""
        self._leaving = [bucket for bucket in self._leaving if not bucket.leave(block=False)]

    def _begin_iteration(self) -> None:
        if not self._began:
            self._before_first()
            self._began = True

    def _settle_overlap(self, with_scaler: bool) -> None:
        """After the first backward pass: whether gradients may leave earlier from now on."""
        if self.overlap is None:
            slots = [slot for bucket in self.buckets for slot in bucket.slots]
            repeated = any(slot.fired > self._accumulate for slot in slots)
            changed = any(bucket.changed_since_sent() for bucket in self.buckets)
            self.overlap = not (with_scaler or repeated or changed)
            if not self.overlap:
                self._stop_listening()
        elif self.overlap and with_scaler:
            raise OrderError("with a GradScaler gradients leave at the step: give overlap=False")

    def _check_unchanged(self, bucket: Bucket) -> None:
        slot = bucket.changed_since_sent()
        if slot is not None:
            raise OrderError(
                f"the gradient of `{slot.name}` was changed after it had left (clipping?); give overlap=False, and "
                "gradients leave at the step"
            )
