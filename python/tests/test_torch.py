"""The optimizer in one process: what it promises to be for a script that was written for torch's own."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
from torch import Tensor, nn

import paramill as pm

DATA = torch.Generator().manual_seed(1)
X = torch.randn(32, 8, generator=DATA)
Y = torch.randn(32, 3, generator=DATA)


@pytest.fixture(autouse=True)
def same_seed() -> None:
    torch.manual_seed(7)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.mse_loss(model(X), Y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10, after: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if after is not None:
            after.step()


def assert_same(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda why: f"{name}: {why}")


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("sgd:lr=0.1", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("momentum:lr=0.05,beta=0.9,weight_decay=0.01", lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01)),
        ("adam:lr=0.01", lambda p: torch.optim.Adam(p, lr=0.01)),
        ("adamw:lr=0.01,weight_decay=0.1", lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ],
)
def test_servers_step_as_torch_does(distributed: Any, text: str, reference: Callable[..., Any]) -> None:
    model = network()
    twin = copy.deepcopy(model)
    train(model, distributed(model.named_parameters(), text, pack_bytes=400))
    train(twin, reference(twin.parameters()))
    assert_same(model, twin, 1e-5)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("averaged", [False, True])
def test_memory_of_a_device_makes_no_difference(distributed: Any, averaged: bool) -> None:
    model = nn.Sequential(network(), nn.BatchNorm1d(3))
    twin = copy.deepcopy(model)
    of = torch.optim.SGD(model.parameters(), lr=0.1) if averaged else model.named_parameters()
    text = [] if averaged else ["sgd:lr=0.1"]
    optimizer = distributed(of, *text, pack_bytes=400, buffers=model.named_buffers())
    train(model, optimizer)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert_same(model, twin, 1e-5)


def test_it_is_an_optimizer_and_schedulers_drive_it(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "momentum:lr=0.1")
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for each, own in ((model, optimizer), (twin, reference)):
        train(each, own, 12, torch.optim.lr_scheduler.CosineAnnealingLR(own, T_max=8))
    assert_same(model, twin, 1e-5)


def test_groups_have_values_of_their_own(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)

    def groups(of: Any) -> list[dict[str, Any]]:
        named = list(of.named_parameters())
        return [{"params": named[:2]}, {"params": named[2:], "lr": 0.01}]

    optimizer = distributed(groups(model), "sgd:lr=0.1")
    plain = [{**group, "params": [p for _, p in group["params"]]} for group in groups(twin)]
    train(model, optimizer, 5)
    train(twin, torch.optim.SGD(plain, lr=0.1), 5)
    optimizer.param_groups[1]["lr"] = 0.2
    train(model, optimizer, 5)
    plain[1]["lr"] = 0.2
    train(twin, torch.optim.SGD(plain, lr=0.1), 5)
    assert_same(model, twin, 1e-5)


def test_a_forward_waits_for_its_own_parameters_alone(distributed: Any) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=4, non_blocking=True)
    train(model, optimizer, 2)
    buckets = {bucket.slots[0].name: bucket for bucket in optimizer._exchanger.buckets}
    assert all(bucket.under_way for bucket in buckets.values())
    model[0](X)
    assert not buckets["0.weight"].under_way and not buckets["0.bias"].under_way
    assert buckets["4.weight"].under_way
    model.state_dict()
    assert not any(bucket.under_way for bucket in buckets.values()), "what is saved is complete"


def test_gradients_leave_during_the_backward_pass(distributed: Any) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=4)
    train(model, optimizer, 1)
    left: list[str] = []
    model[0].weight.register_hook(lambda _: left.extend(b.slots[0].name for b in optimizer._exchanger.buckets if b.sent))
    loss_of(model).backward()
    optimizer.step()
    assert "4.weight" in left and "0.weight" not in left


def test_parameters_that_are_used_by_another_module(distributed: Any) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=4)
    x = torch.randn(4, 5, 8)
    for each, own in ((model, optimizer), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
        for _ in range(5):
            own.zero_grad()
            each(x).square().mean().backward()
            own.step()
    assert_same(model, twin, 1e-5)


def test_plain_tensors_are_waited_for_in_the_step(distributed: Any) -> None:
    w = torch.zeros(4, requires_grad=True)
    optimizer = distributed([("w", w)], "sgd:lr=0.5")
    for _ in range(20):
        optimizer.zero_grad()
        ((w - 1) ** 2).sum().div(2).backward()
        optimizer.step()
    assert torch.allclose(w, torch.ones(4), atol=1e-3)


def clip_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.01, 0.01)


def clip_into_another(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-0.01, 0.01)


@pytest.mark.parametrize("clip", [lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1), clip_data, clip_into_another])
def test_clipping_is_noticed(distributed: Any, clip: Callable[[nn.Module], None]) -> None:
    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            clip(model)
            optimizer.step()

    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.5", pack_bytes=4)
    clipped(model, optimizer, 5)
    clipped(twin, torch.optim.SGD(twin.parameters(), lr=0.5), 5)
    assert_same(model, twin, 1e-5)
    if clip is clip_data:
        return  # Once gradients leave early, nothing tells of it.
    other = network()
    with pytest.raises(pm.errors.OrderError, match="was changed after it had left.*overlap=False"):
        clipped(other, distributed(other.named_parameters(), "sgd:lr=0.5", overlap=True), 1)


@pytest.mark.parametrize("how", ["accumulate", "no_sync", "unsaid"])
def test_gradients_are_accumulated(distributed: Any, how: str) -> None:
    model = network()
    twin = copy.deepcopy(model)
    options = {"accumulate": 2} if how == "accumulate" else {}
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=4, **options)
    for _ in range(4):
        optimizer.zero_grad()
        if how == "no_sync":
            with optimizer.no_sync():
                loss_of(model).backward()
        else:
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.2), 4)
    assert_same(model, twin, 1e-5)


def test_a_gradient_that_is_added_to_too_late_is_an_error(distributed: Any) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=4)
    train(model, optimizer, 1)
    loss_of(model).backward()
    with pytest.raises(pm.errors.OrderError, match="accumulate=K"):
        loss_of(model).backward()


def test_grad_scaler_leaves_out_what_is_infinite(distributed: Any) -> None:
    model = network()
    before = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * (float("inf") if step == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            optimizer.synchronize()
            assert_same(model, before)
    assert scaler.get_scale() == 2.0**9
    train(before, torch.optim.SGD(before.parameters(), lr=0.1), 2)
    assert_same(model, before, 1e-5)


def test_frozen_and_unused_parameters(distributed: Any) -> None:
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model[0].requires_grad_(False)
    frozen = copy.deepcopy(model[0])
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1")
    train(model, optimizer, 3)
    optimizer.synchronize()
    assert_same(model[0], frozen, 0)
    assert model.unused.tolist() == [1, 1, 1]
    assert not {"0.weight", "0.bias"} & {s.name for b in optimizer._exchanger.buckets for s in b.slots}
    model[0].requires_grad_(True)
    loss_of(model).backward()
    with pytest.raises(pm.ParamillError, match="`0.bias` has a gradient, but was frozen|`0.weight` has a gradient"):
        optimizer.step()


def test_a_parameter_that_was_frozen_is_not_averaged(distributed: Any) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 1)
    model[0].requires_grad_(True)
    loss_of(model).backward()
    with pytest.raises(pm.ParamillError, match="has a gradient, but was frozen"):
        optimizer.step()


@pytest.mark.parametrize("averaged", [False, True])
def test_no_parameters_are_added_later(distributed: Any, averaged: bool) -> None:
    model, other = network(), network()
    optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1) if averaged else model.named_parameters())
    with pytest.raises(pm.errors.OrderError, match="make it anew"):
        optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.raises(pm.errors.OrderError, match="a single one with all parameters, in groups"):
        distributed(other.named_parameters(), job=optimizer.job)


@pytest.mark.parametrize("averaged", [False, True])
def test_a_second_optimizer_is_refused_until_the_first_is_closed(averaged: bool) -> None:
    def make(**options: Any) -> Any:
        model = network()
        of = torch.optim.SGD(model.parameters(), lr=0.1) if averaged else model.named_parameters()
        kind: Any = pm.torch.AveragingOptimizer if averaged else pm.torch.DistributedOptimizer
        return kind(of, **options)

    first = make()
    with pytest.raises(pm.errors.OrderError, match=r"a job has one optimizer.*in groups.*job of its own.*close\(\)"):
        make()
    make(job=pm.init()).close()
    first.close()
    make().close()


def test_a_job_is_left_if_its_optimizer_cannot_be_made() -> None:
    for _ in range(2):
        with pytest.raises(pm.ParamillError, match="no parameter is called words"):
            pm.torch.DistributedOptimizer(network().named_parameters(), sparse=["words"])
    pm.torch.DistributedOptimizer(network().named_parameters()).close()


@pytest.mark.parametrize(
    ("text", "reference"),
    [("sgd:lr=0.1", torch.optim.SGD), ("adamw:lr=0.1,weight_decay=0.01", torch.optim.AdamW)],
)
def test_schedules_reach_what_is_trained_and_nothing_else(distributed: Any, text: str, reference: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), text, buffers=model.named_buffers())
    plain = reference([p for p in twin.parameters() if p.requires_grad], lr=0.1)
    for each, own in ((model, optimizer), (twin, plain)):
        train(each, own, 6, torch.optim.lr_scheduler.StepLR(own, 2, 0.5))
    assert_same(model, twin, 1e-4)


class Ratings(nn.Module):
    """Rows of a sparse embedding that are not named by the first argument."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 1)
        self.own = own

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        # Without a forward of the embedding's own, no module says which rows are used.
        rows = self.items(items) if self.own else nn.functional.embedding(items, self.items.weight, sparse=True)
        return (self.out(rows)[:, 0] * users).mean()

    def train_with(self, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
        for users, items in batches:
            optimizer.zero_grad()
            self(users, items).backward()
            optimizer.step()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("users", [torch.rand(6), torch.arange(6)])
def test_rows_are_those_that_the_embedding_is_asked_for(distributed: Any, own: bool, users: Tensor) -> None:
    model = Ratings(own)
    twin = copy.deepcopy(model)
    batches = [(users, torch.randint(0, 20, (6,))) for _ in range(8)]
    model.train_with(distributed(model.named_parameters(), "sgd:lr=0.5", sparse=["items.weight"]), batches)
    twin.train_with(torch.optim.SGD(twin.parameters(), lr=0.5), batches)
    assert_same(model, twin, 1e-5)


@pytest.mark.parametrize("of", ["optimizer", "job"])
def test_the_last_rows_are_here_after_closing(distributed: Any, of: str) -> None:
    model = Ratings(own=True)
    twin = copy.deepcopy(model)
    batches = [(torch.ones(6), torch.randint(0, 20, (6,))) for _ in range(3)]
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.5", sparse=["items.weight"])
    model.train_with(optimizer, batches)
    twin.train_with(torch.optim.SGD(twin.parameters(), lr=0.5), batches)
    (optimizer if of == "optimizer" else optimizer.job).close()
    torch.testing.assert_close(model.items.weight, twin.items.weight)
    assert_same(model, twin, 1e-5)
    torch.testing.assert_close(model(*batches[0]), twin(*batches[0]))


def test_training_goes_on_after_a_gradient_that_is_no_number(distributed: Any) -> None:
    for options in ({}, {"codec": "f16"}, {"codec": "topk:0.5", "device_codec": True}):
        model = network()
        optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=4, **options)
        train(model, optimizer, 2)
        optimizer.synchronize()
        before = loss_of(model).item()
        optimizer.zero_grad()
        (loss_of(model) * float("nan")).backward()
        refusals = 0
        # Servers find it without a codec, and each bucket tells when it is waited for; workers find it with one.
        for wait in [optimizer.step, *[optimizer.synchronize] * 6]:
            try:
                wait()
            except pm.errors.NonFiniteError:
                refusals += 1
        assert refusals
        train(model, optimizer, 20)
        assert loss_of(model).item() < before


def test_rows_that_are_no_numbers_are_refused(distributed: Any) -> None:
    model = Ratings(own=True)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.5", sparse=["items.weight"], codec="f16")
    before = copy.deepcopy(model)
    ids = torch.arange(6)
    with pytest.raises(pm.errors.NonFiniteError):
        model.train_with(optimizer, [(torch.full((6,), float("nan")), ids)])
    assert_same(model, before)
    model.train_with(optimizer, [(torch.ones(6), ids)])
    assert not torch.equal(model.state_dict()["items.weight"], before.items.weight)


def test_rows_of_an_embedding_travel_alone(distributed: Any) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 4, sparse=True)
            self.out = nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.embedding(ids)).mean()

    model = Words()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.5", sparse=["embedding.weight"])
    reference = torch.optim.SGD(twin.parameters(), lr=0.5)
    batches = [torch.randint(0, 50, (6,)) for _ in range(8)]
    for each, own in ((model, optimizer), (twin, reference)):
        for ids in batches:
            own.zero_grad()
            each(ids).backward()
            own.step()
    assert_same(model, twin, 1e-5)
    pushed = optimizer.job.report()["bytes_pushed"]
    assert pushed < 8 * 50 * 4 * 4, "less than the whole embedding would have been"


def test_parameters_of_half_precision_have_whole_ones_on_the_servers(distributed: Any) -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    start = model.weight.detach().float().clone()
    optimizer = distributed(model.named_parameters(), "sgd:lr=1e-4")
    for _ in range(100):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
    optimizer.synchronize()
    # Each step is too small for bfloat16; a hundred of them are not.
    torch.testing.assert_close(model.weight.float(), (start - 0.01).to(torch.bfloat16).float(), rtol=1e-2, atol=1e-3)


def test_state_is_saved_and_taken_over(distributed: Any) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1")
    optimizer.param_groups[0]["lr"] = 0.025
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["paramill"] == {"rule": "sgd", "iteration": 1}
    other = distributed(network().named_parameters(), "sgd:lr=0.1")
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.025
    adam = distributed(network().named_parameters(), "adam:lr=0.1")
    with pytest.raises(pm.errors.PolicyError, match="`sgd`, and this one is `adam`"):
        adam.load_state_dict(state)


def test_a_state_that_is_not_restored_is_named(distributed: Any, recwarn: pytest.WarningsRecorder) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "adam:lr=0.1")
    train(model, optimizer, 3)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert not recwarn.list, "the same servers have it still"
    with pytest.warns(UserWarning, match="iteration 3 are restored; the state of `adam` on the servers .* begins anew"):
        distributed(network().named_parameters(), "adam:lr=0.1").load_state_dict(state)


def test_a_state_of_torch_s_own_optimizer_is_taken_over(distributed: Any) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "momentum:lr=0.1,beta=0.5")
    optimizer.load_state_dict(torch.optim.SGD(network().parameters(), lr=0.025, momentum=0.75).state_dict())
    train(model, optimizer, 1)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["beta"]) == (0.025, 0.75)


def test_a_state_of_torch_s_own_optimizer_counts_as_a_whole_or_is_refused(distributed: Any) -> None:
    model = network()
    optimizer = distributed(network().named_parameters(), "adamw:lr=0.1")
    theirs = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, fused=True)
    optimizer.load_state_dict(theirs.state_dict())
    group = optimizer.param_groups[0]
    found = [group[key] for key in ("lr", "beta1", "beta2", "epsilon", "weight_decay")]
    assert found == [0.02, 0.8, 0.95, 1e-6, 0.3] and "betas" not in group
    loss_of(model).backward()
    theirs.step()
    with pytest.warns(UserWarning, match="of a state of torch's own optimizer are restored; .* begins anew"):
        optimizer.load_state_dict(theirs.state_dict())
    for other, named in ((torch.optim.AdamW, "amsgrad"), (torch.optim.Adam, "decoupled_weight_decay")):
        state = other(network().parameters(), amsgrad=named == "amsgrad").state_dict()
        with pytest.raises(pm.errors.PolicyError, match=named):
            optimizer.load_state_dict(state)


def test_averaging_steps_with_the_given_optimizer(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(torch.optim.RAdam(model.parameters(), lr=0.01), sync=None)
    reference = torch.optim.RAdam(twin.parameters(), lr=0.01)
    for each, own in ((model, optimizer), (twin, reference)):
        train(each, own, 10, torch.optim.lr_scheduler.StepLR(own, 3, 0.5))
    assert_same(model, twin, 1e-5)
    assert optimizer.state_dict()["state"][0]["step"] == 10
    with pytest.raises(pm.errors.PolicyError, match="no mean of a round that all workers take; average under bsp, drop, psp, or"):
        pm.torch.AveragingOptimizer(torch.optim.SGD(model.parameters(), lr=1), sync="ssp:s=3")


def test_a_closure_is_called(distributed: Any) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1")

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss.item()

    first = optimizer.step(closure)
    for _ in range(20):
        last = optimizer.step(closure)
    assert last < first
