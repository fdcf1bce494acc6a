"""Attached dicts: their items go back into the same dicts and lists, and into the tensors and
arrays that have the saved shape and dtype.

These tensors may be in other hands: a module's parameters (`{"weights": model.state_dict()}`), or
in an optimizer. What shares memory now must have shared it when it was saved.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from pccheck.state import shards
from pccheck.state.attaching import Values
from pccheck.state.flatten import SEQUENCES
from pccheck.state.gating import storage_of, trained_by
from pccheck_wire import tree
from pccheck_wire.errors import StateMismatchError

from . import overlaps
from .loaders import is_loader
from .pairing import mapping
from .rebuild import Memory, numpy_dtype, state_of
from .targets import Stage, Targets

_Maker: TypeAlias = Callable[[Memory], Any]
_PARTS = (tree.Sequence, tree.Mapping, tree.Tensor, tree.Array, tree.Shard)


class Dicts:
    """The attached dicts of one restore."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._placed: dict[str, dict[Any, Any]] = {}
        self._seen: dict[int, tuple[str, tree.Node]] = {}  # what goes into a list or dict

    def place(self, name: str, node: tree.Node, live: dict[Any, Any]) -> None:
        """Finds a place for its values. Raises StateMismatchError by path."""
        mapping(node, name)
        make = self._value(name, node, live)
        has_tensors = bool(tree.extents_of(node))
        self._targets.then(Stage.STATES if has_tensors else Stage.OBJECTS, make)
        self._targets.want(node)
        self._placed[name] = live

    def settle(
        self, attached: Mapping[str, Any], restored: Collection[str], saved: Mapping[str, tree.Node]
    ) -> None:
        """When all that is restored has its place. Raises StateMismatchError by path when a tensor
        shares memory with another attached one and did not when it was saved, or is trained and
        gets no value."""
        held = [
            pair for name, thing in (attached.items() if self._placed else ())
            if name in saved and not (thing is True or is_loader(thing))
            if not isinstance(thing, Values)
            for pair in _in_state_of(name, saved[name], thing, name in restored)
        ]  # fmt: skip
        self._targets.settle(held)
        loaded = [*self._targets.lives, *(pair.live for pair in held)]
        for name, live in self._placed.items():
            _require_trained(name, live, attached, loaded)

    def _value(self, path: str, node: tree.Node, live: object) -> _Maker:
        """What makes the value of the node, in what has its place now."""
        if isinstance(node, tree.Mapping) and isinstance(live, dict):
            return self._mapping(path, node, live)
        if isinstance(node, tree.Sequence) and isinstance(live, (list, tuple)):
            return self._sequence(path, node, live)
        if self._fill(path, node, live):
            return lambda memory: live
        beside = _memory(live)  # a new tensor goes to the GPU of the one in its place
        return lambda memory: state_of(memory, node, beside)

    def _mapping(self, path: str, node: tree.Mapping, live: dict[Any, Any]) -> _Maker:
        self._require_one(path, live, node)
        items = [(tree.plain(key), item) for key, item in node.items]
        makers = {k: self._value(tree.join(path, k), item, live.get(k)) for k, item in items}

        def make(memory: Memory) -> object:
            made = {key: one(memory) for key, one in makers.items()}
            live.clear()
            live.update(made)
            return live

        return make

    def _sequence(self, path: str, node: tree.Sequence, live: Sequence[Any]) -> _Maker:
        if not any(isinstance(item, _PARTS) for item in node.items):  # often long
            makers: list[_Maker] = []
        else:
            now = [*live, *[None] * (len(node.items) - len(live))]
            both = enumerate(zip(node.items, now, strict=False))
            makers = [self._value(tree.join(path, at), item, old) for at, (item, old) in both]
        if isinstance(live, list):
            self._require_one(path, live, node)

        def make(memory: Memory) -> object:
            items = [one(memory) for one in makers]
            made = SEQUENCES[node.tag](items) if makers else state_of(memory, node)
            if not (isinstance(live, list) and isinstance(made, list)):
                return made
            live[:] = made
            return live

        return make

    def _require_one(self, path: str, live: object, node: tree.Node) -> None:
        """Raises StateMismatchError for a list or dict that is there twice and gets two values."""
        first_path, first = self._seen.setdefault(id(live), (path, node))
        if first is not node and tree.encode_node(first) != tree.encode_node(node):
            raise StateMismatchError(
                f"{path} and {first_path} are one {type(live).__name__}, and the checkpoint has "
                "different values for the two",
                hint="give each name its own list or dict (copy.copy()), or take what you need "
                "from recover()",
            )

    def _fill(self, path: str, node: tree.Node, live: object) -> bool:
        """Whether what is there takes the value. Raises StateMismatchError for another DTensor."""
        for below, shard in tree.walk(node, path):
            if isinstance(shard, tree.Shard) and shard.mesh:  # others were no DTensors
                self._targets.shard(below, shard, live if shard is node else None, of_dict=True)
                return True
        pair = _pair(path, node, live)
        if pair is not None:
            self._targets.of_dict(pair, node)
        return pair is not None


def trained(attached: Mapping[str, Any]) -> set[int]:
    """The memory that attached optimizers train."""
    optimizers = [one for one in attached.values() if isinstance(one, torch.optim.Optimizer)]
    return {storage_of(tensor) for one in optimizers for tensor in trained_by(one)} - {0}


def _require_trained(
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


def _in_state_of(
    name: str, saved: tree.Node, thing: Any, restored: bool
) -> Iterator[overlaps.Pair]:
    """The tensors and arrays in the state of something attached, with what the checkpoint has for
    them; all of them when it is not restored, since then they keep their values."""
    nodes: dict[str, tree.Node] = {}
    for path, node in tree.walk(saved, name) if restored else ():
        nodes.setdefault(path, node)  # a shard comes before its local part
    for path, live in leaves(thing.state_dict(), name):
        memory, saved_as = _memory(live), nodes.get(path)
        sharded = isinstance(saved_as, tree.Shard) or shards.is_sharded(live)
        if memory is None or (restored and (path not in nodes or sharded)):  # has its target
            continue
        unknown = tree.Tensor([], [], "uint8", extent=overlaps.NO_EXTENT)
        yield _pair(path, saved_as, live) or overlaps.Pair(path, unknown, memory)


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
    """What can be filled: a tensor or its local part; a writeable array, as a tensor of bytes."""
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
    sizes = node.shape[::-1] if node.order == "C" else node.shape
    steps = list(itertools.accumulate(sizes, operator.mul, initial=item))[:-1]
    strides = steps[::-1] if node.order == "C" else steps
    return tree.Tensor([*node.shape, item], [*strides, 1], "uint8", 0, node.extent, node.offset)
