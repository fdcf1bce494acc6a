"""Drops volumes: when their owner requests it, or when their job has finished and was unused since
(`--expire-finished`). Never under a session, and never a part of a job."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pccheck_native import _core, dropping
from pccheck_native.dropping import JobUse
from pccheck_wire.errors import PccheckError, RefusedError, owner_of
from pccheck_wire.messages import Drop, require_job_name
from pccheckd.base import state_file
from pccheckd.base.access import require_access
from pccheckd.base.background import Background, happened
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.jobs.registry import Registry

Document = dict[str, object]

#: The pause between two checks for finished jobs is an eighth of the age, at most this.
PAUSE_S_MAX = 3600.0
#: Jobs dropped per check: an error that makes all jobs look old must be noticed in time.
DROPS_MAX = 16
#: How long finished jobs have been unused, over a restart of the daemon.
STATE_NAME = ".pccheckd.expiry.json"
STATE_SCHEMA = 1


async def drop(registry: Registry, asker_uid: int, body: Drop) -> Document:
    """Drops the volumes of a job, or with `dry_run` lists them. Only their owner and root may do
    so. Raises RefusedError while the job is in use."""
    if body.uid >= 0:
        require_access(asker_uid, body.uid, "drop jobs")
    require_job_name(body.job)
    engine, storage = registry.engine, registry.config.storage
    if not body.dry_run:
        await _clear(engine, storage)
    wanted = body.uid if body.uid >= 0 else None if asker_uid == 0 else asker_uid
    files = await engine.look(
        asker_uid, dropping.victims, storage, uid=wanted, job=body.job, rank=body.rank
    )
    owners = {victim.file.uid for victim in files} or registry.listed(wanted, body.job, body.rank)
    owner = owner_of(body.job, body.rank, owners)
    if body.dry_run:
        await registry.require_unused(owner, body.job)
        return dropping.document(storage, files, dropped=False)
    async with registry.unloaded(owner, body.job):
        await _remove(engine, owner, files)
        LOG.info(
            "uid %d dropped job %r of uid %d: %d files, %d bytes", asker_uid, body.job,
            owner, len(files), sum(victim.bytes for victim in files),
            extra={"fields": {"event": "dropped", "uid": owner, "job": body.job}},
        )  # fmt: skip
    return dropping.document(storage, files, dropped=True)


async def _clear(engine: Engine, storage: Path) -> None:
    """Frees space that an earlier drop could not free."""
    try:
        count = await engine.look(os.geteuid(), dropping.clear, storage)
    except OSError as error:
        LOG.warning("the space of dropped volumes cannot be freed: %s; pccheckd tries again", error)
        return
    if count:
        LOG.info("freed the space of %d volumes that were dropped before", count)


async def _remove(engine: Engine, uid: int, files: list[dropping.Victim]) -> None:
    try:
        await engine.call(uid, dropping.drop, [victim.file.path for victim in files])
    except dropping.InUseError as error:
        raise RefusedError(
            f"{error}; nothing was dropped", hint="end that process, then try again"
        ) from error
    except OSError as error:
        raise translated(error, "the volumes to be dropped") from error


@dataclass(slots=True)
class _Seen:
    last_write_s: float  # only compared, to notice new writes
    idle_s: float


class Idle:
    """How long finished jobs have been unused, in time that daemons have watched them. A wall clock
    that jumps (no NTP at boot, a bad RTC) would make every job old at once, so only time on a
    running daemon's monotonic clock counts. Losing the file restarts the count: a job may stay
    longer, never shorter. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], _Seen] = {}

    def observe(self, finished: Iterable[JobUse], elapsed_s: float) -> None:
        """These are finished and not in use now, `elapsed_s` after the previous call. The count of
        any other job, and of one that was written to, restarts."""
        before, self._seen = self._seen, {}
        for job in finished:
            known = before.get((job.uid, job.job))
            same = known is not None and known.last_write_s == job.last_write_s
            idle_s = known.idle_s + elapsed_s if known is not None and same else 0.0
            self._seen[job.uid, job.job] = _Seen(job.last_write_s, idle_s)

    def idle_s(self, job: JobUse) -> float:
        known = self._seen.get((job.uid, job.job))
        return known.idle_s if known is not None else 0.0

    def load(self, storage: Path) -> None:
        """Loads the stored counts; invalid rows are skipped."""
        rows = state_file.load(storage / STATE_NAME, STATE_SCHEMA).get("jobs")
        for row in rows if isinstance(rows, list) else []:
            match row:
                case {
                    "uid": int(uid), "job": str(job), "last_write_s": float(last),
                    "idle_s": float(idle_s),
                }:  # fmt: skip
                    self._seen[uid, job] = _Seen(last, idle_s)

    def store(self, storage: Path) -> None:
        """Raises OSError."""
        rows = [
            {"uid": uid, "job": job, "last_write_s": seen.last_write_s, "idle_s": seen.idle_s}
            for (uid, job), seen in self._seen.items()
        ]
        state_file.store(storage / STATE_NAME, STATE_SCHEMA, {"jobs": rows})


class Expiry(Background):
    """Drops finished jobs that were unused for `config.expire_finished_s`, as `Idle` counts it. A
    due job is announced at one check and dropped at a later one, a few at once."""

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._config = registry.engine, registry.config
        self._registry = registry
        self._clock = clock
        self._changed = asyncio.Event()
        self._idle = Idle()
        self._looked_s: float | None = None  # when; None before the first look
        self._announced: set[JobUse] = set()

    def wake(self) -> None:
        """The option may have changed."""
        self._changed.set()

    async def look(self) -> list[JobUse]:
        """Announces due jobs, and drops those announced before, except jobs in use. Returns the
        dropped jobs."""
        age_s = self._config.expire_finished_s
        await _clear(self._engine, self._config.storage)
        due = [job for job in await self._observed() if self._idle.idle_s(job) >= age_s]
        announced, self._announced = self._announced & set(due), set(due)
        for job in due:
            if job not in announced:
                LOG.warning(
                    "job %r of uid %d finished and was unused for --expire-finished: its %d bytes "
                    "are deleted in %g s, unless the job starts again",
                    job.job, job.uid, job.bytes, self._pause_s(age_s),
                    extra={"fields": {"event": "expiring", "uid": job.uid, "job": job.job}},
                )  # fmt: skip
        gone = []
        for job in [job for job in due if job in announced][:DROPS_MAX]:
            try:
                if await self._expire(job):
                    gone.append(job)
            except RefusedError:
                pass  # it is read, or was started again
            except (OSError, PccheckError, _core.NativeError) as error:
                # The others are dropped anyway.
                LOG.warning("job %r of uid %d cannot be dropped: %s", job.job, job.uid, error)
        return gone

    async def _observed(self) -> list[JobUse]:
        """The finished, unused jobs, with their time counted and stored."""
        uid, storage = os.geteuid(), self._config.storage
        if self._looked_s is None:
            await self._engine.look(uid, self._idle.load, storage)
        found = await self._engine.look(uid, dropping.jobs, storage)
        finished = [job for job in found if job.done and not self._registry.used(job.uid, job.job)]
        now_s = self._clock()
        before_s, self._looked_s = self._looked_s, now_s
        self._idle.observe(finished, 0.0 if before_s is None else now_s - before_s)
        try:
            await self._engine.look(uid, self._idle.store, storage)
        except OSError as error:
            LOG.warning("%s cannot be written: %s", storage / STATE_NAME, error)
        return finished

    async def _expire(self, job: JobUse) -> bool:
        async with self._registry.unloaded(job.uid, job.job):
            # Not by `look`: the user's trainers wait for the lock that is held here.
            files = await self._engine.call(
                job.uid, dropping.victims, self._config.storage, uid=job.uid, job=job.job
            )
            if max((v.last_write_s for v in files), default=0.0) != job.last_write_s:
                return False  # it was started again meanwhile
            await _remove(self._engine, job.uid, files)
        LOG.info(
            "job %r of uid %d finished and expired: %d files, %d bytes deleted",
            job.job, job.uid, len(files), sum(victim.bytes for victim in files),
            extra={"fields": {"event": "dropped", "uid": job.uid, "job": job.job}},
        )  # fmt: skip
        return True

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            age_s = self._config.expire_finished_s
            if age_s > 0:
                try:
                    await self.look()
                except (OSError, PccheckError, _core.NativeError) as error:
                    LOG.warning("cannot check for finished jobs: %s", error)
            else:
                self._looked_s = None  # this time does not count
            await happened(self._changed, self._pause_s(age_s) if age_s > 0 else None)

    @staticmethod
    def _pause_s(age_s: float) -> float:
        return min(age_s / 8, PAUSE_S_MAX)
