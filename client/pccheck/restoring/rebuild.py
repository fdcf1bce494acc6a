"""A tree and its payload -> the state that was saved.

Memory is allocated first and the payload is loaded straight into it: `Memory.ranges`, packed, is
what `Client.load_start` and `Volume.read_into` take.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from pccheck.state.extents import Range, pack
from pccheck.state.flatten import SEQUENCES
from pccheck.state.shards import Shard
from pccheck_wire import tree
from pccheck_wire.errors import DamagedError
from pccheck_wire.tree import ITEM_BYTES, Node, Tag


class Loader(Protocol):
    """Fills packed ranges of host memory, and of device memory, from the payload."""

    def __call__(self, ranges: bytes, device_ranges: bytes = b"") -> None: ...


class TreeValues(Protocol):
    """What stands for the tensors and arrays of a tree; `shards` by the identity of the node."""

    shards: dict[int, Any]

    def tensor(self, node: tree.Tensor, like: torch.Tensor | None = None) -> Any: ...
    def array(self, node: tree.Array) -> Any: ...


class Memory:
    """One storage on the CPU for each wanted extent. `make` says where the others' bytes are."""

    def __init__(
        self,
        extents: list[tree.Extent],
        wanted: set[int] | None = None,
        make: Callable[[int], torch.UntypedStorage] | None = None,
    ) -> None:
        self._extents = extents
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        #: DTensors that hold the shards of the tree, by the identity of the node.
        self.shards: dict[int, Any] = {}
        for index, extent in enumerate(extents):
            if wanted is None or index in wanted:
                self._storages[index] = (make or _storage)(extent.lead + extent.nbytes)

    @property
    def ranges(self) -> list[Range]:
        """Where the bytes of every extent go."""
        return [
            Range(
                storage.data_ptr() + self._extents[index].lead,
                self._extents[index].offset,
                self._extents[index].nbytes,
            )
            for index, storage in self._storages.items()
        ]

    def tensor(self, node: tree.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor on the node's extent; a copy on the device of `like` when it lay on a GPU."""
        dtype = getattr(torch, node.dtype)
        storage, first = _storage(0), 0
        if node.extent >= 0:
            storage = self._storages[node.extent]
            first = (self._extents[node.extent].lead + node.offset) // ITEM_BYTES[node.dtype]
        made = torch.empty(0, dtype=dtype, device="cpu").set_(
            storage, first, node.shape, node.strides
        )
        if like is not None and node.flags & tree.ON_DEVICE:
            made = made.to(like.device)
        return flagged(made, node.flags)

    def array(self, node: tree.Array) -> np.ndarray[Any, Any]:
        """An array on the node's extent."""
        dtype = numpy_dtype(node.dtype)
        order: Any = node.order
        if math.prod(node.shape) * dtype.itemsize != node.nbytes:
            raise DamagedError(f"an array of {node.nbytes} bytes with shape {node.shape}")
        if node.extent < 0:
            return np.empty(node.shape, dtype, order)
        if node.extent not in self._arrays:
            base = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self._storages[node.extent])
            self._arrays[node.extent] = base.numpy()
        first = self._extents[node.extent].lead + node.offset
        return np.ndarray(node.shape, dtype, self._arrays[node.extent], first, order=order)


def _storage(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]


def flagged(made: torch.Tensor, flags: int) -> torch.Tensor:
    """What it was: a parameter, a buffer, something with a gradient."""
    wants_grad = bool(flags & tree.REQUIRES_GRAD)
    if flags & tree.PARAMETER:
        return torch.nn.Parameter(made, requires_grad=wants_grad)
    if flags & tree.BUFFER and hasattr(torch.nn, "Buffer"):
        made = torch.nn.Buffer(made)
    return made.requires_grad_(wants_grad)


def state_of(memory: TreeValues, node: Node, like: torch.Tensor | None = None) -> Any:
    """The value of a node. With `like` tensors that were on a GPU go to its device."""
    if isinstance(node, tree.Tensor):
        return memory.tensor(node, like)
    if isinstance(node, tree.Shard):
        if id(node) in memory.shards:
            return memory.shards[id(node)]
        return Shard(memory.tensor(node.local, like), tuple(node.shape), tuple(node.offsets))
    if isinstance(node, tree.Sequence):
        return SEQUENCES[node.tag]([state_of(memory, item, like) for item in node.items])
    if isinstance(node, tree.Mapping):
        return _mapping(memory, node, like)
    if isinstance(node, tree.Array):
        return memory.array(node)
    if isinstance(node, tree.Scalar):
        return scalar(node)
    if isinstance(node, tree.Named):
        return _named(node)
    return node


def state_of_tree(described: tree.Tree, load: Callable[[bytes], None]) -> Any:
    """Allocates everything on the CPU, has `load` fill the packed ranges; returns the state."""
    memory = Memory(described.extents)
    load(pack(memory.ranges))
    return state_of(memory, described.root)


def _mapping(memory: TreeValues, node: tree.Mapping, like: torch.Tensor | None) -> Any:
    made: Any = {}
    if node.tag is Tag.DEFAULT:
        made = collections.defaultdict(tree.FACTORIES[node.factory])
    elif node.tag is Tag.ORDERED:
        made = collections.OrderedDict()
    elif node.tag is Tag.COUNTER:
        made = collections.Counter()
    for key, value in node.items:
        made[state_of(memory, key)] = state_of(memory, value, like)
    if node.tag is Tag.ORDERED and node.attributes is not None:
        made._metadata = state_of(memory, node.attributes)
    return made


def _named(node: tree.Named) -> object:
    if node.tag is Tag.DTYPE:
        return getattr(torch, node.name)
    try:
        return torch.device(node.name)
    except RuntimeError as error:
        raise DamagedError(f"the device {node.name[:40]!r} is not known") from error


def scalar(node: tree.Scalar) -> Any:
    """NumPy's scalar. Raises DamagedError for a dtype that is never stored."""
    dtype = numpy_dtype(node.dtype)
    if len(node.data) != dtype.itemsize:
        raise DamagedError(f"a NumPy scalar of dtype {node.dtype} with {len(node.data)} bytes")
    if dtype.itemsize == 0:
        return dtype.type()
    return np.frombuffer(node.data, dtype)[0]


def numpy_dtype(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError) as error:
        raise DamagedError(f"the NumPy dtype {text[:40]!r} is not known") from error
    if dtype.hasobject or dtype.fields:
        raise DamagedError(f"the NumPy dtype {text[:40]!r} cannot be stored")
    return dtype
