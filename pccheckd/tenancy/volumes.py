"""The volume files of one (uid, job, rank): found, opened, made, outgrown, reopened, dropped.

The last one receives new checkpoints. An outgrown one stays until its successor has what recovery
needs. Calls that open, make or drop files need the tenant's lock; `look` may give up a file at any
await."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pccheck_native import _core, catalog, layout
from pccheck_native.group import Agreement
from pccheck_wire.basics import plural, size_text
from pccheck_wire.errors import (
    DamagedError,
    PccheckError,
    RefusedError,
    StorageFullError,
    UsageError,
)
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.core.io_engine import EVERYWHERE
from pccheckd.storage.quota import Need

PROTECTED, PINNED = _core.SLOT_PROTECTED, _core.SLOT_PINNED  # for the next run; by the user
QUARANTINED, DAMAGED = _core.SLOT_QUARANTINED, _core.SLOT_DAMAGED
PAYLOAD_BYTES_MAX = 1 << 50
CLOSING_LIMIT_S = 10.0
SEQUENCE_BITS = 32  # more than any volume gives out
_LOST = {
    "REMOVED": "was removed or moved away while pccheckd had it open",
    "REPLACED": "was replaced by another file while pccheckd had it open",
    "NOT_A_VOLUME": "was overwritten or replaced by another file while pccheckd had it open",
    "TRUNCATED": "was truncated while pccheckd had it open",
}


class Key(NamedTuple):
    """Whose volume: the unit of ownership."""

    uid: int
    job: str
    rank: int

    def __str__(self) -> str:
        return f"job {self.job!r} rank {self.rank} of uid {self.uid}"

    @property
    def label(self) -> str:
        """The name of its memory in the descriptor store, where names are short and public."""
        text = f"{self.uid}/{self.job}/{self.rank}".encode()
        return "pccheck-" + hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclass(slots=True)
class OpenVolume:
    path: Path
    generation: int
    volume: _core.Volume
    info: _core.VolumeInfo
    engine: str = ""  # reads and writes it
    #: As last read, newest first.
    checkpoints: list[catalog.StoredCheckpoint] = field(default_factory=list)
    quarantined: int = 0
    begun: int = -1  # the incarnation whose beginning this daemon has written to it
    _names: dict[bytes, tuple[int, int, int, int]] = field(default_factory=dict)  # by digest
    #: Sequences that nobody may read: their record failed, and they are to be destroyed.
    hidden: frozenset[int] = frozenset()
    _reads: int = 0  # that have begun ...
    _known: int = 0  # ... and the one whose result is here
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def limit_bytes(self) -> int | None:
        """Bytes per second that it may read and write; 0: no limit; None while it is reopened."""
        with contextlib.suppress(ValueError):
            return self.volume.bytes_per_second
        return None

    @property
    def pinned(self) -> set[int]:
        """The sequences that the user pinned."""
        return {found.id.sequence for found in self.checkpoints if found.is_pinned}

    def name(self, one: catalog.StoredCheckpoint) -> tuple[int, int, int, int]:
        """catalog.name_of one of its checkpoints, in any thread. Blocks the first time. Raises
        NativeError, OSError, and ValueError while it is reopened."""
        digest = one.id.digest
        if digest not in self._names:
            there = {found.id.digest for found in self.checkpoints}
            kept = {known: name for known, name in self._names.items() if known in there}
            self._names = kept | {digest: catalog.name_of(self.volume, one)}
        return self._names[digest]

    def read(self) -> None:
        """Reads the newest record again, in any thread. Blocks. From its return on, all that was
        durable when it began is known: a read that began earlier, and ends later, changes nothing.
        A checkpoint that is missing for a moment would be given up on the other ranks."""
        with self._lock:
            self._reads = turn = self._reads + 1
        info = self.volume.info()
        found = catalog.checkpoints_of(self.volume, self.path)
        checkpoints = [one for one in found if one.id.sequence not in self.hidden]
        quarantined = sum(1 for e in self.volume.table() if e.flags & QUARANTINED)
        with self._lock:
            if turn > self._known:
                self._known = turn
                self.info, self.checkpoints, self.quarantined = info, checkpoints, quarantined


def _destroy(volume: _core.Volume, failed: Collection[int]) -> None:
    """Durably. Raises OSError, NativeError."""
    if failed:
        volume.set_group(oldest=0, newest=0, given_up=sorted(failed)[-_core.GIVEN_UP_MAX :])
        volume.recycle()


def _close_in_place(volume: _core.Volume) -> bool:
    """Whether it was the file at its path; another file there must not be removed."""
    try:
        volume.require_in_place()
    except (OSError, ValueError, _core.NativeError):
        return False
    finally:
        volume.close()
    return True


def _close_and_wait(volume: _core.Volume) -> None:
    """Until the file is closed and its lock free: another thread may still be inside a method."""
    volume.close()
    deadline = time.monotonic() + CLOSING_LIMIT_S
    while not volume.closed and time.monotonic() < deadline:
        time.sleep(0.001)


class VolumeSet:
    def __init__(self, key: Key, engine: Engine) -> None:
        self.key = key
        self._config = engine.config
        self._engine = engine
        self.open: list[OpenVolume] = []
        self._agreement = Agreement(0, 0, frozenset())  # of the job's ranks
        #: Files that could not be opened, and why.
        self.unreadable: dict[Path, PccheckError] = {}
        #: Opened, but no longer at their path: closed as soon as they are unused.
        self.gone: list[OpenVolume] = []
        self.loss = ""  # what happened to a file while it was open, until one is durable elsewhere
        #: What was held, as long: it may come back, so other ranks keep their parts of it.
        self.lost: list[catalog.StoredCheckpoint] = []
        self._known: set[Path] = set()  # were open here, so their sequences are known ...
        self._passed = 0  # ... of those that are gone
        self._recycling = asyncio.Lock()

    @property
    def current(self) -> OpenVolume | None:
        return self.open[-1] if self.open else None

    @property
    def is_done(self) -> bool:
        """The trainer that saved last reported its job as done."""
        return self.current is not None and self.current.info.done

    def checkpoints(self) -> list[catalog.StoredCheckpoint]:
        """Durable checkpoints of all files as last read, newest first."""
        return catalog.newest_first(found for item in self.open for found in item.checkpoints)

    def checkpoint(self, sequence: int) -> catalog.StoredCheckpoint | None:
        return next((one for one in self.checkpoints() if one.id.sequence == sequence), None)

    def sequences(self) -> set[int]:
        return {one.id.sequence for one in self.checkpoints()}

    def newest(self) -> tuple[int, int] | None:
        """Sequence and step of the newest durable checkpoint."""
        return next(((one.id.sequence, one.id.step) for one in self.checkpoints()), None)

    def find(self, sequence: int) -> OpenVolume | None:
        """The volume that holds a durable checkpoint."""
        for item in self.open:
            if any(found.id.sequence == sequence for found in item.checkpoints):
                return item
        return None

    def newest_incarnation(self) -> int:
        """The newest that ever opened one of the files, or saved in one."""
        saved = (found.id.incarnation for found in self.checkpoints())
        return max((*(item.info.incarnation for item in self.open), *saved), default=0)

    def last_sequence(self) -> int:
        """The next sequence is above it, in every file: also above what is in files that cannot be
        read now, and may be readable later."""
        unknown = (self._generation(path) for path in self.unreadable.keys() - self._known)
        return max(
            self._passed,
            *(item.info.next_sequence - 1 for item in self.open),
            *((generation + 1 << SEQUENCE_BITS) - 1 for generation in unknown),
            0,
        )

    def _generation(self, path: Path) -> int:
        return layout.parse_volume_path(self._config.storage, path).generation

    def obey(self, agreement: Agreement, pending: Collection[int]) -> None:
        """Applies the agreement of the job's ranks to every open file; `pending` is what this rank
        has in flight. Waits for no disk."""
        self._agreement = agreement
        for item in self.open:
            self._instruct(item, pending)

    def _instruct(self, item: OpenVolume, pending: Collection[int] = ()) -> None:
        mine = {*pending, *(found.id.sequence for found in item.checkpoints)}
        given_up = sorted(mine & self._agreement.given_up)
        with contextlib.suppress(ValueError):  # closed, and about to be reopened
            item.volume.set_group(
                oldest=self._agreement.oldest, newest=self._agreement.newest,
                given_up=given_up[-_core.GIVEN_UP_MAX :],
            )  # fmt: skip

    async def load(self) -> None:
        """Opens the files on the disk that are not open yet. Those that cannot be opened go to
        `unreadable`, and are tried again the next time."""
        files = await self._engine.call(
            self.key.uid, layout.list_volumes, self._config.storage, **self.key._asdict()
        )
        held = {item.path for item in (*self.open, *self.gone)}
        for path in self.unreadable.keys() - {file.path for file in files}:
            del self.unreadable[path]
        for file in files:
            if file.path in held:
                continue
            try:
                self.open.append(await self._opened(file.path, file.generation))
            except (OSError, _core.NativeError, PccheckError) as error:
                why = translated(error, f"the volume {file.path}")
                if str(why) != str(self.unreadable.get(file.path)):
                    LOG.warning("%s", why)
                self.unreadable[file.path] = why
            else:  # not before: meanwhile a rank that restores must not find nothing
                self.unreadable.pop(file.path, None)
        self.open.sort(key=lambda item: item.generation)

    async def look(self) -> bool:
        """Whether open files were found missing from their path, or truncated. They are no longer
        used, neither for recovery nor for saving."""
        found = False
        for item in list(self.open):
            try:
                await self._engine.call(self.key.uid, item.volume.require_in_place)
            except (OSError, ValueError):  # the disk does not answer, or it is being reopened
                continue
            except _core.NativeError as error:
                if item in self.open:
                    self._lose(item, error.code_name)
                    self.gone.append(item)
                    found = True
        return found

    def _lose(self, item: OpenVolume, code: str) -> None:
        self.open.remove(item)
        self._known.add(item.path)
        self._passed = max(self._passed, item.info.next_sequence - 1)
        self.lost += item.checkpoints
        held = plural(len(item.checkpoints), "checkpoint")
        self.loss = (
            f"{item.path} {_LOST.get(code, code)}; it held {held}. The next checkpoint goes into a "
            "new volume; to remove a job, use pccheckctl drop"
        )
        LOG.warning("%s: %s", self.key, self.loss, extra={"fields": {"event": "volume-lost"}})

    def settled(self) -> None:
        """A checkpoint is durable: earlier losses are history."""
        self.loss = ""
        self.lost.clear()

    def why_lost(self, sequence: int) -> str:
        """What happened to the file of a checkpoint that was durable; "" for one that is there."""
        lost = any(one.id.sequence == sequence for one in self.lost)
        return self.loss if lost and self.checkpoint(sequence) is None else ""

    async def close_lost(self, item: OpenVolume) -> None:
        """Closes a missing one; another file at its path must not be removed."""
        self.gone.remove(item)
        with contextlib.suppress(OSError, _core.NativeError):
            await self._engine.call(self.key.uid, item.volume.close)

    @property
    def doubts(self) -> list[PccheckError]:
        """Why checkpoints newer than those of the open files may exist, or be lost."""
        lost = (item.path for item in self.open if item.info.record_lost)
        hint = "check the disk; fresh=True starts without a checkpoint"
        return [
            *self.unreadable.values(),
            *(DamagedError(f"{path}: {catalog.RECORD_LOST}", hint=hint) for path in lost),
        ]

    @property
    def is_followed(self) -> bool:
        """A later file than the current one exists but cannot be read: saving to the current one
        would use its sequences again."""
        current = self.current
        return current is not None and any(
            self._generation(path) > current.generation for path in self.unreadable
        )

    def require_readable(self, *, fresh: bool) -> None:
        """Raises why no volume can be read, unless one can, there is none, or `fresh`: a job must
        not begin at step 0 over existing checkpoints by accident."""
        if self.unreadable and not fresh and not self.checkpoints():
            error = next(iter(self.unreadable.values()))
            raise type(error)(
                error.message, hint=f"{error.hint}; or start without it: fresh=True".lstrip("; ")
            )

    def require_only(self, *, images: bool) -> None:
        """Images of processes and tensors would push each other out. Raises UsageError."""
        if any(bool(one.flags & _core.SLOT_IMAGE) != images for one in self.checkpoints()):
            raise UsageError(
                f"job {self.key.job!r} has {'checkpoints' if images else 'images'} of "
                f"{'tensors' if images else 'processes'}",
                hint="choose another name" + (": --name JOB" if images else ""),
            )

    async def refresh(self) -> None:
        """Reads tables and states again, in a thread."""
        for item in list(self.open):
            with contextlib.suppress(ValueError):  # dropped or reopened meanwhile
                await self._engine.call(self.key.uid, item.read)

    async def recycle(self) -> bool:
        """Frees slots of the current file that are no longer kept; whether one is free now. Two
        may ask at once: the second waits for the record by which the first frees them."""
        is_second = self._recycling.locked()
        async with self._recycling:
            current = self.current
            try:
                if current is None:
                    return False
                if current.volume.has_expendable():
                    await self._engine.call(self.key.uid, current.volume.recycle)
                elif not is_second:
                    return False
                await self._engine.call(self.key.uid, current.read)
            except (OSError, ValueError, _core.NativeError) as error:
                LOG.warning("%s: cannot recycle slots: %s", self.key, error)
                await self.refresh()  # it may have stopped
                return False
            return current.info.free_slots > 0

    async def make(
        self, payload_bytes: int, *, incarnation: int, start: bytes, world_size: int,
        next_sequence: int, spare: int = 0,
    ) -> OpenVolume:  # fmt: skip
        """A new file whose slots hold `payload_bytes`, with `spare` slots more than configured;
        sequences continue.

        Raises StorageFullError with the numbers.
        """
        config, key = self._config, self.key
        slots = min(config.slots + spare, _core.SLOTS_MAX)
        if not 0 < payload_bytes <= PAYLOAD_BYTES_MAX:
            raise RefusedError(f"a checkpoint must be 1 to 2**50 bytes (got {payload_bytes})")
        await self._engine.require_storage(key.uid)
        blocks = self.open[-1].info.block_bytes if self.open else config.block_bytes
        capacity = layout.capacity_for(payload_bytes)
        try:
            needed = _core.volume_bytes_for(capacity, slots, blocks)
        except OSError as error:
            raise RefusedError(
                f"a volume cannot have {slots} slots for checkpoints of {payload_bytes} "
                f"bytes in blocks of {blocks} bytes"
            ) from error
        need = Need(config, key.uid, key.job, str(key), needed)
        generation = await self._engine.call(key.uid, layout.next_generation, config.storage, *key)
        path = layout.volume_path(config.storage, *key, generation)
        await self.refresh()
        sequence = max(next_sequence, self.last_sequence() + 1)

        def create() -> None:
            layout.make_directories(path)
            _core.create_volume(
                str(path), **key._asdict(), world_size=world_size, slots=slots,
                keep=config.keep, payload_capacity=capacity, next_sequence=sequence,
                incarnation=incarnation, start=start, block_bytes=blocks,
                allow_buffered=config.allow_any_filesystem,
            )  # fmt: skip

        try:
            with self._engine.room.reserved(key.uid, needed) as before:
                await need.require(before, partial(self._engine.call, key.uid))
                await self._engine.call(key.uid, create)
            try:
                made = await self._opened(path, generation)
            except Exception:  # every request would leave another one
                with contextlib.suppress(OSError):
                    await self._engine.call(key.uid, path.unlink, missing_ok=True)
                raise
        except (OSError, _core.NativeError) as error:
            why = translated(error, f"a volume of {size_text(needed)} for {key}")
            if isinstance(why, StorageFullError) and not why.hint:
                hint = await self._engine.call(key.uid, need.droppable, needed)
                why = StorageFullError(why.message, hint=hint)
            raise why from error
        self.open.append(made)
        LOG.info("%s: created %s, %d slots, %s", key, path, slots, size_text(needed))
        return made

    async def reopen(self, item: OpenVolume, failed: Collection[int] = ()) -> bool:
        """Closes a stopped volume and reads it from the disk again, read-only when it can no longer
        be written. Destroys the `failed` sequences of a group, and nobody sees them until then.
        False: its file is no longer there."""
        if item.info.world_size > 1:
            item.hidden = frozenset(failed)
        await self._engine.call(self.key.uid, _close_and_wait, item.volume)
        try:
            fresh = await self._opened(item.path, item.generation)
        except (OSError, _core.NativeError, PccheckError) as error:
            missing = isinstance(error, FileNotFoundError)
            code = "REMOVED" if missing else getattr(error, "code_name", "")
            if code in _LOST:
                self._lose(item, code)
                return False
            with contextlib.suppress(OSError, _core.NativeError, PccheckError):
                fresh = await self._opened(item.path, item.generation, writable=False)
                item.volume, item.engine = fresh.volume, fresh.engine
            raise
        item.volume, item.engine = fresh.volume, fresh.engine
        await self._engine.call(self.key.uid, _destroy, item.volume, item.hidden)
        item.hidden = frozenset()
        await self._engine.call(self.key.uid, item.read)
        LOG.warning("%s: reopened %s after a failed record", self.key, item.path)
        return True

    async def drop(self, item: OpenVolume) -> None:
        """Closes and unlinks a file that is not needed; does nothing for one that was lost."""
        if item not in self.open:
            return
        self.open.remove(item)
        if await self._engine.call(self.key.uid, _close_in_place, item.volume):
            await self._engine.call(self.key.uid, item.path.unlink, missing_ok=True)
            LOG.info("%s: deleted %s: it is not needed", self.key, item.path)

    def limit(self) -> None:
        """Applies --max-bandwidth to every open file; waits for no disk."""
        for item in self.open:
            with contextlib.suppress(ValueError):  # closed, and about to be reopened
                item.volume.limit(self._config.max_bandwidth_bytes)

    async def close(self) -> None:
        while self.open or self.gone:
            item = (self.open or self.gone).pop()
            with contextlib.suppress(OSError, _core.NativeError):
                await self._engine.call(self.key.uid, _close_and_wait, item.volume)

    async def _opened(self, path: Path, generation: int, *, writable: bool = True) -> OpenVolume:
        config = self._config
        engine = self._engine.io.wanted if writable else EVERYWHERE

        def open_it() -> OpenVolume:
            volume = _core.Volume(
                str(path), writable=writable, allow_buffered=config.allow_any_filesystem,
                engine=engine,
            )  # fmt: skip
            try:
                info = volume.info()
                if (info.uid, info.job, info.rank) != self.key:
                    raise RefusedError(
                        f"{path} belongs to job {info.job!r} rank {info.rank} of uid {info.uid}",
                        hint="a volume file was renamed; put it back where it was",
                    )
                item = OpenVolume(path, generation, volume, info, volume.engine)
                item.read()
                return item
            except BaseException:
                volume.close()
                raise

        item = await self._engine.call(self.key.uid, open_it)
        # On the loop, like every change of the limit: none is missed from here to `open`.
        item.volume.limit(config.max_bandwidth_bytes)
        self._instruct(item)
        if writable:
            self._engine.io.opened(item.engine)
        return item
