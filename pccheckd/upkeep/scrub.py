"""The background check: every kept checkpoint of every volume is read and verified now and then,
so that rot is found while an older checkpoint can still take its place.

One checkpoint at a time, at a limited rate, in pieces; between two pieces saves and restores go
first. A slot is held for one piece only, so that no save ever waits for the check."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from pccheck_native import _core, catalog, layout
from pccheck_wire.basics import size_text
from pccheck_wire.errors import NoCheckpointError, PccheckError
from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads
from pccheckd.config.sources import Config
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key, OpenVolume

from . import scrub_state
from .scrub_reading import (
    PIECE_BYTES,
    Result,
    check,
    open_volume,
    payload_of,
    result_of,
    stand_back,
)

#: A node may have saves in flight at every moment: after so long one piece is read all the same.
PATIENCE_S = 10.0
LOOK_S = 0.25
#: A disk that was away for a moment has lost nothing: what cannot be read is read again.
CONFIRM_S = 5.0
#: Of a wait for the next pass: clocks are set and machines sleep.
WAIT_STEP_S = 60.0
PIECE_S_MAX = 60.0  # between two pieces, however low the rate
INTERVAL_MIN_S = 1.0
RESULTS: tuple[Result, ...] = ("ok", "damaged", "unreadable", "recycled")
BAD = {"damaged": "is damaged", "unreadable": "cannot be read"}

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(slots=True)
class Pass:
    """One reading of everything, from the list of files that was made at its beginning."""

    volumes: int
    bytes: int  # of payload in all of them, as far as their records tell
    began_ns: int
    volumes_done: int = 0
    bytes_done: int = 0
    results: Counter[str] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """By bytes; 1 when there is nothing to read."""
        return min(1.0, self.bytes_done / self.bytes) if self.bytes else 1.0


class TurnedOffError(Exception):
    """In the middle of a volume, which is read from its beginning when it is wanted again."""


class Scrubber(Background):
    """Started and stopped by the daemon's start and stop; only the loop touches it."""

    restart_s = WAIT_STEP_S

    def __init__(
        self, config: Config, registry: Registry, *, wall: Callable[[], float] = time.time
    ) -> None:
        self.progress: Pass | None = None
        self.paused = False
        self.results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.bytes_read = 0
        self.passes = 0
        self._storage = config.storage
        self._buffered = config.allow_any_filesystem
        self._config = config
        self._registry = registry
        self._wall = wall
        self._state = scrub_state.State()
        self._changed = asyncio.Event()
        self._thread = Threads(1, "scrub", initializer=stand_back)

    def start(self) -> None:
        self._thread.begin()
        super().start()

    async def close(self) -> None:
        await super().close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """The configuration has changed."""
        self._changed.set()

    @property
    def enabled(self) -> bool:
        return self._config.scrub_rate_bytes > 0 and self._config.scrub_interval_s > 0

    @property
    def damaged(self) -> int:
        """Found by the last or present pass."""
        return self._state.damaged

    @property
    def unreadable(self) -> int:
        """Volumes and checkpoints that this pass could not read."""
        return self._state.unreadable

    @property
    def last_ended_s(self) -> float:
        """Wall time; 0 when none has come to its end."""
        return self._state.ended_s

    def document(self) -> dict[str, object]:
        """For `status`: what it does, and what came of it."""
        now, state = self.progress, self._state
        doing = "paused" if self.paused else "reading" if now else "waiting"
        return {
            "state": doing if self.enabled else "off",
            "rate_bytes": self._config.scrub_rate_bytes,
            "interval_s": self._config.scrub_interval_s,
            "next_s": round(self._due_in_s(), 1) if self.enabled and now is None else None,
            "progress": round(now.ratio, 4) if now else None,
            "volumes": now.volumes if now else None,
            "volumes_done": now.volumes_done if now else None,
            "bytes": now.bytes if now else None,
            "bytes_done": now.bytes_done if now else None,
            "last_ended_wall_ns": int(state.ended_s * 1e9) or None,
            "checked": state.checked,
            "damaged": state.damaged,
            "unreadable": state.unreadable,
        }

    # -- passes --------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._state = await self._read(scrub_state.load, self._storage)
        if not self._state.since_s:
            self._state.since_s = self._wall()
            await self._remember()
        while True:
            try:
                await self._until_due()
                await self._pass()
            except (OSError, PccheckError, _core.NativeError) as error:
                LOG.warning("the background check cannot go on: %s; it tries again", error)
                await self._pause(WAIT_STEP_S)

    def _due_in_s(self) -> float:
        """Until the next pass; 0 when one was interrupted."""
        if self._state.running:
            return 0.0
        now = self._wall()
        before = min(max(self._state.began_s, self._state.since_s), now)  # a clock was set back
        return max(0.0, before + max(self._config.scrub_interval_s, INTERVAL_MIN_S) - now)

    async def _until_due(self) -> None:
        while not self.enabled or self._due_in_s() > 0:
            await self._pause(min(self._due_in_s(), WAIT_STEP_S) if self.enabled else WAIT_STEP_S)

    async def _pause(self, limit_s: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), limit_s)

    async def _pass(self) -> None:
        """Reads every volume, or goes on behind the one that was finished last before a restart."""
        state, files = self._state, await self._read(layout.list_volumes, self._storage)
        if not state.running:
            self._state = state = scrub_state.State(
                since_s=state.since_s, began_s=self._wall(), ended_s=state.ended_s, running=True
            )
        left = sorted((file for file in files if self._name(file) > state.after), key=self._name)
        payload = await self._read(payload_of, left, self._buffered)
        now = Pass(len(left), payload, time.monotonic_ns())
        self.progress = now
        try:
            for file in left:
                if not self.enabled:
                    return  # goes on here when it is wanted again
                try:
                    await self._volume(file)
                except TurnedOffError:
                    return
                except NoCheckpointError:
                    pass  # dropped meanwhile
                except (OSError, PccheckError, _core.NativeError) as error:
                    self._count("unreadable")  # the others are read all the same
                    LOG.error("background check: %s cannot be checked: %s", file.path, error)
                now.volumes_done += 1
                state.after = self._name(file)
                await self._remember()
        finally:
            self.progress, self.paused = None, False
        state.running, state.after, state.ended_s = False, "", self._wall()
        self.passes += 1
        await self._remember()
        self._tell(now)

    def _tell(self, done: Pass) -> None:
        took_s = (time.monotonic_ns() - done.began_ns) / 1e9
        bad = [f"{done.results[one]} {one}" for one in BAD if done.results[one]]
        log = LOG.error if bad else LOG.info
        log(
            "background check: %d checkpoints, %s in %.0f s: %s",
            done.results["ok"] + done.results["damaged"], size_text(done.bytes_done), took_s,
            f"{', '.join(bad)}, see: pccheckctl status" if bad else "all whole",
            extra={"fields": {"event": "scrubbed", **done.results}},
        )  # fmt: skip

    async def _remember(self) -> None:
        try:
            await self._read(scrub_state.store, self._storage, self._state)
        except OSError as error:
            LOG.warning("%s cannot be written: %s", self._storage / scrub_state.NAME, error)

    def _name(self, file: layout.VolumeFile) -> str:
        return str(file.path.relative_to(self._storage))

    # -- one volume ----------------------------------------------------------------------------

    async def _volume(self, file: layout.VolumeFile) -> None:
        key = Key(file.uid, file.job, file.rank)
        item = self._loaded(key, file.path)
        if item is not None:
            for found in list(item.checkpoints):
                await self._checkpoint(key, found, item.volume)
            return
        try:
            volume = await self._read(open_volume, file.path, self._buffered)
        except FileNotFoundError:
            return  # dropped or outgrown meanwhile
        except (OSError, _core.NativeError) as error:
            self._count("unreadable")
            LOG.error("background check: the volume %s cannot be read: %s", file.path, error)
            return
        try:
            for found in await self._read(catalog.checkpoints_of, volume, file.path):
                await self._checkpoint(key, found, volume)
        finally:
            await self._read(volume.close)

    async def _checkpoint(self, key: Key, found: catalog.Checkpoint, volume: _core.Volume) -> None:
        """Reads one to its end. Nothing bad is believed that a second reading, of the loaded
        volume, does not confirm: a trainer may have come and written to it, or the disk was away.
        """
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
            loaded.retention.unreadable.discard(found.sequence)

    async def _bad(self, key: Key, found: catalog.Checkpoint, result: Result, at: int) -> None:
        """Twice: only damage stays, the disk may read it another time."""
        LOG.error(
            "background check: %s: checkpoint %d of step %d %s near byte %d of %s",
            key, found.sequence, found.step, BAD[result], at, found.volume_path,
            extra={"fields": {"event": result, "uid": key.uid, "job": key.job, "rank": key.rank,
                              "step": found.step, "sequence": found.sequence,
                              "slot": found.slot}},
        )  # fmt: skip
        _, tenant = await self._registry.existing(key)
        if result == "damaged":
            await tenant.retention.damaged(found.sequence)
        else:
            tenant.retention.not_read(found.sequence)

    async def _flagged(self, key: Key, found: catalog.Checkpoint) -> None:
        """Known to be damaged, and told then. Whole again, it loses the flag."""
        _, tenant = await self._registry.existing(key)
        item, reports = _item(tenant, found.volume_path), tenant.retention.reports
        if item is None:
            return
        result, _at = await self._first_problem(key, found, item.volume, 0)
        if result != "ok" or self._registry.loaded(key) is not tenant:
            return
        if await tenant.retention.found_whole(found.sequence, reports=reports):
            self._count("ok")

    async def _first_problem(
        self, key: Key, found: catalog.Checkpoint, volume: _core.Volume, offset: int
    ) -> tuple[Result, int]:
        """What comes of reading it from there to its end, and where the first piece is that is not
        as it was written."""
        while offset < found.payload_bytes:
            if not self.enabled:
                raise TurnedOffError
            piece_s = PIECE_BYTES / self._config.scrub_rate_bytes
            due = time.monotonic() + min(piece_s, PIECE_S_MAX)
            await self._give_way()
            length = min(PIECE_BYTES, found.payload_bytes - offset)
            tenant = self._tenant(key, volume)
            try:
                await self._held(tenant, volume, found.sequence, offset, length)
            except (ValueError, OSError, _core.NativeError) as error:
                return result_of(error), offset
            offset += length
            self.bytes_read += length
            if self.progress is not None:
                self.progress.bytes_done += length
            await self._pause(max(0.0, due - time.monotonic()))  # a new rate counts at once
        return "ok", offset

    async def _held(
        self, tenant: Tenant | None, volume: _core.Volume, sequence: int, offset: int, length: int
    ) -> None:
        """Reads one piece; a loaded volume stays open meanwhile."""
        if tenant is not None:
            tenant.reading += 1
        try:
            await self._read(check, volume, sequence, offset, length)
        finally:
            if tenant is not None:
                tenant.reading -= 1

    async def _give_way(self) -> None:
        """Until nothing is saved or restored, but not for ever."""
        deadline = time.monotonic() + PATIENCE_S
        while self._busy() and time.monotonic() < deadline:
            self.paused = True
            await asyncio.sleep(LOOK_S)
        self.paused = False

    def _busy(self) -> bool:
        return any(t.reading or t.ledger.live() for t in self._registry.tenants())

    def _count(self, result: Result) -> None:
        self.results[result] += 1
        if self.progress is not None:
            self.progress.results[result] += 1
        if result in ("ok", "damaged"):
            self._state.checked += 1
        elif result == "unreadable":
            self._state.unreadable += 1
        if result == "damaged":
            self._state.damaged += 1

    # -- who has it open -----------------------------------------------------------------------

    def _loaded(self, key: Key, path: Path) -> OpenVolume | None:
        tenant = self._registry.loaded(key)
        return _item(tenant, path) if tenant is not None else None

    def _tenant(self, key: Key, volume: _core.Volume) -> Tenant | None:
        """The tenant whose own volume this is."""
        tenant = self._registry.loaded(key)
        mine = tenant is not None and any(item.volume is volume for item in tenant.volumes.open)
        return tenant if mine else None

    async def _read(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))


def _item(tenant: Tenant, path: Path) -> OpenVolume | None:
    return next((item for item in tenant.volumes.open if item.path == path), None)
