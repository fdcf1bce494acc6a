"""The documents that observers get: status, list (verification.py has that of verify). Each
carries "schema"; a user sees only what is his own, root sees all. All times that end in _s are
seconds ago or long; wall_ns is for display."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from pccheck_native import _core, catalog
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Role
from pccheckd import VERSION
from pccheckd.config.sources import Config
from pccheckd.core.engine import Engine
from pccheckd.jobs import group_state
from pccheckd.jobs.group_state import Standing
from pccheckd.jobs.job import Job
from pccheckd.jobs.memory import Memory
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Session
from pccheckd.storage.space import Disk
from pccheckd.tenancy.checkpoint import Checkpoint
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.trace import Taken, record, take
from pccheckd.tenancy.volumes import OpenVolume

SCHEMA = 1
RECENT = 32

Document = dict[str, object]
_T = TypeVar("_T")


def may_see(asker_uid: int, owner_uid: int) -> bool:
    """P6: one's own; root sees all."""
    return asker_uid in (0, owner_uid)


async def status(
    asker_uid: int,
    config: Config,
    engine: Engine,
    registry: Registry,
    sessions: Iterable[Session],
    started_ns: int,
    scrub: Document | None = None,
) -> Document:
    """What `pccheckctl status --json` prints. Waits a moment for one statvfs, in a
    thread. The loop has other work in between: hundreds of checkpoints are described."""
    tenants = [t for t in registry.tenants() if may_see(asker_uid, t.key.uid)]
    seen = [s for s in sessions if s.role is not Role.OBSERVER and may_see(asker_uid, s.uid)]
    rows = [await _aside(_session, session) for session in seen]
    rank = functools.partial(_rank, memory=registry.memory)
    ranks = [await _aside(rank, tenant) for tenant in tenants if _worth_showing(tenant)]
    jobs = [job for job in registry.jobs.values() if may_see(asker_uid, job.uid)]
    warnings = troubles(engine, tenants, jobs)
    kept = _kept(asker_uid, engine, registry)
    return {
        "schema": SCHEMA,
        "daemon": _daemon(config, engine, started_ns, degraded=bool(warnings)),
        "pool": _pool(engine, registry),
        "kept": kept,
        "gpus": [_gpu(gpu) for gpu in engine.driver.info()],
        "storage": _storage(config, await engine.room.fresh()),
        "users": _users(asker_uid, config, registry),
        "scrub": scrub,
        "sessions": rows,
        "groups": [
            _group(job, found)
            for job in jobs
            if (found := group_state.of(job, config.stall_limit_s)) is not None
        ],
        "ranks": ranks,
        "warnings": warnings,
        "notices": [
            *(f"{tenant.key}: {text}" for tenant in tenants for text in _notices(tenant)),
            *_kept_notices(kept),
        ],
    }


def _daemon(config: Config, engine: Engine, started_ns: int, *, degraded: bool) -> Document:
    return {
        "version": VERSION,
        "pid": os.getpid(),
        "uptime_s": _ago(started_ns),
        "state": "degraded" if degraded else "ok",
        "socket": str(config.socket),
        **engine.io.document(),
        "slots": config.slots,
        "keep": config.keep,
        "in_flight": config.in_flight,
        "writers": config.writers,
        "chunk_bytes": config.chunk_bytes,
        "transfer": engine.driver.offer.transfer,
        "transfer_reason": engine.driver.offer.reason,
    }


def _pool(engine: Engine, registry: Registry) -> Document:
    budget, used = engine.pool.usage()
    ports = [t.port for t in registry.tenants() if t.port is not None]
    return {
        "budget_bytes": budget,
        "used_bytes": used,
        "pinned_bytes": sum(usage.pinned_bytes for p in ports if (usage := p.usage())),
    }


def _storage(config: Config, disk: Disk) -> Document:
    return {
        "path": str(config.storage),
        "total_bytes": disk.total_bytes,
        "free_bytes": disk.free_bytes,
        "max_storage_bytes": config.max_storage_bytes,
        "max_storage_per_user_bytes": config.max_storage_per_user_bytes,
    }


def _users(asker_uid: int, config: Config, registry: Registry) -> list[Document]:
    return [
        {"uid": uid, "dram_bytes": nbytes, "max_dram_bytes": config.max_dram_per_user_bytes}
        for uid, nbytes in sorted(registry.memory.used_bytes().items())
        if may_see(asker_uid, uid)
    ]


async def _aside(describe: Callable[[_T], Document], what: _T) -> Document:
    """One row, and a turn for everybody else."""
    await asyncio.sleep(0)
    return describe(what)


def trace(asker_uid: int, registry: Registry, last_s: float) -> Taken:
    """What `pccheckctl trace` asks for: what ended in the last seconds, or has not."""
    now_ns = time.monotonic_ns()
    since_ns = max(0, now_ns - int(last_s * 1e9))
    live = [
        record(tenant.key, item)
        for tenant in registry.tenants()
        if may_see(asker_uid, tenant.key.uid)
        for item in tenant.ledger.live()
    ]
    return take(
        registry.chronicle.ring.newest(asker_uid, since_ns), live, since_ns=since_ns,
        now_ns=now_ns, wall_ns=time.time_ns(),
    )  # fmt: skip


def listing(asker_uid: int, config: Config, job: str) -> Document:
    """Every checkpoint on the disk that the asker may see. Blocks: reads records only."""
    found = catalog.scan(config.storage, uid=None if asker_uid == 0 else asker_uid, job=job or None)
    return {
        "schema": SCHEMA,
        "storage": str(config.storage),
        "volumes": [
            catalog.volume_document(path, info) for path, info in sorted(found.volumes.items())
        ],
        "checkpoints": catalog.checkpoint_documents(found.checkpoints),
        "unreadable": [
            {"path": str(item.file.path), "code": item.code_name, "reason": item.reason}
            for item in found.unreadable
        ],
    }


def _kept(asker_uid: int, engine: Engine, registry: Registry) -> Document:
    """What would outlive this daemon, and what has outlived the one before."""
    stored, limit, refused = engine.pool.stored()
    left = registry.inherited
    return {
        "stored": stored,
        "limit": limit,
        "refused": refused,
        "adopted_segments": left.segments,
        "adopted_bytes": left.nbytes,
        "adopted_checkpoints": left.checkpoints,
        "dropped": [f"{key}: {why}" for key, why in left.dropped if may_see(asker_uid, key.uid)],
    }


def _kept_notices(kept: Document) -> list[str]:
    found = []
    if kept["refused"]:
        found.append(
            f"the descriptor store ({kept['limit']} descriptors) had no room {kept['refused']} "
            "times: a restart of pccheckd loses what is copied there and not durable; raise "
            "FileDescriptorStoreMax="
        )
    if isinstance(dropped := kept["dropped"], list):
        found += [f"not taken over from the pccheckd before: {text}" for text in dropped]
    return found


def _worth_showing(tenant: Tenant) -> bool:
    return tenant.owner is not None or bool(tenant.volumes.open) or bool(tenant.ledger.checkpoints)


def _gpu(gpu: _core.GpuInfo) -> Document:
    """A GPU that trainers have exposed memory of; counted since the daemon started."""
    return {
        "uuid": gpu_uuid(gpu.uuid),
        "name": gpu.name,
        "numa_node": None if gpu.numa_node < 0 else gpu.numa_node,
        "lost": gpu.lost,
        "copied_bytes": gpu.copied_bytes,
        "copies": gpu.copies,
        "failures": gpu.failures,
    }


def gpu_uuid(raw: bytes) -> str:
    """As nvidia-smi writes it."""
    text = raw.hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _lost(gpu: _core.GpuInfo) -> str:
    return (
        f"{gpu.name} {gpu_uuid(gpu.uuid)} is lost to this daemon: its tensors are pushed until "
        "pccheckd is started anew"
    )


def _session(session: Session) -> Document:
    usage = session.port.usage() if session.port is not None else None
    return {
        "session": session.number,
        "role": session.role.value,
        "uid": session.uid,
        "pid": session.pid,
        "job": session.job_name,
        "rank": session.rank,
        "world_size": session.world_size,
        "incarnation": _incarnation(session),
        "transfer": session.transfer,
        "transfer_reason": session.transfer_reason,
        "exposed_bytes": usage.exposed_bytes if usage else 0,
        "mappings": usage.mappings if usage else 0,
        "connected_s": _ago(session.connected_ns),
        "checkpoints": [
            _state(item)
            for item in (
                session.tenant.ledger.recent(RECENT, session.number) if session.tenant else ()
            )
        ],
    }


def _incarnation(session: Session) -> int:
    tenant = session.tenant
    is_owner = tenant and tenant.owner and tenant.owner.session == session.number
    return tenant.incarnation if tenant and is_owner else session.incarnation


def _rank(tenant: Tenant, memory: Memory) -> Document:
    owner, current = tenant.owner, tenant.volumes.current
    return {
        "uid": tenant.key.uid,
        "job": tenant.key.job,
        "rank": tenant.key.rank,
        "connected": owner is not None,
        "pid": owner.pid if owner else None,
        "session": owner.session if owner else None,
        "incarnation": tenant.incarnation,
        "newest": _newest(tenant),
        "counters": {
            name: tenant.ledger.counters[name]
            for name in ("durable", "superseded", "skipped", "failed")
        },
        "refused": _refused(tenant),
        "failing": tenant.ledger.failing,
        "last_failure": tenant.ledger.last_failure,
        "in_flight": len(tenant.ledger.live()),
        "waiting": len(tenant.queue),
        "chunks": _chunks(tenant),
        "numa_node": _numa_node(tenant),
        "dram": {
            "bytes": tenant.port.granted_bytes if tenant.port else 0,
            "wanted_bytes": memory.wanted_bytes(tenant.port) if tenant.port else 0,
        },
        "volume": _open_volume(current) if current else None,
        "checkpoints": [_state(item) for item in tenant.ledger.recent(RECENT)],
        "warnings": _warnings(tenant),
    }


def _refused(tenant: Tenant) -> Document | None:
    """Why its trainer gets no room to save, and what to do about it."""
    why = tenant.refused
    return None if why is None else {"message": why.message, "hint": why.hint}


def _newest(tenant: Tenant) -> Document | None:
    if tenant.ledger.newest is None:
        return None
    sequence, step = tenant.ledger.newest
    known = list(tenant.volumes.checkpoints())
    if any(item.sequence == sequence and item.is_damaged for item in known):
        good = [(item.sequence, item.step) for item in known if not item.is_damaged]
        if not good:
            return None
        sequence, step = max(good)
    wall = [item.wall_ns for item in known if item.sequence == sequence]
    return {"sequence": sequence, "step": step, "wall_ns": wall[0] if wall else None}


def _chunks(tenant: Tenant) -> Document | None:
    usage = tenant.port.usage() if tenant.port is not None else None
    if usage is None:
        return None
    return {
        "bytes": usage.bytes,
        "free": usage.free_chunks,
        "granted": usage.granted_chunks,
        "full": usage.full_chunks,
        "cached": usage.cached_chunks,
        "lent": usage.lent_chunks,
        "left": usage.left_chunks,
    }


def _numa_node(tenant: Tenant) -> int | None:
    """That its memory and its writers are near; None where there is no choice, or none was made."""
    usage = tenant.port.usage() if tenant.port is not None else None
    return None if usage is None or usage.numa_node < 0 else usage.numa_node


def _open_volume(item: OpenVolume) -> Document:
    return catalog.volume_document(item.path, item.info) | {
        "engine": item.engine,
        "max_bandwidth_bytes": item.limit_bytes,
        "quarantined_slots": item.quarantined,
    }


def _state(item: Checkpoint) -> Document:
    """One recent checkpoint: where it is, and how long each part took (None: not reached)."""
    at: Mapping[State, int] = item.at_ns
    ended_ns = 0 if item.live else max(at.values(), default=0)
    return {
        "session": item.session,
        "snapshot": item.snapshot,
        "sequence": item.sequence,
        "step": item.step,
        "incarnation": item.incarnation,
        "payload_bytes": item.payload_bytes,
        "state": item.state.name.lower(),
        "reason": item.reason,
        "requested_s": _ago(item.requested_ns),
        "waited_s": _between(item.requested_ns, at.get(State.COPYING)),
        "copied_s": _between(item.requested_ns, at.get(State.COPIED)),
        "first_write_s": _between(item.requested_ns, item.first_write_ns),
        "durable_s": _between(item.requested_ns, at.get(State.DURABLE)),
        "ended_s": _between(item.requested_ns, ended_ns),
        "rehomed": item.rehomed,
        "times": item.times_ns,
    }


def _group(job: Job, found: Standing) -> Document:
    common = (found.sequence, found.step, found.wall_ns) if found.sequence else None
    return catalog.group_document(
        job.uid, job.name, found.world_size, common, behind=found.behind, waits_s=found.waits_s,
        lost=found.lost, slowest=found.slowest, absent=found.absent, late=found.is_late,
    )  # fmt: skip


def troubles(engine: Engine, tenants: Iterable[Tenant], jobs: Iterable[Job]) -> list[str]:
    """What makes this daemon `degraded`, as far as the users of these may know."""
    found = [f"{tenant.key}: {text}" for tenant in tenants for text in _warnings(tenant)]
    found += [f"job {job.name!r} of uid {job.uid}: {job.late}" for job in jobs if job.late]
    found += [_lost(gpu) for gpu in engine.driver.info() if gpu.lost]
    return [*filter(None, (engine.missing_storage, engine.stalled)), *found]


def _warnings(tenant: Tenant) -> list[str]:
    found = [str(error) for error in tenant.volumes.unreadable.values()]
    if tenant.owner is not None:
        if tenant.refused is not None:
            found.insert(0, f"gets NO checkpoints: {tenant.refused}")
        elif count := tenant.ledger.failing:
            last = "last checkpoint" if count == 1 else f"last {count} checkpoints"
            why = tenant.ledger.last_failure
            found.insert(0, f"the {last} failed" + (f": {why}" if why else ""))
        found += tenant.volumes.losses.values()  # who removes files of a job that is over meant it
    if tenant.stalled:
        found.append(tenant.stalled)
    if tenant.stopped:
        found.append("a commit record could not be written; the volume is reopened before use")
    for item in tenant.volumes.open:
        if item.quarantined:
            found.append(f"{item.quarantined} slots of {item.path} are quarantined")
        damaged = [c.sequence for c in item.checkpoints if c.is_damaged]
        if damaged:
            found.append(f"checkpoints {damaged} of {item.path} are damaged")
        lost = [c.sequence for c in item.checkpoints if c.sequence in tenant.retention.unreadable]
        if lost:
            found.append(f"checkpoints {lost} of {item.path} could not be read")
        if item.info.valid_replicas == 1 and not item.info.repaired_replicas:
            found.append(f"{item.path} has only one good copy of its newest record")
    return found


def _notices(tenant: Tenant) -> list[str]:
    """Worth knowing, but nothing is wrong."""
    found = list(tenant.volumes.remembered)
    if tenant.owner is None:
        return found + list(tenant.volumes.losses.values())
    if protected := sorted(tenant.retention.protected):
        found.append(
            f"checkpoints {protected} of the run before are kept until restore(), adopt() or "
            "fresh=True"
        )
    return found


def _ago(since_ns: int) -> float:
    return round((time.monotonic_ns() - since_ns) / 1e9, 4)


def _between(since_ns: int, until_ns: int | None) -> float | None:
    return round((until_ns - since_ns) / 1e9, 4) if until_ns else None
