"""Parameters of a device, carried by a pump: the device is emulated here, the rest is what a GPU has."""

from __future__ import annotations

import copy
import threading
from typing import Any, Optional

import pytest
import torch
from torch import nn

import paramill as pm
from paramill.torch.rules import parse_optimizer, text_of

pytestmark = pytest.mark.usefixtures("emulated")
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
# Of many small tables, of one, and of one that fills pages of its own, which are pinned.
NETWORKS = {"tables": (8, 4), "table": (8, 1 << 20), "pages": (4096, 1 << 20)}


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("overlap", [None, True, False])
def test_parameters_are_the_new_ones_as_soon_as_the_step_returns(
    distributed: Any, kind: str, overlap: Optional[bool]
) -> None:
    width, pack_bytes = NETWORKS[kind]
    # A wide network does not bear more.
    rate = 0.8 / width
    model = network(width)
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), f"sgd:lr={rate}", pack_bytes=pack_bytes, overlap=overlap)
    assert all(bucket.lane is not None for bucket in optimizer._exchanger.buckets)
    plain = torch.optim.SGD(twin.parameters(), lr=rate)
    for _ in range(6):
        train(model, optimizer, 1)
        train(twin, plain, 1)
        # Nothing was called that waits.
        assert_same(model, twin)
    optimizer.synchronize()
    assert optimizer.job.iteration == 6


def test_halves_and_doubles_are_copied_once_more(distributed: Any) -> None:
    model = network().double()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1")
    for each, own in ((model, optimizer), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
        for _ in range(3):
            own.zero_grad()
            each(X.double()).square().mean().backward()
            own.step()
    assert_same(model, twin)


@pytest.mark.parametrize("codec", ["f16", "ef+bf16", "topk:0.1", "topk:0.8", "threshold:0.01", "threshold:1e-9", "dvf:delta=0.01"])
@pytest.mark.parametrize("width", [8, 4096])
def test_codecs_send_what_the_worker_would(distributed: Any, monkeypatch: pytest.MonkeyPatch, codec: str, width: int) -> None:
    carried, hosted = network(width), network(width)
    train(carried, distributed(carried.named_parameters(), "sgd:lr=0.1", codec=codec, device_codec=True), 5)
    monkeypatch.undo()
    optimizer = distributed(hosted.named_parameters(), "sgd:lr=0.1", codec=codec, device_codec=False)
    train(hosted, optimizer, 5)
    optimizer.synchronize()
    for a, b in zip(carried.parameters(), hosted.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [8, 4096])
@pytest.mark.parametrize("answer", ["f16", "bf16"])
def test_parameters_that_come_as_halves_are_what_the_worker_would_make_of_them(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, answer: str, width: int
) -> None:
    rate = 0.8 / width
    carried, hosted = network(width), network(width)
    optimizer = distributed(carried.named_parameters(), f"sgd:lr={rate}", answer_codec=answer)
    native = optimizer._exchanger.buckets[0]._slab._native
    train(carried, optimizer, 3)
    assert native.values_type() == answer
    optimizer.job.set(answer_codec="none")
    train(carried, optimizer, 1)
    optimizer.synchronize()
    assert native.values_type() == "f32"
    monkeypatch.undo()
    optimizer = distributed(hosted.named_parameters(), f"sgd:lr={rate}", answer_codec=answer)
    train(hosted, optimizer, 3)
    optimizer.job.set(answer_codec="none")
    train(hosted, optimizer, 1)
    optimizer.synchronize()
    for a, b in zip(carried.parameters(), hosted.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("answer", ["none", "f16"])
def test_a_large_table_comes_in_parts_and_whole(distributed: Any, answer: str) -> None:
    # A little more than what is copied at once.
    model = nn.Linear(2048, 4100, bias=False)
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.5", answer_codec=answer)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(2))
    for each, own in ((model, optimizer), (twin, plain)):
        for _ in range(3):
            own.zero_grad()
            each(x).square().mean().backward()
            own.step()
    tolerance = 1e-6 if answer == "none" else 1e-3
    torch.testing.assert_close(model.weight, twin.weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("codec", ["none", "f16", "topk:0.5"])
@pytest.mark.parametrize("pack_bytes", [4, 1 << 20])
def test_what_is_no_number_is_told_once_and_training_goes_on(distributed: Any, codec: str, pack_bytes: int) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", codec=codec, device_codec=codec != "none", pack_bytes=pack_bytes)
    train(model, optimizer, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    (model(X).square().mean() * float("nan")).backward()
    # By this step, or by the next wait: the device goes on meanwhile.
    with pytest.raises(pm.errors.NonFiniteError, match="NaN or Inf"):
        optimizer.step()
        optimizer.synchronize()
    optimizer.synchronize()
    for parameter, value in zip(model.parameters(), before):
        assert torch.equal(parameter, value), "nothing of it is applied"
    train(model, optimizer, 2)
    optimizer.synchronize()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not any(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before))


def test_a_server_that_does_not_answer_is_a_time_out_and_may_be_waited_for_again(serve: Any) -> None:
    """One worker of two: the round closes when the other has come to it too."""
    url = serve(2)
    model = network()
    job = pm.init(url, rank=0, timeout=2)
    other = pm.init(url, rank=1, timeout=60)
    layers, size = [], 0
    for name, parameter in reversed(list(model.named_parameters())):
        layers.append((f"p0/{name}", size, parameter.shape))
        size += -(-parameter.numel() // 16) * 16
    rule = text_of(*parse_optimizer("sgd:lr=0.1"))
    table = other.table("p0/2.bias and 3 more", init=torch.zeros(size).numpy(), layers=layers, optimizer=rule)
    start = threading.Thread(target=other.start)
    start.start()
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "sgd:lr=0.1", job=job)
    start.join()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(TimeoutError, match="timed out after 2.0 s waiting for"):
        train(model, optimizer, 1)
        optimizer.synchronize()
    table.push(torch.zeros(size).numpy())
    other.clock()
    optimizer.synchronize()
    assert not any(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before))
    other.close()
    optimizer.close()


def test_without_blocking_the_next_forward_has_the_new_parameters(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", pack_bytes=4, non_blocking=True)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    train(model, optimizer, 6)
    train(twin, plain, 6)
    torch.testing.assert_close(model(X), twin(X))
    # What no module is called for has nothing that waits.
    train(model, optimizer, 1)
    train(twin, plain, 1)
    with pytest.raises(pm.errors.OrderError, match=r"has a new gradient.*synchronize\(\) before"):
        model[0].weight.square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    assert_same(model, twin)


def test_what_is_written_while_new_parameters_are_on_their_way_is_refused(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", non_blocking=True)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    train(model, optimizer, 5)
    train(twin, plain, 5)
    with torch.no_grad():
        model[0].weight.zero_()
    for use in (lambda: model(X), lambda: train(model, optimizer, 1)):
        with pytest.raises(pm.errors.OrderError, match="changed here while its new values were on their way"):
            use()
    optimizer.zero_grad()
    optimizer.synchronize()
    assert_same(model, twin)
    train(model, optimizer, 3)
    train(twin, plain, 3)
    optimizer.synchronize()
    assert_same(model, twin)


def test_schedulers_buffers_and_rows_end_the_iteration_together(distributed: Any) -> None:
    model = nn.Sequential(network(), nn.BatchNorm1d(2))
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", buffers=model.named_buffers(), pack_bytes=4)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for each, own in ((model, optimizer), (twin, plain)):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(own, T_max=8)
        for _ in range(5):
            train(each, own, 1)
            scheduler.step()
    assert_same(model, twin)
    for a, b in zip(model.buffers(), twin.buffers()):
        torch.testing.assert_close(a, b)


def test_a_pump_refuses_what_does_not_fit(distributed: Any) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1")
    lane = optimizer._exchanger.buckets[0].lane
    assert lane is not None
    native, flat = lane.pump._native, lane.outgoing
    for content, parts, why in [
        ("gradient", [(flat.data_ptr(), 4 * flat.numel() + 4)], "more is to be sent than the slab has room for"),
        ("letters", [], "there is no content `letters`"),
    ]:
        with pytest.raises(pm.ParamillError, match=why):
            native.submit(0, 0, content, parts, 0, "", [])


def test_a_state_is_loaded_after_the_parameters_of_the_last_step(distributed: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = distributed(model.named_parameters(), "sgd:lr=0.1", non_blocking=True)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    pump = next(bucket.lane.pump for bucket in optimizer._exchanger.buckets)
    train(model, optimizer, 3)
    train(twin, plain, 3)
    state = optimizer.state_dict()
    assert pump.is_ahead, "the step has not waited"
    state["param_groups"][0]["lr"] = 0.05
    optimizer.load_state_dict(state)
    assert not pump.is_ahead
    assert_same(model, twin)
    plain.param_groups[0]["lr"] = 0.05
    train(model, optimizer, 2)
    train(twin, plain, 2)
    optimizer.synchronize()
    assert_same(model, twin)
