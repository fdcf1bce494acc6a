"""Restores in place: straight into the tensors that are attached, where they fit.

Everything is compared first, and states without tensors go to their load_state_dict first; not a
byte is written when something does not fit. Tensors of the same shape and dtype keep their memory,
on whichever device: an optimizer's fp32 moments stay fp32 (torch's own
`Optimizer.load_state_dict` would cast them to the dtype of a bf16 parameter).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, TypeGuard

import torch

from pccheck.job import origin
from pccheck.state import devices, gating, shards
from pccheck.state.attaching import Values
from pccheck.state.extents import Range, pack, pack_device
from pccheck.state.foreign import in_words
from pccheck.state.plan import RNG
from pccheck.state.rng import require_generators, restore_rng
from pccheck.state.watch import ModuleWatch, OptimizerWatch
from pccheck.warn import warn
from pccheck_wire import tree
from pccheck_wire.blocks import Blocks, block_of
from pccheck_wire.errors import StateMismatchError
from pccheck_wire.tree import ITEM_BYTES

from . import overlaps, pairing
from .loaders import count_once, is_loader, is_torchdata, set_again, undo_draws
from .pairing import some
from .rebuild import Loader, Memory, state_of
from .values import Dicts, in_state_of, leaves, require_trained, trained

_COMPILED = (
    "names with _orig_mod are of a compiled part: attach the model before its parts are compiled, "
    "or compile them in place with part.compile()"
)
#: What schedulers of torch write into the groups, and may not have written yet.
_BY_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)
_NO_OPTIONS = _BY_SCHEDULERS | {pairing.NAMES}  # of the class
#: What means the same to an optimizer of another class. All else there, and the state of each
#: parameter, would make it another algorithm, or break its step().
_OF_ANY_CLASS = _BY_SCHEDULERS | {"lr", "weight_decay"}


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
    ) -> None:
        """Compares; what is attached under the names in `leave`, or not in `only`, stays as it is.
        `others` reads the trees of other ranks, for tensors that are cut in another way. Raises
        StateMismatchError by path."""
        self._tree = described
        self._others = others
        self._strict = strict_optimizer
        self._pairs: list[overlaps.Pair] = []
        self._rebuilt: set[int] = set()  # extents that are wanted in memory of their own
        self._cut: list[overlaps.Cut] = []  # tensors of which this rank has another block now
        self._places: dict[tuple[int, ...], int] = {}  # of those in the payloads, numbered
        self._made: dict[int, torch.Tensor] = {}  # DTensors for an object's own load_state_dict
        self._attached = attached
        self._dicts = Dicts(self._target, self._placed)
        self._taken: dict[int, tuple[int, ...]] = {}  # what goes into the tensors in groups
        # Called before anything is loaded, without the checkpoint's memory; after that; at the end.
        self._before: list[Callable[[Memory], None]] = []
        self._after: list[Callable[[Memory], None]] = []
        self._last: list[Callable[[Memory], None]] = []
        self._leave = leave
        named = _named(described, attached, only)
        self._both = {name: thing for name, _, thing in named}
        for name, node, thing in named:
            if isinstance(thing, Values):
                self._dicts.claim(name, node, thing.values)
        for name, node, thing in named:
            if name in leave:
                continue
            if name == RNG and thing is True:
                self._generators(node)
            elif isinstance(thing, torch.nn.Module) and ModuleWatch.loads_plainly(thing):
                self._module(name, node, thing)
            elif isinstance(thing, torch.optim.Optimizer) and not self._same_kind(name, thing):
                self._options(name, node, thing)
            elif isinstance(thing, torch.optim.Optimizer) and OptimizerWatch.loads_plainly(thing):
                self._optimizer(name, node, thing)
            elif isinstance(thing, Values):
                self._values(name, node, thing)
            else:
                self._same_scheduler(name, thing)
                self._whole(name, node, thing)
        if any(isinstance(thing, Values) for _, _, thing in named):
            self._settle([one for one in named if one[0] not in leave])
        self._require_apart()
        # The ranges that fill what is cut in another way.
        self._pieces = b"".join(self._blocks.ranges(one.path, one.block) for one in self._cut)

    @functools.cached_property
    def _blocks(self) -> Blocks:
        return Blocks({-1: self._tree, **self._others()})

    @property
    def on_gpu(self) -> bool:
        """Whether any of it goes to a GPU."""
        lives = [live for _, _, live in self._pairs] + [one.live for one in self._cut]
        return any(devices.device_of(live) != devices.HOST for live in lives)

    def compare(self, load: Loader) -> None:
        """The values, where only they tell whether the checkpoint fits: to be called before
        `load()`. Raises StateMismatchError by path."""
        overlaps.require_one_value(self._pairs, self._tree.extents, load)

    def load(self, load: Loader) -> None:
        """Has `load` fill the ranges, then finishes. Raises what `load` raises."""
        direct = self._direct()
        copied = {node.extent for _, node, _ in self._pairs if node.extent >= 0} - direct.keys()
        memory = Memory(self._tree.extents, self._rebuilt | copied)
        memory.shards.update(self._made)
        for finish in self._before:
            finish(memory)
        for device in sorted({devices.device_of(live) for _, _, live in self._pairs}):
            if device != devices.HOST:
                devices.synchronize(device)  # what is enqueued may still use the tensors
        host, gpus = _packed([*direct.values(), *((devices.HOST, r) for r in memory.ranges)])
        load(host + self._pieces, gpus)
        with torch.no_grad():
            for one in self._cut:
                if one.memory is not one.live:
                    overlaps.write(one.live, one.memory)
            for _, node, live in self._pairs:
                if node.extent >= 0 and node.extent not in direct:
                    overlaps.write(live, memory.tensor(node).detach())
        for finish in (*self._after, *self._last):
            finish(memory)

    def _direct(self) -> dict[int, _Target]:
        """Extents that can be loaded into the attached tensors themselves: all views on one lie
        there as they did when it was saved, without holes, and no two go to the same memory."""
        bases: dict[int, tuple[int, int] | None] = {}  # device and address
        for _, node, live in self._pairs:
            if node.extent < 0 or node.extent in self._rebuilt:
                continue
            base = None
            if _fits(node, live):
                base = (devices.device_of(live), live.data_ptr() - node.offset)
            if bases.setdefault(node.extent, base) != base:
                bases[node.extent] = None
        targets: dict[int, _Target] = {}
        ends: dict[int, int] = {}
        for (device, address), index in sorted((base, i) for i, base in bases.items() if base):
            extent = self._tree.extents[index]
            if address >= ends.get(device, 0):
                targets[index] = (device, Range(address, extent.offset, extent.nbytes))
                ends[device] = address + extent.nbytes
        return targets

    def _module(self, name: str, node: tree.Node, module: torch.nn.Module) -> None:
        saved = _mapping(node, name)
        live = module.state_dict(keep_vars=True)
        _same_keys(name, saved.keys(), live.keys())
        for key, value in saved.items():
            self._tensor(tree.join(name, key), value, live[key])

    def _tensor(self, path: str, node: tree.Node, live: object) -> None:
        self._add(self._target(path, node, live))

    def _add(self, target: overlaps.Target) -> None:
        if isinstance(target, overlaps.Cut):
            self._cut.append(target)
        else:
            self._pairs.append(target)

    def _target(self, path: str, node: tree.Node, live: object) -> overlaps.Target:
        block = block_of(node)
        if block is None or not isinstance(live, torch.Tensor):
            raise StateMismatchError(
                f"{path}: the checkpoint and what is attached do not both have a tensor here",
                hint="attach what was attached, or take what you need from recover()",
            )
        assert isinstance(node, (tree.Tensor, tree.Shard))
        if not overlaps.alike(node, live):
            known = live.device.type in overlaps.DEVICES
            raise StateMismatchError(
                f"{path}: the checkpoint has {node.dtype} {node.shape}, and "
                f"{str(live.dtype).removeprefix('torch.')} {list(live.shape)} "
                f"{'' if known else f'on the device {live.device} '}is attached",
                hint='give it memory before restore(): model.to_empty(device="cuda")'
                if live.is_meta
                else "build the model as it was, or take what you need from recover()",
            )
        offsets, part = shards.offsets_of(live, path), shards.local(live)
        if block[1] == offsets and block[0].shape == list(part.shape):
            return overlaps.Pair(path, block[0], part)
        return overlaps.Cut.of(path, part, list(live.shape), offsets)

    def _placed(self, target: overlaps.Target) -> overlaps.Pair:
        """For comparing places only: what is cut has one place in the payloads of all ranks."""
        if isinstance(target, overlaps.Pair):
            return target
        number = self._places.setdefault(self._blocks.place(target.path), len(self._places) + 1)
        shape, strides = list(target.live.shape), list(target.live.stride())
        node = tree.Tensor(shape, strides, "uint8", extent=overlaps.NO_EXTENT + number)
        return overlaps.Pair(target.path, node, target.live)

    def _require_apart(self) -> None:
        """Raises StateMismatchError when two tensors of the checkpoint go to one place in memory,
        and one of them is cut: their values are not at hand to be compared."""
        cut = [self._placed(one) for one in self._cut]
        for number in sorted(overlaps.unlike(self._pairs, cut)[0]):
            raise StateMismatchError(
                f"{cut[number].path} shares memory with another attached tensor, as tied weights "
                "do, and did not when it was saved",
                hint="build the model as it was, give each value of a dict its own memory "
                "(clone()), or take what you need from recover()",
            )

    def _whole(self, name: str, node: tree.Node, thing: Any) -> None:
        """Something with a load_state_dict of its own: gets the state as it was."""
        has_shards = self._shards_of(name, node, thing)
        has_tensors = self._want(node) or has_shards

        def finish(memory: Memory) -> None:
            state, held = state_of(memory, node), self._held(thing) if has_tensors else set()
            try:
                if isinstance(thing, torch.optim.Optimizer):
                    _load_optimizer(thing, state)
                else:
                    thing.load_state_dict(state)
                    count_once(thing)
            except Exception as error:  # of the user's code: the state does not fit
                raise StateMismatchError(
                    f"{name}: its load_state_dict() refused the checkpoint: {in_words(error)}",
                    hint="build it as it was, or take what you need from recover()",
                ) from error
            if held and held - self._held(thing):
                raise StateMismatchError(
                    f"{name}: its load_state_dict() put new tensors in the place of those that an "
                    "attached optimizer trains, and the optimizer would go on with the old ones",
                    hint="let it copy the values into its tensors (without assign=True)",
                )

        (self._after if has_tensors else self._before).append(finish)

    def _held(self, thing: Any) -> set[int]:
        """The memory of its tensors that attached optimizers train. A state_dict() is called only
        where no module has that memory."""
        if isinstance(thing, torch.optim.Optimizer):
            return set()
        all_trained, modules = trained(self._attached), gating.modules_of(thing)
        if modules:
            return all_trained & _memory_of(modules)
        elsewhere = [m for one in self._attached.values() for m in gating.modules_of(one)]
        left = all_trained - _memory_of(elsewhere)
        found = leaves(thing.state_dict(), "") if left else ()
        return left & {gating.storage_of(one) for _, one in found if isinstance(one, torch.Tensor)}

    def _values(self, name: str, node: tree.Node, thing: Values) -> None:
        """An attached dict."""
        _mapping(node, name)
        make = self._dicts.value(name, node, thing.values)
        (self._after if tree.extents_of(node) else self._before).append(make)

    def _settle(self, named: list[tuple[str, tree.Node, Any]]) -> None:
        """For attached dicts, when all else has its place."""
        saved, restored = _mapping(self._tree.root, ""), {name for name, _, _ in named}
        held = [
            pair for name, thing in self._attached.items()
            if name in saved and thing is not True and not is_loader(thing)
            if not isinstance(thing, Values)
            for pair in in_state_of(name, saved[name], thing, name in restored)
        ]  # fmt: skip
        cut = map(self._placed, self._cut)
        for target in self._dicts.settle([*held, *self._pairs, *cut]):
            self._add(target)
        loaded = [pair.live for pair in (*held, *self._pairs)] + [one.live for one in self._cut]
        for name, node, thing in named:
            if isinstance(thing, Values):
                self._want(node)
                require_trained(name, thing.values, self._attached, loaded)

    def _generators(self, node: tree.Node) -> None:
        """attach(rng=True): set at the end, and again when the next iterator of `loader` has drawn.
        Other loaders (validation) may make theirs much later, when the generators have moved on."""
        rest = _only(self._both.keys() - {RNG})
        require_generators(_mapping(node, RNG), f"to leave the generators out: {rest}")
        self._want(node)

        def finish(memory: Memory) -> None:
            state = state_of(memory, node)
            restore_rng(state)
            for name in self._both.keys() - self._leave:
                thing = self._both[name]
                if name == "loader" and is_loader(thing):
                    set_again(thing, functools.partial(restore_rng, state))
                elif is_torchdata(type(thing)):
                    undo_draws(thing)

        self._last.append(finish)

    def _shards_of(self, name: str, node: tree.Node, thing: Any) -> bool:
        """The shards in it go into the DTensors of its state dict, as it is now; whether there are
        some."""
        found = [(path, n) for path, n in tree.walk(node, name) if isinstance(n, tree.Shard)]
        saved = [(path, shard) for path, shard in found if shard.mesh]  # others were no DTensors
        live = dict(leaves(thing.state_dict(), name)) if saved else {}
        for path, shard in saved:
            self._tensor(path, shard, live.get(path))
            self._made[id(shard)] = live[path]
        return bool(saved)

    def _want(self, node: tree.Node) -> bool:
        """Asks for the tensors and arrays in it; whether there are some."""
        placed = {id(item.local) for _, item in tree.walk(node) if id(item) in self._made}  # type: ignore[union-attr]
        found = tree.extents_of(node, without=placed | self._dicts.placed)
        self._rebuilt |= found
        return bool(found)

    def _same_kind(self, name: str, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the state is of an optimizer of this class, as far as is known."""
        kind, mine = origin.optimizer_kind(self._tree, name), type(optimizer).__qualname__
        if kind not in ("", mine) and self._strict:
            raise StateMismatchError(
                f"{name}: the checkpoint has the state of {kind}, and {mine} is attached",
                hint=f"{self._new_optimizer(name)}; restore(strict_optimizer=False) takes the "
                "learning rate and the weight decay from the checkpoint, too",
            )
        return kind in ("", mine)

    def _same_scheduler(self, name: str, thing: object) -> None:
        """Raises StateMismatchError for a scheduler of another class, as far as is known: it takes
        any attributes, and would compute other learning rates with those."""
        kind, mine = origin.scheduler_kind(self._tree, name), origin.kind_of_scheduler(thing)
        if kind and mine and kind != mine:
            raise StateMismatchError(
                f"{name}: the checkpoint has the state of {kind}, and {mine} is attached",
                hint=f"to continue with a new scheduler: {_only(self._both.keys() - {name})}",
            )

    def _new_optimizer(self, name: str) -> str:
        """For a hint. Its scheduler begins with it."""
        schedulers = {
            other for other, thing in self._both.items()
            if isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        }  # fmt: skip
        rest = self._both.keys() - {name} - schedulers
        return f"to continue with a new optimizer: {_only(rest)}"

    def _options(self, name: str, node: tree.Node, optimizer: torch.optim.Optimizer) -> None:
        """Takes only the options that mean the same to an optimizer of another class."""
        saved = _groups_of(name, node)
        pairing.numbered(name, saved, optimizer, self._new_optimizer(name))
        groups = zip(saved, optimizer.param_groups, strict=True)
        known = [
            group.keys() & (_BY_SCHEDULERS | (live.keys() & _OF_ANY_CLASS))
            for group, live in groups
        ]
        self._groups(
            name,
            [{key: group[key] for key in keys} for group, keys in zip(saved, known, strict=True)],
            optimizer,
        )

    def _groups(
        self, name: str, saved: list[dict[Any, tree.Node]], optimizer: torch.optim.Optimizer
    ) -> None:
        """All options of the groups, as torch does: some classes make options in their first
        step."""
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
                        self._pairs.append(pair)
                        del group[key]
                        continue
                self._want(value)
        self._after.append(functools.partial(_set_groups, optimizer, options))

    def _optimizer(self, name: str, node: tree.Node, optimizer: torch.optim.Optimizer) -> None:
        saved_groups, new = _groups_of(name, node), self._new_optimizer(name)
        parameters = pairing.numbered(name, saved_groups, optimizer, new)
        if self._strict and not origin.optimizer_kind(self._tree, name):
            _same_options(name, saved_groups, optimizer, new)
        entries: dict[torch.Tensor, dict[str, tree.Node | torch.Tensor]] = {}
        others: dict[Any, tree.Node] = {}  # no dicts, or under names of the optimizer's own
        first = next(iter(parameters.values()), None)
        for number, entry in _mapping(_mapping(node, name)["state"], f"{name}.state").items():
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
                self._want(entry)
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

        self._after.append(finish)

    def _entry(
        self, path: str, node: tree.Node, optimizer: torch.optim.Optimizer, parameter: torch.Tensor
    ) -> dict[str, tree.Node | torch.Tensor]:
        """The state of one parameter: live tensors where they fit, else nodes for new ones."""
        live = optimizer.state.get(parameter, {})
        entry: dict[str, tree.Node | torch.Tensor] = {}
        for key, value in _mapping(node, path).items():
            now = live.get(key) if isinstance(live, dict) else None
            if not _holds(value, now):
                pairing.require_shape(tree.join(path, key), value, key, optimizer, parameter)
                now = self._new(tree.join(path, key), value, key, optimizer, parameter)
            if now is None:
                self._want(value)
                entry[key] = value
            else:
                self._tensor(tree.join(path, key), value, now)
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
        """Memory beside its parameter for state that is not there yet; None when that is made of
        the node."""
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
            for _, node in tree.walk(self._tree.root)
        )


_Target: TypeAlias = tuple[int, Range]  # the device and what goes there


def _packed(targets: list[_Target]) -> tuple[bytes, bytes]:
    """Host ranges and device ranges, each ascending by their place in the payload."""
    targets.sort(key=lambda target: target[1].offset)
    return (
        pack(item for device, item in targets if device == devices.HOST),
        b"".join(pack_device([item], device) for device, item in targets if device != devices.HOST),
    )


def _named(
    described: tree.Tree, attached: Mapping[str, Any], only: Collection[str] | None
) -> list[tuple[str, tree.Node, Any]]:
    if not described.attached:
        raise StateMismatchError(
            "the checkpoint was made by checkpoint(state), so it has no attached objects",
            hint="get the state with recover(); to save values beside what is attached, use "
            "metadata= or attach a dict",
        )
    saved = _mapping(described.root, "")
    if only is not None:  # the checkpoint may have more
        attached = {name: attached[name] for name in only}
        saved = {name: node for name, node in saved.items() if name in attached}
    # Generators that the checkpoint does not have stay as they are; the caller warns.
    attached = {name: thing for name, thing in attached.items() if name in saved or name != RNG}
    _same_names(saved.keys(), attached.keys())
    return [(name, saved[name], thing) for name, thing in attached.items()]


def _only(names: Collection[str]) -> str:
    """For a hint: what restores these, and how the run then counts as their continuation."""
    if not names:
        return "call adopt() instead of restore()"
    listed = ", ".join(f'"{name}"' for name in sorted(names))
    return f"restore(only=[{listed}]), then adopt() if this run continues the job"


def _same_names(saved: Collection[str], attached: Collection[str]) -> None:
    parts = []
    if missing := sorted(set(saved) - set(attached)):
        are = "is" if len(missing) == 1 else "are"
        parts.append(f"the checkpoint has {some(missing)}, which {are} not attached")
    if extra := sorted(set(attached) - set(saved)):
        are, it = ("is", "it") if len(extra) == 1 else ("are", "them")
        parts.append(f"{some(extra)} {are} attached, and the checkpoint does not have {it}")
    if parts:
        both = set(saved) & set(attached)
        raise StateMismatchError(
            "; ".join(parts),
            hint="attach the same under the same names; or "
            + (
                f"restore what both have: {_only(both)}"
                if both
                else "take what you need from recover()"
            ),
        )


def _groups_of(name: str, node: tree.Node) -> list[dict[Any, tree.Node]]:
    """The parameter groups of an optimizer's state."""
    parts = _mapping(node, name)
    groups = parts.get("param_groups")
    if not isinstance(groups, tree.Sequence) or "state" not in parts:
        raise StateMismatchError(
            f"{name}: what the checkpoint has under this name is not the state of an optimizer",
            hint="attach the optimizer under the name with which it was saved",
        )
    return [_mapping(item, f"{name}.param_groups") for item in groups.items]


def _mapping(node: tree.Node, path: str) -> dict[Any, tree.Node]:
    if not isinstance(node, tree.Mapping):
        raise StateMismatchError(
            f"{path}: the checkpoint has no dict here",
            hint="attach what was attached, or take what you need from recover()",
        )
    return {tree.plain(key): value for key, value in node.items}


def _same_keys(path: str, saved: Any, live: Any) -> None:
    missing, extra = sorted(map(str, saved - live)), sorted(map(str, live - saved))
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"only in the checkpoint: {some(missing)}")
        if extra:
            parts.append(f"only attached: {some(extra)}")
        raise StateMismatchError(
            f"{path}: {'; '.join(parts)}",
            hint=_COMPILED
            if any("_orig_mod" in name for name in missing + extra)
            else "attach the same under the same names, or take what you need from recover()",
        )


def _memory_of(modules: list[torch.nn.Module]) -> set[int]:
    return {gating.storage_of(p) for module in modules for p in module.parameters()}


def _holds(node: tree.Node, live: object) -> TypeGuard[torch.Tensor]:
    """Whether the live tensor can take what the checkpoint has."""
    if not isinstance(node, (tree.Tensor, tree.Shard)) or not isinstance(live, torch.Tensor):
        return False
    return overlaps.alike(node, live)


def _fits(node: tree.Tensor, live: torch.Tensor) -> bool:
    """Whether the bytes of the extent are exactly those of the live tensor, in the same order."""
    item_bytes = ITEM_BYTES[node.dtype]
    dense = tree.span_bytes(node.shape, node.strides, item_bytes) == live.numel() * item_bytes
    return (
        dense and list(live.stride()) == node.strides and not live.is_conj() and not live.is_neg()
    )


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


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
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


def _set_groups(
    optimizer: torch.optim.Optimizer, saved: list[dict[Any, tree.Node]], memory: Memory
) -> None:
    """Hyper-parameters from the checkpoint; what only this version of torch has stays."""
    for live, group in zip(optimizer.param_groups, saved, strict=True):
        for key, node in group.items():
            live[key] = state_of(memory, node, like=next(iter(live["params"]), None))
