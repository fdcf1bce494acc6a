"""Checkpoints that the user pins: kept on every rank until they are unpinned."""

from __future__ import annotations

import time

from pccheck_native import catalog
from pccheck_wire.basics import some
from pccheck_wire.errors import NoCheckpointError, PccheckError, RefusedError
from pccheck_wire.messages import Pin
from pccheckd.group.job import Job
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import PINNED

from . import choosing
from .sessions import Session

#: Beside pinned checkpoints a volume needs slots for the newest one, for one that is protected for
#: a run that has not restored, and for the next one.
SLOTS_BESIDE_MIN = 3
#: A client waits half a minute for the answer.
WRITE_LIMIT_S = 20.0


async def pin(session: Session, body: Pin) -> None:
    """Has it written first if it is in memory only. Raises NoCheckpointError when no such
    checkpoint is durable, RefusedError with the numbers when too few slots would be left, and what
    the disk answers when it cannot be written. Pinning twice is no error: every rank may ask."""
    job, own = session.job, session.tenant
    assert job is not None and own is not None
    if body.pinned:
        await _write(job, own, body.step)
    async with job.joining:  # meanwhile nothing is protected for a run that begins
        tenants = [own] if session.solo else list(job.tenants.values())
        for tenant in tenants:
            await tenant.volumes.refresh()
        await _undo_halves(tenants)
        if not body.pinned:
            await _unpin(tenants, body.step)
            return
        sequence = _sequence(session, job, own, body.step)
        holders = _holders(tenants, own, sequence)
        for tenant in holders:
            _require_room(tenant, sequence, body.step)
        fresh = [one for one in holders if not _is_pinned(one, sequence)]
        try:
            for tenant in fresh:
                if not await tenant.retention.flag_or_raise(sequence, set_=PINNED, now=True):
                    raise _none_of(job, body.step, "newer ones replaced it meanwhile")
        except PccheckError:
            for one in fresh:
                await one.retention.flag(sequence, clear=PINNED, now=True)
                await one.volumes.refresh()
            raise


async def _write(job: Job, own: Tenant, step: int) -> None:
    """Returns when the newest one of this step, if it is in memory only, has ended on every rank.
    A newer one in memory does not replace it meanwhile."""
    mine = [one for one in own.ledger.live() if one.in_memory and one.id.step == step]
    if not mine:
        return
    mine[-1].wanted = True
    job.settle()
    sequence, deadline = mine[-1].id.sequence, time.monotonic() + WRITE_LIMIT_S
    for tenant in list(job.tenants.values()):
        part = tenant.ledger.of_sequence(sequence)
        if part is not None:
            left_s = max(0.0, deadline - time.monotonic())
            await tenant.ledger.until(lambda part=part: not part.live, left_s)  # type: ignore[misc]


async def _undo_halves(tenants: list[Tenant]) -> None:
    """Unpins what is pinned on some ranks only, because the daemon was killed in between: the
    caller got no success."""
    for tenant in tenants:
        for item in tenant.volumes.open:
            for sequence in item.pinned:
                holders = _holders(tenants, tenant, sequence)
                if not all(_is_pinned(one, sequence) for one in holders):
                    await tenant.retention.flag(sequence, clear=PINNED, now=True)


def _holders(tenants: list[Tenant], own: Tenant, sequence: int) -> list[Tenant]:
    """The ranks with a part of the checkpoint that `own`, or else another rank, has under this
    number. What a rank saved alone is its own: others may have used the number otherwise."""
    every = (own, *tenants)
    ranks = {one: found for one in every if (found := one.volumes.checkpoint(sequence))}
    if not ranks:
        return []
    first, its = next(iter(ranks.items()))
    if its.id.world_size == 1:
        return [first]
    return [one for one, part in ranks.items() if part.held() == its.held()]


def _is_pinned(tenant: Tenant, sequence: int) -> bool:
    found = tenant.volumes.checkpoint(sequence)
    return found is not None and found.is_pinned


async def _unpin(tenants: list[Tenant], step: int) -> None:
    for tenant in tenants:
        for one in tenant.volumes.checkpoints():
            if one.id.step == step and one.is_pinned:
                await tenant.retention.flag_or_raise(one.id.sequence, clear=PINNED, now=True)


def _sequence(session: Session, job: Job, own: Tenant, step: int) -> int:
    """The sequence of the newest checkpoint of a step that this rank can restore."""
    known = choosing.restorable(session, job, own)
    found = max((sequence for sequence, its in known.items() if its == step), default=0)
    if not found:
        steps = some(known[one] for one in sorted(known, reverse=True)) or "none"
        raise _none_of(job, step, f"durable steps: {steps}")
    return found


def _none_of(job: Job, step: int, why: str) -> NoCheckpointError:
    return NoCheckpointError(
        f"job {job.name!r} has no durable checkpoint of step {step} ({why})",
        hint="call wait_global() of its handle first, and pin it before newer ones replace it",
    )


def _require_room(tenant: Tenant, sequence: int, step: int) -> None:
    item = tenant.volumes.find(sequence)
    if item is None or sequence in item.pinned:
        return
    slots = item.info.slots - item.quarantined
    beside = max(item.info.keep + 1, SLOTS_BESIDE_MIN)
    protected = {one.id.sequence for one in item.checkpoints if one.is_protected}
    wanted = item.pinned | {sequence}
    bases = catalog.bases(item.checkpoints, wanted | protected) - wanted - protected
    pinned = [one.id.step for one in item.checkpoints if one.is_pinned]
    steps = ", ".join(map(str, pinned)) or "none"
    if len(wanted | bases) > slots - beside:
        shared = f", and {len(bases)} for their unchanged tensors" if bases else ""
        earlier = f"an earlier checkpoint of step {step} is pinned: unpin({step}) releases it. Or "
        raise RefusedError(
            f"{tenant.key}: {max(0, slots - beside - len(bases))} of {slots} slots can hold pinned "
            f"checkpoints: {beside} are needed for new ones{shared}; pinned steps: {steps}",
            hint=f"{earlier if step in pinned else ''}unpin one, or start pccheckd with more "
            "--slots, which new jobs and larger states get",
        )
    if len(wanted | protected | bases) > slots - 2:
        raise RefusedError(
            f"{tenant.key}: {len(protected)} of {slots} slots are kept for a run that has not "
            "restored, and the next checkpoint needs one",
            hint="call restore(), or adopt(), before pin()",
        )
