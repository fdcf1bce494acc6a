"""Reads one checkpoint: its tree and its bytes, with checks. `show`, `recover` and `verify` use it
alike for bytes from the file and from the daemon."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from pccheck_native import _core, catalog
from pccheck_native.subset import Subset, verify_part
from pccheck_wire import tree
from pccheck_wire.errors import DamagedError, PccheckError, UnreadableError

#: Bytes of a file that are read at a time; a shorter part is read as it is.
CHUNK_BYTES = 4 << 20


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

    def beside(self, other: catalog.Checkpoint) -> Reader:
        """A reader of what another rank has stored of the same checkpoint."""
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
        self, *, uid: int | None = None, job: str = "", rank: int | None = None, sizes: bool = False
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
        """Reads only the blocks of this range, so that damage elsewhere does not hide the tree."""
        with self._errors():
            return self._volume.read(self.checkpoint.sequence, offset, length)

    def read_into(self, ranges: bytes) -> None:
        first, end = _place(ranges[:24])[0], _place(ranges[-24:])[1]
        with self._errors():
            self._volume.read_into(
                self.checkpoint.sequence, ranges, chunk_bytes=min(end - first, CHUNK_BYTES)
            )

    def beside(self, other: catalog.Checkpoint) -> FileReader:
        return FileReader(other)

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
        """Turns errors of the core into ours: RecycledError if a newer checkpoint took the slot."""
        try:
            yield
        except (_core.NativeError, OSError) as error:
            if not _still_there(self.checkpoint):
                raise recycled(self.checkpoint) from error
            failed = not isinstance(error, _core.NativeError) or error.code_name == "UNREADABLE"
            why = "UNREADABLE" if failed else str(error).removesuffix(": damaged (DAMAGED)")
            raise invalid(self.checkpoint, why) from error


def _place(packed: bytes) -> tuple[int, int]:
    """Where the bytes of a range begin and end in the payload."""
    _, offset, length = struct.unpack("<QQQ", packed)
    return offset, offset + length


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
