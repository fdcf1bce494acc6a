"""What no checkpoint holds, although an optimizer is attached: parameters that the optimizer
trains; tensors that modules keep in plain attributes; and state that an optimizer of a script's own
keeps where torch's `state_dict()` does not look: in an optimizer inside (SAM's base_optimizer), or
in attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pccheck.state.attaching import Values
from pccheck.state.watch import ModuleWatch, OptimizerWatch

from .hidden import Hidden, place_of

_Optimizer = torch.optim.Optimizer
_DEPTH = 4
_CONSTANTS = frozenset((int, float, bool, str, type(None)))
_WITHOUT_WEIGHTS = (bool, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_STOCK = frozenset(
    (
        "state", "param_groups", "defaults", "step", "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured", "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    )
)  # fmt: skip


class LeftOut:
    """What is attached is looked at for every checkpoint, each attribute until it has tensors."""

    def __init__(self) -> None:
        self._attached: dict[str, Any] = {}
        self._owners: dict[str, _Optimizer] = {}
        self._inner: dict[str, _Optimizer] = {}
        self._seen: set[str] = set()  # paths of attributes that were looked at
        self._found = ""  # an attribute with a state
        self._hidden = Hidden()
        self._changed: list[str] | None = None  # tensors in it; None: none yet
        self._judged = True
        self._lost: tuple[str, int, int] = ("", 0, 0)

    def attach(self, attached: Mapping[str, Any]) -> None:
        """All that is attached now."""
        self._attached, self._seen, self._found = dict(attached), set(), ""
        self._judged, self._lost = False, ("", 0, 0)
        self._owners = {
            name: thing
            for name, thing in attached.items()
            if isinstance(thing, _Optimizer) and type(thing).state_dict is _Optimizer.state_dict
        }
        self._inner = {
            path: inner
            for name, outer in self._owners.items()
            for attribute, value in vars(outer).items()
            if attribute not in _STOCK and _begins_with(value, _Optimizer)
            for path, inner in _leaves(value, f"{name}.{attribute}")
            if isinstance(inner, _Optimizer) and inner.state is not outer.state
            if not any(thing is inner for thing in attached.values())
        }
        modules = {n: thing for n, thing in attached.items() if isinstance(thing, torch.nn.Module)}
        self._changed = None
        with contextlib.suppress(Exception):  # of unusual tensors: this only warns
            self._hidden.attach(modules, self._saved())

    def tensors(self) -> list[str]:
        """The paths of tensors that attached modules keep in plain attributes, and that have
        changed. Judged once: something that is attached may save them, perhaps as copies."""
        if self._changed is None and (found := self._hidden.changed()):
            self._changed = []
            with contextlib.suppress(Exception):  # of the script's state dicts: this only warns
                known = (bool, torch.nn.Module, _Optimizer, Values)
                others = (one for one in self._attached.values() if not isinstance(one, known))
                saved = [t for one in others for t in _tensors(one.state_dict())]
                self._changed = [path for path, t in found if not any(_same(t, s) for s in saved)]
        return self._changed or []

    def weights(self) -> tuple[str, int, int]:
        """The name of an optimizer, how many of the parameters that it trains are not saved, and
        how many it trains; "" if there is none, or if that is not certain. Judged once, at the
        first checkpoint: some modules get their parameters late."""
        if not self._judged:
            self._judged = True
            with contextlib.suppress(Exception):  # of unusual tensors: this only warns
                self._lost = self._without_weights()
        return self._lost

    def _without_weights(self) -> tuple[str, int, int]:
        optimizers: dict[str, _Optimizer] = {}
        modules: list[torch.nn.Module] = []
        for name, thing in self._attached.items():
            if isinstance(thing, _Optimizer) and OptimizerWatch.suits(thing):
                optimizers[name] = thing
            elif isinstance(thing, torch.nn.Module) and ModuleWatch.suits(thing):
                modules.append(thing)
            elif not is_known(thing):
                return "", 0, 0  # it may save the parameters, perhaps as copies
        saved = [tensor for one in modules for tensor in one.state_dict(keep_vars=True).values()]
        places = {place for tensor in saved for place in _places(tensor)} | self._hidden.places
        for name, one in optimizers.items():
            trained = [p for group in one.param_groups for p in group["params"] if p.requires_grad]
            lost = [p for p in trained if places.isdisjoint(_places(p))]
            if lost and not (saved and any(_is_master(p, saved) for p in trained)):
                return name, len(lost), len(trained)
        return "", 0, 0

    def optimizer(self) -> str:
        """The path of an optimizer with a state; "" if there is none."""
        return next((path for path, inner in self._inner.items() if inner.state), "")

    def attribute(self) -> str:
        """The path of an attribute with tensors as large as a parameter, or as all of them; "" if
        there is none. About a microsecond when nothing is new."""
        for name, owner in self._owners.items() if not self._found else ():
            for attribute, value in tuple(vars(owner).items()):
                if attribute in _STOCK or (path := f"{name}.{attribute}") in self._seen:
                    continue
                if not _begins_with(value, torch.Tensor):
                    continue
                self._seen.add(path)
                with contextlib.suppress(Exception):  # of unusual tensors: this only warns
                    if self._is_state(owner, value):
                        self._found = path
        return self._found

    def _is_state(self, owner: _Optimizer, value: object) -> bool:
        parameters = [p for group in owner.param_groups for p in group["params"]]
        shapes = {tuple(p.shape) for p in parameters} | {(sum(p.numel() for p in parameters),)}
        held = {place_of(t) for t in (*parameters, *_tensors(owner.state), *self._saved())}
        held |= {place_of(p.grad) for p in parameters if p.grad is not None}
        return any(
            tuple(tensor.shape) in shapes and tensor.numel() > 1 and place_of(tensor) not in held
            for tensor in _tensors(value)
        )

    def _saved(self) -> Iterator[torch.Tensor]:
        for thing in self._attached.values():
            if isinstance(thing, torch.nn.Module):
                yield from (*thing.parameters(), *thing.buffers())
            elif isinstance(thing, _Optimizer):
                yield from _tensors(thing.state)
            elif isinstance(thing, Values):
                yield from _tensors(thing.values)


def is_known(thing: object) -> bool:
    """Whether it is certain what is saved of it: else it may save more, perhaps as copies."""
    if isinstance(thing, torch.nn.Module):
        return ModuleWatch.suits(thing)
    if isinstance(thing, _Optimizer):
        return OptimizerWatch.suits(thing)
    if isinstance(thing, Values):
        return _is_constant(thing.values)
    return isinstance(thing, _WITHOUT_WEIGHTS) or type(thing).__module__.startswith("torchdata.")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if place_of(one) == place_of(other):
        return True
    return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())


def _is_master(parameter: torch.Tensor, saved: list[torch.Tensor]) -> bool:
    """Whether it may be a copy in another precision or on another device, from which a script makes
    the saved parameters, and the other way round."""
    alike = [t for t in saved if t.shape == parameter.shape] or saved
    return all((t.dtype, t.device) != (parameter.dtype, parameter.device) for t in alike)


def _is_constant(value: object) -> bool:
    """Whether it has numbers and text only."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_constant, value.values() if isinstance(value, dict) else value))
    return type(value) in _CONSTANTS


def _places(tensor: torch.Tensor) -> set[object]:
    """Equal places mean that one tensor has the values of the other: it is the same, or a view."""
    return {id(tensor), place_of(tensor)}


def _begins_with(value: Any, kind: type) -> bool:
    """Quick for a long list of numbers, too."""
    for _ in range(_DEPTH):
        if not (isinstance(value, (list, tuple, dict)) and value):
            break
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return isinstance(value, kind)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (leaf for _, leaf in _leaves(value, "") if isinstance(leaf, torch.Tensor))


def _leaves(value: object, path: str, depth: int = _DEPTH) -> Iterator[tuple[str, object]]:
    """What lists and dicts have, with its path. A key that is no name (a parameter) is counted."""
    if not isinstance(value, (list, tuple, dict)):
        yield path, value
    elif depth:
        keys = value.keys() if isinstance(value, dict) else range(len(value))
        items = value.values() if isinstance(value, dict) else value
        for number, (key, item) in enumerate(zip(keys, items, strict=False)):
            name = key if isinstance(key, (str, int)) else number
            yield from _leaves(item, f"{path}.{name}", depth - 1)
