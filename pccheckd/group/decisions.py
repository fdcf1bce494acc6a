"""What the ranks of a job have decided. `group.py` decides, from what the volumes hold and the
processes have requested; this module applies the answer to volumes, queues and pages. No call here
waits, and a decision takes linear time: one user may have many ranks, and other users wait
meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Collection

from pccheck_native import catalog, group
from pccheck_native.group import Agreement, Held, Rank
from pccheck_wire.ends import Cause, Why
from pccheckd.config.options import Config
from pccheckd.core.port import Owner

from . import explain
from .explain import Lateness
from .membership import Membership
from .numbering import trim

SKIPS_KEPT = 256  # no honest rank requests an older one
#: How long the ranks wait for one that has no process. To reconnect takes seconds.
ABSENT_LIMIT_S = 10.0


class Decisions:
    """Owned by the job."""

    def __init__(self, members: Membership, lateness: Lateness, config: Config) -> None:
        self._members = members
        self._lateness = lateness
        self._config = config
        self.agreement = Agreement(0, 0, frozenset())
        self._shared: list[Held] = []  # the checkpoints that all ranks have, newest first
        self._doubtful: frozenset[int] = frozenset()  # were given up at some time
        self._skips: dict[int, Why] = {}  # sequences that all ranks skip, and why
        self._absent_s: dict[int, float] = {}  # ranks without a process, and since when
        self._gone: frozenset[int] = frozenset()  # ranks for which no other rank waits any more
        self._known: dict[int, Rank] = {}  # at the last decision

    # -- the decision --------------------------------------------------------------------------

    def decide(self, short: Collection[int]) -> None:
        """Decides, and applies it to every rank. `short` ranks have no slot for their next
        checkpoint. A single rank has nothing to decide."""
        if not self._members.is_shared:
            return
        tenants = self._members.tenants.values()
        for tenant in tenants:  # a file may have appeared
            self._members.numbering.passed(tenant.volumes.last_sequence())
        ranks = self._known = self.known()
        agreed = group.agree(self._with_lost(ranks), self._members.world_size, self._keep(), short)
        agreed = self._members.elsewhere.keeps(agreed)
        shared = group.common(ranks)
        there = {n for known in ranks.values() for n in known.pending}
        there |= {held.sequence for known in ranks.values() for held in known.held}
        # It may be recycled before its rank hears that it was durable.
        there |= {number for tenant in tenants for number in tenant.ledger.undecided()}
        back = {held.sequence for held in shared}  # a damage flag was removed, or a file is back
        # What was given up stays given up: a rank may have acted on it.
        elsewhere = self._members.elsewhere.given_up.keys()
        given_up = agreed.given_up | elsewhere | self.agreement.given_up & (there - back)
        self.agreement = agreed._replace(given_up=given_up)
        # A checkpoint that is back may be restored. But a rank that acts on the old decision may
        # be about to overwrite its part, so the checkpoint is never reported as global.
        self._doubtful = (self._doubtful | given_up) & there
        self._became_common([held for held in shared if held.sequence not in self._doubtful])
        common, lost = {held.sequence for held in self._shared}, self._lost()

        @functools.cache  # the ranks ask for the same ones
        def why_never(sequence: int) -> Why | None:
            never = sequence not in common and (sequence in lost or self.gives_up(sequence))
            return self.why_given_up(sequence) if never else None

        for tenant in tenants:
            tenant.obey(self.agreement)
            tenant.saves.gave_up(why_never)

    def known(self) -> dict[int, Rank]:
        """What is known of each rank now, for `group.py`."""
        return self._members.known(self._gone)

    def _with_lost(self, ranks: dict[int, Rank]) -> dict[int, Rank]:
        """Adds the checkpoints in files that are not at their paths any more. Such a file may come
        back with its directory or its disk, so the other ranks keep their parts."""
        lost = {rank: tenant.volumes.lost for rank, tenant in self._members.tenants.items()}
        return ranks | {
            rank: ranks[rank]._replace(held={*ranks[rank].held, *(one.held() for one in found)})
            for rank, found in lost.items()
            if found
        }

    def _keep(self) -> int:
        """`keep` of the existing volumes, else as configured."""
        current = (tenant.volumes.current for tenant in self._members.tenants.values())
        return min((item.info.keep for item in current if item), default=self._config.keep)

    def _became_common(self, shared: list[Held]) -> None:
        before, self._shared = self._shared, shared
        newest = shared[0].sequence if shared else 0
        is_new = self._lateness.decided(shared[0] if shared else None)
        common = {held.sequence for held in shared}
        tenants = self._members.tenants.values()
        for tenant in tenants:
            if is_new or tenant.ledger.is_late(newest):
                tenant.saves.became_global(newest, common)
        # Not only the newest: a checkpoint of the run before may end after one of this run.
        oldest_run = min((held.incarnation for held in set(shared) - set(before)), default=None)
        for tenant in tenants:
            if oldest_run is not None and oldest_run < tenant.readiness.incarnation:
                tenant.tasks.spawn(tenant.retention.protect_late())

    def _lost(self) -> set[int]:
        """Checkpoints that some rank has durable, and that another rank has lost. A rank gets no
        sequence twice, and neither does a new process of the rank. Checkpoints that no rank has
        lost may still become global: a rank has not asked for one yet, or is writing it."""
        ledgers = [tenant.ledger for tenant in self._members.tenants.values()]
        undecided = {sequence for ledger in ledgers for sequence in ledger.undecided()}
        return {
            sequence
            for ledger in ledgers
            for sequence in undecided & ledger.by_sequence.keys()
            if ledger.by_sequence[sequence].state in explain.LOST
        }

    # -- what is given up ----------------------------------------------------------------------

    def note_absent(self, now_s: float) -> bool:
        """From now on no rank waits for one that has had no process for ABSENT_LIMIT_S, while other
        ranks of its start have one. Returns whether that changes what the ranks decide."""
        absent = self._members.lost()
        self._absent_s = {rank: self._absent_s.get(rank, now_s) for rank in absent}
        limit_s = now_s - ABSENT_LIMIT_S
        before = self._gone
        self._gone = frozenset(r for r, since_s in self._absent_s.items() if since_s < limit_s)
        return self._gone != before

    def skip_if_busy(self, sequence: int) -> None:
        """The first rank that requests a checkpoint decides for all. If each rank skipped by
        itself, a free rank would write a checkpoint that a busy rank skips, and be busy when that
        rank is free: unequal ranks that save without a pause would have almost no checkpoint in
        common."""
        world_size = self._members.world_size
        busy = [
            rank
            for rank, tenant in sorted(self._members.tenants.items())
            if rank < world_size and tenant.seat.owner is not None and not tenant.slots.has_room()
        ]
        if busy:
            self.skip(sequence, Why(Cause.RANK_BUSY, busy[0]))

    def skip(self, sequence: int, why: Why) -> None:
        """No rank saves it."""
        self._skips[sequence] = why
        trim(self._skips, SKIPS_KEPT)

    def gives_up(self, sequence: int) -> bool:
        """Whether some rank will never have it."""
        return sequence in self.agreement.given_up or sequence in self._skips

    def why_given_up(self, sequence: int) -> Why:
        """Which rank will never have a checkpoint, and why."""
        why = self._skips.get(sequence)
        return why or explain.why_given_up(sequence, self._members, self._gone)

    def why_too_late(self, sequence: int) -> Why | None:
        """Why a rank cannot save its part of a checkpoint that others have requested before; None:
        some rank has it, durable or in flight, and it is not given up."""
        is_there = not self.gives_up(sequence) and any(
            sequence in tenant.ledger.pending() or tenant.volumes.checkpoint(sequence) is not None
            for tenant in self._members.tenants.values()
        )
        return None if is_there else self.why_passed(sequence)

    def why_passed(self, sequence: int) -> Why:
        """Why no rank gets this sequence any more."""
        why = self._skips.get(sequence) or explain.why_lost(sequence, self._members)
        return why or explain.GONE

    def lagging(self, rank: int) -> list[int]:
        """The ranks for which `rank` waited at the last decision, although they have requested
        nothing."""
        return group.lagging(self._known, self._members.world_size, rank, self.agreement)

    # -- what stays ----------------------------------------------------------------------------

    def needs(self, sequence: int) -> bool:
        """Whether a durable checkpoint must not go with its volume."""
        agreed = self.agreement
        return (
            self._members.is_shared
            and sequence >= agreed.oldest
            and sequence not in agreed.given_up
        )

    def pins(self, rank: int, owner: Owner) -> set[int]:
        """What a trainer that has restored nothing newer must leave alone (P7)."""
        current = self._members.tenants[rank].volumes.current
        if current is None:
            return set()
        there = current.checkpoints
        staying = current.pinned | catalog.bases(there, {found.id.sequence for found in there})
        return group.pins(
            self.known(), rank, self._members.of(rank, owner.process).incarnation,
            after=owner.restored or 0, slots=current.info.slots - len(staying),
        )  # fmt: skip
