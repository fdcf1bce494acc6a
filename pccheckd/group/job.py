"""A job: the ranks of one user's training run, and the one way to its parts. `membership.py` knows
the ranks, `numbering.py` gives their requests sequences, `decisions.py` applies what `group.py`
decides, and `explain.py` says why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from pccheck_native import _core
from pccheck_native._core import SaveRequest
from pccheck_wire.ends import Cause, Why
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Joined, Restored
from pccheckd.config.options import Config
from pccheckd.core.port import Owner
from pccheckd.tenancy.checkpoint import End, failed
from pccheckd.tenancy.group import Numbered
from pccheckd.tenancy.tenant import Tenant

from . import explain
from .decisions import Decisions
from .explain import Lateness, Standing
from .idle import IdleDisk
from .membership import Membership
from .numbering import Given
from .parked import Parked
from .schedule import Schedule
from .starts import Arrival


class Job:
    """Owned by the registry; its tenants come and go, its incarnations only grow."""

    def __init__(
        self, uid: int, name: str, config: Config, disk: IdleDisk,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.uid = uid
        self.name = name
        self._config = config
        self.joining = asyncio.Lock()  # held while a rank becomes a member
        self.members = Membership(name)
        self.tenants = self.members.tenants
        self.lateness = Lateness(uid, name)
        self.decisions = Decisions(self.members, self.lateness, config)
        self._schedule = Schedule(self._decide, clock)
        self._disk = disk
        #: For what tells the other nodes: after a decision, and when a rank has more.
        self.on_decision: Callable[[], None] = lambda: None
        self.on_appeared: Callable[[], None] = lambda: None
        self.parked = Parked(self.members, self.decisions, disk, self._schedule.soon)

    # -- as the registry sees it ---------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No rank is connected, written or read: it may be closed."""
        return all(tenant.idle for tenant in self.tenants.values())

    @property
    def last_used_ns(self) -> int:
        """When it was loaded, or the last trainer of a rank ended."""
        return max((tenant.seat.last_used_ns for tenant in self.tenants.values()), default=0)

    @property
    def leaving(self) -> bool:
        """A rank's trainer has ended and is being drained."""
        return any(tenant.seat.is_leaving for tenant in self.tenants.values())

    def loaded(self, tenant: Tenant) -> None:
        """Adds a rank whose volumes have been opened."""
        self.tenants[tenant.key.rank] = tenant
        self.passed(tenant.volumes.last_sequence())
        self.passed(tenant.ledger.last_sequence)
        self.settle()

    async def look(self) -> None:
        """Checks the files of all its ranks, and opens new ones."""
        await asyncio.gather(*(tenant.readiness.look() for tenant in list(self.tenants.values())))

    async def close(self) -> None:
        for tenant in self.tenants.values():
            tenant.seat.close()  # all first: no trainer attaches to the last ones meanwhile
        for tenant in self.tenants.values():
            await tenant.close()

    # -- its processes -------------------------------------------------------------------------

    def join(self, who: Arrival) -> int:
        """The incarnation of a process that connects."""
        begins = self.members.join(who)
        if begins and not self.members.common():
            # Nothing that the ranks had could be read; the disk may be back, so all is tried again.
            for tenant in self.tenants.values():
                tenant.retention.unreadable.clear()
        return self.members.of(who.rank, who.process).incarnation

    def left(self, rank: int, process: bytes) -> None:
        """A session has ended."""
        self.members.left(rank, process)
        self.write_parked()
        self.decide_soon()

    async def restored(self, rank: int, process: bytes, body: Restored) -> Joined:
        """A rank has taken over what the job has (sequence 0: it found nothing)."""
        start = self.members.starts.of(rank, process)
        if body.base and start is not None:
            start.bases.restored((rank, process), body.base, body.turn)
        self.tenants[rank].retention.restored_to(body.sequence)
        await self.release()
        now = self.members.of(rank, process)
        return Joined(now.incarnation, now.id)

    async def release(self) -> None:
        """Ends the protection of what the run before left, once no rank needs it any longer."""
        start = self.members.starts.current
        if start is None or start.missing():
            return
        members = [self.tenants[rank] for rank in start.members if rank in self.tenants]
        if any(member.retention.unrestored for member in members):
            return
        for tenant in members:
            await tenant.retention.release()

    # -- decisions -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Decides now, and applies the decision to every rank."""
        self._schedule.now()

    def _decide(self, short: Collection[int]) -> None:
        if not self.members.waits_for_nodes:
            self.decisions.decide(short)
        self.parked.look()
        self.on_decision()

    def write_parked(self) -> None:
        """What is in memory only is written: a trainer has ended, or restores."""
        if self.parked:
            self.parked.want()
            self.settle()

    async def emptied(self) -> None:
        """The daemon stops: returns when nothing is in memory only, or none of it can be written
        (the next daemon finds that in the descriptor store)."""
        self.write_parked()
        for tenant in self.tenants.values():
            await tenant.unparking.finished()

    def hold(self, *, held: bool) -> None:
        """Whether the ranks decide nothing: a daemon that takes over finds them one by one."""
        self._schedule.is_held = held
        if not held:
            self.settle()

    def note_absent(self, now_s: float) -> None:
        """Gives up the checkpoints that a rank lacks whose process has been away for long."""
        if self.decisions.note_absent(now_s):
            self.settle()

    def standing(self) -> Standing | None:
        """How its ranks stand together; None for a job of one rank, or one that saved nothing."""
        known, limit_s = self.decisions.known(), self._config.stall_limit_s
        return explain.standing(self.members, known, self.newest_common, self.lateness, limit_s)

    # -- what a rank asks (tenancy/group.py) ---------------------------------------------------

    @property
    def newest_common(self) -> int:
        """The newest sequence that all ranks have; 0: there is none."""
        return self.decisions.agreement.newest

    @property
    def is_shared(self) -> bool:
        return self.members.is_shared

    @property
    def spare_slots(self) -> int:
        """With ranks on other nodes one slot stays without a promise to them: in it local
        checkpoints rotate, and wait for no message."""
        start = self.members.starts.current
        return int(start is not None and start.kind.is_wide)

    @property
    def is_writing(self) -> bool:
        """Some rank writes, or soon will: at the end of that another rank may get a slot."""
        return any(
            ledger.in_flight or ledger.appearing or any(not o.blocked for o in ledger.parked()[:1])
            for ledger in (tenant.ledger for tenant in self.tenants.values())
        )

    def incarnation(self, rank: int, owner: Owner) -> int:
        """The incarnation of the newest start that a process belongs to."""
        return self.members.of(rank, owner.process).incarnation

    def start_id(self, rank: int, owner: Owner) -> bytes:
        return self.members.of(rank, owner.process).id

    def passed(self, sequence: int) -> None:
        """A volume holds this sequence, or a previous daemon used it."""
        self.members.numbering.passed(sequence)

    def alone(self, rank: int, owner: Owner) -> tuple[int, int] | None:
        """Of a rank that saves alone, in the newest start: its incarnation, and the sequence that
        those of its next checkpoints are above. None: each of its checkpoints is numbered here."""
        starts = self.members.starts
        start = starts.of(rank, owner.process)
        if start is None or start is not starts.current or start.world_size != 1:
            return None
        used = self.tenants[rank].volumes.last_sequence()
        return start.incarnation, max(self.members.numbering.last, used)

    def took(self, rank: int, sequence: int) -> int:
        """A rank that saves alone has begun a checkpoint with this sequence; 0: it gets one."""
        used = self.tenants[rank].volumes.last_sequence()
        return self.members.numbering.took(rank, sequence, used)

    def number(self, rank: int, asked: SaveRequest) -> Numbered:
        """Gives a request of one of several ranks its sequence, or says how it ends. Waits for
        nothing."""
        tenant, numbering = self.tenants[rank], self.members.numbering
        owner = tenant.seat.owner
        assert owner is not None
        start = self.members.may_ask(rank, owner.process)
        if start is None:
            return Numbered(self.incarnation(rank, owner), 0, explain.FENCED)
        if self.members.waits_for_nodes:
            self.members.elsewhere.wanted()
            return Numbered(start.incarnation, 0, waits=True)
        if start.world_size == 1:
            why = self.parked.lacks_room([rank]) if asked.level == _core.LEVEL_MEMORY else None
            end = End(State.SKIPPED, why) if why is not None else None
            return Numbered(start.incarnation, 0, end)  # `took` follows
        used = tenant.volumes.last_sequence()
        given = numbering.number(start, rank, owner.process, asked, used)
        sequence = 0 if given.is_passed else given.sequence
        end = self._end(rank, given, asked)
        marks = self._marks(given) if start.kind.is_wide and end is None else 0
        return Numbered(start.incarnation, sequence, end, marks, given.name)

    def _marks(self, given: Given) -> int:
        """The first rank of this node that requests a checkpoint decides whether it is promised to
        the other nodes: all ranks of the node have the same promises."""
        elsewhere = self.members.elsewhere
        if given.is_first:
            offered = elsewhere.offers(given.sequence)
        else:
            offered = given.sequence in elsewhere.offered
        return _core.SLOT_OFFERED if offered else 0

    def _end(self, rank: int, given: Given, asked: SaveRequest) -> End | None:
        """How a request of a group ends at once; None when the rank may save."""
        sequence, why = given.sequence, None
        if given.is_passed:
            return End(State.SKIPPED, self.decisions.why_passed(sequence))
        if asked.level == _core.LEVEL_DISK:  # another may never be on the disk
            self.lateness.requested(sequence, asked.taken_ns)
        if given.apart:
            self.lateness.note_apart(given.apart)
        if not given.is_first:
            why = self.decisions.why_too_late(sequence)
        elif asked.level == _core.LEVEL_MEMORY:
            full = self.parked.lacks_room(range(self.members.world_size))
            if full is not None:
                self.decisions.skip(sequence, full)
        elif asked.skip:
            self.decisions.skip_if_busy(sequence)
        other = self.members.numbering.divided_otherwise(rank, sequence, asked.division)
        if other is not None:
            return failed(Cause.UNLIKE, other << 32 | rank)
        return End(State.SKIPPED, why) if why is not None else None

    def decide_soon(self) -> None:
        """The ranks may have to decide again. A single rank decides what is in memory only."""
        self._disk.moved()
        if self.is_shared or self.parked:
            self._schedule.soon()

    def appeared(self) -> None:
        """What a rank has is durable, and is not in the list of its volume yet. The other nodes
        need not wait for that."""
        self.on_appeared()

    def gives_up(self, sequence: int) -> bool:
        return self.decisions.gives_up(sequence)

    def why_given_up(self, sequence: int) -> Why:
        return self.decisions.why_given_up(sequence)

    async def request_slot(self, rank: int, needs_it: Callable[[], bool]) -> list[int]:
        """A rank of a group has no slot for its next checkpoint: gives up what it can, by the next
        decision, which is one for all ranks that ask meanwhile, if the rank needs the slot then.
        Names the ranks that are waited for although they have requested nothing."""
        await self._schedule.for_slot(rank, needs_it)
        return self.decisions.lagging(rank)

    def needs(self, sequence: int) -> bool:
        return self.decisions.needs(sequence)

    def pins(self, rank: int, owner: Owner) -> set[int]:
        return self.decisions.pins(rank, owner)
