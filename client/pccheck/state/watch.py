"""Cheap checks that attached state is still what its plan was made of.

They run at every checkpoint on the training thread, right after an update that filled the caches
with other data: hence the loops in C, and comparison by identity, which reads little memory. Equal
objects in the place of others count as a change, which only costs a new plan.
"""

from __future__ import annotations

import contextlib
import operator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pccheck_native import same_geometry, same_items, same_values, tensor_geometry
from pccheck_wire import tree

from .flatten import Flattener
from .shards import LOCAL, is_sharded, local

_Module = torch.nn.Module
_Optimizer = torch.optim.Optimizer
_DTYPE = operator.attrgetter("dtype")
_IMAGINARY = (torch.complex32, torch.complex64, torch.complex128)
_DICT_KEYS = ("_parameters", "_buffers", "_modules")
_CHILDREN = operator.itemgetter(*_DICT_KEYS)
_HOOKS = operator.itemgetter("_state_dict_hooks", "_state_dict_pre_hooks")
_SKIPPED = operator.itemgetter("_non_persistent_buffers_set")
_PART_KEYS = (*_DICT_KEYS, "_non_persistent_buffers_set")
_PARTS = operator.itemgetter(*_PART_KEYS)
_PARAMS = operator.itemgetter("params")
#: torch's C functions for DLPack read all tensors in one call; None before torch 2.10.
_EXCHANGE: object = getattr(Tensor, "__dlpack_c_exchange_api__", None)


def _items(dicts: list[dict[Any, Any]]) -> tuple[object, ...]:
    """What `same_items` compares dicts with."""
    return tuple(chain.from_iterable([*chain.from_iterable(dict.items(d)), d] for d in dicts))


class GeometryWatch:
    """Where tensors lie, their sizes, strides and dtypes."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._sharded = list(filter(is_sharded, tensors))
        self._locals = list(map(local, self._sharded))
        self._tensors = tensors = list(map(local, tensors))
        self._lazy = [t for t in tensors if t.dtype in _IMAGINARY]  # may become conjugated views
        self._packed: bytes | None = None
        if _EXCHANGE is not None:
            # DLPack raises for dtypes that it does not know; the slow way works for all.
            with contextlib.suppress(Exception):
                self._packed = tensor_geometry(_EXCHANGE, tensors)
        self._slow = _geometry(tensors) if self._packed is None else []

    def holds(self) -> bool:
        if self._packed is not None:
            same = same_geometry(_EXCHANGE, self._tensors, self._packed)
        else:
            same = _geometry(self._tensors) == self._slow
        return (
            same
            and all(map(operator.is_, map(LOCAL, self._sharded), self._locals))
            and not any(map(Tensor.is_conj, self._lazy))
        )


def _geometry(tensors: list[Tensor]) -> list[list[Any]]:
    return [list(map(f, tensors)) for f in (Tensor.data_ptr, Tensor.size, Tensor.stride, _DTYPE)]


class ModuleWatch:
    """The parameters and buffers of a module and of all modules below it."""

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._modules = modules
        self._types = list(map(type, modules))
        self._vars = list(map(vars, modules))
        self._parts = tuple(chain.from_iterable(map(_PARTS, self._vars)))
        watched = chain(map(_CHILDREN, self._vars), map(_HOOKS, self._vars))
        self._dicts: list[dict[Any, Any]] = list(chain.from_iterable(watched))
        self._items = _items(self._dicts)
        self._skipped = list(map(_SKIPPED, self._vars))
        self._skipped_then = list(map(set, self._skipped))
        self.tensors = list(module.state_dict(keep_vars=True).values())

    @staticmethod
    def suits(module: torch.nn.Module) -> bool:
        """Whether no class or hook customises the state dict."""
        return all(map(saves_plainly, module.modules()))

    @staticmethod
    def loads_plainly(module: torch.nn.Module) -> bool:
        """Whether its state dict can be put in place without load_state_dict()."""
        return ModuleWatch.suits(module) and all(map(takes_by_name, module.modules()))

    def holds(self) -> bool:
        return (
            same_values(self._vars, _PART_KEYS, self._parts)
            and same_items(self._dicts, self._items)
            and list(map(type, self._modules)) == self._types
            and self._skipped == self._skipped_then
        )


def gives_by_name(module: torch.nn.Module) -> bool:
    """Whether the state dict has what `_save_to_state_dict()` of this module and of those below it
    returns, and nothing else changes that."""
    return (
        type(module).state_dict is _Module.state_dict
        and all(isinstance(vars(module).get(key), dict) for key in _DICT_KEYS)  # torch.jit's differ
        and "state_dict" not in vars(module)
        and "_save_to_state_dict" not in vars(module)
        and _by_fsdp(*_HOOKS(vars(module)))
    )


def saves_plainly(module: torch.nn.Module) -> bool:
    """Whether what the module itself saves is its parameters and persistent buffers."""
    cls = type(module)
    return (
        cls._save_to_state_dict is _Module._save_to_state_dict
        and cls.get_extra_state is _Module.get_extra_state
        and gives_by_name(module)
    )


def takes_by_name(module: torch.nn.Module) -> bool:
    """Whether torch puts tensors into its own parameters and buffers by their names; torch's own
    modules customise that only for checkpoints of older versions."""
    cls = type(module)
    stock = cls._load_from_state_dict is _Module._load_from_state_dict
    return (
        cls.load_state_dict is _Module.load_state_dict
        and (stock or cls.__module__.startswith("torch.nn."))
        and "load_state_dict" not in vars(module)
        and "_load_from_state_dict" not in vars(module)
        and _by_fsdp(module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    )


def _by_fsdp(*hooks: dict[int, Any]) -> bool:
    """Whether all are hooks of fully_shard(), which only put the sharded parameters back in their
    place; a module whose parameters are gathered does not hold, and its state dict is called."""
    functions = (getattr(hook, "hook", hook) for some in hooks for hook in some.values())
    return all(f.__module__.startswith("torch.distributed.fsdp._fully_shard") for f in functions)


class OptimizerWatch:
    """An optimizer's state per parameter, and its groups, encoded again when an object changed."""

    def __init__(self, optimizer: torch.optim.Optimizer, flattener: Flattener, name: str) -> None:
        self._optimizer = optimizer
        self._name = name
        packed = optimizer.state_dict()
        node = flattener.node(packed["state"], f"{name}.state")
        assert isinstance(node, tree.Mapping)
        self._node: tree.Node = node
        self._numbers = [
            tree.Sequence(tree.Tag.LIST, group["params"]) for group in packed["param_groups"]
        ]
        self._groups_node: tree.Node = None
        self._groups_items: tuple[object, ...] | None = None  # None: may change inside
        self._state: bytes | None = None  # encoded once extents are known
        self._encoded: bytes | None = None
        members = map(_PARAMS, optimizer.param_groups)
        self._members = tuple(chain.from_iterable([*some, some] for some in members))
        entries: list[dict[str, Any]] = list(optimizer.state.values())
        self._dicts: list[dict[Any, Any]] = [optimizer.state, *entries]
        self._items = _items(self._dicts)
        self.tensors: list[Tensor] = [
            value for entry in entries for value in entry.values() if isinstance(value, Tensor)
        ]

    @staticmethod
    def gives_its_state(optimizer: torch.optim.Optimizer) -> bool:
        """Whether nothing customises the state dict: it has `optimizer.state`, by numbers."""
        return (
            type(optimizer).state_dict is _Optimizer.state_dict
            and "state_dict" not in vars(optimizer)
            and not optimizer._optimizer_state_dict_pre_hooks
            and not optimizer._optimizer_state_dict_post_hooks
        )

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer) -> bool:
        """Whether nothing customises the state dict, and every entry is a dict of leaves."""
        return OptimizerWatch.gives_its_state(optimizer) and all(
            isinstance(key, Tensor)
            and type(entry) is dict
            and all(type(value) in _LEAVES or is_sharded(value) for value in entry.values())
            for key, entry in optimizer.state.items()
        )

    @staticmethod
    def loads_plainly(optimizer: torch.optim.Optimizer) -> bool:
        """Whether its state can be put in place without load_state_dict()."""
        cls = type(optimizer)
        return (
            OptimizerWatch.gives_its_state(optimizer)
            and cls.load_state_dict is _Optimizer.load_state_dict
            and "load_state_dict" not in vars(optimizer)
            and not optimizer._optimizer_load_state_dict_pre_hooks
            and not optimizer._optimizer_load_state_dict_post_hooks
        )

    def holds(self) -> bool:
        optimizer = self._optimizer
        return (
            optimizer.state is self._dicts[0]
            and same_items(self._dicts, self._items)
            and same_items(list(map(_PARAMS, optimizer.param_groups)), self._members)
            and not optimizer._optimizer_state_dict_pre_hooks
            and not optimizer._optimizer_state_dict_post_hooks
        )

    def take_groups(self, flattener: Flattener) -> None:
        """Adds the tensors that param_groups hold (a learning rate, say) to this call's views."""
        live = self._optimizer.param_groups
        if self._groups_items is not None and same_items(live, self._groups_items):
            return
        groups: list[tree.Node] = []
        for index, (group, numbers) in enumerate(zip(live, self._numbers, strict=True)):
            rest = {key: value for key, value in group.items() if key != "params"}
            node = flattener.node(rest, f"{self._name}.param_groups.{index}")
            assert isinstance(node, tree.Mapping)
            node.items.append(("params", numbers))  # in the place where state_dict() has it
            groups.append(node)
        self._groups_node = tree.Sequence(tree.Tag.LIST, groups)
        self._groups_items = _items(live) if all(map(_is_constant, live)) else None
        self._encoded = None

    def encoded(self) -> bytes:
        """Its node, once extents are known."""
        if self._state is None:
            self._state, self._node = tree.encode_node(self._node), None
        if self._encoded is None:
            groups = tree.encode_node(self._groups_node)
            self._encoded = tree.encode_dict([("state", self._state), ("param_groups", groups)])
        return self._encoded


_CONSTANTS = (int, float, bool, str, type(None))
_LEAVES = (Tensor, torch.nn.Parameter, *_CONSTANTS)


def _is_constant(group: dict[str, Any]) -> bool:
    """Whether all in it stays the same as long as the objects do; `params` are watched apart."""
    return all(
        type(value) in _CONSTANTS
        or (type(value) is tuple and all(type(item) in _CONSTANTS for item in value))
        for key, value in group.items()
        if key != "params"
    )
