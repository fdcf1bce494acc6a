"""The documents that observers get: status, list, trace (control/verification.py makes that of
verify). Each carries "schema"; a user sees only its own jobs, root sees all. Times that end in _s
are seconds ago, or durations; wall_ns is for display."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, TypeVar

from pccheck_native import catalog, layout
from pccheck_native.identity import hexadecimal
from pccheck_native.nodes.offers import NodeServer
from pccheck_native.transfer import Case, offered
from pccheck_wire.basics import plural
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Role
from pccheckd import VERSION
from pccheckd.base.access import has_access
from pccheckd.config.options import Config
from pccheckd.core.engine import Engine
from pccheckd.group.explain import Standing
from pccheckd.group.job import Job
from pccheckd.jobs.inherited import Summary
from pccheckd.jobs.memory import Dram
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Session
from pccheckd.nodes import seen as seen_nodes
from pccheckd.nodes.records import Records
from pccheckd.storage.node import node_of
from pccheckd.storage.space import Disk
from pccheckd.tenancy import outcomes
from pccheckd.tenancy.binding import BindingState
from pccheckd.tenancy.checkpoint import RankCheckpoint
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import OpenVolume

SCHEMA = 1
RECENT = 32
_CHECK = "check the disk (dmesg)"

Document = dict[str, object]
_T = TypeVar("_T")


async def status(
    asker_uid: int,
    registry: Registry,
    sessions: Iterable[Session],
    started_ns: int,
    scrub: Document | None = None,
) -> Document:
    """What `pccheckctl status --json` prints. Waits a moment for one statvfs, in a thread. Yields
    to the loop between rows: there may be hundreds of checkpoints."""
    config, engine = registry.config, registry.engine
    tenants = [t for t in registry.tenants() if has_access(asker_uid, t.key.uid)]
    seen = [s for s in sessions if s.role is not Role.OBSERVER and has_access(asker_uid, s.uid)]
    rows = [await _aside(_session, session) for session in seen]
    rank = functools.partial(_rank, memory=registry.memory)
    ranks = [
        await _aside(rank, tenant)
        for tenant in tenants
        if tenant.seat.owner
        or tenant.seat.refused
        or tenant.volumes.open
        or tenant.ledger.checkpoints
    ]
    jobs = [job for job in registry.jobs.values() if has_access(asker_uid, job.uid)]
    wide = [*filter(None, map(registry.nodes.of, jobs))]
    await asyncio.gather(*(one.member.look() for one in wide if one.member is not None))
    warnings = troubles(registry, asker_uid)
    left = registry.inherited
    dropped = [f"{key}: {why}" for key, why in left.dropped if has_access(asker_uid, key.uid)]
    budget, used = engine.pool.usage()
    return {
        "schema": SCHEMA,
        "daemon": _daemon(config, engine, started_ns, degraded=bool(warnings)),
        "pool": {
            "budget_bytes": budget, "used_bytes": used, "pinned_bytes": pinned_bytes(registry),
        },
        "kept": _kept(engine, left, dropped),
        "gpus": [gpu._asdict() | {"uuid": gpu_uuid(gpu.uuid)} for gpu in engine.driver.info()],
        "storage": _storage(config, await engine.room.fresh()),
        "users": [
            {"uid": uid, "dram_bytes": nbytes, "max_dram_bytes": config.max_dram_per_user_bytes}
            for uid, nbytes in sorted(registry.memory.used_bytes().items())
            if has_access(asker_uid, uid)
        ],
        "scrub": scrub,
        "sessions": rows,
        "groups": [_group(job, found) for job in jobs if (found := job.standing()) is not None],
        "nodes": [*filter(None, map(seen_nodes.document, wide))],
        "memory": [cost for job in jobs if (cost := _memory(job))],
        "ranks": ranks,
        "warnings": warnings,
        "notices": [
            *(f"{tenant.key}: {text}" for tenant in tenants for text in _notices(tenant)),
            *(
                f"job {one.job.name!r} of uid {one.job.uid}: {text}"
                for one in wide for text in seen_nodes.notices(one)
            ),
            *_losses(engine, dropped),
        ],
    }  # fmt: skip


def _daemon(config: Config, engine: Engine, started_ns: int, *, degraded: bool) -> Document:
    names = ("slots", "keep", "in_flight", "writers", "chunk_bytes")
    offer = offered(Case(engine.driver.state))
    return {
        "version": VERSION,
        "pid": os.getpid(),
        "uptime_s": _ago(started_ns),
        "state": "degraded" if degraded else "ok",
        "socket": str(config.socket),
        **engine.io.document(),
        **{name: getattr(config, name) for name in names},
        "transfer": offer.transfer,
        "transfer_reason": offer.reason,
    }


def _kept(engine: Engine, left: Summary, dropped: list[str]) -> Document:
    """What the descriptor store holds, and what this daemon has taken over from it."""
    stored, limit, refused = engine.pool.stored()
    return {
        "stored": stored, "limit": limit, "refused": refused,
        "adopted_segments": left.segments, "adopted_bytes": left.nbytes,
        "adopted_checkpoints": left.checkpoints, "dropped": dropped,
    }  # fmt: skip


def _losses(engine: Engine, dropped: list[str]) -> Iterator[str]:
    """What a restart of the daemon would lose, and what the last one has lost."""
    _, limit, refused = engine.pool.stored()
    if refused:
        yield (
            f"the descriptor store ({limit} descriptors) was full {refused} times: if pccheckd "
            "restarts, copied checkpoints that are not durable are lost; raise "
            "FileDescriptorStoreMax="
        )
    yield from (f"not recovered from the previous pccheckd: {text}" for text in dropped)


def pinned_bytes(registry: Registry) -> int:
    return sum(usage.pinned_bytes for one in registry.tenants() if (usage := one.binding.usage()))


def _storage(config: Config, disk: Disk) -> Document:
    return {
        "path": str(config.storage),
        "total_bytes": disk.total_bytes,
        "free_bytes": disk.free_bytes,
        "max_storage_bytes": config.max_storage_bytes,
        "max_storage_per_user_bytes": config.max_storage_per_user_bytes,
    }


async def _aside(describe: Callable[[_T], Document], what: _T) -> Document:
    """One row, after a turn of the loop for others."""
    await asyncio.sleep(0)
    return describe(what)


def trace(asker_uid: int, registry: Registry, last_s: float) -> Callable[[], Document]:
    """What `pccheckctl trace` shows: checkpoints that ended in the last seconds, or are live, and
    the nodes of jobs on several nodes as they are now. A call for a thread."""
    now_ns = time.monotonic_ns()
    since_ns = max(0, now_ns - int(last_s * 1e9))
    records = registry.chronicle.ring.newest(asker_uid, since_ns)
    records += [
        item.record()
        for tenant in registry.tenants()
        if has_access(asker_uid, tenant.key.uid)
        for item in tenant.ledger.live()
    ]
    jobs = [job for job in registry.jobs.values() if has_access(asker_uid, job.uid)]
    nodes = [*filter(None, map(seen_nodes.document, filter(None, map(registry.nodes.of, jobs))))]
    return functools.partial(
        outcomes.document, records, nodes, since_ns=since_ns, now_ns=now_ns, wall_ns=time.time_ns()
    )


def known_globals(registry: Registry) -> set[tuple[int, str, int]]:
    """What all nodes of a job have, by uid, job and sequence, before it is flagged on the disk."""
    return {
        (job.uid, job.name, sequence)
        for job in registry.jobs.values()
        for sequence in job.members.elsewhere.globals
    }


def listing(
    asker_uid: int, config: Config, job: str, known: Collection[tuple[int, str, int]]
) -> Document:
    """Every checkpoint on the disk that the asker may see. Blocks: reads records, and manifests of
    checkpoints that refer to others."""
    uid = None if asker_uid == 0 else asker_uid
    found = catalog.scan(config.storage, uid=uid, job=job or None, sizes=True)
    return catalog.document(config.storage, found, lambda item: item.reason, known)


def gpu_uuid(raw: bytes) -> str:
    """In the format of nvidia-smi."""
    text = raw.hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _session(session: Session) -> Document:
    usage = session.port.usage() if session.port is not None else None
    tenant = session.tenant
    is_owner = tenant and tenant.seat.owner and tenant.seat.owner.session == session.number
    names = ("uid", "pid", "rank", "world_size", "transfer", "transfer_reason")
    recent = tenant.ledger.recent(RECENT, session.number) if tenant else []
    return {
        "session": session.number,
        "role": session.role.value,
        "job": session.job_name,
        **{name: getattr(session, name) for name in names},
        "incarnation": tenant.readiness.incarnation if tenant and is_owner else session.incarnation,
        "start": hexadecimal(session.start),
        "exposed_bytes": usage.exposed_bytes if usage else 0,
        "mappings": usage.mappings if usage else 0,
        "connected_s": _ago(session.connected_ns),
        "checkpoints": [_state(item, tenant) for item in recent] if tenant else [],
    }


def _rank(tenant: Tenant, memory: Dram) -> Document:
    owner, current, why = tenant.seat.owner, tenant.volumes.current, tenant.seat.refused
    return {
        **tenant.key._asdict(),
        "connected": owner is not None,
        "pid": owner.pid if owner else None,
        "session": owner.session if owner else None,
        "incarnation": tenant.readiness.incarnation,
        "newest": _newest(tenant),
        "counters": {
            name: tenant.ledger.counters[name]
            for name in ("durable", "superseded", "skipped", "failed")
        },
        "refused": None if why is None else {"message": why.message, "hint": why.hint},
        "failing": tenant.ledger.failing,
        "last_failure": tenant.ledger.last_failure,
        "in_flight": len(tenant.ledger.moving()),
        "in_memory": len(tenant.ledger.parked()),
        "interval_steps": tenant.saves.interval_steps or None,
        "waiting": len(tenant.queue),
        "chunks": chunks(tenant),
        "dram": {
            "bytes": tenant.binding.port.grant.nbytes if tenant.binding.port else 0,
            "wanted_bytes": memory.wanted_bytes(tenant.binding.port) if tenant.binding.port else 0,
        },
        "volume": current
        and catalog.volume_document(current.path, current.info)
        | {
            "engine": current.engine,
            "max_bandwidth_bytes": current.limit_bytes,
            "quarantined_slots": current.quarantined,
        },
        "checkpoints": [_state(item, tenant) for item in tenant.ledger.recent(RECENT)],
        "warnings": _warnings(tenant),
    }


def _newest(tenant: Tenant) -> Document | None:
    if tenant.ledger.newest is None:
        return None
    sequence, step = tenant.ledger.newest
    known = tenant.volumes.checkpoint(sequence)
    if known is not None and known.is_damaged:
        known = next((one for one in tenant.volumes.checkpoints() if not one.is_damaged), None)
        if known is None:
            return None
        sequence, step = known.id.sequence, known.id.step
    return {"sequence": sequence, "step": step, "wall_ns": known.wall_ns if known else None}


def chunks(tenant: Tenant) -> dict[str, int] | None:
    """Its DRAM in bytes, and how many chunks of it are in which state."""
    usage = tenant.binding.usage()
    if usage is None:
        return None
    states = ("free", "granted", "full", "cached", "lent", "left")
    return {"bytes": usage.bytes} | {one: getattr(usage, f"{one}_chunks") for one in states}


def _state(item: RankCheckpoint, tenant: Tenant) -> Document:
    """One recent checkpoint: its state, and how long each part took (None: not reached)."""
    known = item.record().document()
    names = ("session", "snapshot", "sequence", "step", "incarnation", "payload_bytes",
             "copied_bytes", "written_bytes", "state", "reason", "rehomed")  # fmt: skip
    reached = {
        "waited_s": item.at_ns.get(State.COPYING),
        "copied_s": item.at_ns.get(State.COPIED),
        "first_write_s": item.first_write_ns,
        "durable_s": item.at_ns.get(State.DURABLE),
        "ended_s": known["ended"],
    }
    return {
        **{name: known[name] for name in names},
        "requested_s": _ago(known["requested"]),
        **{
            name: round((at_ns - known["requested"]) / 1e9, 4) if at_ns else None
            for name, at_ns in reached.items()
        },
        "times": item.times_ns,
        "in_memory": item.is_parked,
        "on_device": item.is_on_device,
        "lost": tenant.volumes.why_lost(item.id.sequence),
    }


def _group(job: Job, found: Standing) -> Document:
    common = {"sequence": found.sequence, "step": found.step, "wall_ns": found.wall_ns}
    return catalog.group_document(
        job.uid, job.name, found.world_size,
        common if found.step is not None else None,  # else it is in files that are away
        found.behind, waits_s=round(found.waits_s, 4), lost=found.lost, slowest_rank=found.slowest,
        absent=found.absent, late=found.is_late,
    )  # fmt: skip


class DeathCost(NamedTuple):
    """Of a process, or of the node. None: nothing would be left, and all steps are lost."""

    step: int | None  # that would be left
    lost_steps: int | None
    lost_s: float  # of training


def death_costs(job: Job) -> dict[str, DeathCost]:
    """What a death would cost now: from the last request back to what all ranks have copied, or
    durable; or back to this run's first request, if that one is not remembered. Empty for a job
    that has nothing in memory only."""
    found = job.parked.costs()
    if found is None:
        return {}
    step, asked_ns = found.asked
    firsts = (one.ledger.first_request_ns for one in job.tenants.values())
    first_ns = min(filter(None, firsts), default=asked_ns)

    def cost(left: tuple[int, int] | None) -> DeathCost:
        if left is None:
            return DeathCost(None, None, _ago(first_ns))
        return DeathCost(left[0], max(0, step - left[0]), _ago(left[1] or first_ns))

    return {"process": cost(found.copied), "node": cost(found.durable)}


def _memory(job: Job) -> Document | None:
    costs = {dies: one._asdict() for dies, one in death_costs(job).items()}
    return {"uid": job.uid, "job": job.name, **costs} if costs else None


def in_memory(asker_uid: int, registry: Registry, job: str) -> list[Document]:
    """Checkpoints that the asker may see and that are on no disk, for `list`."""
    now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    return [
        {
            **one.id.document(), "in_memory": True, "payload_bytes": one.payload_bytes,
            "wall_ns": wall_ns - now_ns + one.at_ns[State.COPIED],
        }
        for tenant in registry.tenants()
        if has_access(asker_uid, tenant.key.uid) and job in ("", tenant.key.job)
        for one in tenant.ledger.parked()
    ]  # fmt: skip


def troubles(registry: Registry, asker_uid: int = 0) -> list[str]:
    """What makes this daemon `degraded`, as far as the asker may know."""
    engine = registry.engine
    found = [
        f"{tenant.key}: {text}"
        for tenant in registry.tenants() if has_access(asker_uid, tenant.key.uid)
        for text in _warnings(tenant)
    ]  # fmt: skip
    found += [
        f"job {job.name!r} of uid {job.uid}: {job.lateness.why}"
        for job in registry.jobs.values()
        if job.lateness.why and has_access(asker_uid, job.uid)
    ]
    found += [
        f"job {job.name!r} of uid {job.uid}: {text}"
        for job in registry.jobs.values()
        if has_access(asker_uid, job.uid) and (wide := registry.nodes.of(job)) is not None
        for text in seen_nodes.troubles(wide)
    ]
    found += [one.text for one in registry.faults() if has_access(asker_uid, one.key.uid)]
    found += [
        f"{gpu.name} {gpu_uuid(gpu.uuid)} is lost to this daemon: its tensors are pushed until "
        "pccheckd is restarted"
        for gpu in engine.driver.info()
        if gpu.lost
    ]
    return [*filter(None, (engine.missing_storage, engine.stalled)), *found]


def _warnings(tenant: Tenant) -> list[str]:
    found = [str(error) for error in tenant.volumes.unreadable.values()]
    if unsaved := _unsaved(tenant):
        found.insert(0, unsaved)
    if tenant.seat.owner is not None and tenant.volumes.loss:
        found.append(tenant.volumes.loss)  # of an ended job they were removed on purpose
    if tenant.binding.stalled:
        found.append(tenant.binding.stalled)
    if tenant.binding.state is BindingState.STOPPED:
        found.append(
            "a commit record could not be written, so its checkpoint failed; the next checkpoint "
            f"opens the volume again once no process reads from it; {_CHECK}"
        )
    unreadable = tenant.retention.unreadable
    return found + [text for item in tenant.volumes.open for text in _faults(item, unreadable)]


def _faults(item: OpenVolume, unreadable: Collection[int]) -> Iterator[str]:
    """What is wrong with a volume's file and its checkpoints."""
    place = item.path
    if item.quarantined:
        slots = f"{place}: {plural(item.quarantined, 'slot')} with write errors, used only when no"
        yield f"{slots} other slot is free; {_CHECK}"
    damaged = [c.id.sequence for c in item.checkpoints if c.is_damaged]
    if damaged:
        which = f"checkpoints {damaged} of {place} are damaged, and recovery skips them"
        yield f"{which}; {_CHECK}, then run pccheckctl verify"
    lost = [c.id.sequence for c in item.checkpoints if c.id.sequence in unreadable]
    if lost:
        which = f"checkpoints {lost} of {place} could not be read, and recovery skips them"
        yield f"{which} until they can be read; {_CHECK}"
    if item.info.record_lost:
        yield f"{place}: {catalog.RECORD_LOST}; {_CHECK}. The next checkpoint ends this warning"
    if item.info.valid_replicas == 1 and not item.info.repaired_replicas:
        only = f"{place} has only one good copy of its newest record; the next checkpoint writes"
        yield f"{only} two; {_CHECK}"


def _unsaved(tenant: Tenant) -> str:
    """Why its trainer gets no checkpoints, or the last one got none; "" when it does. After the end
    of a trainer that stays until a later one saves, or the job is dropped."""
    ledger, has_ended = tenant.ledger, tenant.seat.owner is None
    if has_ended and not tenant.quiet:
        return ""  # what it has copied is still being written
    if tenant.seat.refused is not None:
        return f"checkpoints {'were' if has_ended else 'are'} NOT saved: {tenant.seat.refused}"
    failed = ""
    if count := ledger.failing:
        last = "last checkpoint" if count == 1 else f"last {count} checkpoints"
        failed = f"{last} failed" + (f": {why}" if (why := ledger.last_failure) else "")
    if has_ended and tenant.volumes.open and ledger.newest is None:
        ended = "the trainer ended without a durable checkpoint"
        return f"{ended}: its {failed}" if failed else ended
    if not failed:
        return ""
    if ledger.newest is None:
        return f"the {failed}; there is no older checkpoint"
    if parked := ledger.parked():
        return f"the {failed}; step {parked[-1].id.step} is in memory only"
    return f"the {failed}; a restart resumes from an older checkpoint"


def servers(asker_uid: int, registry: Registry) -> Document:
    """Where the nodes of each job let each other read, with the tokens, as its last start has
    noted. Blocks on the disk."""
    storage, running = registry.config.storage, registry.nodes.running()
    mine, jobs = node_of(storage).id, list[Document]()
    for uid, name in layout.jobs_with_servers(storage):
        if has_access(asker_uid, uid) and (found := Records(storage, uid, name).servers()):
            nodes = [_server(one, mine) for one in found]
            jobs.append({"uid": uid, "job": name, "runs": (uid, name) in running, "nodes": nodes})
    return {"schema": SCHEMA, "jobs": jobs}


def _server(one: NodeServer, mine: bytes) -> Document:
    addresses, fingerprint, token = one.peer or ((), b"", b"")
    return {
        "host": one.host, "node": one.node.hex(), "here": one.node == mine,
        "addresses": [*addresses], "fingerprint": fingerprint.hex(), "token": token.hex(),
    }  # fmt: skip


def _notices(tenant: Tenant) -> list[str]:
    """Information; nothing is wrong."""
    if tenant.seat.owner is None:
        return [tenant.volumes.loss] if tenant.volumes.loss else []
    found = []
    if steps := tenant.saves.interval_steps:
        found.append(f"should_checkpoint() saves every {plural(steps, 'step')}")
    if protected := sorted(tenant.retention.protected):
        found.append(
            f"checkpoints {protected} of the previous run are kept until restore(), adopt() or "
            "fresh=True"
        )
    return found


def _ago(since_ns: int) -> float:
    return round((time.monotonic_ns() - since_ns) / 1e9, 4)
