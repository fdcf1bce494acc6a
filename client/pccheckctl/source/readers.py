"""Reads one checkpoint: its tree and its bytes, checked on the way. The same for `show`, `recover`
and `verify`, and for bytes from the file and from the daemon."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from pccheck_native import _core, catalog
from pccheck_native.subset import Subset, verify_part
from pccheck_wire import parts, tree
from pccheck_wire.blocks import Block, Blocks
from pccheck_wire.errors import (
    DamagedError,
    NoCheckpointError,
    PccheckError,
    UnreadableError,
)
from pccheckctl.output.progress import Bar

SLICE_BYTES = 256 << 20


class RecycledError(PccheckError):
    """A running daemon wrote a newer checkpoint into this slot during the read."""

    code = "RECYCLED"
    default_retryable = True


class Reader:
    """Checked reads of one checkpoint. Use it as a context manager."""

    checkpoint: catalog.Checkpoint
    tree_place: tuple[int, int]  #: offset and bytes of the tree in the payload

    def read_into(self, ranges: bytes) -> None:
        """Packed (address, offset, length), ascending. Raises DamagedError, UnreadableError,
        RecycledError."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def read(self, offset: int, length: int) -> bytes:
        made = (ctypes.c_char * length)()
        self.read_into(struct.pack("<QQQ", ctypes.addressof(made), offset, length))
        return bytes(made)

    def content(self) -> tree.Tree:
        return tree.decode(self.read(*self.tree_place), self.checkpoint.payload_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def invalid(one: catalog.Checkpoint, problem: str) -> DamagedError | UnreadableError:
    """UNREADABLE: the disk failed to read it; every other problem is damage."""
    named = f"the checkpoint of step {one.step} (sequence {one.sequence}, rank {one.rank})"
    if problem == "UNREADABLE":
        return UnreadableError(
            f"{named} could not be read: the disk reported an error",
            hint="see the log of the kernel (dmesg), then try again",
        )
    hint = "recover takes the previous valid checkpoint; check the disk (dmesg)"
    return DamagedError(f"{named} is damaged: {problem}", hint=hint)


class Store(Protocol):
    """Where checkpoints are: in a storage directory, or behind a daemon."""

    path: Path
    served: bool  #: by a daemon, ...
    socket: str | None  #: ... at this socket; None: the default one

    def scan(
        self, *, uid: int | None = None, job: str = "", rank: int | None = None
    ) -> catalog.Catalog: ...
    def reader(self, checkpoint: catalog.Checkpoint) -> Reader: ...
    def verify(self, checkpoint: catalog.Checkpoint, part: Subset | None) -> tuple[int, bool]:
        """Reads and checks it, or a part of it. Returns how many bytes that were, and whether the
        flag that it is damaged was removed. Raises as `Reader.read_into` does."""


class FileReader(Reader):
    """Reads from the volume file."""

    def __init__(self, checkpoint: catalog.Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.tree_place = checkpoint.tree_offset, checkpoint.tree_bytes
        try:
            self._volume = _core.Volume(checkpoint.volume_path, writable=False, allow_buffered=True)
        except FileNotFoundError as error:
            raise recycled(checkpoint) from error
        except _core.NativeError as error:
            raise DamagedError(f"{checkpoint.volume_path}: {error}") from error

    def read(self, offset: int, length: int) -> bytes:
        """Reads no block around them: damage of another one does not hide the tree."""
        with self._errors():
            return self._volume.read(self.checkpoint.sequence, offset, length)

    def read_into(self, ranges: bytes) -> None:
        with self._errors():
            self._volume.read_into(self.checkpoint.sequence, ranges)

    def verify(self, part: Subset | None) -> int:
        """Reads and checks the payload, or a part of it, and the tree; how many bytes."""
        self.content()
        with self._errors():
            if part is not None:
                return verify_part(self._volume, self.checkpoint, part)
            self._volume.verify(self.checkpoint.sequence)
            return self.checkpoint.payload_bytes

    def close(self) -> None:
        self._volume.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Says what is wrong, unless a newer checkpoint has taken the slot meanwhile."""
        try:
            yield
        except (_core.NativeError, OSError) as error:
            if not _still_there(self.checkpoint):
                raise recycled(self.checkpoint) from error
            failed = not isinstance(error, _core.NativeError) or error.code_name == "UNREADABLE"
            why = "UNREADABLE" if failed else str(error).removesuffix(": damaged (DAMAGED)")
            raise invalid(self.checkpoint, why) from error


class WholeReader(Reader):
    """A checkpoint with what other ranks store of it: their parts of replicated state, and their
    blocks of sharded tensors, of which it makes whole ones. Long reads are cut, so that the bar
    moves during them."""

    def __init__(self, storage: Store, one: catalog.Checkpoint, bar: Bar) -> None:
        self.checkpoint = one
        self._storage = storage
        self._bar = bar
        self._readers = {one.rank: storage.reader(one)}
        self._whole: _WholeTensors | None = None

    def content(self) -> tree.Tree:
        """With the place of every extent. Raises StateMismatchError, NoCheckpointError."""
        rank = self.checkpoint.rank
        own = self._of(rank).content()
        own = parts.merge(own, rank, lambda other: self._of(other).content())
        if not own.sharded():
            return own
        ranks = range(self.checkpoint.world_size)
        others = {other: self._of(other).content() for other in ranks if other != rank}
        self._whole = _WholeTensors(own, others)
        whole = self._whole.content()
        self._bar.spare(_payload_bytes(own) - _payload_bytes(whole))
        return whole

    def read_into(self, ranges: bytes) -> None:
        reads = [ranges] if self._whole is None else self._whole.divided(ranges)
        for some in reads:
            for piece, nbytes in cut(some, SLICE_BYTES):
                for rank, (mine, _) in parts.split(piece).items():
                    self._of(rank).read_into(mine)
                self._bar.advance(nbytes)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _of(self, rank: int) -> Reader:
        one = self.checkpoint
        rank = one.rank if rank < 0 else rank
        if rank not in self._readers:
            found = self._storage.scan(uid=one.uid, job=one.job)
            same = [c for c in found.checkpoints if (c.rank, c.sequence) == (rank, one.sequence)]
            if not same:
                raise NoCheckpointError(
                    f"rank {rank} stores a part of step {one.step}, and its volume is not in this "
                    "directory",
                    hint="copy the volumes of all ranks into one storage directory",
                )
            self._readers[rank] = self._storage.reader(same[0])
        return self._readers[rank]


class _WholeTensors:
    """Gives every sharded tensor of a tree an extent of its own, which no payload has: its ranges
    are those of the ranks' blocks."""

    def __init__(self, own: tree.Tree, others: dict[int, tree.Tree]) -> None:
        self._own = own
        self._blocks = Blocks({-1: own, **others})
        self._extents = list(own.extents)
        self._made: dict[int, tuple[str, Block]] = {}  # by their offset
        self._tied: dict[object, int] = {}
        self._end = 0

    def content(self) -> tree.Tree:
        root = self._node(self._own.root, "")
        nodes = (node for _, node in tree.walk(root))
        kept = {node.extent for node in nodes if isinstance(node, (tree.Tensor, tree.Array))}
        for index, extent in enumerate(self._extents):
            if index not in kept:
                self._extents[index] = extent._replace(nbytes=0)
        return dataclasses.replace(self._own, root=root, extents=self._extents)

    def divided(self, ranges: bytes) -> list[bytes]:
        """What is read as it is, then for each whole tensor where its blocks are."""
        plain: list[bytes] = []
        whole: list[bytes] = []
        for address, offset, nbytes in struct.iter_unpack("<QQQ", ranges):
            if offset in self._made:
                path, wanted = self._made[offset]
                whole.append(self._blocks.ranges(path, wanted._replace(start=address)))
            else:
                plain.append(struct.pack("<QQQ", address, offset, nbytes))
        return [b"".join(plain), *whole]

    def _node(self, node: tree.Node, path: str) -> tree.Node:
        if isinstance(node, tree.Shard):
            return self._tensor(node, path)
        if isinstance(node, tree.Sequence):
            items = enumerate(node.items)
            return tree.Sequence(
                node.tag, [self._node(item, tree.join(path, index)) for index, item in items]
            )
        if isinstance(node, tree.Mapping):
            pairs = [
                (key, self._node(value, tree.join(path, tree.plain(key))))
                for key, value in node.items
            ]
            return dataclasses.replace(node, items=pairs)
        return node

    def _tensor(self, node: tree.Shard, path: str) -> tree.Tensor:
        local = node.local
        strides = [math.prod(node.shape[at + 1 :]) for at in range(len(node.shape))]
        made = tree.Tensor(node.shape, strides, local.dtype, local.flags)
        nbytes = math.prod(node.shape) * tree.ITEM_BYTES[local.dtype]
        if not nbytes:
            return made
        place = local.extent, local.offset, *local.strides, *node.shape
        tied = self._tied.get(place) if local.extent >= 0 else None
        if tied is None:
            tied = len(self._extents)
            self._tied[place] = tied
            offset = parts.place(parts.RANKS_MAX, self._end)
            self._end += nbytes
            wanted = Block(0, node.shape, node.shape, [0] * len(strides), strides, local.dtype)
            self._made[offset] = path, wanted
            self._extents.append(tree.Extent(offset, nbytes))
        made.extent = tied
        return made


def _payload_bytes(content: tree.Tree) -> int:
    return sum(extent.nbytes for extent in content.extents)


def cut(ranges: bytes, at_most: int) -> Iterator[tuple[bytes, int]]:
    """Packed ranges (address, offset, length) in pieces of limited size, and their bytes."""
    piece, held = [], 0
    for address, offset, length in struct.iter_unpack("<QQQ", ranges):
        while length:
            taken = min(length, at_most - held)
            piece.append(struct.pack("<QQQ", address, offset, taken))
            held += taken
            address, offset, length = address + taken, offset + taken, length - taken
            if held == at_most:
                yield b"".join(piece), held
                piece, held = [], 0
    if piece:
        yield b"".join(piece), held


def recycled(one: catalog.Checkpoint) -> RecycledError:
    return RecycledError(
        f"the checkpoint of step {one.step} (sequence {one.sequence}) was replaced by a newer one",
        hint="try again",
    )


def _still_there(one: catalog.Checkpoint) -> bool:
    try:
        volume = _core.Volume(one.volume_path, writable=False, allow_buffered=True)
    except FileNotFoundError:
        return False
    except (OSError, _core.NativeError):
        return True
    try:
        return any(entry.sequence == one.sequence for entry in volume.table())
    finally:
        volume.close()
