"""The servers' update rules beside torch's: which parameters they have, and what they cannot do."""

from __future__ import annotations

import inspect
from typing import Any, Iterable, Mapping

import torch

from .. import _native
from ..errors import PolicyError

# Keys of a group that are no parameters of a rule. torch writes the names of parameters and, with its schedulers, the
# limits of learning rate and momentum there; `name` is a label, which loggers read.
NO_PARAMETERS = frozenset(
    {"params", "param_names", "names", "name", "initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum"}
)

# How torch computes, which changes nothing about the result.
IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})

# Parameters of torch's optimizers and what they are called here.
_ADAM = {"lr": ("lr",), "weight_decay": ("weight_decay",), "betas": ("beta1", "beta2"), "eps": ("epsilon",)}
_SGD = {"lr": ("lr",), "weight_decay": ("weight_decay",)}
_MOMENTUM = {**_SGD, "momentum": ("beta",)}
_RULES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "sgd": _SGD,
    "momentum": _MOMENTUM,
    # `nesterov` chooses the rule, and is no parameter of it.
    "nesterov": {**_MOMENTUM, "nesterov": ()},
    "adagrad": {**_SGD, "eps": ("epsilon",)},
    "rmsprop": {**_SGD, "alpha": ("decay",), "eps": ("epsilon",)},
    "adam": _ADAM,
    "adamw": _ADAM,
}
_CLASSES: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
}


def rule_of(optimizer: type[torch.optim.Optimizer], **options: Any) -> str:
    """The text of the servers' rule that steps as ``optimizer(parameters, **options)`` does.

    What no rule can do is a :class:`PolicyError` that names the option.

    >>> rule_of(torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95))
    'adamw:lr=0.0003,beta1=0.9,beta2=0.95,epsilon=1e-08,weight_decay=0.01'
    >>> rule_of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    'nesterov:lr=0.1,beta=0.9,weight_decay=0'
    >>> rule_of(torch.optim.Adam, amsgrad=True)
    Traceback (most recent call last):
    paramill.errors.PolicyError: the servers' rule `adam` has no `amsgrad`; ...
    """
    name = optimizer.__name__
    instead = f"leave it out, or have gradients averaged and step here: AveragingOptimizer(torch.optim.{name}(...))"
    if optimizer not in _CLASSES:
        known = ", ".join(each.__name__ for each in _CLASSES)
        raise PolicyError(f"the servers have no rule for torch's {name} (they have for {known}); {instead}")
    signature = inspect.signature(optimizer).parameters
    defaults = {key: each.default for key, each in signature.items() if each.default is not inspect.Parameter.empty}
    for key in options:
        if key not in defaults:
            raise PolicyError(f"torch's {name} has no `{key}`; known: {', '.join(defaults)}")
    values = {**defaults, **options}
    rule = _CLASSES[optimizer]
    if rule == "sgd" and number(values["momentum"]) != 0:
        rule = "nesterov" if values["nesterov"] else "momentum"
    names = _RULES[rule]
    parts = []
    for key, value in values.items():
        if key in names:
            several = value if isinstance(value, (tuple, list)) else [value]
            parts += [f"{own}={number(each)}" for own, each in zip(names[key], several)]
        elif value != defaults[key]:
            raise PolicyError(f"the servers' rule `{rule}` has no `{key}`; {instead}")
    text = f"{rule}:{','.join(parts)}"
    _native.check_policies({"optimizer": text})
    return text


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """The rule that a text names, and every parameter of it, with the defaults of those that the text leaves out.

    >>> parse_optimizer("momentum:lr=0.5,schedule=step(every=30)")[0]
    'momentum'
    >>> parse_optimizer("momentum:lr=0.5,schedule=step(every=30)")[1]
    {'lr': 0.5, 'weight_decay': 0, 'clip': 'off', 'schedule': 'step(every=30,factor=0.1)', 'warmup': 0, 'beta': 0.9}
    """
    rule, parameters = _native.optimizer_parameters(text)
    return rule, {key: _value(value) for key, value in parameters}


def text_of(rule: str, parameters: Mapping[str, Any]) -> str:
    """The text that names a rule with these parameters.

    >>> text_of("sgd", {"lr": torch.tensor(0.5), "clip": "off"})
    'sgd:lr=0.5,clip=off'
    """
    return f"{rule}:" + ",".join(
        f"{key}={value if isinstance(value, str) else number(value)}" for key, value in parameters.items()
    )


def check_groups(rule: str, parameters: Iterable[str], groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuses groups with keys that are neither parameters of the rule nor torch's own."""
    known = list(parameters)
    for index, group in enumerate(groups):
        for key in group:
            if key not in known and key not in NO_PARAMETERS:
                raise PolicyError(
                    f"group {index} has `{key}`, and the rule `{rule}` has no such parameter; known: {', '.join(known)}"
                    f"{_hint(key, rule)}"
                )


def from_torch(rule: str, parameters: Iterable[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of a state of one of torch's optimizers, with the names that the rule has.

    What is off there (``amsgrad=False``) is left out; what is on and no parameter of the rule is refused by name.

    >>> from_torch("adam", ["lr", "beta1", "beta2"], {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": False})
    {'lr': 0.1, 'beta1': 0.8, 'beta2': 0.9}
    """
    known, names = set(parameters) | NO_PARAMETERS, _RULES.get(rule, {})
    taken: dict[str, Any] = {}
    for key, value in group.items():
        if key in known:
            taken[key] = value
        elif key == "decoupled_weight_decay":
            if value != (rule == "adamw"):
                raise PolicyError(f"the state has `{key}={value}`: it is not of the rule `{rule}`, but of adam or adamw")
        elif key == "nesterov":
            if bool(value) != (rule == "nesterov"):
                raise PolicyError(f"the state has `{key}={value}`: it is not of the rule `{rule}`")
        elif key in names:
            # What is 0 counts too: SGD without momentum is the rule `momentum` with beta = 0.
            several = value if isinstance(value, (tuple, list)) else [value]
            taken.update(zip(names[key], several))
        elif value and key not in IMPLEMENTATIONS:
            raise PolicyError(f"the state has `{key}={value}`, and the servers' rule `{rule}` has no `{key}`")
    return taken


def _hint(key: str, rule: str) -> str:
    """What torch's name for a parameter is here."""
    own = _RULES.get(rule, {}).get(key, ())
    if own:
        return f" (torch's `{key}` is {' and '.join(f'`{each}`' for each in own)} here)"
    if key in ("momentum", "nesterov") and rule in ("sgd", "momentum"):
        return f" (it is a rule of its own here, `{key}`, for all groups)"
    return ""


def number(value: Any) -> Any:
    """A number as the servers read it; of torch, also a tensor of one element."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
