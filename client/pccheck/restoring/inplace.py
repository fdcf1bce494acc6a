"""Restores in place: straight into the tensors that are attached, where they fit.

Everything is compared first, and states without tensors go to their load_state_dict first; not a
byte is written when something does not fit. Tensors of the same shape and dtype keep their memory,
on whichever device: an optimizer's fp32 moments stay fp32 (torch's own
`Optimizer.load_state_dict` would cast them to the dtype of a bf16 parameter).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, TypeGuard

import torch

from pccheck.job import origin
from pccheck.state import devices
from pccheck.state.extents import Range, pack, pack_device
from pccheck.state.plan import RNG
from pccheck.state.rng import restore_rng
from pccheck.state.watch import ModuleWatch, OptimizerWatch
from pccheck_wire import tree
from pccheck_wire.errors import StateMismatchError
from pccheck_wire.tree import ITEM_BYTES

from .loaders import is_loader, set_again
from .rebuild import Loader, Memory, state_of

_SHOWN = 5
_COMPILED = (
    "names with _orig_mod are of a compiled part: attach the model before its parts are compiled, "
    "or compile them in place with part.compile()"
)
_OTHER_OPTIMIZER = (
    "attach an optimizer as it was, or call restore(strict_optimizer=False) to put this state into "
    "the attached one"
)
#: What schedulers of torch write into the groups, and may not have written yet.
_BY_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)


class Placement:
    """Where each extent goes, and what is done when it is there."""

    def __init__(
        self,
        described: tree.Tree,
        attached: Mapping[str, Any],
        leave: Collection[str] = (),
        *,
        strict_optimizer: bool = True,
    ) -> None:
        """Compares; what is attached under the names in `leave` stays as it is. Raises
        StateMismatchError by path."""
        self._tree = described
        self._strict = strict_optimizer
        self._pairs: list[tuple[tree.Tensor, torch.Tensor]] = []
        self._rebuilt: set[int] = set()  # extents that are wanted in memory of their own
        # Called before anything is loaded, without the checkpoint's memory; after that; at the end.
        self._before: list[Callable[[Memory], None]] = []
        self._after: list[Callable[[Memory], None]] = []
        self._last: list[Callable[[Memory], None]] = []
        # Training draws from this one. Others (validation) may make their next iterator much later,
        # when the generators have moved on.
        self._loader = attached.get("loader") if "loader" not in leave else None
        for name, node, thing in _named(described, attached):
            if name in leave:
                continue
            if strict_optimizer and isinstance(thing, torch.optim.Optimizer):
                _same_kind(name, described, thing)
            if isinstance(thing, torch.nn.Module) and ModuleWatch.loads_plainly(thing):
                self._module(name, node, thing)
            elif isinstance(thing, torch.optim.Optimizer) and OptimizerWatch.loads_plainly(thing):
                self._optimizer(name, node, thing)
            else:
                self._whole(name, node, thing)

    @property
    def on_gpu(self) -> bool:
        """Whether any of it goes to a GPU."""
        return any(devices.device_of(live) != devices.HOST for _, live in self._pairs)

    def load(self, load: Loader) -> None:
        """Has `load` fill the ranges, then finishes. Raises what `load` raises."""
        direct = self._direct()
        copied = {node.extent for node, _ in self._pairs if node.extent >= 0} - direct.keys()
        memory = Memory(self._tree.extents, self._rebuilt | copied)
        for finish in self._before:
            finish(memory)
        for device in sorted({devices.device_of(live) for _, live in self._pairs}):
            if device != devices.HOST:
                devices.synchronize(device)  # what is enqueued may still use the tensors
        load(*_packed([*direct.values(), *((devices.HOST, r) for r in memory.ranges)]))
        with torch.no_grad():
            for node, live in self._pairs:
                if node.extent >= 0 and node.extent not in direct:
                    _write(live, memory.tensor(node).detach())
        for finish in (*self._after, *self._last):
            finish(memory)

    def _direct(self) -> dict[int, _Target]:
        """Extents that can be loaded into the attached tensors themselves: all views on one lie
        there as they did when it was saved, without holes, and no two go to the same memory."""
        bases: dict[int, tuple[int, int] | None] = {}  # device and address
        for node, live in self._pairs:
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
        if not isinstance(node, tree.Tensor) or not isinstance(live, torch.Tensor):
            raise StateMismatchError(
                f"{path}: the checkpoint and what is attached do not both have a tensor here",
                hint="attach what was attached, or take what you need from recover()",
            )
        if not _alike(node, live):
            raise StateMismatchError(
                f"{path}: the checkpoint has {node.dtype} {node.shape}, and "
                f"{str(live.dtype).removeprefix('torch.')} {list(live.shape)} is attached",
                hint="build the model as it was, or take what you need from recover()",
            )
        self._pairs.append((node, live))

    def _whole(self, name: str, node: tree.Node, thing: Any) -> None:
        """Something with a load_state_dict of its own: gets the state as it was."""
        has_tensors = self._want(node)

        def restore_generators(memory: Memory) -> None:
            state = state_of(memory, node)
            restore_rng(state)
            if is_loader(self._loader):
                set_again(self._loader, functools.partial(restore_rng, state))

        def finish(memory: Memory) -> None:
            state = state_of(memory, node)
            try:
                thing.load_state_dict(state)
            except (
                Exception
            ) as error:  # the user's code: whatever it raises, the state does not fit
                reason = str(error) or type(error).__name__
                raise StateMismatchError(
                    f"{name}: its load_state_dict() refused the checkpoint: {reason}",
                    hint="build it as it was, or take what you need from recover()",
                ) from error

        if name == RNG and thing is True:
            self._last.append(restore_generators)
        else:
            (self._after if has_tensors else self._before).append(finish)

    def _want(self, node: tree.Node) -> bool:
        """Asks for the tensors and arrays in it; whether there are some."""
        found = {
            item.extent
            for _, item in tree.walk(node)
            if isinstance(item, (tree.Tensor, tree.Array)) and item.extent >= 0
        }
        self._rebuilt |= found
        return bool(found)

    def _optimizer(self, name: str, node: tree.Node, optimizer: torch.optim.Optimizer) -> None:
        parts = _mapping(node, name)
        groups = parts.get("param_groups")
        if not isinstance(groups, tree.Sequence) or "state" not in parts:
            raise StateMismatchError(
                f"{name}: the checkpoint has no optimizer of this name",
                hint="attach the same under the same names",
            )
        saved_groups = [_mapping(item, f"{name}.param_groups") for item in groups.items]
        parameters = _numbered(name, saved_groups, optimizer)
        if self._strict:
            _same_options(name, saved_groups, optimizer)
        entries: dict[torch.Tensor, dict[str, tree.Node | torch.Tensor]] = {}
        common: dict[Any, tree.Node] = {}  # under names of the optimizer's own
        for number, entry in _mapping(parts["state"], f"{name}.state").items():
            path = tree.join(f"{name}.state", number)
            if number not in parameters:
                if isinstance(number, int):
                    raise StateMismatchError(
                        f"{path}: the attached optimizer has no such parameter",
                        hint=_OTHER_OPTIMIZER,
                    )
                common[number] = entry
                self._want(entry)
                continue
            entries[parameters[number]] = self._entry(path, entry, optimizer, parameters[number])
        for group in saved_groups:
            for key, value in group.items():
                if key != "params":
                    self._want(value)

        def finish(memory: Memory) -> None:
            _set_groups(optimizer, saved_groups, memory)
            made: defaultdict[Any, Any] = defaultdict(dict)
            made.update({key: state_of(memory, value) for key, value in common.items()})
            for parameter, entry in entries.items():
                made[parameter] = {
                    key: value
                    if isinstance(value, torch.Tensor)
                    else state_of(memory, value, like=parameter)
                    for key, value in entry.items()
                }
            optimizer.state = made

        self._after.append(finish)

    def _entry(
        self, path: str, node: tree.Node, optimizer: torch.optim.Optimizer, parameter: torch.Tensor
    ) -> dict[str, tree.Node | torch.Tensor]:
        """The state of one parameter: live tensors where they fit, else nodes for new ones."""
        live = optimizer.state.get(parameter, {})
        entry: dict[str, tree.Node | torch.Tensor] = {}
        for key, value in _mapping(node, path).items():
            now = live.get(key) if isinstance(live, dict) else None
            if isinstance(value, tree.Tensor) and isinstance(now, torch.Tensor) and _alike(
                value, now
            ):  # fmt: skip
                self._pairs.append((value, now))
                entry[key] = now
            elif self._new_on_gpu(value, key, optimizer, parameter):
                made = devices.empty(
                    value.shape, value.strides, getattr(torch, value.dtype), like=parameter
                )
                self._pairs.append((value, made))
                entry[key] = made
            else:
                self._want(value)
                entry[key] = value
        return entry

    def _new_on_gpu(
        self, node: tree.Node, key: Any, optimizer: torch.optim.Optimizer, parameter: torch.Tensor
    ) -> TypeGuard[tree.Tensor]:
        """Whether state that is not there yet is made beside its parameter on a GPU: what lay on
        one, and of a checkpoint that was made without GPUs what torch would move there."""
        if not isinstance(node, tree.Tensor) or devices.device_of(parameter) == devices.HOST:
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


def _named(described: tree.Tree, attached: Mapping[str, Any]) -> list[tuple[str, tree.Node, Any]]:
    if not described.attached:
        raise StateMismatchError(
            "the checkpoint was made by checkpoint(state), not of what is attached",
            hint="get the state with recover(); to save values beside what is attached, use "
            "metadata= or attach a dict",
        )
    saved = _mapping(described.root, "")
    _same_keys("what was attached", saved.keys(), attached.keys())
    return [(name, saved[name], thing) for name, thing in attached.items()]


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
            parts.append(f"only in the checkpoint: {_some(missing)}")
        if extra:
            parts.append(f"only attached: {_some(extra)}")
        raise StateMismatchError(
            f"{path}: {'; '.join(parts)}",
            hint=_COMPILED
            if any("_orig_mod" in name for name in missing + extra)
            else "attach the same under the same names, or take what you need from recover()",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _alike(node: tree.Tensor, live: torch.Tensor) -> bool:
    return (
        live.layout is torch.strided
        and live.device.type in ("cpu", "cuda")
        and str(live.dtype) == f"torch.{node.dtype}"
        and list(live.shape) == node.shape
    )


def _fits(node: tree.Tensor, live: torch.Tensor) -> bool:
    """Whether the bytes of the extent are exactly those of the live tensor, in the same order."""
    item_bytes = ITEM_BYTES[node.dtype]
    dense = tree.span_bytes(node.shape, node.strides, item_bytes) == live.numel() * item_bytes
    return (
        dense and list(live.stride()) == node.strides and not live.is_conj() and not live.is_neg()
    )


def _write(live: torch.Tensor, value: torch.Tensor) -> None:
    """`copy_`, which torch refuses where elements share memory (an expanded buffer)."""
    for dim, stride in enumerate(live.stride()):
        if stride == 0 and live.size(dim) > 1:
            live, value = live.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    live.copy_(value)


def _numbered(
    name: str, saved: list[dict[Any, tree.Node]], optimizer: torch.optim.Optimizer
) -> dict[Any, torch.Tensor]:
    """The parameters by the numbers that they had in the checkpoint."""
    numbers: dict[Any, torch.Tensor] = {}
    if len(saved) != len(optimizer.param_groups):
        raise StateMismatchError(
            f"{name}.param_groups: {len(saved)} in the checkpoint, "
            f"{len(optimizer.param_groups)} attached",
            hint=_OTHER_OPTIMIZER,
        )
    for index, (group, live) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        ids = group.get("params")
        if not isinstance(ids, tree.Sequence) or len(ids.items) != len(live["params"]):
            count = len(ids.items) if isinstance(ids, tree.Sequence) else 0
            raise StateMismatchError(
                f"{name}.param_groups.{index}.params: {count} in the checkpoint, "
                f"{len(live['params'])} attached",
                hint=_OTHER_OPTIMIZER,
            )
        numbers.update(zip(map(tree.plain, ids.items), live["params"], strict=True))
    return numbers


def _same_kind(name: str, described: tree.Tree, optimizer: torch.optim.Optimizer) -> None:
    kind, mine = origin.optimizer_kind(described, name), type(optimizer).__qualname__
    if kind not in ("", mine):
        raise StateMismatchError(
            f"{name}: the checkpoint has the state of {kind}, and {mine} is attached",
            hint=_OTHER_OPTIMIZER,
        )


def _same_options(
    name: str, saved: list[dict[Any, tree.Node]], optimizer: torch.optim.Optimizer
) -> None:
    """What only the attached one has stays as it is: newer versions of torch add options."""
    for index, (group, live) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        lost = sorted(map(str, group.keys() - live.keys() - _BY_SCHEDULERS))
        if lost:
            raise StateMismatchError(
                f"{name}.param_groups.{index}: the attached {type(optimizer).__name__} has no "
                f"{_some(lost)}",
                hint=_OTHER_OPTIMIZER,
            )


def _set_groups(
    optimizer: torch.optim.Optimizer, saved: list[dict[Any, tree.Node]], memory: Memory
) -> None:
    """Hyper-parameters from the checkpoint; what only this version of torch has stays."""
    for live, group in zip(optimizer.param_groups, saved, strict=True):
        for key, node in group.items():
            if key == "params":
                continue
            value = state_of(memory, node, like=next(iter(live["params"]), None))
            now = live.get(key)
            if (
                isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
                and isinstance(node, tree.Tensor) and _alike(node, now)
            ):  # fmt: skip
                with torch.no_grad():
                    now.copy_(value)  # schedulers and captured graphs hold this tensor
            else:
                live[key] = value
