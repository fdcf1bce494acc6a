"""Restores in place: straight into the tensors that are attached, where they fit.

Everything is compared first, and states without tensors go to their load_state_dict first; not a
byte is written when something does not fit. Tensors of the same shape and dtype keep their memory,
on whichever device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from pccheck.job import origin
from pccheck.state import devices, gating
from pccheck.state.attaching import Values
from pccheck.state.plan import RNG
from pccheck.state.rng import require_generators, restore_rng
from pccheck.state.watch import ModuleWatch
from pccheck.warn import in_words
from pccheck_wire import tree
from pccheck_wire.errors import StateMismatchError

from .loaders import count_once, is_loader, is_torchdata, set_again, undo_draws
from .optimizers import Optimizers, load_optimizer
from .pairing import differing, mapping, only_hint
from .rebuild import Memory, state_of
from .targets import Stage, Targets
from .values import Dicts, leaves, trained

_COMPILED = (
    "names with _orig_mod are of a compiled part: attach the model before its parts are compiled, "
    "or compile them in place with part.compile()"
)
_RECOVER = "take what you need from recover()"


class Placement:
    """Where each extent goes, and what is done when it is there."""

    def __init__(
        self,
        described: tree.Tree,
        attached: Mapping[str, Any],
        leave: Collection[str] = (),
        others: Callable[[], Mapping[int, tree.Tree]] = dict,
        *,
        strict_optimizer: bool = True,
        only: Collection[str] | None = None,
        reaches_gpus: bool = True,
    ) -> None:
        """Compares; what is attached under the names in `leave`, or not in `only`, stays as it is.
        `others` reads the trees of other ranks, for tensors that are cut in another way. Without
        `reaches_gpus` what goes to a GPU passes through host memory. Raises StateMismatchError by
        path."""
        self._attached = attached
        #: To be compared, then loaded.
        self.targets = Targets(described, others, reaches_gpus=reaches_gpus)
        named = _named(described, attached, only)
        self._restored = {name: thing for name, _, thing in named if name not in leave}
        both = {name: thing for name, _, thing in named}
        self._optimizers = Optimizers(self.targets, both, strict=strict_optimizer)
        self._dicts = Dicts(self.targets)
        for name, node, thing in named:
            if name in self._restored:
                self._place(name, node, thing, both)
        self._dicts.settle(attached, self._restored, dict(mapping(described.root, "")))

    @property
    def on_gpu(self) -> bool:
        """Whether any of it goes to a GPU."""
        return any(devices.device_of(live) != devices.HOST for live in self.targets.lives)

    def _place(self, name: str, node: tree.Node, thing: Any, both: Mapping[str, Any]) -> None:
        if name == RNG and thing is True:
            self._generators(node, both)
        elif isinstance(thing, torch.nn.Module) and ModuleWatch.loads_plainly(thing):
            self._module(name, node, thing)
        elif isinstance(thing, Values):
            self._dicts.place(name, node, thing.values)
        elif not (
            isinstance(thing, torch.optim.Optimizer) and self._optimizers.place(name, node, thing)
        ):
            _same_scheduler(self.targets.tree, name, thing, both)
            _place_object(name, node, thing, self.targets, self._attached)

    def _module(self, name: str, node: tree.Node, module: torch.nn.Module) -> None:
        saved = mapping(node, name)
        live = module.state_dict(keep_vars=True)
        if what := differing(saved, live):
            same = f"attach the same under the same names, or {_RECOVER}"
            raise StateMismatchError(
                f"{name}: {what}", hint=_COMPILED if "_orig_mod" in what else same
            )
        for key, value in saved.items():
            self.targets.tensor(tree.join(name, key), value, live[key])

    def _generators(self, node: tree.Node, both: Mapping[str, Any]) -> None:
        """attach(rng=True): set at the end, and again when the next iterator of `loader` has drawn.
        Other loaders (validation) may make theirs much later, when the generators have moved on."""
        rest = only_hint(both.keys() - {RNG})
        require_generators(mapping(node, RNG), f"to leave the generators out: {rest}")
        self.targets.want(node)

        def finish(memory: Memory) -> None:
            state = state_of(memory, node)
            restore_rng(state)
            for name, thing in self._restored.items():
                if name == "loader" and is_loader(thing):
                    set_again(thing, functools.partial(restore_rng, state))
                elif is_torchdata(type(thing)):
                    undo_draws(thing)

        self.targets.then(Stage.GENERATORS, finish)


def _named(
    described: tree.Tree, attached: Mapping[str, Any], only: Collection[str] | None
) -> list[tuple[str, tree.Node, Any]]:
    if not described.attached:
        raise StateMismatchError(
            "the checkpoint was made by checkpoint(state), so it has no attached objects",
            hint="get the state with recover(); to save values beside what is attached, use "
            "metadata= or attach a dict",
        )
    saved = mapping(described.root, "")
    if only is not None:  # the checkpoint may have more
        attached = {name: attached[name] for name in only}
        saved = {name: node for name, node in saved.items() if name in attached}
    # Generators that the checkpoint does not have stay as they are; the caller warns.
    attached = {name: thing for name, thing in attached.items() if name in saved or name != RNG}
    if what := differing(saved, attached):
        both = saved.keys() & attached.keys()
        rest = f"restore what both have: {only_hint(both)}" if both else _RECOVER
        raise StateMismatchError(what, hint=f"attach the same under the same names; or {rest}")
    return [(name, saved[name], thing) for name, thing in attached.items()]


def _same_scheduler(saved: tree.Tree, name: str, thing: object, both: Mapping[str, Any]) -> None:
    """Raises StateMismatchError for a scheduler of another class, as far as is known: it takes any
    attributes, and would compute other learning rates with those."""
    kind, mine = origin.kind(saved, "schedulers", name), origin.kind_of_scheduler(thing)
    if kind and mine and kind != mine:
        raise StateMismatchError(
            f"{name}: the checkpoint has the state of {kind}, and {mine} is attached",
            hint=f"to continue with a new scheduler: {only_hint(both.keys() - {name})}",
        )


def _place_object(
    name: str, node: tree.Node, thing: Any, targets: Targets, attached: Mapping[str, Any]
) -> None:
    """Its own load_state_dict() gets the state as it was, when its tensors are there."""
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

    targets.then(Stage.STATES if has_tensors else Stage.OBJECTS, finish)


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
    """The shards go into the DTensors of its present state dict; whether there are some."""
    found = [(path, n) for path, n in tree.walk(node, name) if isinstance(n, tree.Shard)]
    saved = [(path, shard) for path, shard in found if shard.mesh]  # others were no DTensors
    live = dict(leaves(thing.state_dict(), name)) if saved else {}
    for path, shard in saved:
        targets.shard(path, shard, live.get(path))
    return bool(saved)


def _trained_in(thing: Any, attached: Mapping[str, Any]) -> set[int]:
    """What attached optimizers train of it. Calls state_dict() unless modules have all of it."""
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
