"""What a text and a group say counts, and what nothing would heed is refused."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
from torch import nn

import paramill as pm
from paramill.torch.rules import parse_optimizer

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


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


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        ((torch.optim.AdamW,), {}, r'a text .*such as "adamw:lr=1e-3", and not the class torch.optim.AdamW; pm.torch.rule_of\('),
        ((0.1,), {}, r'a text .*such as "adamw:lr=1e-3", and not 0.1'),
        (("adamw",), {"lr": 1e-3}, r'takes no `lr`; known: params, optimizer, job, .*"adamw:lr=1e-3"'),
        (("adamw",), {"weight_decay": 0.1}, r"takes no `weight_decay`"),
    ],
)
def test_a_call_that_is_meant_for_torch_is_refused_in_words(
    arguments: tuple[Any, ...], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(pm.errors.PolicyError, match=why):
        pm.torch.DistributedOptimizer(network().named_parameters(), *arguments, **options)


@pytest.mark.parametrize(
    ("inner", "options", "why"),
    [
        (torch.optim.LBFGS, {}, "LBFGS calls its closure for new gradients within a step"),
        (torch.optim.SGD, {"reduce": "sum"}, "AveragingOptimizer takes no `reduce`; known: optimizer, job, .*, sync, codec"),
    ],
)
def test_what_averaging_cannot_do_is_refused_in_words(inner: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(pm.errors.PolicyError, match=why):
        pm.torch.AveragingOptimizer(inner(network().parameters()), **options)


def test_what_is_meant_for_the_other_optimizer_is_refused_in_words() -> None:
    theirs: Any = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(pm.errors.PolicyError, match=r"not of a SGD: .*make a pm.torch.AveragingOptimizer\(SGD"):
        pm.torch.DistributedOptimizer(theirs)
    parameters: Any = network().named_parameters()
    with pytest.raises(pm.errors.PolicyError, match="a generator is no optimizer: .* or make a DistributedOptimizer"):
        pm.torch.AveragingOptimizer(parameters)


@pytest.mark.parametrize("params", [network(), nn.Linear(1, 1), [nn.Linear(1, 1)]])
def test_a_module_is_no_list_of_parameters(params: Any) -> None:
    with pytest.raises(pm.ParamillError, match="a (Linear|Sequential) is no parameter: give model.named_parameters()"):
        pm.torch.DistributedOptimizer(params, "sgd")


@pytest.mark.parametrize("what", ["empty", "frozen"])
def test_a_schedule_passes_over_a_group_of_which_nothing_is_trained(distributed: Any, what: str) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        if what == "empty":
            return [{"params": list(model.parameters())}, {"params": []}]
        model[0].requires_grad_(False)
        return [{"params": list(model[2].parameters())}, {"params": list(model[0].parameters()), "lr": 0.01}]

    model = network()
    twin = copy.deepcopy(model)
    for each, optimizer in ((model, distributed(groups(model), "sgd:lr=0.5")), (twin, torch.optim.SGD(groups(twin), lr=0.5))):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(4):
            train(each, optimizer, 1)
            schedule.step()
    assert_same(model, twin)


def set_all(key: str, value: Any) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (set_all("momentum", 0.0), r"group 0 has `momentum`.*torch's `momentum` is `beta` here"),
        (set_all("lr", -0.1), "group 0 has lr = -0.1: expected lr >= 0"),
        (set_all("lr", torch.tensor(float("nan"))), "group 0 has lr = nan: expected lr >= 0"),
        (set_all("weight_decay", -1.0), "weight_decay = -1: expected"),
    ],
)
def test_what_would_be_refused_at_the_beginning_is_refused_later_too(distributed: Any, change: Any, why: str) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "momentum:lr=0.1")
    train(model, optimizer, 1)
    change(optimizer)
    for _ in range(2):
        with pytest.raises(pm.errors.PolicyError, match=why):
            train(model, optimizer, 1)


def test_keys_that_schedulers_add_later_are_no_parameters(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    for each, optimizer in (
        (model, distributed(model.named_parameters(), "sgd:lr=0.1")),
        (twin, torch.optim.SGD(twin.parameters(), lr=0.1)),
    ):
        train(each, optimizer, 1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=8, cycle_momentum=False)
        for _ in range(6):
            train(each, optimizer, 1)
            schedule.step()
    assert_same(model, twin)


@pytest.mark.parametrize(
    ("text", "theirs", "expected"),
    [
        ("momentum:lr=0.1", lambda p: torch.optim.SGD(p, lr=0.1), {"beta": 0}),
        ("adam:lr=0.1", lambda p: torch.optim.Adam(p, lr=0.1, eps=0.0), {"epsilon": 0.0}),
        ("adamw:lr=0.1", lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0), {"weight_decay": 0.0}),
        ("nesterov:lr=0.1", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True), {"beta": 0.8}),
        ("nesterov:lr=0.1", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "`nesterov=False`.*not of the rule `nesterov`"),
        (
            "momentum:lr=0.1",
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            "`nesterov=True`.*not of the rule `momentum`",
        ),
    ],
)
def test_what_is_zero_or_off_in_a_state_of_torch_counts(distributed: Any, text: str, theirs: Any, expected: Any) -> None:
    optimizer = distributed(network().named_parameters(), text)
    state = theirs(network().parameters()).state_dict()
    if isinstance(expected, str):
        with pytest.raises(pm.errors.PolicyError, match=expected):
            optimizer.load_state_dict(state)
    else:
        optimizer.load_state_dict(state)
        assert {key: optimizer.param_groups[0][key] for key in expected} == expected


@pytest.mark.filterwarnings("ignore:groups and learning rates")
def test_moments_of_torch_are_not_saved_again(distributed: Any) -> None:
    model = network()
    theirs = torch.optim.AdamW(model.parameters())
    train(model, theirs, 3)
    optimizer = distributed(model.named_parameters(), "adamw")
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("averaged", [False, True])
def test_every_parameter_needs_a_name_where_some_have_one(averaged: bool) -> None:
    group = {"params": list(network().parameters()), "param_names": ["a", "b"], "lr": 0.1}
    with pytest.raises(pm.ParamillError, match="4 parameters and 2 names"):
        if averaged:
            inner = torch.optim.SGD(group["params"], lr=0.1)
            inner.param_groups[0]["param_names"] = group["param_names"]
            pm.torch.AveragingOptimizer(inner)
        else:
            pm.torch.DistributedOptimizer([group], "sgd")


@pytest.mark.parametrize("text", ["lars", "lars:beta=0.5"])
def test_the_learning_rate_of_every_group_is_enough(distributed: Any, text: str) -> None:
    optimizer = distributed(decayed_and_not(network(), lr=0.2)[:1], text)
    assert optimizer.param_groups[0]["lr"] == 0.2
    with pytest.raises(pm.errors.PolicyError, match="lars: `lr` must be given"):
        distributed(decayed_and_not(network(), lr=0.2), text)
    with pytest.raises(pm.errors.PolicyError, match="wrong"):
        distributed(decayed_and_not(network(), lr=0.2)[:1], "lars:wrong=1")
