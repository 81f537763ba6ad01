"""The inputs that torch tests its own optimizers with: each ends where torch ends, or is refused by the name of an option."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import optim_db

import paramill as pm

STEPS = 10
TOLERANCE = 1e-6
# Of the optimizers that the servers have a rule for, in torch 2.15: other releases may have more inputs, not fewer.
FEWEST_SUPPORTED = 20
FEWEST_REFUSED = 14

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(32, 6, generator=GENERATOR)
Y = torch.randn(32, 3, generator=GENERATOR)


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def inputs() -> list[tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    return [(info.optim_cls, each.kwargs) for info in optim_db for each in info.optim_inputs_func(device="cpu")]


def distance(optimizer: type[torch.optim.Optimizer], options: dict[str, Any], text: str) -> float:
    """How far the servers' parameters are from torch's after ten steps."""
    model = network()
    twin = copy.deepcopy(model)
    start = [value.clone() for value in model.state_dict().values()]
    own = pm.torch.DistributedOptimizer(model.named_parameters(), text, pack_bytes=256)
    found = train(model, own)
    own.close()
    # A tensor as a learning rate is written to by nothing here, but torch may keep it.
    expected = train(twin, optimizer(twin.parameters(), **copy.deepcopy(options)))
    assert all(not torch.equal(a, b) for a, b in zip(start, found)), "every parameter was trained"
    return max(float((a - b).abs().max()) for a, b in zip(found, expected))


def test_every_input_of_torch_s_own_tests_is_met_or_refused_by_name() -> None:
    supported, refused, without_rule, wrong = 0, 0, 0, []
    for optimizer, options in inputs():
        label = f"{optimizer.__name__}({', '.join(f'{key}={value}' for key, value in options.items())})"
        try:
            text = pm.torch.rule_of(optimizer, **options)
        except pm.errors.PolicyError as error:
            if f"no rule for torch's {optimizer.__name__}" in str(error):
                without_rule += 1
            elif any(f"has no `{key}`" in str(error) for key in options):
                refused += 1
            else:
                wrong.append(f"{label}: refused, but by none of its options: {error}")
            continue
        far = distance(optimizer, options, text)
        if far <= TOLERANCE:
            supported += 1
        else:
            wrong.append(f"{label}, here {text}: {far:.2e} away from torch after {STEPS} steps")
    print(f"\n{supported} inputs are met within {TOLERANCE:g}, {refused} are refused by name, {without_rule} have no rule")
    assert not wrong, "\n".join(wrong)
    assert supported + refused + without_rule == len(inputs())
    assert supported >= FEWEST_SUPPORTED and refused >= FEWEST_REFUSED, (supported, refused)


@pytest.mark.parametrize(
    ("optimizer", "options", "named"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, "dampening"),
        (torch.optim.SGD, {"maximize": True}, "maximize"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
        (torch.optim.Adam, {"capturable": True}, "capturable"),
        (torch.optim.Adam, {"differentiable": True}, "differentiable"),
        (torch.optim.AdamW, {"fused": True}, "fused"),
        (torch.optim.AdamW, {"foreach": False}, "foreach"),
        (torch.optim.RMSprop, {"centered": True}, "centered"),
        (torch.optim.RMSprop, {"momentum": 0.1}, "momentum"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, "initial_accumulator_value"),
        (torch.optim.AdamW, {"learning_rate": 0.1}, "learning_rate"),
    ],
)
def test_an_option_that_no_rule_has_is_refused_by_name(optimizer: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(pm.errors.PolicyError, match=f"has no `{named}`"):
        pm.torch.rule_of(optimizer, **options)
