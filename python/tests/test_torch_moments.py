"""What servers keep of past gradients is in a state_dict when that is asked for, as torch's own optimizers have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn

import paramill as pm

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("pack_bytes", [4, 1 << 20], ids=["tables", "table"])
@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ],
)
def test_it_is_the_state_of_torch(distributed: Any, kind: Any, options: dict[str, Any], pack_bytes: int) -> None:
    model, twin = network(), network()
    optimizer = distributed(model.named_parameters(), pm.torch.rule_of(kind, **options), pack_bytes=pack_bytes)
    own = kind(twin.parameters(), **options)
    train(model, optimizer, 5)
    train(twin, own, 5)
    state, expected = optimizer.state_dict(servers=True)["state"], own.state_dict()["state"]
    assert list(state) == list(expected)
    for number, entries in expected.items():
        assert set(entries) == set(state[number])
        for name, value in entries.items():
            torch.testing.assert_close(state[number][name], value, rtol=1e-4, atol=1e-6)
    # Training goes on as if nothing had been asked.
    train(model, optimizer, 3)
    train(twin, own, 3)
    for one, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert optimizer.state_dict()["state"] == {}


def test_servers_take_no_state_while_a_job_runs(distributed: Any) -> None:
    model = network()
    optimizer = distributed(model.named_parameters(), "adam:lr=0.1")
    train(model, optimizer, 2)
    state = optimizer.state_dict(servers=True)
    optimizer.load_state_dict(state)
    train(model, optimizer, 1)
    with pytest.raises(pm.errors.PolicyError, match="at iteration 2, and the job is at 3.*--resume FILE"):
        optimizer.load_state_dict(state)


def test_workers_get_it_together(launch: Callable[..., list[Any]]) -> None:
    program = """
        import torch
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 2)
        optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "adam:lr=0.1")
        states = []
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            states.append(optimizer.state_dict(servers=True)["state"])
        report([[each["step"].item() for each in state.values()] + [state[0]["exp_avg"].sum().item()] for state in states])
        optimizer.close()
    """
    one, other = launch(program, 2, 2)
    assert one == other
    assert [[steps, again] for steps, again, _ in one] == [[1, 1], [2, 2], [3, 3]]
    # Gradients of 2 in 8 elements, of which a tenth is added to nine tenths of the mean so far.
    assert [mean for _, _, mean in one] == pytest.approx([1.6, 3.04, 4.336])


def test_a_job_copies_its_checkpoint_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "copy.safetensors"
    with pm.init() as job:
        w = job.table("w", init=[1.0, 2.0], optimizer="adam:lr=0.1")
        w.update(np.ones(2, np.float32))
        job.clock()
        w.sync()
        assert "is copied to" in job.checkpoint(path)
        with pytest.raises(pm.errors.ParamillError, match="cannot write"):
            job.checkpoint(tmp_path / "nowhere" / "copy")
    header = path.read_bytes()[8:]
    assert b'"w#slot1"' in header and [entry.name for entry in tmp_path.iterdir()] == [path.name]
