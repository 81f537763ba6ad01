"""Paramill for PyTorch: an optimizer whose update is made by servers, whose gradients are averaged by them, or which synchronises now and then.

>>> import torch, paramill as pm
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), "sgd:lr=0.1")
>>> x, y = torch.ones(8, 2), torch.ones(8, 1)
>>> for _ in range(100):
...     loss = torch.nn.functional.mse_loss(model(x), y)
...     optimizer.zero_grad()
...     loss.backward()
...     optimizer.step()
>>> loss.item() < 1e-3
True
>>> optimizer.job.close()
"""

from .averaging import AveragingOptimizer
from .data import ShardSampler
from .local import LocalSteps
from .optimizer import DistributedOptimizer
from .rules import rule_of

__all__ = ["AveragingOptimizer", "DistributedOptimizer", "LocalSteps", "ShardSampler", "rule_of"]
