"""Which checkpoint a session restores: decided here, for a rank alone by `_newest`, for a group by
`group.choose`. `recovery.py` sends the chosen checkpoint."""

from __future__ import annotations

import time

from pccheck_native import catalog, group
from pccheck_native.group import Held, Refused
from pccheck_native.identity import CheckpointId
from pccheck_wire.errors import DamagedError, NoCheckpointError
from pccheck_wire.messages import Open, Role, Skipped, Writing
from pccheckd.base.logs import LOG
from pccheckd.group.job import Job
from pccheckd.tenancy.tenant import Tenant

from .sessions import Session

MAX_SEQUENCE = 2**63
#: How long a trainer that restores waits for checkpoints on their way before it gets an answer.
SETTLE_LIMIT_S = 5.0

#: The checkpoint, and the newer ones that are damaged with the volumes that could not be read.
#: None: the volumes were read, and hold nothing.
Choice = tuple[catalog.StoredCheckpoint | None, list[Skipped]]


def choose(
    session: Session, job: Job, own: Tenant, wanted: Open, agreed: Held | None = None
) -> Choice:
    """What a session restores. A reader, and a trainer with solo=True, get the newest valid
    checkpoint of the rank; another trainer the newest that all ranks have, or a later one that a
    start of this rank alone has saved. `agreed`: what the nodes of the job have chosen. Raises
    NoCheckpointError, DamagedError, or why a volume could not be read."""
    found = own.volumes.checkpoints()
    if session.solo or session.role is not Role.TRAINER:
        return _newest(own, wanted, found)
    if session.world_size == 1 and agreed is None:
        alone = [one for one in found if one.id.world_size == 1]
        best = (
            one.id.sequence
            for one in alone
            if _fits(one.id, wanted) and own.retention.is_usable(one)
        )
        common = job.members.common()
        shared = (held.sequence for held in common if held.world_size > 1 and _fits(held, wanted))
        if alone and max(shared, default=0) <= max(best, default=0):
            return _newest(own, wanted, alone)
    return _of_group(session, job, own, wanted, agreed), _in_doubt(own)


def restorable(session: Session, job: Job, own: Tenant) -> dict[int, int]:
    """The sequences and steps of all checkpoints that a session could restore, for pins."""
    is_alone = session.solo or session.world_size == 1
    mine = {
        one.id.sequence: one.id.step
        for one in own.volumes.checkpoints()
        if is_alone and own.retention.is_usable(one) and (session.solo or one.id.world_size == 1)
    }
    shared = {
        held.sequence: held.step
        for held in job.members.common()
        if not session.solo and (held.world_size > 1 or not is_alone)
    }
    return mine | shared


async def settled(job: Job) -> Writing | None:
    """Waits some seconds until every checkpoint requested so far, by any rank, has ended. Returns
    what is left otherwise."""
    last, deadline = job.members.numbering.last, time.monotonic() + SETTLE_LIMIT_S
    tenants = list(job.tenants.values())
    for tenant in tenants:
        if not await tenant.ledger.settled(max(0.0, deadline - time.monotonic()), last):
            return _writing(tenants, last)
        await tenant.volumes.refresh()
    job.settle()
    return None


def _writing(tenants: list[Tenant], last: int) -> Writing:
    """What is on its way, up to the sequence `last`."""
    live = [one for t in tenants for one in t.ledger.live() if one.id.sequence <= last]
    ports = [t.binding.port for t in tenants if t.binding.port is not None and t.ledger.live()]
    left = sum(u.full_chunks * port.chunk_bytes for port in ports if (u := port.usage()))
    total = sum(one.payload_bytes for one in live)
    newest = max(live, key=lambda one: one.id.sequence, default=None)
    return Writing(newest.id.step if newest else 0, len(live), total, min(left, total))


# -- of a group --------------------------------------------------------------------------------


def _of_group(
    session: Session, job: Job, own: Tenant, wanted: Open, agreed: Held | None
) -> catalog.StoredCheckpoint | None:
    """This rank's copy of the common checkpoint. Never mixes steps: fails when it is damaged or
    could not be read."""
    again = "restart all ranks; they will restore the previous step"
    start = job.members.starts.of(session.rank, session.process)
    if start is not None:  # it did not take what it was given before, or restores another
        start.members[session.rank].restores = None
    if wanted.before is not None and session.world_size > 1:
        raise DamagedError(
            f"{own.key}: the checkpoint that all ranks restore is damaged or cannot be read",
            hint=again,
        )
    common = agreed or _common(session, job, wanted)
    if common is None:
        return None
    if wanted.step is None:
        _require_no_newer(session, job, common)
    if start is not None:
        start.members[session.rank].restores = common
    LOG.info("%s recovers step %d (sequence %d)", own.key, common.step, common.sequence)
    # A rank that did not exist then takes the copy of rank 0, or of the only saver.
    for holder in (own, *(other for _, other in sorted(job.tenants.items()))):
        item = holder.volumes.checkpoint(common.sequence)
        if item is not None and holder.retention.is_usable(item):
            return item
        if session.rank < common.world_size and not wanted.any_world_size:
            break
    raise DamagedError(
        f"{own.key}: the checkpoint of step {common.step}, which all ranks restore, is damaged, "
        "cannot be read, or is gone",
        hint=again,
    )


def _common(session: Session, job: Job, wanted: Open) -> Held | None:
    """The common checkpoint that fits; None when no volume of the job holds a checkpoint."""
    begun = job.members.starts.before(session.rank, session.process)
    before = wanted.before or MAX_SEQUENCE
    ranks = {
        rank: known._replace(
            held=[h for h in known.held if h.incarnation != begun and h.sequence < before]
        )
        for rank, known in job.members.known().items()
    }
    found = group.choose(
        ranks, session.rank, session.world_size,
        step=wanted.step, any_world_size=wanted.any_world_size,
    )  # fmt: skip
    if isinstance(found, Held):
        return found
    # The volumes of some rank may hold newer checkpoints, or have lost them.
    doubts = (error for _, t in sorted(job.tenants.items()) for error in t.volumes.doubts)
    broken = next(doubts, None)
    if isinstance(found, Refused):
        also = f"; {broken.message}" if broken is not None else ""
        raise NoCheckpointError(f"job {job.name!r}: {found.reason}{also}", hint=found.hint)
    if broken is not None:
        raise broken
    return None


def _require_no_newer(session: Session, job: Job, found: Held) -> None:
    """Raises DamagedError when another rank of this start restores a newer checkpoint, which was
    chosen before this rank failed to read it."""
    current = job.members.starts.current
    for other, process in sorted(job.members.processes().items()):
        start = job.members.starts.of(other, process)
        its = start.members[other].restores if start is not None and start is current else None
        if other != session.rank and its is not None and its > found:
            raise DamagedError(
                f"job {job.name!r}: rank {other} of this start restores step {its.step}, but on "
                f"rank {session.rank} it is damaged or cannot be read",
                hint="restart all ranks; they will restore the step before",
            )


# -- of a rank alone ---------------------------------------------------------------------------


def _newest(own: Tenant, wanted: Open, found: list[catalog.StoredCheckpoint]) -> Choice:
    """Of the checkpoints of one rank, newest first, the first that is not damaged."""
    skipped = _in_doubt(own)
    for item in found:
        if not _fits(item.id, wanted):
            continue
        if not item.is_damaged:
            return item, skipped
        skipped.append(Skipped(item.id.sequence, item.id.step, "damaged when it was last read"))
    if not found and not skipped:
        return None, skipped
    what = "" if wanted.step is None else f" of step {wanted.step}"
    older = "" if wanted.before is None else f" older than sequence {wanted.before}"
    steps = ", ".join(f"{i.id.step}{' (damaged)' if i.is_damaged else ''}" for i in found) or "none"
    then = "fresh=True starts without a checkpoint"
    if wanted.step is not None and any(not item.is_damaged for item in found):
        then = "choose one of these steps, or leave step= out for the newest one"
    raise NoCheckpointError(
        f"{own.key} has no valid checkpoint{what}{older}; durable steps: {steps}",
        hint=f"{then}; see: pccheckctl list",
    )


def _in_doubt(tenant: Tenant) -> list[Skipped]:
    """The volumes that could not be read."""
    return [Skipped(0, 0, error.message) for error in tenant.volumes.doubts]


def _fits(one: CheckpointId | Held, wanted: Open) -> bool:
    older = wanted.before is None or one.sequence < wanted.before
    return older and wanted.step in (None, one.step)
