"""What a text and a group say counts, and what nothing would heed is refused."""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterator

import pytest
import torch
from torch import nn

import paramill as pm
from paramill.torch.rules import parse_optimizer

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def distributed() -> Iterator[Callable[..., pm.torch.DistributedOptimizer]]:
    """Optimizers of jobs of their own, closed at the end of the test."""
    made: list[pm.torch.DistributedOptimizer] = []

    def make(*arguments: Any, **options: Any) -> pm.torch.DistributedOptimizer:
        made.append(pm.torch.DistributedOptimizer(*arguments, job=pm.init(), **options))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def decayed_and_not(model: nn.Module, **values: Any) -> list[dict[str, Any]]:
    """Weights with `values`, biases without weight decay, as most scripts for transformers have it."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.dim() > 1], **values},
        {"params": [(name, p) for name, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.state_dict().values(), other.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "reference", "values"),
    [
        ("adamw:lr=0.1", torch.optim.AdamW, {"weight_decay": 0.5}),
        ("adamw:lr=0.1,weight_decay=0", torch.optim.AdamW, {"weight_decay": 0.5}),
        ("adamw:lr=0.1,weight_decay=0.01", torch.optim.AdamW, {"weight_decay": 0.5}),
        ("sgd:lr=0.1", torch.optim.SGD, {"weight_decay": 0.5}),
        ("adam:lr=0.1", torch.optim.Adam, {"weight_decay": 0.5, "lr": 0.02}),
    ],
)
def test_values_of_a_group_count_whatever_the_text_says(
    distributed: Any, text: str, reference: Any, values: dict[str, Any]
) -> None:
    model = network()
    twin = copy.deepcopy(model)
    train(model, distributed(decayed_and_not(model, **values), text))
    train(twin, reference(decayed_and_not(twin, **values), lr=0.1))
    assert_same(model, twin)


def test_parameters_of_the_rule_itself_may_differ_between_groups(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    train(model, distributed(decayed_and_not(model, beta1=0.5, beta2=0.9, epsilon=1e-4), "adam:lr=0.1"))
    train(twin, torch.optim.Adam(decayed_and_not(twin, betas=(0.5, 0.9), eps=1e-4), lr=0.1))
    assert_same(model, twin)


def test_every_parameter_of_the_rule_is_a_key_of_every_group(distributed: Any) -> None:
    optimizer = distributed(decayed_and_not(network()), "momentum:lr=0.1,warmup=3")
    for group, decay in zip(optimizer.param_groups, (0, 0.0)):
        values = {key: value for key, value in group.items() if key not in ("params", "names")}
        assert values == {
            "lr": 0.1, "weight_decay": decay, "clip": "off", "schedule": "constant", "warmup": 3, "beta": 0.9
        }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "why"),
    [
        ("wieght_decay", "adamw", r"group 0 has `wieght_decay`, and the rule `adamw` has no such parameter; known: lr, wei"),
        ("betas", "adamw", r"`betas`.*torch's `betas` is `beta1` and `beta2` here"),
        ("eps", "adagrad", r"`eps`.*torch's `eps` is `epsilon` here"),
        ("momentum", "sgd", r"`momentum`.*a rule of its own here"),
        ("amsgrad", "adam", r"`amsgrad`"),
    ],
)
def test_a_key_that_nothing_would_heed_is_refused_by_name(distributed: Any, key: str, text: str, why: str) -> None:
    with pytest.raises(pm.errors.PolicyError, match=why):
        distributed(decayed_and_not(network(), **{key: 0.5}), text)


def test_keys_that_torch_writes_into_groups_are_no_parameters(distributed: Any) -> None:
    model = network()
    theirs = torch.optim.SGD(model.named_parameters(), lr=0.1)
    torch.optim.lr_scheduler.CyclicLR(theirs, base_lr=0.1, max_lr=0.2, cycle_momentum=False)
    kept = ("params", "param_names", "lr", "initial_lr", "max_lr")
    groups = [{key: value for key, value in group.items() if key in kept} for group in theirs.param_groups]
    optimizer = distributed([{**group, "name": "all"} for group in groups], "sgd")
    assert optimizer.param_groups[0]["names"] == [name for name, _ in model.named_parameters()]
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"weight_decay": -1}, "weight_decay = -1: expected"),
        ({"lr": -0.1}, "lr = -0.1: expected lr >= 0"),
        ({"beta1": 2.0}, "beta1 = 2: expected"),
    ],
)
def test_values_of_a_group_are_checked_before_the_job_is_joined(values: dict[str, Any], why: str) -> None:
    with pytest.raises(pm.errors.PolicyError, match=why):
        pm.torch.DistributedOptimizer(decayed_and_not(network(), **values), "adam")


@pytest.mark.parametrize(
    ("rule", "reference", "options"),
    [
        ("sgd", torch.optim.SGD, {}),
        ("momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("nesterov", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("adagrad", torch.optim.Adagrad, {}),
        ("rmsprop", torch.optim.RMSprop, {}),
        ("adam", torch.optim.Adam, {}),
        ("adamw", torch.optim.AdamW, {}),
    ],
)
def test_a_rule_without_parameters_has_torch_s_defaults(rule: str, reference: Any, options: dict[str, Any]) -> None:
    assert parse_optimizer(rule) == parse_optimizer(pm.torch.rule_of(reference, **options))


def test_a_rule_that_torch_does_not_have_needs_a_learning_rate() -> None:
    with pytest.raises(pm.errors.PolicyError, match="lars: `lr` must be given"):
        pm.torch.DistributedOptimizer(network().named_parameters(), "lars")
