"""Several workers, as processes, against several servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any, Callable

import pytest
import torch
from torch import nn

import paramill as pm

PROGRAM = """
    import torch
    from torch import nn
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["PARAMILL_RANK"]))  # Different from rank to rank: the values of rank 0 count.
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    MAKE
    data = torch.Generator().manual_seed(3)
    x, y = torch.randn(20, 32, 1, 8, 8, generator=data), torch.randint(0, 10, (20, 32), generator=data)
    mine = slice(optimizer.job.rank * 32 // optimizer.job.workers, (optimizer.job.rank + 1) * 32 // optimizer.job.workers)
    for step in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step, mine]), y[step, mine]).backward()
        optimizer.step()
    report([p.tolist() for p in model.state_dict().values()])
    optimizer.close()
"""

SERVERS = """
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "sgd:lr=0.1", order="ranked", pack_bytes=4096)
"""
AVERAGED = """
    optimizer = pm.torch.AveragingOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), order="ranked")
"""


def single(make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The same by one process, with the batch of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    data = torch.Generator().manual_seed(3)
    x, y = torch.randn(20, 32, 1, 8, 8, generator=data), torch.randint(0, 10, (20, 32), generator=data)
    optimizer = make(model)
    for step in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step]), y[step]).backward()
        optimizer.step()
    return list(model.state_dict().values())


def distance(of: list[Any], reference: list[torch.Tensor]) -> float:
    """The largest distance of a tensor, relative to its own norm."""
    return max(
        ((torch.tensor(one) - other).norm() / other.norm()).item() for one, other in zip(of, reference)
    )


@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (SERVERS, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        (AVERAGED, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)),
    ],
    ids=["servers step", "workers step"],
)
def test_four_workers_are_one_with_the_batch_of_four(launch: Any, make: str, reference: Any) -> None:
    results = launch(PROGRAM.replace("MAKE", make.strip()), 4, 2)
    assert all(result == results[0] for result in results), "all workers have the same bits"
    tolerance = 1e-6 if make is SERVERS else 1e-4
    assert distance(results[0], single(reference)) < tolerance


def test_schedules_are_exact_with_several_workers(launch: Any) -> None:
    make = """
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "momentum:lr=0.1", order="ranked")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)
    """
    program = PROGRAM.replace("MAKE", make.strip()).replace("optimizer.step()", "optimizer.step(); scheduler.step()")

    class Scheduled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                group["lr"] *= 0.9

    results = launch(program, 2, 2)
    reference = single(lambda model: Scheduled(model.parameters(), lr=0.1, momentum=0.9))
    assert distance(results[0], reference) < 1e-6


def test_asynchronous_workers_converge(launch: Any) -> None:
    program = """
        import torch
        torch.manual_seed(1)
        model = torch.nn.Linear(10, 1)
        optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "sgd:lr=0.1", sync="ssp:s=3")
        x = torch.randn(256, 10, generator=torch.Generator().manual_seed(optimizer.job.rank))
        y = x.sum(1, keepdim=True)
        for _ in range(200):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        report(loss.item())
    """
    assert max(launch(program, 3, 2)) < 1e-3


def test_buffers_are_averaged_where_that_is_wanted(launch: Any) -> None:
    program = """
        import torch
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        optimizer = pm.torch.DistributedOptimizer(
            model.named_parameters(), "sgd:lr=1e-3", buffers=model.named_buffers())
        for _ in range(3):
            x = torch.full((4, 2), float(optimizer.job.rank)) + torch.arange(4.0)[:, None]
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        report(model.state_dict()["0.running_mean"].tolist())
        optimizer.close()
    """
    # Means of 1.5 and 2.5, each step a tenth of the way there.
    for mean in launch(program, 2, 1):
        torch.testing.assert_close(torch.tensor(mean), torch.full((2,), (1 - 0.9**3) * 2.0))


def test_means_stay_means_in_a_job_that_adds_up(launch: Any) -> None:
    program = """
        import torch
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 1, bias=False))
        torch.nn.init.zeros_(model[1].weight)
        optimizer = pm.torch.AveragingOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), buffers=model.named_buffers())
        model(torch.full((4, 2), float(optimizer.job.rank)))
        optimizer.zero_grad()
        (model[1].weight * (1.0 + 2 * optimizer.job.rank)).sum().backward()
        optimizer.step()
        optimizer.close()
        report([model[1].weight.tolist(), model[0].running_mean.tolist()])
    """
    for weight, mean in launch(program, 2, 1, "--reduce=sum"):
        assert weight == [[-2.0, -2.0]], "gradients of 1 and 3"
        torch.testing.assert_close(torch.tensor(mean), torch.full((2,), 0.05))


def test_rows_have_everybody_s_last_step_after_closing(launch: Any) -> None:
    program = """
        import torch
        model = torch.nn.Embedding.from_pretrained(torch.zeros(4, 1), freeze=False, sparse=True)
        optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "sgd:lr=1", sparse=["weight"])
        for step in range(20):
            optimizer.zero_grad()
            model(torch.tensor([optimizer.job.rank, 3])).sum().backward()
            optimizer.step()
        optimizer.close()
        report(model.weight[:, 0].tolist())
    """
    for rows in launch(program, 2, 1):
        assert rows == [-10.0, -10.0, 0.0, -20.0], "the means of both, of every step"


def test_every_worker_has_a_part_of_the_data(launch: Any) -> None:
    program = """
        job = pm.init()
        job.table("w", init=[0.0])
        sampler = pm.torch.ShardSampler(range(11), job)
        report([list(sampler), list(sampler), len(sampler)])
    """
    parts = launch(program, 2, 1)
    for epoch in (0, 1):
        mine = [set(part[epoch]) for part in parts]
        assert len(mine[0]) == len(mine[1]) == parts[0][2] == 5 and not mine[0] & mine[1]
    assert parts[0][0] != parts[0][1], "another order in every epoch"


def test_gradients_are_compressed(launch: Any) -> None:
    program = """
        import torch
        torch.manual_seed(1)
        # Of a bias one entry in ten would travel, ten steps late: too late for this learning rate.
        model = torch.nn.Linear(100, 10, bias=False)
        optimizer = pm.torch.DistributedOptimizer(
            model.named_parameters(), "sgd:lr=0.5", sync="ssp:s=3", codec="topk:0.05")
        x = torch.randn(256, 100, generator=torch.Generator().manual_seed(optimizer.job.rank)) / 10
        y = x[:, :10] * 3
        for _ in range(300):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y) * 10
            loss.backward()
            optimizer.step()
        sent = optimizer.job.report()
        report([loss.item(), sent["bytes_pushed"], sent["bytes_pulled"]])
    """
    for loss, pushed, pulled in launch(program, 2, 1):
        assert loss < 0.05
        assert pushed < 0.2 * pulled


@pytest.mark.parametrize("sync", ["psp:c=1,b=0.5", "psp:c=1,tau2=20ms"])
def test_averages_are_not_pulled_partially(sync: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(pm.errors.PolicyError, match="replicas would differ for good; leave `b` and `tau2` out"):
        pm.torch.AveragingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync=sync)


def test_a_step_goes_on_without_late_blocks(serve: Callable[..., str]) -> None:
    """Every fifth answer is late. What a step went on without comes with a later one, and no gradient is lost."""
    url = serve(1, "--cores=4", "--sync=psp:c=1,b=0.5", "--inject=pull:delay=100ms,p=0.2")
    model = nn.Linear(256, 256, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "sgd:lr=1", job=pm.init(url))
    left_out = 0
    for step in range(60):
        # The last steps move nothing: they only bring what is missing.
        model.weight.grad = torch.full_like(model.weight, float(step < 40))
        before = model.weight.detach().clone()
        optimizer.step()
        left_out += step < 40 and bool((model.weight.detach() == before).any())
    assert left_out > 0
    assert model.weight.detach().unique().tolist() == [-40.0]
    optimizer.close()


@pytest.mark.parametrize("device", ["host", "emulated"])
@pytest.mark.parametrize(("sync", "ahead"), [("ssp:s=3", 3), ("dsps:min=2,max=5", 2), ("ssp:s=3,cache=off", 0)])
def test_steps_go_on_within_the_bound_while_answers_are_late(
    command: str, request: pytest.FixtureRequest, device: str, sync: str, ahead: int
) -> None:
    """The server stands still: nothing is answered, and only with a cache nobody needs an answer yet."""
    if device == "emulated":
        request.getfixturevalue("emulated")
    line = [command, "--json", "serve", "--listen=127.0.0.1:0", "--workers=1", "--servers=1", f"--sync={sync}"]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        url = json.loads(server.stdout.readline())["url"]
        model = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "sgd:lr=1", job=pm.init(url, timeout=1))

        def step() -> float:
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            optimizer.synchronize()
            (value,) = model.weight.detach().unique().tolist()
            return float(value)

        os.kill(server.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(server.pid, os.WUNTRACED)[1])
        assert [step() for _ in range(ahead)] == [0.0] * ahead
        made = ahead
        # A device goes on after a time-out, and the next step tells of that.
        if device == "host":
            with pytest.raises(TimeoutError, match="has not answered"):
                step()
            made += 1
        os.kill(server.pid, signal.SIGCONT)
        optimizer.synchronize()
        # What a step computes on lacks no more than the bound, and no gradient is lost.
        for made in range(made + 1, 60):
            lacks = made + step()
            assert 0 <= lacks <= ahead, f"{lacks} in step {made}"
        reads = optimizer.job.report()["reads"]
        assert reads["at_once"] >= ahead and reads["max_staleness"] == ahead
        optimizer.close()
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.terminate()
        server.wait(60)


def test_a_second_optimizer_has_words_of_its_own(launch: Callable[..., Any]) -> None:
    program = """
    import torch
    generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    first = pm.torch.DistributedOptimizer(generator.named_parameters(), "sgd:lr=0.1")
    try:
        pm.torch.DistributedOptimizer(critic.named_parameters(), "sgd:lr=0.1")
    except pm.errors.OrderError as error:
        while_open = str(error)
    first.close()
    try:
        pm.torch.DistributedOptimizer(critic.named_parameters(), "sgd:lr=0.1")
    except pm.errors.OrderError as error:
        report([while_open, str(error)])
    """
    for while_open, afterwards in launch(program):
        assert while_open.startswith("a job has one optimizer") and "in groups" in while_open
        assert "a job takes a worker once" in afterwards
