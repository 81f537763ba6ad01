"""Codecs as torch operations: gradients are compressed where they are, and only what travels leaves the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .. import _native

if TYPE_CHECKING:
    from .devices import Pump

# What is left of a chain when its values are chosen and rounded: the worker's own code does it.
REST = ("container", "byte compressor")
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
# The stages that torch follows beside these, and the parameters that it knows of them, of which the first is used.
STAGES = {
    "topk": ("ratio", "sample", "residual"),
    "dvf": ("delta", "need", "residual"),
    "threshold": ("value", "sample", "residual"),
    "warmup": ("steps",),
    "ef": (),
    **{name: () for name in HALVES},
}


class Encoded(NamedTuple):
    """What is to be sent: parts that follow each other in the memory that frames leave from.

    They are a `gradient`, or what a codec made of it: `halves`, all `chosen` values with zeros between them, or the `places` of
    `entries` and their values. Those that are `counted` are, on the device, their number, places, values and all elements.
    """

    content: str
    entries: int
    parts: list[Tensor]

    def place(self, memory: Tensor) -> tuple[str, int]:
        """Copies it to the host's memory, and waits for that. What stands there then."""
        content, count, parts = self
        if content == "counted":
            count = int(parts[0].item())
            is_dense = 2 * count > memory.numel()
            content = "chosen" if is_dense else "places"
            parts = [parts[3]] if is_dense else [parts[1][:count], parts[2][:count]]
            count = 0 if is_dense else count
        target = memory.view(torch.uint8)
        for part in parts:
            size = part.numel() * part.element_size()
            if part.data_ptr() != target.data_ptr():
                target[:size].view(part.dtype).copy_(part)
            target = target[size:]
        return content, count


class Chain:
    """A codec that torch can follow, read from its text.

    >>> chain = Chain.read("warmup:10+topk:0.01+f16+lz4")
    >>> chain.name, chain.argument, chain.half, chain.warmup
    ('topk', 0.01, torch.float16, 10)
    >>> Chain.read("qsgd:levels=4") is None and Chain.read("dvf:low=1e-4,up=2e-4") is None
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
        chain, text = Chain(), text or "none"
        chain.keeps = _native.codec_keeps_residual(text)
        for kind, name, parameters in _native.codec_stages(text):
            values = {key: value for key, value in parameters if value is not None}
            if kind in REST:
                chain.stands_densely &= kind != "container" or name == "dense"
                continue
            known = STAGES.get(name)
            if known is None or not set(values) <= set(known):
                return None
            if kind == "sparsifier":
                # One that looks at some entries only chooses others, and one that keeps nothing is not worth the memory.
                if float(values.get("sample", 1)) < 1 or not chain.keeps:
                    return None
                # Thresholds that follow the network are the worker's: it knows its links.
                if known[0] not in values:
                    return None
                chain.name, chain.argument = name, float(values[known[0]])
            elif name in HALVES:
                chain.half = HALVES[name]
            elif name == "warmup":
                chain.warmup = int(values[known[0]])
        # Without a choice of entries there must be halves, and places of nothing.
        return chain if chain.name is not None or (chain.half is not None and chain.stands_densely) else None


class Compressor:
    """Follows a chain for one table. The worker's own code chooses the same entries and rounds to the same values.

    What is not sent stays here, in the device's memory, and is added to the next gradient. `layers` are the first elements and
    lengths of its layers: entries are chosen in each by itself. The device's own kernels choose the largest entries where a `pump` has them.
    """

    def __init__(
        self, chain: Chain, size: int, layers: Sequence[tuple[int, int]], device: torch.device, pump: Optional[Pump] = None
    ) -> None:
        self._chain = chain
        self._size = size
        self._runs = list(_runs(layers))
        kind: Any = {"dtype": torch.float32, "device": device}
        #: Where gradients are to be put.
        self.input = torch.zeros(size, **kind)
        self._residual = torch.zeros(size, **kind) if chain.keeps else None
        # How many entries `topk` chooses; the others tell.
        self._chosen = sum(rows * _share(chain.argument, width) for _, rows, width in self._runs) if chain.name == "topk" else 0
        is_few = chain.name == "topk" and 2 * self._chosen <= size
        room = 0 if chain.name is None else size
        self._choice: Optional[Choice] = None
        if pump is not None and is_few and (chain.half is None or device.type == "cuda"):
            assert self._residual is not None
            self._choice = Choice(pump, self._runs, chain, self.input, self._residual)
            room = 0
        # What is sent stays where it is until it has left.
        self._halves = torch.empty(size if chain.name is None else 0, dtype=chain.half or torch.float16, device=device)
        self._all = torch.empty(0 if is_few else room, **kind)
        # One more than there are: whatever does not travel is written there.
        self._places = torch.arange(room, dtype=torch.int32, device=device)
        self._packed_places = torch.empty(room + 1, dtype=torch.int32, device=device)
        self._packed_values = torch.empty(room + 1, **kind)
        self._count = torch.empty(1, dtype=torch.int64, device=device)

    def applies(self, step: int) -> bool:
        """Whether it has something to do at this step; if not, the worker sends :attr:`input` as it is."""
        return step >= self._chain.warmup

    @property
    def residual(self) -> Optional[Tensor]:
        """What was not sent yet."""
        return self._residual

    def encode(self, step: int, absent: Sequence[tuple[int, int]] = ()) -> Encoded:
        """Compresses :attr:`input`. What was not sent yet of `absent`, ranges without a gradient, waits for their next one.
        The input is zero there.
        """
        held: list[tuple[Tensor, Tensor]] = []
        if self._residual is not None:
            held = [(self._residual[start:end].clone(), self._residual[start:end]) for start, end in absent]
        for _, part in held:
            part.zero_()
        encoded = self._encode(step)
        for values, part in held:
            part.copy_(values)
        return encoded

    def _encode(self, step: int) -> Encoded:
        if self._choice is not None:
            return self._choice.make()
        values = self.input if self._residual is None else self.input.add_(self._residual)
        chain = self._chain
        if chain.name is None:
            _round(values, self._halves)
            self._keep(values, self._halves)
            return Encoded("halves", 0, [self._halves])
        # What is no number is chosen, and the worker refuses it.
        mask = self._topk(values) if chain.name == "topk" else (values.abs() <= self._threshold(step)).logical_not_()
        chosen = torch.where(mask, values, 0)
        if chain.half is not None:
            chosen = _round(chosen, torch.empty_like(chosen, dtype=chain.half)).float()
        self._keep(values, chosen)
        if chain.name == "topk":
            count = self._chosen
            if 2 * count > self._size:
                return Encoded("chosen", 0, [self._all.copy_(chosen)])
            self._pack(mask, chosen)
            return Encoded("places", count, [self._packed_places[:count], self._packed_values[:count]])
        self._pack(mask, chosen)
        self._all.copy_(chosen)
        return Encoded("counted", 0, [self._count, self._packed_places, self._packed_values, self._all])

    def _keep(self, values: Tensor, sent: Tensor) -> None:
        if self._residual is not None:
            # What is no number is refused, and nothing is sent: what was kept before is kept.
            everything_left = values.isfinite().all()
            torch.where(everything_left, values - sent, self._residual, out=self._residual)

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
        """Marks the largest entries of every layer; of equal ones those that come first."""
        mask = torch.zeros(self._size, dtype=torch.bool, device=values.device)
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


class Choice:
    """The largest entries of every layer, chosen and packed by kernels of the device's pump."""

    def __init__(
        self, pump: Pump, runs: Sequence[tuple[int, int, int]], chain: Chain, values: Tensor, residual: Tensor
    ) -> None:
        self._pump, self._values, self._residual = pump, values, residual
        self._half = 0 if chain.half is None else list(HALVES.values()).index(chain.half) + 1
        tile_size, _ = _native.Pump.choice_needs(0, 0)
        tiles: list[tuple[int, int, int, int]] = []
        layers: list[tuple[int, int, int, int]] = []
        base = 0
        for first, rows, width in runs:
            for start in range(first, first + rows * width, width):
                own = [(at, min(tile_size, start + width - at)) for at in range(start, start + width, tile_size)]
                entries = _share(chain.argument, width)
                layers.append((len(tiles), len(own), base, entries))
                tiles += [(len(layers) - 1, at, count, 0) for at, count in own]
                base += entries
        device = values.device
        _, words = _native.Pump.choice_needs(len(tiles), len(layers))
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._layers = torch.tensor(layers, dtype=torch.int32, device=device)
        self._work = torch.zeros(words, dtype=torch.int32, device=device)
        places = torch.empty(base, dtype=torch.int32, device=device)
        self._encoded = Encoded("places", base, [places, torch.empty(base, dtype=torch.float32, device=device)])
        places, packed = self._encoded.parts
        self._arguments = (
            values.data_ptr(),
            residual.data_ptr(),
            (self._tiles.data_ptr(), len(tiles)),
            (self._layers.data_ptr(), len(layers)),
            self._work.data_ptr(),
            places.data_ptr(),
            packed.data_ptr(),
            self._half,
        )

    def make(self) -> Encoded:
        """Chooses among the values and what was kept, and keeps what is not chosen."""
        self._pump.choose(*self._arguments)
        return self._encoded


def _runs(layers: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Layers of equal length that follow each other: the first one's start, how many, how long.

    >>> list(_runs([(0, 8), (8, 8), (16, 4), (32, 4)]))
    [(0, 2, 8), (16, 1, 4), (32, 1, 4)]
    """
    first, rows, width = 0, 0, -1
    for start, length in layers:
        if length != width or start != first + rows * width:
            if rows:
                yield first, rows, width
            first, rows, width = start, 0, length
        rows += 1
    if rows:
        yield first, rows, width


def _share(ratio: float, count: int) -> int:
    return min(max(math.ceil(ratio * count), 1), count)


def _round(values: Tensor, halves: Tensor) -> Tensor:
    """Writes the nearest halves. What is beyond the largest becomes it; what is no number becomes none."""
    largest = torch.finfo(halves.dtype).max
    # Zero times a value is no number where the value is none.
    return torch.add(values.clamp(-largest, largest), values, alpha=0, out=halves)
