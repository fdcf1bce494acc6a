"""Which jobs and tenants are loaded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from pccheck_native import layout
from pccheck_wire.basics import some
from pccheck_wire.errors import NoCheckpointError, RefusedError
from pccheckd.core.engine import Engine
from pccheckd.core.port import DETACH_LIMIT_S, GRACE_S, STEP_S
from pccheckd.group.idle import IdleDisk
from pccheckd.group.job import Job
from pccheckd.nodes.nodes import Nodes
from pccheckd.tenancy.outcomes import Chronicle
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key

from .inherited import Summary
from .memory import Dram
from .survey import Fault, Survey

#: Tenants without a trainer that stay loaded, for recovery from DRAM.
IDLE_MAX = 64
#: Without a trainer for so long, a job is closed, however few jobs are loaded.
LOADED_S_MAX = 24 * 3600.0


class Registry:
    def __init__(self, engine: Engine, chronicle: Chronicle | None = None) -> None:
        self.chronicle = chronicle or Chronicle()
        self.engine, self.config = engine, engine.config
        self.inherited = Summary()  # from the daemon before
        self.survey = Survey()  # of the start
        self.jobs: dict[tuple[int, str], Job] = {}
        self.memory = Dram(engine, self.tenants)
        self._disk = IdleDisk(self.tenants)
        self.nodes = Nodes(engine, self.job)
        self._locks: dict[int, asyncio.Lock] = {}  # by uid: no user waits for another's disk

    async def close(self) -> None:
        """Drains and closes every tenant. Raises the first failure, after all have ended."""
        await self.nodes.peers.close()
        await asyncio.gather(*(self.nodes.close(job) for job in self.jobs.values()))
        await asyncio.gather(*(job.emptied() for job in self.jobs.values()))
        results = await asyncio.gather(
            *(tenant.close() for tenant in self.tenants()), return_exceptions=True
        )
        for failed in filter(lambda result: isinstance(result, BaseException), results):
            raise failed  # type: ignore[misc]

    def tenants(self) -> Iterator[Tenant]:
        for job in self.jobs.values():
            yield from job.tenants.values()

    def in_flight(self) -> int:
        """How many checkpoints of all ranks are on their way to the disk."""
        return sum(len(tenant.ledger.moving()) for tenant in self.tenants())

    def loaded(self, key: Key) -> Tenant | None:
        """The tenant, if it is loaded now."""
        job = self.jobs.get((key.uid, key.job))
        return job.tenants.get(key.rank) if job is not None else None

    def faults(self) -> list[Fault]:
        """What could not be read at the start, of tenants that are not loaded: others know more."""
        return [fault for fault in self.survey.faults if self.loaded(fault.key) is None]

    async def job(self, uid: int, name: str) -> Job:
        """The job with a tenant for every rank that has a volume here."""
        async with self._lock(uid):
            return await self._job(uid, name)

    async def tenant(self, key: Key) -> tuple[Job, Tenant]:
        """The tenant, loaded if it was not. It need not have a volume."""
        async with self._lock(key.uid):
            job = await self._job(key.uid, key.job)
            if key.rank not in job.tenants:
                await self._load(job, key.rank)
            return job, job.tenants[key.rank]

    async def existing(self, key: Key) -> tuple[Job, Tenant]:
        """The tenant of a rank that has a readable volume. Raises NoCheckpointError or why not.

        Nothing is kept for names that do not exist, however many are asked for.
        """
        files = await self.engine.call(
            key.uid, layout.list_volumes, self.config.storage, **key._asdict()
        )
        if not files:
            raise NoCheckpointError(f"{key} has no volume", hint="see: pccheckctl list")
        job, tenant = await self.tenant(key)
        if tenant.volumes.unreadable or not tenant.volumes.open:  # it may be readable now
            with tenant.uses.come():
                await tenant.readiness.look()
        tenant.volumes.require_readable(fresh=False)
        if not tenant.volumes.open:
            raise NoCheckpointError(f"{key} has no readable volume", hint="see: pccheckctl list")
        return job, tenant

    async def trim(self) -> None:
        """Closes the jobs longest without a trainer when too many are loaded, or for too long."""
        idle = [job for job in self.jobs.values() if job.idle]
        idle.sort(key=lambda job: job.last_used_ns)
        excess = sum(len(job.tenants) for job in idle) - IDLE_MAX
        before_ns = time.monotonic_ns() - int(LOADED_S_MAX * 1e9)
        for job in idle:
            if excess <= 0 and job.last_used_ns >= before_ns:
                return
            async with self._lock(job.uid):
                if job.idle and self.jobs.pop((job.uid, job.name), None) is job:
                    excess -= len(job.tenants)
                    await self.nodes.close(job)
                    await job.close()

    @contextlib.asynccontextmanager
    async def unloaded(self, uid: int, name: str) -> AsyncIterator[None]:
        """Closes a job and keeps it closed, so that its files can be deleted. Raises RefusedError
        while a process is connected to it or its checkpoints are on their way."""
        await self.require_unused(uid, name)
        async with self._lock(uid):
            self._require_unused(uid, name)
            job = self.jobs.get((uid, name))
            if job is not None:
                del self.jobs[uid, name]
                await self.nodes.close(job)
                await job.close()
            yield

    async def require_unused(self, uid: int, name: str) -> None:
        """Raises RefusedError while a process is connected to a job or its checkpoints are on their
        way. Closes nothing: the job keeps its cache in DRAM.

        Waits for a trainer that has just ended: until it is drained if that has begun, else for a
        moment, in which the loop may notice its hang-up."""
        looks = round(GRACE_S / STEP_S)
        limit = round(DETACH_LIMIT_S / STEP_S)
        while looks >= 0 and limit >= 0 and (job := self.used(uid, name)) is not None:
            looks, limit = looks - (not job.leaving), limit - 1
            await asyncio.sleep(STEP_S)
        self._require_unused(uid, name)

    def _require_unused(self, uid: int, name: str) -> None:
        job = self.used(uid, name)
        if job is not None:
            raise RefusedError(
                f"job {name!r} is in use: {_users(job)}",
                hint="end it (in a notebook: client.close()), then try again", retryable=True,
            )  # fmt: skip

    def used(self, uid: int, name: str) -> Job | None:
        """The job, while a process is connected to it or its checkpoints are on their way."""
        job = self.jobs.get((uid, name))
        return job if job is not None and not job.idle else None

    def listed(self, uid: int | None, name: str, rank: int | None) -> set[int]:
        """The owners of loaded jobs of this name that `status` lists with this rank, or with any:
        without a file when they were refused room, or when their files were removed."""
        return {
            job.uid
            for job in self.jobs.values()
            if job.name == name and uid in (None, job.uid)
            and any(
                tenant.seat.refused or tenant.ledger.checkpoints
                for number, tenant in job.tenants.items() if rank in (None, number)
            )
        }  # fmt: skip

    async def _job(self, uid: int, name: str) -> Job:
        """The job, loaded if necessary. The caller holds the lock for loading and closing jobs."""
        job = self.jobs.get((uid, name))
        if job is None:
            job = Job(uid, name, self.config, self._disk)
            try:
                files = await self.engine.call(
                    uid, layout.list_volumes, self.config.storage, uid=uid, job=name
                )
                for rank in sorted({file.rank for file in files}):
                    await self._load(job, rank)
                await self.nodes.loaded(job)
            except BaseException:
                await self.nodes.close(job)
                await job.close()  # the next try opens these files again
                raise
            self.jobs[uid, name] = job
            for tenant in job.tenants.values():
                tenant.volumes.limit()  # it may have changed meanwhile
        return job

    def limit(self) -> None:
        """--max-bandwidth has changed."""
        for tenant in self.tenants():
            tenant.volumes.limit()

    def _lock(self, uid: int) -> asyncio.Lock:
        return self._locks.setdefault(uid, asyncio.Lock())

    async def _load(self, job: Job, rank: int) -> None:
        tenant = Tenant(Key(job.uid, job.name, rank), self.engine, job, self.chronicle)
        await tenant.open()
        job.loaded(tenant)


def _users(job: Job) -> str:
    found = []
    for rank, tenant in sorted(job.tenants.items()):
        if tenant.seat.owner is not None:
            found.append(f"rank {rank} is pid {tenant.seat.owner.pid}")
        if tenant.uses.readers or tenant.uses.reads:
            found.append(f"rank {rank} is being read")
        if tenant.ledger.live():
            found.append(f"checkpoints of rank {rank} are in flight")
    return some(found) or "it is being loaded"
