"""How the ranks of a job stand together: the newest checkpoint that all have, and who holds the
next one back. For status, metrics, warnings and the log."""

from __future__ import annotations

from dataclasses import dataclass

from pccheck_native import group
from pccheck_native.names import APART_HINT
from pccheck_wire.basics import some
from pccheck_wire.messages import CheckpointState as State

from .job import Job

#: A group is late when it has lost this many checkpoints in a row, and has waited this many times
#: as long as its slowest checkpoint took. One checkpoint skipped before a pause is no alarm.
LOST_MIN = 3
LATE_FACTOR = 3


@dataclass(frozen=True, slots=True)
class Standing:
    """How a job with several ranks stands."""

    world_size: int
    step: int | None  # of the newest common checkpoint
    sequence: int
    wall_ns: int | None  # when the last rank had it durable, for display
    waits_s: float  # since a newer one was asked for that is not common yet; 0: there is none
    lost: int  # newer ones that were skipped, failed or given up
    behind: dict[int, int]  # by rank: durable ones of other ranks that it does not have
    absent: list[int]  # ranks without a live process, while some have one
    is_late: bool
    apart: str = ""  # as Lateness.apart

    @property
    def slowest(self) -> int | None:
        """The rank that holds the next common checkpoint back; None when none does."""
        if self.absent:
            return self.absent[0]
        worst = max(self.behind, key=lambda rank: (self.behind[rank], -rank), default=None)
        return worst if worst is not None and self.behind[worst] else None

    def __str__(self) -> str:
        if self.apart:
            return f"{self.apart}: {APART_HINT}"
        last = "none so far" if self.step is None else f"the last is step {self.step}"
        who = ""
        if self.absent:
            who = f"; not connected: rank {some(self.absent)}"
        elif self.slowest is not None:
            who = f"; rank {self.slowest} is behind by {self.behind[self.slowest]}"
        return (
            f"no new checkpoint was saved by all {self.world_size} ranks for {self.waits_s:.0f} s "
            f"({last}{who}), and {self.lost} were lost; after a crash the job restarts from the "
            "last one that all ranks have"
        )


def of(job: Job, stall_limit_s: float) -> Standing | None:
    """None for a job of one rank, or one that has saved nothing."""
    world_size, lateness, common = job.members.world_size, job.lateness, job.decisions.common
    if world_size < 2:
        return None
    ranks, newest = job.decisions.known(), job.newest_common
    if not newest and not any(known.held or known.pending for known in ranks.values()):
        return None
    walls = [
        found.wall_ns
        for tenant in job.tenants.values()
        if (found := tenant.volumes.checkpoint(newest)) is not None
    ]
    lost = {
        found.sequence
        for tenant in job.tenants.values()
        for found in tenant.ledger.checkpoints.values()
        if found.sequence > newest and found.state in (State.SKIPPED, State.FAILED)
    }
    waits_s = lateness.waits_s()
    live = any(known.asked is not None for known in ranks.values())
    limit_s = max(stall_limit_s, LATE_FACTOR * lateness.longest_s)
    return Standing(
        world_size=world_size, step=common.step if common else None, sequence=newest,
        wall_ns=max(walls, default=None), waits_s=waits_s, lost=len(lost),
        behind=group.behind(ranks, world_size), absent=job.members.absent() if live else [],
        is_late=bool(lateness.apart) or (live and len(lost) >= LOST_MIN and waits_s > limit_s),
        apart=lateness.apart,
    )  # fmt: skip
