"""A model of the nodes of one job, around the real functions of `pccheck_native/nodes`, and a
search through all its states.

**One example.** Two nodes with a rank each; their volumes have three slots, of which one keeps a
global checkpoint (`keep` is 1). A row is a state: for each node the shards on its disk (* offered),
what is in flight, and the newest global that it knows. The first column is the move that led there.

    move                               node 0               node 1
    (the first state)                  - | - | -            - | - | -
    node 0 saves A1                    - | A1 | -           - | - | -
    node 0 has A1 durable              A1* | - | -          - | - | -
    node 0 publishes A1                A1* | - | -          - | - | -
    node 1 saves A1                    A1* | - | -          - | A1 | -
    node 1 has A1 durable              A1* | - | -          A1* | - | -
    node 1 publishes A1                A1* | - | -          A1* | - | -
    node 0 hears A1                    A1 | - | A1          A1* | - | -
    node 0 saves A2                    A1 | A2 | A1         A1* | - | -
    node 0 promises to B               A1 | - | A1          A1* | - | -
    node 1 saves A2                    A1 | - | A1          A1* | A2 | -
    node 1 has A2 durable              A1 | - | A1          A1* A2* | - | -
    node 1 promises to B               A1 | - | A1          A1 A2 | - | -
    B decides A1                       A1 | - | A1          A1 A2 | - | -
    node 1 restores A1                 A1 | - | A1          A1 A2 | - | A1
    node 1 saves B2                    A1 | - | A1          A1 A2 | B2 | A1
    node 1 has B2 durable              A1 | - | A1          A1 A2 B2* | - | A1
    node 0 restores A1                 A1 | - | A1          A1 A2 B2* | - | A1

A2 is what node 0 never had: no start restores it, and node 1 may recycle it once the answer of
start B is recorded there. Of most states several moves are possible; the search follows every one.

**What moves.** Nodes talk only through a store: messages come late, repeated, overtaken, links are
cut, the store comes back empty. No kill is needed: a process that does nothing more is a dead one,
and a process that goes on after a newer start began is a zombie. Daemons restart, copies fail, a
disk comes back empty or as it was earlier. `decide`, `say`, `hear`, `offer`, `publish`,
`recyclable`, `begin` and `may_promise` are the product's.

**What is checked**, in every state, also: what would a start restore that reaches just these disks,
for each set of disks?

S1  The ranks of one start restore the same, in each round.
S2  Never less than the newest that every rank was told is global, if these disks cover it.
S3  What is restored is whole: no mixture of starts.
S4  As S2, with all disks: it must be there.
S5  Nothing is begun empty, and nothing older restored, where a newer one may be elsewhere.
S6  A start gets no global checkpoint that a rank never had, nor one after a newer start is
    complete, unless the newer start restored that or a newer one.
S7  Nothing is both global and given up.
L0  With all disks there, a start restores.
L1  Once all links are healed, a live start gets a new global checkpoint.
L3  With N + keep + 1 slots no save waits for a message.

In the code a checkpoint is one number: start + 1, round, step, in 4 bits each from the right. What
is equal is kept once and named by its number in a table, so a state is a tuple of numbers.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from pccheck_native.group import Refused
from pccheck_native.nodes import beginning, facts, lists
from pccheck_native.nodes.facts import FullName, Have, Promises, RankHas, Said, SaveName, Space
from pccheck_native.nodes.lists import ListMember, Promise, StartList
from pccheck_native.nodes.offers import HeldPart, Offer, StartAnswer, StartRecord, Word

ROUND, START = 4, 8  # where a checkpoint's number has its round and its start
STEP = 15  # the mask
LAST = 12  # steps that the fair run at the end of a state may take, and 24 rounds of it

Places = tuple[int | None, ...]


class Config(NamedTuple):
    """One job, and how often each event may happen to it. Start 0 runs at the beginning."""

    name: str
    nodes: int
    places: tuple[Places, ...]  # of each start: the rank of each node, or None
    replicated: bool = False
    slots: int = 3
    keep: int = 1
    steps: int = 3
    fails: int = 0
    cuts: int = 0
    stores: int = 0  # the store comes back empty
    daemons: int = 0  # restarts of a daemon
    wipes: int = 0
    rolls: int = 0  # a disk comes back as it was
    lates: int = 0
    rounds: int = 0  # a start may restore once more, in mid-run
    explicit: bool = False  # a refused start is given every word of its user
    sources: bool = False  # nodes that are no members may offer too
    travel: bool = True  # shards travel between nodes
    marks_late: bool = False  # a checkpoint may be offered later than its record was made
    limit: int = 160_000
    #: A way into the depth, before the search: how the label of each move begins.
    begin: tuple[str, ...] = ()

    @property
    def budget(self) -> tuple[int, ...]:
        return (
            self.fails,
            self.cuts,
            self.stores,
            self.daemons,
            self.wipes,
            self.rolls,
            self.lates,
        )


FAIL, CUT, STORE, DAEMON, WIPE, ROLL, LATE = range(7)
DISKS = slice(WIPE, ROLL + 1)  # what can take checkpoints away


class Node(NamedTuple):
    """A node with its one rank."""

    # on the disk
    records: tuple[int, ...] = ()  # numbers of its StartRecords
    known: tuple[int, ...] = ()
    shards: tuple[tuple[int, int], ...] = ()  # checkpoint and part, in order
    start: int = -1  # the newest that it promised to
    number: int = 0  # of that promise
    offered: tuple[int, ...] = ()
    # in memory, or to be had from the rank again
    answer: int = 0  # number of the StartAnswer that the rank has got last
    passed: int = 0  # the newest that the rank asked for, or restored
    flying: int = 0
    failed: int = 0  # its record may be on the disk
    late: tuple[int, int] | None = None  # key and value of a message under way
    told: int = 0  # the newest global of its start that its rank was told
    linked: bool = True
    waits: bool = False  # its rank has called restore() again


class State(NamedTuple):
    nodes: tuple[int, ...]
    have: tuple[int, ...]  # what each node published, by start and node
    offers: tuple[int, ...]  # by beginning and node; a beginning is a start, or its later round
    lists: tuple[int, ...]  # by start
    answers: tuple[int, ...]  # in the store, by beginning
    # ghosts, which no rule can read
    given: tuple[int, ...]  # the answer that was made first, by beginning
    joined: tuple[int, ...]  # the nodes whose rank restored, by beginning: bits
    done: int  # starts that all ranks have restored in: bits
    must: int  # the newest global that every rank was told, or what all have restored
    by: int  # the start that makes it so
    whole: tuple[int, ...]  # the newest that all members had durable at one time, by start
    budget: tuple[int, ...]


Move = tuple[str, State]


class Outcome(NamedTuple):
    states: int
    depth: int
    closed: bool  # the search reached every state
    violation: str  # the broken invariant, and how; "" when all hold
    trace: list[str]


class Rules:
    """The product's functions, and what the daemon does with them; a mutant changes one thing."""

    only = ""  # for a mutant: the invariants to look for
    fence = True  # a node promises before it offers, and an older start does nothing after that
    fence_rounds = True  # so it does before it offers to a later round
    answers_once = True
    carries_answer = True  # an offer repeats the answer that its rank has got
    asks_all = True
    start_in_key = True
    comes_back = False  # a start that was displaced on a node promises there again

    def numbers(self, model: Model, state: State, start: int, node: Node) -> set[int]:
        """Which number the list of a start may have here: it is fixed, and hellos may be old."""
        if state.lists[start]:
            return {model.values[state.lists[start]].number}
        highest = max(model.nodes[state.nodes[i]].number for i in model.members[start])
        return {2, 1 + highest}

    def restarted(self, model: Model, at: int, node: Node) -> Node:
        """With a new daemon: what was in flight is gone; the bits of what is offered stay."""
        newest = node.known[0] if node.known and start_of(node.known[0]) == node.start else 0
        offered = tuple(one for one in node.offered if one > newest)
        return node._replace(flying=0, failed=0, offered=offered)

    def arrives(self, model: Model, there: int, value: int) -> int:
        """What a key holds once a late message has arrived."""
        return value

    def shortage(self, model: Model, state: State, at: int) -> int:
        """What a node without a slot recycles nevertheless; 0: nothing."""
        return 0

    def say(self, haves: Sequence[Have | None]) -> Said:
        return facts.say(haves)

    def hear(self, mine: Promises, said: Said, keep: int) -> Promises:
        return facts.hear(mine, said, keep)

    def offer(self, mine: Promises, held: Sequence[FullName], space: Space) -> Promises:
        return facts.offer(mine, held, space)

    def publish(self, mine: Promises, rank: RankHas) -> Have:
        return facts.publish(mine, [rank])

    def recyclable(self, mine: Promises, held: Sequence[FullName]) -> list[FullName]:
        return facts.recyclable(mine, held)

    def begin(
        self, start: bytes, restored: FullName | None, known: Any, keep: int, round_: int
    ) -> Promises:
        return facts.begin(start, restored, known, keep, round_)

    def may_promise(self, who: StartList, promise: Promise) -> bool:
        return lists.may_promise(who, promise) is None

    def decide(
        self, offers: Sequence[Offer], who: StartList, round_: int, *, travel: bool
    ) -> StartAnswer | Refused:
        return beginning.decide(offers, who, round_, travel=travel)


def start_of(one: int) -> int:
    return (one >> START) - 1


def first_of(start: int, round_: int = 0) -> int:
    """Below all checkpoints of that round."""
    return start + 1 << START | round_ << ROUND


def start_id(start: int) -> bytes:
    return bytes([ord("A") + start]) * 16


def full(one: int) -> FullName:
    name = SaveName(one >> ROUND & 15, 0, one & STEP, 0)
    return FullName(start_id(start_of(one)), name)


def number_of(one: FullName) -> int:
    return first_of(one.start[0] - ord("A"), one.name.base) | one.name.step


def show(one: int | FullName | None) -> str:
    if not one:
        return "nothing"
    one = one if isinstance(one, int) else number_of(one)
    return f"{chr(ord('A') + start_of(one))}{'' if not one >> ROUND & 15 else 'r'}{one & STEP}"


def shown(some: Any) -> str:
    return " ".join(map(show, some)) or "-"


def bits(mask: int) -> Iterator[int]:
    return (at for at in range(mask.bit_length()) if mask >> at & 1)


def put(some: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*some[:at], value, *some[at + 1 :])


class Table:
    """Equal values have one number; 0 is None."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = [None]

    def __getitem__(self, number: int) -> Any:
        return self._values[number]

    def number(self, value: Any) -> int:
        if (found := self._numbers.get(value)) is None:
            found = self._numbers[value] = len(self._values)
            self._values.append(value)
        return found


class Model:
    """All that may happen to one job."""

    def __init__(self, config: Config, rules: Rules) -> None:
        self.config, self.rules = config, rules
        self.starts = len(config.places)
        self.all = range(config.nodes)
        self.members = [[i for i in self.all if places[i] is not None] for places in config.places]
        self.begins = range(2 * self.starts if config.rounds else self.starts)
        self.space = facts.room(config.slots, 1, config.keep)
        self.nodes, self.values = Table(), Table()
        self._memos: dict[Any, Any] = {}
        sizes = range(1, config.nodes + 1)
        self.sets = [some for size in sizes for some in combinations(self.all, size)]

    def memo(self, key: Any, make: Callable[[], Any]) -> Any:
        """What the product said before to the same question."""
        if (found := self._memos.get(key, self)) is self:
            found = self._memos[key] = make()
        return found

    def first(self) -> State:
        """Start 0 begins empty, and all its ranks have restored nothing."""
        who = self.who(0, 1)
        answer = StartAnswer(who.start, 0, None, ())
        born = self.values.number(StartRecord(who).with_answer(answer))
        given = self.values.number(answer)
        running = Node((born,), start=0, number=1, answer=given, passed=first_of(0))
        nodes = [running if i in self.members[0] else Node() for i in self.all]
        none = (0,) * len(self.begins)
        return State(
            nodes=tuple(map(self.nodes.number, nodes)),
            have=(0,) * (self.starts * len(self.all)),
            offers=(0,) * (len(self.begins) * len(self.all)),
            lists=put((0,) * self.starts, 0, self.values.number(who)),
            answers=put(none, 0, given),
            given=put(none, 0, given),
            joined=put(none, 0, self.full(0)),
            done=1,
            must=0,
            by=0,
            whole=(0,) * self.starts,
            budget=self.config.budget,
        )

    def full(self, begin: int) -> int:
        return sum(1 << i for i in self.members[begin % self.starts])

    # -- what the product's functions get and say ------------------------------------------------

    def who(self, start: int, number: int) -> StartList:
        return self._list(self.config.places[start], start_id(start), number)

    def _list(self, places: Places, start: bytes, number: int) -> StartList:
        members = [
            ListMember(bytes([i + 1]) * 16, f"host{i}", (rank,), (start,))
            for i, rank in enumerate(places)
            if rank is not None
        ]
        members.sort(key=lambda member: member.ranks)
        replicated = self.config.replicated
        return StartList(start, number, "", len(members), replicated, 1, tuple(members))

    def promises(self, node: Node) -> Promises:
        return Promises(
            start_id(node.start),
            tuple(map(full, node.known)),
            frozenset(full(one).name for one in node.offered),
            self.values[node.answer].round,
        )

    def offer(self, at: int, node: Node, word: Word) -> Offer:
        """What a node tells a start to which it has promised (the promise comes later)."""
        answered = bool(node.answer) and self.rules.carries_answer
        return Offer(
            bytes([at + 1]) * 16,
            f"host{at}",
            Promise(),
            tuple(self.values[record] for record in node.records),
            tuple(map(full, node.known)),
            tuple(HeldPart(full(one), part) for one, part in node.shards),
            (self.values[node.answer],) if answered else (),
            word,
        )

    def decide(self, offers: dict[int, int], who: StartList, round_: int, word: Word) -> Any:
        """`offers`: the numbers of the nodes as they offered."""
        found = []
        for at, number in offers.items():
            key = ("offer", at, number, word)
            offer = self.memo(key, lambda: self.offer(at, self.nodes[number], word))  # noqa: B023
            found.append(offer._replace(promise=who.promise, round=round_))
        return self.rules.decide(found, who, round_, travel=self.config.travel)

    def said(self, state: State, start: int) -> Said:
        keys = tuple(state.have[self.key(start, i)] for i in self.members[start])
        found: Said = self.memo(
            ("say", start, keys), lambda: self.rules.say([self.values[key] for key in keys])
        )
        return found

    def key(self, start: int, at: int) -> int:
        return (start if self.rules.start_in_key else 0) * len(self.all) + at

    def published(self, number: int) -> tuple[int, int]:
        """The number of what a node publishes, and of the node that has promised that."""

        def make() -> tuple[int, int]:
            node: Node = self.nodes[number]
            if self.config.marks_late and not node.waits:
                node = self.marked(node)
            own = [full(one).name for one, _ in node.shards if start_of(one) == node.start]
            asked = full(node.passed).name if node.passed & STEP else None
            flying = [full(node.flying).name] if node.flying else []
            has = RankHas(own, flying, asked)
            have = self.rules.publish(self.promises(node), has)
            return self.values.number(have), self.nodes.number(node)

        found: tuple[int, int] = self.memo(("publish", number), make)
        return found

    def marked(self, node: Node) -> Node:
        """With more shards that are offered."""
        held = [full(one) for one, _ in node.shards]
        mine = self.rules.offer(self.promises(node), held, self.space)
        offered = (number_of(FullName(mine.start, name)) for name in mine.offered)
        return node._replace(offered=tuple(sorted(offered)))

    def heard(self, state: State, at: int) -> int:
        number = state.nodes[at]
        node: Node = self.nodes[number]
        said = self.said(state, node.start)

        def make() -> int:
            mine = self.rules.hear(self.promises(node), said, self.config.keep)
            known = tuple(map(number_of, mine.known))
            told = node.told
            if known and start_of(known[0]) == node.start:
                told = max(told, known[0])
            offered = (number_of(FullName(mine.start, name)) for name in mine.offered)
            made = node._replace(known=known, offered=tuple(sorted(offered)), told=told)
            return self.nodes.number(made)

        found: int = self.memo(("hear", number, said), make)
        return found

    def room(self, state: State, at: int) -> tuple[tuple[int, int], ...] | None:
        """The shards that stay when a node saves once more; None: no slot is free."""
        node: Node = self.nodes[state.nodes[at]]
        if len(node.shards) < self.config.slots:
            return node.shards
        held = [full(one) for one, _ in node.shards]
        free = self.memo(
            ("recyclable", state.nodes[at]),
            lambda: self.rules.recyclable(self.promises(node), held),
        )
        gone = next(map(number_of, free), 0) or self.rules.shortage(self, state, at)
        return tuple(shard for shard in node.shards if shard[0] != gone) if gone else None

    # -- moves -----------------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[Move]:
        for at, number in enumerate(state.nodes):
            node: Node = self.nodes[number]
            runs = bool(node.answer) and at in self.members[node.start]
            if runs:
                yield from self._saves(state, at, node)
                yield from self._talks(state, at, node)
                yield from self._waits(state, at, node)
            yield from self._suffers(state, at, node)
            if node.linked:
                yield from self._promises(state, at, node)
                yield from self._restores(state, at, node)
        for begin in self.begins:
            yield from self._decides(state, begin)
        if state.budget[STORE]:
            empty = state._replace(
                have=(0,) * len(state.have),
                offers=(0,) * len(state.offers),
                answers=(0,) * len(state.answers),
            )
            yield "the store comes back empty", spend(empty, STORE)

    def at(self, state: State, at: int, node: Node, **more: Any) -> State:
        return state._replace(nodes=put(state.nodes, at, self.nodes.number(node)), **more)

    def _saves(self, state: State, at: int, node: Node) -> Iterator[Move]:
        if node.flying:
            part = self.config.places[node.start][at]
            shards = tuple(sorted((*node.shards, (node.flying, part))))
            done = self.marked(node._replace(shards=shards, flying=0))  # type: ignore[arg-type]
            whole, start = state.whole, node.start
            others = (self.nodes[state.nodes[i]].shards for i in self.members[start] if i != at)
            if node.flying > whole[start] and all(
                any(one == node.flying for one, _ in shards) for shards in others
            ):
                whole = put(whole, start, node.flying)
            yield (
                f"node {at} has {show(node.flying)} durable",
                self.at(state, at, done, whole=whole),
            )
            if state.budget[FAIL]:
                failed = node._replace(flying=0, failed=node.flying)
                yield (
                    f"node {at} fails {show(node.flying)}",
                    spend(self.at(state, at, failed), FAIL),
                )
        elif not node.waits and node.passed & STEP < self.config.steps:
            stay = self.room(state, at)
            if stay is not None:
                one = node.passed + 1
                made = node._replace(shards=stay, flying=one, passed=one, failed=0)
                yield f"node {at} saves {show(one)}", self.at(state, at, made)

    def _talks(self, state: State, at: int, node: Node) -> Iterator[Move]:
        if node.linked:
            value, promised = self.published(state.nodes[at])
            key = self.key(node.start, at)
            if state.have[key] != value:
                made = state._replace(nodes=put(state.nodes, at, promised))
                offered = [
                    number_of(FullName(start_id(node.start), name))
                    for name in self.values[value].offered
                ]
                label = f"node {at} publishes {shown(offered)}"
                yield label, made._replace(have=put(state.have, key, value))
                if state.budget[LATE] and node.late is None:
                    late = self.nodes[promised]._replace(late=(key, value))
                    yield f"{label}, under way", spend(self.at(state, at, late), LATE)
            heard = self.heard(state, at)
            if heard != state.nodes[at]:
                made = state._replace(nodes=put(state.nodes, at, heard))
                known = self.nodes[heard].known
                what = show(known[0]) if known != node.known else "what is given up"
                yield f"node {at} hears {what}", self._noted(made, node.start)

    def _noted(self, state: State, start: int) -> State:
        """What every rank of the start has been told now."""
        nodes = [self.nodes[state.nodes[i]] for i in self.members[start]]
        told = min(node.told if node.start == start else 0 for node in nodes)
        newer = any(start in self.seen(state, other) for other in bits(state.done))
        before = state.must if start_of(state.must) == start else 0
        if told > before and state.done >> start & 1 and not newer:
            return state._replace(must=told, by=start)
        return state

    def _suffers(self, state: State, at: int, node: Node) -> Iterator[Move]:
        budget = state.budget
        if node.late is not None and node.linked:
            key, value = node.late
            arrived = self.at(state, at, node._replace(late=None))
            yield (
                f"node {at}: its late message arrives",
                arrived._replace(
                    have=put(state.have, key, self.rules.arrives(self, state.have[key], value))
                ),
            )
        if budget[CUT]:
            word = "is cut off" if node.linked else "is linked again"
            cut = self.at(state, at, node._replace(linked=not node.linked))
            yield f"node {at} {word}", spend(cut, CUT)
        elif not node.linked:
            yield f"node {at} is linked again", self.at(state, at, node._replace(linked=True))
        if budget[DAEMON] and node.start >= 0:
            restarted = self.nodes.number(self.rules.restarted(self, at, node))
            made = state._replace(nodes=put(state.nodes, at, restarted))
            yield f"node {at} has a new daemon", spend(made, DAEMON)
        if budget[WIPE] and node.records:
            empty = Node(told=node.told)
            yield f"node {at} comes back with an empty disk", spend(self.at(state, at, empty), WIPE)
        if budget[ROLL] and node.shards and not node.flying:
            gone = max(node.shards)
            old = Node(
                node.records,
                tuple(k for k in node.known if k != gone[0] and k in dict(node.shards)),
                tuple(shard for shard in node.shards if shard != gone),
                number=node.number,
                passed=node.passed,
                told=node.told,
                linked=node.linked,
            )
            yield f"node {at} comes back as it was", spend(self.at(state, at, old), ROLL)

    def _waits(self, state: State, at: int, node: Node) -> Iterator[Move]:
        """Its rank calls restore() in mid-run, and its node offers to the next round."""
        begin = node.start + self.starts
        if begin not in self.begins or self.values[node.answer].round or not node.linked:
            return
        key = begin * len(self.all) + at
        if not state.offers[key] and state.done >> node.start & 1:
            waiting = node._replace(waits=True)
            if self.rules.fence_rounds:
                waiting = waiting._replace(flying=0, failed=0)
            number = self.nodes.number(self._offered(waiting))
            made = self.at(state, at, waiting)
            word = "again " if node.waits else ""
            yield (
                f"node {at} offers {word}to round 1 of {start_letter(node.start)}",
                made._replace(offers=put(state.offers, key, number)),
            )

    def _offered(self, node: Node) -> Node:
        """What an offer tells of a node."""
        return Node(node.records, node.known, node.shards, node.start, node.number, (), node.answer)

    def _promises(self, state: State, at: int, node: Node) -> Iterator[Move]:
        for start in range(1, self.starts):
            member = at in self.members[start]
            if not (member or self.config.sources):
                continue
            key = start * len(self.all) + at
            letter = start_letter(start)
            if node.start == start:
                if not state.offers[key] and member and state.joined[start] != self.full(start):
                    offers = put(state.offers, key, self.nodes.number(self._offered(node)))
                    yield f"node {at} offers again to {letter}", state._replace(offers=offers)
                continue
            was = any(self.values[one].start == start_id(start) for one in node.records)
            if (was or state.offers[key]) and not self.rules.comes_back:
                continue
            if not self.rules.fence and node.start > 0:
                continue
            for number in self.rules.numbers(self, state, start, node):
                who = self.who(start, number)
                if not self.rules.may_promise(who, self._promise(node)):
                    continue
                records = node.records
                if not was:
                    records = (*records, self.values.number(StartRecord(who)))
                made = node._replace(records=records)
                if self.rules.fence:
                    made = made._replace(
                        start=start, number=number, offered=(), answer=0, passed=first_of(start),
                        flying=0, failed=0, told=0, waits=False,
                    )  # fmt: skip
                offers = put(state.offers, key, self.nodes.number(self._offered(made)))
                named = put(state.lists, start, self.values.number(who))
                state_after = self.at(state, at, made, offers=offers, lists=named)
                yield f"node {at} promises to {letter}", state_after

    def _promise(self, node: Node) -> Promise:
        return Promise(node.number, start_id(node.start) if node.start >= 0 else bytes(16))

    def _decides(self, state: State, begin: int) -> Iterator[Move]:
        start, round_ = begin % self.starts, begin // self.starts
        key = begin * len(self.all)
        offers = {i: state.offers[key + i] for i in self.all if state.offers[key + i]}
        if not offers or (state.answers[begin] and self.rules.answers_once):
            return
        members = [i for i in self.members[start] if i in offers]
        if len(members) < len(self.members[start]) and self.rules.asks_all:
            return
        who: StartList = self.values[state.lists[start]]
        if not self.rules.asks_all:
            there = [member for member in who.members if member.node[0] - 1 in members]
            who = who._replace(members=tuple(there))

        def make() -> list[tuple[str, int]]:
            found = self.decide(offers, who, round_, Word())
            if not isinstance(found, Refused):
                return [("decides", self.values.number(found))]
            words = self._words(state, offers) if self.config.explicit else []
            said = [self.decide(offers, who, round_, word) for word in words]
            answers = {self.values.number(one) for one in said if not isinstance(one, Refused)}
            return [("is told to go on with", one) for one in sorted(answers)]

        memo = ("decide", begin, tuple(offers.items()), state.lists[start])
        for how, answer in self.memo(memo, make):
            if answer == state.answers[begin]:
                continue
            label = f"{start_letter(start)} {how} {show(self.values[answer].restored)}"
            yield label, state._replace(answers=put(state.answers, begin, answer))

    def _words(self, state: State, offers: dict[int, int]) -> list[Word]:
        """All that a user may say to a refused start: without who is away, and each start."""
        without = tuple(f"host{i}" for i in self.all if i not in offers)
        known = {
            host
            for number in offers.values()
            for record in self.nodes[number].records
            for host in (member.host for member in self.values[record].who.members)
        }
        away = tuple(host for host in without if host in known)
        named = [start_id(start).hex() for start in range(self.starts)]
        fresh = Word(fresh=True)
        return [fresh, Word(without=away), *(Word(start=start, without=away) for start in named)]

    def _restores(self, state: State, at: int, node: Node) -> Iterator[Move]:
        for begin in self.begins[1:]:
            start, round_ = begin % self.starts, begin // self.starts
            if at not in self.members[start] or not state.answers[begin]:
                continue
            if node.start != start:
                if self.rules.fence or round_:
                    continue
                node = node._replace(
                    start=start, answer=0, offered=(), flying=0, told=0, passed=first_of(start)
                )
            got: StartAnswer | None = self.values[node.answer]
            if (got.round + 1 if got else 0) != round_ or (round_ and not node.waits):
                continue
            yield self._restored(state, at, node, begin)

    def _restored(self, state: State, at: int, node: Node, begin: int) -> Move:
        start, round_ = begin % self.starts, begin // self.starts
        answer: StartAnswer = self.values[state.answers[begin]]
        one = number_of(answer.restored) if answer.restored else 0
        mine = next(r for r in node.records if self.values[r].start == start_id(start))
        record = self.values.number(self.values[mine].with_answer(answer))
        before = tuple(map(full, node.known))
        begun = self.rules.begin(start_id(start), answer.restored, before, self.config.keep, round_)
        made = node._replace(
            records=tuple(record if r == mine else r for r in node.records),
            known=tuple(map(number_of, begun.known)),
            offered=(),
            answer=state.answers[begin],
            passed=first_of(start, round_) | one & STEP,
            told=0,
            waits=False,
        )
        given = state.given if state.given[begin] else put(state.given, begin, state.answers[begin])
        joined = put(state.joined, begin, state.joined[begin] | 1 << at)
        state = self.at(state, at, made, given=given, joined=joined)
        label = f"node {at} restores {show(one)}"
        first: StartAnswer = self.values[given[begin]]
        if first.restored != answer.restored:
            return f"{label}; S1 another rank restored {show(first.restored)}", state
        if joined[begin] == self.full(start):
            if round_ and self.newer(state, state.must, one):
                return f"{label}; S2 every rank was told {show(state.must)}", state
            state = state._replace(must=one, by=start)
            state = state._replace(done=state.done | 1 << start)
        return label, state

    # -- what must hold --------------------------------------------------------------------------

    def seen(self, state: State, start: int) -> set[int]:
        """The starts that are older than this one."""
        answer = self.values[state.given[start]]
        return {one[0] - ord("A") for one in answer.seen} if answer else set()

    def newer(self, state: State, one: int, other: int) -> bool:
        if not other or start_of(one) == start_of(other):
            return one > other
        return start_of(other) in self.seen(state, start_of(one))

    def restored(self, state: State, start: int) -> int:
        answer = self.values[state.given[start]]
        return number_of(answer.restored) if answer and answer.restored else 0

    def is_intact(self, state: State) -> bool:
        return state.budget[DISKS] == self.config.budget[DISKS]

    def violation(self, state: State, label: str) -> str:
        if "; S" in label:
            return label[label.index("; S") + 2 :]
        at = int(label[5]) if label.startswith("node") else -1
        if at >= 0:
            node: Node = self.nodes[state.nodes[at]]
            if wrong := self._global(state, at, node, label) or self._no_slot(state, at, node):
                return wrong
        disks = tuple(map(self._disk, state.nodes))
        ghosts = state.must, state.by, state.given, state.budget[DISKS]
        found: str = self.memo(("all", disks, ghosts), lambda: self._judge(state, disks))
        return found

    def _judge(self, state: State, disks: tuple[int, ...]) -> str:
        """S2, S4, S5, L0: of each set of these disks."""
        found = (
            self._judge_some(state, nodes, tuple(disks[i] for i in nodes)) for nodes in self.sets
        )
        return next(filter(None, found), "")

    def _global(self, state: State, at: int, node: Node, label: str) -> str:
        """S6, S7."""
        start = node.start
        later = [one for one in bits(state.done) if start in self.seen(state, one)]
        whole = state.whole[start] if start >= 0 else 0
        if " hears " in label and self.is_intact(state):
            newest = node.known[0] if node.known else 0
            if start_of(newest) == start and newest > whole:
                good = later and (
                    self.config.explicit
                    or not any(self.newer(state, newest, self.restored(state, x)) for x in later)
                )
                if not good:
                    return f"S6 node {at} takes {show(newest)} for global, which a rank never had"
            lost = {
                number_of(FullName(start_id(start), x)) for x in self.said(state, start).given_up
            }
            nodes = (self.nodes[state.nodes[i]] for i in self.members[start])
            known = {k for one in nodes if one.start == start for k in one.known}
            if both := lost & known:
                return f"S7 {shown(both)} is global and given up"
        made_whole = label.endswith("durable") and whole and node.shards[-1][0] == whole
        if made_whole and any(self.newer(state, whole, self.restored(state, x)) for x in later):
            return f"S6 {show(whole)} is global after a newer start is complete"
        return ""

    def _no_slot(self, state: State, at: int, node: Node) -> str:
        runs = node.answer and at in self.members[node.start]
        if self.space.spare and runs and not node.flying and self.room(state, at) is None:
            return f"L3 node {at} has no slot while nothing can be agreed"
        return ""

    def _judge_some(self, state: State, nodes: tuple[int, ...], disks: tuple[int, ...]) -> str:
        """What a start restores that reaches these disks only."""
        answer = self.memo(("disks", nodes, disks), lambda: self._would(nodes, disks))
        refused = isinstance(answer, Refused)
        one = 0 if refused or not answer.restored else number_of(answer.restored)
        must, explicit = state.must, self.config.explicit
        wrong = ""
        if not refused and not one and any(self.nodes[disk].shards for disk in disks):
            wrong = "S5"
        elif one and not self._whole(one, disks):
            wrong = "S3"
        elif not must or (explicit and not self._has_record(disks, state.by)):
            return ""
        elif one and one != must and not self.newer(state, one, must):
            wrong = "S2" if self._whole(must, disks) else "S5"
        elif not one and len(nodes) == len(self.all) and self.is_intact(state) and not explicit:
            wrong = "L0" if self._whole(must, disks) else "S4"
        if not wrong:
            return ""
        reached = lists.joined([f"node {at}" for at in nodes])
        what = f"nothing ({answer.reason})" if refused else show(one)
        return f"{wrong} a start with {reached} restores {what}; every rank was told {show(must)}"

    def _would(self, nodes: tuple[int, ...], disks: tuple[int, ...]) -> StartAnswer | Refused:
        places = tuple(nodes.index(i) if i in nodes else None for i in self.all)
        who = self._list(places, b"\xff" * 16, 99)
        found: StartAnswer | Refused
        found = self.decide(dict(zip(nodes, disks, strict=True)), who, 0, Word())
        return found

    def _disk(self, number: int) -> int:
        """The number of a node with this disk, and nothing else."""

        def make() -> int:
            node: Node = self.nodes[number]
            return self.nodes.number(Node(node.records, node.known, node.shards))

        found: int = self.memo(("disk", number), make)
        return found

    def _has_record(self, numbers: tuple[int, ...], start: int) -> bool:
        records = (self.values[r] for number in numbers for r in self.nodes[number].records)
        return any(record.start == start_id(start) and record.born for record in records)

    def _whole(self, one: int, numbers: tuple[int, ...]) -> bool:
        have = {part for n in numbers for which, part in self.nodes[n].shards if which == one}
        if self.config.replicated:
            return bool(have)
        return have >= {part for part in self.config.places[start_of(one)] if part is not None}

    def stuck(self, state: State) -> str:
        """L1: healed, without further faults, in lockstep."""
        promise = {start: self.values[state.lists[start]].promise for start in bits(state.done)}
        start = max(promise, key=lambda one: promise[one])
        members = self.members[start]
        nodes = [self._living(state.nodes[i], start) for i in members]
        rounds = {self.values[self.nodes[one].answer].round for one in nodes if one}
        if 0 in nodes or len(rounds) > 1:
            return ""
        haves = [state.have[self.key(start, i)] for i in members]
        key = ("fair", start, *nodes, *haves)
        state = state._replace(nodes=put_all(state.nodes, members, nodes))
        found: str = self.memo(key, lambda: self._fair(state, start, members))
        return found

    def _living(self, number: int, start: int) -> int:
        """The node as far as its future depends on it; 0: it takes no part in that start."""

        def make() -> int:
            node: Node = self.nodes[number]
            if node.start != start or not node.answer or node.waits:
                return 0
            return self.nodes.number(node._replace(told=0, linked=True, late=None))

        found: int = self.memo(("living", number, start), make)
        return found

    def _fair(self, state: State, start: int, members: list[int]) -> str:
        goal = max(self.nodes[state.nodes[i]].passed for i in members)
        for _ in range(24):
            for at in members:
                node: Node = self.nodes[state.nodes[at]]
                if node.flying:
                    _, state = next(self._saves(state, at, node))
                value, promised = self.published(state.nodes[at])
                have = put(state.have, self.key(start, at), value)
                state = state._replace(have=have, nodes=put(state.nodes, at, promised))
            heard = [self.heard(state, at) for at in members]
            state = state._replace(nodes=put_all(state.nodes, members, heard))
            nodes = [self.nodes[state.nodes[at]] for at in members]
            if all(
                node.known and start_of(node.known[0]) == start and node.known[0] > goal
                for node in nodes
            ):
                return ""
            low = min(node.passed for node in nodes)
            for at, node in zip(members, nodes, strict=True):
                stay = self.room(state, at)
                if node.passed == low and not node.flying and stay is not None and low & STEP < 15:
                    made = node._replace(shards=stay, flying=low + 1, passed=low + 1)
                    state = self.at(state, at, made)
        return "L1 healed, and no new checkpoint ever becomes global: every slot is full"

    # -- searches --------------------------------------------------------------------------------

    def row(self, state: State) -> list[str]:
        """A state as in the table at the top."""
        cells = []
        for number in state.nodes:
            node: Node = self.nodes[number]
            disk = [show(one) + "*" * (one in node.offered) for one, _ in node.shards]
            flying = show(node.flying) if node.flying else "-"
            cells.append(f"{' '.join(disk) or '-'} | {flying} | {shown(node.known)}")
        return cells

    def begun(self) -> tuple[State, list[str]]:
        """The state at the end of the way into the depth, and the way."""
        state, way = self.first(), []
        for words in self.config.begin:
            made = (move for move in self.moves(state) if move[0].startswith(words))
            label, state = next(made)
            way.append(label)
        return state, way

    def search(self, limit: int | None = None) -> Outcome:
        """Breadth first."""
        first, begun = self.begun()
        parents: dict[State, tuple[State, str] | None] = {first: None}
        frontier, depth = [first], 0
        gc.disable()
        try:
            while frontier and len(parents) < (limit or self.config.limit):
                following, depth = [], depth + 1
                for state in frontier:
                    for label, made in self.moves(state):
                        if made in parents:
                            continue
                        parents[made] = (state, label)
                        if wrong := self.wrong(made, label):
                            return Outcome(
                                len(parents), depth, False, wrong, begun + _way(parents, made)
                            )
                        following.append(made)
                frontier = following
        finally:
            gc.enable()
        return Outcome(len(parents), depth, not frontier, "", [])

    def wrong(self, state: State, label: str) -> str:
        found = self.violation(state, label) or self.stuck(state)
        return "" if self.rules.only and found[:2] not in self.rules.only.split() else found

    def walks(self, seeds: Sequence[int], length: int = 90) -> tuple[Outcome, int]:
        """Seeded walks, and how many of them had a second complete start. Six of ten moves are
        those that lead to global checkpoints, so that walks get far."""
        seen, far = set(), 0
        for seed in seeds:
            rng, (state, way) = random.Random(seed), self.begun()
            for _ in range(length):
                every = list(self.moves(state))
                if not every:
                    break
                good = [move for move in every if any(word in move[0] for word in FORWARD)]
                label, state = rng.choice(good if good and rng.random() < 0.6 else every)
                way.append(label)
                if state in seen:
                    continue
                seen.add(state)
                if wrong := self.wrong(state, label):
                    return Outcome(len(seen), len(way), False, wrong, way), far
            far += state.done.bit_count() > 1
        return Outcome(len(seen), length, False, "", []), far


FORWARD = ("durable", "publishes", "hears", "restores", "decides", "linked again")


def _way(parents: dict[State, Any], state: State) -> list[str]:
    way = []
    while found := parents[state]:
        state, label = found
        way.append(label)
    return way[::-1]


def put_all(some: tuple[int, ...], places: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    found = dict(zip(places, values, strict=True))
    return tuple(found.get(at, value) for at, value in enumerate(some))


def spend(state: State, what: int) -> State:
    return state._replace(budget=put(state.budget, what, state.budget[what] - 1))


def start_letter(start: int) -> str:
    return chr(ord("A") + start)
