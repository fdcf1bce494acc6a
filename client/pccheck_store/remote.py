"""The checkpoints of a daemon, for users who may not open the volume files. The daemon lists them,
and sends checked bytes as it does to a trainer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from pccheck_native import _core, catalog, layout
from pccheck_native.identity import CheckpointId
from pccheck_native.subset import Subset
from pccheck_store import VERSION
from pccheck_wire import attach
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import DaemonUnreachableError, NoCheckpointError
from pccheck_wire.messages import Answer, Hello, Open, Opened, Part, RequestBody, Role

from .documents import Document, rows, text, whole
from .observer import Observer
from .reading.errors import damaged, lacking, recycled, unreadable
from .reading.loads import DaemonPayloads


class DaemonSource:
    """See `source.Source`: what the daemon shows to this user."""

    served = True

    def __init__(self, socket: str | None, path: Path) -> None:
        """`socket`: None for the default one."""
        self.path = path
        self._socket = socket

    def held(
        self, *, uid: int | None = None, job: str = "", rank: int | None = None, sizes: bool = False
    ) -> catalog.Catalog:
        """The list of the daemon, which has all sizes, without the infos of volumes."""
        with Observer(self._socket) as observer:
            document = observer.listing(job)
        found = catalog.Catalog([], {}, [], [])
        for item in rows(document, "checkpoints"):
            if uid in (None, item.get("uid")) and rank in (None, item.get("rank")):
                found.checkpoints.append(_checkpoint(item))
        for item in rows(document, "unreadable"):
            what = self._file(item), text(item, "code"), text(item, "reason")
            found.unreadable.append(catalog.Unreadable(*what))
        found.incomplete.extend(map(self._file, rows(document, "incomplete")))
        return found

    def open(self, parts: Sequence[catalog.StoredCheckpoint]) -> LeasedPayloads:
        """Leases the checkpoint: no rank recycles it, unless a new one has no other slot."""
        return LeasedPayloads(parts, self._socket)

    def verify(self, checkpoint: catalog.StoredCheckpoint, part: Subset | None) -> tuple[int, bool]:
        one = checkpoint.id
        try:
            with Observer(self._socket) as observer:
                document = observer.verify(
                    one.job, rank=one.rank, sequence=one.sequence, uid=one.uid,
                    subset=part.text if part else "", seed=part.seed if part else 0,
                )  # fmt: skip
        except NoCheckpointError as error:
            raise recycled(one.step, one.sequence) from error
        read, cleared = 0, False
        for item in rows(document, "checkpoints"):
            if item.get("valid") is not True:
                problem = text(item, "problem")
                if problem == "UNREADABLE":
                    raise unreadable(one.step, one.sequence, one.rank)
                raise damaged(one.step, one.sequence, one.rank, problem)
            read += whole(item, "read_bytes")
            cleared = cleared or item.get("cleared") is True
        return read, cleared

    def _file(self, item: Document) -> layout.VolumeFile:
        path = Path(text(item, "path"))
        try:
            return layout.parse_volume_path(self.path, path)
        except ValueError:
            return layout.VolumeFile(0, "", 0, 0, path)


def _checkpoint(item: Document) -> catalog.StoredCheckpoint:
    """A row of the list. The place of the tree is unknown until the checkpoint is opened."""
    names = ("pinned", "protected", "damaged")
    flags = sum(getattr(_core, f"SLOT_{n.upper()}") for n in names if item.get(n) is True)
    marks = item.get("marks")
    flags |= sum(
        flag for n, flag in catalog.MARKS.items() if isinstance(marks, list) and n in marks
    )
    flags |= _core.SLOT_IMAGE if item.get("kind") == "image" else 0
    return catalog.StoredCheckpoint(
        CheckpointId.of_document(item), whole(item, "payload_bytes"), tree_offset=0, tree_bytes=0,
        wall_ns=whole(item, "wall_ns"), flags=flags, slot=0, volume_path=Path(text(item, "volume")),
        base=whole(item, "base_sequence"),
        own_bytes=None if item.get("own_bytes") is None else whole(item, "own_bytes"),
    )  # fmt: skip


class LeasedPayloads(DaemonPayloads):
    """Those that a reader has open, through a session of its own. The session leases the checkpoint
    on all ranks."""

    #: Its reads give way to saves of other users (`pcc_pace.h`).
    slowest_bytes_per_s = 1 << 20

    def __init__(self, parts: Sequence[catalog.StoredCheckpoint], socket: str | None) -> None:
        """Raises RecycledError when the daemon has used the slot of the first part."""
        one = parts[0].id
        hello = Hello(
            PROTOCOL_VERSION, Role.READER, VERSION, os.getpid(), job=one.job, rank=one.rank,
            world_size=one.rank + 1, solo=True, uid=one.uid,
        )  # fmt: skip
        self.loads, self.load_broken_off = itertools.count(1), False
        self._listed = {part.id.rank for part in parts}
        self._attachment = attach.connect(hello, socket)
        try:
            opened = self._attachment.request(Open(step=one.step, before=one.sequence + 1))
            if not isinstance(opened, Opened) or opened.sequence != one.sequence:
                raise recycled(one.step, one.sequence)
            self.native = _core.Client(self._attachment.memory_fd, self._attachment.page_fd)
        except BaseException as error:
            self._attachment.close()
            if isinstance(error, NoCheckpointError):
                raise recycled(one.step, one.sequence) from error
            raise
        super().__init__(self, opened)

    def request(self, body: RequestBody, *, timeout_s: float) -> Answer:
        try:
            return self._attachment.request(body, timeout_s=timeout_s)
        except DaemonUnreachableError as error:
            raise self.gone() from error

    def gone(self) -> DaemonUnreachableError:
        return DaemonUnreachableError(
            f"the daemon ended, or ended this reader, while step {self.opened.step} was open",
            hint="open the checkpoint again: a restarted daemon has it, unless newer ones have "
            "replaced it",
        )

    def close(self) -> None:
        self.native.close()
        self._attachment.close()

    def _part(self, rank: int) -> Part:
        if rank not in self._listed:
            raise lacking(rank, self.opened.step)
        if rank not in self.parts:
            raise recycled(self.opened.step, self.opened.sequence)
        return super()._part(rank)
