"""Reading one checkpoint: its tree and its bytes, checked on the way. One code path for `show`,
`recover` and `verify`, whether the bytes come from the file or through the daemon."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from pccheck_native import _core, catalog
from pccheck_native.subset import Subset, verify_part
from pccheck_wire import parts, tree
from pccheck_wire.errors import (
    DamagedError,
    NoCheckpointError,
    PccheckError,
    UnreadableError,
)
from pccheckctl.output.progress import Bar

SLICE_BYTES = 256 << 20


class RecycledError(PccheckError):
    """A running daemon wrote a newer checkpoint into this slot while we read it."""

    code = "RECYCLED"
    default_retryable = True


class Reader(Protocol):
    """Checked reads of one checkpoint."""

    checkpoint: catalog.Checkpoint

    @property
    def tree_place(self) -> tuple[int, int]:
        """Offset and bytes of the tree in the payload."""
        ...

    def read(self, offset: int, length: int) -> bytes: ...
    def read_into(self, ranges: bytes) -> None: ...
    def verify(self, part: Subset | None = None) -> int:
        """Reads and checks everything, or a part; how many bytes. Raises DamagedError,
        UnreadableError."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def invalid(one: catalog.Checkpoint, problem: str) -> DamagedError | UnreadableError:
    """What is wrong with a checkpoint: UNREADABLE is a disk that does not give it, all else is
    damage."""
    named = f"the checkpoint of step {one.step} (sequence {one.sequence}, rank {one.rank})"
    if problem == "UNREADABLE":
        return UnreadableError(
            f"{named} could not be read from the disk",
            hint="look at the kernel's log: dmesg; try again",
        )
    return DamagedError(f"{named} is damaged: {problem}")


def read_tree(reader: Reader) -> tree.Tree:
    """The decoded tree of a checkpoint. Raises DamagedError, UnreadableError."""
    return tree.decode(reader.read(*reader.tree_place), reader.checkpoint.payload_bytes)


class Store(Protocol):
    """Where checkpoints are: a storage directory, or what the daemon shows of it."""

    path: Path
    served: bool  #: a daemon has named it, at
    socket: str | None  #: (None: where daemons are by default)

    def scan(
        self, *, uid: int | None = None, job: str = "", rank: int | None = None
    ) -> catalog.Catalog: ...
    def reader(self, checkpoint: catalog.Checkpoint) -> Reader: ...


class FileReader(Reader):
    """Reads from the volume file."""

    def __init__(self, checkpoint: catalog.Checkpoint) -> None:
        self.checkpoint = checkpoint
        try:
            self._volume = _core.Volume(checkpoint.volume_path, writable=False, allow_buffered=True)
        except FileNotFoundError as error:
            raise recycled(checkpoint) from error
        except _core.NativeError as error:
            raise DamagedError(f"{checkpoint.volume_path}: {error}") from error

    @property
    def tree_place(self) -> tuple[int, int]:
        return self.checkpoint.tree_offset, self.checkpoint.tree_bytes

    def read(self, offset: int, length: int) -> bytes:
        try:
            return self._volume.read(self.checkpoint.sequence, offset, length)
        except (_core.NativeError, OSError) as error:
            raise self._told(error) from error

    def read_into(self, ranges: bytes) -> None:
        try:
            self._volume.read_into(self.checkpoint.sequence, ranges)
        except (_core.NativeError, OSError) as error:
            raise self._told(error) from error

    def verify(self, part: Subset | None = None) -> int:
        try:
            if part is not None:
                return verify_part(self._volume, self.checkpoint, part)
            self._volume.verify(self.checkpoint.sequence)
            return self.checkpoint.payload_bytes
        except (_core.NativeError, OSError) as error:
            raise self._told(error) from error

    def close(self) -> None:
        self._volume.close()

    def _told(self, error: BaseException) -> PccheckError:
        """What is wrong, unless the slot was given to a newer checkpoint meanwhile."""
        one = self.checkpoint
        if not _still_there(one):
            return recycled(one)
        cannot = isinstance(error, OSError) or (
            isinstance(error, _core.NativeError) and error.code_name == "UNREADABLE"
        )
        why = "UNREADABLE" if cannot else str(error).removesuffix(": damaged (DAMAGED)")
        return invalid(one, why)


class WholeReader(Reader):
    """A checkpoint of replicated state: its own rank's payload, and what others store for it."""

    def __init__(self, storage: Store, own: Reader) -> None:
        self.checkpoint = own.checkpoint
        self._storage = storage
        self._readers = {own.checkpoint.rank: own}

    @property
    def tree_place(self) -> tuple[int, int]:
        return self._readers[self.checkpoint.rank].tree_place

    def tree(self) -> tree.Tree:
        """With the place of every extent. Raises StateMismatchError, NoCheckpointError."""
        own = read_tree(self._readers[self.checkpoint.rank])
        return parts.merge(own, self.checkpoint.rank, lambda rank: read_tree(self._of(rank)))

    def read(self, offset: int, length: int) -> bytes:
        rank, offset = parts.placed(offset)
        return self._of(rank).read(offset, length)

    def read_into(self, ranges: bytes) -> None:
        for rank, (mine, _) in parts.split(ranges).items():
            self._of(rank).read_into(mine)

    def verify(self, part: Subset | None = None) -> int:
        return self._of(-1).verify(part)

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


class Watched(Reader):
    """A reader whose bytes move a bar: long reads are cut, so that it moves while they go on."""

    def __init__(self, reader: Reader, bar: Bar) -> None:
        self.checkpoint = reader.checkpoint
        self._reader = reader
        self._bar = bar

    @property
    def tree_place(self) -> tuple[int, int]:
        return self._reader.tree_place

    def read(self, offset: int, length: int) -> bytes:
        data = self._reader.read(offset, length)
        self._bar.advance(length)
        return data

    def read_into(self, ranges: bytes) -> None:
        for part, nbytes in cut(ranges, SLICE_BYTES):
            self._reader.read_into(part)
            self._bar.advance(nbytes)

    def verify(self, part: Subset | None = None) -> int:
        return self._reader.verify(part)

    def close(self) -> None:
        self._reader.close()


def cut(ranges: bytes, at_most: int) -> Iterator[tuple[bytes, int]]:
    """Packed ranges (address, offset, length) in pieces of so many bytes, with their bytes."""
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
