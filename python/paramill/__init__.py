"""Paramill: many workers train one model through parameter servers.

A worker joins a job, creates tables, pushes gradients and pulls parameters. Without a server this process trains alone:

>>> import numpy as np
>>> import paramill as pm
>>> job = pm.init()
>>> w = job.table("w", init=np.zeros(3, np.float32), optimizer="sgd:lr=0.5")
>>> for step in range(20):
...     w.update(w.values - np.array([1, 2, 3], np.float32))  # the gradient of |w - (1, 2, 3)|^2 / 2
...     job.clock()
...     w.sync()
>>> w.values.round(3).tolist()
[1.0, 2.0, 3.0]
>>> job.close()

:mod:`paramill.torch` has the same for PyTorch, as an optimizer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from ._native import Pull
from .errors import ParamillError
from .job import Handle, Job, Slab, Table, init
from .server import Server
from .weights import Publisher, Subscriber

if TYPE_CHECKING:
    from . import torch as torch

__version__ = "0.1.0"

# Not `torch`, which `from paramill import *` would need then.
__all__ = [
    "Handle",
    "Job",
    "ParamillError",
    "Publisher",
    "Pull",
    "Server",
    "Slab",
    "Subscriber",
    "Table",
    "errors",
    "init",
]


def __getattr__(name: str) -> Any:
    # torch is the user's own, and slow to import: only those who ask for it wait for it.
    if name == "torch":
        return importlib.import_module(".torch", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
