"""Disks that do not move: writes, flushes and calls that have not ended for longer than
--stall-limit. Degraded, and said so; never a reason to end a process that holds copied data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.logs import LOG
from pccheckd.config.options import Config
from pccheckd.core.engine import Engine
from pccheckd.jobs import group_state
from pccheckd.jobs.job import Job
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key


@dataclass(slots=True)
class _Seen:
    mark: object
    since_s: float


class Progress:
    """Looks at every tenant with something to write, and remembers since when nothing moved."""

    def __init__(
        self, config: Config, engine: Engine, registry: Registry, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._engine = engine
        self._registry = registry
        self._clock = clock
        self._seen: dict[Key, _Seen] = {}

    def look(self) -> None:
        """Sets `stalled` of every tenant and of the engine: "" or why. Never blocks on a disk."""
        now_s = self._clock()
        limit_s = self._config.stall_limit_s
        present = set()
        for tenant in self._registry.tenants():
            mark = _mark(tenant)
            if mark is None:
                self._set(tenant, "")
                continue
            present.add(tenant.key)
            seen = self._seen.get(tenant.key)
            if seen is None or seen.mark != mark:
                self._seen[tenant.key] = _Seen(mark, now_s)
                self._set(tenant, "")
            elif now_s - seen.since_s > limit_s + self._allowance_s():
                self._set(
                    tenant,
                    f"the disk has finished nothing for {now_s - seen.since_s:.0f} s; what was "
                    "copied is safe in memory while pccheckd lives: look at the disk (dmesg)",
                )
        for key in self._seen.keys() - present:
            del self._seen[key]
        for job in self._registry.jobs.values():
            self._look_at(job)
        uid, waited_s = self._engine.longest_call()
        self._engine.stalled = (
            f"a call to the storage for uid {uid} has not returned for {waited_s:.0f} s"
            if waited_s > limit_s
            else ""
        )

    def _look_at(self, job: Job) -> None:
        """Tells once when a job's ranks have no common checkpoint for long, and when they do."""
        found = group_state.of(job, self._config.stall_limit_s)
        late = str(found) if found is not None and found.is_late else ""
        if bool(late) != bool(job.late):
            LOG.warning(
                "job %r of uid %d: %s", job.name, job.uid,
                late or "the checkpoints of its ranks are no longer late",
                extra={"fields": {"event": "group-late" if late else "group-again"}},
            )  # fmt: skip
        job.late = late

    def _allowance_s(self) -> float:
        """What --max-bandwidth may keep all the writers of a volume waiting."""
        config = self._config
        if not config.max_bandwidth_bytes:
            return 0.0
        waiting = config.chunk_bytes * config.writers * config.in_flight
        return waiting / config.max_bandwidth_bytes

    def _set(self, tenant: Tenant, why: str) -> None:
        if bool(why) != bool(tenant.stalled):
            LOG.warning("%s: %s", tenant.key, why or "the disk moves again")
        tenant.stalled = why


def _mark(tenant: Tenant) -> object:
    """What changes with every write that ends; None when the disk has nothing to do."""
    usage = tenant.port.usage() if tenant.port is not None else None
    admitted = [one for one in tenant.ledger.live() if one.state is not State.REQUESTED]
    if usage is None or not admitted:
        return None
    if not usage.full_chunks and not any(
        one.state in (State.COPIED, State.WRITING) for one in admitted
    ):
        return None  # the trainer has to copy first
    return (
        usage.full_chunks, usage.cached_chunks, usage.free_chunks,
        tuple((one.sequence, one.state) for one in admitted),
    )  # fmt: skip
