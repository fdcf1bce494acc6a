"""Which checkpoint a session restores, and which it may pin: decided here, for one rank with
`_newest`, for a group with `group.choose`. `recovery.py` sends the chosen one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from pccheck_native import catalog, group
from pccheck_native.group import Held, Refused
from pccheck_wire.errors import DamagedError, NoCheckpointError, PccheckError
from pccheck_wire.messages import Open, Skipped, Writing
from pccheckd.base.logs import LOG
from pccheckd.tenancy.tenant import Tenant

from .membership import Membership

MAX_SEQUENCE = 2**63
#: How long a trainer that restores waits for checkpoints on their way before it gets an answer.
SETTLE_LIMIT_S = 5.0


class Asker(NamedTuple):
    """The process that restores."""

    rank: int
    process: bytes
    world_size: int  # of its start; 1 when this rank alone saves
    solo: bool


class Choice(NamedTuple):
    checkpoint: catalog.Checkpoint | None  # None: the volumes were read, and hold nothing
    skipped: list[Skipped]  # newer ones that are damaged, and volumes that could not be read


class Choosing:
    """What the ranks of a job restore. Owned by the job."""

    def __init__(self, job_name: str, members: Membership, decide: Callable[[], None]) -> None:
        self._job_name = job_name
        self._members = members
        self._decide = decide
        self._chosen: dict[int, tuple[bytes, Held]] = {}  # what a rank's process restored last

    async def settled(self) -> Writing | None:
        """Waits some seconds until every checkpoint requested so far, by any rank, has ended.
        Returns what is left otherwise."""
        last, deadline = self._members.numbering.last, time.monotonic() + SETTLE_LIMIT_S
        tenants = list(self._members.tenants.values())
        for tenant in tenants:
            if not await tenant.ledger.settled(max(0.0, deadline - time.monotonic()), last):
                return _writing(tenants, last)
            await tenant.volumes.refresh()
        self._decide()
        return None

    def choose(self, asker: Asker, wanted: Open) -> Choice:
        """What a trainer restores: with solo=True the newest valid checkpoint of its rank; else the
        newest common one, or a later one that a start of one rank has saved alone. Raises
        NoCheckpointError, DamagedError, or why a volume could not be read."""
        own = self._members.tenants[asker.rank]
        found = own.volumes.checkpoints()
        if asker.solo:
            return newest_of(own, wanted, found)
        if asker.world_size == 1:
            alone = [one for one in found if one.world_size == 1]
            best = (one.sequence for one in alone if _fits(one, wanted) and own.is_usable(one))
            common = self._members.common()
            shared = (o.sequence for o in common if o.world_size > 1 and _fits(o, wanted))
            if alone and max(shared, default=0) <= max(best, default=0):
                return newest_of(own, wanted, alone)
        return Choice(self._of_group(asker, own, wanted), _in_doubt(own))

    def restorable(self, asker: Asker) -> dict[int, int]:
        """The sequences and steps of all checkpoints that a process of this rank can restore."""
        own = self._members.tenants[asker.rank]
        is_alone = asker.solo or asker.world_size == 1
        found: dict[int, int] = {}
        if is_alone:
            for one in own.volumes.checkpoints():
                if own.is_usable(one) and (asker.solo or one.world_size == 1):
                    found[one.sequence] = one.step
        for held in self._members.common() if not asker.solo else ():
            if held.world_size > 1 or not is_alone:
                found[held.sequence] = held.step
        return found

    # -- of a group ----------------------------------------------------------------------------

    def _of_group(self, asker: Asker, own: Tenant, wanted: Open) -> catalog.Checkpoint | None:
        """This rank's copy of the common checkpoint. Never mixes steps: fails when it is damaged or
        could not be read."""
        again = "restart all ranks; they will restore the previous step"
        self._chosen.pop(asker.rank, None)  # it did not take that one, or restores another
        if wanted.before is not None and asker.world_size > 1:
            raise DamagedError(
                f"{own.key}: the checkpoint that all ranks restore is damaged or cannot be read",
                hint=again,
            )
        common = self._common(asker, wanted)
        if common is None:
            return None
        LOG.info("%s recovers step %d (sequence %d)", own.key, common.step, common.sequence)
        # A rank that did not exist then takes the copy of rank 0, or of the only saver.
        for holder in (own, *(other for _, other in sorted(self._members.tenants.items()))):
            item = holder.volumes.checkpoint(common.sequence)
            if item is not None and holder.is_usable(item):
                return item
            if asker.rank < common.world_size and not wanted.any_world_size:
                break
        raise DamagedError(
            f"{own.key}: the checkpoint of step {common.step}, which all ranks restore, is "
            "damaged, cannot be read, or is gone",
            hint=again,
        )

    def _common(self, asker: Asker, wanted: Open) -> Held | None:
        """The common checkpoint that fits; None when no volume of the job holds a checkpoint."""
        begun = self._members.starts.before(asker.rank, asker.process)
        before = wanted.before or MAX_SEQUENCE
        ranks = {
            rank: known._replace(
                held=[h for h in known.held if h.incarnation != begun and h.sequence < before]
            )
            for rank, known in self._members.known().items()
        }
        found = group.choose(
            ranks, asker.rank, asker.world_size,
            step=wanted.step, any_world_size=wanted.any_world_size,
        )  # fmt: skip
        broken = self._doubt()
        if isinstance(found, Held):
            if wanted.step is None:
                self._require_no_newer(asker.rank, found)
            self._chosen[asker.rank] = asker.process, found
            return found
        if found is None and broken is not None:
            raise broken
        if isinstance(found, Refused):
            also = f"; {broken.message}" if broken is not None else ""
            raise NoCheckpointError(
                f"job {self._job_name!r}: {found.reason}{also}", hint=found.hint
            )
        return None

    def _require_no_newer(self, rank: int, found: Held) -> None:
        """Raises DamagedError when another rank of this start restores a newer checkpoint: it was
        chosen before this rank failed to read it."""
        starts, processes = self._members.starts, self._members.processes()
        for other, (process, its) in sorted(self._chosen.items()):
            is_there = processes.get(other) == process
            if is_there and starts.of(other, process) is starts.current and its > found:
                raise DamagedError(
                    f"job {self._job_name!r}: rank {other} of this start restores step {its.step}, "
                    f"but on rank {rank} it is damaged or cannot be read",
                    hint="restart all ranks; they will restore the step before",
                )

    def _doubt(self) -> PccheckError | None:
        """Why the volumes of some rank may hold newer checkpoints, or have lost them."""
        every = (e for _, t in sorted(self._members.tenants.items()) for e in t.volumes.doubts)
        return next(every, None)


def newest_of(own: Tenant, wanted: Open, found: list[catalog.Checkpoint]) -> Choice:
    """Of the checkpoints of one rank, newest first, the first that is not damaged."""
    skipped = _in_doubt(own)
    for item in found:
        if not _fits(item, wanted):
            continue
        if not item.is_damaged:
            return Choice(item, skipped)
        skipped.append(Skipped(item.sequence, item.step, "damaged when it was last read"))
    if not found and not skipped:
        return Choice(None, skipped)
    what = "" if wanted.step is None else f" of step {wanted.step}"
    older = "" if wanted.before is None else f" older than sequence {wanted.before}"
    steps = ", ".join(f"{i.step}{' (damaged)' if i.is_damaged else ''}" for i in found) or "none"
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


def _fits(one: catalog.Checkpoint | Held, wanted: Open) -> bool:
    older = wanted.before is None or one.sequence < wanted.before
    return older and wanted.step in (None, one.step)


def _writing(tenants: list[Tenant], last: int) -> Writing:
    """What is on its way, up to the sequence `last`."""
    live = [one for t in tenants for one in t.ledger.live() if one.sequence <= last]
    ports = [t.port for t in tenants if t.port is not None and t.ledger.live()]
    left = sum(u.full_chunks * port.chunk_bytes for port in ports if (u := port.usage()))
    total = sum(one.payload_bytes for one in live)
    newest = max(live, key=lambda one: one.sequence, default=None)
    return Writing(newest.step if newest else 0, len(live), total, min(left, total))
