"""Volumes that are not wanted any more: dropped when their owner asks, or when their job said that
it had finished and was left alone since (`--expire-finished`). Never under a session, never
half."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from pccheck_native import _core, dropping, layout
from pccheck_wire.errors import PccheckError, RefusedError, UsageError
from pccheck_wire.messages import Drop
from pccheck_wire.owners import owner_of
from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.config.options import Config
from pccheckd.core.engine import Engine, translated
from pccheckd.jobs.registry import Registry

from .finished import NAME, Idle

Document = dict[str, object]

#: Between two looks for finished jobs: an eighth of the age, at most this.
PAUSE_S_MAX = 3600.0
#: Of one look: a fault that makes everything look old has to be noticed before everything is gone.
DROPS_MAX = 16


async def drop(
    config: Config, engine: Engine, registry: Registry, asker_uid: int, body: Drop
) -> Document:
    """The volumes of a job that are, or with `dry_run` would be, dropped. Only their owner and
    root may ask. Raises RefusedError while the job is in use."""
    if body.uid >= 0 and asker_uid not in (0, body.uid):
        raise RefusedError(f"uid {asker_uid} may not drop jobs of uid {body.uid}")
    try:
        layout.check_job(body.job)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not body.dry_run:
        await _clear(engine, config)
    wanted = body.uid if body.uid >= 0 else None if asker_uid == 0 else asker_uid
    files = await engine.look(
        asker_uid, dropping.victims, config.storage, uid=wanted, job=body.job, rank=body.rank
    )
    owner = owner_of(body.job, body.rank, (victim.file.uid for victim in files))
    if body.dry_run:
        await registry.require_unused(owner, body.job)
        return dropping.document(config.storage, files, dropped=False)
    async with registry.unloaded(owner, body.job):
        await _remove(engine, owner, files)
        LOG.info(
            "uid %d dropped job %r of uid %d: %d files, %d bytes", asker_uid, body.job,
            owner, len(files), sum(victim.bytes for victim in files),
        )  # fmt: skip
    return dropping.document(config.storage, files, dropped=True)


async def _clear(engine: Engine, config: Config) -> None:
    """The room that a drop before could not give back."""
    try:
        count = await engine.look(os.geteuid(), dropping.clear, config.storage)
    except OSError as error:
        LOG.warning("the room of dropped volumes cannot be given back: %s; later again", error)
        return
    if count:
        LOG.info("gave back the room of %d volumes that were dropped before", count)


async def _remove(engine: Engine, uid: int, files: list[dropping.Victim]) -> None:
    try:
        await engine.call(uid, dropping.drop, [victim.file.path for victim in files])
    except dropping.InUseError as error:
        raise RefusedError(
            f"{error}; nothing was dropped", hint="end that process, then try again"
        ) from error
    except OSError as error:
        raise translated(error, "the volumes to be dropped") from error


class Expiry(Background):
    """Drops finished jobs that have been left alone for `config.expire_finished_s`; `Idle` says
    what time counts. What is due is said at one look and dropped at a later one, a few at once."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        registry: Registry,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._engine = engine
        self._registry = registry
        self._clock = clock
        self._changed = asyncio.Event()
        self._idle = Idle()
        self._looked_s: float | None = None  # when; None before the first look
        self._announced: set[dropping.JobUse] = set()

    def wake(self) -> None:
        """The age may have changed."""
        self._changed.set()

    async def look(self) -> list[dropping.JobUse]:
        """Counts, says what is due, and drops what was said to be; which jobs that were. One that
        is in use is left alone."""
        age_s = self._config.expire_finished_s
        await _clear(self._engine, self._config)
        due = [job for job in await self._observed() if self._idle.idle_s(job) >= age_s]
        said, self._announced = self._announced & set(due), set(due)
        for job in due:
            if job not in said:
                LOG.warning(
                    "job %r of uid %d has finished and been left alone for --expire-finished: its "
                    "%d bytes are dropped in %g s, unless it is started anew",
                    job.job, job.uid, job.bytes, self._pause_s(age_s),
                )  # fmt: skip
        gone = []
        for job in [job for job in due if job in said][:DROPS_MAX]:
            try:
                if await self._expire(job):
                    gone.append(job)
            except RefusedError:
                pass  # somebody reads it, or has started it anew
            except (OSError, PccheckError, _core.NativeError) as error:
                # The others go all the same.
                LOG.warning("job %r of uid %d cannot be dropped: %s", job.job, job.uid, error)
        return gone

    async def _observed(self) -> list[dropping.JobUse]:
        """The finished jobs that nobody uses, with their time counted and remembered."""
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
            LOG.warning("%s cannot be written: %s", storage / NAME, error)
        return finished

    async def _expire(self, job: dropping.JobUse) -> bool:
        async with self._registry.unloaded(job.uid, job.job):
            # No scan: a verify of hours may go on, and the user's trainers wait for us.
            files = await self._engine.call(
                job.uid, dropping.victims, self._config.storage, uid=job.uid, job=job.job
            )
            if max((v.last_write_s for v in files), default=0.0) != job.last_write_s:
                return False  # it was started anew since we looked
            await _remove(self._engine, job.uid, files)
        LOG.info(
            "job %r of uid %d has finished and expired: %d files, %d bytes dropped",
            job.job, job.uid, len(files), sum(victim.bytes for victim in files),
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
                    LOG.warning("finished jobs cannot be looked for: %s", error)
            else:
                self._looked_s = None  # what passes now is not watched
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), self._pause_s(age_s) if age_s > 0 else None
                )

    @staticmethod
    def _pause_s(age_s: float) -> float:
        return min(age_s / 8, PAUSE_S_MAX)
