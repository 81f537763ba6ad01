"""The policies that can be said, wherever keyword arguments are: for type checkers. Native code has the list, and checks it."""

from __future__ import annotations

from typing import Literal, Optional, TypedDict


class LocalPolicies(TypedDict, total=False):
    """What can be said of tables whose pseudo-gradients are pushed."""

    #: Consistency model, such as ``"ssp:s=3"``.
    sync: Optional[str]
    #: How gradients are compressed, such as ``"topk:0.01+f16"``.
    codec: Optional[str]
    #: How parameters are compressed on their way back, such as ``"f16"``.
    answer_codec: Optional[str]
    #: ``"ranked"`` makes sums bit-reproducible under round-based models.
    order: Optional[Literal["arrival", "ranked"]]


class AveragingPolicies(LocalPolicies, total=False):
    """What can be said of tables whose gradients are averaged, and stepped with elsewhere."""

    #: On which way parameters reach the workers. Only ``"none"``, as answers to pulls, for now.
    broadcast: Optional[str]
    #: What happens to a gradient with NaN or Inf in it.
    nonfinite: Optional[Literal["reject", "clip"]]


class OptimizerPolicies(AveragingPolicies, total=False):
    """What can be said of tables whose optimizer is said by itself."""

    #: Whether the gradients of a round become their mean or their sum.
    reduce: Optional[Literal["mean", "sum"]]
    #: Which updates workers hold back and merge with later ones, such as ``"significance:0.05"``.
    hold: Optional[str]


class Policies(OptimizerPolicies, total=False):
    """What can be said of a table. What is not said, or is None, is the job's."""

    #: How gradients change parameters, such as ``"adamw:lr=1e-3"``.
    optimizer: Optional[str]


class JobPolicies(Policies, total=False):
    """What can be said of a job."""

    #: Which server holds what.
    placement: Optional[str]
    #: Bytes of parameters that travel in one frame, such as ``"32KB"``.
    chunk: Optional[str]
    #: Steps that workers make by themselves, such as ``"steps:h=50"`` (:class:`paramill.torch.LocalSteps`).
    local: Optional[str]


#: As it is, in both directions.
UNCOMPRESSED: Policies = {"codec": "none", "answer_codec": "none"}
