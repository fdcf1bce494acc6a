"""The payloads of a checkpoint in volume files, read without a daemon or beside one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from pccheck_native import _core, catalog
from pccheck_native.subset import Subset, verify_part
from pccheck_wire import tree
from pccheck_wire.errors import DamagedError

from .errors import damaged, lacking, recycled, unreadable

#: Bytes of a file that are read at a time; a shorter part is read as it is.
CHUNK_BYTES = 4 << 20


class FilePayloads:
    """See `source.Payloads`. Volumes are opened when they are read, the first one at once."""

    reaches_gpus = False

    def __init__(self, parts: Sequence[catalog.StoredCheckpoint]) -> None:
        """Raises RecycledError, DamagedError."""
        self._parts = {part.id.rank: part for part in reversed(parts)}
        self._step = parts[0].id.step
        self._volumes: dict[int, _core.Volume] = {}
        self._opened(parts[0].id.rank)

    def packed_tree(self, rank: int) -> bytes:
        one, volume = self._opened(rank)
        with _errors(one):
            return volume.read(one.id.sequence, one.tree_offset, one.tree_bytes)

    def tree(self, rank: int) -> tree.Tree:
        return tree.decode(self.packed_tree(rank), self._parts[rank].payload_bytes)

    def read_into(
        self, rank: int, offset: int, length: int, ranges: bytes, device_ranges: bytes = b""
    ) -> None:
        assert not device_ranges
        one, volume = self._opened(rank)
        with _errors(one):
            volume.read_into(one.id.sequence, ranges, chunk_bytes=min(length, CHUNK_BYTES))

    def verify(self, rank: int, part: Subset | None) -> int:
        """Reads and checks the payload, or a part of it, and the tree; how many bytes."""
        self.packed_tree(rank)
        one, volume = self._opened(rank)
        with _errors(one):
            if part is not None:
                return verify_part(volume, one, part)
            volume.verify(one.id.sequence)
            return one.payload_bytes

    def close(self) -> None:
        for volume in self._volumes.values():
            volume.close()

    def _opened(self, rank: int) -> tuple[catalog.StoredCheckpoint, _core.Volume]:
        """The part of a rank, and its volume. Raises as `Payloads` does."""
        one = self._parts.get(rank)
        if one is None:
            raise lacking(rank, self._step)
        if rank not in self._volumes:
            try:
                self._volumes[rank] = _volume(one)
            except FileNotFoundError as error:
                raise recycled(one.id.step, one.id.sequence) from error
            except _core.NativeError as error:
                raise DamagedError(f"{one.volume_path}: {error}") from error
        return one, self._volumes[rank]


def _volume(one: catalog.StoredCheckpoint) -> _core.Volume:
    return _core.Volume(one.volume_path, writable=False, allow_buffered=True)


@contextlib.contextmanager
def _errors(one: catalog.StoredCheckpoint) -> Iterator[None]:
    """Turns errors of the core into ours: RecycledError if a newer checkpoint took the slot."""
    try:
        yield
    except (_core.NativeError, OSError) as error:
        if not _still_there(one):
            raise recycled(one.id.step, one.id.sequence) from error
        if not isinstance(error, _core.NativeError) or error.code_name == "UNREADABLE":
            raise unreadable(one.id.step, one.id.sequence, one.id.rank) from error
        problem = str(error).removesuffix(": damaged (DAMAGED)")
        raise damaged(one.id.step, one.id.sequence, one.id.rank, problem) from error


def _still_there(one: catalog.StoredCheckpoint) -> bool:
    try:
        with contextlib.closing(_volume(one)) as volume:
            return any(entry.sequence == one.id.sequence for entry in volume.table())
    except FileNotFoundError:
        return False
    except (OSError, _core.NativeError):
        return True
