"""Cheap checks that attached state still is what its plan was made of.

They run at every checkpoint on the training thread, hence the loops in C (`map` over methods) and
the comparison by identity wherever a tensor may be met.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from pccheck_wire import tree

from .flatten import Flattener

_Module = torch.nn.Module
_Optimizer = torch.optim.Optimizer
_DTYPE = operator.attrgetter("dtype")
_IMAGINARY = (torch.complex32, torch.complex64, torch.complex128)
_CHILDREN = operator.itemgetter("_parameters", "_buffers", "_modules")
_HOOKS = operator.itemgetter("_state_dict_hooks", "_state_dict_pre_hooks")
_SKIPPED = operator.itemgetter("_non_persistent_buffers_set")


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


class GeometryWatch:
    """Where tensors lie, their sizes, strides and dtypes."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._pointers = list(map(Tensor.data_ptr, tensors))
        self._sizes = list(map(Tensor.size, tensors))
        self._strides = list(map(Tensor.stride, tensors))
        self._dtypes = list(map(_DTYPE, tensors))
        self._lazy = [t for t in tensors if t.dtype in _IMAGINARY]  # may become conjugated views
        self._quick = _quick_check(tensors)

    def holds(self) -> bool:
        tensors = self._tensors
        return list(map(Tensor.data_ptr, tensors)) == self._pointers and (
            self._quick(*tensors) or self._holds_slowly()
        )

    def _holds_slowly(self) -> bool:
        tensors = self._tensors
        return (
            list(map(Tensor.size, tensors)) == self._sizes
            and list(map(Tensor.stride, tensors)) == self._strides
            and list(map(_DTYPE, tensors)) == self._dtypes
            and not any(map(Tensor.is_conj, self._lazy))
        )


def _never(*_tensors: Tensor) -> bool:
    return False


def _quick_check(tensors: list[Tensor]) -> Callable[..., bool]:
    """torch's own guards compare sizes, strides and dtype of all tensors in one call, four times
    faster. They are private: used only if they tell four kinds of changes, and never trusted with
    a "no" (they also say it in inference mode).
    """
    probe = torch.zeros(2, 3)
    checks = (
        torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 2),
    )  # fmt: skip
    try:
        check = _guards([probe])
        if check(probe) and not any(map(check, checks)):
            return _guards(tensors)
    except Exception:  # another torch: the slow way is always right
        pass
    return _never


def _guards(tensors: list[Tensor]) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(t.size()) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = TensorGuards(
        *tensors,
        dynamic_dims_sizes=sizes,
        dynamic_dims_strides=strides,
    ).check
    return check


class ModuleWatch:
    """The parameters and buffers of a module and of all modules below it."""

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._vars = list(map(vars, modules))
        self._types = list(map(type, modules))
        self._modules = modules
        self._hooks = list(chain.from_iterable(map(_HOOKS, self._vars)))
        self._skipped = [set(item) for item in map(_SKIPPED, self._vars)]
        self._dicts: list[dict[str, Any]] = list(chain.from_iterable(map(_CHILDREN, self._vars)))
        self._lengths = list(map(len, self._dicts))
        self._filled = list(filter(None, self._dicts))
        self._keys = list(chain.from_iterable(self._filled))
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        self.tensors = list(module.state_dict(keep_vars=True).values())

    @staticmethod
    def suits(module: torch.nn.Module) -> bool:
        """Whether nobody customised how the state dict is made."""
        return all(
            cls.state_dict is _Module.state_dict
            and cls._save_to_state_dict is _Module._save_to_state_dict
            and cls.get_extra_state is _Module.get_extra_state
            for cls in {type(m) for m in module.modules()}
        ) and not any(
            "state_dict" in vars(m) or "_save_to_state_dict" in vars(m) or any(_HOOKS(vars(m)))
            for m in module.modules()
        )

    @staticmethod
    def loads_plainly(module: torch.nn.Module) -> bool:
        """Whether its state dict can be put in place without asking it; torch's own modules only
        customise loading for checkpoints of older versions."""
        return ModuleWatch.suits(module) and all(
            type(m).load_state_dict is _Module.load_state_dict
            and (
                type(m)._load_from_state_dict is _Module._load_from_state_dict
                or type(m).__module__.startswith("torch.nn.")
            )
            and not m._load_state_dict_pre_hooks
            and not m._load_state_dict_post_hooks
            and "load_state_dict" not in vars(m)
            for m in module.modules()
        )

    def holds(self) -> bool:
        dicts = self._dicts
        return (
            _same(list(chain.from_iterable(map(_CHILDREN, self._vars))), dicts)
            and list(map(len, dicts)) == self._lengths
            and _same(list(chain.from_iterable(map(dict.values, self._filled))), self._values)
            and list(chain.from_iterable(self._filled)) == self._keys
            and list(map(type, self._modules)) == self._types
            and not any(self._hooks)
            and list(map(_SKIPPED, self._vars)) == self._skipped
        )


class OptimizerWatch:
    """An optimizer's state per parameter; its groups are encoded anew every time."""

    def __init__(self, optimizer: torch.optim.Optimizer, flattener: Flattener, name: str) -> None:
        self._optimizer = optimizer
        self._name = name
        packed = optimizer.state_dict()
        node = flattener.node(packed["state"], f"{name}.state")
        assert isinstance(node, tree.Mapping)
        self._node: tree.Node = node
        self._others_now: list[object] = []
        self._groups_node: tree.Node = None
        self._numbers = [
            tree.Fragment(tree.encode_node(tree.Sequence(tree.Tag.LIST, group["params"])))
            for group in packed["param_groups"]
        ]
        self._members = list(chain.from_iterable(_members(optimizer)))
        self._counts = list(map(len, _members(optimizer)))
        self._owners = list(optimizer.state)
        entries: list[dict[str, Any]] = list(optimizer.state.values())
        self._lengths = list(map(len, entries))
        self._keys = list(chain.from_iterable(entries))
        values = list(chain.from_iterable(map(dict.values, entries)))
        self._is_tensor = [isinstance(value, Tensor) for value in values]
        self._is_other = [not flag for flag in self._is_tensor]
        self.tensors: list[Tensor] = list(compress(values, self._is_tensor))
        self._others = list(compress(values, self._is_other))
        self._encoded = b""

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer) -> bool:
        """Whether nobody customised the state dict, and every entry is a dict of leaves."""
        return (
            type(optimizer).state_dict is _Optimizer.state_dict
            and "state_dict" not in vars(optimizer)
            and not optimizer._optimizer_state_dict_pre_hooks
            and not optimizer._optimizer_state_dict_post_hooks
            and all(
                isinstance(key, Tensor)
                and type(entry) is dict
                and all(type(value) in _LEAVES for value in entry.values())
                for key, entry in optimizer.state.items()
            )
        )

    @staticmethod
    def loads_plainly(optimizer: torch.optim.Optimizer) -> bool:
        """Whether its state can be put in place without asking it."""
        cls = type(optimizer)
        return (
            OptimizerWatch.suits(optimizer)
            and cls.load_state_dict is _Optimizer.load_state_dict
            and "load_state_dict" not in vars(optimizer)
            and not optimizer._optimizer_load_state_dict_pre_hooks
            and not optimizer._optimizer_load_state_dict_post_hooks
        )

    def holds(self) -> bool:
        optimizer = self._optimizer
        groups = list(_members(optimizer))
        entries: list[dict[str, Any]] = list(optimizer.state.values())
        if not (
            _same(list(chain.from_iterable(groups)), self._members)
            and list(map(len, groups)) == self._counts
            and _same(list(optimizer.state), self._owners)
            and set(map(type, entries)) <= {dict}
            and list(map(len, entries)) == self._lengths
            and list(chain.from_iterable(entries)) == self._keys
        ):
            return False
        values = list(chain.from_iterable(map(dict.values, entries)))
        tensors = values
        if self._others:
            self._others_now = list(compress(values, self._is_other))
            tensors = list(compress(values, self._is_tensor))
        return (
            _same(tensors, self.tensors)
            and self._others_unchanged()
            and not optimizer._optimizer_state_dict_pre_hooks
            and not optimizer._optimizer_state_dict_post_hooks
        )

    def _others_unchanged(self) -> bool:
        """Python values in the state; few optimizers have such. repr tells -0.0 from 0.0."""
        return _same(self._others_now, self._others) or (
            list(map(type, self._others_now)) == list(map(type, self._others))
            and list(map(repr, self._others_now)) == list(map(repr, self._others))
        )

    def take_groups(self, flattener: Flattener) -> None:
        """Adds the tensors that param_groups hold (a learning rate, say) to this call's views."""
        groups: list[tree.Node] = []
        for index, (group, numbers) in enumerate(
            zip(self._optimizer.param_groups, self._numbers, strict=True)
        ):
            rest = {key: value for key, value in group.items() if key != "params"}
            node = flattener.node(rest, f"{self._name}.param_groups.{index}")
            assert isinstance(node, tree.Mapping)
            node.items.append(("params", numbers))  # in the place where state_dict() has it
            groups.append(node)
        self._groups_node = tree.Sequence(tree.Tag.LIST, groups)

    def encoder(self) -> Callable[[], bytes]:
        """Called once extents are known."""
        state = tree.Fragment(tree.encode_node(self._node))
        self._node = None

        def encode() -> bytes:
            return tree.encode_node(
                tree.Mapping(tree.Tag.DICT, [("state", state), ("param_groups", self._groups_node)])
            )

        return encode


_LEAVES = (Tensor, torch.nn.Parameter, int, float, bool, str, type(None))


def _members(optimizer: torch.optim.Optimizer) -> Iterable[list[Tensor]]:
    return map(operator.itemgetter("params"), optimizer.param_groups)
