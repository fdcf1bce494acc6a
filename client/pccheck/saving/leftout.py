"""State that an attached optimizer of a script's own keeps where torch's `state_dict()` does not
look: in an optimizer inside (SAM's base_optimizer), or in attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pccheck.state.attaching import Values

_Optimizer = torch.optim.Optimizer
_DEPTH = 4
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

    def attach(self, attached: Mapping[str, Any]) -> None:
        """All that is attached now."""
        self._attached, self._seen, self._found = dict(attached), set(), ""
        self._owners = {
            name: thing
            for name, thing in attached.items()
            if isinstance(thing, _Optimizer) and type(thing).state_dict is _Optimizer.state_dict
        }
        self._inner = {
            f"{name}.{attribute}": inner
            for name, outer in self._owners.items()
            for attribute, inner in vars(outer).items()
            if isinstance(inner, _Optimizer) and inner.state is not outer.state
            if not any(thing is inner for thing in attached.values())
        }

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
                if not _begins_with_tensor(value):
                    continue
                self._seen.add(path)
                with contextlib.suppress(Exception):  # of unusual tensors: this only warns
                    if self._is_state(owner, value):
                        self._found = path
        return self._found

    def _is_state(self, owner: _Optimizer, value: object) -> bool:
        parameters = [p for group in owner.param_groups for p in group["params"]]
        shapes = {tuple(p.shape) for p in parameters} | {(sum(p.numel() for p in parameters),)}
        held = {_storage(tensor) for tensor in self._held(owner, parameters)}
        return any(
            tuple(tensor.shape) in shapes and tensor.numel() > 1 and _storage(tensor) not in held
            for tensor in _tensors(value)
        )

    def _held(self, owner: _Optimizer, parameters: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Tensors that are saved anyway, or that each step computes again."""
        yield from parameters
        yield from (p.grad for p in parameters if p.grad is not None)
        yield from _tensors(owner.state)
        for thing in self._attached.values():
            if isinstance(thing, torch.nn.Module):
                yield from (*thing.parameters(), *thing.buffers())
            elif isinstance(thing, _Optimizer):
                yield from _tensors(thing.state)
            elif isinstance(thing, Values):
                yield from _tensors(thing.values)


def _begins_with_tensor(value: Any) -> bool:
    """Quick for a long list of numbers, too."""
    for _ in range(_DEPTH):
        if not (isinstance(value, (list, tuple, dict)) and value):
            break
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _tensors(value: object, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth - 1)


def _storage(tensor: torch.Tensor) -> object:
    """The same for all views of one."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse ones have none
        return id(tensor)
