"""Which memory may be read after `checkpoint()` has returned, and which is copied at once."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch

from pccheck_native import integers

from .extents import View
from .shards import local

_REQUIRES_GRAD = inspect.getattr_static(torch.Tensor, "requires_grad")


class Gating:
    """Sorts views into those that are read in place, in the background, and volatile ones, which
    are copied before `checkpoint()` returns, or on a GPU before what is enqueued after it.

    Mode "auto": what attached optimizers train and keep as state waits for their steps, and frozen
    parameters of attached modules hardly ever change: both are read in place. A change that comes
    without a gate fails that checkpoint (verdict.py); from then on the frozen parameters of that
    attached thing are volatile (`loose`). Mode "manual": the user promises to call `gate()` before
    any update, so all is read in place. In both modes buffers of modules are volatile: forward
    changes them, with kernels whose changes torch does not count (batch_norm's).
    Mode "sync": nothing needs sorting, since `checkpoint()` returns when everything was read.
    In every mode arrays that cannot change are read in place.
    """

    def __init__(
        self, attached: Mapping[str, Any], mode: str, loose: Collection[str] = frozenset()
    ) -> None:
        self.mode = mode
        things = attached.values()
        modules = {name: m for name, m in attached.items() if isinstance(m, torch.nn.Module)}
        optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
        holders = itertools.chain.from_iterable(map(modules_of, things))
        self._buffers = {storage_of(b) for m in holders for b in m.buffers() if _plain(b)}
        trained = [parameter for one in optimizers for parameter in trained_by(one)]
        updated = itertools.chain(trained, *map(_state_of, optimizers))
        self._gated = {storage_of(tensor) for tensor in updated}
        frozen = [
            (name, parameter)
            for name, module in modules.items()
            for parameter in module.parameters()
            if not parameter.requires_grad and _plain(parameter)
        ]  # fmt: skip
        # Whatever is `loose`: it differs between ranks, which must divide what is frozen alike.
        self._still = {storage_of(parameter) for _, parameter in frozen}
        self._frozen_in = {storage_of(one): name for name, one in frozen if name not in loose}
        of_modules = itertools.chain.from_iterable(m.parameters() for m in modules.values())
        self._parameters = list({id(p): p for p in (*trained, *of_modules)}.values())
        self._require_grad = integers(_REQUIRES_GRAD, self._parameters)

    def holds(self) -> bool:
        """False when a parameter was frozen or unfrozen since."""
        return integers(_REQUIRES_GRAD, self._parameters) == self._require_grad

    def mark(self, views: list[View], *, promised: bool = True) -> None:
        """Sets how views are read; without `promised` they may differ between ranks."""
        for view in views:
            changes = view.storage in self._buffers or view.storage in self._gated
            view.frozen = view.constant or (view.storage in self._still and not changes)
            view.shared = promised and not view.sharded and view.storage not in self._buffers
            if self.mode != "sync":
                view.volatile = not self._in_place(view)

    def _in_place(self, view: View) -> bool:
        if view.constant:
            return True
        # torch does not count changes of inference tensors.
        uncounted = view.tensor is not None and view.tensor.is_inference()
        if view.storage in self._buffers or uncounted:
            return False
        if self.mode == "manual" or view.storage in self._gated:
            return True
        view.loose = self._frozen_in.get(view.storage, "")
        return bool(view.loose)


def modules_of(thing: object) -> list[torch.nn.Module]:
    """What is attached if it is a module, or the modules that it wraps."""
    if isinstance(thing, torch.nn.Module):
        return [thing]
    inside = getattr(thing, "__dict__", {}).values()
    return [value for value in inside if isinstance(value, torch.nn.Module)]


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")


def storage_of(tensor: torch.Tensor) -> int:
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, ValueError):  # wrappers without memory; refused later, by path
        return 0


def trained_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
    return [p for p in parameters if p.requires_grad and _plain(p)]


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    entries = (entry for entry in optimizer.state.values() if isinstance(entry, dict))
    values = itertools.chain.from_iterable(entry.values() for entry in entries)
    return [v for v in values if isinstance(v, torch.Tensor) and _plain(v)]
