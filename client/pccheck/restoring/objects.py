"""Attached things with a load_state_dict() of their own: they get the state as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pccheck.job import origin
from pccheck.state import gating
from pccheck.state.foreign import in_words
from pccheck_wire import tree
from pccheck_wire.errors import StateMismatchError

from .loaders import count_once
from .optimizers import load_optimizer
from .pairing import only_hint
from .rebuild import Memory, state_of
from .stages import Stage, Stages
from .targets import Targets
from .values import leaves, trained


def same_scheduler(described: tree.Tree, name: str, thing: object, both: Mapping[str, Any]) -> None:
    """Raises StateMismatchError for a scheduler of another class, as far as is known: it takes any
    attributes, and would compute other learning rates with those."""
    kind, mine = origin.scheduler_kind(described, name), origin.kind_of_scheduler(thing)
    if kind and mine and kind != mine:
        raise StateMismatchError(
            f"{name}: the checkpoint has the state of {kind}, and {mine} is attached",
            hint=f"to continue with a new scheduler: {only_hint(both.keys() - {name})}",
        )


def place_object(
    name: str,
    node: tree.Node,
    thing: Any,
    targets: Targets,
    stages: Stages,
    attached: Mapping[str, Any],
) -> None:
    """Asks for its tensors, and gives it its state when these are there."""
    has_shards = _fill_shards(name, node, thing, targets)
    has_tensors = targets.want(node) or has_shards

    def finish(memory: Memory) -> None:
        held = _trained_in(thing, attached) if has_tensors else set()
        _load(name, thing, state_of(memory, node))
        if held and held - _trained_in(thing, attached):
            raise StateMismatchError(
                f"{name}: its load_state_dict() put new tensors in the place of those that an "
                "attached optimizer trains, and the optimizer would go on with the old ones",
                hint="let it copy the values into its tensors (without assign=True)",
            )

    stages.add(Stage.STATES if has_tensors else Stage.OBJECTS, finish)


def _load(name: str, thing: Any, state: Any) -> None:
    try:
        if isinstance(thing, torch.optim.Optimizer):
            load_optimizer(thing, state)
        else:
            thing.load_state_dict(state)
            count_once(thing)
    except Exception as error:  # of the user's code: the state does not fit
        raise StateMismatchError(
            f"{name}: its load_state_dict() refused the checkpoint: {in_words(error)}",
            hint="build it as it was, or take what you need from recover()",
        ) from error


def _fill_shards(name: str, node: tree.Node, thing: Any, targets: Targets) -> bool:
    """The shards in it go into the DTensors of its state dict, as it is now; whether there are
    some."""
    found = [(path, n) for path, n in tree.walk(node, name) if isinstance(n, tree.Shard)]
    saved = [(path, shard) for path, shard in found if shard.mesh]  # others were no DTensors
    live = dict(leaves(thing.state_dict(), name)) if saved else {}
    for path, shard in saved:
        targets.shard(path, shard, live.get(path))
    return bool(saved)


def _trained_in(thing: Any, attached: Mapping[str, Any]) -> set[int]:
    """The memory of its tensors that attached optimizers train. A state_dict() is called only where
    no module has that memory."""
    if isinstance(thing, torch.optim.Optimizer):
        return set()
    all_trained, modules = trained(attached), gating.modules_of(thing)
    if modules:
        return all_trained & _memory_of(modules)
    elsewhere = [m for one in attached.values() for m in gating.modules_of(one)]
    left = all_trained - _memory_of(elsewhere)
    found = leaves(thing.state_dict(), "") if left else ()
    return left & {gating.storage_of(one) for _, one in found if isinstance(one, torch.Tensor)}


def _memory_of(modules: list[torch.nn.Module]) -> set[int]:
    return {gating.storage_of(p) for module in modules for p in module.parameters()}
