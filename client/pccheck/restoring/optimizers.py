"""Attached optimizers: options into their groups, state into the tensors that they have.

torch's own `Optimizer.load_state_dict` would cast state to the dtype of its parameter: fp32 moments
of a bf16 parameter stay fp32 here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from pccheck.job import origin
from pccheck.state import devices, shards
from pccheck.state.watch import OptimizerWatch
from pccheck.warn import warn
from pccheck_wire import tree
from pccheck_wire.basics import some
from pccheck_wire.errors import StateMismatchError

from . import overlaps, pairing
from .pairing import mapping, only_hint
from .rebuild import Memory, state_of
from .targets import Stage, Targets

#: What schedulers of torch write into the groups, and may not have written yet.
_BY_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)
_NO_OPTIONS = _BY_SCHEDULERS | {pairing.NAMES}  # of the class
#: What means the same to an optimizer of another class. All else there, and the state of each
#: parameter, would make it another algorithm, or break its step().
_OF_ANY_CLASS = _BY_SCHEDULERS | {"lr", "weight_decay"}


class Optimizers:
    """The attached optimizers of one restore; `both` is all that it restores, by name."""

    def __init__(self, targets: Targets, both: Mapping[str, Any], *, strict: bool) -> None:
        self._targets, self._both, self._strict = targets, both, strict
        self._taken: dict[int, tuple[int, ...]] = {}  # what goes into the tensors in groups

    def place(self, name: str, node: tree.Node, optimizer: torch.optim.Optimizer) -> bool:
        """Finds a place for its state. False for one with a load_state_dict() of its own. Raises
        StateMismatchError by path."""
        mine = type(optimizer).__qualname__
        kind = origin.kind(self._targets.tree, "optimizers", name)
        if kind not in ("", mine):
            if self._strict:
                raise StateMismatchError(
                    f"{name}: the checkpoint has the state of {kind}, and {mine} is attached",
                    hint=f"{self._new_optimizer(name)}; restore(strict_optimizer=False) takes the "
                    "learning rate and the weight decay from the checkpoint, too",
                )
            self._options(name, node, optimizer)
        elif OptimizerWatch.loads_plainly(optimizer):
            self._optimizer(name, node, optimizer)
        else:
            return False
        return True

    def _new_optimizer(self, name: str) -> str:
        """For a hint. Its scheduler begins with it."""
        schedulers = {
            other for other, thing in self._both.items()
            if isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        }  # fmt: skip
        rest = self._both.keys() - {name} - schedulers
        return f"to continue with a new optimizer: {only_hint(rest)}"

    def _options(self, name: str, node: tree.Node, optimizer: torch.optim.Optimizer) -> None:
        """Takes only the options that mean the same to an optimizer of another class."""
        saved = _groups_of(name, node)
        pairing.numbered(name, saved, optimizer, self._new_optimizer(name))
        taken = []
        for group, live in zip(saved, optimizer.param_groups, strict=True):
            known = _BY_SCHEDULERS | (_OF_ANY_CLASS & live.keys())
            taken.append({key: value for key, value in group.items() if key in known})
        self._groups(name, taken, optimizer)

    def _groups(
        self, name: str, saved: list[dict[Any, tree.Node]], optimizer: torch.optim.Optimizer
    ) -> None:
        """All options of the groups, as torch does: some classes make options in a step."""
        options = [  # names stay in the order of the attached parameters
            {
                key: value for key, value in group.items()
                if key != "params" and not (key == pairing.NAMES and key in live)
            }
            for group, live in zip(saved, optimizer.param_groups, strict=True)
        ]  # fmt: skip
        for index, (group, live) in enumerate(zip(options, optimizer.param_groups, strict=True)):
            for key, value in list(group.items()):
                now: object = live.get(key)
                if _holds(value, now) and isinstance(value, tree.Tensor):
                    # Schedulers and captured graphs hold this tensor. So may another group, which
                    # gets a new one unless it had the same when they were saved.
                    pair = overlaps.Pair(f"{name}.param_groups.{index}.{key}", value, now)
                    if self._taken.setdefault(id(now), pair.place) == pair.place:
                        self._targets.tensor(pair.path, value, now)
                        del group[key]
                        continue
                self._targets.want(value)

        def finish(memory: Memory) -> None:  # what only this version of torch has stays
            for live, group in zip(optimizer.param_groups, options, strict=True):
                for key, node in group.items():
                    live[key] = state_of(memory, node, like=next(iter(live["params"]), None))

        self._targets.then(Stage.STATES, finish)

    def _optimizer(self, name: str, node: tree.Node, optimizer: torch.optim.Optimizer) -> None:
        saved_groups, new = _groups_of(name, node), self._new_optimizer(name)
        parameters = pairing.numbered(name, saved_groups, optimizer, new)
        if self._strict and not origin.kind(self._targets.tree, "optimizers", name):
            _same_options(name, saved_groups, optimizer, new)
        entries: dict[torch.Tensor, dict[str, tree.Node | torch.Tensor]] = {}
        others: dict[Any, tree.Node] = {}  # no dicts, or under names of the optimizer's own
        first = next(iter(parameters.values()), None)
        for number, entry in mapping(mapping(node, name)["state"], f"{name}.state").items():
            path = tree.join(f"{name}.state", number)
            key = parameters.get(number, number)
            if isinstance(key, int):
                raise StateMismatchError(
                    f"{path}: the attached optimizer has no such parameter",
                    hint=f"attach an optimizer of the same parameters; or {new}",
                )
            if isinstance(key, torch.Tensor) and isinstance(entry, tree.Mapping):
                entries[key] = self._entry(path, entry, optimizer, key)
            else:
                others[key] = entry
                self._targets.want(entry)
        self._groups(name, saved_groups, optimizer)

        def finish(memory: Memory) -> None:
            made = {key: state_of(memory, value, like=first) for key, value in others.items()}
            for parameter, entry in entries.items():
                made[parameter] = {
                    key: value
                    if isinstance(value, torch.Tensor)
                    else state_of(memory, value, like=parameter)
                    for key, value in entry.items()
                }
            optimizer.state.clear()  # the same dict: a wrapper may share it
            optimizer.state.update(made)
            # As in load_state_dict(): a class adapts what its earlier versions have saved.
            optimizer.__setstate__(
                {"state": optimizer.state, "param_groups": optimizer.param_groups}
            )

        self._targets.then(Stage.STATES, finish)

    def _entry(
        self, path: str, node: tree.Node, optimizer: torch.optim.Optimizer, parameter: torch.Tensor
    ) -> dict[str, tree.Node | torch.Tensor]:
        """The state of one parameter: live tensors where they fit, else nodes for new ones."""
        live = optimizer.state.get(parameter, {})
        entry: dict[str, tree.Node | torch.Tensor] = {}
        for key, value in mapping(node, path).items():
            now = live.get(key) if isinstance(live, dict) else None
            if not _holds(value, now):
                pairing.require_shape(tree.join(path, key), value, key, optimizer, parameter)
                now = self._new(tree.join(path, key), value, key, optimizer, parameter)
            if now is None:
                self._targets.want(value)
                entry[key] = value
            else:
                self._targets.tensor(tree.join(path, key), value, now)
                entry[key] = now
        return entry

    def _new(
        self,
        path: str,
        node: tree.Node,
        key: Any,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
    ) -> torch.Tensor | None:
        """Memory on the parameter's device for new state; None: it is made from the node."""
        if not isinstance(node, (tree.Tensor, tree.Shard)):
            return None
        dtype = getattr(torch, node.dtype)
        if shards.is_sharded(parameter) and node.shape == list(parameter.shape):
            return shards.empty_like(parameter, dtype)
        if isinstance(node, tree.Shard):
            if shards.is_sharded(parameter):
                raise StateMismatchError(
                    f"{path}: the checkpoint has a sharded tensor of {node.shape} for a parameter "
                    f"of {list(parameter.shape)}, and the attached optimizer has none yet",
                    hint="let the optimizer make its state first: step() with gradients of zero",
                )
            return torch.empty(node.shape, dtype=dtype, device=parameter.device)
        if self._new_on_gpu(node, key, optimizer, parameter):
            return devices.empty(node.shape, node.strides, dtype, like=parameter)
        return None

    def _new_on_gpu(
        self, node: tree.Tensor, key: Any, optimizer: torch.optim.Optimizer, parameter: torch.Tensor
    ) -> bool:
        """Whether state that is not there yet is made beside its parameter on a GPU: what lay on
        one, and of a checkpoint that was made without GPUs what torch would move there."""
        if devices.device_of(parameter) == devices.HOST:
            return False
        if node.flags:  # a plain tensor on a GPU, or something special
            return node.flags == tree.ON_DEVICE
        moves = key != "step" or any(optimizer.defaults.get(k) for k in ("capturable", "fused"))
        return moves and self._made_without_gpus

    @functools.cached_property
    def _made_without_gpus(self) -> bool:
        return not any(
            isinstance(node, tree.Tensor) and node.flags & tree.ON_DEVICE
            for _, node in tree.walk(self._targets.tree.root)
        )


def _groups_of(name: str, node: tree.Node) -> list[dict[Any, tree.Node]]:
    """The parameter groups of an optimizer's state."""
    parts = mapping(node, name)
    groups = parts.get("param_groups")
    if not isinstance(groups, tree.Sequence) or "state" not in parts:
        raise StateMismatchError(
            f"{name}: what the checkpoint has under this name is not the state of an optimizer",
            hint="attach the optimizer under the name with which it was saved",
        )
    return [mapping(item, f"{name}.param_groups") for item in groups.items]


def _holds(node: tree.Node, live: object) -> TypeGuard[torch.Tensor]:
    """Whether the live tensor can take what the checkpoint has."""
    if not isinstance(node, (tree.Tensor, tree.Shard)) or not isinstance(live, torch.Tensor):
        return False
    return overlaps.alike(node, live)


def _same_options(
    name: str, saved: list[dict[Any, tree.Node]], optimizer: torch.optim.Optimizer, new: str
) -> None:
    """Compares the options, for an optimizer whose class is not known (an import). Options that
    only the attached optimizer has stay as they are: newer versions of torch add options."""
    for index, (group, live) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        lost = sorted(map(str, group.keys() - live.keys() - _NO_OPTIONS))
        if lost:
            raise StateMismatchError(
                f"{name}.param_groups.{index}: the attached {type(optimizer).__name__} has no "
                f"{some(lost)}, and the checkpoint does not tell of which class its optimizer is",
                hint=f"if it is of this class: restore(strict_optimizer=False); {new}",
            )


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Calls the optimizer's own load_state_dict(). This may call torch's, which casts to the dtype
    of the parameter: a tensor that was only cast gets its saved dtype back."""
    saved = {key: dict(entry) for key, entry in _entries_of(state).items()}
    optimizer.load_state_dict(state)
    if not saved:
        return
    live, lost = {id(entry) for entry in optimizer.state.values()}, ""
    for number, entry in _entries_of(optimizer.state_dict()).items():
        for key, now in entry.items():
            old = saved.get(number, {}).get(key)
            if not _is_cast(old, now):
                continue
            if id(entry) in live:
                entry[key] = old.to(now.device)
            else:
                lost = lost or f"state.{number}.{key} from {old.dtype} to {now.dtype}"
    if lost:
        warn(
            f"the load_state_dict() of {type(optimizer).__name__} has converted {lost}, so "
            "training does not continue exactly. Let it keep the dtype, or let its state_dict() "
            "return the entries of optimizer.state"
        )


def _entries_of(state: Any) -> dict[Any, dict[Any, Any]]:
    """The dicts by parameter in what an optimizer's state_dict() returned."""
    found = state.get("state") if isinstance(state, dict) else None
    entries = found.items() if isinstance(found, dict) else ()
    return {key: entry for key, entry in entries if isinstance(entry, dict)}


def _is_cast(old: object, now: object) -> TypeGuard[torch.Tensor]:
    """Whether `now` is the old tensor in another dtype, and not what an optimizer made of it."""
    if not (isinstance(old, torch.Tensor) and isinstance(now, torch.Tensor)):
        return False
    return old.dtype != now.dtype and torch.equal(old.to(now.device, now.dtype), now)
