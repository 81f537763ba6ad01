"""What the native module says of components, so that no list of them stands in Python."""

from __future__ import annotations

import pytest

import paramill as pm
from paramill import _native


def test_models_that_average() -> None:
    assert _native.models_of_rounds() == ["bsp", "drop", "psp"]
    assert _native.steps_in_rounds("drop:n=3") and not _native.steps_in_rounds("ssp:s=3")
    assert not _native.steps_in_rounds("quorum:q=0.75"), "slow workers leave rounds out"
    with pytest.raises(pm.errors.PolicyError, match="unknown consistency model `sps`"):
        _native.steps_in_rounds("sps")


def test_stages_of_a_codec() -> None:
    stages = _native.codec_stages("warmup:10+topk:0.01+f16+lz4")
    assert [name for _, name, _ in stages] == ["warmup", "topk", "f16", "lz4"]
    assert dict(stages[0][2])["steps"] == "10"
    assert dict(stages[1][2])["ratio"] == "0.01"
    assert dict(stages[1][2])["residual"] == "true", "also what the text leaves out"
    assert len({kind for kind, _, _ in stages}) == 4
    with pytest.raises(pm.errors.PolicyError, match="topk"):
        _native.codec_stages("f16+topk:0.01")


@pytest.mark.parametrize(
    ("codec", "keeps"), [("topk:0.01", True), ("topk:0.01,residual=false", False), ("f16", False), ("ef+f16", True)]
)
def test_whether_a_codec_keeps_what_it_does_not_send(codec: str, keeps: bool) -> None:
    assert _native.codec_keeps_residual(codec) is keeps
