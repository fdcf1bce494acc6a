"""The background check: every kept checkpoint of every volume is read and verified now and then,
so that rot is found while an older checkpoint can still take its place.

It reads one checkpoint at a time, at a limited rate, in pieces. Between two pieces it waits for
saves and restores. It holds a slot for one piece only, so that no save ever waits for the check."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pccheck_native import _core, catalog, layout
from pccheck_native.subset import Pieces
from pccheck_wire.basics import size_text
from pccheck_wire.errors import NoCheckpointError, PccheckError
from pccheck_wire.units import MIB
from pccheckd.base import state_file
from pccheckd.base.background import Background, happened
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key, OpenVolume

#: Read at once. Larger pieces burden the disk for longer; smaller ones read the manifest (8 bytes
#: per MiB of payload) more often.
PIECE_BYTES = 16 * MIB
#: A node may have saves in flight at every moment: after this long one piece is read anyway.
PATIENCE_S = 10.0
LOOK_S = 0.25
#: A disk that was away for a moment has lost nothing: what cannot be read is read again.
CONFIRM_S = 5.0
#: The wait for the next pass is done in such steps, because clocks are set and machines sleep.
WAIT_STEP_S = 60.0
PIECE_S_MAX = 60.0  # between two pieces, however low the rate
INTERVAL_MIN_S = 1.0
#: "recycled": a newer checkpoint took the slot, or the volume was closed.
Result = Literal["ok", "damaged", "unreadable", "recycled"]
RESULTS: tuple[Result, ...] = ("ok", "damaged", "unreadable", "recycled")
BAD = {"damaged": "is damaged", "unreadable": "cannot be read"}
#: Remembers the progress over a restart of the daemon. Losing the file costs one more pass.
STATE_NAME, STATE_SCHEMA = ".pccheckd.scrub.json", 1

_R = TypeVar("_R")


@dataclass(slots=True)
class ScrubState:
    """Times are wall clock seconds: they must survive a reboot."""

    since_s: float = 0.0  # when the first pass could have begun: the daemon's first start here
    began_s: float = 0.0  # of the pass in progress, or of the last one; 0: none ever began
    ended_s: float = 0.0  # of the last complete pass
    after: str = ""  # the volume that the pass in progress has finished last; "" between passes
    running: bool = False
    damaged: int = 0  # found by the last or present pass
    unreadable: int = 0
    checked: int = 0

    @classmethod
    def load(cls, storage: Path) -> ScrubState:
        """Values of another type than the field's are ignored."""
        stored, new = state_file.load(storage / STATE_NAME, STATE_SCHEMA), asdict(cls())
        same = {name for name in new if type(stored.get(name)) is type(new[name])}
        return cls(**{name: stored[name] for name in same})  # type: ignore[arg-type]

    def store(self, storage: Path) -> None:
        """Raises OSError."""
        state_file.store(storage / STATE_NAME, STATE_SCHEMA, asdict(self))


@dataclass(slots=True)
class Pass:
    """One reading of everything, from the list of files that was made at its beginning."""

    volumes: int
    bytes: int  # of payload in all of them, according to their records
    began_ns: int
    volumes_done: int = 0
    bytes_done: int = 0
    results: Counter[str] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """By bytes; 1 when there is nothing to read."""
        return min(1.0, self.bytes_done / self.bytes) if self.bytes else 1.0


class TurnedOffError(Exception):
    """The check was turned off within a volume; the next pass reads that volume again."""


class Scrubber(Background):
    """Started and stopped by the daemon's start and stop; only the loop touches it."""

    restart_s = WAIT_STEP_S

    def __init__(self, registry: Registry, *, wall: Callable[[], float] = time.time) -> None:
        self.progress: Pass | None = None
        self.paused = False
        self.results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.bytes_read = 0
        self.passes = 0
        self._config = registry.config
        self._storage = registry.config.storage
        self._registry = registry
        self._wall = wall
        self.state = ScrubState()
        self._changed = asyncio.Event()
        self._thread = Threads(1, "scrub")
        self._pieces = Pieces(PIECE_BYTES, threads=0)  # used in that thread

    def start(self) -> None:
        self._thread.submit(_yield_disk)
        super().start()

    async def close(self) -> None:
        await super().close()
        self._thread.stop()

    def wake(self) -> None:
        """The configuration has changed."""
        self._changed.set()

    @property
    def enabled(self) -> bool:
        return self._config.scrub_rate_bytes > 0 and self._config.scrub_interval_s > 0

    def document(self) -> dict[str, object]:
        """For `status`: its state and results."""
        now, state = self.progress, self.state
        doing = "paused" if self.paused else "reading" if now else "waiting"
        names = ("volumes", "volumes_done", "bytes", "bytes_done")
        return {
            "state": doing if self.enabled else "off",
            "rate_bytes": self._config.scrub_rate_bytes,
            "interval_s": self._config.scrub_interval_s,
            "next_s": round(self._due_in_s(), 1) if self.enabled and now is None else None,
            "progress": round(now.ratio, 4) if now else None,
            **{name: getattr(now, name) if now else None for name in names},
            "last_ended_wall_ns": int(state.ended_s * 1e9) or None,
            "checked": state.checked,
            "damaged": state.damaged,
            "unreadable": state.unreadable,
        }

    # -- passes --------------------------------------------------------------------------------

    async def _run(self) -> None:
        self.state = await self._read(ScrubState.load, self._storage)
        if not self.state.since_s:
            self.state.since_s = self._wall()
            await self._remember()
        while True:
            try:
                while True:
                    await self._end_future()
                    if self.enabled and self._due_in_s() <= 0:
                        break
                    due_s = self._due_in_s() if self.enabled else WAIT_STEP_S
                    await self._pause(min(due_s, WAIT_STEP_S))
                await self._pass()
            except (OSError, PccheckError, _core.NativeError) as error:
                LOG.warning("background check interrupted: %s; pccheckd tries again", error)
                await self._pause(WAIT_STEP_S)

    def _due_in_s(self) -> float:
        """Until the next pass; 0 when one was interrupted."""
        if self.state.running:
            return 0.0
        now = self._wall()
        before = min(max(self.state.began_s, self.state.since_s), now)  # until `_end_future`
        return max(0.0, before + max(self._config.scrub_interval_s, INTERVAL_MIN_S) - now)

    async def _end_future(self) -> None:
        """A clock was set back: times after now become now, and are stored, so that the interval
        runs down."""
        state, now = self.state, self._wall()
        if max(state.since_s, state.began_s) > now:
            state.since_s, state.began_s = min(state.since_s, now), min(state.began_s, now)
            await self._remember()

    async def _pause(self, limit_s: float) -> None:
        self._changed.clear()
        await happened(self._changed, limit_s)

    async def _pass(self) -> None:
        """Reads every volume, or continues behind the one that was finished before a restart."""
        state, files = self.state, await self._read(layout.list_volumes, self._storage)
        if not state.running:
            self.state = state = ScrubState(
                since_s=state.since_s, began_s=self._wall(), ended_s=state.ended_s, running=True
            )
        left = sorted((file for file in files if self._name(file) > state.after), key=self._name)
        self.progress = now = Pass(
            len(left), await self._read(self._payload_of, left), time.monotonic_ns()
        )
        try:
            for file in left:
                if not self.enabled:
                    return  # continues here when it is enabled again
                try:
                    await self._volume(file)
                except TurnedOffError:
                    return
                except (NoCheckpointError, FileNotFoundError):
                    pass  # dropped or outgrown meanwhile
                except (OSError, PccheckError, _core.NativeError) as error:
                    self._count("unreadable")  # the others are read anyway
                    LOG.error("background check: %s cannot be checked: %s", file.path, error)
                now.volumes_done += 1
                state.after = self._name(file)
                await self._remember()
        finally:
            self.progress, self.paused = None, False
        state.running, state.after, state.ended_s = False, "", self._wall()
        self.passes += 1
        await self._remember()
        bad = [f"{now.results[one]} {one}" for one in BAD if now.results[one]]
        (LOG.error if bad else LOG.info)(
            "background check: %d checkpoints, %s in %.0f s: %s",
            now.results["ok"] + now.results["damaged"], size_text(now.bytes_done),
            (time.monotonic_ns() - now.began_ns) / 1e9,
            f"{', '.join(bad)}, see: pccheckctl status" if bad else "no damage",
            extra={"fields": {"event": "scrubbed", **now.results}},
        )  # fmt: skip

    async def _remember(self) -> None:
        try:
            await self._read(self.state.store, self._storage)
        except OSError as error:
            LOG.warning("%s cannot be written: %s", self._storage / STATE_NAME, error)

    def _name(self, file: layout.VolumeFile) -> str:
        return str(file.path.relative_to(self._storage))

    # -- one volume ----------------------------------------------------------------------------

    async def _volume(self, file: layout.VolumeFile) -> None:
        key = Key(file.uid, file.job, file.rank)
        item = _item(self._registry.loaded(key), file.path)
        volume = item.volume if item is not None else await self._read(self._opened, file.path)
        try:
            if item is not None:
                there = list(item.checkpoints)
            else:
                there = await self._read(catalog.checkpoints_of, volume, file.path)
            for found in there:
                await self._checkpoint(key, found, volume)
        finally:
            if item is None:
                await self._read(volume.close)

    async def _checkpoint(
        self, key: Key, found: catalog.StoredCheckpoint, volume: _core.Volume
    ) -> None:
        """Reads one to its end. Damage counts only when a second reading, of the loaded volume,
        confirms it: a trainer may have written to the volume meanwhile, or the disk was away."""
        if found.is_damaged:
            await self._flagged(key, found)
            return
        result, at = await self._first_problem(key, found, volume, 0)
        if result in BAD:
            await asyncio.sleep(CONFIRM_S)
            _, tenant = await self._registry.existing(key)
            item = _item(tenant, found.volume_path)
            if item is None:
                return
            result, at = await self._first_problem(key, found, item.volume, at)
        self._count(result)
        loaded = self._registry.loaded(key)
        if result in BAD:
            await self._bad(key, found, result, at)
        elif result == "ok" and loaded is not None:
            loaded.retention.unreadable.discard(found.id.sequence)

    async def _bad(
        self, key: Key, found: catalog.StoredCheckpoint, result: Result, at: int
    ) -> None:
        """Confirmed. Only damage is flagged on the disk: an unreadable one may become readable."""
        LOG.error(
            "background check: %s: checkpoint %d of step %d %s near byte %d of %s",
            key, found.id.sequence, found.id.step, BAD[result], at, found.volume_path,
            extra={"fields": {"event": result, "uid": key.uid, "job": key.job, "rank": key.rank,
                              "step": found.id.step, "sequence": found.id.sequence,
                              "slot": found.slot}},
        )  # fmt: skip
        _, tenant = await self._registry.existing(key)
        if result == "damaged":
            await tenant.retention.damaged(found.id.sequence)
        else:
            tenant.retention.not_read(found.id.sequence)

    async def _flagged(self, key: Key, found: catalog.StoredCheckpoint) -> None:
        """Known to be damaged, and reported before. If all of it can be read, it loses the flag."""
        _, tenant = await self._registry.existing(key)
        item, reports = _item(tenant, found.volume_path), tenant.retention.reports
        if item is None:
            return
        result, _at = await self._first_problem(key, found, item.volume, 0)
        if result != "ok" or self._registry.loaded(key) is not tenant:
            return
        if await tenant.retention.found_whole(found.id.sequence, reports=reports):
            self._count("ok")

    async def _first_problem(
        self, key: Key, found: catalog.StoredCheckpoint, volume: _core.Volume, offset: int
    ) -> tuple[Result, int]:
        """The result of reading from `offset` to the end, and where the first bad piece is."""
        while offset < found.payload_bytes:
            if not self.enabled:
                raise TurnedOffError
            piece_s = PIECE_BYTES / self._config.scrub_rate_bytes
            due = time.monotonic() + min(piece_s, PIECE_S_MAX)
            await self._give_way()
            length = min(PIECE_BYTES, found.payload_bytes - offset)
            tenant = self._registry.loaded(key)
            if tenant is not None and all(one.volume is not volume for one in tenant.volumes.open):
                tenant = None  # it has opened the file by itself
            try:
                async with tenant.uses.read() if tenant is not None else contextlib.nullcontext():
                    await self._read(self._pieces.check, volume, found.id.sequence, offset, length)
            except (ValueError, OSError, _core.NativeError) as error:
                return _result_of(error), offset
            offset += length
            self.bytes_read += length
            if self.progress is not None:
                self.progress.bytes_done += length
            await self._pause(max(0.0, due - time.monotonic()))  # a new rate applies at once
        return "ok", offset

    async def _give_way(self) -> None:
        """Waits until nothing is saved or restored, up to PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while any(t.uses.reads or t.ledger.moving() for t in self._registry.tenants()):
            if time.monotonic() >= deadline:
                break
            self.paused = True
            await asyncio.sleep(LOOK_S)
        self.paused = False

    def _count(self, result: Result) -> None:
        self.results[result] += 1
        if self.progress is not None:
            self.progress.results[result] += 1
        self.state.checked += result in ("ok", "damaged")
        self.state.unreadable += result == "unreadable"
        self.state.damaged += result == "damaged"

    # -- in the thread -------------------------------------------------------------------------

    async def _read(self, function: Callable[..., _R], *arguments: object) -> _R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    def _opened(self, path: Path) -> _core.Volume:
        buffered = self._config.allow_any_filesystem
        return _core.Volume(str(path), writable=False, allow_buffered=buffered)

    def _payload_of(self, files: list[layout.VolumeFile]) -> int:
        total = 0
        for file in files:
            with (
                contextlib.suppress(OSError, _core.NativeError),
                contextlib.closing(self._opened(file.path)) as volume,
            ):
                total += sum(entry.payload_bytes for entry in volume.table() if entry.sequence)
        return total


def _item(tenant: Tenant | None, path: Path) -> OpenVolume | None:
    every = tenant.volumes.open if tenant is not None else []
    return next((item for item in every if item.path == path), None)


def _result_of(error: BaseException) -> Result:
    """What a failed read says about the checkpoint; lack of memory says nothing."""
    if isinstance(error, _core.NativeError):
        found: dict[str, Result] = {"DAMAGED": "damaged", "UNREADABLE": "unreadable"}
        return found.get(error.code_name, "recycled")
    if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOMEM):
        return "unreadable"
    return "recycled"


def _yield_disk() -> None:
    """Reads of this thread come after all others, where the disk's scheduler knows priorities."""
    import psutil  # not before the daemon is ready: the import takes time

    with contextlib.suppress(OSError, psutil.Error):
        psutil.Process(threading.get_native_id()).ionice(psutil.IOPRIO_CLASS_IDLE)
