"""Local steps: workers step by themselves, and synchronise pseudo-gradients now and then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paramill as pm

PROGRAM = """
    import torch
    from torch import nn
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["PARAMILL_RANK"]))  # Different from rank to rank: the values of rank 0 count.
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    optimizer = MAKE
    data = torch.Generator().manual_seed(3)
    x, y = torch.randn(STEPS, 32, 1, 8, 8, generator=data), torch.randint(0, 10, (STEPS, 32), generator=data)
    mine = slice(optimizer.job.rank * 32 // optimizer.job.workers, (optimizer.job.rank + 1) * 32 // optimizer.job.workers)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[step % 2, mine]), y[step % 2, mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    pushed = optimizer.job.report()["bytes_pushed"]
    optimizer.close()
    report({"parameters": [p.tolist() for p in model.parameters()], "losses": losses, "pushed": pushed})
"""
SGD = "torch.optim.SGD(model.parameters(), lr=0.1)"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def trained(launch: Any, make: str, steps: int, *arguments: str) -> list[Any]:
    results: list[Any] = launch(PROGRAM.replace("MAKE", make).replace("STEPS", str(steps)), 2, 1, *arguments)
    assert results[0]["parameters"] == results[1]["parameters"], "after close all have the same parameters"
    return results


def distance(one: Any, other: Any) -> float:
    flat = [torch.cat([torch.tensor(p).flatten() for p in each["parameters"]]) for each in (one, other)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


def test_a_synchronisation_after_every_step_is_synchronous_sgd(launch: Any) -> None:
    local = trained(launch, f'pm.torch.LocalSteps({SGD}, h=1, outer="sgd:lr=1")', 8)
    plain = trained(launch, f"pm.torch.AveragingOptimizer({SGD})", 8)
    assert distance(local[0], plain[0]) < 1e-5


@pytest.mark.parametrize("steps", ["h=5", "h=5,fragments=2", "h=6,fragments=2,late=2"])
def test_the_schedule_of_the_job_is_followed(launch: Any, steps: str) -> None:
    make = "pm.torch.LocalSteps(torch.optim.Adam(model.parameters(), lr=0.01), buffers=model.named_buffers())"
    # The last clock is not whole: what is left is pushed at the end.
    results = trained(launch, make, 32, "--local", f"steps:{steps}")
    for result in results:
        assert sum(result["losses"][-4:]) < 0.6 * sum(result["losses"][:4])
    every = trained(launch, "pm.torch.DistributedOptimizer(model.named_parameters())", 32)
    assert results[0]["pushed"] * 4 < every[0]["pushed"]


def test_a_program_that_ignores_local_steps_is_told(command: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import paramill as pm\njob = pm.init()\njob.table('w', init=[1.0])\njob.start()\n")
    line = [command, "launch", "-n1", "--local", "steps:h=5", "--", sys.executable, str(path)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "the job has local=steps:h=5, and this program synchronises at every step: make a pm.torch.LocalSteps" in ended.stderr


def test_what_cannot_be_meant_is_refused_with_the_remedy() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, expected in [
        ({}, "Give h=50, or `paramill launch --local steps:h=50`"),
        ({"h": 0}, "h = 0: expected 1 to"),
        ({"h": 4, "late": 4}, "late = 4: expected less than h = 4"),
        ({"h": 9, "fragments": 9}, "fragments = 9: expected at most 2, as many as the model has tables"),
        ({"h": 4, "sync": "psp:c=1,b=0.5"}, "leave `b` and `tau2` out"),
        ({"h": 4, "reduce": "sum"}, "LocalSteps takes no `reduce`"),
    ]:
        with pytest.raises(pm.errors.PolicyError, match=expected.replace("(", r"\(")):
            pm.torch.LocalSteps(sgd, **arguments)  # type: ignore[arg-type]
    with pytest.raises(pm.errors.PolicyError, match="is no optimizer"):
        pm.torch.LocalSteps(model, h=4)  # type: ignore[arg-type]


def test_what_the_job_and_the_program_say_must_agree() -> None:
    model = nn.Linear(2, 1)
    for local, expected in [("steps:h=5", "leave `h` out"), ("steps:h=4,inner=(sgd:lr=0.1)", "leave `inner` out")]:
        with pm.Server(workers=1, local=local) as server, pm.init(server.url) as job:
            with pytest.raises(pm.errors.PolicyError, match=expected):
                pm.torch.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), h=4, job=job)


def test_steps_are_kept_while_an_answer_is_under_way() -> None:
    parameter = nn.Parameter(torch.tensor([8.0]))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    optimizer = pm.torch.LocalSteps(sgd, h=2, late=1, outer="sgd:lr=0.5")
    values = []
    for _ in range(4):
        parameter.grad = torch.ones(1)
        optimizer.step()
        values.append(parameter.item())
    # Two steps are pushed as 2, of which the servers make 1: 7. The third step came before that answer, and stays.
    assert values == [7.0, 6.0, 6.0, 5.0]
    optimizer.close()
    assert parameter.item() == 6.0


def quarters(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Values with which all that follows is exact, also in bfloat16."""
    return torch.randint(-4, 5, shape, generator=generator) / 4


def stepped(device: str, dtype: torch.dtype, is_strided: bool) -> list[torch.Tensor]:
    """Parameters and a buffer after steps with the same gradients, wherever and however they are stored."""
    generator = torch.Generator().manual_seed(5)
    values = [quarters(generator, 8, 4, 3, 3), quarters(generator, 7), quarters(generator, 5, 6), quarters(generator, 3, 2)]
    parameters = [nn.Parameter(value.to(device, dtype)) for value in values]
    if is_strided:
        parameters[0] = nn.Parameter(parameters[0].detach().to(memory_format=torch.channels_last))
        parameters[2] = nn.Parameter(parameters[2].detach().t().contiguous().t())
        assert not any(parameters[index].is_contiguous() for index in (0, 2))
    mean = torch.zeros(4, device=device)
    optimizer = pm.torch.LocalSteps(
        torch.optim.SGD(parameters, lr=1.0), h=4, fragments=2, late=1, outer="sgd:lr=0.5", buffers=[("mean", mean)]
    )
    for step in range(10):
        for parameter in parameters:
            gradient = quarters(generator, *parameter.shape).to(device, dtype)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        mean.fill_(float(step))
        optimizer.step()
    optimizer.close()
    assert all(tensor.device.type == device for tensor in [*parameters, mean])
    assert all(parameter.dtype == dtype for parameter in parameters)
    return [tensor.detach().float().cpu() for tensor in [*parameters, mean]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_devices_types_and_strides_make_no_difference(device: str, dtype: torch.dtype) -> None:
    plain = stepped("cpu", torch.float32, is_strided=False)
    assert plain[-1].tolist() == [9.0] * 4
    for is_strided in (False, True):
        for expected, found in zip(plain, stepped(device, dtype, is_strided)):
            assert torch.equal(expected, found), (device, dtype, is_strided)


@NEEDS_GPU
def test_parameters_of_two_devices_are_stepped_where_they_are() -> None:
    parameters = [nn.Parameter(torch.full((3,), 8.0, device=device)) for device in ("cpu", "cuda")]
    optimizer = pm.torch.LocalSteps(torch.optim.SGD(parameters, lr=1.0), h=2, fragments=2, outer="sgd:lr=0.5")
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    optimizer.close()
    assert [parameter.device.type for parameter in parameters] == ["cpu", "cuda"]
    # Half of every step counts.
    assert [parameter.tolist() for parameter in parameters] == [[6.0] * 3] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_that_are_no_numbers_are_left_out(device: str) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0], device=device))
    optimizer = pm.torch.LocalSteps(torch.optim.SGD([parameter], lr=1.0), h=1)
    parameter.grad = torch.tensor([float("nan"), 0.0], device=device)
    with pytest.raises(pm.errors.NonFiniteError):
        optimizer.step()
    assert parameter.tolist() == [1.0, 2.0], "the servers' parameters"
    parameter.grad = torch.tensor([0.0, 1.0], device=device)
    optimizer.step()
    optimizer.close()
    assert parameter.tolist()[0] == 1.0 and parameter.tolist()[1] < 2.0


@pytest.mark.parametrize("device", DEVICES)
def test_a_scaler_leaves_out_the_step_and_not_the_count(device: str) -> None:
    model = nn.Linear(1, 1, device=device)
    optimizer = pm.torch.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), h=2, outer="sgd:lr=1")
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    before = model.weight.item()
    for value in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, device=device)).sum() * value).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.job.iteration == 1
    assert abs(model.weight.item() - (before - 0.1)) < 1e-6, "scaled back"
    optimizer.close()
