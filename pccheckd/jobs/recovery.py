"""Answers `Open` and `Read`: opens the checkpoint that `choosing.py` chooses, and sends it. Each
chunk comes from memory if it is cached there, else from the volume: `send_cached` in
`pcc_tenant_load.c` decides that when the chunk is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pccheck_native import catalog, layout
from pccheck_native.group import Held
from pccheck_wire.errors import DamagedError, NoCheckpointError, RefusedError
from pccheck_wire.messages import Empty, Open, Opened, Part, Read, Role, Waiting, Writing
from pccheckd.core.engine import Engine
from pccheckd.group.job import Job
from pccheckd.nodes.travel.away import Away
from pccheckd.tenancy.retention import recycled
from pccheckd.tenancy.tenant import Tenant

from . import choosing
from .memory import Dram
from .sessions import Session


async def open_checkpoint(
    session: Session, body: Open, engine: Engine
) -> Opened | Empty | Writing | Waiting:
    """The newest valid checkpoint (of `step`, older than `before`, when given), for a group the
    one that all its ranks have. Empty only when the volumes were read and hold nothing. Writing
    when the choice depends on checkpoints that are still being written.

    Raises NoCheckpointError when there are some but none is suitable, RefusedError when they are of
    another uid, in the directory of a private daemon.
    """
    job, tenant = _place(session)
    await job.look()
    if session.role is Role.TRAINER:
        if body.step is None:  # else it only reads, and does not count as restored
            session.follow()
        job.write_parked()
        if (writing := await choosing.settled(job)) is not None:
            return writing
    else:
        await tenant.volumes.refresh()
    agreed: Held | None = None
    warnings: list[str] = []
    if session.wide is not None:
        point = await session.wide.point(session.rank, session.process, body)
        if isinstance(point, Waiting):
            return point
        warnings = session.wide.untold()
        if point is None:
            return Empty([], warnings)
        if isinstance(point, Away):
            here = [
                one
                for one in session.wide.parts_here(point.homes.checkpoint)
                # What it has just failed to read, though that is perhaps not noted yet.
                if one.id.rank != session.rank or body.before != point.sequence
            ]
            return point.opened(
                session.rank, session.world_size, here, warnings, any_world_size=body.any_world_size
            )
        agreed = point
    elif session.was_wide is not None and body.before is None:
        owner = tenant.seat.owner
        fresh = owner is not None and owner.fresh
        start = job.members.starts.of(session.rank, session.process)
        agreed = await session.was_wide.point_alone(start, body, fresh=fresh)
        warnings = session.was_wide.untold()
    chosen, skipped = choosing.choose(session, job, tenant, body, agreed)
    if chosen is not None and session.role is not Role.TRAINER:
        _lease(session, job, tenant, chosen)
    if chosen is None:
        if engine.directory is not None and engine.directory.is_private:
            await engine.call(session.uid, _require_no_other, engine.directory.directory, session)
        return Empty(skipped, warnings)
    return Opened(
        *chosen.id[2:], payload_bytes=chosen.payload_bytes, tree_offset=chosen.tree_offset,
        tree_bytes=chosen.tree_bytes, skipped=skipped, parts=_parts(job, chosen),
        wall_ns=chosen.wall_ns, warnings=warnings,
    )  # fmt: skip


def _parts(job: Job, chosen: catalog.StoredCheckpoint) -> list[Part]:
    """The payloads of all ranks that have a part of it; [] of what a rank saved alone."""
    return [
        Part(one.id.rank, one.payload_bytes, one.tree_offset, one.tree_bytes)
        for _, one in _holders(job, chosen)
    ]


def _holders(
    job: Job, chosen: catalog.StoredCheckpoint
) -> Iterator[tuple[Tenant, catalog.StoredCheckpoint]]:
    """By rank. A volume that was away may have another start's checkpoint with the same number."""
    for _, tenant in sorted(job.tenants.items()) if chosen.id.world_size > 1 else ():
        one = tenant.volumes.checkpoint(chosen.id.sequence)
        if one is not None and one.held() == chosen.held():
            yield tenant, one


def _lease(session: Session, job: Job, own: Tenant, chosen: catalog.StoredCheckpoint) -> None:
    """A reader's checkpoint stays on every rank that has a part of it until the session ends.
    Raises NoCheckpointError when it was recycled meanwhile."""
    own.leases.take(chosen.id.sequence, session.number)
    for tenant, one in _holders(job, chosen):
        tenant.leases.take(one.id.sequence, session.number)


async def read(session: Session, memory: Dram, body: Read) -> None:
    """Starts to send payload through the page; its END carries the result."""
    job, own = _place(session)
    tenant = own if body.rank is None else job.tenants.get(body.rank)  # of the same user
    if tenant is None:
        raise NoCheckpointError(f"job {job.name!r} has no rank {body.rank}")
    port = session.port
    if port is None:
        raise RefusedError("the session has ended")
    await session.begin_load(body.load, tenant, body.sequence)
    try:
        volume = tenant.volumes.find(body.sequence)
        if volume is None:
            raise recycled(tenant.key, body.sequence)
        if not port.grant.nbytes:  # a rank that recovers before it registers
            payload = next(f for f in volume.checkpoints if f.id.sequence == body.sequence)
            await memory.claim(session, memory.wanted_for(own, payload.payload_bytes))
        await port.load(
            volume.volume, body.sequence, body.offset, body.length, body.load, own=tenant is own
        )
    except BaseException as error:
        session.end_load(body.load)
        if isinstance(error, DamagedError):
            await tenant.retention.damaged(body.sequence)
        raise


def _require_no_other(storage: Path, session: Session) -> None:
    """A private daemon has one user. So the checkpoints of another uid are most probably those of
    this user on another machine, or in a container."""
    files = layout.files_in_place(storage, job=session.job_name)
    others = sorted({file.uid for file in files} - {session.uid})
    if others:
        raise RefusedError(
            f"{storage} has checkpoints of job {session.job_name!r}, but of uid {others[0]}, and "
            f"this process is uid {session.uid}",
            hint=f"run as uid {others[0]}; or export them (pccheckctl --storage {storage} export) "
            "and import them; for a new run use another job name, or fresh=True without restore()",
        )


def _place(session: Session) -> tuple[Job, Tenant]:
    if session.job is None or session.tenant is None:
        raise RefusedError("an observer session cannot recover")
    return session.job, session.tenant
