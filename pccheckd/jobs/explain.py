"""Why the ranks of a job have no checkpoint in common: why one was given up, and why there has been
no new one for long."""

from __future__ import annotations

import time
from collections.abc import Collection

from pccheck_native.group import Held
from pccheck_native.names import APART_HINT
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.logs import LOG
from pccheckd.tenancy.checkpoint import GIVEN_UP, End

from .membership import Membership

REQUESTS_MAX = 512  # whose time is remembered until they are common
#: Of a checkpoint that a late rank requests after the others needed the slot.
GONE = "another rank no longer has this checkpoint, so no rank keeps it"
#: Of a request by a process of an older start.
FENCED = End(
    State.FAILED,
    "a newer start of this job is running, so checkpoints of this process are not saved",
    "end this process if it is a leftover; otherwise call restore(), which loads the state of the "
    "newest start. A live start with another launch id or number of ranks must end first",
)
#: States of a checkpoint that its rank does not have.
LOST = frozenset({State.FAILED, State.SKIPPED, State.SUPERSEDED})


def why_given_up(sequence: int, members: Membership, gone: Collection[int]) -> str:
    """Which rank will never have a checkpoint, and why, in words. `gone`: ranks whose process ended
    and that no other rank waits for."""
    if why := why_lost(sequence, members):
        return why
    lacking = (  # a world may be large, but the first that was never here ends the search
        rank
        for rank in range(members.world_size)
        if rank not in members.tenants or members.tenants[rank].ledger.of_sequence(sequence) is None
    )
    first = next(lacking, None)
    if first is None:
        return GONE
    if first in gone:
        return f"rank {first} ended without this checkpoint, so no rank keeps it"
    return f"{members.numbering.why_lacking(first, sequence)}, so no rank keeps it"


def why_lost(sequence: int, members: Membership) -> str:
    """Which rank has skipped a checkpoint or failed to save it; "" when none did."""
    for rank, tenant in sorted(members.tenants.items()):
        found = tenant.ledger.of_sequence(sequence)
        if found is not None and found.error != GIVEN_UP and found.state in LOST:
            why = f"rank {rank} did not save this checkpoint ({found.reason})"
            return f"{why}, so no rank keeps it"
    return ""


def divided_otherwise(first: int, rank: int) -> End:
    """Of a request that divides the replicated state otherwise than the first rank did."""
    return End(
        State.FAILED,
        f"ranks {first} and {rank} have attached different tensors with replicated=True, or the "
        "same in another order",
        "attach the same modules and optimizers, in one order, on every rank. What only one rank "
        "has (an averaged model on rank 0) needs a client and a job of its own: "
        "PCcheckClient(job=..., solo=True)",
    )


class Lateness:
    """How long the ranks of a job have had no new common checkpoint, and why. Owned by the job."""

    def __init__(self, uid: int, job_name: str) -> None:
        self._uid = uid
        self._job_name = job_name
        self._asked_ns: dict[int, int] = {}  # by sequence above the common one: since when
        self._common: Held | None = None  # the newest that all ranks have
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
        before, self._common = self._common, common
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
        again = not why and self._common != self._late_since
        if why and not self.why:
            self._late_since = self._common
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
