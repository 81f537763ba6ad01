"""An optimizer of torch that steps here, within one that takes part in a job."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..errors import OrderError, PolicyError
from .buckets import Slot
from .optimizer import names_in


class WrappedOptimizer(torch.optim.Optimizer):
    """Groups and state are those of the optimizer that steps, so that schedulers and checkpoints work on either."""

    _optimizer: Any
    _parameters: list[Tensor]

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        # What torch writes into groups and state while it makes an optimizer is thrown away.
        self._optimizer = SimpleNamespace()
        torch.optim.Optimizer.__init__(self, optimizer.param_groups, optimizer.defaults)
        self._optimizer = optimizer
        self._parameters = self._all_parameters()

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

    def _slots(self) -> tuple[list[Slot], list[Slot]]:
        """The parameters that are trained, and those that are frozen."""
        trained: list[Slot] = []
        frozen: list[Slot] = []
        for number, group in enumerate(self.param_groups):
            names = names_in(group, len(group["params"]), f"{number}.")
            for name, parameter in zip(names, group["params"]):
                (trained if parameter.requires_grad else frozen).append(Slot(name, parameter))
        return trained, frozen

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _check_parameters(self, what_is_wrong: str) -> None:
        """Refuses parameters that came to the optimizer after it was wrapped."""
        parameters = self._all_parameters()
        if len(parameters) != len(self._parameters) or any(a is not b for a, b in zip(parameters, self._parameters)):
            raise OrderError(
                f"parameters were added to the {type(self._optimizer).__name__} after it was wrapped, and {what_is_wrong}; make both "
                "optimizers anew, with all groups and a new job"
            )


def check_optimizer(optimizer: Any, without: str) -> None:
    """Refuses what is no optimizer of torch, and one that computes gradients within its step (LBFGS)."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PolicyError(
            f"a {type(optimizer).__name__} is no optimizer: give one of torch, such as torch.optim.RAdam(model.parameters()), or "
            "make a DistributedOptimizer, whose steps the servers make"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PolicyError(
            f"{type(optimizer).__name__} calls its closure for new gradients within a step, and {without}: take an optimizer that "
            "steps with the gradients of one backward pass"
        )
