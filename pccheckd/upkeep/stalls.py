"""Disks without progress: writes, flushes and calls that take longer than --stall-limit. They are
reported as degraded, and never end the process, which holds copied checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pccheck_wire.messages import CheckpointState as State
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key


@dataclass(slots=True)
class _LastMark:
    mark: object
    since_s: float


class DiskProgress:
    """Checks every tenant with something to write, and remembers since when nothing changed."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock
        self._seen: dict[Key, _LastMark] = {}

    def look(self) -> None:
        """Reports stalls to every tenant, job and the engine. Never blocks on a disk."""
        now_s = self._clock()
        limit_s = self._registry.config.stall_limit_s
        present = set()
        for tenant in self._registry.tenants():
            mark = _mark(tenant)
            if mark is None:
                tenant.binding.note_stall("")
                continue
            present.add(tenant.key)
            seen = self._seen.get(tenant.key)
            if seen is None or seen.mark != mark:
                self._seen[tenant.key] = _LastMark(mark, now_s)
                tenant.binding.note_stall("")
            elif now_s - seen.since_s > limit_s + self._allowance_s():
                tenant.binding.note_stall(
                    f"the disk has finished nothing for {now_s - seen.since_s:.0f} s; copied "
                    "checkpoints stay in memory while pccheckd runs; check the disk (dmesg)"
                )
        for key in self._seen.keys() - present:
            del self._seen[key]
        for job in self._registry.jobs.values():
            found = job.standing()
            job.note_absent(now_s)
            job.parked.look()  # what could not be written before
            job.lateness.note(str(found) if found is not None and found.is_late else "")
        self._registry.engine.note_stall(limit_s)

    def _allowance_s(self) -> float:
        """How long --max-bandwidth may keep all the writers of a volume waiting."""
        config = self._registry.config
        if not config.max_bandwidth_bytes:
            return 0.0
        waiting = config.chunk_bytes * config.writers * config.in_flight
        return waiting / config.max_bandwidth_bytes


def _mark(tenant: Tenant) -> object:
    """Changes with every write that ends; None when the disk has nothing to do."""
    usage = tenant.binding.usage()
    admitted = [one for one in tenant.ledger.moving() if one.state is not State.REQUESTED]
    if usage is None or not admitted:
        return None
    if not usage.full_chunks and not any(
        one.state in (State.COPIED, State.WRITING) for one in admitted
    ):
        return None  # the trainer has to copy first
    return (
        usage.full_chunks, usage.cached_chunks, usage.free_chunks,
        tuple((one.id.sequence, one.state) for one in admitted),
    )  # fmt: skip
