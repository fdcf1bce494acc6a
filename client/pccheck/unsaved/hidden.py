"""Tensors that attached modules keep where `state_dict()` does not look: in plain attributes, in
lists and dicts there, and in modules in these.

Many of them are constants, frozen models or caches, and no checkpoint needs them. So a tensor
counts only if it was there at attach() and has other values later: what a forward pass leaves
behind was not there, or has a gradient function, and a cache is made again with the same values.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from pccheck.state.gating import storage_of
from pccheck.state.watch import saves_plainly

_Module = torch.nn.Module
_DEPTH = 4
_STOCK = frozenset(vars(_Module()))
#: Only smaller ones are held here, to be compared when another tensor has their place.
_HELD_MAX = 1 << 20


class _Kept(NamedTuple):
    path: str
    owner: dict[str, Any]  # the attributes of a module
    keys: tuple[Any, ...]  # from there
    tensor: Callable[[], torch.Tensor | None]  # as it was
    version: int

    def holding(self, tensor: torch.Tensor) -> _Kept:
        held = tensor if tensor.nbytes <= _HELD_MAX else None
        get = weakref.ref(tensor) if held is None else lambda: held
        return self._replace(tensor=get, version=tensor._version)


class Hidden:
    """Looked at for every checkpoint, until one of them has changed."""

    def __init__(self) -> None:
        self.places: set[object] = set()  #: their memory
        self._kept: list[_Kept] = []
        self._changed: list[tuple[str, torch.Tensor]] = []

    def attach(self, modules: Mapping[str, _Module], known: Iterable[torch.Tensor]) -> None:
        """All modules that are attached now. `known`: tensors that are saved, or that are left out
        as the script wants it (buffers that are not persistent)."""
        held, search = {place_of(tensor) for tensor in known}, _Search()
        self.places, self._kept, self._changed = set(), [], []
        for name, module in modules.items():
            search.below(module, name)
        for one, tensor in search.found:
            place = place_of(tensor)
            if place not in held and tensor.grad_fn is None and not tensor.is_inference():
                self.places.add(place)
                self._kept.append(one.holding(tensor))

    def changed(self) -> list[tuple[str, torch.Tensor]]:
        """Those that have changed, with their paths. A microsecond for each that is looked at."""
        if self._changed or not self._kept:
            return self._changed
        kept, self._kept = self._kept, []
        for one in kept:
            with contextlib.suppress(Exception):  # what has it is gone, or unusual
                self._look(one)
        return self._changed

    def _look(self, one: _Kept) -> None:
        now: object = functools.reduce(operator.getitem, one.keys, one.owner)
        then = one.tensor()
        if not isinstance(now, torch.Tensor) or then is None:
            return
        if now is then and now._version == one.version:
            self._kept.append(one)
        elif now is then:
            self._changed.append((one.path, now))
        elif (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
            self._kept.append(one.holding(now))  # moved, or made for another size
        elif now.grad_fn is None and not (now.nbytes > _HELD_MAX or torch.equal(now, then)):
            self._changed.append((one.path, now))


class _Search:
    """In modules, each of them once."""

    def __init__(self) -> None:
        self.found: list[tuple[_Kept, torch.Tensor]] = []
        self._seen: set[int] = set()

    def below(self, module: _Module, path: str, *, registered: bool = True) -> None:
        """Nothing of a module that saves in a way of its own, or of those below it. All of a module
        that is not `registered` in another one."""
        if id(module) in self._seen or not saves_plainly(module):
            return
        self._seen.add(id(module))
        owner = vars(module)
        for key, value in owner.items():
            if key not in _STOCK:
                self._inside(value, f"{path}.{key}", owner, (key,))
        if not registered:
            for kind in ("_parameters", "_buffers"):
                for key, value in owner[kind].items():
                    if key not in module._non_persistent_buffers_set:
                        self._inside(value, f"{path}.{key}", owner, (kind, key))
        for key, child in module._modules.items():
            if child is not None:
                self.below(child, f"{path}.{key}", registered=registered)

    def _inside(
        self, value: object, path: str, owner: dict[str, Any], keys: tuple[Any, ...]
    ) -> None:
        if isinstance(value, torch.Tensor):
            self.found.append((_Kept(path, owner, keys, lambda: None, 0), value))
        elif isinstance(value, _Module):
            self.below(value, path, registered=False)
        elif isinstance(value, (list, tuple, dict)) and len(keys) < _DEPTH and _may_have(value):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._inside(item, f"{path}.{key}", owner, (*keys, key))


def _may_have(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> bool:
    """Quick for a long list of numbers, too."""
    items: Iterator[Any] = iter(value.values() if isinstance(value, dict) else value)
    kinds = (torch.Tensor, _Module, list, tuple, dict)
    return any(isinstance(item, kinds) for item in itertools.islice(items, 8))


def place_of(tensor: torch.Tensor) -> object:
    """The same for all views of one memory."""
    return storage_of(tensor) or id(tensor)  # sparse tensors have none
