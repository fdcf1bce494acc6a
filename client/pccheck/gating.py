"""Which memory the gate protects, and which may change before the optimizer's next step."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from operator import attrgetter
from typing import Any

import torch

from .flatten import View

_REQUIRES_GRAD = attrgetter("requires_grad")


class Gating:
    """Sorts views into gated ones, which are copied in the background, and volatile ones, which are
    copied before `checkpoint()` returns.

    Mode "auto": the optimizers' parameters and state wait for the gate, and so do frozen
    parameters of attached modules, which nothing updates; all else is volatile. Mode "manual":
    the user promises to call `gate()` before any update, so only the buffers of modules are
    volatile. Mode "sync": nothing needs sorting, since `checkpoint()` returns when everything
    is copied.
    """

    def __init__(self, attached: Collection[Any], mode: str) -> None:
        self.mode = mode
        modules = [thing for thing in attached if isinstance(thing, torch.nn.Module)]
        optimizers = [thing for thing in attached if isinstance(thing, torch.optim.Optimizer)]
        self._frozen = [
            parameter
            for module in modules
            for parameter in module.parameters()
            if not _REQUIRES_GRAD(parameter) and _plain(parameter)
        ]
        self._buffers = {_storage(b) for m in modules for b in m.buffers() if _plain(b)}
        updated = itertools.chain.from_iterable(map(_tensors_of, optimizers))
        self._gated = {_storage(tensor) for tensor in itertools.chain(updated, self._frozen)}

    def holds(self) -> bool:
        """False when a frozen parameter is trained now."""
        return not any(map(_REQUIRES_GRAD, self._frozen))

    def mark(self, views: list[View], *, promised: bool = True) -> None:
        """Sets `volatile`; without `promised` the views are of something that no gate guards."""
        if self.mode == "sync":
            return
        for view in views:
            if self.mode == "manual":
                view.volatile = not promised or view.storage in self._buffers
            else:
                view.volatile = view.storage not in self._gated or view.storage in self._buffers


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (
        RuntimeError,
        ValueError,
        NotImplementedError,
    ):  # wrappers without memory; refused later, by path
        return 0


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [p for group in optimizer.param_groups for p in group["params"] if _plain(p)]
    for entry in optimizer.state.values():
        values = entry.values() if isinstance(entry, dict) else ()
        found += [v for v in values if isinstance(v, torch.Tensor) and _plain(v)]
    return found
