"""Gradients averaged by the servers, and stepped with here: for optimizers that the servers do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Iterable, Optional, cast

import torch
from torch import Tensor

from .. import _native
from ..errors import PolicyError
from ..job import Job
from ..policies import AveragingPolicies, Policies
from .buckets import AveragedBucket, Bucket, PresenceBucket, pack
from .exchanger import Exchanger
from .optimizer import JobOptimizer, check_keywords, declare_buffers, joining, pack_bytes_of
from .wrapping import WrappedOptimizer, check_optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AveragingOptimizer(WrappedOptimizer, JobOptimizer):
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
        check_optimizer(optimizer, "these would not be averaged")
        check_keywords(AveragingOptimizer, policies)
        sync = policies.get("sync") or "bsp"
        if not _native.steps_in_rounds(sync):
            raise PolicyError(
                f"under `{sync}` there is no mean of a round that all workers take; average under {', '.join(_native.models_of_rounds())}, or name an "
                "optimizer of the servers"
            )
        if _native.pulls_partially(sync):
            raise PolicyError(
                f"under `{sync}` a worker would step with the last round's mean where it goes on without this one's, and others "
                "with this one's: replicas would differ for good; leave `b` and `tau2` out, or make a DistributedOptimizer"
            )
        self._wrap(optimizer)
        pack_bytes = pack_bytes or pack_bytes_of(self._parameters)
        with joining(job) as self.job:
            trained, frozen = self._slots()
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
        self._check_parameters("their gradients are each worker's own")
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
