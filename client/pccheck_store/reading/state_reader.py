"""Reads the state of a checkpoint from what all of its ranks have stored: of replicated state each
rank has a part, and of sharded tensors a block."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from pccheck_native import catalog
from pccheck_wire import parts, tree
from pccheck_wire.basics import Closing
from pccheck_wire.blocks import Blocks
from pccheck_wire.errors import NoCheckpointError, PccheckError

from .errors import PartUnreachableError, RecycledError
from .source import Payloads, Source
from .whole import WholeTensors

SLICE_BYTES = 256 << 20
#: How often a running job may replace a checkpoint before it is open.
OPEN_ATTEMPTS = 8

_Opened = TypeVar("_Opened")


class ReadProgress(Protocol):
    """A bar that counts bytes."""

    def advance(self, by: int) -> None: ...
    def spare(self, by: int) -> None:
        """This many bytes will not be read."""


class StateReader(Closing):
    """Reads the payloads of all ranks as if they were one. Offsets of ranges are those of the trees
    that its methods return. Use it as a context manager. Raises as `Payloads` does."""

    def __init__(
        self,
        payloads: Payloads,
        rank: int,
        ranks: Sequence[int],
        progress: ReadProgress | None = None,
    ) -> None:
        """`rank`: whose state is read; `ranks`: those that have stored a part of the checkpoint."""
        self.rank = rank
        self.ranks = ranks
        self._payloads = payloads
        self._progress = progress
        self._trees: dict[int, tree.Tree] = {}
        self._whole: WholeTensors | None = None

    @property
    def reaches_gpus(self) -> bool:
        """Whether `read_into` takes device ranges."""
        return self._payloads.reaches_gpus

    def close(self) -> None:
        self._payloads.close()

    def stored(self, rank: int) -> tree.Tree:
        """What a rank has stored itself."""
        if rank not in self._trees:
            self._trees[rank] = self._payloads.tree(rank)
        return self._trees[rank]

    def others(self) -> dict[int, tree.Tree]:
        """What the other ranks have stored."""
        return {rank: self.stored(rank) for rank in self.ranks if rank != self.rank}

    def _others_here(self) -> tuple[dict[int, tree.Tree], PccheckError | None]:
        """The trees of `others()` that can be read, and why a tree cannot be; None: all can. Some
        ranks may hold all blocks: with replicated=True those of one node do."""
        found, lacking = dict[int, tree.Tree](), None
        for rank in self.ranks:
            try:
                if rank != self.rank:
                    found[rank] = self.stored(rank)
            except (NoCheckpointError, PartUnreachableError) as error:
                lacking = error
        return found, lacking

    def merged(self) -> tree.Tree:
        """The tree, with the places of what other ranks store. Raises StateMismatchError."""
        return parts.merge(self.stored(self.rank), self.rank, self.stored)

    def content(self) -> tree.Tree:
        """The same, and sharded tensors are made whole from their blocks."""
        own = self.merged()
        if not own.sharded():
            return own
        others, lacking = self._others_here()
        self._whole = WholeTensors(own, others)
        whole = self._whole.content()
        if lacking is not None and not self._whole.is_complete():
            raise lacking
        if self._progress is not None:
            self._progress.spare(_payload_bytes(own) - _payload_bytes(whole))
        return whole

    def of_rank(self, rank: int) -> tree.Tree:
        """What a rank has saved, with the place of every extent: in the payloads of all ranks."""
        merged = parts.merge(self.stored(rank), rank, self.stored)
        extents = [
            one._replace(offset=parts.place(rank, one.offset))
            if parts.placed(one.offset)[0] < 0 else one
            for one in merged.extents
        ]  # fmt: skip
        return dataclasses.replace(merged, extents=extents)

    @functools.cached_property
    def blocks(self) -> Blocks:
        """The blocks of the tensors of all ranks, by path."""
        return Blocks({rank: self.stored(rank) for rank in self.ranks})

    def read_into(self, ranges: bytes, device_ranges: bytes = b"") -> None:
        """Fills packed ranges of memory (address, offset, length), in any order, and those of GPUs.
        What lies close together is read at once; long gaps are not read."""
        if self._whole is None and self._progress is None:
            self._read(ranges, device_ranges)
            return
        for some in [ranges] if self._whole is None else self._whole.divided(ranges):
            for piece, nbytes in cut(some, SLICE_BYTES):  # so that a bar moves during long reads
                self._read(piece)
                if self._progress is not None:
                    self._progress.advance(nbytes)

    def _read(self, ranges: bytes, device_ranges: bytes = b"") -> None:
        for rank, (host, gpus) in sorted(parts.split(ranges, device_ranges).items()):
            whose = self.rank if rank < 0 else rank
            for offset, length, near, near_gpus in parts.spans(host, gpus):
                self._payloads.read_into(whose, offset, length, near, near_gpus)


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


def open_state(
    source: Source,
    one: catalog.StoredCheckpoint,
    stored: Iterable[catalog.StoredCheckpoint],
    progress: ReadProgress | None = None,
    *,
    partial: bool = False,
) -> StateReader:
    """Opens what the ranks have of a checkpoint; `partial`: some of them. `stored` is what `one`
    was chosen from: to look for a part later would not tell whether it was replaced since, or never
    there. Raises RecycledError."""
    others = (part for part in stored if part.held() == one.held() and part.id.rank != one.id.rank)
    found = [one, *others]
    ranks = sorted(part.id.rank for part in found)
    if one.id.world_size > 1 and not partial:  # else a rank that saved alone is the only one
        ranks = [*range(one.id.world_size)]
    return StateReader(source.open(found), one.id.rank, ranks, progress)


def open_chosen(
    source: Source,
    choose: Callable[[], Sequence[catalog.StoredCheckpoint]],
    use: Callable[[catalog.StoredCheckpoint, StateReader], _Opened],
    *,
    partial: bool = False,
) -> _Opened:
    """What `use` makes of a reader of the checkpoint of which `choose` returns the parts, and which
    is read as the first of them. Chooses again when the job has replaced that one meanwhile; raises
    RecycledError when it does so again and again."""
    left = OPEN_ATTEMPTS
    while True:
        chosen, left = choose(), left - 1
        try:
            reader = open_state(source, chosen[0], chosen, partial=partial)
            try:
                return use(chosen[0], reader)
            except BaseException:
                reader.close()
                raise
        except RecycledError:
            if not left:
                raise
