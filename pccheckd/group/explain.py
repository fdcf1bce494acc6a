"""Why the ranks of a job have no checkpoint in common: why one was given up, and who holds the next
one back. For handles, status, metrics, warnings and the log."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pccheck_native import group
from pccheck_native.group import Held, Rank
from pccheck_native.names import APART_HINT
from pccheck_wire.basics import some
from pccheck_wire.ends import NONE_KEEPS, Cause, Why, sentence
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.logs import LOG
from pccheckd.tenancy.checkpoint import failed

from .membership import Membership

REQUESTS_MAX = 512  # whose time is remembered until they are common
#: A group is late when it has lost this many checkpoints in a row, and has waited this many times
#: as long as its slowest checkpoint took. One checkpoint skipped before a pause is no alarm.
LOST_MIN = 3
LATE_FACTOR = 3
#: Of a checkpoint that a late rank requests after the others needed the slot.
GONE = Why(Cause.RANK_DROPPED)
#: Of a request by a process of an older start.
FENCED = failed(Cause.FENCED)
#: States of a checkpoint that its rank does not have.
LOST = frozenset({State.FAILED, State.SKIPPED, State.SUPERSEDED})


def why_given_up(sequence: int, members: Membership, gone: Collection[int]) -> Why:
    """Which rank will never have a checkpoint, and why. `gone`: ranks whose process ended
    and that no other rank waits for."""
    if why := why_lost(sequence, members) or members.elsewhere.given_up.get(sequence):
        return why
    lacking = (  # a world may be large, but the first that was never here ends the search
        rank
        for rank in members.ranks(members.world_size)
        if rank not in members.tenants or members.tenants[rank].ledger.of_sequence(sequence) is None
    )
    first = next(lacking, None)
    if first is None:
        return GONE
    if first in gone:
        return Why(Cause.RANK_ENDED, first)
    never = Why(Cause.RANK_NEVER, first)
    words = f"{members.numbering.why_lacking(first, sequence)}, {NONE_KEEPS}"
    unlike = words != sentence(never).reason
    return Why(Cause.RANK_LACKS, first, words=words) if unlike else never


def why_lost(sequence: int, members: Membership) -> Why | None:
    """Which rank has skipped a checkpoint or failed to save it; None when none did."""
    for rank, tenant in sorted(members.tenants.items()):
        found = tenant.ledger.of_sequence(sequence)
        if found is not None and found.state in LOST and not found.is_given_up:
            what = f"rank {rank} did not save this checkpoint ({found.sentence.reason})"
            return Why(Cause.RANK_LACKS, rank, words=f"{what}, {NONE_KEEPS}")
    return None


class Lateness:
    """How long the ranks of a job have had no new common checkpoint, and why. Owned by the job."""

    def __init__(self, uid: int, job_name: str) -> None:
        self._uid = uid
        self._job_name = job_name
        self._asked_ns: dict[int, int] = {}  # by sequence above the common one: since when
        self.common: Held | None = None  #: the newest that all ranks had at the last decision
        self._late_since: Held | None = None  # the same, when the ranks began to be late
        self.why = ""  #: why the ranks are late; "": they are not
        self.apart = ""  #: why two ranks can have no checkpoint after the newest common one
        self.longest_s = 0.0  # from a request to the common checkpoint

    def requested(self, sequence: int, at_ns: int) -> None:
        if len(self._asked_ns) < REQUESTS_MAX:
            self._asked_ns.setdefault(sequence, at_ns)

    def waits_s(self) -> float:
        """How long the oldest request above the newest common checkpoint has waited to become
        common; 0.0: there is none."""
        oldest_ns = min(self._asked_ns.values(), default=0)
        return (time.monotonic_ns() - oldest_ns) / 1e9 if oldest_ns else 0.0

    def decided(self, common: Held | None) -> bool:
        """The newest common checkpoint at a decision. Returns whether it is a new one."""
        before, self.common = self.common, common
        if common is None or common == before:
            return False
        if self.apart:
            self.apart = ""
            self.note("")
        now_ns = time.monotonic_ns()
        asked_ns = self._asked_ns.get(common.sequence, now_ns)
        self.longest_s = max(self.longest_s, (now_ns - asked_ns) / 1e9)
        self._asked_ns = {n: at for n, at in self._asked_ns.items() if n > common.sequence}
        return True

    def note_apart(self, why: str) -> None:
        """Two ranks save in different lines, until the next common checkpoint: the job is late at
        once."""
        self.apart = self.apart or f"{why}, so they have no checkpoint in common"
        self.note(f"{self.apart}: {APART_HINT}")

    def note(self, why: str) -> None:
        """Why the ranks have had no common checkpoint for long, or "": logged when it changes.
        Ranks that end without one are no longer late, and still have none."""
        again = not why and self.common != self._late_since
        if why and not self.why:
            self._late_since = self.common
        if bool(why) != bool(self.why) and (why or again):
            LOG.warning(
                "job %r of uid %d: %s", self._job_name, self._uid,
                why or "the ranks have a new common checkpoint again",
                extra={"fields": {
                    "event": "group-late" if why else "group-again",
                    "uid": self._uid, "job": self._job_name,
                }},
            )  # fmt: skip
        self.why = why


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


def standing(
    members: Membership,
    ranks: Mapping[int, Rank],
    newest: int,
    lateness: Lateness,
    stall_limit_s: float,
) -> Standing | None:
    """None for a job of one rank, or one that has saved nothing. `ranks`: what is known of each;
    `newest`: the newest sequence that all have, also in files that are away."""
    world_size, common = members.world_size, lateness.common
    if world_size < 2:
        return None
    if not newest and not any(known.held or known.pending for known in ranks.values()):
        return None
    tenants = members.tenants.values()
    found = (tenant.volumes.checkpoint(newest) for tenant in tenants)
    lost = {
        found.id.sequence
        for tenant in tenants
        for found in tenant.ledger.checkpoints.values()
        if found.id.sequence > newest and found.state in (State.SKIPPED, State.FAILED)
    }
    waits_s = lateness.waits_s()
    live = any(known.asked is not None for known in ranks.values())
    limit_s = max(stall_limit_s, LATE_FACTOR * lateness.longest_s)
    return Standing(
        world_size=world_size, step=common.step if common else None, sequence=newest,
        wall_ns=max((one.wall_ns for one in found if one), default=None), waits_s=waits_s,
        lost=len(lost), behind=group.behind(ranks, world_size),
        absent=members.absent() if live else [],
        is_late=bool(lateness.apart) or (live and len(lost) >= LOST_MIN and waits_s > limit_s),
        apart=lateness.apart,
    )  # fmt: skip
