"""Codecs as torch operations choose and round what the worker's own code does."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import paramill as pm  # noqa: E402
from paramill.torch.compression import Chain, Compressor  # noqa: E402

# Chunks have 8192 elements: some that are full, and one that is not.
SIZE = 20_000
LAYERS = [(0, 8192), (8192, 8192), (16384, SIZE - 16384)]
CHAINS = [
    "f16",
    "bf16",
    "ef+f16",
    "ef+bf16+lz4",
    "topk:0.01",
    "topk:0.01+f16",
    "topk:ratio=0.02+bf16+bitmap+zstd",
    "topk:sample=1,ratio=0.02",
    "topk:0.8",
    "warmup:2+topk:0.01",
    "threshold:0.5",
    "threshold:0.5+f16",
    "dvf:delta=2",
    "dvf:delta=0.5+f16+snappy",
    "dvf:delta=1e9",
]


def train(codec: str, device_codec: bool) -> tuple[list[bytes], int]:
    """A few steps with gradients of a seed: the parameters after each, and the bytes that were sent."""
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (SIZE, 7)]
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    optimizer = pm.torch.DistributedOptimizer(named, "sgd:lr=0.5", codec=codec, device_codec=device_codec, pack_bytes=4 * SIZE)
    seen = []
    for step in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            # Equal magnitudes, and zeros.
            parameter.grad[:3000] = parameter.grad[:3000].round()
        optimizer.step()
        optimizer.synchronize()
        seen.append(b"".join(parameter.detach().numpy().tobytes() for parameter in parameters))
    sent = optimizer.job.report()["bytes_pushed"]
    optimizer.close()
    return seen, sent


@pytest.mark.parametrize("codec", CHAINS)
def test_torch_sends_the_very_bytes_that_the_worker_would(codec: str) -> None:
    assert train(codec, device_codec=True) == train(codec, device_codec=False)


@pytest.mark.parametrize("codec", ["topk:0.01", "topk:0.8", "threshold:0.5", "dvf:delta=1e-3"])
def test_what_is_chosen_and_what_is_kept_is_what_was_put_in(codec: str) -> None:
    chain = Chain.read(codec)
    assert chain is not None
    compressor = Compressor(chain, SIZE, LAYERS, torch.device("cpu"))
    memory = torch.zeros(SIZE)
    generator = torch.Generator().manual_seed(1)
    kept = torch.zeros(SIZE)
    for step in range(3):
        gradient = torch.randn(SIZE, generator=generator)
        compressor.input.copy_(gradient)
        content, count = compressor.encode(step).place(memory)
        sent = torch.zeros(SIZE)
        if content == "places":
            sent[memory[:count].view(torch.int32).long()] = memory[count : 2 * count]
        else:
            sent.copy_(memory)
        assert compressor.residual is not None
        assert torch.equal(sent + compressor.residual, gradient + kept)
        assert not (sent.bool() & compressor.residual.bool()).any()
        kept = compressor.residual.clone()


@pytest.mark.parametrize("codec", ["f16", "ef+f16", "topk:0.1", "topk:0.8", "dvf:delta=1"])
def test_what_is_no_number_is_refused_once(codec: str) -> None:
    def train(steps: list[int]) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(100))
        optimizer = pm.torch.DistributedOptimizer([("p", parameter)], codec=codec, device_codec=True)
        for step in steps:
            parameter.grad = torch.randn(100, generator=torch.Generator().manual_seed(step))
            if step == 0:
                parameter.grad[17] = float("nan")
                with pytest.raises(pm.errors.NonFiniteError, match="NaN or Inf"):
                    optimizer.step()
                    # Halves are sent from where they lie, and servers find it.
                    assert codec == "f16"
                    optimizer.synchronize()
            else:
                optimizer.step()
        optimizer.close()
        return parameter.detach()

    assert torch.equal(train([1, 2, 0]), train([1, 2])), "nothing of it is applied"
    # The threshold of `dvf` sinks with the steps, and the one that was refused is one of them.
    if not codec.startswith("dvf"):
        assert torch.equal(train([1, 0, 2, 3]), train([1, 2, 3])), "what was kept before is kept"


@pytest.mark.parametrize(
    "codec, content, count, places, why",
    [
        ("topk:0.5", "places", 2, [5, 3], "places out of order"),
        ("topk:0.5", "places", 2, [3, 8], "places beyond the end of the table"),
        ("topk:0.5", "places", 5, [0], "5 places, which do not fit its memory"),
        ("topk:0.5", "halves", 0, [0], "16 bytes, and `topk:0.5` makes others"),
        ("none", "chosen", 0, [0], "no codec to be sent by"),
    ],
)
def test_what_was_prepared_wrongly_is_refused(codec: str, content: str, count: int, places: list[int], why: str) -> None:
    with pm.init() as job:
        slab = job.table("w", init=[0.0] * 8, codec=codec).slab()
        slab.gradient[:] = 1.0
        slab.gradient[: len(places)] = np.array(places, np.int32).view(np.float32)
        slab._native.contains(content, count, slab._native.codec())
        with pytest.raises(pm.errors.ParamillError, match=why):
            job.exchange([slab])


@pytest.mark.parametrize("codec", ["none", "qsgd:levels=4", "topk:0.1,sample=0.5", "f16+bitmap", "topk:0.1,residual=false"])
def test_what_torch_cannot_follow_is_left_to_the_worker(codec: str) -> None:
    assert Chain.read(codec) is None


def test_what_torch_is_told_to_do_but_cannot_is_an_error() -> None:
    parameter = torch.nn.Parameter(torch.zeros(100))
    with pytest.raises(pm.errors.PolicyError, match="torch cannot compress by `qsgd:levels=4`; leave device_codec out"):
        pm.torch.DistributedOptimizer([("p", parameter)], codec="qsgd:levels=4", device_codec=True)


def test_gradients_are_averaged_the_same_way() -> None:
    def run(device_codec: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(100, 100)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = pm.torch.AveragingOptimizer(inner, codec="topk:0.05", device_codec=device_codec)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 100)).square().mean().backward()
            optimizer.step()
        optimizer.close()
        return model.weight.detach()

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("device_codec", [True, False])
def test_a_switch_of_codecs_loses_nothing_and_is_seen_in_the_bytes(device_codec: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = pm.torch.DistributedOptimizer([("p", parameter)], "sgd:lr=1", codec="topk:0.01", device_codec=device_codec)
    total, sent = torch.zeros(SIZE), []
    for step in range(6):
        if step == 3:
            assert "codec=none" in optimizer.job.set(codec="none")
        parameter.grad = torch.randn(SIZE, generator=generator)
        total += parameter.grad
        optimizer.step()
        optimizer.synchronize()
        sent.append(optimizer.job.report()["bytes_pushed"])
    optimizer.close()
    torch.testing.assert_close(parameter.detach(), -total, rtol=0, atol=1e-4)
    before, after = sent[2] - sent[1], sent[5] - sent[4]
    assert before < SIZE * 4 / 20 and after >= SIZE * 4


@pytest.mark.parametrize(
    "codec",
    [
        "qsgd:levels=4",
        "int8",
        "min-size:4096+f16",
        "clip:norm=1+topk:0.01",
        "topk:0.01,sample=0.5",
        "topk:0.01,residual=false",
        "dgc:ratio=0.1,warmup=0",
        "topk:0.01+int8",
        "bitmap",
        "auto",
        "f16+bitmap",
        "none",
        "",
    ],
)
def test_the_worker_has_to_do_what_torch_does_not_know(codec: str) -> None:
    assert Chain.read(codec) is None


def test_a_stage_that_is_told_otherwise_is_read_as_the_worker_reads_it() -> None:
    one, other = Chain.read("topk:0.02+bf16+dense+zstd"), Chain.read("topk:ratio=0.02,sample=1+bf16+auto")
    assert one is not None and other is not None
    assert (one.name, one.argument, one.half, one.keeps) == (other.name, other.argument, other.half, other.keeps)
    assert (one.stands_densely, other.stands_densely) == (True, False)
    halves = Chain.read("bf16")
    assert halves is not None and not halves.keeps


@pytest.mark.parametrize("policy", ["codec", "answer_codec"])
def test_layers_that_are_too_small_for_a_codec_are_packed_apart(policy: str) -> None:
    torch.manual_seed(5)
    sizes = {"weight": 400, "bias": 10, "other.weight": 500, "other.bias": 30}
    parameters = {name: torch.nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = pm.torch.DistributedOptimizer(parameters.items(), "sgd:lr=0.5", **{policy: "min-size:100+int8"})
    assert sorted(optimizer.job.tables) == ["p0/other.bias and 1 more", "p0/other.weight and 1 more"]
    for _ in range(2):
        for name, parameter in parameters.items():
            parameter.grad = torch.randn(parameter.shape)
            expected[name] -= 0.5 * parameter.grad
        optimizer.step()
    for name, parameter in parameters.items():
        is_exact = torch.allclose(parameter, expected[name], rtol=0, atol=1e-6)
        assert is_exact == ("bias" in name), name
    optimizer.close()
