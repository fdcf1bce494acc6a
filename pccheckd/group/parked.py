"""What becomes of the checkpoints that are in memory only: which of them newer ones replace, and
which are written. `decide` and `newest` are pure; `Parked` applies their answers to the ranks.

A checkpoint is *parked* when it is copied, and has neither a lane nor a slot. It is *safe* when
every rank of its start has it, parked or durable. A checkpoint that is being written is not safe
until it is durable: the disk may fail, and what is parked beside it takes no more memory then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from pccheck_wire.ends import Cause, Why
from pccheck_wire.messages import CheckpointState as State
from pccheckd.tenancy.binding import BindingState
from pccheckd.tenancy.checkpoint import End, RankCheckpoint
from pccheckd.tenancy.tenant import Tenant

from .decisions import Decisions
from .explain import LOST
from .idle import IdleDisk
from .membership import Membership


class PartState(IntEnum):
    """How far a rank is with its part of a checkpoint."""

    COMING = 0  # requested, or being copied
    PARKED = 1
    WRITING = 2  # copied, and on a lane
    DURABLE = 3


class Known(NamedTuple):
    """One checkpoint of the start that saved it."""

    sequence: int
    members: Collection[int]  # the ranks of that start; of a rank that saved alone, that rank
    places: Mapping[int, PartState]  # by rank, of those that have a part of it or will have one
    wanted: bool = False  # on the disk
    never: bool = False  # some rank will never have its part
    #: Another node gave it up, and tells its own ranks why; or newer ones here have passed it.
    is_passed: bool = False

    def is_on_all(self, *places: PartState) -> bool:
        return all(self.places.get(rank) in places for rank in self.members)

    @property
    def is_safe(self) -> bool:
        return not self.never and self.is_on_all(PartState.PARKED, PartState.DURABLE)

    @property
    def is_parked(self) -> bool:
        """On some rank."""
        return PartState.PARKED in self.places.values()

    @property
    def is_begun(self) -> bool:
        """Some rank writes its part, or has written it."""
        return not {PartState.WRITING, PartState.DURABLE}.isdisjoint(self.places.values())


class ParkedMoves(NamedTuple):
    #: With the newer checkpoint that supersedes it. None: it is skipped. Some rank will never have
    #: it, and no newer one takes its place, or the user has to know.
    drop: list[tuple[Known, Known | None]]
    write: list[Known]  # on every rank that has it parked, oldest first


def decide(every: Collection[Known], *, idle: bool) -> ParkedMoves:
    """Which parked checkpoints of a job are dropped, and which are written. `idle`: the disk has
    nothing else to do (idle.py)."""
    safe = [one for one in every if one.is_safe]
    copied = [one for one in every if one.is_parked]
    begun = [one for one in every if one.is_parked or one.is_begun]
    decision = ParkedMoves([], [])
    for one in sorted(copied, key=_sequence):
        best = _newest(one, safe)
        newer = best if best is not None and best.sequence > one.sequence else None
        later = _newest(one, copied, above=one.sequence)
        if newer is not None and newer.is_on_all(PartState.DURABLE):
            decision.drop.append((one, newer))
        elif one.never and (best is not None or later is not None):
            is_news = one.wanted or not one.is_passed
            by = None if is_news else _newest(one, begun, above=one.sequence)
            decision.drop.append((one, by))
        elif one.wanted or one.is_begun or (idle and best is one):
            decision.write.append(one)
        elif newer is not None:
            decision.drop.append((one, newer))
    return decision


def newest(every: Collection[Known]) -> list[Known]:
    """What has to be written when a trainer has ended, or restores: the newest checkpoint that is
    copied on all ranks, and everything newer; oldest first. Older ones stay until it is durable."""
    copied = [
        one
        for one in every
        if one.is_on_all(PartState.PARKED, PartState.WRITING, PartState.DURABLE)
    ]
    found = []
    for one in sorted(every, key=_sequence):
        base = _newest(one, copied)
        if one.is_parked and (base is None or one.sequence >= base.sequence):
            found.append(one)
    return found


def _sequence(one: Known) -> int:
    return one.sequence


def _newest(one: Known, among: Iterable[Known], *, above: int = 0) -> Known | None:
    """The newest of `among` that each rank with this one parked has a part of."""
    mine = {rank for rank, place in one.places.items() if place is PartState.PARKED}
    fits = (other for other in among if other.sequence > above and mine <= other.places.keys())
    return max(fits, key=_sequence, default=None)


class DeathCosts(NamedTuple):
    """What a death would cost a job that keeps checkpoints in memory, now. By request: the step and
    CLOCK_MONOTONIC in ns; None: there is none."""

    asked: tuple[int, int]  # the newest checkpoint that a rank has requested
    copied: tuple[int, int] | None  # the newest that all ranks have copied
    durable: tuple[int, int] | None  # the newest that all ranks have durable


class Parked:
    """Owned by the job."""

    def __init__(
        self, members: Membership, decisions: Decisions, disk: IdleDisk, look: Callable[[], None]
    ) -> None:
        """`look`: has the job look again soon."""
        self._members = members
        self._decisions = decisions
        self._disk = disk
        self._look = look

    def __bool__(self) -> bool:
        return any(tenant.ledger.parked() for tenant in self._members.tenants.values())

    def look(self) -> None:
        """Decides, and applies it to every rank. Waits for nothing."""
        if not self:
            return
        tenants = self._members.tenants.values()
        starved = any(tenant.unparking.is_starved for tenant in tenants)
        decision = decide(self._known(), idle=starved or self._disk.takes(tenants, self._look))
        for one, newer in decision.drop:
            self._drop(one, newer)
        for one in decision.write:
            for tenant, found in self._parts(one):
                tenant.unparking.write(found, must=one.wanted or one.is_begun)

    def want(self) -> None:
        """A trainer has ended, or restores: what `newest` says is written."""
        for one in newest(self._known()) if self else ():
            for _, found in self._parts(one):
                found.wanted = True

    def lacks_room(self, ranks: Iterable[int]) -> Why | None:
        """Why none of these ranks copies one more to memory now; None: all have room for it."""
        self.look()  # what is replaced frees memory
        tenants = ((rank, self._members.tenants.get(rank)) for rank in ranks)
        full = (rank for rank, one in tenants if one is not None and not one.unparking.has_room())
        first = next(full, None)
        return Why(Cause.MEMORY_BUSY, first) if first is not None else None

    def costs(self) -> DeathCosts | None:
        """None for a job that has nothing in memory only."""
        every = self._known() if self else []
        asked = max(every, key=_sequence, default=None)
        if asked is None or (at := self._requested(asked)) is None:
            return None
        anywhere = PartState.PARKED, PartState.WRITING, PartState.DURABLE
        copied = max((o for o in every if o.is_on_all(*anywhere)), key=_sequence, default=None)
        durable = max(
            (o for o in every if o.is_on_all(PartState.DURABLE)), key=_sequence, default=None
        )
        return DeathCosts(at, self._requested(copied), self._requested(durable))

    def _requested(self, one: Known | None) -> tuple[int, int] | None:
        """The step and the time of the first request; 0 when the time is not remembered."""
        if one is None:
            return None
        parts = (
            self._members.tenants[rank].ledger.of_sequence(one.sequence) for rank in one.places
        )
        times = [part.requested_ns for part in parts if part is not None]
        return self._step(one), min(times, default=0)

    def _parts(self, one: Known) -> list[tuple[Tenant, RankCheckpoint]]:
        ranks = (rank for rank, place in one.places.items() if place is PartState.PARKED)
        tenants = [self._members.tenants[rank] for rank in ranks]
        found = [(tenant, tenant.ledger.of_sequence(one.sequence)) for tenant in tenants]
        return [(tenant, part) for tenant, part in found if part is not None]

    def _drop(self, one: Known, newer: Known | None) -> None:
        end, by = End(State.SKIPPED, self._decisions.why_given_up(one.sequence)), None
        if newer is not None:
            by = newer.sequence, self._step(newer)
            why = Why(Cause.REPLACED_IN_MEMORY, by[1])
            if newer.is_on_all(PartState.DURABLE):
                why = Why(Cause.REPLACED)
            elif one.never:
                why = end.why  # the other node, or that it was passed
            end = End(State.SUPERSEDED, why)
        for tenant, found in self._parts(one):
            tenant.saves.drop(found, end, by)

    def _step(self, one: Known) -> int:
        tenant = self._members.tenants[next(iter(one.places))]
        found = tenant.ledger.of_sequence(one.sequence) or tenant.volumes.checkpoint(one.sequence)
        return found.id.step if found is not None else 0

    # -- what is known -------------------------------------------------------------------------

    def _known(self) -> list[Known]:
        places: dict[tuple[int, Collection[int]], dict[int, PartState]] = {}
        wanted = set()
        for rank, tenant in self._members.tenants.items():
            hurry = tenant.readiness.stops or tenant.binding.state is BindingState.STOPPED
            for found in tenant.ledger.live():
                one = found.id.sequence, self._of(rank, found.id.world_size)
                places.setdefault(one, {})[rank] = _place(found)
                if found.parks and (found.wanted or hurry):
                    wanted.add(one)
            is_usable = tenant.retention.is_usable
            durable = {
                c.id.sequence: c.id.world_size for c in tenant.volumes.checkpoints() if is_usable(c)
            }
            for sequence, size in (tenant.ledger.appearing | durable).items():
                places.setdefault((sequence, self._of(rank, size)), {})[rank] = PartState.DURABLE
        return [
            Known(sequence, members, parts, (sequence, members) in wanted,
                  never := self._is_never(sequence, members),
                  never and self._is_passed(sequence))
            for (sequence, members), parts in places.items() if sequence
        ]  # fmt: skip

    def _is_passed(self, sequence: int) -> bool:
        """Of one that is given up."""
        if sequence in self._members.elsewhere.given_up:
            return True
        return self._decisions.why_given_up(sequence).cause == Cause.RANK_DROPPED

    def _of(self, rank: int, world_size: int) -> Collection[int]:
        """Of which ranks a checkpoint in memory has parts here. Each node decides by itself what of
        it is written."""
        return tuple(self._members.ranks(world_size)) if world_size > 1 else (rank,)

    def _is_never(self, sequence: int, members: Collection[int]) -> bool:
        if len(members) > 1 and self._decisions.gives_up(sequence):
            return True
        ledgers = (t.ledger for rank in members if (t := self._members.tenants.get(rank)))
        found = (ledger.of_sequence(sequence) for ledger in ledgers)
        return any(part is not None and part.state in LOST for part in found)


def _place(found: RankCheckpoint) -> PartState:
    if found.state in (State.REQUESTED, State.COPYING):
        return PartState.COMING
    return PartState.PARKED if found.parks else PartState.WRITING
