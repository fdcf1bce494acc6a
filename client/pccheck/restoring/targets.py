"""Which memory takes which tensor of a checkpoint, by which ranges, and what is called then."""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from pccheck.state import devices, shards
from pccheck.state.extents import Range, pack, pack_device
from pccheck_wire import tree
from pccheck_wire.blocks import Blocks, block_of
from pccheck_wire.errors import StateMismatchError
from pccheck_wire.tree import ITEM_BYTES

from . import overlaps
from .rebuild import Loader, Memory

_OnDevice: TypeAlias = tuple[int, Range]  # the device, and what goes to its memory


class Stage(enum.Enum):
    """In this order: OBJECTS may refuse their states while the tensors are as they were."""

    OBJECTS = "states without tensors"
    STATES = "states with tensors, of objects, optimizers and dicts"
    GENERATORS = "random generators: nothing may draw after them"


class Targets:
    """Used in this order: `tensor`, `shard`, `of_dict`, `want` and `then` for all that is attached,
    then `settle`, `compare`, `load`."""

    def __init__(
        self, described: tree.Tree, others: Callable[[], Mapping[int, tree.Tree]], *,
        reaches_gpus: bool = True,
    ) -> None:  # fmt: skip
        self.tree = described
        self._reaches_gpus = reaches_gpus
        self._others = others
        self._pairs: list[overlaps.Pair] = []
        self._cut: list[overlaps.Cut] = []  # tensors of which this rank has another block now
        self._of_dicts: list[overlaps.Target] = []
        self._shards: dict[int, Any] = {}  # DTensors that hold them, by the identity of the node
        self._filled: set[int] = set()  # identities of nodes that need no memory of their own
        self._rebuilt: set[int] = set()  # extents that are wanted in memory of their own
        self._pieces = b""  # the ranges that fill what is cut in another way
        self._calls: dict[Stage, list[Callable[[Memory], None]]] = defaultdict(list)

    def tensor(self, path: str, node: tree.Node, live: object) -> None:
        """Raises StateMismatchError when the attached tensor cannot take the node's value."""
        self._add(self._target(path, node, live))

    def shard(self, path: str, node: tree.Shard, live: object, *, of_dict: bool = False) -> None:
        """The same for a DTensor, which is then itself the value of the node."""
        target = self._target(path, node, live)
        self._shards[id(node)] = live
        self._filled.add(id(node.local))
        if of_dict:
            self._of_dicts.append(target)
        else:
            self._add(target)

    def of_dict(self, pair: overlaps.Pair, node: tree.Node) -> None:
        """A tensor or array of an attached dict."""
        self._filled.add(id(node))
        self._of_dicts.append(pair)

    def want(self, node: tree.Node) -> bool:
        """Asks for tensors and arrays that no attached memory takes; whether there are some."""
        found = tree.extents_of(node, without=self._filled)
        self._rebuilt |= found
        return bool(found)

    def then(self, stage: Stage, call: Callable[[Memory], None]) -> None:
        """Has `load` call this in a stage, with the memory of the tensors that were wanted."""
        self._calls[stage].append(call)

    @property
    def lives(self) -> list[torch.Tensor]:
        """The memory that is filled."""
        return [pair.live for pair in self._pairs] + [one.live for one in self._cut]

    def settle(self, held: Iterable[overlaps.Pair] = ()) -> None:
        """When all that is attached has its place. Raises StateMismatchError when a tensor of a
        dict shares memory with another tensor, and did not when it was saved: an update of one
        would change the other. The same for what is cut, whose values are not at hand to be
        compared. Attached objects have `held`, and fill it themselves or leave it as it is."""
        places: dict[tuple[int, ...], int] = {}
        strict = [self._placed(target, places) for target in (*self._of_dicts, *self._cut)]
        overlaps.require_shared(strict, [*self._pairs, *held])
        for target in self._of_dicts:
            self._add(target)
        self._pieces = b"".join(self._blocks.ranges(one.path, one.block) for one in self._cut)

    def compare(self, load: Loader) -> None:
        """Compares values, where only they tell whether all fits. Raises StateMismatchError."""
        overlaps.require_one_value(self._pairs, self.tree.extents, load)

    def load(self, load: Loader) -> None:
        """Has `load` fill the attached tensors, and runs the stages. Raises what `load` raises."""
        memory = self._memory()
        for stage in Stage:
            if stage is Stage.STATES:
                self._fill(load, memory)
            for call in self._calls[stage]:
                call(memory)

    def _memory(self) -> Memory:
        """For all that does not go straight into attached tensors."""
        copied = {n.extent for _, n, _ in self._pairs if n.extent >= 0} - self._direct.keys()
        memory = Memory(self.tree.extents, self._rebuilt | copied)
        memory.shards.update(self._shards)
        return memory

    def _fill(self, load: Loader, memory: Memory) -> None:
        for device in sorted(set(map(devices.device_of, self.lives)) - {devices.HOST}):
            devices.synchronize(device)  # what is enqueued may still use the tensors
        host, gpus = _packed([*self._direct.values(), *((devices.HOST, r) for r in memory.ranges)])
        load(host + self._pieces, gpus)
        with torch.no_grad():
            for one in self._cut:
                if one.memory is not one.live:
                    overlaps.write(one.live, one.memory)
            for _, node, live in self._pairs:
                if node.extent >= 0 and node.extent not in self._direct:
                    overlaps.write(live, memory.tensor(node).detach())

    @functools.cached_property
    def _blocks(self) -> Blocks:
        return Blocks({-1: self.tree, **self._others()})

    @functools.cached_property
    def _direct(self) -> dict[int, _OnDevice]:
        """Extents that can be loaded into the attached tensors themselves: all views on one lie
        there as they did when it was saved, without holes, and no two go to the same memory."""
        bases: dict[int, tuple[int, int] | None] = {}  # device and address
        for _, node, live in self._pairs:
            if node.extent < 0 or node.extent in self._rebuilt:
                continue
            base = None
            device = devices.device_of(live)
            if _fits(node, live) and (self._reaches_gpus or device == devices.HOST):
                base = (device, live.data_ptr() - node.offset)
            if bases.setdefault(node.extent, base) != base:
                bases[node.extent] = None
        direct: dict[int, _OnDevice] = {}
        ends: dict[int, int] = {}
        for (device, address), index in sorted((base, i) for i, base in bases.items() if base):
            extent = self.tree.extents[index]
            if address >= ends.get(device, 0):
                direct[index] = (device, Range(address, extent.offset, extent.nbytes))
                ends[device] = address + extent.nbytes
        return direct

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

    def _placed(self, target: overlaps.Target, places: dict[tuple[int, ...], int]) -> overlaps.Pair:
        """For comparing places only; `places` numbers those of what is cut in all payloads."""
        if isinstance(target, overlaps.Pair):
            return target
        number = places.setdefault(self._blocks.place(target.path), len(places) + 1)
        shape, strides = list(target.live.shape), list(target.live.stride())
        node = tree.Tensor(shape, strides, "uint8", extent=overlaps.NO_EXTENT + number)
        return overlaps.Pair(target.path, node, target.live)


def _fits(node: tree.Tensor, live: torch.Tensor) -> bool:
    """Whether the bytes of the extent are exactly those of the live tensor, in the same order."""
    item_bytes = ITEM_BYTES[node.dtype]
    dense = tree.span_bytes(node.shape, node.strides, item_bytes) == live.numel() * item_bytes
    return dense and list(live.stride()) == node.strides and not (live.is_conj() or live.is_neg())


def _packed(targets: list[_OnDevice]) -> tuple[bytes, bytes]:
    """Host ranges and device ranges, each ascending by their place in the payload."""
    targets.sort(key=lambda target: target[1].offset)
    return (
        pack(item for device, item in targets if device == devices.HOST),
        b"".join(pack_device([item], device) for device, item in targets if device != devices.HOST),
    )
