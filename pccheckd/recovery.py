"""Which checkpoint a session recovers, and sending it."""

from __future__ import annotations

from pccheck_native import catalog
from pccheck_wire.errors import (
    DamagedError,
    NoCheckpointError,
    RefusedError,
    UsageError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Empty, Open, Opened, Read, Role, Skipped

from .jobs import SETTLE_LIMIT_S, Job
from .sessions import Session, Sessions
from .tenants import Tenant


async def open_checkpoint(session: Session, body: Open) -> Opened | Empty:
    """The newest valid checkpoint (of `step`, older than `before`, when given), for a group the
    one that all its ranks have. Empty only when the volumes were read and hold nothing.

    Raises NoCheckpointError when there are some but none that will do.
    """
    job, tenant = _place(session)
    if session.role is Role.TRAINER and not await tenant.ledger.settled(
        SETTLE_LIMIT_S, before_incarnation=session.incarnation
    ):
        raise WaitTimeoutError("checkpoints of the run before are still being written")
    await tenant.volumes.refresh()
    skipped = [Skipped(0, 0, str(error)) for error in tenant.volumes.unreadable.values()]
    if session.world_size > 1:
        chosen = await _of_group(session, job, tenant, body)
    else:
        chosen = _newest(tenant, body, skipped)
    if chosen is None:
        return Empty(skipped)
    return Opened(
        sequence=chosen.sequence, step=chosen.step, incarnation=chosen.incarnation,
        payload_bytes=chosen.payload_bytes, tree_offset=chosen.tree_offset,
        tree_bytes=chosen.tree_bytes, skipped=skipped,
        source="dram" if await _in_dram(session, tenant, chosen.sequence) else "volume",
    )  # fmt: skip


def _newest(tenant: Tenant, body: Open, skipped: list[Skipped]) -> catalog.Checkpoint | None:
    """Newest first; damaged ones are passed over and named in `skipped`."""
    found = tenant.volumes.checkpoints()
    for item in found:
        if body.before is not None and item.sequence >= body.before:
            continue
        if body.step is not None and item.step != body.step:
            continue
        if not item.is_damaged:
            return item
        skipped.append(Skipped(item.sequence, item.step, "damaged when it was last read"))
    if not found and not skipped:
        return None
    wanted = "" if body.step is None else f" of step {body.step}"
    older = "" if body.before is None else f" older than sequence {body.before}"
    steps = ", ".join(f"{i.step}{' (damaged)' if i.is_damaged else ''}" for i in found) or "none"
    raise NoCheckpointError(
        f"{tenant.key} has no valid checkpoint{wanted}{older}; durable steps: {steps}",
        hint="see: pccheckctl list; fresh=True begins anew",
    )


async def _of_group(
    session: Session, job: Job, tenant: Tenant, body: Open
) -> catalog.Checkpoint | None:
    """This rank's copy of what the group agreed on. Never mixes steps: one that is damaged, or
    could not be read, fails."""
    again = "restart all ranks: they will agree on the step before"
    if body.before is not None:
        raise DamagedError(
            f"{tenant.key}: its copy of the step that the group recovers cannot be used",
            hint=again,
        )
    common = await job.decide(
        session.world_size, body.step, session.incarnation, memoise=session.role is Role.TRAINER
    )
    if common is None:
        return None
    for item in tenant.volumes.checkpoints():
        if (item.incarnation, item.step) == common and tenant.is_usable(item):
            return item
    raise DamagedError(
        f"{tenant.key}: its copy of step {common[1]}, which the group recovers, cannot be used "
        "or is gone",
        hint=again,
    )


async def _in_dram(session: Session, tenant: Tenant, sequence: int) -> bool:
    port = tenant.port
    if session.role is not Role.TRAINER or port is None:
        return False
    return await tenant.engine.call(tenant.key.uid, port.channel.cached, sequence)


async def read(session: Session, sessions: Sessions, body: Read) -> None:
    """Starts sending payload through the page; its END says how it went."""
    _job, tenant = _place(session)
    port, volume = session.port, tenant.volumes.find(body.sequence)
    if port is None:
        raise RefusedError("the session has ended")
    if volume is None:
        raise NoCheckpointError(
            f"{tenant.key} has no durable checkpoint {body.sequence} (any more)",
            hint="open the newest one again",
        )
    if body.load in session.loads:
        raise UsageError(f"load {body.load} is in progress")
    session.loads[body.load] = body.sequence
    tenant.reading += 1
    try:
        if not port.granted_bytes:  # a rank that recovers before it registers
            payload = next(f for f in volume.checkpoints if f.sequence == body.sequence)
            await sessions.claim(session, tenant.wanted_bytes(payload.payload_bytes))
        await port.load(volume.volume, body.sequence, body.offset, body.length, body.load)
    except BaseException as error:
        if session.loads.pop(body.load, None) is not None:
            tenant.reading -= 1
        if isinstance(error, DamagedError):
            await tenant.retention.damaged(body.sequence)
        raise


def _place(session: Session) -> tuple[Job, Tenant]:
    if session.job is None or session.tenant is None:
        raise RefusedError("an observer cannot recover")
    return session.job, session.tenant
