"""Each worker's share of a data set."""

from __future__ import annotations

from typing import Any, Iterator, Sized

import torch
from torch.utils.data import Sampler

from ..job import Job


class ShardSampler(Sampler[int]):
    """Every worker's own part of a data set, of equal length, in another order in every epoch.

    `of` is the job, or the optimizer that has it. With one worker it is all of the data set, shuffled.

    >>> import paramill as pm
    >>> job = pm.init()
    >>> w = job.table("w", init=[0.0])
    >>> sorted(pm.torch.ShardSampler(range(4), job))
    [0, 1, 2, 3]
    >>> job.close()
    """

    def __init__(self, data: Sized, of: Any, *, shuffle: bool = True, seed: int = 0) -> None:
        self._size = len(data)
        self._job: Job = getattr(of, "job", of)
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._size, generator=generator).tolist()
        else:
            order = list(range(self._size))
        self.epoch += 1
        # What does not divide is left out: a worker with a step more would wait for the others at the end.
        whole = len(self) * self._job.workers
        return iter(order[self._job.rank : whole : self._job.workers])

    def __len__(self) -> int:
        return self._size // self._job.workers
