"""One start of a job on several nodes, as this node takes part in it.

| phase | until |
|---|---|
| calling | a list has this node's living processes |
| promising | the promise is on the disk |
| beginning | the answer of round 0 is on the disk |
| running, refused | its processes have ended |

| key (below the job; `<s>`: the start) | written by | read by |
|---|---|---|
| `hellos` (a count), `hello/<i>` | each node | who makes the list; all, if there are few |
| `list/<k>`, `last-list` (the last k) | the node whose hello is last | all |
| `<s>/here/<i>` | member i, when it has promised | member 0 |
| `<s>/offer/<round>/<i>` | member i | who decides |
| `<s>/asked/<round>` | who decides, and lacks a list | all |
| `<s>/who/<digest>` | who is asked | who decides |
| `<s>/homes/<round>` | who decides, if a node lacks what its ranks read | these nodes |
| `<s>/servers/<round>` | who decides, before the answer | all members |
| `<s>/answer/<round>` | who decides first, or who refuses | all |
| `<s>/have/<i>`, `<s>/bell` | member i | member 0; the others for `status` |
| `<s>/said`, `<s>/said/bell` | member 0 | the others |

The rules are those of `pccheck_native/nodes/`. `patient.py` asks the carrier, and `exchange.py` has
what the members tell each other while the start runs."""

from __future__ import annotations

import asyncio
import enum
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pccheck_native.group import Refused
from pccheck_native.nodes import plain
from pccheck_native.nodes.beginning import absent, decide
from pccheck_native.nodes.facts import Have, Said, SaveName
from pccheck_native.nodes.homes import Homes, can_travel, homes_of
from pccheck_native.nodes.lists import (
    NodeHello,
    StartList,
    cloned,
    displaced,
    make_list,
    may_promise,
    member_of,
)
from pccheck_native.nodes.offers import NodeServer, Offer, StartAnswer, servers_of_plain
from pccheckd.base.logs import LOG
from pccheckd.base.moves import moved

from .carriers.carrier import Carrier
from .carriers.patient import LISTEN_S, Patient, counted, packed, parsed, unpacked
from .exchange import Exchange
from .rounds import BATCH, Round, fill
from .view import NodesView

#: Of all starts with one store: whoever reaches the store may write any number there.
HELLOS_MAX = 1 << 16
PAUSE_FIRST_S, PAUSE_LAST_S = 0.01, 0.25
#: What makes no fact (a checkpoint was asked for, an older one has gone) waits for so long, and is
#: then published with what does: a checkpoint costs each node one message.
QUIET_S = 5.0
#: Member 0 decides. Member k does so after k times this, if there is no answer.
DECIDES_AFTER_S = 3.0
#: Where there are many hellos, a node reads them when its own has been the last for a while: most
#: nodes are the last when they come. The others do so much later: the last one may have ended, and
#: people want to know who is missing.
LAST_S, READS_AFTER_S = 0.05, 10.0
#: For so long nodes that do not fit together wait for a newer hello: one may be of an earlier life.
APART_S = 3.0
#: A node knows that all ranks have come, and no list has this node, for so long up to twice as
#: long: then it says hello again. Whoever said the last hello may have taken an older list.
AGAIN_S = 1.0
#: For so long member 0 trusts that all members take the same list; then twice as long.
TRUSTS_S = 2.0


class MemberPhase(enum.Enum):
    CALLING = "calling"
    PROMISING = "promising"
    BEGINNING = "beginning"
    RUNNING = "running"
    REFUSED = "refused"


_P = MemberPhase
MEMBER_MOVES: dict[MemberPhase, frozenset[MemberPhase]] = {
    _P.CALLING: frozenset({_P.PROMISING, _P.REFUSED}),
    _P.PROMISING: frozenset({_P.BEGINNING, _P.REFUSED}),
    _P.BEGINNING: frozenset({_P.RUNNING, _P.CALLING, _P.REFUSED}),
    _P.RUNNING: frozenset({_P.REFUSED}),
    _P.REFUSED: frozenset(),
}


class NodeKeeper(Protocol):
    """What the node knows and keeps of the job: nodes/wide.py."""

    @property
    def is_live(self) -> bool: ...  # processes of the start live here
    def hello(self) -> NodeHello: ...
    def lives(self) -> StartList | None: ...
    def unanswered(self) -> StartList | None: ...  # of the newest promise, if it has no answer here
    async def promise(self, found: StartList) -> Refused | None: ...
    async def offer(self, found: StartList, round_: int) -> Offer: ...
    async def record(
        self, found: StartList, answer: StartAnswer, servers: Sequence[NodeServer]
    ) -> None: ...
    def have(self) -> Have | None: ...
    def heard(self, said: Said, lacks: Mapping[SaveName, str]) -> None: ...


@dataclass(slots=True)
class _Apart:
    """Since when nodes do not fit together, for one reason."""

    why: Refused | None = None
    since_s: float = 0.0

    def lasts(self, why: Refused) -> bool:
        if why != self.why:
            self.why, self.since_s = why, time.monotonic()
        return time.monotonic() - self.since_s >= APART_S


class NodeMember:
    """Owned by the job's nodes. `run` is its one task; the other methods only wake this task."""

    def __init__(self, carrier: Carrier, job: str, keeper: NodeKeeper) -> None:
        self._job, self._keeper = job, keeper
        self.patient = Patient(carrier, job, lambda: keeper.is_live)
        self.phase = MemberPhase.CALLING
        self.list: StartList | None = None
        self.at = 0  # which member of the list this node is
        self.refused: Refused | None = None
        self.missing = ""  #: whom this node waits for, while it does
        self.began_with = 0  #: the carrier's operations before the start had begun
        self.view = NodesView()
        self.hellos: list[NodeHello | None] = []  #: while it is calling
        self._lists_seen = 0
        self._hello = "", b""  # the key of the last one that it has said, and the value
        self._trusts_s = TRUSTS_S
        self._whole_s: float | None = None  # since when it knows that all ranks have come
        self._asked_round = self._round = 0
        self._answer = b""  # to the last round, if this daemon has heard it
        self._changed = asyncio.Event()
        self._homes: dict[int, Homes] = {}  # by round
        self._exchange: Exchange | None = None  # while the start runs

    # -- what the node tells it ----------------------------------------------------------------

    def changed(self) -> None:
        """What this node has may differ from what it has published."""
        self._changed.set()

    def want_round(self, round_: int) -> None:
        """A process here restores with the others."""
        self._asked_round = max(self._asked_round, round_)
        self._changed.set()

    async def run(self, resumed: StartList | None = None, round_: int = 0) -> None:
        """Until it is cancelled. `resumed`: the start has begun, and this daemon has restarted;
        `round_` is the last one whose answer is on the disk."""
        if resumed is None:
            self._lists_seen = await self._last_list()
            is_listed = await self._take_up_promise()
            while is_listed or (
                self.phase in (_P.CALLING, _P.BEGINNING) and await self._find_list()
            ):
                is_listed = False
                await self._begin()
            if self.phase is not MemberPhase.RUNNING:
                return
        else:
            self.list, self.phase = resumed, MemberPhase.RUNNING
            self.at = _at(resumed, self._keeper.hello())
        self._round = round_
        assert self.list is not None
        exchange = self._exchange = Exchange(
            self.patient, self._key(), self.list, self.at, self.view, self._keeper.heard
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(exchange))
            tasks.create_task(exchange.run())

    async def look(self) -> None:
        """Reads what the members have published, for a person who asks."""
        if self._exchange is not None and self.phase is MemberPhase.RUNNING:
            await self._exchange.look()

    def _move(self, to: MemberPhase) -> None:
        self.phase = moved(MEMBER_MOVES, self.phase, to, self._job)
        if to is MemberPhase.RUNNING:
            self.began_with = self.patient.operations

    async def fail(self, refused: Refused) -> None:
        """Its task has ended by an error."""
        if self.phase is not MemberPhase.REFUSED:
            self._refuse(refused)
            await self._refuse_for_all(refused)

    async def _refuse_for_all(self, refused: Refused) -> None:
        """The others need not wait for the offer of this member: without it nobody can decide."""
        if self.list is not None:
            said = displaced(self.list, self.list.members[self.at], refused)
            await self.patient.swap(self._key("answer", self._round), packed(["refused", *said]))

    def _refuse(self, refused: Refused) -> bool:
        self.refused = refused
        LOG.error("job %s: %s; %s", self._job, refused.reason, refused.hint)
        self._move(MemberPhase.REFUSED)
        return False

    # -- how a start begins --------------------------------------------------------------------

    async def _find_list(self) -> bool:
        """Until this node is in a list, and has promised. False: it is refused."""
        if self.phase is MemberPhase.BEGINNING:
            self._move(MemberPhase.CALLING)
        hello = self._keeper.hello()
        mine, is_left_out = await self._say_hello(hello), False
        hellos = self.hellos = []
        apart = _Apart()
        began_s, pause = time.monotonic(), PAUSE_FIRST_S
        while True:
            value, there = await self.patient.get([f"{self._job}/hellos", self._hello[0]])
            count = counted(value)
            if count > HELLOS_MAX:
                return self._refuse(_too_many(count))
            if count < mine or there != self._hello[1]:  # the store has come back empty
                self._lists_seen = 0
                hellos.clear()
                mine = await self._say_hello(hello)
                continue
            waits_s = time.monotonic() - began_s
            is_last = count == mine and waits_s >= LAST_S
            if count <= BATCH or is_last or is_left_out or waits_s >= READS_AFTER_S:
                refused = await self._make_list(count, mine, hello, apart)
                if refused is not None:
                    return self._refuse(refused)
            seen = self._lists_seen
            found = await self._newest_list(hello)
            if found is not None and found.promise >= hello.promise:  # else of an older hello
                return await self._promise(found)
            # A list was made when this hello had a number and had not arrived. Who made it waits
            # for a process of before, and makes no other one.
            is_left_out |= self._lists_seen > seen
            if (is_left_out or self._waits_in_vain()) and not _is_last(hellos, mine, hello):
                mine, is_left_out = await self._say_hello(hello), False
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_LAST_S)

    async def _make_list(
        self, count: int, mine: int, hello: NodeHello, apart: _Apart
    ) -> Refused | None:
        """Reads the hellos that have come, and makes the list if `mine` is the last."""
        hellos = self.hellos
        about_now = max(BATCH, hello.world_size)  # of earlier ones, some never come
        if count > len(hellos) or None in hellos[-about_now:]:
            hellos += [None] * (count - len(hellos))
            await fill(
                self.patient, hellos, lambda at: f"{self._job}/hello/{at + 1}", NodeHello.of_plain
            )
        if (two := cloned(hellos[mine:], hello)) is not None:
            await self._say_hello(hello)  # later than that of the other one, which then knows
            return two
        made = make_list(hellos, secrets.token_bytes(plain.ID), hello)
        self.missing = "" if isinstance(made, StartList) else f"{made.reason}; {made.hint}"
        if not isinstance(made, StartList):
            self._whole_s = None
        elif self._whole_s is None:
            self._whole_s = time.monotonic()
        if isinstance(made, Refused) and apart.lasts(made):
            return made
        if isinstance(made, StartList) and _is_last(hellos, mine, hello):
            number = max(self._lists_seen, await self._last_list()) + 1
            await self.patient.swap(f"{self._job}/list/{number}", packed(made.to_plain()))
            await self.patient.set(f"{self._job}/last-list", number)
        return None

    async def _say_hello(self, hello: NodeHello) -> int:
        """Which hello it is."""
        mine = await self.patient.add(f"{self._job}/hellos", 1)
        self._hello = f"{self._job}/hello/{mine}", packed(hello.to_plain())
        self._whole_s = None
        await self.patient.set(self._hello[0], hello.to_plain())
        return mine

    def _waits_in_vain(self) -> bool:
        limit_s = AGAIN_S * (1 + secrets.randbelow(100) / 100)  # else all say hello at once
        return self._whole_s is not None and time.monotonic() - self._whole_s >= limit_s

    async def _take_up_promise(self) -> bool:
        """Back in the list that this node had promised to before its daemon restarted: the others
        may have got the answer, and then they look at no other list any more."""
        found, hello = self._keeper.unanswered(), self._keeper.hello()
        if found is None or member_of(found, hello.node, hello.nonces) is None:
            return False
        await self._say_hello(hello)
        return await self._promise(found)

    async def _last_list(self) -> int:
        """The number of the newest list. It may be too low."""
        (value,) = await self.patient.get([f"{self._job}/last-list"])
        return parsed(_number_of_list, value) or 0

    async def _newest_list(self, hello: NodeHello) -> StartList | None:
        """The newest list in the store, if it has the living processes of this node."""
        found: StartList | None = None
        while True:
            following = f"{self._job}/list/{self._lists_seen + 1}"
            value, last = await self.patient.get([following, f"{self._job}/last-list"])
            newest = parsed(_number_of_list, last) or 0
            if value is None and newest <= self._lists_seen + 1:
                return found
            if value is None:  # who made the newest list had the numbers of an earlier store
                self._lists_seen = newest - 1
                continue
            self._lists_seen += 1
            one = parsed(StartList.of_plain, value)
            if one is not None and member_of(one, hello.node, hello.nonces) is not None:
                found = one

    async def _promise(self, found: StartList) -> bool:
        hello = self._keeper.hello()
        self._move(MemberPhase.PROMISING)
        refused = may_promise(found, hello.promise, self._keeper.lives())
        refused = refused or await self._keeper.promise(found)
        self.list, self.at = found, _at(found, hello)
        if refused is not None:
            self._refuse(refused)  # first: the store may not answer
            if found.promise > hello.promise:
                await self._refuse_for_all(refused)
            return False
        await self.patient.set(self._key("here", self.at), True)
        self._move(MemberPhase.BEGINNING)
        return True

    async def _begin(self) -> None:
        """Round 0. Returns in the phase BEGINNING when a newer list has this node."""
        if await self._agree(0):
            self._move(MemberPhase.RUNNING)

    async def _agree(self, round_: int) -> bool:
        """Offers, and records the answer. False: refused, or there is a newer list."""
        found = self.list
        assert found is not None
        offer = await self._keeper.offer(found, round_)
        round_now = Round(self.patient, self._key, found, self.at, round_, offer)
        await round_now.offer()
        answer, servers = self._key("answer", round_), self._key("servers", round_)
        began_s, pause = time.monotonic(), PAUSE_FIRST_S
        while True:
            said = [self._hello] if round_ == 0 and self._hello[0] else []
            keys = [answer, servers, *round_now.keys, *(key for key, _ in said)]
            value, where, mine, asked, *there = await self.patient.get(keys)
            if value is not None:
                return await self._answered(found, value, where)
            is_kept = await round_now.look(mine, asked) and there == [value for _, value in said]
            if round_ == 0 and not is_kept:  # the store has come back empty
                self._lists_seen = 0
                await self._say_hello(self._keeper.hello())
            if round_ == 0 and await self._newest_list(self._keeper.hello()) is not None:
                self._lists_seen -= 1  # it is read again, and taken
                return False
            waits_s = time.monotonic() - began_s
            if round_ == 0 and self.at == 0 and waits_s >= self._trusts_s:
                self._trusts_s *= 2
                if not await self._all_are_here(found):
                    return False
            if waits_s >= DECIDES_AFTER_S * self.at:
                await self._try_to_decide(found, round_now, answer, began_s)
            else:
                self.missing = f"{found.name(found.members[0])} has not decided yet"
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_LAST_S)

    async def _all_are_here(self, found: StartList) -> bool:
        """Whether all members have promised to the list. Two lists may each have some of them; then
        member 0 says hello again, and makes a newer list."""
        keys = [self._key("here", at) for at in range(len(found.members))]
        return None not in await self.patient.get(keys)

    async def _try_to_decide(
        self, found: StartList, round_now: Round, key: str, began_s: float
    ) -> None:
        waits_s = time.monotonic() - began_s
        offers = await round_now.read(waits_s)
        self.view.answered({at for at, one in enumerate(offers) if one is not None})
        came = [one for one in offers if one is not None]
        missing = absent(came, found, waits_s, round_now.number)
        self.missing = missing.reason if missing is not None else ""
        if missing is None:
            number = round_now.number
            answer, homes = await asyncio.to_thread(_decided, came, found, number)  # of any length
            if homes is not None:
                await self.patient.set(self._key("homes", number), homes.to_plain())
            servers = [one.server.to_plain() for one in came]
            await self.patient.set(self._key("servers", number), servers)
            plain = ["refused", *answer] if isinstance(answer, Refused) else answer.to_plain()
            await self.patient.swap(key, packed(plain))

    async def _answered(self, found: StartList, value: bytes, servers: bytes | None) -> bool:
        plain = unpacked(value)
        if isinstance(plain, list) and plain[:1] == ["refused"]:
            return self._refuse(Refused(*(str(word) for word in (*plain[1:], "", "")[:2])))
        try:
            answer = StartAnswer.of_plain(plain)
        except ValueError as error:
            return self._refuse(Refused(f"the answer of this start cannot be read: {error}", ""))
        self.missing = ""
        await self._keeper.record(found, answer, parsed(servers_of_plain, servers) or ())
        self._answer = value
        return True

    async def homes(self, round_: int) -> Homes | None:
        """Where the parts are of what all ranks restore in a round, if a node lacks some."""
        if round_ not in self._homes:
            (value,) = await self.patient.get([self._key("homes", round_)])
            if (found := parsed(Homes.of_plain, value)) is None:
                return None
            self._homes[round_] = found
        return self._homes[round_]

    # -- how it runs ---------------------------------------------------------------------------

    async def _publish(self, exchange: Exchange) -> None:
        """What this node has, whenever that has changed; and the rounds that it takes part in."""
        published: Have | None = None
        rung_s = 0.0
        while True:
            self._changed.clear()
            if self._asked_round > self._round:
                self._round += 1
                if not await self._agree(self._round):
                    return
                self._changed.set()
                continue
            have = self._keeper.have()
            is_due = time.monotonic() - rung_s >= QUIET_S
            if have is not None and have != published and (is_due or _is_news(have, published)):
                await exchange.show(have)
                published, rung_s = have, time.monotonic()
            try:
                async with asyncio.timeout(LISTEN_S if have == published else QUIET_S):
                    await self._changed.wait()
            except TimeoutError:
                mine, answered = self._key("have", self.at), self._key("answer", self._round)
                there, answer = await self.patient.get([mine, answered])
                if there is None:  # the store has come back empty
                    published = None
                if answer is None:
                    await self._put_answer_back(answered)

    async def _put_answer_back(self, key: str) -> None:
        """Another member may not have read it."""
        if self._answer:
            await self.patient.swap(key, self._answer)

    def _key(self, *words: object) -> str:
        assert self.list is not None
        return "/".join([self._job, self.list.start.hex(), *map(str, words)])


def _decided(
    offers: Sequence[Offer], found: StartList, round_: int
) -> tuple[StartAnswer | Refused, Homes | None]:
    answer = decide(offers, found, round_, travel=can_travel(offers))
    if isinstance(answer, Refused) or answer.restored is None:
        return answer, None
    return answer, homes_of(offers, found, answer.restored)


def _too_many(count: int) -> Refused:
    return Refused(
        f"the store of the job counts {count} starts of nodes, and at most {HELLOS_MAX} are read",
        "start the job with a new store (another port or --rdzv-id); in etcd, delete its keys",
    )


def _number_of_list(value: object) -> int:
    return plain.number(value, "the number of a list")


def _at(found: StartList, hello: NodeHello) -> int:
    at = member_of(found, hello.node, hello.nonces)
    assert at is not None, "only a list with this node is taken"
    return at


def _is_news(have: Have, before: Have | None) -> bool:
    """Whether a fact may follow from it: more is offered, or something will never come."""
    if before is None or set(have.offered) - set(before.offered):
        return True
    newest = max(have.known, default=None)

    def lost(before: Collection[SaveName], now: Collection[SaveName]) -> bool:
        return any((newest is None or one > newest) and one not in now for one in before)

    return lost(before.offered, have.offered) or lost(before.there, (*have.there, *have.offered))


def _is_last(hellos: Sequence[NodeHello | None], mine: int, hello: NodeHello) -> bool:
    """Whether no later hello is of this launch: its sender makes the list."""
    return all(one is None or one.kind != hello.kind for one in hellos[mine:])
