"""Parameters without a gradient: they are left out of a step as torch leaves them out."""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterator, Optional

import pytest
import torch
from torch import Tensor, nn

import paramill as pm

DATA = torch.Generator().manual_seed(1)
X = torch.randn(32, 8, generator=DATA)
Y = torch.randn(32, 3, generator=DATA)

Rule = tuple[str, Callable[[Any], torch.optim.Optimizer]]
MOMENTUM: Rule = (
    "momentum:lr=0.05,beta=0.9,weight_decay=0.01",
    lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01),
)
ADAM: Rule = ("adam:lr=0.01", lambda p: torch.optim.Adam(p, lr=0.01))
ADAMW: Rule = ("adamw:lr=0.01,weight_decay=0.1", lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))


class Branches(nn.Module):
    """A trunk and two heads, of which a forward pass uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.left = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.right = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor, heads: str = "left") -> Tensor:
        hidden = self.trunk(x).tanh()
        return sum((getattr(self, head)(hidden) for head in heads.split()), torch.zeros(()))


@pytest.fixture(autouse=True)
def same_seed() -> None:
    torch.manual_seed(7)


@pytest.fixture(params=["servers step", "workers step"])
def make(request: Any) -> Iterator[Callable[..., Any]]:
    """Optimizers of a rule, in either form, closed at the end of the test."""
    made: list[Any] = []

    def make(model: nn.Module, rule: Rule, **options: Any) -> Any:
        if request.param == "servers step":
            made.append(pm.torch.DistributedOptimizer(model.named_parameters(), rule[0], **options))
        else:
            made.append(pm.torch.AveragingOptimizer(rule[1](model.parameters()), **options))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, heads: str = "left", steps: int = 5) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X, heads), Y).backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda why: f"{name}: {why}")


# Everything in one table; some tables with what is used and what is not; a table for each.
@pytest.mark.parametrize("pack_bytes", [1 << 20, 1200, 4])
@pytest.mark.parametrize("overlap", [None, True, False])
def test_an_unused_branch_stays_as_it_is(make: Any, pack_bytes: int, overlap: Optional[bool]) -> None:
    model = Branches()
    twin, before = copy.deepcopy(model), copy.deepcopy(model)
    train(model, make(model, ADAMW, pack_bytes=pack_bytes, overlap=overlap))
    train(twin, ADAMW[1](twin.parameters()))
    assert_same(model, twin)
    assert_same(model.right, before.right, 0.0)


@pytest.mark.parametrize("pack_bytes", [1 << 20, 1200])
def test_what_is_frozen_in_mid_training_stays_where_it_is(make: Any, pack_bytes: int) -> None:
    model = Branches()
    twin = copy.deepcopy(model)
    for each, optimizer in ((model, make(model, MOMENTUM, pack_bytes=pack_bytes)), (twin, MOMENTUM[1](twin.parameters()))):
        train(each, optimizer)
        each.trunk.requires_grad_(False)
        frozen = copy.deepcopy(each.state_dict())
        train(each, optimizer)
        assert torch.equal(each.state_dict()["trunk.weight"], frozen["trunk.weight"])
        each.trunk.requires_grad_(True)
        train(each, optimizer)
    assert_same(model, twin)


@pytest.mark.parametrize("rule", [ADAM, ADAMW, MOMENTUM], ids=["adam", "adamw", "momentum"])
def test_what_is_used_later_begins_then(make: Any, rule: Rule) -> None:
    model = Branches()
    twin = copy.deepcopy(model)
    for each, optimizer in ((model, make(model, rule)), (twin, rule[1](twin.parameters()))):
        for heads in ("left", "left right", "right", "left right"):
            train(each, optimizer, heads, 3)
    assert_same(model, twin)


def test_accumulated_gradients_are_there_if_one_pass_had_them(make: Any) -> None:
    model = Branches()
    twin = copy.deepcopy(model)
    optimizer = make(model, ADAMW)
    for each, own in ((model, optimizer), (twin, ADAMW[1](twin.parameters()))):
        for heads in ("left", "right", "left", "left"):
            own.zero_grad()
            if each is model:
                with optimizer.no_sync():
                    nn.functional.mse_loss(each(X, heads), Y).backward()
            else:
                nn.functional.mse_loss(each(X, heads), Y).backward()
            nn.functional.mse_loss(each(X, "left"), Y).backward()
            own.step()
    assert_same(model, twin)


def test_a_step_that_the_scaler_skips_is_no_step(make: Any) -> None:
    model = Branches()
    twin = copy.deepcopy(model)
    for each, optimizer in ((model, make(model, ADAMW, overlap=False)), (twin, ADAMW[1](twin.parameters()))):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for step in range(6):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(each(X), Y) * (float("inf") if step in (0, 3) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_same(model, twin)


@pytest.mark.parametrize("codec", ["topk:0.25", "bf16", "warmup:2+topk:0.25+f16", "onebit", "threshold:0.01"])
@pytest.mark.parametrize("on_device", [False, True])
def test_codecs_leave_an_unused_branch_alone(codec: str, on_device: bool) -> None:
    if on_device and codec == "onebit":
        pytest.skip("torch does not compress by it")
    model = Branches()
    before = copy.deepcopy(model)
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), ADAMW[0], codec=codec, device_codec=on_device)
    train(model, optimizer)
    optimizer.close()
    assert_same(model.right, before.right, 0.0)
    assert not torch.equal(model.left[0].weight, before.left[0].weight)


KEEPING = ["topk:0.25", "threshold:0.05", "dvf:delta=0.05", "ef+bf16", "onebit", "ef+int8", "powersgd", "dgc:ratio=0.25,warmup=0"]


@pytest.mark.parametrize("codec", KEEPING)
@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_frozen_does_not_move_whatever_its_codec_keeps(make: Any, codec: str, on_device: bool) -> None:
    if on_device and codec in KEEPING[4:]:
        pytest.skip("torch does not compress by it")
    model = Branches()
    optimizer = make(model, MOMENTUM, codec=codec, device_codec=on_device)
    train(model, optimizer)
    model.trunk.requires_grad_(False)
    optimizer.synchronize()
    frozen = copy.deepcopy(model.state_dict())
    train(model, optimizer)
    optimizer.synchronize()
    for name in ("trunk.weight", "trunk.bias"):
        assert torch.equal(model.state_dict()[name], frozen[name]), name
    assert not torch.equal(model.state_dict()["left.0.weight"], frozen["left.0.weight"])


@pytest.mark.parametrize("on_device", [False, True])
def test_what_a_codec_kept_is_delivered_when_there_is_a_gradient_again(make: Any, on_device: bool) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(8)) for name in ("frozen", "other")})
    rule: Rule = ("sgd:lr=1", lambda p: torch.optim.SGD(p, lr=1.0))
    optimizer = make(model, rule, codec="topk:0.05", device_codec=on_device)
    (model["frozen"] * torch.arange(1.0, 9.0)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    before = model["frozen"].detach().clone()
    assert before.count_nonzero() < 8
    for _ in range(6):
        optimizer.zero_grad()
        model["other"].sum().mul(1e-3).backward()
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(model["frozen"].detach(), before)
        assert model["frozen"].grad is None
    # One entry of this layer travels in a step.
    for _ in range(7):
        optimizer.zero_grad()
        (model["frozen"] * 0.0).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    assert torch.equal(model["frozen"].detach(), -torch.arange(1.0, 9.0))


@pytest.mark.parametrize(
    ("codec", "at", "on_device"),
    [("bf16", 0, False), ("bf16", 3, True), ("f16", 3, False), ("topk:0.5", 0, False), ("topk:0.5", 0, True)],
)
@pytest.mark.parametrize("pack_bytes", [1 << 20, 4])
def test_a_step_that_is_no_number_is_no_step(make: Any, codec: str, at: int, on_device: bool, pack_bytes: int) -> None:
    model = Branches()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        optimizer = make(each, ADAMW, job=pm.init(), codec=codec, device_codec=on_device, pack_bytes=pack_bytes)
        for step in range(6):
            if step == at and each is model:
                before = copy.deepcopy(each.state_dict())
                optimizer.zero_grad()
                (each(X) * float("nan")).sum().backward()
                with pytest.raises(pm.errors.NonFiniteError):
                    optimizer.step()
                optimizer.synchronize()
                assert all(torch.equal(value, before[name]) for name, value in each.state_dict().items())
            train(each, optimizer, steps=1)
    assert_same(model, twin)


PROGRAM = """
    import torch
    torch.set_num_threads(1)
    STEP
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.linspace(-1, 1, 5000)) for name in "abc"})
    MAKE
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step, optimizer.job.rank).backward()
        optimizer.step()
    optimizer.close()
    report([p.tolist() for p in model.values()])
"""
# Everybody has a gradient for `a`; for `b` one of the two at a time, or nobody; for `c` nobody after a while.
STEP = """
def loss_of(model, step, rank):
    loss = (model["a"] - step).square().mean() * (1 + rank)
    if step % 3 == 1 + rank:
        loss = loss + (model["b"] * step).sum()
    if step < 3 + rank:
        loss = loss + model["c"].pow(3).sum()
    return loss
"""


@pytest.mark.parametrize("rule", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("form", ["servers step", "workers step"])
def test_two_workers_do_as_ddp_does(launch: Any, rule: Rule, form: str) -> None:
    own = {
        "adamw": "torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)",
        "momentum": "torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=0.01)",
    }[rule[0].partition(":")[0]]
    servers_step = f'DistributedOptimizer(model.named_parameters(), "{rule[0]}")'
    make = f"optimizer = pm.torch.{servers_step if form == 'servers step' else f'AveragingOptimizer({own})'}"
    program = PROGRAM.replace("STEP", STEP.strip().replace("\n", "\n    ")).replace("MAKE", make)
    results = launch(program, 2, 1)
    assert results[0] == results[1]
    space: dict[str, Any] = {}
    exec(STEP, space)
    model = nn.ParameterDict({name: nn.Parameter(torch.linspace(-1, 1, 5000)) for name in "abc"})
    optimizer = rule[1](model.parameters())
    for step in range(8):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            space["loss_of"](model, step, rank).backward()
            gradients.append([p.grad for p in model.values()])
        for parameter, pair in zip(model.values(), zip(*gradients)):
            here = [gradient for gradient in pair if gradient is not None]
            parameter.grad = sum(here) / 2 if here else None
        optimizer.step()
    for result, parameter in zip(results[0], model.values()):
        torch.testing.assert_close(torch.tensor(result), parameter.detach(), rtol=1e-6, atol=1e-6)


# Rank 1 has no numbers in its second step.
NO_NUMBERS = """
    import torch
    torch.set_num_threads(1)
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.linspace(-1, 1, 64)) for name in "abc"})
    MAKE
    refused = 0
    for step in range(5):
        optimizer.zero_grad()
        wrong = float("nan") if step == 1 and optimizer.job.rank == 1 else 1.0
        (sum(p.square().sum() for p in model.values()) * wrong).backward()
        try:
            optimizer.step()
        except pm.errors.NonFiniteError:
            refused += 1
    optimizer.close()
    report([refused, [p.tolist() for p in model.values()]])
"""


@pytest.mark.parametrize("pack_bytes", [1 << 20, 4])
@pytest.mark.parametrize("form", ["servers step", "workers step"])
def test_the_step_of_the_others_is_made_without_who_has_no_numbers(launch: Any, form: str, pack_bytes: int) -> None:
    own = "torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)"
    servers_step = f'DistributedOptimizer(model.named_parameters(), "{ADAMW[0]}"'
    call = servers_step if form == "servers step" else f"AveragingOptimizer({own}"
    make = f'optimizer = pm.torch.{call}, codec="f16", pack_bytes={pack_bytes})'
    (first, values), (second, others) = launch(NO_NUMBERS.replace("MAKE", make), 2, 1)
    assert (first, second) == (0, 1) and values == others
    model = nn.ParameterDict({name: nn.Parameter(torch.linspace(-1, 1, 64)) for name in "abc"})
    optimizer = ADAMW[1](model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        (sum(p.square().sum() for p in model.values()) * (0.5 if step == 1 else 1.0)).backward()
        optimizer.step()
    for value, parameter in zip(values, model.values()):
        torch.testing.assert_close(torch.tensor(value), parameter.detach(), rtol=1e-3, atol=1e-3)
