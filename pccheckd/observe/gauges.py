"""What is read when metrics are asked for. Runs on the loop, and asks no disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pccheck_native import _core
from pccheckd import VERSION
from pccheckd.base import logs
from pccheckd.config.sources import Config
from pccheckd.core.engine import Engine
from pccheckd.front.endpoints import ControlServer
from pccheckd.jobs import group_state
from pccheckd.jobs.job import Job
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Session, Sessions
from pccheckd.storage.space import Room
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import OpenVolume
from pccheckd.upkeep.scrub import Scrubber

from .health import Health
from .report import gpu_uuid, troubles

RANK = ("uid", "job_name", "rank")
_CHUNKS = ("free", "granted", "full", "cached", "lent", "left")

Sample = tuple[Sequence[str], float]


class Family(NamedTuple):
    """One metric with its series."""

    name: str  # behind "pccheck_"
    text: str
    samples: list[Sample]
    labels: tuple[str, ...] = ()
    counts: bool = False


def read(
    config: Config,
    engine: Engine,
    registry: Registry,
    sessions: Sessions,
    health: Health,
    scrubber: Scrubber,
) -> list[Family]:
    ranks = list(registry.tenants())
    warnings = len(troubles(engine, ranks, registry.jobs.values()))
    return [
        *_daemon(config, engine.io.running, health, warnings),
        *_memory(engine, ranks),
        _users(registry),
        *_storage(engine.room),
        *_gpus(engine.driver.info()),
        *_sessions(sessions.all()),
        *_fronts(sessions.control),
        *_groups(registry.jobs.values(), config.stall_limit_s),
        *_ranks(ranks),
        *_scrub(scrubber),
    ]


def _one(name: str, text: str, value: float, *, counts: bool = False) -> Family:
    return Family(name, text, [((), value)], counts=counts)


def _daemon(config: Config, io: str, health: Health, warnings: int) -> Iterator[Family]:
    facts = VERSION, str(config.slots), str(config.keep), io
    yield Family("info", "Always 1", [(facts, 1)], ("version", "slots", "keep", "engine"))
    yield _one("degraded", "1 when pccheckctl status says degraded", float(warnings > 0))
    yield _one("warnings", "Warnings that pccheckctl status has", warnings)
    yield _one("stalled", "Ranks whose disk makes no progress", len(health.stalled()))
    yield _one("event_loop_lag_seconds", "How late the last heartbeat was", health.lag_s)
    yield _one(
        "log_lines_dropped", "Log lines lost because nobody read them", logs.dropped(), counts=True
    )


def _memory(engine: Engine, ranks: Iterable[Tenant]) -> Iterator[Family]:
    budget, used = engine.pool.usage()
    pinned = sum(u.pinned_bytes for t in ranks if t.port is not None and (u := t.port.usage()))
    yield _one("pool_bytes", "DRAM that chunks may take (--dram)", budget)
    yield _one("pool_used_bytes", "DRAM that chunks take", used)
    yield _one("pool_pinned_bytes", "DRAM that is pinned for GPUs", pinned)


def _users(registry: Registry) -> Family:
    used = registry.memory.used_bytes()
    return Family(
        "user_dram_bytes", "DRAM that chunks of a user's jobs take",
        [((str(uid),), nbytes) for uid, nbytes in sorted(used.items())], ("uid",),
    )  # fmt: skip


def _storage(room: Room) -> Iterator[Family]:
    total, free = room.disk
    if total is None or free is None:  # it is not there, which `degraded` tells
        return
    yield _one("storage_bytes", "Size of the file system with the volumes", total)
    yield _one("storage_free_bytes", "Free on that file system", free)


def _gpus(found: Iterable[_core.GpuInfo]) -> Iterator[Family]:
    gpus = [((gpu_uuid(gpu.uuid), gpu.name), gpu) for gpu in found]
    labels = ("gpu", "name")

    def family(name: str, text: str, values: list[float], *, counts: bool = True) -> Family:
        samples = [(key, value) for (key, _), value in zip(gpus, values, strict=True)]
        return Family(name, text, list(samples), labels, counts)

    yield family("gpu_copied_bytes", "Copied from this GPU", [g.copied_bytes for _, g in gpus])
    yield family("gpu_copies", "Copies from this GPU", [g.copies for _, g in gpus])
    yield family("gpu_failures", "Copies that failed", [g.failures for _, g in gpus])
    yield family("gpu_lost", "1 when lost to the daemon", [g.lost for _, g in gpus], counts=False)


def _sessions(sessions: Iterable[Session]) -> Iterator[Family]:
    count = Counter((one.role.value, one.transfer) for one in sessions)
    yield Family(
        "sessions", "Connected processes", [(key, n) for key, n in count.items()],
        ("role", "transfer"),
    )  # fmt: skip


def _fronts(control: ControlServer) -> Iterator[Family]:
    yield _one("fronts", "Processes that take users' requests, one per user", control.fronts)
    yield _one(
        "front_restarts", "Times that one of them ended by itself", control.restarts, counts=True
    )


def _groups(jobs: Iterable[Job], stall_limit_s: float) -> Iterator[Family]:
    """Of jobs with several ranks: what all of them have."""
    found = [
        ((str(job.uid), job.name), one)
        for job in jobs
        if (one := group_state.of(job, stall_limit_s)) is not None
    ]

    def family(name: str, text: str, samples: Iterable[Sample], *more: str) -> Family:
        return Family(f"group_{name}", text, list(samples), (*RANK[:2], *more))

    yield family(
        "global_step", "Step of the newest checkpoint that every rank has durable",
        ((k, one.step) for k, one in found if one.step is not None),
    )  # fmt: skip
    yield family(
        "global_timestamp_seconds", "When the last rank had it durable, by the wall clock",
        ((k, one.wall_ns / 1e9) for k, one in found if one.wall_ns is not None),
    )  # fmt: skip
    yield family(
        "late", "1 when several checkpoints in a row were lost and none became global",
        ((k, one.is_late) for k, one in found),
    )  # fmt: skip
    yield family(
        "behind", "Newer checkpoints that other ranks have durable and this rank does not",
        (((*k, str(rank)), count) for k, one in found for rank, count in one.behind.items()),
        "rank",
    )  # fmt: skip


def _ranks(ranks: Iterable[Tenant]) -> Iterator[Family]:
    """Of what is loaded: ranks with a trainer, and those that went last."""
    rows = [((str(t.key.uid), t.key.job, str(t.key.rank)), t) for t in ranks]
    rows = [(key, t) for key, t in rows if t.owner is not None or t.volumes.open]
    newest = [(key, found[0]) for key, t in rows if (found := t.volumes.checkpoints())]

    def family(name: str, text: str, samples: Iterable[Sample], *more: str) -> Family:
        return Family(name, text, list(samples), (*RANK, *more))

    yield family("connected", "1 with a trainer", ((k, t.owner is not None) for k, t in rows))
    yield family(
        "refused", "1 while its trainer gets no room to save (quota, full disk, no DRAM)",
        ((k, t.owner is not None and t.refused is not None) for k, t in rows),
    )  # fmt: skip
    yield family(
        "failing", "Checkpoints in a row that failed since one became durable",
        ((k, t.ledger.failing if t.owner else 0) for k, t in rows),
    )  # fmt: skip
    yield family("in_flight", "On their way", ((k, len(t.ledger.live())) for k, t in rows))
    yield family("waiting", "Waiting for a lane or slot", ((k, len(t.queue)) for k, t in rows))
    yield family(
        "last_durable_step", "Step of the newest durable one", ((k, f.step) for k, f in newest)
    )
    yield family(
        "last_durable_timestamp_seconds", "When it became durable, by the wall clock",
        ((k, f.wall_ns / 1e9) for k, f in newest),
    )  # fmt: skip
    yield family(
        "request_interval_seconds", "Between the last requests of a trainer, on average",
        ((k, s) for k, t in rows if t.owner and (s := t.ledger.interval_s())),
    )  # fmt: skip
    yield family(
        "last_request_timestamp_seconds", "When its trainer last asked, by the wall clock",
        ((k, s) for k, t in rows if t.owner and (s := _asked(t))),
    )  # fmt: skip
    yield family(
        "volume_bytes", "Size of its volumes",
        ((k, sum(item.info.volume_bytes for item in t.volumes.open)) for k, t in rows),
    )  # fmt: skip
    yield family(
        "damaged_checkpoints", "Kept ones that a reader found damaged",
        ((k, sum(found.is_damaged for found in t.volumes.checkpoints())) for k, t in rows),
    )  # fmt: skip
    yield family(
        "unreadable_checkpoints", "Kept ones that the disk could not read when last tried",
        ((k, len(_unreadable(t))) for k, t in rows),
    )  # fmt: skip
    yield family("slots", "Of its volumes, by state", _slots(rows), "state")
    yield family("chunks", "Of its DRAM, by state", _chunks(rows), "state")


def _unreadable(tenant: Tenant) -> set[int]:
    return tenant.retention.unreadable & {one.sequence for one in tenant.volumes.checkpoints()}


def _asked(tenant: Tenant) -> float:
    """Wall time of the last request; 0 before the first."""
    last_ns = tenant.ledger.last_request_ns
    return time.time() - (time.monotonic_ns() - last_ns) / 1e9 if last_ns else 0.0


def _slots(rows: Iterable[tuple[tuple[str, ...], Tenant]]) -> Iterator[Sample]:
    for key, tenant in rows:
        total: Counter[str] = Counter()
        for item in tenant.volumes.open:
            total.update(slot_states(item))
        for state, count in total.items():
            yield (*key, state), count


def slot_states(item: OpenVolume) -> dict[str, int]:
    """As last read: after the newest durable checkpoint."""
    damaged = sum(found.is_damaged for found in item.checkpoints)
    kept = len(item.checkpoints) - damaged
    busy = item.info.slots - item.info.free_slots - item.quarantined - kept - damaged
    return {
        "free": item.info.free_slots,
        "kept": kept,
        "damaged": damaged,
        "quarantined": item.quarantined,
        "in_flight": max(0, busy),
    }


def _chunks(rows: Iterable[tuple[tuple[str, ...], Tenant]]) -> Iterator[Sample]:
    for key, tenant in rows:
        usage = tenant.port.usage() if tenant.port is not None else None
        if usage is not None:
            for state in _CHUNKS:
                yield (*key, state), getattr(usage, f"{state}_chunks")


def _scrub(scrubber: Scrubber) -> Iterator[Family]:
    now = scrubber.progress
    yield Family(
        "scrub_checkpoints", "Kept checkpoints that were read in the background, by result",
        [((result,), count) for result, count in sorted(scrubber.results.items())],
        ("result",), counts=True,
    )  # fmt: skip
    yield _one("scrub_bytes", "Read and checked so far", scrubber.bytes_read, counts=True)
    yield _one("scrub_passes", "Passes that came to their end", scrubber.passes, counts=True)
    yield _one("scrub_running", "1 during a pass", float(now is not None))
    yield _one("scrub_paused", "1 while a pass waits for saves", float(scrubber.paused))
    yield _one("scrub_pass_ratio", "How far the pass is", now.ratio if now else 0.0)
    yield _one("scrub_damaged", "Found damaged by the last or present pass", scrubber.damaged)
    yield _one("scrub_unreadable", "What that pass could not read", scrubber.unreadable)
    yield Family(
        "scrub_last_pass_timestamp_seconds", "When the last pass ended, by the wall clock",
        [((), scrubber.last_ended_s)] if scrubber.last_ended_s else [],
    )  # fmt: skip
