"""Gradients averaged by the servers, and stepped with here: for optimizers that the servers do not have."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, Iterable, Optional, cast

import torch
from torch import Tensor

from .. import _native
from ..errors import OrderError, PolicyError
from ..job import Job
from ..policies import AveragingPolicies, Policies
from .buckets import AveragedBucket, Bucket, PresenceBucket, Slot, pack
from .exchanger import Exchanger
from .optimizer import JobOptimizer, check_keywords, declare_buffers, joining, names_in, pack_bytes_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AveragingOptimizer(JobOptimizer):
    """Has the gradients of all workers averaged, and then lets `optimizer` step.

    For optimizers that the servers do not have. Its groups and state are those of `optimizer`, so schedulers
    and checkpoints work on either. ``step`` waits for the mean: the model must be one that makes one step of a round.

    >>> import torch, paramill as pm
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = pm.torch.AveragingOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    >>> model(torch.ones(1)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.job.close()
    """

    POLICIES = AveragingPolicies

    def __init__(  # noqa: no call of the parent's: groups and state are another optimizer's
        self,
        optimizer: torch.optim.Optimizer,
        *,
        job: Optional[Job] = None,
        device_codec: Optional[bool] = None,
        accumulate: int = 1,
        overlap: Optional[bool] = None,
        buffers: Optional[Iterable[tuple[str, Tensor]]] = None,
        pack_bytes: Optional[int] = None,
        **policies: Unpack[AveragingPolicies],
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PolicyError(
                f"a {type(optimizer).__name__} is no optimizer: give one of torch, such as torch.optim.RAdam(model.parameters()), or "
                "make a DistributedOptimizer, whose steps the servers make"
            )
        check_keywords(AveragingOptimizer, policies)
        check_needs_no_closure(optimizer)
        sync = policies.get("sync") or "bsp"
        if not _native.steps_in_rounds(sync):
            raise PolicyError(
                f"under `{sync}` there is no mean of a round; average under {', '.join(_native.models_of_rounds())}, or name an "
                "optimizer of the servers"
            )
        if _native.pulls_partially(sync):
            raise PolicyError(
                f"under `{sync}` a worker would step with the last round's mean where it goes on without this one's, and others "
                "with this one's: replicas would differ for good; leave `b` and `tau2` out, or make a DistributedOptimizer"
            )
        # What torch writes into groups and state while it makes an optimizer is thrown away.
        self._optimizer: Any = SimpleNamespace()
        torch.optim.Optimizer.__init__(self, optimizer.param_groups, optimizer.defaults)
        self._optimizer = optimizer
        self._parameters = self._all_parameters()
        pack_bytes = pack_bytes or pack_bytes_of(self._parameters)
        with joining(job) as self.job:
            trained: list[Slot] = []
            frozen: list[Slot] = []
            for number, group in enumerate(optimizer.param_groups):
                names = names_in(group, len(group["params"]), f"{number}.")
                for name, parameter in zip(names, group["params"]):
                    (trained if parameter.requires_grad else frozen).append(Slot(name, parameter))
            own = cast(Policies, {**policies, "sync": sync, **AveragedBucket.POLICIES})
            buckets = pack(self.job, trained, AveragedBucket, pack_bytes // 4, "", own)
            self._frozen = pack(self.job, frozen, Bucket, pack_bytes // 4, "")
            means = declare_buffers(self.job, buffers, sync, pack_bytes)
            if buckets:
                means.append(PresenceBucket(buckets))
                means[-1].declare(self.job, "presence/", {"sync": sync, **PresenceBucket.POLICIES})
            self._exchanger = Exchanger(
                self.job, buckets, [], means, accumulate=accumulate, overlap=overlap, device_codec=device_codec
            )
            self._exchanger.start()
            for bucket in self._frozen:
                bucket.take_initial()

    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]
        """Waits for the mean gradients and steps with them."""
        parameters = self._all_parameters()
        if len(parameters) != len(self._parameters) or any(a is not b for a, b in zip(parameters, self._parameters)):
            raise OrderError(
                f"parameters were added to the {type(self._optimizer).__name__} after it was wrapped, and their gradients are "
                "each worker's own; make both optimizers anew, with all groups and a new job"
            )
        loss, refused = self._finish(closure)
        self._exchanger.receive()
        # With the mean of the round also where this worker's part was refused: all replicas stay the same.
        self._optimizer.step()
        if refused is not None:
            raise refused
        return loss

    def synchronize(self) -> None:
        """Does nothing: a step has waited already."""

    def close(self) -> None:
        """Lets go of the model, and leaves the job."""
        self._exchanger.close()
        self.job.close()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer that steps."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of the optimizer that steps."""
        self._optimizer.load_state_dict(state_dict)

    # Looked up each time: `load_state_dict` of the optimizer that steps makes them anew.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer that steps."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer that steps."""
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self._optimizer.state = state

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def check_needs_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that computes gradients within its step (LBFGS): these would be each worker's own."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PolicyError(
            f"{type(optimizer).__name__} calls its closure for new gradients within a step, and these would not be averaged: "
            "take an optimizer that steps with the gradients of one backward pass"
        )
