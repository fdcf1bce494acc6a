"""What a node keeps on its disk of a job's starts: a record of each start beside the volumes, in
records and volumes what it has promised (native/FORMAT.md, Promise); and where the nodes of the
last start read from each other.

All calls block on the disk. One process at a time calls them: the daemon with the lock of the
storage directory."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from pccheck_native import _core, catalog, layout
from pccheck_native.identity import UNKNOWN
from pccheck_native.nodes.lists import Promise
from pccheck_native.nodes.offers import NodeServer, StartRecord, servers_of_plain, unneeded
from pccheck_wire.errors import DamagedError, PccheckError, RefusedError
from pccheckd.base.logs import LOG

SCHEMA = 1
RECORD_BYTES_MAX = 16 << 20
_DIGEST_BYTES = 16


class _OnDisk(NamedTuple):
    """A record as its file has it."""

    record: StartRecord
    first_line: bytes  # which never changes

    @property
    def promise(self) -> tuple[int, bytes, bytes]:
        """As VolumeInfo.promise."""
        return *self.record.promise, _digest(self.first_line)


class Records:
    """The records of the starts of one job, each in a file of its own."""

    def __init__(self, storage: Path, uid: int, job: str) -> None:
        self._place = storage, uid, job
        self._directory = layout.start_path(*self._place, UNKNOWN).parent

    def read(self, start: bytes) -> StartRecord:
        """Raises FileNotFoundError for a start without a record, DamagedError for a file that is
        not as it was written, RefusedError for one of another version, OSError."""
        return self._read(start).record

    def all(self) -> list[StartRecord]:
        """The highest promise first. Raises as `read` does, for the first file that it concerns."""
        return sorted(
            (one.record for one in self._all()), key=lambda one: one.promise, reverse=True
        )

    def promised(self, volumes: Iterable[_core.VolumeInfo]) -> Promise:
        """The highest of the records, and of `volumes`: those of the job on this node that can be
        read. Raises as `all` does, and DamagedError if a volume promised another list than that of
        the record."""
        of_volumes = {info.promise for info in volumes}
        digests = {start: digest for _, start, digest in of_volumes}
        found = [Promise(number, start) for number, start, _ in of_volumes]
        for one in self._all():
            _, start, digest = one.promise
            if digests.get(start, digest) != digest:
                raise _damaged(self._path(start), "a volume of the job has promised another list")
            found.append(one.record.promise)
        return max(found, default=Promise())

    def promise(self, record: StartRecord, volumes: Iterable[_core.Volume]) -> None:
        """Promises a start, durably: first in its record, then in those of `volumes` that are open
        for writing. A job without a volume has its promise in the record alone. To be called again,
        with the record as it is then, for volumes that were made since.

        Raises RefusedError if this node has promised a higher one; OSError, NativeError, and
        ValueError for a closed one, if a volume has no promise after the call, though others may.
        """
        every, wanted = list(volumes), record.promise
        before = self.promised(volume.info() for volume in every if not volume.closed)
        if wanted < before:
            raise RefusedError(
                f"the start {wanted.start.hex()} has number {wanted.number}, and this node has "
                f"promised {before.start.hex()}, which has number {before.number}",
                hint="start the job again: what displaced this start knows more",
            )
        made = self._write(record)
        failed: Exception | None = None
        for volume in every:
            try:
                _promise_in(volume, made.promise)
            except (OSError, ValueError, _core.NativeError) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def update(self, record: StartRecord) -> None:
        """Replaces the record of a start that was promised, durably: its answer is recorded. Raises
        as `read` does, and ValueError for another list."""
        self.read(record.start)
        self._write(record)

    def servers(self) -> tuple[NodeServer, ...]:
        """Of the last start; () if there was none, or the file is damaged: the next start writes
        the file again. Raises OSError."""
        try:
            content = layout.load(layout.servers_path(*self._place), RECORD_BYTES_MAX)
            found = json.loads(content, object_hook=_decoded)
            return servers_of_plain(found["servers"] if found["schema"] == SCHEMA else ())
        except FileNotFoundError:
            return ()
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            LOG.warning("%s is left out: %s", layout.servers_path(*self._place), error)
            return ()

    def keep_servers(self, servers: Iterable[NodeServer]) -> None:
        """Replaces them, durably. Raises OSError."""
        plain = {"schema": SCHEMA, "servers": [one.to_plain() for one in servers]}
        layout.store(layout.servers_path(*self._place), _encoded(plain) + b"\n")

    def forget(self) -> list[Path]:
        """Removes the records that this node needs no more, and says which: no checkpoint and no
        promise of this node is of their start, and a start that was born here names it as older.
        Removes nothing while a volume of the job cannot be read. Raises as `promised` does."""
        storage, uid, job = self._place
        found = catalog.scan(storage, uid=uid, job=job)
        if found.unreadable:
            return []
        infos = found.volumes.values()
        needed = {one.id.start for one in found.checkpoints} | {info.promise[1] for info in infos}
        gone = sorted(map(self._path, unneeded(self.all(), needed, self.promised(infos))))
        for path in gone:
            path.unlink(missing_ok=True)
        if gone:
            layout.sync(self._directory)
        return gone

    def _path(self, start: bytes) -> Path:
        return layout.start_path(*self._place, start)

    def _all(self) -> list[_OnDisk]:
        return [self._read(start) for start in layout.start_records(self._directory)]

    def _read(self, start: bytes) -> _OnDisk:
        path = self._path(start)
        try:
            return _parsed(layout.load(path, RECORD_BYTES_MAX), start)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _damaged(path, str(error)) from error
        except _OtherSchemaError as error:
            raise RefusedError(
                f"{path} is of another version of PCcheck (schema {error})",
                hint="use that version of pccheckd",
            ) from error

    def _write(self, record: StartRecord) -> _OnDisk:
        who, *more = record.to_plain()
        path, first_line = self._path(record.start), _encoded({"schema": SCHEMA, "list": who})
        try:
            before = self._read(record.start)
        except FileNotFoundError:
            layout.make_directories(path)
        else:
            if before.record.who != record.who:
                raise ValueError(f"{path} has another list")
            first_line = before.first_line
        body = first_line + b"\n" + _encoded(more) + b"\n"
        content = body + _digest(body).hex().encode() + b"\n"
        if len(content) > RECORD_BYTES_MAX:
            raise ValueError(f"the record of a start takes {len(content)} bytes")
        layout.store(path, content)
        return _OnDisk(record, first_line)


def _promise_in(volume: _core.Volume, made: tuple[int, bytes, bytes]) -> None:
    if volume.info().promise == made:
        return
    try:
        volume.promise(*made)
    except OSError as error:
        if error.errno != errno.EROFS:  # open for reading only: others, and the record, have it
            raise


class _OtherSchemaError(Exception):
    """The file is of another version of the software, which it names."""


def _parsed(content: bytes, start: bytes) -> _OnDisk:
    *lines, total, end = content.split(b"\n")
    body = content[: len(content) - len(total) - 1]
    if end or not lines or total != _digest(body).hex().encode():
        raise ValueError("it is not as it was written")
    head, *more = (json.loads(line, object_hook=_decoded) for line in lines)
    if head["schema"] != SCHEMA:
        raise _OtherSchemaError(head["schema"])
    (rest,) = more
    record = StartRecord.of_plain([head["list"], *rest])
    if record.start != start:
        raise ValueError("it is of another start")
    return _OnDisk(record, lines[0])


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=_hexadecimal).encode()


def _hexadecimal(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}


def _decoded(found: dict[str, Any]) -> object:
    return bytes.fromhex(found["hex"]) if found.keys() == {"hex"} else found


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _damaged(path: Path, why: str) -> PccheckError:
    return DamagedError(
        f"{path} is not a valid record of a start: {why}",
        hint="check the disk; without the file this node does not know that start",
    )
