"""What trains beside what is attached: a torch optimizer that trains attached parameters, and a
learning rate scheduler of an attached optimizer. Nothing is hooked for that: steps cost nothing."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pccheck.state.attaching import Values

from .leftout import is_known

_Optimizer = torch.optim.Optimizer
_Scheduler = torch.optim.lr_scheduler.LRScheduler
_LOOKS = 2  # checkpoints: before the first one restore() may have changed the parameters
_ATTACHED: weakref.WeakSet[_Optimizer] = weakref.WeakSet()  # by any client of this process


class Beside:
    """Finds nothing where something is attached that may save it: an object of a framework, or any
    other with a state_dict() of its own."""

    def __init__(self) -> None:
        self._attached: dict[str, Any] = {}
        self._optimizers: dict[str, _Optimizer] = {}
        self._untrained: dict[torch.Tensor, tuple[str, int]] = {}
        self._looks = 0

    def attach(self, attached: Mapping[str, Any]) -> None:
        """All that is attached now."""
        self._attached, self._looks = dict(attached), _LOOKS
        self._optimizers = {n: one for n, one in attached.items() if isinstance(one, _Optimizer)}
        _ATTACHED.update(self._optimizers.values())
        self._untrained = {}
        with contextlib.suppress(Exception):  # of unusual modules: this only warns
            self._untrained = dict(self._without_optimizer())

    def optimizer(self) -> tuple[str, str]:
        """The class of an optimizer with a state that is not attached, and the attached module that
        this optimizer has trained since attach(); "" if there is none. All objects of the process
        are looked at, but only where no attached optimizer trains the module."""
        with contextlib.suppress(Exception):  # of unusual objects: this only warns
            owner = {id(p): name for p, (name, old) in self._untrained.items() if p._version != old}
            if owner:
                self._looks -= 1
                for one in _optimizers():
                    mine = [owner[id(p)] for p in _trained(one) if id(p) in owner]
                    if mine and any(one.state.values()) and one not in _ATTACHED:
                        self._untrained.clear()
                        return type(one).__name__, mine[0]
        if self._looks <= 0:
            self._untrained.clear()
        return "", ""

    def _without_optimizer(self) -> Iterator[tuple[torch.Tensor, tuple[str, int]]]:
        """Parameters that nothing attached trains; each one's module, and how often it changed."""
        if not all(map(is_known, self._attached.values())):
            return
        trained = {id(p) for one in self._optimizers.values() for p in _trained(one)}
        for name, thing in self._attached.items():
            for p in thing.parameters() if isinstance(thing, torch.nn.Module) else ():
                if p.requires_grad and id(p) not in trained:
                    yield p, (name, p._version)

    def scheduler(self) -> str:
        """The name of an attached optimizer whose scheduler of torch is not attached; else ""."""
        for name, one in self._optimizers.items():
            if hasattr(one.step, "_wrapped_by_lr_sched") and not self._may_save_scheduler(one):
                return name
        return ""

    def _may_save_scheduler(self, optimizer: _Optimizer) -> bool:
        others = [one for one in self._optimizers.values() if one is not optimizer]
        for thing in self._attached.values():
            if isinstance(thing, Values) and _has_key(thing.values, "last_epoch"):
                return True
            # One of a wrapper may be of this optimizer.
            if isinstance(thing, _Scheduler) and not any(thing.optimizer is o for o in others):
                return True
        return not all(map(is_known, self._attached.values()))  # last: it looks at every module


def _optimizers() -> list[_Optimizer]:
    """All of this process. isinstance() would take long, and ask proxies, which may act then."""
    classes = {_Optimizer}
    while more := {sub for cls in classes for sub in cls.__subclasses__()} - classes:
        classes |= more
    return [one for one in gc.get_objects() if type(one) in classes]


def _trained(optimizer: _Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _has_key(value: object, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_has_key(one, key) for one in value.values())
    return isinstance(value, (list, tuple)) and any(_has_key(one, key) for one in value)
