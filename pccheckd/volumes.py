"""The volume files of one (uid, job, rank): found, opened, made, outgrown, reopened, dropped.

The last one takes new checkpoints. One that was outgrown stays until its follower has what is
needed for recovery. Nothing here is called twice at the same time: the tenant's lock is held."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from pccheck_native import _core, catalog, dropping, layout
from pccheck_native.group import Agreement
from pccheck_wire.errors import PccheckError, RefusedError, StorageFullError

from .engine import Engine, translated
from .io_engine import PWRITE
from .logs import LOG
from .options import Config

PINNED = _core.SLOT_PINNED
QUARANTINED, DAMAGED = _core.SLOT_QUARANTINED, _core.SLOT_DAMAGED
PAYLOAD_BYTES_MAX = 1 << 50
GIVEN_UP_MAX = 128  # PCC_GIVEN_UP_MAX
SEQUENCE_BITS = 32  # more than any volume gives out


@dataclass(frozen=True, slots=True)
class Key:
    """Whose volume: the unit of ownership."""

    uid: int
    job: str
    rank: int

    def __str__(self) -> str:
        return f"job {self.job!r} rank {self.rank} of uid {self.uid}"


@dataclass(slots=True)
class OpenVolume:
    path: Path
    generation: int
    volume: _core.Volume
    info: _core.VolumeInfo
    engine: str = ""  # what reads and writes it
    #: As last read, newest first.
    checkpoints: list[catalog.Checkpoint] = field(default_factory=list)
    quarantined: int = 0

    @property
    def limit_bytes(self) -> int | None:
        """Bytes per second that it may read and write; 0: no limit; None while it is reopened."""
        with contextlib.suppress(ValueError):
            return self.volume.bytes_per_second
        return None

    def read(self) -> None:
        """Reads the newest record again. Blocks."""
        self.info = self.volume.info()
        self.checkpoints = catalog.checkpoints_of(self.volume, self.path)
        self.quarantined = sum(1 for e in self.volume.table() if e.flags & QUARANTINED)


def _size(path: Path) -> int:
    """0 for a file that was dropped while we looked."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


class VolumeSet:
    def __init__(self, key: Key, config: Config, engine: Engine) -> None:
        self.key = key
        self._config = config
        self._engine = engine
        self.open: list[OpenVolume] = []
        self._agreement = Agreement(0, 0, frozenset())  # of the job's ranks
        #: Files that could not be opened, and why.
        self.unreadable: dict[Path, PccheckError] = {}

    @property
    def current(self) -> OpenVolume | None:
        return self.open[-1] if self.open else None

    def checkpoints(self) -> list[catalog.Checkpoint]:
        """Durable checkpoints of all files as last read, newest first."""
        return catalog.newest_first(found for item in self.open for found in item.checkpoints)

    def find(self, sequence: int) -> OpenVolume | None:
        """The volume that holds a durable checkpoint."""
        for item in self.open:
            if any(found.sequence == sequence for found in item.checkpoints):
                return item
        return None

    def newest_incarnation(self) -> int:
        """The newest that ever opened one of the files, or saved in one."""
        saved = (found.incarnation for found in self.checkpoints())
        return max((*(item.info.incarnation for item in self.open), *saved), default=0)

    def last_sequence(self) -> int:
        """What comes next is above it, in every file."""
        return max((item.info.next_sequence - 1 for item in self.open), default=0)

    def obey(self, agreement: Agreement, pending: Collection[int]) -> None:
        """What the ranks of the job have agreed on, for every open file; `pending` is what this
        rank has in flight. Waits for no disk."""
        self._agreement = agreement
        for item in self.open:
            self._instruct(item, pending)

    def _instruct(self, item: OpenVolume, pending: Collection[int] = ()) -> None:
        mine = {*pending, *(found.sequence for found in item.checkpoints)}
        given_up = sorted(mine & self._agreement.given_up)
        with contextlib.suppress(ValueError):  # closed, and about to be reopened
            item.volume.set_group(
                oldest=self._agreement.oldest, newest=self._agreement.newest,
                given_up=given_up[-GIVEN_UP_MAX:],
            )  # fmt: skip

    async def load(self) -> None:
        """Opens what is on the disk. Files that cannot be opened go to `unreadable`."""
        for file in await self._engine.call(self.key.uid, self._files):
            try:
                self.open.append(await self._opened(file.path, file.generation))
            except (OSError, _core.NativeError, PccheckError) as error:
                self.unreadable[file.path] = translated(error, f"the volume {file.path}")
                LOG.warning("%s", self.unreadable[file.path])

    @property
    def is_followed(self) -> bool:
        """A later file than the current one is there but cannot be read: to go on in the current
        one would give its sequences out again."""
        current = self.current
        return current is not None and any(
            layout.parse_volume_path(self._config.storage, path).generation > current.generation
            for path in self.unreadable
        )

    def require_readable(self, *, fresh: bool) -> None:
        """Raises why no volume can be read, unless one can, there is none, or `fresh` says to go
        on without: a job must not begin at step 0 over checkpoints by accident."""
        if self.unreadable and not fresh and not self.checkpoints():
            error = next(iter(self.unreadable.values()))
            raise type(error)(
                error.message, hint=f"{error.hint}; or start without it: fresh=True".lstrip("; ")
            )

    async def refresh(self) -> None:
        """Reads tables and states again, in a thread."""
        for item in list(self.open):
            with contextlib.suppress(ValueError):  # dropped or reopened meanwhile
                await self._engine.call(self.key.uid, item.read)

    async def make(
        self, payload_bytes: int, *, incarnation: int, world_size: int, next_sequence: int
    ) -> OpenVolume:
        """A new file whose slots hold `payload_bytes`; the sequence goes on.

        Raises StorageFullError with the numbers.
        """
        config, key = self._config, self.key
        if not 0 < payload_bytes <= PAYLOAD_BYTES_MAX:
            raise RefusedError(f"a checkpoint of {payload_bytes} bytes cannot be")
        blocks = self.open[-1].info.block_bytes if self.open else config.block_bytes
        capacity = layout.capacity_for(payload_bytes)
        try:
            needed = _core.volume_bytes_for(capacity, config.slots, blocks)
        except OSError as error:
            raise RefusedError(
                f"{config.slots} slots for checkpoints of {payload_bytes} bytes in blocks of "
                f"{blocks} are more than a volume can have"
            ) from error
        generation = await self._engine.call(
            key.uid, layout.next_generation, config.storage, *self._key_parts()
        )
        path = layout.volume_path(config.storage, key.uid, key.job, key.rank, generation)
        await self.refresh()
        sequence = max(next_sequence, *(item.info.next_sequence for item in self.open), 1)
        if self.unreadable:  # above whatever they hold, should they be read again one day
            sequence = max(sequence, generation << SEQUENCE_BITS)

        def create() -> None:
            layout.make_directories(path)
            _core.create_volume(
                str(path), uid=key.uid, job=key.job, rank=key.rank, world_size=world_size,
                slots=config.slots, keep=config.keep, payload_capacity=capacity,
                next_sequence=sequence, incarnation=incarnation, block_bytes=blocks,
                allow_buffered=config.allow_any_filesystem,
            )  # fmt: skip

        await self._engine.io.chosen()  # or what is measured would take room meanwhile
        try:
            async with self._engine.making_volumes:  # or two would both find the last room free
                await self._engine.call(key.uid, self._check_room, needed)
                await self._engine.call(key.uid, create)
            made = await self._opened(path, generation)
        except (OSError, _core.NativeError) as error:
            told = translated(error, f"a volume of {needed} bytes for {key}")
            if isinstance(told, StorageFullError):
                hint = await self._engine.call(key.uid, self._droppable)
                told = StorageFullError(told.message, hint=hint)
            raise told from error
        self.open.append(made)
        LOG.info("%s: made %s, %d slots, %d bytes", key, path, config.slots, needed)
        return made

    async def reopen(self, item: OpenVolume) -> None:
        """Closes a stopped volume and reads it from the media again. When it cannot be written to
        any more, what is in it can still be read."""
        await self._engine.call(self.key.uid, item.volume.close)
        try:
            fresh = await self._opened(item.path, item.generation)
        except (OSError, _core.NativeError, PccheckError):
            with contextlib.suppress(OSError, _core.NativeError, PccheckError):
                fresh = await self._opened(item.path, item.generation, writable=False)
                item.volume, item.engine = fresh.volume, fresh.engine
            raise
        item.volume, item.engine = fresh.volume, fresh.engine
        await self._engine.call(self.key.uid, item.read)
        LOG.warning("%s: reopened %s after a failed record", self.key, item.path)

    async def drop(self, item: OpenVolume) -> None:
        """Closes and unlinks an outgrown file."""
        self.open.remove(item)
        await self._engine.call(self.key.uid, item.volume.close)
        await self._engine.call(self.key.uid, item.path.unlink, missing_ok=True)
        LOG.info("%s: dropped the outgrown %s", self.key, item.path)

    def limit(self) -> None:
        """--max-bandwidth as it is now, for every open file; waits for no disk."""
        for item in self.open:
            with contextlib.suppress(ValueError):  # closed, and about to be reopened
                item.volume.limit(self._config.max_bandwidth_bytes)

    async def close(self) -> None:
        while self.open:
            item = self.open.pop()
            with contextlib.suppress(OSError, _core.NativeError):
                await self._engine.call(self.key.uid, item.volume.close)

    def _files(self) -> list[layout.VolumeFile]:
        uid, job, rank = self._key_parts()
        return layout.list_volumes(self._config.storage, uid=uid, job=job, rank=rank)

    def _key_parts(self) -> tuple[int, str, int]:
        return self.key.uid, self.key.job, self.key.rank

    async def _opened(self, path: Path, generation: int, *, writable: bool = True) -> OpenVolume:
        config = self._config
        engine = await self._engine.io.chosen() if writable else PWRITE

        def open_it() -> OpenVolume:
            volume = _core.Volume(
                str(path), writable=writable, allow_buffered=config.allow_any_filesystem,
                engine=engine,
            )  # fmt: skip
            try:
                info = volume.info()
                if (info.uid, info.job, info.rank) != self._key_parts():
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
        # On the loop, as every change of it: none can be missed from here to `open`.
        item.volume.limit(config.max_bandwidth_bytes)
        self._instruct(item)
        if writable:
            self._engine.io.opened(item.engine)
        return item

    def _check_room(self, needed: int) -> None:
        config = self._config
        free = shutil.disk_usage(config.storage).free
        numbers = f"a volume for {self.key} takes {needed} bytes ({config.slots} slots)"
        if needed > free:
            raise StorageFullError(
                f"{numbers}, but {config.storage} has {free} free", hint=self._droppable()
            )
        if config.max_storage_bytes:
            used = sum(_size(path) for path in config.storage.glob("*/*/*.pcc"))
            if used + needed > config.max_storage_bytes:
                raise StorageFullError(
                    f"{numbers}, but {used} of --max-storage {config.max_storage_bytes} are used",
                    hint=self._droppable(),
                )

        if config.max_storage_per_user_bytes:
            uid, limit = self.key.uid, config.max_storage_per_user_bytes
            used = sum(_size(path) for path in (config.storage / str(uid)).glob("*/*.pcc"))
            if used + needed > limit:
                raise StorageFullError(
                    f"{numbers}, but uid {uid} uses {used} of --max-storage-per-user {limit}",
                    hint=self._droppable(),
                )

    def _droppable(self) -> str:
        """Other jobs of the same user, finished ones first, then the largest."""
        found: list[dropping.JobUse] = []
        with contextlib.suppress(OSError):
            found = dropping.jobs(self._config.storage, uid=self.key.uid)
        others = [job for job in found if job.job != self.key.job]
        others.sort(key=lambda job: (not job.done, -job.bytes))
        if not others:
            return "free some room, use fewer --slots, or another --storage"
        named = ", ".join(
            f"pccheckctl drop {job.job} ({job.bytes} bytes{', finished' if job.done else ''})"
            for job in others[:3]
        )
        return f"make room by dropping jobs that are over: {named}"
