"""A checkpoint that a `Reader` has opened: what is in it, and reads of any part of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pccheck.state.extents import pack
from pccheck.state.shards import is_sharded
from pccheck_native import catalog
from pccheck_store.reading.state_reader import StateReader
from pccheck_wire import tree
from pccheck_wire.basics import Closing, did_you_mean
from pccheck_wire.blocks import Block, common
from pccheck_wire.errors import UsageError
from pccheck_wire.tree import Node

from .rebuild import Memory, flagged, numpy_dtype, state_of


class TensorInfo(NamedTuple):
    """A tensor or a NumPy array of a checkpoint, without its values."""

    shape: tuple[int, ...]  #: of what this rank has stored
    dtype: torch.dtype | np.dtype[Any]
    #: Of a DTensor the shape of the whole, and where this block begins; else `shape` and zeros.
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    #: Of a DTensor: sizes and names of its mesh, and its placements as torch writes them, "S(0)".
    mesh: tuple[int, ...] = ()
    mesh_names: tuple[str, ...] = ()
    placements: tuple[str, ...] = ()
    requires_grad: bool = False

    @property
    def is_shard(self) -> bool:
        """A rank's block of a DTensor; it may be the whole of it."""
        return bool(self.placements)


class Wanted(NamedTuple):
    """One read: see `OpenCheckpoint.read_into`."""

    path: str
    dest: torch.Tensor
    rank: int | None = None
    offsets: Sequence[int] | None = None


class OpenCheckpoint(Closing):
    """Made by `Reader.open`. Close it, or use it as a context manager. Thread-safe.

    Paths are those of `pccheckctl show`: `model.layers.0.weight`, `optimizer.state.0.exp_avg`; ""
    is the whole state. Where no rank is given, DTensors are whole ones, put together from the
    blocks of all ranks, and everything else is that of the first rank that has it.

    Every byte is checked. Reads raise DamagedError, UnreadableError, DaemonUnreachableError, and
    RecycledError when newer checkpoints have replaced this one."""

    def __init__(self, one: catalog.StoredCheckpoint, reader: StateReader) -> None:
        self.step = one.id.step
        self.sequence = one.id.sequence
        self.world_size = one.id.world_size
        self.incarnation = one.id.incarnation  #: of the start that saved it
        self.durable_at = one.wall_ns / 1e9  #: seconds since 1970
        self.ranks = tuple(reader.ranks)
        self._reader = reader
        self._pid = os.getpid()
        self._is_open = True
        self._lock = threading.RLock()
        self._trees: dict[int, tree.Tree] = {}
        self._nodes: dict[int, dict[str, Node]] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} step={self.step} ranks={len(self.ranks)}>"

    def close(self) -> None:
        """Ends the lease. May be called again."""
        with self._lock:
            self._is_open = False
            self._reader.close()

    # -- what is in it -------------------------------------------------------------------------

    @property
    def metadata(self) -> Any:
        """What `checkpoint(metadata=)` was given on the first rank."""
        return tree.plain(self._tree(self.ranks[0]).metadata)

    def describe(self, rank: int | None = None) -> Any:
        """The state of a rank (None: the first) as it was saved, with a TensorInfo in the place of
        every tensor and array. Reads no payload."""
        described = self._tree(self._checked(rank))
        return state_of(_Infos(described), described.root)

    def leaves(self, rank: int | None = None) -> dict[str, Any]:
        """`describe` as a flat dict by path, without empty containers."""
        infos = _Infos(self._tree(self._checked(rank)))
        containers = (tree.Mapping, tree.Sequence)
        return {
            path: state_of(infos, node)
            for path, node in self._paths(self._checked(rank)).items()
            if not isinstance(node, containers)
        }

    # -- reading -------------------------------------------------------------------------------

    def read(self, path: str = "", *, rank: int | None = None) -> Any:
        """The value at a path, in the structure that was saved; tensors are new, on the CPU. With
        `rank` it is exactly what that rank has stored: of DTensors a `pccheck.Shard`.

        Raises UsageError for a path that does not exist.
        """
        with self._lock:
            self._require_open()
            home, node = self._find(path, rank)
            blocks: set[int] = set()  # of DTensors: read with those of the other ranks
            if rank is None:
                blocks = {id(n.local) for _, n in tree.walk(node) if isinstance(n, tree.Shard)}
            wanted = tree.extents_of(node, without=blocks)
            memory = Memory(self._tree(home).extents, wanted)
            ranges = [pack(memory.ranges)]
            if rank is None:
                ranges += self._put_together(memory, path, node)
            self._reader.read_into(b"".join(ranges))
            return state_of(memory, node)

    def read_into(
        self,
        path: str,
        dest: torch.Tensor,
        *,
        rank: int | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        """Fills `dest`, a CPU tensor of any strides, with the block of `dest.shape` elements that
        begins at `offsets` (in elements, for each dimension; default: the beginning). Without
        `offsets` it must have the shape of the whole tensor. Little more than this block is read.

        With `rank` the block is one of what that rank has stored, else of the whole tensor. Raises
        UsageError for a path that is not that of a tensor, for another dtype, and for a block that
        does not lie in the tensor.
        """
        self.read_many([Wanted(path, dest, rank, offsets)])

    def read_many(self, wanted: Iterable[Wanted]) -> None:
        """`read_into` for many: what lies close together in the checkpoint is read at once."""
        with self._lock:
            self._require_open()
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            ranges: list[bytes] = []
            for one in wanted:
                by_rows = _memory_for(one)
                if by_rows is not one.dest:
                    copies.append((one.dest, by_rows))
                ranges.append(self._ranges(one._replace(dest=by_rows)))
            self._reader.read_into(b"".join(ranges))
            for dest, by_rows in copies:
                dest.detach().copy_(by_rows)

    def _ranges(self, wanted: Wanted) -> bytes:
        path, dest, rank, _ = wanted
        home, node = self._find(path, rank)
        if isinstance(node, tree.Shard) and rank is None:
            return self._reader.blocks.ranges(path, _block_in(wanted, node.shape, node.dtype))
        local = node.local if isinstance(node, tree.Shard) else node
        if not isinstance(local, tree.Tensor):
            raise UsageError(f"{path} is no tensor", hint="get it with read()")
        block = _block_in(wanted, local.shape, local.dtype)
        if local.extent < 0 or not dest.numel():
            return b""
        start = self._tree(home).extents[local.extent].offset + local.offset
        whole = local.shape
        stored = Block(start, whole, whole, [0] * len(whole), local.strides, local.dtype)
        return common(stored, block)[1]

    def _put_together(self, memory: Memory, path: str, node: Node) -> list[bytes]:
        """Makes whole tensors for the shards below a node; tied ones stay tied."""
        ranges: list[bytes] = []
        made: dict[object, torch.Tensor] = {}
        for where, shard in tree.walk(node, path):
            if not isinstance(shard, tree.Shard):
                continue
            local = shard.local
            place = (local.extent, local.offset, *local.strides, *shard.shape)
            if local.extent < 0 or place not in made:
                dtype = getattr(torch, shard.dtype)
                made[place] = flagged(torch.empty(shard.shape, dtype=dtype), local.flags)
                wanted = _block_in(Wanted(where, made[place].detach()), shard.shape, shard.dtype)
                ranges.append(self._reader.blocks.ranges(where, wanted))
            memory.shards[id(shard)] = made[place]
        return ranges

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"step {self.step} is closed", hint="read it before its Reader closes")
        if os.getpid() != self._pid:
            raise UsageError(
                f"step {self.step} was opened by pid {self._pid}, before this process was forked",
                hint="make a Reader in the process that reads",
            )

    # -- finding -------------------------------------------------------------------------------

    def _checked(self, rank: int | None) -> int:
        if rank is None:
            return self.ranks[0]
        if rank not in self.ranks:
            first, last = self.ranks[0], self.ranks[-1]
            raise UsageError(
                f"step {self.step} has no rank {rank}",
                hint=f"it was saved by rank {first}"
                if first == last
                else f"it was saved by ranks {first} to {last}",
            )
        return rank

    def _find(self, path: str, rank: int | None) -> tuple[int, Node]:
        """The node at a path, and the rank in whose tree it is."""
        for home in self.ranks if rank is None else (self._checked(rank),):
            paths = self._paths(home)
            if path in paths:
                return home, paths[path]
        near = did_you_mean([path], list(self._paths(self._checked(rank))))
        whose = "" if rank is None else f" of rank {rank}"
        raise UsageError(
            f"there is no {path!r} in step {self.step}{whose}", hint=f"{near}leaves() has all paths"
        )

    def _tree(self, rank: int) -> tree.Tree:
        with self._lock:
            if rank not in self._trees:
                self._require_open()
                self._trees[rank] = self._reader.of_rank(rank)
            return self._trees[rank]

    def _paths(self, rank: int) -> Mapping[str, Node]:
        with self._lock:
            if rank not in self._nodes:
                nodes = self._nodes[rank] = {}
                for path, node in tree.walk(self._tree(rank).root):
                    nodes.setdefault(path, node)  # a shard's memory has its path, too
            return self._nodes[rank]


class _Infos:
    """In place of `Memory`: gives descriptions instead of tensors and arrays."""

    def __init__(self, described: tree.Tree) -> None:
        shards = (node for _, node in tree.walk(described.root) if isinstance(node, tree.Shard))
        self.shards: dict[int, Any] = {
            id(shard): self.tensor(shard.local)._replace(
                whole_shape=tuple(shard.shape), offsets=tuple(shard.offsets),
                mesh=tuple(shard.mesh), mesh_names=tuple(shard.names),
                placements=tuple(shard.placements),
            )
            for shard in shards
        }  # fmt: skip

    def tensor(self, node: tree.Tensor, like: torch.Tensor | None = None) -> TensorInfo:
        shape, dtype = tuple(node.shape), getattr(torch, node.dtype)
        grad = bool(node.flags & tree.REQUIRES_GRAD)
        return TensorInfo(shape, dtype, shape, (0,) * len(shape), requires_grad=grad)

    def array(self, node: tree.Array) -> TensorInfo:
        shape = tuple(node.shape)
        return TensorInfo(shape, numpy_dtype(node.dtype), shape, (0,) * len(shape))


def _memory_for(wanted: Wanted) -> torch.Tensor:
    """The destination. If its rows are not contiguous, or if it is a conjugated view, new memory
    instead: otherwise each element would be a range of its own. Raises UsageError."""
    path, dest, _, _ = wanted
    if is_sharded(dest) or dest.layout is not torch.strided or dest.device.type != "cpu":
        raise UsageError(
            f"{path}: the destination is not a plain CPU tensor",
            hint="read into torch.empty(shape, dtype=dtype), then copy; of a DTensor give "
            "to_local() and the offsets of its block",
        )
    if any(size > 1 and not stride for size, stride in zip(dest.shape, dest.stride(), strict=True)):
        raise UsageError(f"{path}: elements of the destination share memory", hint="clone() it")
    apart = dest.dim() and dest.shape[-1] > 1 and dest.stride(-1) != 1
    if apart or dest.is_conj() or dest.is_neg():
        return torch.empty(dest.shape, dtype=dest.dtype)
    return dest


def _block_in(wanted: Wanted, whole: Sequence[int], dtype: str) -> Block:
    """The memory of `dest` as a block of a tensor. Raises UsageError when it does not fit."""
    path, dest, _, offsets = wanted
    if dest.dtype != getattr(torch, dtype):
        raise UsageError(
            f"{path} has dtype torch.{dtype}, and the destination {dest.dtype}",
            hint="read into a tensor of the same dtype, then convert",
        )
    begin = [0] * len(whole) if offsets is None else list(offsets)
    fits = len(begin) == len(whole) == dest.dim() and (
        list(dest.shape) == list(whole)
        if offsets is None
        else all(b >= 0 and b + d <= w for b, d, w in zip(begin, dest.shape, whole, strict=True))
    )
    if not fits:
        raise UsageError(
            f"{path} has shape {list(whole)}; the destination has {list(dest.shape)}"
            + ("" if offsets is None else f" from {begin} on"),
            hint="offsets= chooses a block of it, in elements",
        )
    return Block(dest.data_ptr(), whole, list(dest.shape), begin, dest.stride(), dtype)
