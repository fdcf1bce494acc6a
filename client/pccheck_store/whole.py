"""A checkpoint with what all of its ranks have stored: replicated state, of which each rank has a
part, and sharded tensors, of which each has a block."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from pccheck_native import catalog
from pccheck_wire import parts, tree
from pccheck_wire.blocks import Block, Blocks
from pccheck_wire.errors import NoCheckpointError

from .readers import Reader, RecycledError, Store
from .selection import contiguous_strides

SLICE_BYTES = 256 << 20
#: How often a running job may replace a checkpoint before it is open.
OPEN_ATTEMPTS = 8

_Opened = TypeVar("_Opened")


class Progress(Protocol):
    """A bar that counts bytes."""

    def advance(self, by: int) -> None: ...
    def spare(self, by: int) -> None:
        """This many bytes will not be read."""


class WholeReader(Reader):
    """Reads a checkpoint with the parts of all ranks of its world. `content` is the state of one
    rank: replicated state is put together from the parts of all ranks, and sharded tensors are made
    whole from their blocks. Long reads are cut, so that a bar moves during them."""

    def __init__(
        self,
        storage: Store,
        one: catalog.Checkpoint,
        stored: Iterable[catalog.Checkpoint],
        progress: Progress | None = None,
    ) -> None:
        """`stored` is what `one` was chosen from, with the parts that other ranks have of it: to
        look for a part later would not tell whether it was replaced since, or never there. Raises
        RecycledError."""
        self.checkpoint = one
        self._progress = progress
        self._parts = {part.rank: part for part in stored if part.held() == one.held()}
        self._readers = {one.rank: storage.reader(one)}
        self._saved: dict[int, tree.Tree] = {}
        self._whole: _WholeTensors | None = None

    @property
    def ranks(self) -> list[int]:
        """The ranks of the run that saved it. A rank that saved alone is the only one."""
        one = self.checkpoint
        return list(range(one.world_size)) if one.world_size > 1 else [one.rank]

    def content(self) -> tree.Tree:
        """The tree, with all extents' places. Raises StateMismatchError, NoCheckpointError."""
        rank = self.checkpoint.rank
        own = parts.merge(self._tree(rank), rank, self._tree)
        if not own.sharded():
            return own
        others = {other: self._tree(other) for other in self.ranks if other != rank}
        self._whole = _WholeTensors(own, others)
        whole = self._whole.content()
        if self._progress is not None:
            self._progress.spare(_payload_bytes(own) - _payload_bytes(whole))
        return whole

    def of_rank(self, rank: int) -> tree.Tree:
        """What a rank has saved, with the place of every extent: in the payloads of all ranks."""
        merged = parts.merge(self._tree(rank), rank, self._tree)
        extents = [
            one._replace(offset=parts.place(rank, one.offset))
            if parts.placed(one.offset)[0] < 0 else one
            for one in merged.extents
        ]  # fmt: skip
        return dataclasses.replace(merged, extents=extents)

    def blocks(self) -> Blocks:
        """The blocks of the tensors of all ranks, by path."""
        return Blocks({rank: self._tree(rank) for rank in self.ranks})

    def read_into(self, ranges: bytes) -> None:
        """Ranges in any order; their offsets are those of `of_rank`, `blocks` or `content`."""
        reads = [ranges] if self._whole is None else self._whole.divided(ranges)
        for some in reads:
            for piece, nbytes in cut(some, SLICE_BYTES):
                for rank, (mine, _) in parts.split(piece).items():
                    for _, _, near, _ in parts.spans(mine):
                        self._of(rank).read_into(near)
                if self._progress is not None:
                    self._progress.advance(nbytes)

    def close(self) -> None:
        for reader in reversed(self._readers.values()):
            reader.close()

    def _tree(self, rank: int) -> tree.Tree:
        if rank not in self._saved:
            self._saved[rank] = self._of(rank).content()
        return self._saved[rank]

    def _of(self, rank: int) -> Reader:
        one = self.checkpoint
        rank = one.rank if rank < 0 else rank
        if rank not in self._readers:
            if rank not in self._parts:
                raise NoCheckpointError(
                    f"rank {rank} stores a part of step {one.step}, and its volume is not in this "
                    "directory",
                    hint="copy the volumes of all ranks into one storage directory",
                )
            self._readers[rank] = self._readers[one.rank].beside(self._parts[rank])
        return self._readers[rank]


class _WholeTensors:
    """Gives every sharded tensor of a tree an extent of its own. No payload has this extent: reads
    of it become reads of the ranks' blocks."""

    def __init__(self, own: tree.Tree, others: dict[int, tree.Tree]) -> None:
        self._own = own
        self._blocks = Blocks({-1: own, **others})
        self._extents = list(own.extents)
        self._made: dict[int, tuple[str, Block]] = {}  # by their offset
        self._tied: dict[object, int] = {}
        self._end = 0

    def content(self) -> tree.Tree:
        root = self._node(self._own.root, "")
        kept = tree.extents_of(root)
        for index, extent in enumerate(self._extents):
            if index not in kept:
                self._extents[index] = extent._replace(nbytes=0)
        return dataclasses.replace(self._own, root=root, extents=self._extents)

    def divided(self, ranges: bytes) -> list[bytes]:
        """The ranges that are in a payload, then for each whole tensor those of its blocks."""
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
        strides = list(contiguous_strides(node.shape))
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


def open_chosen(
    store: Store,
    choose: Callable[[], Sequence[catalog.Checkpoint]],
    use: Callable[[WholeReader], _Opened],
) -> _Opened:
    """What `use` makes of a reader of the checkpoint of which `choose` returns the parts, and which
    is read as the first of them. Chooses again when the job has replaced that one meanwhile; raises
    RecycledError when it does so again and again."""
    left = OPEN_ATTEMPTS
    while True:
        chosen, left = choose(), left - 1
        try:
            reader = WholeReader(store, chosen[0], chosen)
            try:
                return use(reader)
            except BaseException:
                reader.close()
                raise
        except RecycledError:
            if not left:
                raise
