"""What this node has promised to the other nodes of a start, and what it tells them of its
checkpoints. It keeps N1 to N3 of `pccheck_native/nodes/`: what was offered stays until a fact frees
it, what a rank here has failed to save is never offered, and only what is durable is."""

from __future__ import annotations

from collections.abc import Mapping

from pccheck_native import _core
from pccheck_native.nodes import facts
from pccheck_native.nodes.facts import FullName, Have, Promises, RankHas, Said, SaveName
from pccheck_wire.ends import NONE_KEEPS, Cause, Why
from pccheckd.config.options import Config
from pccheckd.group.job import Job
from pccheckd.group.starts import Start
from pccheckd.tenancy.saves import INHERITED
from pccheckd.tenancy.tenant import Tenant

from .names import Names


def _lacks(nodes: str) -> Why:
    who = nodes or "another node of the job"
    return Why(Cause.OTHER_RANK, words=f"{who} will never have this checkpoint, {NONE_KEEPS}")


class Promising:
    """Owned by the wide job. Of the start that has begun here last."""

    def __init__(self, job: Job, config: Config, names: Names) -> None:
        self._job, self._config, self._names = job, config, names
        self._start: Start | None = None
        self.mine: Promises | None = None  #: None: the start, or a round of it, has not begun
        self._offering = False  # more promises are being written to the disk
        #: Facts that `look` hears again, since the volumes did not list all of those checkpoints.
        self._late: tuple[Said, Mapping[SaveName, str]] | None = None
        job.members.elsewhere.offers = self._offers

    def begin(self, start: Start, restored: FullName | None, round_: int) -> None:
        """A round has begun with what all nodes restore. The volumes tell what was promised in it,
        before this daemon restarted."""
        known = self.known_globals()
        own = sorted((one for one in known if one.start == start.id), reverse=True)
        older = sorted(
            (one for one in known if one.start != start.id),
            key=lambda one: self._names.sequence(one) or 0, reverse=True,
        )  # fmt: skip
        keep = self._config.keep
        mine = facts.begin(start.id, restored, (*own, *older), keep, round_)
        stored = self._names.every()
        offered = {full.name for _, one, full in stored if one.is_offered and mine.is_own(full)}
        mine = mine._replace(offered=frozenset(offered))
        if start is not self._start:
            self._start, self._late = start, None
        self.mine = facts.hear(mine, Said(tuple(one.name for one in own)), keep)
        self._show()

    def is_own(self, full: FullName) -> bool:
        """It was saved in the round that has begun last."""
        return self.mine is not None and self.mine.is_own(full)

    def look(self) -> None:
        """After a decision of the job."""
        if self._late is not None:
            (said, lacks), self._late = self._late, None
            self.heard(said, lacks)
        ranks = self._ranks_have()
        if self.mine is not None and ranks is not None:
            # What a rank here has failed to save was never offered to anybody.
            self.mine = facts.give_up(self.mine, ranks)
        self._offer_more()

    def known_globals(self) -> set[FullName]:
        """What this node knows to be global. The next record writes it to the disk."""
        known = self._job.members.elsewhere.globals
        return {full for _, one, full in self._names.every() if one.id.sequence in known}

    def _offers(self, sequence: int) -> bool:
        """Whether a checkpoint that begins now is promised to the other nodes as soon as it is
        durable."""
        mine = self.mine
        full = self._names.take(mine.start, sequence) if mine is not None else None
        if mine is None or full is None:
            return False
        self.mine = facts.offer(mine, self._there() | {full}, self._room())
        self._show()
        return full.name in self.mine.offered

    def _offer_more(self) -> None:
        """What is durable and was not promised, because there was no room for more promises."""
        mine, start = self.mine, self._start
        if mine is None or start is None or self._offering:
            return
        every = [self._job.tenants[rank].volumes.sequences() for rank in start.members]
        durable = set.intersection(*every) if every else set()
        more = self._names.of(mine.start, durable) - mine.offered
        if more and (later := more & facts.offer(mine, self._there(), self._room()).offered):
            self._offering = True
            tenant = self._job.tenants[min(start.members)]
            tenant.tasks.spawn(self._offer_durable(mine.start, sorted(later)))

    def _there(self) -> set[FullName]:
        """What takes a slot here, of this start and of what it keeps of older ones."""
        mine, start = self.mine, self._start
        assert mine is not None and start is not None
        there = set[int]()
        for rank in start.members:
            tenant = self._job.tenants[rank]
            there |= tenant.volumes.sequences() | set(tenant.ledger.pending())
        found = self._names.of(mine.start, (n for n in there if not self._job.gives_up(n)))
        kept = {one for one in mine.known if self._names.sequence(one) in there}
        return {FullName(mine.start, name) for name in found} | kept

    async def _offer_durable(self, start: bytes, more: list[SaveName]) -> None:
        """The record of each rank has the mark before the other nodes hear of it."""
        try:
            for name in more:
                sequence = self._names.sequence(FullName(start, name))
                if not sequence or not await self._mark_offered(sequence):
                    continue
                if self.mine is not None and self.mine.start == start:
                    self.mine = self.mine._replace(offered=self.mine.offered | {name})
                    self._show()
        finally:
            self._offering = False
            self._job.settle()

    async def _mark_offered(self, sequence: int) -> bool:
        for rank in list(self._start.members) if self._start is not None else ():
            flag = self._job.tenants[rank].retention.flag
            if not await flag(sequence, set_=_core.SLOT_OFFERED, now=True):
                return False
        return True

    def _room(self) -> facts.Space:
        config = self._config
        volumes = [t.volumes.current for t in self._job.tenants.values()]
        slots = min((v.info.slots for v in volumes if v is not None), default=config.slots + 1)
        return facts.room(slots, config.in_flight, config.keep)

    def have(self) -> Have | None:
        ranks = self._ranks_have()
        return facts.publish(self.mine, ranks) if self.mine and ranks is not None else None

    def _ranks_have(self) -> list[RankHas] | None:
        """None: not all is known again since this daemon has restarted."""
        ranks = []
        for rank in self._start.members if self._start is not None else ():
            tenant = self._job.tenants[rank]
            if any(one.session == INHERITED for one in tenant.ledger.live()):
                return None  # of the daemon before: its name is known when it is durable
            ranks.append(self._rank_has(rank, tenant))
        return ranks

    def _rank_has(self, rank: int, tenant: Tenant) -> RankHas:
        start = self.mine.start if self.mine is not None else b""
        held = {one.id.sequence for one in tenant.volumes.checkpoints()}
        held |= tenant.ledger.appearing.keys()
        flying = set(tenant.ledger.pending()) - held | tenant.binding.unsure
        lost = {n for n in held | flying if self._job.gives_up(n)} - self._unsure()
        return RankHas(
            self._names.of(start, held - lost),
            self._names.of(start, flying - lost),
            self._newest_asked(rank),
        )

    def _newest_asked(self, rank: int) -> SaveName | None:
        """In this start."""
        start, asked = self._start, self._job.members.numbering.newest(rank)
        is_own = asked is not None and start is not None and asked.start == start.incarnation
        return SaveName(*asked[1:]) if asked is not None and is_own else None

    def _unsure(self) -> set[int]:
        """What failed on a rank here, and may be in its volume: the next daemon would find it."""
        ranks = self._start.members if self._start is not None else ()
        return set[int]().union(*(self._job.tenants[rank].binding.unsure for rank in ranks))

    @property
    def _appearing(self) -> set[int]:
        """What is durable here, and not in the list of its volume yet."""
        return {n for tenant in self._job.tenants.values() for n in tenant.ledger.appearing}

    def _sequence(self, name: SaveName) -> int | None:
        """Of a checkpoint of this start, if this node has heard of it."""
        assert self.mine is not None
        return self._names.sequence(FullName(self.mine.start, name))

    def heard(self, said: Said, lacks: Mapping[SaveName, str]) -> None:
        """`lacks`: the nodes that will never have what is given up, where that is known. That a
        checkpoint is global is heard when its volume lists the checkpoint: else the rules of this
        node would not know of whom that is said."""
        if self.mine is None:
            return
        appearing = self._appearing
        listed = tuple(name for name in said.globals if self._sequence(name) not in appearing)
        if listed != said.globals:
            self._late = said, lacks
            said = said._replace(globals=listed)
        before = self.mine
        self.mine = facts.hear(before, said, self._config.keep)
        elsewhere = self._job.members.elsewhere
        for name in said.given_up:
            if (sequence := self._sequence(name)) is not None:
                elsewhere.given_up.setdefault(sequence, _lacks(lacks.get(name, "")))
        self._show()
        new = (n for n in self.mine.known if n.start == before.start and n not in before.known)
        fresh = {n for n in map(self._names.sequence, new) if n is not None}
        if self.mine != before or said.given_up:
            self._job.settle()
        for sequence in fresh:
            for tenant in self._job.tenants.values():
                tenant.tasks.spawn(_note_global(tenant, sequence))

    def _show(self) -> None:
        """The promises, as sequences of this node."""
        mine, elsewhere = self.mine, self._job.members.elsewhere
        assert mine is not None
        sequences = map(self._names.sequence, mine.known)
        known = {n for n in sequences if n is not None}
        there = {one.id.sequence: full for _, one, full in self._names.every()}
        elsewhere.globals |= known
        elsewhere.kept = known & there.keys()
        elsewhere.old = {n for n, full in there.items() if not mine.is_own(full)}
        elsewhere.offered = {n for n in map(self._sequence, mine.offered) if n is not None}
        elsewhere.forget(self._names.forget(mine.known))


async def _note_global(tenant: Tenant, sequence: int) -> None:
    await tenant.retention.flag(sequence, set_=_core.SLOT_GLOBAL)  # with the next record
