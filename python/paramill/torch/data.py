"""Each worker's share of a data set."""

from __future__ import annotations

import itertools
import json
from typing import Any, Iterator, Optional, Sized
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import Sampler

from ..job import Job

#: Samplers of each job, counted in the order in which they were made: that is how a job that goes on finds their notes.
_made: WeakKeyDictionary[Job, Iterator[int]] = WeakKeyDictionary()


class ShardSampler(Sampler[int]):
    """Every worker's own part of a data set, of equal length, in another order in every epoch.

    `of` is the job, or the optimizer that has it. With one worker it is all of the data set, shuffled.

    Checkpoints have its position. In a job that goes on from one (``--resume``), `epoch` is the one that it was in, and its next
    iteration brings what was left of it, also with another number of workers: what the workers had taken together is not brought again.
    For that it has to know how many samples this worker takes in one step, which is `per_step`: the loader's batch size, or a multiple
    where gradients of several batches are accumulated. Without it, that epoch begins anew.

    >>> import paramill as pm
    >>> job = pm.init()
    >>> w = job.table("w", init=[0.0])
    >>> sorted(pm.torch.ShardSampler(range(4), job))
    [0, 1, 2, 3]
    >>> job.close()
    """

    def __init__(
        self, data: Sized, of: Any, *, shuffle: bool = True, seed: int = 0, per_step: Optional[int] = None
    ) -> None:
        if per_step is not None and per_step < 1:
            raise ValueError(f"a worker takes at least 1 sample in a step, and not {per_step}")
        self._size = len(data)
        self._job: Job = getattr(of, "job", of)
        self._shuffle = shuffle
        self._seed = seed
        self._per_step = per_step
        self._name = f"ShardSampler {next(_made.setdefault(self._job, itertools.count()))}"
        self._epoch: Optional[int] = None
        # Samples at the beginning of the next epoch's order that workers took before the job went on from a checkpoint.
        self._taken = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration brings, or what is left of it."""
        if self._epoch is None:
            self._epoch = 0
            noted = self._job.noted(self._name)
            if noted is not None:
                self._go_on(**json.loads(noted))
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch, self._taken = epoch, 0

    def _go_on(self, epoch: int, size: int, workers: int, clock: int, taken: int) -> None:
        """From an epoch that began at a clock, when so many samples of it had been taken, by so many workers."""
        self._epoch = epoch
        if self._per_step is None or size != self._size:
            return
        steps = self._job.iteration - clock
        self._taken = taken + steps * self._per_step * workers
        if self._size - self._taken < self._job.workers:
            # Nothing was left of it.
            self._epoch, self._taken = epoch + 1, 0

    def __iter__(self) -> Iterator[int]:
        epoch, workers = self.epoch, self._job.workers
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._size, generator=generator).tolist()
        else:
            order = list(range(self._size))
        # What does not divide is left out: a worker with a step more would wait for the others at the end.
        end = self._taken + len(self) * workers
        part = order[self._taken + self._job.rank : end : workers]
        note = {"epoch": epoch, "size": self._size, "workers": workers, "clock": self._job.iteration, "taken": self._taken}
        self._job.note(self._name, json.dumps(note).encode())
        self._epoch, self._taken = epoch + 1, 0
        return iter(part)

    def __len__(self) -> int:
        _ = self.epoch  # It is known from here on what is left of it.
        return (self._size - self._taken) // self._job.workers
