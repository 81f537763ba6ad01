"""Parameters that a script writes to itself: servers would undo it, so it is refused and never silently lost."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
from torch import Tensor, nn

import paramill as pm

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
CHANGED = r"`\d.\w+` was changed here after the optimizer was made .*Load a checkpoint before you make the optimizer"
UNDER_WAY = r"`\d.\w+` was changed here while its new values were on their way.*synchronize\(\).*before you make the optimizer"


@pytest.fixture(params=["host", "device"])
def memory(request: Any) -> str:
    """Where parameters are: on a device nothing happens between a step and its answer."""
    if request.param == "device":
        request.getfixturevalue("emulated")
    return str(request.param)


@pytest.fixture(params=[4, 1 << 20], ids=["tables", "table"])
def options(request: Any) -> dict[str, Any]:
    """Many tables, which leave during the backward pass, and one. New values are on their way when a step returns."""
    is_of_device = "memory" in request.fixturenames and request.getfixturevalue("memory") == "device"
    return {"pack_bytes": request.param, "non_blocking": not is_of_device}


def network(seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after: Callable[[], None] = lambda: None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        after()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.state_dict().values(), other.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pack_bytes", [4, 1 << 20])
def test_parameters_can_be_read_after_a_step(distributed: Any, pack_bytes: int) -> None:
    model, twin = network(), network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=pack_bytes)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(5):
        train(model, optimizer, 1)
        train(twin, plain, 1)
        # As they are: saving a model would wait for them.
        for own, other in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("steps", [0, 1, 10])
def test_a_checkpoint_that_is_loaded_after_the_optimizer_was_made_is_refused(
    distributed: Any, options: dict[str, Any], steps: int
) -> None:
    model, other = network(), network(8)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", **options)
    train(model, optimizer, steps)
    optimizer.synchronize()
    model.load_state_dict(other.state_dict())
    for _ in range(2):
        with pytest.raises(pm.errors.OrderError, match=CHANGED):
            train(model, optimizer, 1)
        optimizer.zero_grad()
    optimizer.close()
    assert_same(model, other)


@pytest.mark.parametrize("steps", [1, 10])
def test_a_checkpoint_is_refused_also_while_answers_are_on_their_way(
    distributed: Any, options: dict[str, Any], memory: str, steps: int
) -> None:
    model, other = network(), network(8)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", **options)
    train(model, optimizer, steps)
    model.load_state_dict(other.state_dict())
    with pytest.raises(pm.errors.OrderError, match=UNDER_WAY if memory == "host" else CHANGED):
        train(model, optimizer, 1)


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("puts_back", [False, True])
def test_an_answer_that_was_refused_is_not_lost(
    distributed: Any, options: dict[str, Any], steps: int, puts_back: bool
) -> None:
    model, twin = network(), network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", **options)
    train(model, optimizer, steps)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    model.load_state_dict(network(8).state_dict())
    with pytest.raises(pm.errors.OrderError, match=UNDER_WAY):
        model(X)
    if puts_back:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept):
                parameter.copy_(value)
    # Nothing is trained or saved with what is older than the servers' answer.
    for use in (lambda: train(model, optimizer, 1), model.state_dict, optimizer.step):
        with pytest.raises(pm.errors.OrderError, match=UNDER_WAY + ".*servers' values.*synchronize"):
            use()
    optimizer.synchronize()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    train(twin, plain, steps)
    assert_same(model, twin)
    train(model, optimizer, 3)
    train(twin, plain, 3)
    assert_same(model, twin)


@pytest.mark.parametrize("waits", [False, True])
def test_weights_that_are_clipped_by_data_are_noticed_at_the_beginning(
    distributed: Any, options: dict[str, Any], memory: str, waits: bool
) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", **options)

    def clip() -> None:
        if waits:
            optimizer.synchronize()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    with pytest.raises(pm.errors.OrderError, match=UNDER_WAY if memory == "host" and not waits else CHANGED):
        train(model, optimizer, 3, clip)


@pytest.mark.usefixtures("memory")
def test_averages_may_be_swapped_in_and_out_again(distributed: Any, options: dict[str, Any]) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", **options)

    def evaluate() -> None:
        optimizer.synchronize()
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(network(8).state_dict())
        model(X)
        model.load_state_dict(kept)

    train(model, optimizer, 8, evaluate)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 8)
    assert_same(model, twin)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("of", ["optimizer", "job"])
def test_the_best_parameters_that_are_loaded_at_the_end_stay(distributed: Any, options: dict[str, Any], of: str) -> None:
    model, best = network(), network(8)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", **options)
    train(model, optimizer, 5)
    model.load_state_dict(best.state_dict())
    (optimizer if of == "optimizer" else optimizer.job).close()
    assert_same(model, best)


def test_moves_of_memory_are_no_changes(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    train(model, optimizer, 3)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 3)
    assert_same(model, twin)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_compiled_first", [True, False])
def test_compiled_models_and_those_that_they_are_made_of(
    distributed: Any, options: dict[str, Any], backend: str, is_compiled_first: bool
) -> None:
    model = network()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", **options)
    for _ in range(2):
        for each in (compiled, model) if is_compiled_first else (model, compiled):
            train(each, optimizer, 3)
    # Saving the model itself waits for the last answer too.
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 12)
    assert_same(model, twin)


def test_a_functional_call_is_no_change(distributed: Any, options: dict[str, Any]) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", **options)
    others = dict(network(8).named_parameters())
    train(model, optimizer, 6, lambda: torch.func.functional_call(model, others, (X,)))
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 6)
    assert_same(model, twin)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_a_gradient_of_old_parameters_is_refused(
    distributed: Any, options: dict[str, Any], set_to_none: bool, clips: bool
) -> None:
    model = nn.ModuleDict({"a": network(), "b": network(8)})
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", overlap=False if clips else None, **options)

    def step(forward: Callable[[Tensor], Tensor]) -> None:
        optimizer.zero_grad(set_to_none)
        forward(X).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(3):
        step(lambda x: model["a"](x) + model["b"](x))
    # One half without the other is waited for as it is used.
    step(model["a"])
    # No module knows of this use.
    with pytest.raises(pm.errors.OrderError, match=r"`a.0.weight` has a new gradient.*synchronize\(\) before"):
        step(lambda x: nn.functional.linear(x, model["a"][0].weight))

class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = nn.Embedding(20, 4, sparse=True, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).square().sum()


def train_words(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([step, step + 1])).backward()
        optimizer.step()


@pytest.mark.parametrize("waits", [False, True])
def test_rows_that_are_changed_are_refused(distributed: Any, waits: bool) -> None:
    model = Words()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", sparse=["words.weight"])
    train_words(model, optimizer, 3)
    if waits:
        optimizer.synchronize()
    model.load_state_dict({"words.weight": torch.ones(20, 4)})
    with pytest.raises(pm.errors.OrderError, match="`words.weight` was changed here after the optimizer was made"):
        train_words(model, optimizer, 1)
    optimizer.close()
    assert model.words.weight.eq(1).all()


def test_an_embedding_that_renormalises_itself_is_refused(distributed: Any) -> None:
    model = Words(max_norm=0.1)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", sparse=["words.weight"])
    with pytest.raises(pm.errors.OrderError, match="max_norm"):
        train_words(model, optimizer, 1)


def test_a_checkpoint_may_be_loaded_where_only_gradients_are_averaged(distributed: Any) -> None:
    model, other = network(), network(8)
    optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 2)
    model.load_state_dict(other.state_dict())
    train(model, optimizer, 3)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 3)
    assert_same(model, other)
