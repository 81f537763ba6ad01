"""What servers keep of past gradients, read from a copy of a checkpoint, in the layout that torch's optimizers have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

# What torch calls the arrays of a rule, and whether it counts steps.
_ADAM = ("exp_avg", "exp_avg_sq"), True
_VELOCITY = ("momentum_buffer",), False
_NAMES: dict[str, tuple[tuple[str, ...], bool]] = {
    "momentum": _VELOCITY,
    "nesterov": _VELOCITY,
    "adagrad": (("sum",), True),
    "rmsprop": (("square_avg",), True),
    "adam": _ADAM,
    "adamw": _ADAM,
}


class TableState(NamedTuple):
    """A table's arrays of state, flat, and the steps that were made with each element."""

    slots: list[NDArray[np.float32]]
    steps: NDArray[np.int64]

    def of(self, rule: str, start: int, shape: torch.Size) -> dict[str, Any]:
        """The state of the tensor that begins at an element. Rules that torch does not have keep the servers' names."""
        stop = start + shape.numel()
        names, counts = _NAMES.get(rule, (tuple(f"slot{number}" for number in range(len(self.slots))), True))
        state: dict[str, Any] = {}
        if counts:
            state["step"] = torch.tensor(float(self.steps[start:stop].max(initial=0)))
        for name, values in zip(names, self.slots):
            state[name] = torch.from_numpy(values[start:stop].copy()).reshape(shape)
        return state


def read(path: Path) -> dict[str, TableState]:
    """The state of all tables in a copy of a checkpoint, which was compared with its digests when it was made."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    contents = json.loads(header["__metadata__"]["paramill"])
    data = np.fromfile(path, np.float32, offset=8 + length)
    tables: dict[str, TableState] = {}
    for part, arrays in _parts(contents["tables"], data):
        size = int(np.prod(part["shape"], dtype=np.int64))
        if part["name"] not in tables:
            slots = [np.zeros(size, np.float32) for _ in range(part["slots"])]
            tables[part["name"]] = TableState(slots, np.zeros(size, np.int64))
        table, begin = tables[part["name"]], 0
        for span in part["ranges"]:
            start, count = span["start"], span["len"]
            table.steps[start : start + count] = span["steps"]
            # Parameters come first.
            for slot, values in zip(table.slots, arrays[1:]):
                slot[start : start + count] = values[begin : begin + count]
            begin += count
        for run in part["skipped"]:
            table.steps[run["start"] : run["start"] + run["len"]] -= run["skipped"]
    return tables


def _parts(tables: Any, data: NDArray[np.float32]) -> Iterator[tuple[Any, NDArray[np.float32]]]:
    """What each shard had of each table: parameters and slots, one row each."""
    begin = 0
    for part in tables:
        rows, columns = part["slots"] + 1, sum(span["len"] for span in part["ranges"])
        yield part, data[begin : begin + rows * columns].reshape(rows, columns)
        begin += rows * columns
