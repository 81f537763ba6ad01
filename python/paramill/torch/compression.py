"""Codecs as torch operations: gradients are compressed where they are, and only what travels leaves the device."""

from __future__ import annotations

import math
from typing import Iterator, Optional, Sequence

import torch
from torch import Tensor

# What is left of a chain when its values are chosen and rounded: the worker's own code does it.
REST = ("auto", "dense", "index", "bitmap", "hybrid", "snappy", "lz4", "zstd", "none")
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}

CHOOSERS = ("topk", "dvf", "threshold")
# The parameter that a value without a key is of.
POSITIONAL = {"topk": "ratio", "dvf": "delta", "threshold": "value", "warmup": "steps"}

# A copy out of the device: from where, and to which tensor over the host's memory.
Copy = tuple[Tensor, Tensor]


class Chain:
    """A codec that torch can follow, read from its text.

    >>> chain = Chain.read("warmup:10+topk:0.01+f16+lz4")
    >>> chain.name, chain.argument, chain.half, chain.warmup
    ('topk', 0.01, torch.float16, 10)
    >>> Chain.read("qsgd:levels=4") is None
    True
    """

    def __init__(self) -> None:
        self.name: Optional[str] = None
        self.argument = 0.0
        self.half: Optional[torch.dtype] = None
        self.keeps = False
        self.warmup = 0
        self.stands_densely = True

    @staticmethod
    def read(text: str) -> Optional[Chain]:
        """None for a codec that torch cannot follow; the worker then has it all to do."""
        chain = Chain()
        for stage in text.split("+"):
            name, _, rest = stage.partition(":")
            first = POSITIONAL.get(name, "")
            pairs = [part.rpartition("=") for part in rest.split(",")]
            values = {key.strip() or first: value.strip() for key, _, value in pairs}
            if name in CHOOSERS and (float(values.get("sample", 1)) < 1 or values.get("residual") == "false"):
                return None
            if name in CHOOSERS:
                chain.name, chain.argument, chain.keeps = name, float(values[first]), True
            elif name in HALVES:
                chain.half = HALVES[name]
            elif name == "ef":
                chain.keeps = True
            elif name == "warmup":
                chain.warmup = int(values[first])
            elif name in REST:
                chain.stands_densely &= name not in ("auto", "index", "bitmap", "hybrid")
            else:
                return None
        # Without a choice of entries there must be halves, and places of nothing.
        return chain if chain.name is not None or (chain.half is not None and chain.stands_densely) else None


class Compressor:
    """Follows a chain for one table. The worker's own code chooses the same entries and rounds to the same values.

    What is not sent stays here, in the device's memory, and is added to the next gradient. `starts` are the chunks' first
    elements: each chunk is compressed by itself.
    """

    def __init__(self, chain: Chain, size: int, starts: Sequence[int], device: torch.device) -> None:
        self._chain = chain
        self._size = size
        self._runs = list(_runs(starts, size))
        #: Where gradients are to be put.
        self.input = torch.zeros(size, device=device)
        self._residual = torch.zeros(size, device=device) if chain.keeps else None
        room = 0 if chain.name is None else size
        self._places = torch.arange(room, dtype=torch.int32, device=device)
        # One more than there are: whatever does not travel is written there.
        self._packed_places = torch.empty(room + 1, dtype=torch.int32, device=device)
        self._packed_values = torch.empty(room + 1, device=device)
        self._count = torch.empty(1, dtype=torch.int64, device=device)
        self._counted = torch.empty(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._chosen: Optional[Tensor] = None
        self.content = ""
        self.count = 0

    def applies(self, step: int) -> bool:
        """Whether it has something to do at this step; if not, the worker sends :attr:`input` as it is."""
        return step >= self._chain.warmup

    @property
    def residual(self) -> Optional[Tensor]:
        """What was not sent yet."""
        return self._residual

    def encode(self, step: int, memory: Tensor, absent: Sequence[tuple[int, int]] = ()) -> list[Copy]:
        """Compresses :attr:`input`; returns what is to be copied to `memory`, the host's. :meth:`rest` may have more.

        What was not sent yet of `absent`, ranges without a gradient, waits for their next one. The input is zero there.
        """
        held: list[Copy] = []
        if self._residual is not None:
            held = [(self._residual[start:end].clone(), self._residual[start:end]) for start, end in absent]
        for _, part in held:
            part.zero_()
        copies = self._encode(step, memory)
        for values, part in held:
            part.copy_(values)
        return copies

    def _encode(self, step: int, memory: Tensor) -> list[Copy]:
        values = self.input if self._residual is None else self.input.add_(self._residual)
        chain = self._chain
        if chain.name is None:
            assert chain.half is not None
            halves = _rounded(values, chain.half)
            self._keep(values, halves)
            self.content, self.count = "halves", 0
            return [(halves, memory.view(chain.half)[: self._size])]
        # What is no number is chosen, and the worker refuses it.
        mask = self._topk(values) if chain.name == "topk" else (values.abs() <= self._threshold(step)).logical_not_()
        chosen = torch.where(mask, values, 0)
        if chain.half is not None:
            chosen = _rounded(chosen, chain.half).float()
        self._keep(values, chosen)
        if chain.name == "topk":
            count = sum(rows * _share(chain.argument, width) for _, rows, width in self._runs)
            if 2 * count > self._size:
                return self._send_all(chosen, memory)
            self._pack(mask, chosen)
            return self._send_places(count, memory)
        self._pack(mask, chosen)
        self._chosen = chosen
        return [(self._count, self._counted)]

    def rest(self, memory: Tensor) -> list[Copy]:
        """What is to be copied once that which was to be copied before is there; nothing at the end."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return []
        count = int(self._counted.item())
        return self._send_all(chosen, memory) if 2 * count > self._size else self._send_places(count, memory)

    def _keep(self, values: Tensor, sent: Tensor) -> None:
        if self._residual is not None:
            # What is no number is refused, and nothing is sent: what was kept before is kept.
            everything_left = values.isfinite().all()
            torch.where(everything_left, values - sent, self._residual, out=self._residual)

    def _send_all(self, chosen: Tensor, memory: Tensor) -> list[Copy]:
        self.content, self.count = "chosen", 0
        return [(chosen, memory)]

    def _send_places(self, count: int, memory: Tensor) -> list[Copy]:
        self.content, self.count = "places", count
        places = memory[:count].view(torch.int32)
        return [(self._packed_places[:count], places), (self._packed_values[:count], memory[count : 2 * count])]

    def _pack(self, mask: Tensor, chosen: Tensor) -> None:
        """Puts places and values of what travels next to each other, without asking the device how many there are."""
        before = mask.cumsum(0)
        self._count.copy_(before[-1:])
        target = torch.where(mask, before - 1, self._size)
        self._packed_places.scatter_(0, target, self._places)
        self._packed_values.scatter_(0, target, chosen)

    def _threshold(self, step: int) -> float:
        delta = self._chain.argument
        # Parameter Flow's delta_t = delta / sqrt(t), where t counts from 1.
        return float(torch.tensor(delta / math.sqrt(step + 1) if self._chain.name == "dvf" else delta))

    def _topk(self, values: Tensor) -> Tensor:
        """Marks the largest entries of every chunk; of equal ones those that come first."""
        mask = torch.empty(self._size, dtype=torch.bool, device=values.device)
        for start, rows, width in self._runs:
            end = start + rows * width
            # As integers, magnitudes are ordered like the numbers they stand for, and what is no number is above all.
            magnitudes = values[start:end].view(rows, width).view(torch.int32) & 0x7FFFFFFF
            count = _share(self._chain.argument, width)
            smallest = magnitudes.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
            above, equal = magnitudes > smallest, magnitudes == smallest
            left = count - above.sum(1, keepdim=True)
            torch.logical_or(above, equal & (equal.cumsum(1) <= left), out=mask[start:end].view(rows, width))
        return mask


def _runs(starts: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Chunks of equal length that follow each other: the first one's start, how many, how long.

    >>> list(_runs([0, 8, 16, 20, 28], 36))
    [(0, 2, 8), (16, 1, 4), (20, 2, 8)]
    """
    ends = [*starts[1:], size]
    first, rows, width = 0, 0, -1
    for start, end in zip(starts, ends):
        if end - start != width:
            if rows:
                yield first, rows, width
            first, rows, width = start, 0, end - start
        rows += 1
    if rows:
        yield first, rows, width


def _share(ratio: float, count: int) -> int:
    return min(max(math.ceil(ratio * count), 1), count)


def _rounded(values: Tensor, half: torch.dtype) -> Tensor:
    """The nearest halves. What is beyond the largest becomes it; what is no number stays none."""
    largest = torch.finfo(half).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).to(half)
