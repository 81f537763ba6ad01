"""What both optimizers do alike: gradients leave as they become ready, and everything is waited for once."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Callable, Iterator, Optional, Sequence

from torch import Tensor

from ..errors import NonFiniteError, OrderError, ParamillError
from ..job import Job
from .buckets import Bucket, Slot, SparseSlot
from .devices import Pumps
from .forward import FEW


class Exchanger:
    """Buckets and sparse parameters of a job, and where they are in the current iteration.

    `overlap` says whether gradients leave during the backward pass. If it is not given, they do not where there are `FEW`
    buckets, which would gain less than listening costs. Otherwise the first iteration tells: not where gradients are changed
    between the backward pass and the step (clipping, GradScaler), or added to by more backward passes than `accumulate` says.

    With `non_blocking` a device waits for new parameters in the next forward pass, not before.
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
        non_blocking: bool = False,
    ) -> None:
        self.job = job
        self.buckets = list(buckets)
        self.sparse = list(sparse)
        self.buffers = list(buffers)
        self.overlap = False if overlap is None and len(buckets) <= FEW else overlap
        self._accumulate = accumulate
        self._device_codec = device_codec
        self._before_first = before_first
        self._non_blocking = non_blocking
        self._began = False
        self._holding = False
        self._hooks: list[Any] = []
        self._pumps = Pumps(job)
        # Iterations that ended. The job's count may lag behind: gradients may be on their way out of a device.
        self._iteration = 0
        # Whether nothing was sent since the last time that everything was waited for.
        self.is_settled = False

    def start(self) -> None:
        """Waits for the others, takes the values of rank 0, and begins to listen to gradients."""
        self.job.start()
        self.job._before_close.append(self.synchronize)
        self._iteration = self.job.iteration
        for bucket in [*self.buckets, *self.buffers]:
            bucket.begin(self._device_codec, None if bucket.is_of_host else self._pumps.of(bucket.device))
        for sparse in self.sparse:
            sparse.pull_all()
        for bucket in self.buckets if self.overlap is not False else []:
            for slot in bucket.slots:
                hook = partial(self._on_gradient, bucket, slot)
                self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(hook))

    def finish(self, grad_scale: Optional[Tensor], found_inf: Optional[Tensor]) -> Optional[ParamillError]:
        """Sends what has not left yet, and ends the iteration. Returns why some gradients did not leave, or what has failed
        since the last step on a device that went on meanwhile."""
        self.is_settled = False
        skip = found_inf is not None and bool(found_inf.item())
        scale = None if grad_scale is None else 1.0 / grad_scale
        self._settle_overlap(with_scaler=found_inf is not None)
        # If the last step failed this says so, while nothing of the new one has left.
        self.receive_hosted()
        for bucket in self.buckets:
            if bucket.sent:
                self._check_unchanged(bucket)
        for bucket in self.buckets:
            if not bucket.sent:
                self._send(bucket, scale, skip)
        for sparse in self.sparse:
            self._begin_iteration()
            sparse.send(scale, skip)
        for bucket in self.buffers:
            if not bucket.is_of_host:
                self._send(bucket)
        pumps, every = list(self._pumps), [*self.buckets, *self.buffers]
        # One pump alone ends the iteration by itself, as soon as all gradients have left.
        waits = len(pumps) != 1 or bool(self.sparse) or any(bucket.lane is None for bucket in every)
        if waits:
            # Whose gradients are refused is known once they have left, and :class:`PresenceBucket` tells of it.
            for bucket in every:
                bucket.leave()
            for pump in pumps:
                pump.flush()
            for bucket in self.buffers:
                if bucket.is_of_host:
                    self._send(bucket)
                    bucket.leave()
        for bucket in every if pumps else ():
            bucket.depart()
        for pump in pumps:
            pump.turn(clock=not waits)
            if not self._non_blocking:
                pump.order()
        if waits:
            self.job.clock()
        self._iteration += 1
        self._began = False
        refused: list[Optional[ParamillError]] = [bucket.refused for bucket in self.buckets]
        refused += [sparse.refused for sparse in self.sparse]
        for bucket in every:
            bucket.reset()
        told = self._failures()
        for bucket in every if pumps else ():
            try:
                if bucket.lane is not None:
                    bucket.arrive()
            except OrderError as error:
                told.append(error)
        refused += _preferred(told)
        return next((why for why in refused if why is not None), None)

    def receive(self) -> None:
        """Waits for everything that is under way.

        What one bucket has to refuse, others often have too: it is told once, when all of them have been waited for.
        """
        for pump in self._pumps:
            pump.wait()
        self._receive_hosted(self._failures())

    def receive_hosted(self) -> None:
        """Waits for what no pump carries."""
        self._receive_hosted([])

    def wait_for(self, bucket: Bucket) -> None:
        """Waits for one bucket before its parameters are used, and for all if it has to refuse something.

        Between the backward pass and the step, parameters are those that the gradients were computed with.
        """
        if bucket.sent:
            return
        try:
            bucket.receive()
        except (NonFiniteError, OrderError) as error:
            self._receive_hosted([error])

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
        """Stops listening, and ends what carries gradients."""
        self._stop_listening()
        for pump in self._pumps:
            pump.close()

    def _stop_listening(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _failures(self) -> list[ParamillError]:
        """What failed in pumps since this was asked last. What is no refusal is raised."""
        errors = [error for pump in self._pumps for error in pump.errors()]
        for error in errors:
            if not isinstance(error, (NonFiniteError, OrderError)):
                raise error
        return [error for error in errors if isinstance(error, ParamillError)]

    def _receive_hosted(self, refusals: list[ParamillError]) -> None:
        """Waits for what no pump carries."""
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
            raise _preferred(refusals)[0]

    def _on_gradient(self, bucket: Bucket, slot: Slot, parameter: Tensor) -> None:
        if self._holding:
            return
        if bucket.sent:
            raise OrderError(
                f"the gradient of `{slot.name}` was added to after it had left; give accumulate=K for K backward passes a "
                "step, or use no_sync() for all but the last"
            )
        slot.fired += 1
        # A bucket that is sent looks at all of its gradients then.
        if not self.overlap or self._accumulate > 1:
            slot.look(keep=self.overlap is None)
        if slot.fired != self._accumulate or not self.overlap:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            self._send(bucket)
            bucket.leave()

    def _send(self, bucket: Bucket, scale: Optional[Tensor] = None, skip: bool = False) -> None:
        self._begin_iteration()
        bucket.send(self._iteration, scale, skip)

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


def _preferred(refusals: Sequence[ParamillError]) -> list[ParamillError]:
    """The one to be told: what is out of order is refused again at the next wait."""
    return sorted(refusals, key=lambda error: not isinstance(error, NonFiniteError))[:1]
