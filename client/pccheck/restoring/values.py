"""Attached dicts: their items go back into the same dicts and lists, and into the tensors and
arrays that have the saved shape and dtype.

These tensors may be in other hands: a module's parameters, or in an optimizer. Some may also share
memory now and did not when they were saved, or the other way round: `{"best": model.state_dict()}`
has the parameters themselves until the first copy replaces them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from pccheck.state import shards
from pccheck.state.flatten import SEQUENCES
from pccheck.state.gating import storage_of, trained_by
from pccheck_wire import tree
from pccheck_wire.errors import StateMismatchError

from . import overlaps
from .rebuild import Memory, flagged, numpy_dtype, state_of

_Maker: TypeAlias = Callable[[Memory], Any]
_PARTS = (tree.Sequence, tree.Mapping, tree.Tensor, tree.Array, tree.Shard)


class _Leaf(NamedTuple):
    path: str
    node: tree.Node
    live: Any
    target: overlaps.Target


class Dicts:
    """The attached dicts of one restore."""

    def __init__(
        self,
        target: Callable[[str, tree.Node, object], overlaps.Target],
        placed: Callable[[overlaps.Target], overlaps.Pair],
    ) -> None:
        self._target, self._placed = target, placed
        self._leaves: list[_Leaf] = []
        self._kept: dict[int, object] = {}  # tensors and arrays, by the identity of their node
        self._seen: dict[int, tree.Node] = {}  # what goes into a container, by its identity
        self.placed: set[int] = set()  #: nodes that are loaded into tensors and arrays of the dicts

    def claim(self, name: str, node: tree.Node, live: dict[Any, Any]) -> None:
        """To be called for all attached dicts before any is placed: one that is in another one gets
        the values of its own name. Raises StateMismatchError."""
        if not self._fills(live, node):
            raise StateMismatchError(
                f"{name} is attached under another name, too, and the checkpoint has other values "
                "under that name",
                hint="attach one dict for each name",
            )

    def value(self, path: str, node: tree.Node, live: object) -> _Maker:
        """What makes the value of the node, in what has its place now."""
        if isinstance(node, tree.Mapping) and isinstance(live, dict):
            return self._mapping(path, node, live)
        if isinstance(node, tree.Sequence) and isinstance(live, (list, tuple)):
            return self._sequence(path, node, live)
        target = self._target_of(path, node, live)
        if target is not None:
            self._leaves.append(_Leaf(path, node, live, target))
        beside = _memory(live)  # a new tensor goes to the GPU of the one in its place
        return lambda memory: (
            self._kept[id(node)] if id(node) in self._kept else state_of(memory, node, beside)
        )

    def _mapping(self, path: str, node: tree.Mapping, live: dict[Any, Any]) -> _Maker:
        fills = self._fills(live, node)
        items = [(tree.plain(key), item) for key, item in node.items]
        makers = {k: self.value(tree.join(path, k), item, live.get(k)) for k, item in items}

        def make(memory: Memory) -> object:
            made = {key: one(memory) for key, one in makers.items()}
            into = live if fills else state_of(memory, dataclasses.replace(node, items=[]))
            into.clear()
            into.update(made)
            return into

        return make

    def _sequence(self, path: str, node: tree.Sequence, live: Sequence[Any]) -> _Maker:
        if not any(isinstance(item, _PARTS) for item in node.items):  # often long
            makers: list[_Maker] = []
        else:
            now = [*live, *[None] * (len(node.items) - len(live))]
            both = enumerate(zip(node.items, now, strict=False))
            makers = [self.value(tree.join(path, at), item, old) for at, (item, old) in both]
        into = live if isinstance(live, list) and self._fills(live, node) else None

        def make(memory: Memory) -> object:
            items = [one(memory) for one in makers]
            made = SEQUENCES[node.tag](items) if makers else state_of(memory, node)
            if into is None or not isinstance(made, list):
                return made
            into[:] = made
            return into

        return make

    def _fills(self, live: object, node: tree.Node) -> bool:
        """False for a container that has two places, of which the checkpoint has other values."""
        first = self._seen.setdefault(id(live), node)
        return first is node or tree.encode_node(first) == tree.encode_node(node)

    def _target_of(self, path: str, node: tree.Node, live: object) -> overlaps.Target | None:
        """Raises StateMismatchError for a DTensor that does not fit: it can only be filled."""
        for below, shard in tree.walk(node, path):
            if isinstance(shard, tree.Shard) and shard.mesh:  # others were no DTensors
                return self._target(below, shard, live if shard is node else None)
        return _pair(path, node, live)

    def settle(self, others: Sequence[overlaps.Pair]) -> list[overlaps.Target]:
        """Chooses the tensors and arrays that are kept; returns what is to be loaded there. Memory
        that a module or an optimizer (`others`) has as well belongs to that. Of two places in the
        dicts it is not known which one others hold: both are returned, and refused unless the
        checkpoint has the same values for them."""
        # Arrays with gaps were saved as copies: it is not known what they shared memory with.
        self._leaves.sort(key=lambda leaf: _has_gaps(leaf.live))
        ours = [self._placed(leaf.target) for leaf in self._leaves]
        taken, contested = overlaps.unlike(others, ours)
        loaded: list[overlaps.Target] = []
        for number, (path, node, live, target) in enumerate(self._leaves):
            if number not in taken or number in contested:
                loaded.append(target)
            if number not in taken or (number in contested and _has_gaps(live)):
                self._kept[id(node)] = live
            elif isinstance(node, tree.Shard):
                made = flagged(shards.empty_like(live, live.dtype), node.local.flags)
                self._kept[id(node)] = made
                loaded.append(self._target(path, node, made))
            if id(node) in self._kept:
                self.placed.add(id(node.local if isinstance(node, tree.Shard) else node))
        return loaded


def _has_gaps(live: object) -> bool:
    return isinstance(live, np.ndarray) and not live.flags.forc


def trained(attached: Mapping[str, Any]) -> set[int]:
    """The memory that attached optimizers train."""
    optimizers = [one for one in attached.values() if isinstance(one, torch.optim.Optimizer)]
    return {storage_of(tensor) for one in optimizers for tensor in trained_by(one)} - {0}


def require_trained(
    name: str, values: object, attached: Mapping[str, Any], loaded: Iterable[torch.Tensor]
) -> None:
    """Raises StateMismatchError when nothing is loaded into a tensor of the dict that an attached
    optimizer trains: it would go on with the first values, beside those of the checkpoint."""
    lost = trained(attached) - {storage_of(tensor) for tensor in loaded}
    for path, live in leaves(values, name) if lost else ():
        memory = _memory(live)
        if memory is not None and storage_of(memory) in lost:
            raise StateMismatchError(
                f"{path}: an attached optimizer trains this tensor, and the checkpoint has none of "
                "its shape and dtype in its place",
                hint="build the dict as it was, or take what you need from recover()",
            )


def leaves(value: object, path: str) -> Iterator[tuple[str, Any]]:
    """The values of a state dict, by the paths that the tree has."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, tree.join(path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, tree.join(path, index))
    else:
        yield path, value


def in_state_of(name: str, saved: tree.Node, thing: Any, restored: bool) -> Iterator[overlaps.Pair]:
    """The tensors and arrays in the state of something attached: those that the checkpoint has.
    All of them when it is not restored, since then they keep their values."""
    nodes = dict(tree.walk(saved, name))
    for path, live in leaves(thing.state_dict(), name):
        memory = _memory(live) if path in nodes or not restored else None
        if memory is not None:
            pair = _pair(path, nodes[path], live) if restored else None
            unknown = tree.Tensor([], [], "uint8", extent=overlaps.NO_EXTENT)
            yield pair or overlaps.Pair(path, unknown, memory)


def _pair(path: str, node: tree.Node, live: object) -> overlaps.Pair | None:
    """What the checkpoint has and the memory that it goes to; None when it does not fit there."""
    memory = _memory(live)
    if isinstance(node, tree.Array) and isinstance(live, np.ndarray):
        if (live.dtype, list(live.shape)) != (numpy_dtype(node.dtype), node.shape):
            return None
        node = _bytes(node, live.itemsize)
    elif type(live) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if memory is None or not isinstance(node, tree.Tensor) or not overlaps.alike(node, memory):
        return None
    made = overlaps.Pair(path, node, memory)
    return None if made.lies_otherwise and overlaps.overlaps_itself(memory) else made


def _memory(live: object) -> torch.Tensor | None:
    """What can be loaded into: a tensor, or its local part; an array that can be written as a
    tensor with one more dimension, of bytes."""
    if isinstance(live, torch.Tensor):
        plain = live.layout is torch.strided and not is_lazy(live) and not live.is_meta
        return shards.local(live) if plain else None
    if type(live) is not np.ndarray or not live.flags.writeable:
        return None
    try:
        return torch.from_numpy(live[..., None].view(np.uint8))
    except (TypeError, ValueError):  # objects; negative strides; nothing in it
        return None


def _bytes(node: tree.Array, item: int) -> tree.Tensor:
    """The array as a tensor with one more dimension, of bytes."""
    strides = [item * step for step in _steps(node.shape, node.order)]
    return tree.Tensor([*node.shape, item], [*strides, 1], "uint8", 0, node.extent, node.offset)


def _steps(shape: list[int], order: str) -> list[int]:
    inner = 1
    steps: list[int] = []
    for size in reversed(shape) if order == "C" else shape:
        steps.append(inner)
        inner *= size
    return steps[::-1] if order == "C" else steps
