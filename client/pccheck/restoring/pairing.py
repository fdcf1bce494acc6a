"""Which parameter of an attached optimizer gets which state of the checkpoint.

A state dict has numbers in the place of parameters, in the order of the groups. An optimizer made
of `named_parameters()` has the names, too, and then they decide: the script may list the parameters
in another order than before.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pccheck.state import shards
from pccheck_wire import tree
from pccheck_wire.basics import some
from pccheck_wire.errors import StateMismatchError

NAMES = "param_names"
#: What wrappers put into the names of a model's parameters.
_OF_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: State that torch's own optimizers keep for each element of the parameter, so of its shape. Other
#: optimizers may keep anything under these names (quantized, factored).
_BY_ELEMENT = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
     "grad_avg", "acc_delta", "sum", "ax", "prev", "step_size", "variance")
)  # fmt: skip


def numbered(
    name: str, saved: list[dict[Any, tree.Node]], optimizer: torch.optim.Optimizer, new: str
) -> dict[Any, torch.Tensor]:
    """The parameters by the numbers that they had in the checkpoint. `new`: of the hint."""
    hint = f"make the same groups before restore() (add_param_group); or {new}"
    numbers: dict[Any, torch.Tensor] = {}
    if len(saved) != len(optimizer.param_groups):
        raise StateMismatchError(
            f"{name}.param_groups: {len(saved)} in the checkpoint, "
            f"{len(optimizer.param_groups)} attached",
            hint=hint,
        )
    for index, (group, live) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        path = f"{name}.param_groups.{index}"
        ids = group.get("params")
        if not isinstance(ids, tree.Sequence) or len(ids.items) != len(live["params"]):
            count = len(ids.items) if isinstance(ids, tree.Sequence) else 0
            raise StateMismatchError(
                f"{path}.params: {count} in the checkpoint, {len(live['params'])} attached",
                hint=hint,
            )
        order = _by_name(path, group.get(NAMES), live, new)
        numbers.update(zip(map(tree.plain, ids.items), order, strict=True))
    return numbers


def _by_name(path: str, saved: tree.Node, live: dict[str, Any], new: str) -> list[torch.Tensor]:
    """The group's parameters in the order of the checkpoint; by position unless both have names."""
    parameters: list[torch.Tensor] = live["params"]
    if NAMES not in live or not isinstance(saved, tree.Sequence):
        return parameters
    then, now = list(map(str, saved.items)), list(map(str, live[NAMES]))
    if then == now or not len(then) == len(now) == len(parameters):
        return parameters
    if what := differing(then, now):  # wrapped in another way?
        then, now = list(map(_bare, then)), list(map(_bare, now))
        if differing(then, now):
            raise StateMismatchError(
                f"{path}.{NAMES}: {what}",
                hint="give the parameters the names that they had; or attach an optimizer without "
                f"names (model.parameters()), of the same parameters in the same order; or {new}",
            )
    places: dict[str, collections.deque[torch.Tensor]] = collections.defaultdict(collections.deque)
    for key, parameter in zip(now, parameters, strict=True):
        places[key].append(parameter)
    return [places[key].popleft() for key in then]


def differing(saved: Iterable[object], live: Iterable[object]) -> str:
    """For a message: the names that only one side has; "" when both have the same."""
    then, now = collections.Counter(map(str, saved)), collections.Counter(map(str, live))
    both = ("only in the checkpoint", then - now), ("only attached", now - then)
    return "; ".join(f"{where}: {some(sorted(names))}" for where, names in both if names)


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS)


def require_shape(
    path: str, node: tree.Node, key: Any, optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> None:
    """Raises StateMismatchError for state of another shape: torch takes it, and step() breaks."""
    if (
        key in _BY_ELEMENT
        and not is_lazy(parameter)  # gets its shape when the state of its module is loaded
        and isinstance(node, tree.Tensor)
        and node.shape != list(parameter.shape)
        and type(optimizer).__module__.startswith("torch.optim")
        and not shards.is_sharded(parameter)
    ):
        raise StateMismatchError(
            f"{path}: the checkpoint has state of {node.shape} for a parameter of "
            f"{list(parameter.shape)}",
            hint="give the optimizer its parameters in the order that they had. Made of "
            "named_parameters() before it is saved, it takes them in any order",
        )


def only_hint(names: Collection[str]) -> str:
    """For a hint: what restores these, and how the run then counts as their continuation."""
    if not names:
        return "call adopt() instead of restore()"
    listed = ", ".join(f'"{name}"' for name in sorted(names))
    return f"restore(only=[{listed}]), then adopt() if this run continues the job"


def mapping(node: tree.Node, path: str) -> dict[Any, tree.Node]:
    """The items of a dict of the checkpoint. Raises StateMismatchError for anything else."""
    if not isinstance(node, tree.Mapping):
        raise StateMismatchError(
            f"{path}: the checkpoint has no dict here",
            hint="attach what was attached, or take what you need from recover()",
        )
    return {tree.plain(key): value for key, value in node.items}
