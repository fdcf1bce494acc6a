"""What is read when metrics are scraped. Runs on the loop, and reads no disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pccheck_native import _core
from pccheckd import VERSION
from pccheckd.base import logs
from pccheckd.front.endpoints import ControlServer
from pccheckd.group.job import Job
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Sessions
from pccheckd.nodes import seen as seen_nodes
from pccheckd.tenancy.tenant import Tenant
from pccheckd.upkeep.scrub import Scrubber

from .health import Health
from .report import chunks, death_costs, gpu_uuid, pinned_bytes, troubles

#: Not "job": Prometheus gives that label to every target, and would rename ours.
RANK = ("uid", "job_name", "rank")

Sample = tuple[Sequence[str], float]


class Family(NamedTuple):
    """One metric with its series."""

    name: str  # behind "pccheck_"
    text: str
    samples: list[Sample]
    labels: tuple[str, ...] = ()
    counts: bool = False


def read(sessions: Sessions, health: Health, scrubber: Scrubber) -> list[Family]:
    registry, engine = sessions.registry, sessions.engine
    ranks = list(registry.tenants())
    warnings = len(troubles(registry))
    connected = Counter((one.role.value, one.transfer) for one in sessions.all())
    return [
        *_daemon(registry, sessions.control, health, warnings),
        *_gpus(engine.driver.info()),
        Family("sessions", "Connected processes", list(connected.items()), ("role", "transfer")),
        *_groups(registry.jobs.values()),
        *_nodes(registry),
        *_death_costs(registry.jobs.values()),
        *_ranks(ranks),
        *_scrub(scrubber),
    ]


def _one(name: str, text: str, value: float, *, counts: bool = False) -> Family:
    return Family(name, text, [((), value)], counts=counts)


def _daemon(
    registry: Registry, control: ControlServer, health: Health, warnings: int
) -> Iterator[Family]:
    engine, config = registry.engine, registry.config
    facts = VERSION, str(config.slots), str(config.keep), engine.io.running
    yield Family("info", "Always 1", [(facts, 1)], ("version", "slots", "keep", "engine"))
    yield _one("degraded", "1 when pccheckctl status shows degraded", float(warnings > 0))
    yield _one("warnings", "Warnings that pccheckctl status shows", warnings)
    yield _one("stalled", "Ranks whose disk makes no progress", len(health.stalled()))
    yield _one("event_loop_lag_seconds", "How late the last heartbeat was", health.lag_s)
    dropped = logs.dropped()
    yield _one("log_lines_dropped", "Log lines lost: the reader is too slow", dropped, counts=True)
    budget, used = engine.pool.usage()
    yield _one("pool_bytes", "DRAM that chunks may take (--dram)", budget)
    yield _one("pool_used_bytes", "DRAM that chunks take", used)
    yield _one("pool_pinned_bytes", "DRAM that is pinned for GPUs", pinned_bytes(registry))
    users = sorted(registry.memory.used_bytes().items())
    yield Family(
        "user_dram_bytes", "DRAM that chunks of a user's jobs take",
        [((str(uid),), nbytes) for uid, nbytes in users], ("uid",),
    )  # fmt: skip
    total, free = engine.room.disk
    if total is not None and free is not None:  # else `degraded` reports it
        yield _one("storage_bytes", "Size of the file system with the volumes", total)
        yield _one("storage_free_bytes", "Free on that file system", free)
    yield _one("fronts", "Processes that receive users' requests, one per user", control.fronts)
    text = "How often such a process ended unexpectedly"
    yield _one("front_restarts", text, control.restarts, counts=True)


def _gpus(found: list[_core.GpuInfo]) -> Iterator[Family]:
    for name, text in (
        ("copied_bytes", "Copied from this GPU"),
        ("copies", "Copies from this GPU"),
        ("failures", "Copies that failed"),
        ("lost", "1 when lost to the daemon"),
    ):
        samples = [((gpu_uuid(gpu.uuid), gpu.name), getattr(gpu, name)) for gpu in found]
        yield Family(f"gpu_{name}", text, list(samples), ("gpu", "name"), name != "lost")


def _groups(jobs: Iterable[Job]) -> Iterator[Family]:
    """What all ranks of a job have, for jobs with several ranks."""
    found = [((str(job.uid), job.name), one) for job in jobs if (one := job.standing()) is not None]

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


def _nodes(registry: Registry) -> Iterator[Family]:
    """Jobs on several nodes. The other nodes are shown by the node that hears of them all: that of
    rank 0."""
    every = [wide for job in registry.jobs.values() if (wide := registry.nodes.of(job)) is not None]
    jobs = [
        ((str(wide.job.uid), wide.job.name), wide, wide.member)
        for wide in every if wide.start is not None and wide.member is not None
    ]  # fmt: skip
    yield Family(
        "nodes_agreed", "1 when the nodes have agreed on what this start begins from",
        [(k, wide.waits_s == 0 and one.refused is None) for k, wide, one in jobs], RANK[:2],
    )  # fmt: skip
    yield Family(
        "nodes_silent_seconds", "For how long the store of the nodes has not answered",
        [(k, one.patient.silent_s) for k, _, one in jobs], RANK[:2],
    )  # fmt: skip
    yield Family(
        "nodes_store_operations", "Of this node, for this start",
        [(k, one.patient.operations) for k, _, one in jobs], RANK[:2], counts=True,
    )  # fmt: skip
    now_s = time.time()
    rows = [
        ((*k, row.host, row.node), row)
        for k, wide, one in jobs if one.at == 0 for row in seen_nodes.rows(wide)
    ]  # fmt: skip
    labels = (*RANK[:2], "host", "node")
    yield Family(
        "node_heard_timestamp_seconds", "When something of it was new, by the wall clock",
        [(k, now_s - row.heard_s) for k, row in rows if row.heard_s is not None], labels,
    )  # fmt: skip
    yield Family(
        "node_waited_for_seconds", "How long a checkpoint that other nodes have waits for it",
        [(k, row.waited_s) for k, row in rows], labels,
    )  # fmt: skip


def _death_costs(jobs: Iterable[Job]) -> Iterator[Family]:
    """As in status, of jobs with checkpoints that are in memory only."""
    found = [
        ((str(job.uid), job.name, dies), one)
        for job in jobs
        for dies, one in death_costs(job).items()
    ]
    labels = (*RANK[:2], "dies")
    yield Family(
        "death_cost_steps", "Steps that would be lost now; none where all would be",
        [(key, one.lost_steps) for key, one in found if one.lost_steps is not None], labels,
    )  # fmt: skip
    yield Family(
        "death_cost_seconds", "Seconds of training that would be lost now",
        [(key, one.lost_s) for key, one in found], labels,
    )  # fmt: skip


def _ranks(ranks: Iterable[Tenant]) -> Iterator[Family]:
    """Loaded ranks: those with a trainer, and those whose trainers ended last."""
    rows = [
        (tuple(map(str, t.key)), t) for t in ranks if t.seat.owner is not None or t.volumes.open
    ]
    newest = [(key, found[0]) for key, t in rows if (found := t.volumes.checkpoints())]

    def family(name: str, text: str, samples: Iterable[Sample], *more: str) -> Family:
        return Family(name, text, list(samples), (*RANK, *more))

    def each(name: str, text: str, value: Callable[[Tenant], float]) -> Family:
        return family(name, text, ((k, value(t)) for k, t in rows))

    yield each("connected", "1 with a trainer", lambda t: t.seat.owner is not None)
    text = "1 while its trainer gets no space to save (quota, full disk, no DRAM)"
    yield each("refused", text, lambda t: t.seat.owner is not None and t.seat.refused is not None)
    text = "Checkpoints in a row that failed since one became durable"
    yield each("failing", text, lambda t: t.ledger.failing if t.seat.owner else 0)
    yield each("in_flight", "Checkpoints in flight", lambda t: len(t.ledger.moving()))
    yield each("in_memory", "Checkpoints in memory only", lambda t: len(t.ledger.parked()))
    memory = ((k, one.id.step) for k, t in rows for one in t.ledger.parked()[-1:])
    yield family("memory_step", "Step of the newest one in memory only", memory)
    yield each("waiting", "Waiting for a lane or slot", lambda t: len(t.queue))
    yield family(
        "last_durable_step", "Step of the newest durable one", ((k, f.id.step) for k, f in newest)
    )
    yield family(
        "last_durable_timestamp_seconds", "When it became durable, by the wall clock",
        ((k, f.wall_ns / 1e9) for k, f in newest),
    )  # fmt: skip
    yield family(
        "request_interval_seconds", "Between the last requests of a trainer, on average",
        ((k, s) for k, t in rows if t.seat.owner and (s := t.ledger.interval_s())),
    )  # fmt: skip
    now_s, now_ns = time.time(), time.monotonic_ns()
    yield family(
        "last_request_timestamp_seconds", "Last request of its trainer, by the wall clock",
        ((k, now_s - (now_ns - last_ns) / 1e9) for k, t in rows
         if t.seat.owner and (last_ns := t.ledger.last_request_ns)),
    )  # fmt: skip
    yield each(
        "volume_bytes", "Size of its volumes",
        lambda t: sum(item.info.volume_bytes for item in t.volumes.open),
    )  # fmt: skip
    yield each(
        "damaged_checkpoints", "Kept ones that a reader found damaged",
        lambda t: sum(found.is_damaged for found in t.volumes.checkpoints()),
    )  # fmt: skip
    yield each(
        "unreadable_checkpoints", "Kept ones that the disk could not read at the last try",
        lambda t: len(t.retention.unreadable & t.volumes.sequences()),
    )  # fmt: skip
    states = ((key, state, count) for key, t in rows for state, count in _slots(t).items())
    yield family("slots", "Of its volumes, by state", (((*k, s), n) for k, s, n in states), "state")
    states = ((k, s, n) for k, t in rows for s, n in (chunks(t) or {}).items() if s != "bytes")
    yield family("chunks", "Of its DRAM, by state", (((*k, s), n) for k, s, n in states), "state")


def _slots(tenant: Tenant) -> Counter[str]:
    """As last read: after the newest durable checkpoint."""
    total: Counter[str] = Counter()
    for item in tenant.volumes.open:
        damaged = sum(found.is_damaged for found in item.checkpoints)
        free, all_kept = item.info.free_slots, len(item.checkpoints)
        total["free"] += free
        total["kept"] += all_kept - damaged
        total["damaged"] += damaged
        total["quarantined"] += item.quarantined
        total["in_flight"] += max(0, item.info.slots - free - item.quarantined - all_kept)
    return total


def _scrub(scrubber: Scrubber) -> Iterator[Family]:
    now = scrubber.progress
    yield Family(
        "scrub_checkpoints", "Kept checkpoints that were read in the background, by result",
        [((result,), count) for result, count in sorted(scrubber.results.items())],
        ("result",), counts=True,
    )  # fmt: skip
    yield _one("scrub_bytes", "Read and checked so far", scrubber.bytes_read, counts=True)
    yield _one("scrub_passes", "Completed passes", scrubber.passes, counts=True)
    yield _one("scrub_running", "1 during a pass", float(now is not None))
    yield _one("scrub_paused", "1 while a pass waits for saves", float(scrubber.paused))
    yield _one("scrub_pass_ratio", "Progress of the pass", now.ratio if now else 0.0)
    yield _one("scrub_damaged", "Found damaged by the last or present pass", scrubber.state.damaged)
    yield _one("scrub_unreadable", "What that pass could not read", scrubber.state.unreadable)
    yield Family(
        "scrub_last_pass_timestamp_seconds", "When the last pass ended, by the wall clock",
        [((), scrubber.state.ended_s)] if scrubber.state.ended_s else [],
    )  # fmt: skip
