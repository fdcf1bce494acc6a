"""A job: the ranks of one user's training run. It passes the state of volumes and sessions to
`group.py`, which decides, and applies the decisions to the ranks' volumes, queues and pages."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

from pccheck_native import _core, catalog, group, names
from pccheck_native.group import Agreement, Held, Rank, Refused
from pccheck_native.names import Name, Numbers
from pccheck_wire.basics import some
from pccheck_wire.errors import DamagedError, NoCheckpointError, PccheckError, RefusedError
from pccheck_wire.messages import Joined, Restored, Writing
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.logs import LOG
from pccheckd.config.options import Config
from pccheckd.core.port import Owner
from pccheckd.tenancy.checkpoint import GIVEN_UP, Checkpoint, End
from pccheckd.tenancy.tenant import Tenant

from .starts import Starts

#: How long a trainer that restores waits for checkpoints on their way before it gets an answer.
SETTLE_LIMIT_S = 5.0
SKIPS_KEPT = 256  # no honest rank asks for an older one
#: How long the ranks wait for one that has no process. To reconnect takes seconds.
ABSENT_LIMIT_S = 10.0
NEVER = 2**63  # above every sequence
#: After a decision that took longer, the job makes none for RESTS times as long. So a user
#: with more than a hundred ranks leaves most of the loop to other users.
LONG_DECISION_S = 0.001
RESTS = 4
ASKED_MAX = 512  # requests whose time is remembered until they are common
_LOST = frozenset({State.FAILED, State.SKIPPED, State.SUPERSEDED})  # the rank does not have it

_FENCED = (
    "a newer start of this job is running, so checkpoints of this process are not saved",
    "end this process if it is a leftover; otherwise call restore(), which loads the state of the "
    "newest start. A live start with another launch id or number of ranks must end first",
)
#: What a late rank asks for, after the others needed the slot.
_GONE = "another rank no longer has this checkpoint, so no rank keeps it"


class Job:
    """Owned by the registry; its tenants come and go, its incarnations only grow."""

    def __init__(
        self, uid: int, name: str, config: Config, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.uid = uid
        self.name = name
        self.tenants: dict[int, Tenant] = {}
        self.joining = asyncio.Lock()  # held while a rank becomes a member
        self.starts = Starts()
        self.agreement = Agreement(0, 0, frozenset())
        self._shared: list[Held] = []  # the checkpoints that all ranks have, newest first
        self._config = config
        self._numbers = Numbers()
        self._names: dict[int, Name] = {}  # of the checkpoint that each rank requested last
        self.apart = ""  #: why two ranks can have no checkpoint after the newest common one
        self._doubtful: frozenset[int] = frozenset()  # were given up at some time
        self._skips: dict[int, str] = {}  # sequences that all ranks skip, and why
        #: By sequence: the rank that requested it first, and how that rank divides its state.
        self._divisions: dict[int, tuple[int, int]] = {}
        self._absent_s: dict[int, float] = {}  # ranks without a process, and since when
        self._gone: frozenset[int] = frozenset()  # ranks for which no other rank waits any more
        self._short: set[int] = set()  # ranks that wait for a slot, until the next decision ...
        self._decided = asyncio.Event()  # ... which sets this
        self._known: dict[int, Rank] = {}  # at the last decision
        self._clock = clock
        self._rests_until_s = 0.0
        self._chosen: dict[int, tuple[bytes, Held]] = {}  # what a rank's process restored last
        self._due: asyncio.Handle | None = None
        self._asked_ns: dict[int, int] = {}  # when the ones above the common one were asked for
        self.late = ""  # why its ranks have had no common checkpoint for long ...
        self._late_since: list[Held] = []  # ... and which they had last
        #: By rank: the newest sequence that its trainer has requested, or found here, and the
        #: incarnation of the start in which it did.
        self._asked: dict[int, tuple[int, int]] = {}
        self.longest_s = 0.0  # from a request to the common checkpoint

    async def look(self) -> None:
        """Checks the files of all its ranks, and opens new ones."""
        await asyncio.gather(*(tenant.look() for tenant in list(self.tenants.values())))

    @property
    def idle(self) -> bool:
        """No rank is connected, written or read: it may be closed."""
        return all(tenant.idle for tenant in self.tenants.values())

    @property
    def last_used_ns(self) -> int:
        """When it was loaded, or the last trainer of a rank ended."""
        return max((tenant.last_used_ns for tenant in self.tenants.values()), default=0)

    @property
    def leaving(self) -> bool:
        """A rank's trainer has ended and is being drained."""
        return any(tenant.leaving for tenant in self.tenants.values())

    @property
    def world_size(self) -> int:
        """The number of ranks of the current start, else of the run that saved last."""
        start = self.starts.current
        if start is not None:
            return start.world_size
        newest = [
            t.volumes.checkpoints()[0] for t in self.tenants.values() if t.volumes.checkpoints()
        ]
        return max(newest, key=lambda one: one.sequence).world_size if newest else 1

    @property
    def is_shared(self) -> bool:
        """Its ranks decide together: there are several, or checkpoints of a start that had."""
        if self.world_size > 1 or len(self.tenants) > 1:
            return True
        left = (one for tenant in self.tenants.values() for one in tenant.volumes.checkpoints())
        return any(one.world_size > 1 for one in left)

    async def close(self) -> None:
        for tenant in self.tenants.values():
            tenant.stop_attaches()  # all first: no trainer attaches to the last ones meanwhile
        for tenant in self.tenants.values():
            await tenant.close()

    def loaded(self, tenant: Tenant) -> None:
        """Adds a rank whose volumes have been opened."""
        self.tenants[tenant.key.rank] = tenant
        self._numbers.passed(tenant.volumes.last_sequence())
        self._numbers.passed(tenant.ledger.last_sequence)
        self.settle()

    def passed(self, sequence: int) -> None:
        """A previous daemon used this sequence."""
        self._numbers.passed(sequence)

    @property
    def common(self) -> Held | None:
        """The newest checkpoint that all ranks had at the last decision."""
        return self._shared[0] if self._shared else None

    def common_checkpoints(self) -> list[Held]:
        """Newest first."""
        return group.common(self.ranks())

    # -- who belongs to it ---------------------------------------------------------------------

    def join(self, rank: int, owner: Owner, *, launch: str, was: int, moved: bool = False) -> int:
        """The incarnation of a process that connects; `moved`: its earlier one, `was`, belongs to
        another storage directory."""
        known = max((t.volumes.newest_incarnation() for t in self.tenants.values()), default=0)
        before = self.starts.current
        volumes = self.tenants[rank].volumes
        start = self.starts.join(
            rank, owner.process, launch=launch, world_size=owner.world_size, was=was,
            known=known, moved=moved,
            found=None if volumes.unreadable else volumes.newest_incarnation(),
        )  # fmt: skip
        if start is not before and not self.common_checkpoints():
            # Nothing that the ranks had could be read; the disk may be back, so all is tried again.
            for tenant in self.tenants.values():
                tenant.retention.unreadable.clear()
        self._asked[rank] = self.asked(rank), 0  # no rank waited for it if it was here before
        self._catch_up(rank, owner.process)
        self.instruct()
        return start.incarnation

    def incarnation(self, rank: int, owner: Owner) -> int:
        """The incarnation of the newest start that a process belongs to: the process may have moved
        to a newer start since it connected."""
        start = self.starts.of(rank, owner.process)
        return start.incarnation if start is not None else 0

    def registered(self, rank: int, process: bytes) -> int:
        """A process is about to save: one that has requested nothing in an older start moves to the
        newest. Its incarnation."""
        start = self.starts.of(rank, process)
        if start is None:
            return 0
        return start.incarnation if start.members[rank].begun else self.follow(rank, process)

    def _catch_up(self, newcomer: int = -1, process: bytes = b"") -> None:
        """A process that joins the newest start may still save what the others have saved since
        that start began."""
        current = self.starts.current
        if current is None:
            return
        above = current.begins_above(self._numbers.last)
        for rank, tenant in self.tenants.items():
            owner = tenant.owner
            who = process if rank == newcomer else owner.process if owner else b""
            start = self.starts.of(rank, who) if who else None
            if start is current and self._asked.get(rank, (0, 0))[1] != start.incarnation:
                self._asked[rank] = max(self.asked(rank), above), start.incarnation

    def asked(self, rank: int) -> int:
        """The newest sequence that a rank's trainer has requested, or found here."""
        return self._asked.get(rank, (0, 0))[0]

    def require_no_other(self, rank: int, *, solo: bool) -> None:
        """Raises RefusedError when another rank saves beside one with solo=True."""
        for other, tenant in sorted(self.tenants.items()):
            owner = tenant.owner
            if other == rank or owner is None or not (solo or owner.solo):
                continue
            one, its = (rank, "this process") if solo else (other, f"pid {owner.pid}")
            raise RefusedError(
                f"rank {one} ({its}) was started with solo=True, which means that no other rank "
                f"saves job {self.name!r}, but rank {rank if one == other else other} has a client",
                hint="make one client, on one rank: if rank == 0: client = "
                "PCcheckClient(solo=True); or remove solo=True, so that all ranks save",
            )

    def left(self, rank: int, process: bytes) -> None:
        """A session has ended."""
        self.starts.left(rank, process)
        self._catch_up()
        self.instruct()
        self.decide_soon()

    def follow(self, rank: int, process: bytes) -> int:
        """A process restores: it belongs to the newest start from now on. Its incarnation."""
        start = self.starts.follow(rank, process)
        self._catch_up()
        self.instruct()
        return start.incarnation

    def absent(self) -> list[int]:
        """Ranks of the current start without a live process."""
        start = self.starts.current
        return start.missing() if start is not None else []

    # -- one checkpoint ------------------------------------------------------------------------

    def alone(self, rank: int, owner: Owner) -> tuple[int, int] | None:
        """Of a rank that saves alone, in the newest start: its incarnation, and the sequence that
        those of its next checkpoints are above. None: each of its checkpoints is numbered here."""
        start = self.starts.of(rank, owner.process)
        if start is None or start is not self.starts.current or start.world_size != 1:
            return None
        return start.incarnation, max(self._numbers.last, self._above(rank))

    def _above(self, rank: int) -> int:
        """No sequence of the rank's next checkpoint is as low."""
        return max(self.asked(rank), self.tenants[rank].volumes.last_sequence())

    def instruct(self) -> None:
        """Which ranks save alone may have changed."""
        for tenant in self.tenants.values():
            tenant.queue.instruct()

    def took(self, rank: int, checkpoint: Checkpoint, sequence: int) -> None:
        """A rank that saves alone has begun a checkpoint with this sequence; 0: gives it one."""
        self._numbers.passed(sequence)
        sequence = sequence or self._numbers.give(None, self._above(rank))
        self._take(rank, checkpoint, sequence)

    def number(self, rank: int, checkpoint: Checkpoint, asked: _core.SaveRequest) -> End | None:
        """Sets incarnation and, for one of several ranks, the sequence of a requested checkpoint.
        Returns its end if not every rank can have it. Raises RefusedError."""
        tenant = self.tenants[rank]
        owner = tenant.owner
        assert owner is not None
        before = self.starts.of(rank, owner.process)
        start = self.starts.may_ask(rank, owner.process)
        if start is None:
            raise RefusedError(_FENCED[0], hint=_FENCED[1])
        self._catch_up()
        if start is not before:
            self.instruct()
        checkpoint.incarnation = start.incarnation
        if start.world_size == 1:
            return None  # `took` follows
        base = start.bases.of((rank, owner.process), asked.base, asked.turn)
        name = Name(start.incarnation, base, asked.descents, asked.step, asked.row)
        sequence = self._numbers.find(name)
        if sequence is not None:
            return self._found(rank, checkpoint, name, sequence)
        if later := names.in_later_line(name, self._names.items()):
            self._note_apart(names.why_apart(name, *later))
            start.bases.missed((rank, owner.process), later[1].base)
        self._names[rank] = name
        self._take(rank, checkpoint, self._numbers.give(name, self._above(rank)))
        if asked.skip:
            self._decide_skip(checkpoint.sequence)
        return None

    def _take(self, rank: int, checkpoint: Checkpoint, sequence: int) -> None:
        checkpoint.sequence = sequence
        self._asked[rank] = sequence, self._asked.get(rank, (0, 0))[1]
        if checkpoint.world_size > 1 and len(self._asked_ns) < ASKED_MAX:
            self._asked_ns.setdefault(sequence, checkpoint.requested_ns)

    def _found(self, rank: int, checkpoint: Checkpoint, name: Name, sequence: int) -> End | None:
        """Another rank has requested it before."""
        self._names[rank] = max(name, self._names.get(rank, name))
        if sequence > self.asked(rank):
            self._take(rank, checkpoint, sequence)
            if self._is_there(sequence):
                return None
        why = self._skips.get(sequence) or self._why_lost(sequence)
        return End(State.SKIPPED, why or _GONE, error=GIVEN_UP)

    def _is_there(self, sequence: int) -> bool:
        """Some rank has it, durable or in flight, and it is not given up: a late rank may save
        its part."""
        return not self.gives_up(sequence) and any(
            sequence in tenant.pending() or tenant.volumes.checkpoint(sequence) is not None
            for tenant in self.tenants.values()
        )

    def _note_apart(self, why: str) -> None:
        """Two ranks save in different lines, until the next common checkpoint: the job is late at
        once."""
        self.apart = self.apart or f"{why}, so they have no checkpoint in common"
        self.note_late(f"{self.apart}: {names.APART_HINT}")

    def _decide_skip(self, sequence: int) -> None:
        """The first rank that asks decides for all. If each rank skipped by itself, a free rank
        would write a checkpoint that a busy rank skips, and be busy when that rank is free: unequal
        ranks that save without a pause would have almost no checkpoint in common."""
        busy = [
            rank
            for rank, tenant in sorted(self.tenants.items())
            if rank < self.world_size and tenant.owner is not None and not tenant.has_room()
        ]
        if busy:
            self._skips[sequence] = f"every slot of rank {busy[0]} was busy, so no rank saved it"
            _trim(self._skips)

    def require_alike(self, rank: int, sequence: int, division: int) -> None:
        """Raises RefusedError when another rank divides its replicated state in another way: then
        the ranks together do not store the whole state, though each stores its part."""
        first, its = self._divisions.setdefault(sequence, (rank, division))
        _trim(self._divisions)
        if its != division:
            raise RefusedError(
                f"ranks {first} and {rank} have attached different tensors with replicated=True, "
                "or the same in another order",
                hint="attach the same modules and optimizers, in one order, on every rank. What "
                "only one rank has (an averaged model on rank 0) needs a client and a job of its "
                "own: PCcheckClient(job=..., solo=True)",
            )

    def waits_s(self) -> float:
        """How long the oldest request above the newest common checkpoint has waited to become
        common; 0.0: there is none."""
        oldest_ns = min(self._asked_ns.values(), default=0)
        return (time.monotonic_ns() - oldest_ns) / 1e9 if oldest_ns else 0.0

    def gives_up(self, sequence: int) -> bool:
        """Whether some rank will never have it."""
        return sequence in self.agreement.given_up or sequence in self._skips

    def why_given_up(self, sequence: int) -> str:
        """Which rank will never have a checkpoint, and why, in words."""
        if sequence in self._skips:
            return self._skips[sequence]
        if why := self._why_lost(sequence):
            return why
        lacking = (  # a world may be large, but the first that was never here ends the search
            rank
            for rank in range(self.world_size)
            if rank not in self.tenants or self.tenants[rank].ledger.of_sequence(sequence) is None
        )
        first = next(lacking, None)
        if first is None:
            return _GONE
        return f"{self._why_lacking(first, sequence)}, so no rank keeps it"

    def _why_lost(self, sequence: int) -> str:
        """Which rank has skipped it or failed to save it; "" when none did."""
        for rank, tenant in sorted(self.tenants.items()):
            found = tenant.ledger.of_sequence(sequence)
            if found is not None and found.error != GIVEN_UP and found.state in _LOST:
                why = f"rank {rank} did not save this checkpoint ({found.reason})"
                return f"{why}, so no rank keeps it"
        return ""

    def _why_lacking(self, rank: int, sequence: int) -> str:
        name, its = self._numbers.name_of(sequence), self._names.get(rank)
        if rank in self._gone:
            return f"rank {rank} ended without this checkpoint"
        if name is not None and its is not None and its.start == name.start:
            return names.why_apart(name, rank, its)
        return f"rank {rank} did not ask for this checkpoint"

    # -- what the group decides ----------------------------------------------------------------

    def ranks(self) -> dict[int, Rank]:
        """What is known now, for `group.py`."""
        return {rank: self._rank(tenant) for rank, tenant in self.tenants.items()}

    def _with_lost(self, ranks: dict[int, Rank]) -> dict[int, Rank]:
        """Adds the checkpoints in files that are not at their paths any more. Such a file may come
        back with its directory or its disk, so the other ranks keep their parts."""
        lost = {rank: tenant.volumes.lost for rank, tenant in self.tenants.items()}
        return {
            rank: known._replace(held={*known.held, *(one.held() for one in lost[rank])})
            for rank, known in ranks.items()
        }

    def _rank(self, tenant: Tenant) -> Rank:
        owner = tenant.owner
        start = self.starts.of(tenant.key.rank, owner.process) if owner is not None else None
        live = start is not None and start is self.starts.current and not tenant.leaving
        return Rank(
            held=frozenset(
                one.held(usable=tenant.is_usable(one)) for one in tenant.volumes.checkpoints()
            ),
            pending=tenant.pending(),
            asked=self._passed(tenant.key.rank, live=live),
            pinned=frozenset(tenant.retention.inherited if owner else tenant.retention.flagged),
        )

    def _passed(self, rank: int, *, live: bool) -> int | None:
        """As `Rank.asked`."""
        if live:
            return self.asked(rank)
        return NEVER if rank in self._gone else None

    def decide_soon(self) -> None:
        """Call it when the ranks may have to decide again. A single rank has nothing to decide."""
        if self.is_shared:
            self._decide_next()

    def _decide_next(self) -> None:
        """In the next pass of the loop, or after the rest from the last decision: one decision for
        all ranks that ask until then."""
        if self._due is None:
            loop, left_s = asyncio.get_running_loop(), self._rests_until_s - self._clock()
            self._due = (
                loop.call_later(left_s, self.settle) if left_s > 0 else loop.call_soon(self.settle)
            )

    def settle(self) -> None:
        """Decides, and applies it to every rank. Waits for no disk, and takes linear time: one user
        may have many ranks, and other users wait meanwhile."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        short, self._short = self._short, set()
        began_s = self._clock()
        try:
            if self.is_shared:
                self._decide(short)
        finally:
            took_s = self._clock() - began_s
            if took_s > LONG_DECISION_S:
                self._rests_until_s = self._clock() + RESTS * took_s
            self._decided.set()
            self._decided = asyncio.Event()

    def _decide(self, short: set[int]) -> None:
        """`short` ranks have no slot for their next checkpoint."""
        for tenant in self.tenants.values():  # a file may have appeared
            self._numbers.passed(tenant.volumes.last_sequence())
        ranks = self._known = self.ranks()
        everything, before = self._with_lost(ranks), self.agreement
        agreed = group.agree(everything, self.world_size, self._keep(), short)
        shared = group.common(ranks)
        there = {n for known in ranks.values() for n in known.pending}
        there |= {one.sequence for known in ranks.values() for one in known.held}
        back = {one.sequence for one in shared}  # a damage flag was removed, or a file is back
        # What was given up stays given up: a rank may have acted on it.
        given_up = agreed.given_up | before.given_up & (there - back)
        self.agreement = agreed._replace(given_up=given_up)
        # A checkpoint that is back may be restored. But a rank that acts on the old decision may
        # be about to overwrite its part, so the checkpoint is never reported as global.
        self._doubtful = (self._doubtful | given_up) & there
        self._note_common([one for one in shared if one.sequence not in self._doubtful])
        common, lost = {one.sequence for one in self._shared}, self._lost()

        @functools.cache  # the ranks ask for the same ones
        def why_never(sequence: int) -> str:
            never = sequence not in common and (sequence in lost or self.gives_up(sequence))
            return self.why_given_up(sequence) if never else ""

        for tenant in self.tenants.values():
            tenant.obey(self.agreement)
            tenant.gave_up(why_never)

    def note_absent(self, now_s: float) -> None:
        """Gives up the checkpoints that an absent rank lacks. A rank is absent when it has had no
        process for ABSENT_LIMIT_S, while other ranks of its start have one."""
        start = self.starts.current
        waits = start is not None and start.world_size > 1 and start.is_live
        absent = start.lost() if start is not None and waits else []
        self._absent_s = {rank: self._absent_s.get(rank, now_s) for rank in absent}
        limit_s = now_s - ABSENT_LIMIT_S
        gone = frozenset(rank for rank, since_s in self._absent_s.items() if since_s < limit_s)
        if gone != self._gone:
            self._gone = gone
            self.settle()

    def _lost(self) -> set[int]:
        """Checkpoints that some rank has durable, and that another rank has lost. A rank gets no
        sequence twice, and neither does a new process of the rank. Checkpoints that no rank has
        lost may still become global: a rank has not asked for one yet, or is writing it."""
        ledgers = [tenant.ledger for tenant in self.tenants.values()]
        open_ones = {sequence for ledger in ledgers for sequence in ledger.undecided()}
        return {
            sequence
            for ledger in ledgers
            for sequence in open_ones & ledger.by_sequence.keys()
            if ledger.by_sequence[sequence].state in _LOST
        }

    def _keep(self) -> int:
        """`keep` of the existing volumes, else as configured."""
        there = [t.volumes.current.info.keep for t in self.tenants.values() if t.volumes.current]
        return min(there, default=self._config.keep)

    def _note_common(self, shared: list[Held]) -> None:
        before, self._shared = self._shared, shared
        newest = shared[0].sequence if shared else 0
        is_new = bool(shared) and before[:1] != shared[:1]
        if is_new:
            if self.apart:
                self.apart = ""
                self.note_late("")
            now_ns = time.monotonic_ns()
            asked_ns = self._asked_ns.get(newest, now_ns)
            self.longest_s = max(self.longest_s, (now_ns - asked_ns) / 1e9)
            self._asked_ns = {n: at for n, at in self._asked_ns.items() if n > newest}
        common = {one.sequence for one in shared}
        for tenant in self.tenants.values():
            if is_new or tenant.ledger.is_late(newest):
                tenant.became_global(newest, common)
        # Not only the newest: a checkpoint of the run before may end after one of this run.
        oldest_run = min((o.incarnation for o in set(shared) - set(before)), default=None)
        for tenant in self.tenants.values():
            if oldest_run is not None and oldest_run < tenant.incarnation:
                tenant.spawn(tenant.protect_late())

    @property
    def newest_common(self) -> int:
        """The newest sequence that all ranks have; 0: there is none."""
        return self.agreement.newest

    def note_late(self, why: str) -> None:
        """Why its ranks have had no common checkpoint for long, or "": logged when it changes.
        Ranks that end without one are no longer late, and still have none."""
        again = not why and self._shared[:1] != self._late_since
        if why and not self.late:
            self._late_since = self._shared[:1]
        if bool(why) != bool(self.late) and (why or again):
            LOG.warning(
                "job %r of uid %d: %s", self.name, self.uid,
                why or "the ranks have a new common checkpoint again",
                extra={"fields": {
                    "event": "group-late" if why else "group-again",
                    "uid": self.uid, "job": self.name,
                }},
            )  # fmt: skip
        self.late = why

    def needs(self, sequence: int) -> bool:
        """Whether a durable checkpoint must not go with its volume."""
        agreed = self.agreement
        return self.is_shared and sequence >= agreed.oldest and sequence not in agreed.given_up

    def pins(self, rank: int, owner: Owner) -> set[int]:
        """What a trainer that has restored nothing newer must leave alone (P7)."""
        tenant = self.tenants[rank]
        current = tenant.volumes.current
        if current is None:
            return set()
        there = current.checkpoints
        staying = current.pinned | catalog.bases(there, {one.sequence for one in there})
        return group.pins(
            self.ranks(), rank, self.incarnation(rank, owner),
            after=owner.restored or 0, slots=current.info.slots - len(staying),
        )  # fmt: skip

    async def request_slot(self, rank: int) -> str:
        """A rank of a group has no slot for its next checkpoint: gives up what it can, by the next
        decision, which is one for all ranks that ask meanwhile. Names the ranks that are waited
        for although they have requested nothing; "" otherwise."""
        self._short.add(rank)
        decided = self._decided
        self._decide_next()
        await decided.wait()
        return some(group.lagging(self._known, self.world_size, rank, self.agreement))

    # -- recovery ------------------------------------------------------------------------------

    async def settled(self) -> Writing | None:
        """Waits some seconds until every checkpoint requested so far, by any rank, has ended.
        Returns what is left otherwise."""
        last, deadline = self._numbers.last, time.monotonic() + SETTLE_LIMIT_S
        for tenant in list(self.tenants.values()):
            if not await tenant.ledger.settled(max(0.0, deadline - time.monotonic()), last):
                return self._writing(last)
            await tenant.volumes.refresh()
        self.settle()
        return None

    def _writing(self, last: int) -> Writing:
        live = [
            one for t in self.tenants.values() for one in t.ledger.live() if one.sequence <= last
        ]
        ports = [t.port for t in self.tenants.values() if t.port is not None and t.ledger.live()]
        left = sum(u.full_chunks * port.chunk_bytes for port in ports if (u := port.usage()))
        total = sum(one.payload_bytes for one in live)
        newest = max(live, key=lambda one: one.sequence, default=None)
        return Writing(newest.step if newest else 0, len(live), total, min(left, total))

    def choose(
        self,
        rank: int,
        process: bytes,
        world_size: int,
        step: int | None,
        *,
        before: int,
        any_world_size: bool = False,
    ) -> Held | None:
        """What a rank restores, older than the sequence `before`; None when no volume of the job
        holds a checkpoint. Raises NoCheckpointError with the numbers, or why a volume could not be
        read."""
        own = self.starts.before(rank, process)
        ranks = {
            one: known._replace(
                held=[h for h in known.held if h.incarnation != own and h.sequence < before]
            )
            for one, known in self.ranks().items()
        }
        found = group.choose(ranks, rank, world_size, step=step, any_world_size=any_world_size)
        broken = self._doubt()
        if isinstance(found, Held):
            if step is None:
                self._require_no_newer(rank, found)
            self._chosen[rank] = process, found
            return found
        if found is None and broken is not None:
            raise broken
        if isinstance(found, Refused):
            also = f"; {broken.message}" if broken is not None else ""
            raise NoCheckpointError(f"job {self.name!r}: {found.reason}{also}", hint=found.hint)
        return None

    def asks_again(self, rank: int) -> None:
        """A rank did not take what it was given to restore, or is about to restore another one."""
        self._chosen.pop(rank, None)

    def _require_no_newer(self, rank: int, found: Held) -> None:
        """Raises DamagedError when another rank of this start restores a newer checkpoint: it was
        chosen before this rank failed to read it."""
        current = self.starts.current
        for other, (process, its) in sorted(self._chosen.items()):
            owner = self.tenants[other].owner if other in self.tenants else None
            is_there = owner is not None and owner.process == process
            if is_there and self.starts.of(other, process) is current and its > found:
                raise DamagedError(
                    f"job {self.name!r}: rank {other} of this start restores step {its.step}, but "
                    f"on rank {rank} it is damaged or cannot be read",
                    hint="restart all ranks; they will restore the step before",
                )

    def _doubt(self) -> PccheckError | None:
        """Why the volumes of some rank may hold newer checkpoints, or have lost them."""
        every = (e for _, tenant in sorted(self.tenants.items()) for e in tenant.volumes.doubts)
        return next(every, None)

    async def restored(self, rank: int, process: bytes, body: Restored) -> Joined:
        """A rank has taken over what the job has (sequence 0: it found nothing)."""
        start = self.starts.of(rank, process)
        if body.base and start is not None:
            start.bases.restored((rank, process), body.base, body.turn)
        self.tenants[rank].retention.restored_to(body.sequence)
        await self.release()
        return Joined(start.incarnation if start is not None else 0)

    async def release(self) -> None:
        """Ends the protection of what the run before left, once no rank needs it any longer."""
        start = self.starts.current
        members = (
            [self.tenants[one] for one in start.members if one in self.tenants] if start else []
        )
        if start is None or start.missing() or any(m.retention.unrestored for m in members):
            return
        for tenant in members:
            await tenant.retention.release()


def _trim(by_sequence: dict[int, Any]) -> None:
    while len(by_sequence) > SKIPS_KEPT:
        del by_sequence[next(iter(by_sequence))]
