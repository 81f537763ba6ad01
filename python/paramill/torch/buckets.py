"""Parameters packed into tables, and the way of gradients and parameters between them and the servers."""

from __future__ import annotations

import weakref
from typing import Any, Iterable, Optional, Sequence

import torch
from torch import Tensor

from ..errors import NonFiniteError, PolicyError
from ..job import Handle, Job, Slab, Table
from ..policies import UNCOMPRESSED, Policies
from .compression import HALVES, Chain, Compressor, Encoded
from .devices import Lane, Pump

# Every tensor in a pack begins at a cache line.
ALIGNMENT = 16
# Gradient and parameters, in the host's memory and in the device's, and what is compressed there.
MOST_KNOWN_VIEWS = 5


class Slot:
    """A parameter's place in its bucket, and what has become of its gradient in this iteration."""

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.fired = 0
        self._seen: Optional[weakref.ref[Tensor]] = None
        # Counts in-place changes of the gradient.
        self._version = -1
        self._copy: Optional[Tensor] = None

    def look(self, keep: bool = False) -> None:
        """Remembers which gradient there is; with `keep` its values too, since changes of its ``.data`` are not counted."""
        gradient = self.parameter.grad
        self._seen = None if gradient is None else weakref.ref(gradient)
        self._version = -1 if gradient is None else gradient._version
        self._copy = gradient.detach().clone() if keep and gradient is not None else None

    def changed(self) -> bool:
        """Whether the gradient is another one than the one that was looked at."""
        gradient = self.parameter.grad
        if gradient is None or self._seen is None:
            return gradient is not None or self._seen is not None
        if self._seen() is not gradient or self._version != gradient._version:
            return True
        return self._copy is not None and not torch.equal(_dense(self._copy), _dense(gradient))

    def reset(self) -> None:
        """For the next iteration."""
        self.fired = 0
        self._copy = None


class Bucket:
    """Parameters of one group that travel together: one table."""

    # Whether what arrives may stay where a device receives it.
    stays = True
    # Whether it is never carried by a pump.
    is_of_host = False

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.sent = False
        # Why no gradients left.
        self.refused: Optional[NonFiniteError] = None
        # Which of the slots had a gradient when the bucket was sent last.
        self.present = [False] * len(self.slots)
        # The elements of slots without a gradient. Servers are told of them.
        self._absent: list[tuple[int, int]] = []
        self._left = False
        self._table: Optional[Table] = None
        self._slab: Optional[Slab] = None
        self._exchange: Optional[Handle] = None
        #: Its way through the pump of its device, if that has one.
        self.lane: Optional[Lane] = None
        # What stands in the memory that frames leave from.
        self._content = ("gradient", 0)
        self._widened: Optional[Tensor] = None
        self._compressor: Optional[Compressor] = None
        self._codec = ""
        self._device_codec: Optional[bool] = None
        # What a compressor kept before the codec changed, and what of that is in the gradient that leaves next.
        self._unsent: Optional[Tensor] = None
        self._added: Optional[Tensor] = None
        self._starts: list[int] = []
        self._known_views: list[tuple[Tensor, list[Tensor]]] = []
        size = 0
        for slot in self.slots:
            self._starts.append(size)
            size += -(-slot.parameter.numel() // ALIGNMENT) * ALIGNMENT
        # One tensor alone needs no room between it and the next.
        self.size = size if len(self.slots) > 1 else self.slots[0].parameter.numel()
        #: First element and number of elements of each slot.
        self.layers = [(start, slot.parameter.numel()) for start, slot in zip(self._starts, self.slots)]
        # Each slot's elements, and those between it and the next.
        self._spans = list(zip(self._starts, [*self._starts[1:], self.size]))
        self.missing = len(self.slots)

    @property
    def name(self) -> str:
        """The parameter's name, or that of the first of several."""
        more = len(self.slots) - 1
        return self.slots[0].name + (f" and {more} more" if more else "")

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return self.slots[0].parameter.device

    @property
    def under_way(self) -> bool:
        """Whether parameters are yet to be received. What a pump carries is waited for by the device."""
        return self._exchange is not None

    def declare(self, job: Job, prefix: str, policies: Policies = {}) -> None:
        """Creates the table, with the parameters as they are."""
        flat = torch.zeros(self.size, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            torch._foreach_copy_(self._views(flat), [slot.parameter.detach() for slot in self.slots])
        self._known_views.clear()
        self._job = job
        shapes = [slot.parameter.shape for slot in self.slots]
        if len(self.slots) == 1:
            self._table = job.table(prefix + self.name, init=flat.view(shapes[0]).numpy(), alone=True, **policies)
            return
        names = [prefix + slot.name for slot in self.slots]
        layers = list(zip(names, self._starts, shapes))
        self._table = job.table(prefix + self.name, init=flat.numpy(), alone=True, layers=layers, **policies)

    def begin(self, device_codec: Optional[bool] = None, pump: Optional[Pump] = None) -> None:
        """After the start: takes the table's memory, and the values of rank 0 into the parameters.

        `device_codec` says whether torch compresses gradients; if it is not given, it does so on a GPU where it can. `pump` is
        the device's, if it has one.
        """
        assert self._table is not None
        self._slab = self._table.slab()
        self._device_codec = device_codec
        self._look()
        if pump is not None and not self.is_of_host:
            self.lane = pump.add(self, self._slab)
            self.lane.home.copy_(self._values)
        codec = self._slab._native.codec()
        self._follow(codec)
        if device_codec and self._compressor is None and codec not in ("", "none"):
            raise PolicyError(f"torch cannot compress by `{codec}`; leave device_codec out, and the worker does it")
        self._move_in()
        self._deliver()

    def take_initial(self) -> None:
        """After the start, for parameters that are never pushed: takes the values of rank 0, and nothing else."""
        assert self._table is not None
        values = torch.from_numpy(self._table.values.copy()).flatten()
        with torch.no_grad():
            torch._foreach_copy_(self._targets(), self._views(values))

    def send(self, step: int, scale: Optional[Tensor] = None, skip: bool = False) -> None:
        """Sends the gradients of this step. `scale` is what they are multiplied by first; with `skip` it is as if there were none."""
        if self.under_way:
            self.receive()
        assert self._slab is not None
        codec = self._slab._native.codec()
        if codec != self._codec:
            self._follow(codec)
        compressor = self._compressor if self._compressor and self._compressor.applies(step) else None
        flat = compressor.input if compressor else self._outgoing
        slots = self.slots
        gradients = [None if skip else slot.parameter.grad for slot in slots]
        with torch.no_grad():
            views = self._views(flat)
            self.present = [gradient is not None for gradient in gradients]
            self._absent = []
            if not all(self.present):
                flat.zero_()
                views = [view for view, here in zip(views, self.present) if here]
                self._absent = [span for span, here in zip(self._spans, self.present) if not here]
            if views:
                torch._foreach_copy_(views, [_dense(gradient) for gradient in gradients if gradient is not None])
            if scale is not None and not skip:
                flat.mul_(scale.to(flat.device))
            self._add_unsent(flat)
            encoded = compressor.encode(step, self._absent) if compressor else Encoded("gradient", 0, [flat])
        for slot in slots:
            slot.look()
        self._submit(encoded)

    def leave(self) -> None:
        """Hands the gradients to the servers, if they are in the host's memory."""
        if not self.sent or self._left or self.lane is not None:
            return
        assert self._slab is not None
        content, count = self._content
        if content != "gradient":
            self._slab._native.contains(content, count, self._codec)
        if self._absent:
            self._slab._native.lacks(self._absent)
        try:
            self._exchange = self._job.exchange([self._slab])
        except NonFiniteError as error:
            # The others wait for this worker: it takes part as if it had no gradients, and the step tells.
            self.refused = error
            self.fail(is_refusal=True)
            self._gradient.zero_()
            if content != "gradient":
                self._slab._native.contains(content, 0, self._codec)
            self._slab._native.lacks([(0, self.size)])
            self._exchange = self._job.exchange([self._slab])
        self._left = True

    def receive(self) -> None:
        """Waits for the parameters that follow the gradients, and puts them in place."""
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            try:
                exchange.wait()
            except TimeoutError:
                self._exchange = exchange
                raise
            finally:
                # An error may have moved the memory.
                self._look()
            self._deliver()

    def depart(self) -> None:
        """Before a pump puts new parameters in place."""

    def arrive(self) -> None:
        """After the iteration of a pump has ended: what is computed from now on has the new parameters."""
        self._deliver()

    def enter(self) -> None:
        """When its new parameters are about to be used that a pump has put in place meanwhile."""

    def fail(self, is_refusal: bool) -> None:
        """An exchange failed; gradients that were refused here did not leave."""
        if is_refusal:
            self._unsent = self._added if self._added is not None else self._unsent
            self.present = [False] * len(self.slots)

    def changed_since_sent(self) -> Optional[Slot]:
        """A parameter whose gradient is no longer the one that left."""
        return next((slot for slot in self.slots if slot.changed()), None)

    def reset(self) -> None:
        """For the next iteration."""
        self.sent = False
        self.refused = None
        self._left = False
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.reset()

    @property
    def _outgoing(self) -> Tensor:
        """Where gradients are to be put that are sent as they are."""
        return self._gradient if self.lane is None else self.lane.outgoing

    @property
    def _answer(self) -> Tensor:
        """The parameters that came last, where they can be copied from."""
        return self._values if self.lane is None else self.lane.home

    @property
    def _received(self) -> Tensor:
        """The same in the host's memory. A device may have had them as halves."""
        assert self._slab is not None
        kind = self._slab._native.values_type()
        if kind == "f32":
            return self._values
        if self._widened is None:
            self._widened = torch.empty(self.size, dtype=torch.float32, device="cpu")
        return self._widened.copy_(self._values.view(HALVES[kind])[: self.size])

    def _submit(self, encoded: Encoded) -> None:
        if self.lane is not None:
            self.lane.submit(encoded, self._codec, self._absent)
        else:
            self._content = encoded.place(self._gradient)
        self.sent = True

    def _follow(self, codec: str) -> None:
        """Compresses by the codec that holds now, if torch is to. What was kept under another one goes with the next gradient."""
        assert self._slab is not None
        kept = self._compressor.residual if self._compressor else None
        if kept is not None:
            self._unsent = kept if self._unsent is None else kept + self._unsent
        self._codec, self._compressor = codec, None
        self._known_views.clear()
        chain, device = Chain.read(codec), self.device
        on_device = device.type == "cuda" if self._device_codec is None else self._device_codec
        if chain is not None and on_device:
            pump = self.lane.pump if self.lane is not None else None
            self._compressor = Compressor(chain, self.size, self.layers, device, pump)

    def _add_unsent(self, flat: Tensor) -> None:
        """Adds what was kept under another codec, where there is a gradient."""
        self._added = unsent = self._unsent
        if unsent is None:
            return
        rest = unsent.clone()
        for (start, end), here in zip(self._spans, self.present):
            if here:
                flat[start:end].add_(unsent[start:end].to(flat.device))
                rest[start:end].zero_()
        self._unsent = None if all(self.present) else rest

    def _targets(self) -> list[Tensor]:
        return [slot.parameter for slot in self.slots]

    def _deliver(self) -> None:
        pairs = zip(self._targets(), self._views(self._answer))
        apart = [(target, view) for target, view in pairs if target.data_ptr() != view.data_ptr()]
        if apart:
            if self.lane is not None:
                self.lane.pump.order()
            with torch.no_grad():
                torch._foreach_copy_([target for target, _ in apart], [view for _, view in apart])

    def _move_in(self) -> None:
        """Has parameters live where the device receives them, which is written only between two of its computations."""
        if self.lane is None or not self.stays:
            return
        home = self.lane.home
        for view, slot in zip(self._views(home), self.slots):
            if slot.parameter.dtype == home.dtype and slot.parameter.is_contiguous():
                slot.parameter.data = view

    def _look(self) -> None:
        """Tensors over the slab's memory, made anew if that moved."""
        assert self._slab is not None
        gradient = self._slab.gradient
        if getattr(self, "_looked_at", None) is gradient:
            return
        self._looked_at = gradient
        self._gradient = torch.from_numpy(gradient).view(-1)
        self._values = torch.from_numpy(self._slab.values).view(-1)
        self._known_views.clear()

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' shapes in `flat`. The same few tensors are asked for over and over; views take time to make."""
        for known, views in self._known_views:
            if known is flat:
                return views
        views = [
            flat[start : start + slot.parameter.numel()].view(slot.parameter.shape)
            for start, slot in zip(self._starts, self.slots)
        ]
        if len(self._known_views) < MOST_KNOWN_VIEWS:
            self._known_views.append((flat, views))
        return views


class AveragedBucket(Bucket):
    """A bucket whose table has, after every round, the mean of the round's gradients: they become the gradients.

    The server steps with lr = 1 and a weight decay of 1: w - (mean + w) = -mean. What nobody has a gradient for is stepped
    too, since it would be the mean of an earlier round otherwise. :class:`PresenceBucket` tells it from a mean of zero.
    """

    POLICIES: Policies = {"optimizer": "sgd:lr=1,weight_decay=1,absent=zeros", "reduce": "mean"}
    stays = False

    def begin(self, device_codec: Optional[bool] = None, pump: Optional[Pump] = None) -> None:
        self._began = False
        super().begin(device_codec, pump)
        self._began = True

    def _targets(self) -> list[Tensor]:
        if not self._began:
            return super()._targets()
        for slot in self.slots:
            if slot.parameter.grad is None or slot.parameter.grad.is_sparse:
                slot.parameter.grad = torch.empty_like(slot.parameter)
        return [slot.parameter.grad for slot in self.slots if slot.parameter.grad is not None]

    def _deliver(self) -> None:
        super()._deliver()
        if self._began:
            torch._foreach_neg_(self._targets())


class PresenceBucket(Bucket):
    """Which parameters of averaged buckets somebody had a gradient for: the others have none after the round either.

    One element for each parameter, 1 where there is a gradient. Their mean is 0 where nobody has one. They travel without a
    codec, which might leave them out. They are sent after the buckets that they tell of have left, since a gradient that is no
    number is refused only then, and are received after them.
    """

    POLICIES: Policies = {**AveragedBucket.POLICIES, **UNCOMPRESSED}
    stays = False
    is_of_host = True

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._of = list(buckets)
        self._parameters = [slot.parameter for bucket in buckets for slot in bucket.slots]
        super().__init__([Slot("gradients", torch.zeros(len(self._parameters), dtype=torch.float32, device="cpu"))])

    def begin(self, device_codec: Optional[bool] = None, pump: Optional[Pump] = None) -> None:
        self._began = False
        super().begin()
        self._began = True

    def send(self, step: int, scale: Optional[Tensor] = None, skip: bool = False) -> None:
        if self.under_way:
            self.receive()
        present = [float(here) for bucket in self._of for here in bucket.present]
        self._gradient.copy_(torch.tensor(present, dtype=torch.float32, device="cpu"))
        self.sent = True

    def _deliver(self) -> None:
        super()._deliver()
        for parameter, mean in zip(self._parameters, self.slots[0].parameter.tolist() if self._began else []):
            # Under `drop` a round may have a gradient of which its presence came too late.
            if mean == 0.0 and parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None


class BufferBucket(Bucket):
    """Buffers (batch-norm statistics), averaged over the workers: each pushes how far its own are from the last mean."""

    # A codec would keep what it leaves out, and that is in the next difference anyway.
    POLICIES: Policies = {"optimizer": "sgd:lr=1", "reduce": "mean", **UNCOMPRESSED}
    stays = False

    def send(self, step: int, scale: Optional[Tensor] = None, skip: bool = False) -> None:
        if self.under_way:
            self.receive()
        outgoing, last = self._outgoing, self._answer
        with torch.no_grad():
            torch._foreach_copy_(self._views(outgoing), self._targets())
            torch.sub(last, outgoing, out=outgoing)
            for (start, following), slot in zip(self._spans, self.slots):
                outgoing[start + slot.parameter.numel() : following].zero_()
        self._submit(Encoded("gradient", 0, [outgoing]))


class SparseSlot:
    """A parameter of which only the rows travel that are used: an embedding with sparse gradients."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        # Why no rows left.
        self.refused: Optional[NonFiniteError] = None
        self._push: Optional[Handle] = None
        self._stale = False

    def declare(self, job: Job, prefix: str, policies: Policies = {}) -> None:
        """Creates the table, with the parameter as it is."""
        parameter = self.slot.parameter.detach()
        initial = parameter.to("cpu", torch.float32).contiguous().numpy()
        self._table = job.table(prefix + self.slot.name, init=initial, rows=True, **policies)

    def pull_all(self) -> None:
        """Every row as it is after the last step. After the end of the job that is what is here."""
        if self._table._job.closed and not self._stale:
            return
        self.settle_push()
        # By its rows, since a pull of the whole may be answered before the others' part of the last step.
        whole = self._table.rows(torch.arange(len(self.slot.parameter), device="cpu").numpy()).wait()
        with torch.no_grad():
            self.slot.parameter.copy_(torch.from_numpy(whole))
        self._stale = False

    def pull(self, indices: Optional[Tensor]) -> None:
        """The rows that a forward pass is about to use; all of them if it is not known which."""
        if not self._stale:
            return
        if indices is None:
            return self.pull_all()
        self.settle_push()
        rows = torch.unique(indices.detach())
        if rows.numel() == 0:
            return
        values = self._table.rows(rows.cpu().numpy()).wait()
        parameter = self.slot.parameter
        with torch.no_grad():
            parameter[rows.to(parameter.device)] = torch.from_numpy(values).to(parameter.device, parameter.dtype)

    def send(self, scale: Optional[Tensor] = None, skip: bool = False) -> None:
        """Sends the gradients of the rows that have some."""
        gradient = self.slot.parameter.grad
        self.settle_push()
        width = self.slot.parameter[0].numel()
        if gradient is None or skip:
            rows = torch.empty(0, dtype=torch.int64, device="cpu")
            values = torch.empty(0, width, dtype=torch.float32, device="cpu")
        elif gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        else:
            rows = gradient.flatten(1).any(1).nonzero()[:, 0]
            values = gradient[rows]
        if scale is not None:
            values = values * scale.to(values.device)
        values = values.detach().to("cpu", torch.float32).reshape(-1, width)
        self.refused = None
        try:
            self._push = self._table.push(values.numpy(), rows=rows.cpu().numpy())
        except NonFiniteError as error:
            # As of buckets: the others wait for this worker.
            self.refused = error
            self._push = self._table.push(values[:0].numpy(), rows=rows[:0].cpu().numpy())
        self._stale = True

    def settle_push(self) -> None:
        """Waits until the servers have taken the last gradients."""
        push, self._push = self._push, None
        if push is not None:
            push.wait()


def pack(job: Job, slots: Iterable[Slot], kind: type[Bucket], limit: int, prefix: str, policies: Policies = {}) -> list[Bucket]:
    """Packs parameters in the order in which their gradients become ready: from the last one to the first, and declares them.

    What is larger than `limit` elements stays alone. Parameters of different devices, or for which the job has different
    policies by their names, or of which a codec leaves some alone as too small, are not packed together.
    """
    slots = list(slots)
    groups = job._groups([(prefix + slot.name, slot.parameter.numel()) for slot in slots], policies) if slots else []
    buckets: list[Bucket] = []
    open_packs: dict[tuple[torch.device, int], list[Slot]] = {}
    for slot, group in reversed(list(zip(slots, groups))):
        waiting = open_packs.setdefault((slot.parameter.device, group), [])
        filled = sum(other.parameter.numel() for other in waiting)
        if waiting and filled + slot.parameter.numel() > limit:
            buckets.append(kind(waiting.copy()))
            waiting.clear()
        waiting.append(slot)
    buckets += [kind(waiting) for waiting in open_packs.values()]
    for bucket in buckets:
        bucket.declare(job, prefix, policies)
    return buckets


def _dense(gradient: Any) -> Tensor:
    tensor: Tensor = gradient
    return tensor.to_dense() if tensor.is_sparse else tensor
