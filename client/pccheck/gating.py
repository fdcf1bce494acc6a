"""Which memory the gate protects, and which may change before the optimizer's next step."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from operator import attrgetter
from typing import Any

import torch

from .extents import View

_REQUIRES_GRAD = attrgetter("requires_grad")


class Gating:
    """Sorts views into gated ones, which are copied in the background, and volatile ones, which are
    copied before `checkpoint()` returns, or on a GPU before what is enqueued after it.

    Mode "auto": what attached optimizers train and keep as state waits for the gate; all else is
    volatile, frozen parameters too, because what updates them (an average of the weights, a
    target network) asks no gate. Mode "manual": the user promises to call `gate()` before any
    update, so only the buffers of modules are volatile. Mode "sync": nothing needs sorting, since
    `checkpoint()` returns when everything is copied.
    """

    def __init__(self, attached: Collection[Any], mode: str) -> None:
        self.mode = mode
        modules = [thing for thing in attached if isinstance(thing, torch.nn.Module)]
        optimizers = [thing for thing in attached if isinstance(thing, torch.optim.Optimizer)]
        self._buffers = {_storage(b) for m in modules for b in m.buffers() if _plain(b)}
        self._trained = [parameter for one in optimizers for parameter in _trained_by(one)]
        updated = itertools.chain(self._trained, *map(_state_of, optimizers))
        self._gated = {_storage(tensor) for tensor in updated}
        frozen = (p for m in modules for p in m.parameters() if not p.requires_grad and _plain(p))
        self._gated -= set(map(_storage, frozen))  # a view on one that is trained

    def holds(self) -> bool:
        """False when a parameter that was trained is frozen now."""
        return all(map(_REQUIRES_GRAD, self._trained))

    def mark(self, views: list[View], *, promised: bool = True) -> None:
        """Sets `volatile` and `shared`; without `promised` the views are of something that no gate
        guards, and that each rank may have its own of."""
        for view in views:
            view.shared = promised and view.storage not in self._buffers
        if self.mode == "sync":
            return
        for view in views:
            if self.mode == "manual":
                view.volatile = not promised or view.storage in self._buffers
            else:
                view.volatile = view.storage not in self._gated or view.storage in self._buffers


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (
        RuntimeError,
        ValueError,
        NotImplementedError,
    ):  # wrappers without memory; refused later, by path
        return 0


def _trained_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
    return [p for p in parameters if p.requires_grad and _plain(p)]


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    entries = (entry for entry in optimizer.state.values() if isinstance(entry, dict))
    values = itertools.chain.from_iterable(entry.values() for entry in entries)
    return [v for v in values if isinstance(v, torch.Tensor) and _plain(v)]
