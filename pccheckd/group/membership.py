"""The ranks of a job, the process of each, and the start that a process belongs to. It also says
what is known of each rank, in the terms of `group.py`."""

from __future__ import annotations

from collections.abc import Collection

from pccheck_native import group
from pccheck_native.group import Held, Rank
from pccheck_wire.errors import RefusedError
from pccheckd.tenancy.tenant import Tenant

from .elsewhere import Elsewhere
from .numbering import Numbering
from .starts import NO_START, Arrival, Start, Starts

NEVER = 2**63  # above every sequence


class Membership:
    """Owned by its job."""

    def __init__(self, job_name: str) -> None:
        self._job_name = job_name
        self.tenants: dict[int, Tenant] = {}
        self.starts = Starts()
        self.numbering = Numbering(self.starts)
        self.elsewhere = Elsewhere()

    # -- how many ------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of ranks of the current start, else of the run that saved last."""
        start = self.starts.current
        if start is not None:
            return start.world_size
        every = [t.volumes.checkpoints() for t in self.tenants.values()]
        newest = [checkpoints[0] for checkpoints in every if checkpoints]
        return max(newest, key=lambda found: found.id.sequence).id.world_size if newest else 1

    @property
    def is_shared(self) -> bool:
        """The ranks decide together: there are several, or checkpoints of a start that had."""
        if self.world_size > 1 or len(self.tenants) > 1:
            return True
        left = (found for t in self.tenants.values() for found in t.volumes.checkpoints())
        return any(found.id.world_size > 1 for found in left)

    def ranks(self, world_size: int) -> Collection[int]:
        """Of a world of this size, the ranks that this node can have parts of."""
        start = self.starts.current
        is_wide = start is not None and start.kind.is_wide and start.world_size == world_size
        return sorted(start.members) if start is not None and is_wide else range(world_size)

    @property
    def waits_for_nodes(self) -> bool:
        """The newest start has ranks on other nodes, and its nodes have not agreed yet."""
        start = self.starts.current
        return (
            start is not None and start.kind.is_wide and self.elsewhere.agreed != start.incarnation
        )

    def absent(self) -> list[int]:
        """Ranks of the current start without a live process."""
        start = self.starts.current
        return start.missing() if start is not None else []

    def lost(self) -> list[int]:
        """Ranks of the current start whose process has ended, while other ranks have one."""
        start = self.starts.current
        waits = start is not None and start.world_size > 1 and start.is_live
        return start.lost() if start is not None and waits else []

    # -- who comes and goes --------------------------------------------------------------------

    def join(self, who: Arrival) -> bool:
        """A process connects. Returns whether a new start begins with it."""
        known = max((t.volumes.newest_incarnation() for t in self.tenants.values()), default=0)
        before = self.starts.current
        volumes = self.tenants[who.rank].volumes
        found = None if volumes.unreadable else volumes.newest_incarnation()
        start = self.starts.join(who, known, found)
        self.numbering.joined(who.rank)
        self.numbering.catch_up(self.processes() | {who.rank: who.process})
        self._instruct()
        return start is not before

    def may_ask(self, rank: int, process: bytes) -> Start | None:
        """The start in which a process requests a checkpoint; None when the process is fenced."""
        before = self.starts.of(rank, process)
        start = self.starts.may_ask(rank, process)
        self.numbering.catch_up(self.processes())
        if start is not before:
            self._instruct()
        return start

    def of(self, rank: int, process: bytes) -> Start:
        """The newest start that a process belongs to: the process may have moved to a newer start
        since it connected. NO_START: it belongs to none."""
        return self.starts.of(rank, process) or NO_START

    def registered(self, rank: int, process: bytes) -> int:
        """A process is about to save: one that has requested nothing in an older start moves to the
        newest. Its incarnation."""
        start = self.starts.of(rank, process)
        if start is None:
            return 0
        return start.incarnation if start.members[rank].begun else self.follow(rank, process)

    def follow(self, rank: int, process: bytes) -> int:
        """A process restores: it belongs to the newest start from now on. Its incarnation."""
        start = self.starts.follow(rank, process)
        self.numbering.catch_up(self.processes())
        self._instruct()
        return start.incarnation

    def left(self, rank: int, process: bytes) -> None:
        """A session has ended."""
        self.starts.left(rank, process)
        self.numbering.catch_up(self.processes())
        self._instruct()

    def _instruct(self) -> None:
        """Which rank saves alone may have changed."""
        for tenant in self.tenants.values():
            tenant.readiness.instruct()

    def processes(self) -> dict[int, bytes]:
        """By rank: the process that is connected."""
        return {
            rank: t.seat.owner.process
            for rank, t in self.tenants.items()
            if t.seat.owner is not None
        }

    def require_no_other(self, rank: int, *, solo: bool) -> None:
        """Raises RefusedError when another rank saves beside one with solo=True."""
        for other, tenant in sorted(self.tenants.items()):
            owner = tenant.seat.owner
            if other == rank or owner is None or not (solo or owner.solo):
                continue
            alone, its = (rank, "this process") if solo else (other, f"pid {owner.pid}")
            raise RefusedError(
                f"rank {alone} ({its}) was started with solo=True, which means that no other rank "
                f"saves job {self._job_name!r}, but rank {rank if alone == other else other} has a "
                "client",
                hint="make one client, on one rank: if rank == 0: client = "
                "PCcheckClient(solo=True); or remove solo=True, so that all ranks save",
            )

    # -- what is known -------------------------------------------------------------------------

    def known(self, gone: Collection[int] = ()) -> dict[int, Rank]:
        """What `group.py` needs to know of each rank. No other rank waits for those in `gone`."""
        here = {rank: self._known(rank, rank in gone) for rank in self.tenants}
        return self.elsewhere.with_others(here)

    def _known(self, rank: int, is_gone: bool) -> Rank:
        tenant = self.tenants[rank]
        owner = tenant.seat.owner
        start = self.starts.of(rank, owner.process) if owner is not None else None
        passed = NEVER if is_gone else None
        if start is not None and start is self.starts.current and not tenant.seat.is_leaving:
            passed = self.numbering.asked(rank)
        return Rank(
            held=frozenset(
                found.held(usable=tenant.retention.is_usable(found))
                for found in tenant.volumes.checkpoints()
            ),
            pending=tenant.ledger.pending(),
            parked=[found.id.sequence for found in tenant.ledger.parked()],
            blocked=[found.id.sequence for found in tenant.ledger.parked() if found.blocked],
            asked=passed,
            pinned=frozenset(tenant.retention.inherited if owner else tenant.retention.flagged),
        )

    def common(self) -> list[Held]:
        """The checkpoints that all ranks have, newest first."""
        return group.common(self.known())
