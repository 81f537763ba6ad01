"""A `torch.optim.Optimizer` whose step is made by the servers."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterable, Iterator, Optional, Sequence, cast

import torch
from torch import Tensor

from .. import _native
from ..errors import NonFiniteError, OrderError, ParamillError, PolicyError
from ..job import Job, init, open_jobs
from ..policies import OptimizerPolicies, Policies
from . import moments
from .buckets import Bucket, BufferBucket, Slot, pack
from .exchanger import Exchanger
from .forward import ForwardWaits, Wait
from .rules import check_groups, from_torch, number, parse_optimizer, text_of
from .watch import WatchedBucket, WatchedRows

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Packs are a sixteenth of a model, within these limits: every pack costs Python time, and the last one has nothing to overlap with.
PACKS_OF_A_MODEL = 16
LEAST_PACK_BYTES, MOST_PACK_BYTES = 1 << 20, 32 << 20
# Servers take no learning rate of 0, which schedules end or begin with. With this one nothing moves either.
SMALLEST_LR = 1e-30


class JobOptimizer(torch.optim.Optimizer):
    """What both optimizers of a job do alike."""

    # The names and types of the policies that it takes.
    POLICIES: Any
    # GradScaler hands its scale and what it found to `step`, instead of leaving a step out that others wait for.
    _step_supports_amp_scaling = True
    grad_scale: Optional[Tensor]
    found_inf: Optional[Tensor]
    #: The job that it trains in.
    job: Job
    _exchanger: Exchanger
    _frozen: list[Bucket]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for torch, while the optimizer is made: servers take no new parameters later."""
        if hasattr(self, "_exchanger"):
            raise OrderError("an optimizer takes no group after it was made; make it anew, with all groups and a new job")
        super().add_param_group(param_group)

    def no_sync(self) -> ContextManager[None]:
        """Backward passes in here only add to gradients, as under ``DistributedDataParallel.no_sync``."""
        return self._exchanger.no_sync()

    def _finish(self, closure: Optional[Callable[[], float]]) -> tuple[Optional[float], Optional[ParamillError]]:
        """Ends the iteration. The loss that the closure computed, and why gradients were refused, if they were."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for slot in (slot for bucket in self._frozen for slot in bucket.slots):
            if slot.parameter.grad is not None:
                raise ParamillError(f"`{slot.name}` has a gradient, but was frozen when the optimizer was made; make it anew")
        self._check_read()
        return loss, self._exchanger.finish(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    def _check_read(self) -> None:
        """Refuses gradients that were computed with parameters that were not waited for."""


class DistributedOptimizer(JobOptimizer):
    """Trains `params` on servers, with the optimizer that `optimizer` names (``"adamw:lr=1e-3"``).

    `params` are ``model.named_parameters()``, or groups of them as torch's optimizers take them; a group may have values
    of its own for every parameter of the rule (``{"params": ..., "weight_decay": 0}``). For optimizers that the servers do not have
    there is :class:`AveragingOptimizer`.

    Gradients leave during the backward pass, as soon as a bucket of them is ready. After ``step`` parameters are the new ones, unless
    it is `non_blocking`. On a CPU it waits for them; on a GPU nothing but the GPU does, and errors of servers are told by the next
    ``step`` or :meth:`synchronize`. Initial values are those of rank 0.

    :param job: the job to join; ``paramill.init()`` otherwise
    :param policies: those of these parameters (:class:`paramill.policies.OptimizerPolicies`); the job's otherwise. Under
        ``sync="psp:c=28,b=0.9"`` a step goes on with the blocks that are here, and the rest of the parameters stay as they
        are; under ``sync="ssp:s=3"`` one goes on with all parameters as they are while they lack no more than 3 rounds; with
        ``reduce="sum"`` the gradients of N workers count N times as much as their mean
    :param device_codec: whether torch compresses gradients where they are, so that only what travels leaves the device
        (``topk``, ``threshold``, ``dvf``, ``f16``, ``bf16``); it does so on a GPU if not given. The worker does the rest
    :param accumulate: backward passes per step
    :param overlap: whether gradients leave during the backward pass; found out in the first iteration if not given
    :param non_blocking: ``step`` returns at once, and the next forward of a module waits for the module's own parameters; on a GPU
        that of the outermost one for all. Read parameters between the two after :meth:`synchronize`
    :param sparse: names of parameters of which only the rows travel that are used (embeddings with sparse gradients)
    :param buffers: ``model.named_buffers()`` to have them averaged over the workers at every step; else they stay each
        worker's own
    :param pack_bytes: small parameters are packed into tables of at most this many bytes; of a sixteenth of the model, within
        1 and 32 MB, if not given
    """

    POLICIES = OptimizerPolicies

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: str = "sgd:lr=0.1",
        *,
        job: Optional[Job] = None,
        device_codec: Optional[bool] = None,
        accumulate: int = 1,
        overlap: Optional[bool] = None,
        non_blocking: bool = False,
        sparse: Sequence[str] = (),
        buffers: Optional[Iterable[tuple[str, Tensor]]] = None,
        pack_bytes: Optional[int] = None,
        **policies: Unpack[OptimizerPolicies],
    ) -> None:
        if isinstance(params, torch.optim.Optimizer):
            raise PolicyError(
                f"the parameters are those of a model, such as model.named_parameters(), and not of a {type(params).__name__}: to "
                f"step with it here, with gradients that servers average, make a pm.torch.AveragingOptimizer({type(params).__name__}(...))"
            )
        check_keywords(DistributedOptimizer, policies)
        check_is_text(optimizer)
        self._non_blocking = non_blocking
        sync = policies.get("sync")
        groups = named_groups(params)
        pack_bytes = pack_bytes or pack_bytes_of(parameter for group in groups for parameter in group["params"])
        rule, defaults = parse_for_groups(optimizer, groups)
        self._rule = rule
        self._keys = list(defaults)
        check_groups(rule, defaults, groups)
        super().__init__([{**group, "params": group["params"]} for group in groups], dict(defaults))
        self._group_keys = [set(group) for group in self.param_groups]
        # What the servers know.
        self._told: list[str] = []
        self._told = self._texts()
        with joining(job) as self.job:
            dense: list[Bucket] = []
            rows: list[WatchedRows] = []
            self._frozen: list[Bucket] = []
            # Groups that have a table: those of which nothing is trained have none.
            self._trained: set[int] = set()
            unknown = set(sparse)
            for index, group in enumerate(self.param_groups):
                slots = [Slot(name, p) for name, p in zip(group["names"], group["params"])]
                own = cast(Policies, {**policies, "optimizer": self._told[index]})
                of_rows = [slot for slot in slots if slot.name in unknown]
                unknown -= {slot.name for slot in of_rows}
                trained = [slot for slot in slots if slot.parameter.requires_grad and slot not in of_rows]
                frozen = [slot for slot in slots if not slot.parameter.requires_grad and slot not in of_rows]
                if trained or of_rows:
                    self._trained.add(index)
                for slot in of_rows:
                    rows.append(WatchedRows(slot))
                    rows[-1].declare(self.job, self._prefix(index), own)
                prefix, limit = self._prefix(index), pack_bytes // 4
                dense += pack(self.job, trained, WatchedBucket, limit, prefix, own)
                self._frozen += pack(self.job, frozen, Bucket, limit, f"frozen/{prefix}")
            if unknown:
                raise ParamillError(f"no parameter is called {', '.join(sorted(unknown))}")
            means = declare_buffers(self.job, buffers, sync, pack_bytes)
            self._exchanger = Exchanger(
                self.job,
                dense,
                rows,
                means,
                accumulate=accumulate,
                overlap=overlap,
                device_codec=device_codec,
                before_first=self._before_iteration,
                non_blocking=non_blocking,
            )
            self.job.start()
            self._exchanger.start()
            for bucket in self._frozen:
                bucket.take_initial()
        self._watched = [each for each in [*dense, *rows] if isinstance(each, (WatchedBucket, WatchedRows))]
        self.job._before_close.append(self._stop_watching)
        self._left_over: Optional[list[Any]] = None
        sparse_ones = {each.slot.parameter for each in rows}
        carried = {slot.parameter for bucket in [*dense, *means] for slot in bucket.slots}
        self._forward = ForwardWaits(self._waits(), sparse_ones, self._before_save, sparse_ones | carried)

    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]
        """Ends the iteration: what has not left yet leaves now, and the new parameters are waited for unless `non_blocking`."""
        loss, refused = self._finish(closure)
        if self._left_over is None:
            self._left_over = self._forward.learn()
        try:
            if not self._non_blocking:
                self._exchanger.receive_hosted()
            for wait in self._left_over:
                wait(None)
        except NonFiniteError as error:
            # What a server refused, and what did not leave, are told as one.
            refused = refused or error
        if refused is not None:
            raise refused
        return loss

    def synchronize(self) -> None:
        """Waits for all parameters that are under way, and pulls all rows of sparse ones.

        After an error that parameters were changed while new values were on their way, these take the place of what was written.
        """
        for each in self._watched:
            if isinstance(each, WatchedBucket):
                each.give_way()
        self._exchanger.synchronize()

    def close(self) -> None:
        """Takes the parameters as they are now, lets go of the model, and leaves the job.

        Parameters that the script has written to since the last step stay as they are.
        """
        self._stop_watching()
        self.synchronize()
        self._forward.close()
        self._exchanger.close()
        self.job.close()

    def state_dict(self, *, servers: bool = False) -> dict[str, Any]:
        """Groups with their learning rates, the rule, and the iteration.

        With `servers` also what servers keep of past gradients (velocities, moments, how many steps were made), in torch's layout where
        torch has the rule: all workers call it after the same step, and each gets all of it. Without it :meth:`load_state_dict` warns
        that it is missing, where the rule has such a state. What a codec has not sent yet is never in it.
        """
        state = super().state_dict()
        state["paramill"] = {"rule": self._rule, "iteration": self.job.iteration}
        if servers:
            state["state"] = self._servers_state()
            state["paramill"]["servers"] = True
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over groups with their learning rates; the rule must be the same. A state of torch's own optimizer is taken
        over by what the rule has of it, and refused where it asks for more (``amsgrad``).

        Servers go on with the state that they have. In a new job that is none, and a warning says so unless the rule is
        plain ``sgd``: momentum builds up again, and Adam corrects its bias from the first step on. A state with that of the servers is
        refused unless the job is at its iteration: servers take theirs from a checkpoint (``--resume``), before a job begins.
        """
        rule = state_dict.get("paramill", {}).get("rule", self._rule)
        if rule != self._rule:
            raise PolicyError(f"this state is of an optimizer `{rule}`, and this one is `{self._rule}`")
        saved = state_dict.get("paramill", {})
        if saved.get("servers") and rule != "sgd" and saved["iteration"] != self.job.iteration:
            raise PolicyError(
                f"this state has that of the servers at iteration {saved['iteration']}, and the job is at {self.job.iteration}: servers "
                "take theirs when a job begins, from a checkpoint (job.checkpoint(FILE), and servers with --resume FILE); or "
                "load one that was saved without it (state_dict())"
            )
        # The parameters of the last step are those of the groups that it was made with.
        self._exchanger.synchronize()
        own = self.param_groups
        state = {key: value for key, value in state_dict.items() if key != "paramill"}
        if "paramill" not in state_dict:
            state["param_groups"] = [from_torch(rule, self._keys, group) for group in state["param_groups"]]
        # Moments are the servers': these would be saved again with the next state as if they counted.
        state["state"] = {}
        super().load_state_dict(state)
        for group, before_it in zip(self.param_groups, own):
            # A state of one of torch's optimizers does not have all that this rule has.
            for key, value in before_it.items():
                group.setdefault(key, value)
        before = state_dict.get("paramill", {}).get("iteration", 0)
        of_torch = "paramill" not in state_dict and bool(state_dict["state"])
        if (before > self.job.iteration or of_torch) and rule != "sgd":
            moment = "a state of torch's own optimizer" if of_torch else f"iteration {before}"
            warnings.warn(
                f"groups and learning rates of {moment} are restored; the state of `{rule}` on the servers "
                "(velocities, moments, steps made) is not in a state_dict and begins anew",
                stacklevel=2,
            )

    def _servers_state(self) -> dict[int, dict[str, Any]]:
        """The servers' state of every parameter that is trained, by its number over all groups."""
        self.synchronize()
        # Nobody pushes meanwhile: the checkpoint is of this iteration.
        self.job.barrier("paramill.state_dict")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "copy.safetensors"
            self.job._native.checkpoint(None, os.fspath(path), self.job.iteration)
            tables = moments.read(path)
        self.job.barrier("paramill.state_dict")
        numbers = {p: n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        state: dict[int, dict[str, Any]] = {}
        for bucket in self._exchanger.buckets:
            assert bucket._table is not None
            for slot, (start, _) in zip(bucket.slots, bucket.layers):
                of = tables[bucket._table.name].of(self._rule, start, slot.parameter.shape)
                state[numbers[slot.parameter]] = of
        for rows in self._exchanger.sparse:
            assert rows._table is not None
            of = tables[rows._table.name].of(self._rule, 0, rows.slot.parameter.shape)
            state[numbers[rows.slot.parameter]] = of
        return dict(sorted(state.items()))

    def _waits(self) -> dict[Tensor, Wait]:
        waits: dict[Tensor, Wait] = {}
        for bucket in [*self._exchanger.buckets, *self._exchanger.buffers]:
            if not self._non_blocking:
                break
            if bucket.lane is not None:
                # The device waits for all of a pump's buckets at once.
                waits.update((slot.parameter, bucket.lane.pump.enter) for slot in bucket.slots)
                continue

            def wait(_: Optional[Tensor], bucket: Bucket = bucket) -> None:
                self._exchanger.wait_for(bucket)

            waits.update((slot.parameter, wait) for slot in bucket.slots)
        waits.update((sparse.slot.parameter, sparse.pull) for sparse in self._exchanger.sparse)
        return waits

    def _prefix(self, number: int) -> str:
        """Of the tables that a group trains, and of no others: a schedule goes to all that begin with it."""
        return f"p{number}/"

    def _texts(self) -> list[str]:
        """The rule of every group as the group's values are now. What servers would not take is refused on every worker."""
        texts = []
        for index, group in enumerate(self.param_groups):
            values = {key: group[key] for key in self._keys}
            if not float(values["lr"]) >= 0:
                raise PolicyError(f"group {index} has lr = {number(values['lr'])}: expected lr >= 0")
            values["lr"] = max(float(values["lr"]), SMALLEST_LR)
            texts.append(text_of(self._rule, values))
            if texts[-1:] != self._told[index : index + 1]:
                _native.check_policies({"optimizer": texts[-1]})
        return texts

    def _check_read(self) -> None:
        for each in self._watched:
            if isinstance(each, WatchedBucket):
                each.check_read()

    def _before_iteration(self) -> None:
        for each in self._watched:
            each.check()
        self._follow_schedule()

    def _before_save(self, prefix: str) -> None:
        """Waits before a module is saved: for the parts of one that has waited nothing is left to wait for."""
        if not (prefix and self._exchanger.is_settled):
            self._exchanger.synchronize()

    def _stop_watching(self) -> None:
        for each in self._watched:
            each.closing = True

    def _follow_schedule(self) -> None:
        """Tells the servers what a scheduler changed, before the first gradient of the iteration leaves."""
        keys = [set(group) for group in self.param_groups]
        if keys != self._group_keys:
            check_groups(self._rule, self._keys, self.param_groups)
            self._group_keys = keys
        texts = self._texts()
        if texts == self._told:
            return
        if self.job.rank == 0:
            # The last round closes with the values that it began with.
            self._exchanger.receive()
            for index, (new, old) in enumerate(zip(texts, self._told)):
                if new != old and index in self._trained:
                    self.job.set(optimizer=new, table=f"{self._prefix(index)}*")
        self._told = texts


def check_is_text(optimizer: Any) -> None:
    """Refuses what is no text in words: one of torch's classes is what a script has there most often."""
    if isinstance(optimizer, str):
        return
    of_torch = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    name = f"torch.optim.{optimizer.__name__}" if of_torch else "torch.optim.AdamW"
    given = f"the class {name}" if of_torch else repr(optimizer)
    raise PolicyError(
        f'the optimizer is a text that names a rule of the servers, such as "adamw:lr=1e-3", and not {given}; '
        f"pm.torch.rule_of({name}, lr=...) gives the text, and AveragingOptimizer({name}(model.parameters(), lr=...)) "
        "steps here with averaged gradients"
    )


def check_keywords(kind: Any, policies: Iterable[str]) -> None:
    """Refuses keyword arguments that neither an optimizer nor a policy has."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    own = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD][1:]
    known = [*own, *kind.POLICIES.__annotations__]
    for name in policies:
        if name not in known:
            raise PolicyError(
                f"{kind.__name__} takes no `{name}`; known: {', '.join(known)}. Parameters of the rule are part of its "
                'text: DistributedOptimizer(model.named_parameters(), "adamw:lr=1e-3")'
            )


ONE_OPTIMIZER = (
    "a job has one optimizer, and this process has made it already: make a single one with all parameters, in groups "
    '({"params": ..., "lr": ...}), or give each a job of its own (job=). A process that trains alone may make another after '
    "close() of the first"
)
# Jobs of other processes' servers in which this process had an optimizer.
trained_in: set[str] = set()


@contextlib.contextmanager
def joining(job: Optional[Job]) -> Iterator[Job]:
    """The job to train in, while its optimizer is made. It must not have started: tables are created before.

    A job that was joined for the optimizer is left again if that cannot be made, so that another try may join it.
    """
    is_own = job is None
    if any(each._has_optimizer for each in open_jobs if job is None or each is job):
        raise OrderError(ONE_OPTIMIZER)
    if job is None and _native.environment_url() in trained_in:
        raise OrderError(
            f"this worker has left the job at {_native.environment_url()}, and a job takes a worker once: make one optimizer "
            "for the whole program, or give each a job of its own (job=)"
        )
    job = init() if job is None else job
    try:
        if job._started and not job.closed:
            raise OrderError("the job has started, and an optimizer creates its tables before that: make it first")
        yield job
    except BaseException:
        if is_own:
            job._abandon()
        raise
    job._has_optimizer = True
    if not job.alone:
        trained_in.add(job.url)


def named_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups as torch takes them, with a name for every parameter."""
    if isinstance(params, torch.nn.Module):
        raise ParamillError(f"a {type(params).__name__} is no parameter: give model.named_parameters()")
    groups = list(params)
    if not groups:
        raise ParamillError("there are no parameters to train")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    named = []
    for number, group in enumerate(groups):
        entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        names = names_in(group, len(entries), f"parameter {number}.")
        pairs = [entry if isinstance(entry, tuple) else (name, entry) for name, entry in zip(names, entries)]
        for _, parameter in pairs:
            if not isinstance(parameter, Tensor):
                raise ParamillError(f"a {type(parameter).__name__} is no parameter: give model.named_parameters()")
        named.append({**group, "params": [p for _, p in pairs], "names": [name for name, _ in pairs]})
    return named


def names_in(group: dict[str, Any], count: int, otherwise: str) -> list[str]:
    """The names that a group has for its parameters, or numbers of them."""
    names = group.get("param_names") or [f"{otherwise}{index}" for index in range(count)]
    if len(names) != count:
        raise ParamillError(f"a group has {count} parameters and {len(names)} names: give each one a name in `param_names`")
    return list(names)


def parse_for_groups(text: str, groups: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The rule that a text names, and its parameters. A rate that it needs (``lars``) may be that of every group instead."""
    if "lr=" not in text and groups and all("lr" in group for group in groups):
        # Whichever is written here, that of the group counts.
        text += f"{',' if ':' in text else ':'}lr=1"
    return parse_optimizer(text)


def pack_bytes_of(parameters: Iterable[Tensor]) -> int:
    """How large the packs of a model are, if the script does not say."""
    total = sum(4 * parameter.numel() for parameter in parameters)
    return min(max(total // PACKS_OF_A_MODEL, LEAST_PACK_BYTES), MOST_PACK_BYTES)


def declare_buffers(
    job: Job, buffers: Optional[Iterable[tuple[str, Tensor]]], sync: Optional[str], pack_bytes: int
) -> list[Bucket]:
    """Tables of the buffers that can be averaged; counters stay each worker's own."""
    slots = [Slot(name, buffer) for name, buffer in buffers or () if buffer.is_floating_point()]
    return pack(job, slots, BufferBucket, pack_bytes // 4, "buffers/", {"sync": sync, **BufferBucket.POLICIES})
