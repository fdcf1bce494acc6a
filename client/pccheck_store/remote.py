"""Reading checkpoints through the daemon, for users who may not open the volume files. The daemon
lists them, and sends checked bytes as it does to a trainer."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from pathlib import Path

from pccheck_native import _core, catalog, layout
from pccheck_native.subset import Subset
from pccheck_store import VERSION
from pccheck_wire import attach
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import DaemonUnreachableError, NoCheckpointError, WaitTimeoutError
from pccheck_wire.messages import Hello, Open, Opened, Read, Role

from .documents import Document, rows, text, whole
from .observer import Observer
from .readers import Reader, invalid, recycled

LOAD_LIMIT_S = 3600.0


class DaemonStore:
    """The checkpoints that the daemon shows to this user; like `directory.Storage`."""

    def __init__(self, socket: str | None, path: Path) -> None:
        self.path = path
        self.served, self.socket = True, socket

    def scan(
        self, *, uid: int | None = None, job: str = "", rank: int | None = None, sizes: bool = False
    ) -> catalog.Catalog:
        """The list of the daemon, which has all sizes, without the infos of volumes."""
        with Observer(self.socket) as observer:
            document = observer.listing(job)
        found = catalog.Catalog([], {}, [], [])
        for item in rows(document, "checkpoints"):
            if uid in (None, item.get("uid")) and rank in (None, item.get("rank")):
                found.checkpoints.append(_checkpoint(item))
        for item in rows(document, "unreadable"):
            unreadable = self._file(item), text(item, "code"), text(item, "reason")
            found.unreadable.append(catalog.Unreadable(*unreadable))
        found.incomplete.extend(map(self._file, rows(document, "incomplete")))
        return found

    def reader(self, checkpoint: catalog.Checkpoint) -> DaemonReader:
        return DaemonReader(checkpoint, _Session(checkpoint, self.socket))

    def verify(self, checkpoint: catalog.Checkpoint, part: Subset | None) -> tuple[int, bool]:
        one = checkpoint
        try:
            with Observer(self.socket) as observer:
                document = observer.verify(
                    one.job, rank=one.rank, sequence=one.sequence, uid=one.uid,
                    subset=part.text if part else "", seed=part.seed if part else 0,
                )  # fmt: skip
        except NoCheckpointError as error:
            raise recycled(one) from error
        read, cleared = 0, False
        for item in rows(document, "checkpoints"):
            if item.get("valid") is not True:
                raise invalid(one, text(item, "problem"))
            read += whole(item, "read_bytes")
            cleared = cleared or item.get("cleared") is True
        return read, cleared

    def _file(self, item: Document) -> layout.VolumeFile:
        path = Path(text(item, "path"))
        try:
            return layout.parse_volume_path(self.path, path)
        except ValueError:
            return layout.VolumeFile(0, "", 0, 0, path)


def _checkpoint(item: Document) -> catalog.Checkpoint:
    """A row of the list. The place of the tree is unknown until the checkpoint is opened."""
    names = ("pinned", "protected", "damaged")
    flags = sum(getattr(_core, f"SLOT_{n.upper()}") for n in names if item.get(n) is True)
    numbers = {
        name: whole(item, name)
        for name in ("uid", "rank", "sequence", "step", "incarnation", "payload_bytes", "wall_ns")
    }
    return catalog.Checkpoint(
        job=text(item, "job"), world_size=whole(item, "world_size", 1), tree_offset=0,
        tree_bytes=0, flags=flags, slot=0, volume_path=Path(text(item, "volume")),
        base=whole(item, "base_sequence"),
        own_bytes=None if item.get("own_bytes") is None else whole(item, "own_bytes"), **numbers,
    )  # fmt: skip


class DaemonReader(Reader):
    """One rank's part of a checkpoint, read through a session that leases the checkpoint: no rank
    recycles it before this reader is closed, unless a new checkpoint has no other slot. Readers of
    other ranks' parts, made by `beside`, share the session; closing one of them closes all."""

    def __init__(self, checkpoint: catalog.Checkpoint, session: _Session) -> None:
        """Raises RecycledError when the daemon has used its slot for a newer one."""
        self.checkpoint = checkpoint
        self._session = session
        if checkpoint.rank not in session.places:
            raise recycled(checkpoint)
        self.tree_place = session.places[checkpoint.rank]

    def beside(self, other: catalog.Checkpoint) -> Reader:
        return DaemonReader(other, self._session)

    def read_into(self, ranges: bytes) -> None:
        self._session.read_into(self.checkpoint, ranges)

    def close(self) -> None:
        self._session.close()


class _Session:
    """A reader's session with the daemon. It opens one checkpoint, with the parts of all ranks."""

    def __init__(self, one: catalog.Checkpoint, socket: str | None) -> None:
        """Raises RecycledError when the daemon has used its slot for a newer one."""
        hello = Hello(
            PROTOCOL_VERSION, Role.READER, VERSION, os.getpid(), job=one.job, rank=one.rank,
            world_size=one.rank + 1, solo=True, uid=one.uid,
        )  # fmt: skip
        self._load = 0
        self._attachment = attach.connect(hello, socket)
        try:
            opened = self._attachment.request(Open(step=one.step, before=one.sequence + 1))
            if not isinstance(opened, Opened) or opened.sequence != one.sequence:
                raise recycled(one)
            self._link = _core.Link(self._attachment.link_fd, self._attachment.page_fd)
        except BaseException as error:
            self._attachment.close()
            if isinstance(error, NoCheckpointError):
                raise recycled(one) from error
            raise
        #: Of each rank's tree: offset and bytes.
        self.places = {part.rank: (part.tree_offset, part.tree_bytes) for part in opened.parts}
        self.places[one.rank] = opened.tree_offset, opened.tree_bytes

    def read_into(self, one: catalog.Checkpoint, ranges: bytes) -> None:
        places = [(offset, length) for _, offset, length in struct.iter_unpack("<QQQ", ranges)]
        first = places[0][0]
        nbytes = sum(places[-1]) - first
        self._load += 1
        deadline_ns = time.monotonic_ns() + int(LOAD_LIMIT_S * 1e9)
        try:
            self._link.load_start(self._load, ranges)
            try:
                self._attachment.request(Read(self._load, one.sequence, first, nbytes, one.rank))
                result = self._link.load_wait(self._load, deadline_ns)
            except BaseException:
                with contextlib.suppress(OSError, ValueError):
                    self._link.load_wait(self._load, 1)  # what arrives late is written nowhere
                raise
        except NoCheckpointError as error:
            raise recycled(one) from error
        except WaitTimeoutError:
            raise
        except TimeoutError as error:
            raise WaitTimeoutError(f"the daemon sent no data for {LOAD_LIMIT_S:g} s") from error
        except (DaemonUnreachableError, OSError) as error:
            raise DaemonUnreachableError(
                f"the daemon ended, or ended this reader, while step {one.step} was open: {error}",
                hint="open the checkpoint again: a restarted daemon has it, unless newer ones "
                "have replaced it",
            ) from error
        if result == -errno.ENOENT:
            raise recycled(one)
        if result != 0:
            raise invalid(one, "UNREADABLE" if result == _core.E_UNREADABLE else f"code {result}")

    def close(self) -> None:
        self._link.close()
        self._attachment.close()
