"""Which modules need which parameters: learnt from the first forward pass, so that each waits for its own alone."""

from __future__ import annotations

from typing import Any, Callable, Container, Iterable, Iterator, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# So many buckets are waited for together: every hook on a module costs more than it could gain.
FEW = 2

# What a parameter has to be waited with: called with the rows that are about to be used, if it is known which.
Wait = Callable[[Optional[Tensor]], None]


class ForwardWaits:
    """Has the next forward pass of a module wait for the module's parameters.

    Until :meth:`learn` it watches which modules run a forward of their own, and which of them outside of all others. A parameter
    whose module never runs (the output projection of ``nn.MultiheadAttention``) is waited for by these outermost modules, and so
    are buffers; one that no module has is left over. If there are `FEW` waits, the outermost modules have them, except for those
    of `sparse` parameters: only their own module knows which rows it is about to use.

    `save` is called before any of the tensors `saved` of a module is saved, with the prefix that ``state_dict`` gives them.
    """

    def __init__(
        self,
        waits: dict[Tensor, Wait],
        sparse: Container[Tensor],
        save: Callable[[str], None],
        saved: Container[Tensor],
    ) -> None:
        self._waits = waits
        self._sparse = sparse
        self._save = save
        self._saved = saved
        self._seen: dict[nn.Module, None] = {}
        self._outermost: dict[nn.Module, None] = {}
        self._depth = 0
        self._hooks: list[Any] = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        # Inside of a compiled function nothing can wait; what is in it counts as never run.
        if not torch.compiler.is_compiling():
            self._seen[module] = None
            if self._depth == 0:
                self._outermost[module] = None
            self._depth += 1

    def _leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            # The first that is left may have been entered before there was a watch.
            self._depth = max(self._depth - 1, 0)

    def learn(self) -> list[Wait]:
        """Ends the watch and sets the waits up. Returns those that no module covers."""
        self.close()
        inner = {child for module in self._seen for child in module.modules() if child is not module}
        self._outermost.update((module, None) for module in self._seen if module not in inner)
        covered: set[Tensor] = set()
        is_worth_it = len(_distinct(wait for p, wait in self._waits.items() if p not in self._sparse)) > FEW
        for module in self._seen:
            own = [p for p in module._parameters.values() if p is not None and p in self._waits]
            own = [p for p in own if is_worth_it or p in self._sparse]
            covered.update(own)
            self._hook(module, [self._waits[p] for p in own])
        below = {p for module in self._outermost for p in _tensors(module)}
        uncovered = [p for p in self._waits if p not in covered]
        for module in self._outermost:
            waits = _distinct(self._waits[p] for p in uncovered if p in below)
            self._hook(module, waits)
            # The module that a compiled one was made of may be called by itself.
            if isinstance(inner_one := getattr(module, "_orig_mod", None), nn.Module):
                self._hook(inner_one, waits, is_compiled=True)
        # Any part may be saved by itself: what is saved is what the servers answered last.
        for module in dict.fromkeys(child for module in self._outermost for child in module.modules()):
            if any(p in self._saved for p in _tensors(module)):
                self._hooks.append(module.register_state_dict_pre_hook(lambda _, prefix, __: self._save(prefix)))
        return _distinct(self._waits[p] for p in uncovered if p not in below)

    def close(self) -> None:
        """Takes all hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, module: nn.Module, waits: Iterable[Wait], is_compiled: bool = False) -> None:
        waits = _distinct(waits)
        if not waits:
            return

        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            # The compiled module has waited before.
            if is_compiled and torch.compiler.is_compiling():
                return
            rows = _rows(module, arguments)
            for wait in waits:
                wait(rows)

        # Before hooks that compute with the parameters, as those of weight_norm and pruning do.
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, those of parts included."""
    yield from module.parameters()
    yield from module.buffers()


def _rows(module: nn.Module, arguments: tuple[Any, ...]) -> Optional[Tensor]:
    """What an embedding is asked for. Nothing is known of the arguments of other modules."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and arguments and isinstance(arguments[0], Tensor):
        return arguments[0]
    return None


def _distinct(waits: Iterable[Wait]) -> list[Wait]:
    return list(dict.fromkeys(waits))
