"""Local steps: each worker steps by itself, and the servers step by what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterable, Optional, cast

import torch
from torch import Tensor

from .. import _native
from ..errors import NonFiniteError, OrderError, PolicyError
from ..job import Job
from ..policies import LocalPolicies, Policies
from .buckets import Bucket, Slot, pack
from .compression import Encoded
from .devices import Pump
from .optimizer import check_keywords, declare_buffers, joining, pack_bytes_of
from .wrapping import WrappedOptimizer, check_optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LocalSteps(WrappedOptimizer):
    """Lets `optimizer` step this worker's own parameters, and synchronises them with the other workers every `h` steps.

    What is pushed is the pseudo-gradient: the parameters of the last synchronisation less those of now. The servers step by the mean of
    the workers', with the `outer` optimizer (DiLoCo). Groups and state are those of `optimizer`, so schedulers and checkpoints work on either.

    The schedule is the job's (``paramill launch --local steps:h=50,fragments=4``), or is given here. All workers make the same number of steps;
    :meth:`close` pushes the last of them.

    >>> import torch, paramill as pm
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = pm.torch.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), h=2)
    >>> for _ in range(4):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1)).sum().backward()
    ...     optimizer.step()
    >>> optimizer.close()

    :param h: steps from one synchronisation to the next
    :param fragments: parts of the model that are synchronised one after another, each every `h` steps, so that the link is used evenly
    :param late: steps that a worker makes between a push and the merge of its answer, in place of waiting for it. What it changed meanwhile is kept
    :param outer: the optimizer of the servers; the job's where the schedule is, else Nesterov momentum as in DiLoCo
    :param job: the job to join; ``paramill.init()`` otherwise
    :param buffers: ``model.named_buffers()`` to have them averaged over the workers every `h` steps; else they stay each worker's own
    :param pack_bytes: small parameters are packed into tables of at most this many bytes
    :param policies: those of these parameters (:class:`paramill.policies.LocalPolicies`); the job's otherwise
    """

    POLICIES = LocalPolicies
    # GradScaler hands its scale and what it found to `step`, instead of leaving a step out that others count.
    _step_supports_amp_scaling = True
    grad_scale: Optional[Tensor]
    found_inf: Optional[Tensor]
    #: The job that it trains in.
    job: Job

    def __init__(  # noqa: no call of the parent's: groups and state are another optimizer's
        self,
        optimizer: torch.optim.Optimizer,
        *,
        h: Optional[int] = None,
        fragments: Optional[int] = None,
        late: Optional[int] = None,
        outer: Optional[str] = None,
        job: Optional[Job] = None,
        buffers: Optional[Iterable[tuple[str, Tensor]]] = None,
        pack_bytes: Optional[int] = None,
        **policies: Unpack[LocalPolicies],
    ) -> None:
        check_optimizer(optimizer, "these would not be of the same batch")
        check_keywords(LocalSteps, policies)
        sync = policies.get("sync")
        check_sync(sync)
        self._wrap(optimizer)
        with joining(job) as self.job:
            of_job = self.job._native.local_steps()
            self._schedule = schedule(of_job, h, fragments, late)
            if outer is None and of_job is None:
                outer = _native.outer_optimizer()
            trained, frozen = self._slots()
            if pack_bytes is None:
                # At least as many packs as fragments, unless a tensor is larger.
                share = 4 * sum(slot.parameter.numel() for slot in trained) // self._schedule.fragments
                pack_bytes = min(pack_bytes_of(self._parameters), max(share, 4))
            own = cast(Policies, {**policies, "optimizer": outer})
            self._buckets = cast("list[LocalBucket]", pack(self.job, trained, LocalBucket, pack_bytes // 4, "", own))
            self._frozen = pack(self.job, frozen, Bucket, pack_bytes // 4, "")
            self._fragments = self._schedule.deal([bucket.size for bucket in self._buckets])
            self._buffers = declare_buffers(self.job, buffers, sync, pack_bytes)
            self.job.start()
            check_models(self.job)
            for bucket in [*self._buckets, *self._buffers]:
                bucket.begin()
            for bucket in self._frozen:
                bucket.take_initial()
            self.job._before_close.append(self.synchronize)
        # Steps of the job; one that joins goes on where the job is.
        self._made = self._schedule.first_step(self.job.iteration)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for torch, while the optimizer is made: servers take no new parameters later."""
        if hasattr(self, "_buckets"):
            raise OrderError("an optimizer takes no group after it was made; make it anew, with all groups and a new job")
        super().add_param_group(param_group)

    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]
        """Steps this worker's parameters, and synchronises the fragment whose turn it is, if it is one's.

        Where this worker's parameters are no numbers, its part of the synchronisation is left out, it goes on with the others' parameters,
        and :class:`~paramill.errors.NonFiniteError` is raised after that.
        """
        self._check_parameters("these are in no table")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_here()
        self._made += 1
        refused: list[NonFiniteError] = []
        if self._schedule.late > 0:
            self._merge(self._schedule.merged_after(self._made))
        fragment = self._schedule.pushed_after(self._made)
        if fragment is not None:
            refused = self._push([fragment])
            if self._schedule.late == 0:
                self._merge(fragment)
        if self._schedule.turns_after(self._made):
            self._turn()
        if refused:
            raise refused[0]
        return loss

    def synchronize(self) -> None:
        """Waits for what is under way. Steps since the last pushes stay this worker's own."""
        for fragment in range(self._schedule.fragments):
            self._merge(fragment)

    def close(self) -> None:
        """Pushes the steps that were made since the last synchronisation, takes the parameters that follow, and leaves the job."""
        refused: list[NonFiniteError] = []
        if not self.job.closed:
            self.synchronize()
            first, clocks = self._schedule.closing(self._made)
            for clock, fragments in enumerate(clocks, first):
                if clock < self.job.iteration:
                    continue
                refused += self._push(fragments)
                self._turn()
                self.synchronize()
        self.job.close()
        if refused:
            raise refused[0]

    def _step_here(self) -> None:
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and bool(found.item()):
            return
        if scale is not None:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            for gradient in gradients:
                gradient.div_(scale.to(gradient.device))
        self._optimizer.step()

    def _push(self, fragments: Iterable[int]) -> list[NonFiniteError]:
        wanted = set(fragments)
        due = [bucket for bucket, of in zip(self._buckets, self._fragments) if of in wanted]
        for bucket in due:
            bucket.push(self._made)
        return [bucket.refused for bucket in due if bucket.refused is not None]

    def _merge(self, fragment: Optional[int]) -> None:
        for bucket, of in zip(self._buckets, self._fragments):
            if of == fragment:
                bucket.receive()

    def _turn(self) -> None:
        """Ends a clock of the job, with the means of buffers."""
        for bucket in self._buffers:
            bucket.send(self._made)
            bucket.leave()
        self.job.clock()
        for bucket in self._buffers:
            bucket.receive()
            bucket.reset()


class LocalBucket(Bucket):
    """Parameters that are stepped here: their pseudo-gradient is pushed, and the answer merged."""

    is_of_host = True
    stays = False

    def __init__(self, slots: list[Slot]) -> None:
        super().__init__(slots)
        # The parameters of the last answer; from a push until its answer, those that were pushed.
        self._anchor: Optional[Tensor] = None

    def begin(self, device_codec: Optional[bool] = None, pump: Optional[Pump] = None) -> None:
        super().begin(False)
        self._now = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        self._anchor = self._now.clone()
        self._read()
        self._anchor.copy_(self._now)

    def push(self, step: int) -> None:
        """Sends the pseudo-gradient."""
        self.reset()
        self.send(step)
        self.leave()

    def send(self, step: int, scale: Optional[Tensor] = None, skip: bool = False) -> None:
        if self.under_way:
            self.receive()
        assert self._anchor is not None
        with torch.no_grad():
            self._read()
            pseudo = torch.sub(self._anchor, self._now)
            self._absent = []
            if not bool(torch.isfinite(pseudo).all()):
                # The others wait for this worker: it takes part as if it had changed nothing.
                pseudo.zero_()
                self._absent = [(0, self.size)]
                self.refused = NonFiniteError(
                    f"parameters of `{self.name}` have NaN or Inf at step {step}: nothing of them was pushed, and those of the servers "
                    "take their place; lower the learning rate"
                )
            self._gradient.copy_(pseudo)
            self._anchor.copy_(self._now)
        self._submit(Encoded("gradient", 0, [self._gradient]))

    def _read(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._views(self._now), self._targets())

    def _deliver(self) -> None:
        if self._anchor is None:
            return super()._deliver()
        with torch.no_grad():
            self._read()
            answer = self._received.to(self.device)
            # Nothing of parameters that were refused is kept.
            changed = torch.sub(self._now, self._anchor) if self.refused is None else 0.0
            torch.add(answer, changed, out=self._now)
            torch._foreach_copy_(self._targets(), self._views(self._now))
            self._anchor.copy_(answer)
            for view, slot in zip(self._views(self._anchor), self.slots):
                # What a shorter type cannot hold is no change of this worker's.
                if slot.parameter.dtype != torch.float32:
                    view.copy_(view.to(slot.parameter.dtype))


def schedule(
    of_job: Optional[_native.LocalSteps], h: Optional[int], fragments: Optional[int], late: Optional[int]
) -> _native.LocalSteps:
    """The job's schedule, or the one that is given."""
    given = {"h": h, "fragments": fragments, "late": late}
    named = {name: value for name, value in given.items() if value is not None}
    if of_job is not None:
        if of_job.inner is not None:
            raise PolicyError(
                f"the job has local={of_job.text}, and here the inner optimizer is the one that LocalSteps is given: leave `inner` out"
            )
        differing = [name for name, value in named.items() if getattr(of_job, name) != value]
        if differing:
            name = differing[0]
            raise PolicyError(
                f"the job has local={of_job.text}, and LocalSteps was given {name}={named[name]}: leave `{name}` out, or start the job "
                "without `local`"
            )
        return of_job
    if h is None:
        raise PolicyError("how many steps are there between synchronisations? Give h=50, or `paramill launch --local steps:h=50`")
    return _native.LocalSteps("steps:" + ",".join(f"{name}={value}" for name, value in named.items()))


def check_sync(sync: Optional[str], of: str = "") -> None:
    """Refuses partial pulls: pseudo-gradients are differences to parameters that every worker has."""
    if sync is not None and _native.pulls_partially(sync):
        raise PolicyError(
            f"under `{sync}`{of} a worker would go on without some of the parameters, and push what it did to them since once more: "
            "leave `b` and `tau2` out"
        )


def check_models(job: Job) -> None:
    """After the start: the same for models that are the job's."""
    for shard in job.status()["shards"]:
        for table in shard["tables"]:
            if table["name"] in job.tables:
                check_sync(table["sync"], " (the job's, of --sync or a config file)")
