"""What scripts for torch do besides the plain loop: they end where torch's own optimizers end."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import paramill as pm
from paramill.torch.buckets import Bucket

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[4, 1 << 20], ids=["tables", "table"])
def options(request: Any) -> dict[str, Any]:
    """Many tables, which leave during the backward pass, and one."""
    return {"pack_bytes": request.param}


def network(seed: int = 7) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, between: Callable[[], Any] = lambda: None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        between()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.state_dict().values(), other.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["servers step", "workers step"])
def test_parameters_of_every_precision_are_trained(
    distributed: Any, options: dict[str, Any], dtype: torch.dtype, form: str
) -> None:
    start = torch.arange(16.0).div(8).to(dtype)
    model = nn.ParameterDict({name: nn.Parameter(start.clone()) for name in "abcd"})
    arguments = (
        (model.named_parameters(), "sgd:lr=0.5") if form == "servers step" else (torch.optim.SGD(model.parameters(), lr=0.5),)
    )
    optimizer = distributed(*arguments, **options)
    for _ in range(5):
        optimizer.zero_grad()
        sum(p.sum() for p in model.values()).backward()
        optimizer.step()
    optimizer.synchronize()
    for parameter in model.values():
        assert torch.equal(parameter.detach(), start - 2.5)


def weight_norm() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(8, 2)))


def spectral_norm() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(8, 2)))


def pruned() -> nn.Module:
    model = network()
    for number in (0, 2):
        prune.l1_unstructured(model[number], "weight", 0.5)
    return model


def scaled_by_a_hook() -> nn.Module:
    model = network()
    model[2].register_forward_pre_hook(lambda module, arguments: (arguments[0] * module.weight.detach().norm(),))
    return model


def normed_alone() -> nn.Module:
    torch.manual_seed(7)
    layer: nn.Module = nn.utils.weight_norm(nn.Linear(4, 8))
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("build", [weight_norm, spectral_norm, pruned, scaled_by_a_hook, normed_alone])
def test_hooks_that_were_there_before_see_the_new_parameters(
    distributed: Any, options: dict[str, Any], build: Callable[[], nn.Module]
) -> None:
    model, twin = build(), build()
    train(model, distributed(model.named_parameters(), "sgd:lr=0.5", **options), 6)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.5), 6)
    assert_same(model, twin)


def test_a_forward_pass_before_the_step_sees_the_old_parameters(distributed: Any, options: dict[str, Any]) -> None:
    model, twin = network(), network()
    seen: dict[nn.Module, list[Tensor]] = {model: [], twin: []}
    optimizers = (distributed(model.named_parameters(), "sgd:lr=0.5", **options), torch.optim.SGD(twin.parameters(), lr=0.5))
    for each, optimizer in zip((model, twin), optimizers):
        train(each, optimizer, 6, lambda: seen[each].append(each(X).detach()))
    torch.testing.assert_close(seen[model], seen[twin], rtol=1e-6, atol=1e-6)
    assert_same(model, twin)


def test_a_second_loss_of_the_same_step_is_computed_with_the_old_parameters(
    distributed: Any, options: dict[str, Any]
) -> None:
    model, twin = (nn.ModuleDict({"a": network(), "b": nn.Linear(2, 2)}) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizers = (distributed(model.named_parameters(), "sgd:lr=0.5", **options), torch.optim.SGD(twin.parameters(), lr=0.5))
    for each, optimizer in zip((model, twin), optimizers):
        for _ in range(6):
            optimizer.zero_grad()
            each["a"](X).square().mean().backward()
            with torch.no_grad():
                features = each["a"](X)
            (each["b"](features) - 1).square().mean().backward()
            optimizer.step()
    assert_same(model, twin)


@pytest.mark.parametrize("part", [lambda model: model[0], lambda model: model[2:], lambda model: model])
def test_a_part_is_saved_as_it_is_after_the_last_step(distributed: Any, options: dict[str, Any], part: Any) -> None:
    model, twin = network(), network()
    saved = part(model)
    train(model, distributed(model.named_parameters(), "sgd:lr=0.5", **options), 3)
    state = copy.deepcopy(saved.state_dict())
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.5), 3)
    for name, value in part(twin).state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


def test_a_model_that_was_called_by_a_wrapper_first_is_waited_for_and_saved(
    distributed: Any, options: dict[str, Any]
) -> None:
    model, twin = network(), network()
    wrapper = nn.Sequential(model, nn.Softmax(-1))
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.5", **options)
    with torch.no_grad():
        wrapper(X)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(3):
        train(model, optimizer, 1)
        train(twin, plain, 1)
        assert_same(model, twin)
    train(model, optimizer, 3)
    train(twin, plain, 3)
    assert_same(wrapper, nn.Sequential(twin, nn.Softmax(-1)))


@pytest.mark.parametrize("codec", [{}, {"codec": "bf16"}, {"codec": "topk:0.5", "device_codec": True}])
@pytest.mark.parametrize("form", ["servers step", "workers step"])
def test_a_step_that_is_no_number_is_told_once(
    distributed: Any, options: dict[str, Any], codec: dict[str, Any], form: str
) -> None:
    model = network()
    arguments = (
        (model.named_parameters(), "sgd:lr=0.5") if form == "servers step" else (torch.optim.SGD(model.parameters(), lr=0.5),)
    )
    optimizer = distributed(*arguments, **options, **codec)
    refused = []
    for step in range(12):
        try:
            optimizer.zero_grad()
            model(X).square().mean().mul(float("nan") if step == 2 else 1.0).backward()
            optimizer.step()
        except pm.errors.NonFiniteError:
            refused.append(step)
    assert len(refused) == 1 and refused[0] in (2, 3)


def test_a_gradient_that_leaves_does_not_ask_all_the_others(distributed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    leave = Bucket.leave
    monkeypatch.setattr(Bucket, "leave", lambda self: (calls.append(self), leave(self))[1])
    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", overlap=True, pack_bytes=4)
    train(model, optimizer, 3)
    assert len(calls) <= 3 * 3 * len(optimizer._exchanger.buckets)


@pytest.mark.parametrize("form", ["servers step", "workers step"])
@pytest.mark.parametrize(
    ("set_default", "usual", "other"),
    [(torch.set_default_dtype, torch.float32, torch.float64), (torch.set_default_device, None, "meta")],
)
def test_torch_s_defaults_for_new_tensors_are_the_script_s_own(
    distributed: Any, options: dict[str, Any], form: str, set_default: Any, usual: Any, other: Any
) -> None:
    model, twin = network(), network()
    words = nn.Embedding(6, 4, sparse=True)
    of_rows = words.weight.detach().clone()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    set_default(other)
    try:
        if form == "servers step":
            named = [*model.named_parameters(), ("words", words.weight)]
            optimizer = distributed(named, "sgd:lr=0.5", sparse=["words"], **options)
        else:
            optimizer = distributed(inner, **options)
        train(model, optimizer, 3)
        optimizer.synchronize()
    finally:
        set_default(usual)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.5), 3)
    assert_same(model, twin)
    assert torch.equal(words.weight.detach(), of_rows)


def test_a_state_that_the_stepping_optimizer_loads_itself_counts(distributed: Any) -> None:
    model, twin = network(), network()
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = distributed(inner)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    train(model, optimizer, 2)
    train(twin, plain, 2)
    for own, loaded in ((optimizer, inner), (plain, plain)):
        loaded.load_state_dict(copy.deepcopy(loaded.state_dict()))
        for group in own.param_groups:
            group["lr"] = 0.05
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    train(model, optimizer, 2)
    train(twin, plain, 2)
    assert_same(model, twin)


def test_a_group_that_the_stepping_optimizer_takes_later_is_refused(distributed: Any) -> None:
    model, extra = network(), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = distributed(inner)
    train(model, optimizer, 1)
    inner.add_param_group({"params": [extra]})
    (model(X) * extra).sum().backward()
    with pytest.raises(pm.errors.OrderError, match="parameters were added to the SGD after it was wrapped.*anew"):
        optimizer.step()
    assert torch.equal(extra.detach(), torch.ones(2))


def test_a_subclass_may_hand_keywords_on(distributed: Any) -> None:
    class Own(pm.torch.DistributedOptimizer):
        def __init__(self, params: Any, **keywords: Any) -> None:
            super().__init__(params, "sgd:lr=0.5", **keywords)

    model, twin = network(), network()
    optimizer = Own(model.named_parameters(), job=pm.init(), overlap=False)
    train(model, optimizer, 3)
    optimizer.close()
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.5), 3)
    assert_same(model, twin)
    with pytest.raises(pm.errors.PolicyError, match="DistributedOptimizer takes no `lr`"):
        Own(model.named_parameters(), lr=0.5)
