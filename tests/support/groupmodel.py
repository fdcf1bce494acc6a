"""A model of the volumes and trainers of one job, around the real `group.py`, and a search through
all its states.

**One example.** Two ranks save; each volume has two slots, of which one keeps a common checkpoint
(`keep` is 1). A row is a state: for each rank the sequences on its disk, then those in flight (w
waits for a lane and a slot, c is being copied, d is copied). Then what the ranks agree on: the
oldest and the newest common checkpoint. The first column is the move that led to the state.

    move                    rank 0        rank 1        agreed
    (the first state)       - | -         - | -         0, 0
    rank 0 asks for 1       - | 1w        - | -         0, 0
    rank 0 admits 1         - | 1c        - | -         0, 0
    rank 0 copied 1         - | 1d        - | -         0, 0
    rank 0 has durable 1    1 | -         - | -         0, 0
    rank 1 asks for 1       1 | -         - | 1w        0, 0
    rank 1 admits 1         1 | -         - | 1c        0, 0
    rank 1 copied 1         1 | -         - | 1d        0, 0
    rank 1 has durable 1    1 | -         1 | -         1, 1
    rank 0 asks for 2       1 | 2w        1 | -         1, 1
    rank 0 admits 2         1 | 2c        1 | -         1, 1
    rank 0 copied 2         1 | 2d        1 | -         1, 1
    rank 0 has durable 2    1 2 | -       1 | -         1, 1
    rank 1 asks for 2       1 2 | -       1 | 2w        1, 1
    rank 1 admits 2         1 2 | -       1 | 2c        1, 1
    rank 1 copied 2         1 2 | -       1 | 2d        1, 1
    rank 1 has durable 2    1 2 | -       1 2 | -       2, 2
    rank 0 asks for 3       1 2 | 3w      1 2 | -       2, 2
    rank 0 recycles 1       2 | 3w        1 2 | -       2, 2
    rank 0 admits 3         2 | 3c        1 2 | -       2, 2

After "rank 0 has durable 2" rank 0 has no free slot, and still keeps 1: a restore needs 1, since
rank 1 has no 2. Once both ranks have 2, the agreement rises, and rank 0 may recycle 1. From most
states several moves are possible: rank 1 might also ask for 3 before rank 0 recycles 1, and with
`deaths=1` it might die at any moment. The search follows every move.

In the code a checkpoint is one number. Sequence 1 of step 1 and run 1, saved by two ranks, is
`1 << SEQUENCE | 1 << STEP | 1 << RUN | 2`, which is 4234. In flight it is `4234 << 2 | WAITING`.
Ranks (`One`) are kept once and named by a number; a `State` has these numbers, and what the ranks
share.

**What is checked.** The decisions of `group.py` must be right together with what the publishers of
the volumes do with them (`is_superseded` in pcc_volume.c, `pcc_commit_expendable` in pcc_commit.c):
in any order of events, with agreements that arrive late, and with deaths at any moment. The search
visits every state that a small job can reach, breadth first, and asks in each state: if all
processes were killed now, would the ranks restore what they were told is durable? And: does a rank
wait for ever?

Sequences, steps and incarnations are counted from the smallest one that still matters. So a job
that never ends has finitely many states, and the search can be complete.

In most jobs (`has_equal_ranks`) no rule asks which rank is which. Two states that differ only in
the places of their ranks then have the same future: one of them is searched, all are counted.
"""

from __future__ import annotations

import gc
import math
import sys
import types
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pccheck_native.names import Name, Numbers

SOURCE = Path(__file__).parents[2] / "native/pccheck_native/group.py"

#: A checkpoint is one number: sequence, step, incarnation, damaged, world size.
SEQUENCE, STEP, RUN, DAMAGED = 12, 7, 3, 4
WORLD = 3  # the mask
#: A checkpoint in flight is that number with its state in the two lowest bits.
WAITING, COPYING, COPIED = range(3)
#: A process. AWAY: alive, without a session; NEW: connected, and has not restored yet.
DEAD, LIVE, AWAY, NEW = range(4)
ALWAYS = 9  # a budget that does not shrink
UNCHOSEN, NOTHING = 1, 2  # what a start restores: not known yet; no checkpoint
FAR = 1 << 40

Obeyed = tuple[int, int, tuple[int, ...]]
UNTOLD: Obeyed = (0, 0, ())


class Config(NamedTuple):
    """One job, and how often each event may happen to it."""

    name: str
    world: int
    slots: int
    keep: int
    lanes: int
    #: "prompt": every publisher obeys the current agreement. "late": each publisher gets the
    #: current agreement at some later time. "stale": as "late", and the agreement may be an earlier
    #: one. "unseen": as "late", and the daemon looks at the volumes at some later time.
    mode: str = "prompt"
    lead: int = 1  # requests by which a rank may be ahead of the slowest rank
    queue: int = 1  # requests that may wait for a slot, per rank
    fails: int = 0
    skips: int = 0
    cuts: int = 0  # sessions that end, and whose clients reconnect
    deaths: int = 0  # deaths of one rank, or of all ranks
    daemons: int = 0  # deaths of the daemon
    store: bool = False  # copied checkpoints survive the daemon
    blackouts: int = 0  # power failures
    starts: int = 0  # new starts after deaths
    damages: int = 0
    worlds: tuple[int, ...] = ()  # sizes of the later starts, if they differ
    fresh: bool = False  # the later starts restore nothing, and do not wait
    late: bool = False  # the last rank of the first start connects when the others train already
    alone: int = 0  # the rank that saves in a world of one
    limit: int = 1 << 62  # states

    @property
    def ranks(self) -> int:
        return max((self.world, *self.worlds, self.alone + 1))

    @property
    def is_faultless(self) -> bool:
        return not any(self.budget) and not self.late

    @property
    def is_enough(self) -> bool:
        """With so many slots, in lockstep and without faults, no rank waits for a waiting rank."""
        return self.is_faultless and self.lead <= 1 and self.slots >= self.lanes + self.keep

    @property
    def has_equal_ranks(self) -> bool:
        """Whether ranks may change places: no start has fewer ranks or begins without one, and no
        daemon opens volume after volume, of which the later ones know more."""
        whole = self.world > 1 and not self.worlds and not self.late
        return whole and not (self.daemons and self.store)

    @property
    def budget(self) -> tuple[int, ...]:
        return (
            self.fails, self.skips, self.cuts, self.deaths, self.daemons, self.blackouts,
            self.starts, self.damages,
        )  # fmt: skip


FAIL, SKIP, CUT, DEATH, DAEMON, BLACKOUT, START, DAMAGE = range(8)


class Outcome(NamedTuple):
    config: Config
    states: int
    closed: bool  # the search reached every state
    violation: str  # the broken invariant, and how; "" when all hold
    trace: list[str]


Seen = tuple[tuple[int, ...], tuple[int, ...]]


class One(NamedTuple):
    """A rank and its volume."""

    held: tuple[int, ...]  # in the record, oldest first; its trainer was told of each
    flight: tuple[int, ...]
    process: int
    asked: int  # the newest sequence that its process has passed; -1 without a process
    step: int  # that the rank saves next
    obeys: Obeyed  # the last agreement that its publisher got
    lost: tuple[int, ...]  # no longer held; all ranks may have been told of them
    seen: Seen | None  # "unseen": what the daemon last saw held and pending
    lone: bool  # its volume belongs to a start of one rank


Known = tuple[tuple[int, ...], tuple[int, ...], int]


class Kinds:
    """Numbers for what is known of a rank (held, pending, asked): a number is a key that costs
    little to hash."""

    def __init__(self) -> None:
        self._numbers: dict[Known, int] = {}
        self.made: list[Known] = []

    def number(self, known: Known) -> int:
        number = self._numbers.setdefault(known, len(self.made))
        if number == len(self.made):
            self.made.append(known)
        return number


class Rank:
    """A One that the search has met, and values derived from it."""

    __slots__ = (
        "copied", "has", "has_lost", "held", "is_unseen", "known", "moving", "names", "number",
        "numbered", "numbers", "one", "runs", "steps", "waiting", "waits",
    )  # fmt: skip

    def __init__(self, number: int, one: One, config: Config, kinds: Kinds) -> None:
        self.number = number
        self.one = one
        self.has_lost = bool(one.lost)
        pending = tuple([flying >> 2 for flying in one.flight])
        codes = [*one.held, *one.lost, *(flying >> 2 for flying in one.flight)]
        seen = one.seen or ((), ())
        codes += [*seen[0], *seen[1]]
        #: Bit n - 1 is set for sequence n.
        self.numbers = _bits([*map(_sequence, codes), *one.obeys[:2]])
        steps = [code >> STEP & 31 for code in codes]
        self.steps = _bits(steps if one.process == DEAD else [*steps, one.step])
        self.runs = frozenset(code >> RUN & 15 for code in codes)
        self.has = frozenset([*one.held, *pending])
        #: Steps of runs, without and with their sequences.
        self.numbered = frozenset([code & ~DAMAGED for code in self.has])
        self.names = frozenset([code & (1 << SEQUENCE) - 1 for code in self.numbered])
        copied = [flying >> 2 for flying in one.flight if flying & 3 == COPIED]
        self.copied = frozenset([*one.held, *copied])  # the daemon has all bytes
        self.waiting = waiting = sum(flying & 3 == WAITING for flying in one.flight)
        lanes = len(one.flight) - waiting
        self.moving = lanes > 0
        #: The next checkpoint has a lane, and waits for a slot.
        self.waits = (
            waiting > 0 and lanes < config.lanes and (lanes + len(one.held) >= config.slots)
        )
        #: What the daemon knows of the rank, and what is on the disk: their numbers in `kinds`.
        asked = -1 if one.process == AWAY else one.asked
        self.known = kinds.number((*(one.seen or (one.held, pending)), asked))
        self.held = kinds.number((one.held, (), -1))
        self.is_unseen = one.seen is not None and one.seen != (one.held, pending)


class State(NamedTuple):
    ranks: tuple[int, ...]
    last: int  # the newest sequence that was given out
    given: tuple[int, ...]  # checkpoints that some rank may still ask for
    #: The newest sequence that all ranks were told of, or that all had copied when the rules
    #: ended it; -1: none.
    top: int
    ever: int  # number of checkpoints that were common, up to `keep`
    choice: int  # what the start restores; 0: all ranks have restored
    above: int  # ranks that join the start have passed all sequences up to this
    run: int
    world: int
    mark: int  # the newest sequence that a record has named
    budget: tuple[int, ...]
    decided: Obeyed  # "stale": the last agreement


class Smaller(NamedTuple):
    """Numbers what is there from 1 on, in the same order."""

    numbers: tuple[int, ...]
    steps: tuple[int, ...]
    runs: int

    def floor(self, number: int) -> int:
        return bisect_right(self.numbers, number)

    def step(self, step: int) -> int:
        return bisect_right(self.steps, step)

    def code(self, code: int) -> int:
        number, step = self.floor(code >> SEQUENCE), self.step(code >> STEP & 31)
        rest = code & (1 << STEP) - 1
        return (number << SEQUENCE | step << STEP | rest) - (self.runs << RUN)

    def agreement(self, said: Obeyed) -> Obeyed:
        if said == UNTOLD:
            return UNTOLD
        return self.floor(said[0]), self.floor(said[1]), tuple([self.floor(n) for n in said[2]])


Label = tuple[int, str, object]
Made = tuple[Label, State]
#: What one rank may do by itself: label, its next number, the budget it takes (-1: none).
Move = tuple[Label, int, int]


def load() -> Any:
    """A new copy of the real group.py, which a test may change. It needs no compiled module."""
    module = types.ModuleType("group_under_test")
    sys.modules[module.__name__] = module
    exec(compile(SOURCE.read_text(), str(SOURCE), "exec"), module.__dict__)
    return module


class Rules:
    """The decisions, and how volumes and daemon obey them. A mutant changes one of these."""

    def __init__(self) -> None:
        self.group = load()
        self.numbers = Numbers
        self.forgets = False  # a durable checkpoint is not pending, even before the daemon looks
        self.waits_for_flight = True  # a restore waits for checkpoints in flight
        self.takes_gone = False  # a late rank takes a number that others have given up

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        return self.group.agree(ranks, world, keep, short)

    def is_superseded(
        self, held: tuple[int, ...], sequence: int, obeys: Obeyed, lone: bool
    ) -> bool:
        if lone:
            return any(one >> SEQUENCE > sequence for one in held if not one & DAMAGED)
        return sequence < obeys[1] or sequence in obeys[2]

    def is_dispensable(self, sequence: int, obeys: Obeyed) -> bool:
        return sequence < obeys[1]

    def is_lone(self, held: tuple[int, ...], *, lone: bool) -> bool:
        """Whether a volume decides by itself. `lone`: it belongs to a start of one rank."""
        return lone and all(one & WORLD == 1 for one in held)

    def lone_expendable(self, held: tuple[int, ...], slots: int, keep: int) -> list[int]:
        """pcc_commit_expendable of a lone rank, without pins."""
        worst_first = sorted(held, key=lambda one: (not one & DAMAGED, one))
        return worst_first[: -min(keep, max(1, slots - 1))]

    def expendable(self, held: tuple[int, ...], slots: int, obeys: Obeyed) -> list[int]:
        """pcc_commit_expendable of a group, without pins."""
        oldest, newest, given_up = obeys
        gone = [one for one in held if one >> SEQUENCE < oldest or one >> SEQUENCE in given_up]
        if any(one >> SEQUENCE > newest for one in held if one not in gone):
            return gone
        while len(held) - len(gone) >= slots:
            free = [
                one
                for one in held
                if one not in gone and self.is_dispensable(one >> SEQUENCE, obeys)
            ]
            if not free:
                break
            gone.append(min(free, key=lambda one: (not one & DAMAGED, one)))
        return gone


class Search:
    """All states of one config, and whether the invariants hold in each. `in_places`: also those
    that differ from others only in the places of their ranks are searched."""

    def __init__(self, config: Config, rules: Rules, *, in_places: bool = False) -> None:
        self.config = config
        self.in_places = in_places or not config.has_equal_ranks
        self.rules = rules
        self.late = config.mode != "prompt"
        self.stale = config.mode == "stale"
        self.unseen = config.mode == "unseen"
        self.is_faultless = config.is_faultless
        self._ranks: list[Rank] = []
        self._numbers: dict[One, int] = {}
        self._kinds = Kinds()
        # Results of pure functions, which get the same arguments again and again:
        self._lowered: dict[tuple[int, Smaller], int] = {}
        self._moves: dict[Any, list[Move]] = {}
        self._asked: dict[tuple[int, int], int] = {}
        self._told: dict[tuple[int, Obeyed], int] = {}
        self._records: dict[Any, tuple[int, bool]] = {}
        self._gone: dict[Any, tuple[int, ...]] = {}
        self._agreements: dict[Any, Obeyed] = {}
        self._restored: dict[Any, tuple[int, int, str]] = {}
        self._taken: dict[Any, int] = {}
        self._real: dict[int, Any] = {}

    # -- the search ----------------------------------------------------------------------------

    def run(self) -> Outcome:
        gc.disable()  # states have no cycles, and there are millions
        try:
            outcome = self._walk(None)
            if not outcome.violation:
                return outcome
            self.in_places = True
            return self._walk({})  # again, to record the trace
        finally:
            gc.enable()

    def _walk(self, parents: dict[State, tuple[State, Label]] | None) -> Outcome:
        config = self.config
        frontier = [self.first()]
        seen = set(frontier)
        states = 1
        met: set[State] = set()  # before canonical(): half of them come again
        while frontier:
            following: list[State] = []
            for state in frontier:
                for label, found in self.successors(state):
                    raw = self._in_order(found)
                    known = len(met)  # a state is hashed once: its hash takes longer than the rest
                    met.add(raw)
                    if len(met) == known:
                        continue
                    made = self._in_order(self.canonical(raw))
                    known = len(seen)
                    seen.add(made)
                    if len(seen) == known:
                        continue
                    states += self._places(made)
                    if parents is not None:
                        parents[made] = state, label
                    wrong = self.violation(made)
                    if wrong:
                        return Outcome(config, states, False, wrong, self._way(parents, made))
                    following.append(made)
                if states >= config.limit:
                    return Outcome(config, states, False, "", [])
            frontier = following
        return Outcome(config, states, True, "", [])

    def _in_order(self, state: State) -> State:
        """The state that stands for all with these ranks in other places."""
        if self.in_places:
            return state
        ranks = state[0]
        if len(ranks) == 2 and ranks[0] <= ranks[1]:
            return state
        if ranks == (ordered := tuple(sorted(ranks))):
            return state
        return tuple.__new__(State, (ordered, *state[1:]))

    def _places(self, state: State) -> int:
        """For how many states it stands."""
        if self.in_places:
            return 1
        ranks = state.ranks
        if len(ranks) == 2:
            return 1 + (ranks[0] != ranks[1])
        return math.factorial(len(ranks)) // math.prod(
            math.factorial(ranks.count(rank)) for rank in set(ranks)
        )

    def _way(self, parents: dict[State, tuple[State, Label]] | None, state: State) -> list[str]:
        way: list[str] = []
        while parents is not None and state in parents:
            before, (rank, verb, what) = parents[state]
            who = f"rank {rank}" if rank >= 0 else "job"
            way.append(f"{f'{who} {verb} {what}':<32} {self.told(state)}")
            state = before
        return way[::-1]

    def told(self, state: State) -> str:
        """A state as text."""
        parts = []
        for number in state.ranks:
            one = self._ranks[number].one
            held = " ".join(_name(code) for code in one.held)
            flight = " ".join(f"{_name(f >> 2)}:{'wcd'[f & 3]}" for f in one.flight)
            parts.append(
                f"[{('dead', 'live', 'away', 'new')[one.process]} asked {one.asked} "
                f"step {one.step} "
                f"held ({held}) flight ({flight}) obeys {one.obeys}"
                f"{f' seen {one.seen}' if one.seen else ''}]"
            )
        return f"{' '.join(parts)} last {state.last} top {state.top} ever {state.ever}"

    def row(self, state: State) -> list[str]:
        """A state as in the example at the top: a cell for each rank, and the agreement."""
        ones = [self._ranks[number].one for number in state.ranks]
        held = [_list(map(_sequence, one.held)) for one in ones]
        flight = [_list(f"{f >> SEQUENCE + 2}{'wcd'[f & 3]}" for f in one.flight) for one in ones]
        oldest, newest, _ = self.agreed(state)
        cells = [
            f"{disk or '-'} | {moving or '-'}" for disk, moving in zip(held, flight, strict=True)
        ]
        return [*cells, f"{oldest}, {newest}"]

    # -- states --------------------------------------------------------------------------------

    def first(self) -> State:
        config = self.config
        seen = ((), ()) if self.unseen else None
        live = self.number(One((), (), LIVE, 0, 1, UNTOLD, (), seen, config.world == 1))
        dead = self.number(One((), (), DEAD, -1, 0, UNTOLD, (), seen, False))
        members = self._members(config.world)
        if config.late:
            members = members[:-1]
        ranks = tuple(live if rank in members else dead for rank in range(config.ranks))
        choice = NOTHING if config.late else 0
        return State(ranks, 0, (), -1, 0, choice, 0, 1, config.world, 0, config.budget, UNTOLD)

    def _members(self, world: int) -> Sequence[int]:
        """The ranks of a start."""
        return range(world) if world > 1 else (self.config.alone,)

    def _savers(self, code: int, place: int) -> Sequence[int]:
        """The ranks of the start that saved a checkpoint which the rank `place` has."""
        return range(code & WORLD) if code & WORLD > 1 else (place,)

    def number(self, one: One) -> int:
        """The number by which states name a rank. The agreement that its publisher obeys is reduced
        to what can still matter: later checkpoints of the rank have higher sequences."""
        obeys = one.obeys
        if obeys is not UNTOLD:
            mine = [code >> SEQUENCE for code in one.held]
            mine += [flying >> SEQUENCE + 2 for flying in one.flight]
            cut = _cut(obeys, min(mine, default=FAR), mine)
            one = one._replace(obeys=UNTOLD if cut == UNTOLD else cut)
        number = self._numbers.get(one)
        if number is None:
            number = self._numbers[one] = len(self._ranks)
            self._ranks.append(Rank(number, one, self.config, self._kinds))
        return number

    def canonical(self, state: State) -> State:
        """The same state with the smallest sequences, steps and incarnations: only their order
        matters."""
        known = self._ranks
        ranks, last, given, top, ever, choice, above, run, world, mark, budget, decided = state
        found = [known[number] for number in ranks]
        numbers = steps = 0
        has_lost = False
        for rank in found:
            numbers |= rank.numbers
            steps |= rank.steps
            has_lost = has_lost or rank.has_lost
        if has_lost and (kept := self._forget(state)) != ranks:
            ranks = kept
            found = [known[number] for number in ranks]
            numbers = steps = 0
            for rank in found:
                numbers |= rank.numbers
                steps |= rank.steps
        if given:
            ones = [found[place].one for place in self._members(world)]
            next_ones = [one.step for one in ones if one.process in (LIVE, AWAY)]
            if choice:
                next_ones.append(self._first_step(state))
            lowest = min(next_ones, default=FAR)
            given = tuple(
                [code for code in given if lowest <= code >> STEP & 31 and code >> RUN & 15 == run]
            )
        if mark and not (budget[DAEMON] or budget[BLACKOUT]):
            mark = 0
        if not choice:
            above = 0
        named = [*given, choice] if choice > NOTHING else given
        if named:
            numbers |= _bits([code >> SEQUENCE for code in named])
            steps |= _bits([code >> STEP & 31 for code in named])
        if self.stale:
            decided = _cut(decided, (numbers & -numbers).bit_length() or FAR, _names(numbers))
            numbers |= _bits(decided[:2])
        if numbers == (1 << last) - 1 and not steps & steps + 1:
            return tuple.__new__(State, (
                ranks, last, given, top, ever, choice, above, run, world, mark, budget, decided,
            ))  # fmt: skip
        runs = min([run, *(least for rank in found for least in rank.runs)]) - 1
        smaller = Smaller(_names(numbers), _names(steps), runs)
        return tuple.__new__(State, (
            tuple([self._smaller(number, smaller) for number in ranks]),
            len(smaller.numbers),
            tuple([smaller.code(code) for code in given]),
            top if top < 0 else smaller.floor(top),
            ever,
            smaller.code(choice) if choice > NOTHING else choice,
            smaller.floor(above),
            run - runs,
            world,
            smaller.floor(mark),
            budget,
            smaller.agreement(decided) if self.stale else decided,
        ))  # fmt: skip

    def _forget(self, state: State) -> tuple[int, ...]:
        """The ranks, without lost checkpoints that some rank can never have been told of."""
        ones = [self._ranks[number].one for number in state.ranks]
        made = list(state.ranks)
        for rank, one in enumerate(ones):
            lost = tuple(
                code
                for code in one.lost
                if code >> SEQUENCE > state.top
                and all(
                    code in ones[other].held
                    or code in ones[other].lost
                    or -1 < ones[other].asked < code >> SEQUENCE
                    or (state.choice and ones[other].process == DEAD)
                    or any(flying >> 2 == code for flying in ones[other].flight)
                    for other in self._savers(code, rank)
                )
            )
            if lost != one.lost:
                made[rank] = self.number(one._replace(lost=lost))
        return tuple(made)

    def _smaller(self, number: int, smaller: Smaller) -> int:
        key = number, smaller
        made = self._lowered.get(key)
        if made is None:
            one = self._ranks[number].one
            made = self._lowered[key] = self.number(
                One(
                    tuple([smaller.code(code) for code in one.held]),
                    tuple([smaller.code(f >> 2) << 2 | f & 3 for f in one.flight]),
                    one.process,
                    one.asked if one.asked < 0 else smaller.floor(one.asked),
                    smaller.step(one.step) if one.process != DEAD else 0,
                    smaller.agreement(one.obeys),
                    tuple([smaller.code(code) for code in one.lost]),
                    one.seen
                    and (
                        tuple([smaller.code(code) for code in one.seen[0]]),
                        tuple([smaller.code(code) for code in one.seen[1]]),
                    ),
                    one.lone,
                )
            )
        return made

    # -- what happens --------------------------------------------------------------------------

    def successors(self, state: State) -> list[Made]:
        ranks = [self._ranks[number] for number in state.ranks]
        found: list[Made] = []
        agreed = self.agreed(state)
        said = self._said(state, agreed) if self.late else []
        heard = [state.decided] if self.stale else said
        for place in self._asking(state):
            found.append(self._begin(state, place, ranks[place]))
        for place, rank in enumerate(ranks):
            if rank.one.flight:
                self._own(found, state, place, rank, agreed)
            if self.late:
                self._hear(found, state, place, rank, heard)
            self._suffer(found, state, place, rank.one)
        if self.stale:
            for decided in said:
                if decided != state.decided:
                    found.append(((-1, "agrees", decided), state._replace(decided=decided)))
        if any(state.budget):
            self._disasters(found, state, [rank.one for rank in ranks])
        return found

    def _said(self, state: State, agreed: Obeyed) -> list[Obeyed]:
        """Possible agreements: the daemon makes one for each rank that waits for a slot."""
        ranks = enumerate(state.ranks)
        short = [place for place, number in ranks if self._ranks[number].waits]
        return [agreed, *(self.agreed(state, place) for place in short)]

    def _own(self, found: list[Made], state: State, place: int, rank: Rank, agreed: Obeyed) -> None:
        """What the volume and the queue of a rank do by themselves."""
        one, budget = rank.one, state.budget
        obeys = one.obeys if self.late else agreed
        room = obeys
        if rank.waits and not self.late:
            room = self.agreed(state, place)
        may_skip, may_fail = budget[SKIP] > 0, budget[FAIL] > 0
        key = rank.number, obeys, room, may_skip, may_fail
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = list(self._all_moves(*key, place))
        for label, number, cost in moves:
            if cost < 0:
                made = self._at_end(state, place, number)
            else:
                made = _spend(_at(state, place, number), cost)
            found.append(((place, label[1], label[2]), made))
        for flying in one.flight:
            if flying & 3 == COPIED:
                found.append(self._publish(state, place, rank, flying, obeys))

    def _asking(self, state: State) -> set[int]:
        """The ranks that may ask for their next checkpoint."""
        ranks = [self._ranks[number] for number in state.ranks]
        steps = [rank.one.step for rank in ranks if rank.one.process in (LIVE, AWAY)]
        if state.choice:  # the other ranks wait for those that have not restored
            steps.append(self._first_step(state))
        below = min(steps, default=0) + self.config.lead
        return {
            place
            for place, rank in enumerate(ranks)
            if rank.one.process == LIVE
            and rank.one.step < below
            and rank.waiting < self.config.queue
        }

    def _begin(self, state: State, place: int, rank: Rank) -> Made:
        one = rank.one
        number, is_found = self._take(state, one)
        if is_found and (number <= one.asked or not self._is_there(state, number)):
            passed = one._replace(asked=max(one.asked, number), step=one.step + 1)
            return (place, "skips", number), _at(state, place, self.number(passed))
        code = number << SEQUENCE | one.step << STEP | state.run << RUN | state.world
        key = rank.number, code
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = self._ask(one, code)
        made = _at(state, place, asked)
        if number > state.last:
            given = (*state.given, code)
            made = tuple.__new__(State, (made[0], number, given, *made[3:]))
        return (place, "asks for", number), made

    def _ask(self, one: One, code: int) -> int:
        """The rank with a checkpoint more in flight."""
        seen = (one.seen[0], (*one.seen[1], code)) if one.seen is not None else None
        return self.number(
            one._replace(
                flight=(*one.flight, code << 2),
                asked=code >> SEQUENCE,
                step=one.step + 1,
                seen=seen,
                lone=code & WORLD == 1,
            )
        )

    def _take(self, state: State, one: One) -> tuple[int, bool]:
        """The sequence of the next name, from the real Numbers, and whether another rank has asked
        for that name before."""
        key = state.last, state.given, state.run, one.step, one.asked
        taken = self._taken.get(key)
        if taken is None:
            numbers = self.rules.numbers()
            for code in state.given:
                number = code >> SEQUENCE
                numbers.give(_as_name(code), number - 1)
                assert numbers.last == number
            numbers.passed(state.last)
            name = Name(state.run, 0, 0, one.step, 0)
            found = numbers.find(name)
            taken = (found, True) if found else (numbers.give(name, one.asked), False)
            self._taken[key] = taken
        return taken

    def _is_there(self, state: State, number: int) -> bool:
        """As `Job._is_there`."""
        if self.rules.takes_gone:
            return True
        said = [*self._obeyed(state), state.decided, self.agreed(state)]
        if any(number in each[2] for each in said):
            return False
        ranks = (self._ranks[place] for place in state.ranks)
        return any(code >> SEQUENCE == number for rank in ranks for code in rank.has)

    def _all_moves(
        self, number: int, obeys: Obeyed, room: Obeyed, may_skip: bool, may_fail: bool, place: int
    ) -> Iterator[Move]:
        """Events that change only the rank itself."""
        rank = self._ranks[number]
        one, config = rank.one, self.config
        waiting = [flying for flying in one.flight if flying & 3 == WAITING]
        lanes = len(one.flight) - len(waiting)
        for flying in waiting[:1]:
            sequence = flying >> SEQUENCE + 2
            if sequence in room[2]:
                yield (place, "gives up", sequence), self._end(one, flying, seen=True), -1
            elif lanes < config.lanes and not rank.waits:
                flight = _put(one.flight, flying, flying | COPYING)
                yield (place, "admits", sequence), self.number(one._replace(flight=flight)), -1
            elif may_skip:
                yield (place, "skips", sequence), self._end(one, flying, seen=True), SKIP
        gone = self.expendable(one.held, room, one.lone) if rank.waits else ()
        if gone:
            held = tuple(code for code in one.held if code not in gone)
            made = one._replace(held=held, lost=tuple(sorted((*one.lost, *gone))))
            yield (place, "recycles", _list(map(_sequence, gone))), self.number(made), -1
        for flying in one.flight:
            sequence = flying >> SEQUENCE + 2
            if flying & 3 == COPYING:
                flight = _put(one.flight, flying, flying ^ COPYING ^ COPIED)
                yield (place, "copied", sequence), self.number(one._replace(flight=flight)), -1
            if may_fail and flying & 3 != WAITING:
                yield (place, "fails", sequence), self._end(one, flying), FAIL

    def _end(self, one: One, flying: int, *, seen: bool = False) -> int:
        """The rank without a checkpoint that has ended. `seen`: the daemon itself ended it."""
        known = one.seen
        if known is not None and seen:
            known = known[0], tuple(code for code in known[1] if code != flying >> 2)
        return self.number(one._replace(flight=_put(one.flight, flying), seen=known))

    def _publish(self, state: State, place: int, rank: Rank, flying: int, obeys: Obeyed) -> Made:
        """The publisher supersedes the checkpoint, or writes a record with it."""
        code = flying >> 2
        sequence = code >> SEQUENCE
        key = rank.number, flying, obeys
        found = self._records.get(key)
        if found is None:
            found = self._records[key] = self._record(rank.one, flying, obeys)
        number, durable = found
        if not durable:
            return (place, "supersedes", sequence), self._at_end(state, place, number)
        top, ever = state.top, state.ever
        others = [
            self._ranks[state.ranks[other]].one
            for other in self._savers(code, place)
            if other != place
        ]
        if sequence > top and all(code in one.held or code in one.lost for one in others):
            top = sequence
        if ever < self.config.keep and all(code in one.held for one in others):
            ever += 1
        if top != state.top or ever != state.ever:
            state = state._replace(top=top, ever=ever)
        made = self._at_end(state, place, number)
        if sequence > state.mark:
            made = made._replace(mark=sequence)
        return (place, "has durable", sequence), made

    def _at_end(self, state: State, place: int, number: int) -> State:
        """With another rank in this place, a checkpoint of which the rules have ended. If all ranks
        had copied it without a failure, it counts as if they were told that it is durable."""
        made = _at(state, place, number)
        top = state.top
        for code in self._ranks[state.ranks[place]].has - self._ranks[number].has:
            sequence = code >> SEQUENCE
            if sequence > top and not self.config.damages:
                savers = [self._ranks[state.ranks[other]] for other in self._savers(code, place)]
                if all(code in rank.copied or code in rank.one.lost for rank in savers):
                    top = sequence
        return made if top == state.top else made._replace(top=top)

    def _record(self, one: One, flying: int, obeys: Obeyed) -> tuple[int, bool]:
        code = flying >> 2
        flight = _put(one.flight, flying)
        lone = self.rules.is_lone((*one.held, code), lone=one.lone)
        if self.rules.is_superseded(one.held, code >> SEQUENCE, obeys, lone):
            return self.number(one._replace(flight=flight)), False
        full = tuple(sorted((*one.held, code)))
        gone = self.expendable(full, obeys, one.lone)
        assert code not in gone, "PCC_ASSERT in pcc_volume_publish"
        seen = one.seen
        if seen is not None and self.rules.forgets:
            seen = seen[0], tuple(one for one in seen[1] if one != code)
        return self.number(
            one._replace(
                held=tuple(kept for kept in full if kept not in gone),
                flight=flight,
                lost=tuple(sorted((*one.lost, *gone))),
                seen=seen,
            )
        ), True

    def expendable(self, held: tuple[int, ...], obeys: Obeyed, lone: bool) -> tuple[int, ...]:
        key = held, obeys, lone
        gone = self._gone.get(key)
        if gone is None:
            rules, slots = self.rules, self.config.slots
            gone = self._gone[key] = tuple(
                rules.lone_expendable(held, slots, self.config.keep)
                if rules.is_lone(held, lone=lone)
                else rules.expendable(held, slots, obeys)
            )
        return gone

    def _hear(
        self, found: list[Made], state: State, place: int, rank: Rank, agreements: list[Obeyed]
    ) -> None:
        """The publisher gets an agreement; the daemon looks at the volume."""
        one = rank.one
        if rank.is_unseen:
            now = one.held, tuple([flying >> 2 for flying in one.flight])
            number = self.number(one._replace(seen=now))
            found.append(((place, "is looked at", ""), _at(state, place, number)))
        for said in agreements:
            heard = self._told.get((rank.number, said))
            if heard is None:
                heard = self.number(one._replace(obeys=said))
                self._told[rank.number, said] = heard
            if heard != rank.number:
                found.append(((place, "hears", said), _at(state, place, heard)))

    def _suffer(self, found: list[Made], state: State, place: int, one: One) -> None:
        """Faults of one rank."""
        budget = state.budget
        if one.process == LIVE:
            if budget[CUT]:
                made = _spend(self._cut(state, place, AWAY), CUT)
                found.append(((place, "loses its session", ""), made))
            if budget[DEATH]:
                made = _spend(self._cut(state, place, DEAD), DEATH)._replace(choice=0)
                found.append(((place, "dies", ""), made))
        elif one.process == AWAY:
            number = self.number(one._replace(process=LIVE))
            found.append(((place, "reconnects", ""), _at(state, place, number)))
        elif state.choice and place in self._members(state.world):
            self._join(found, state, place, one)
        if budget[DAMAGE] and not state.choice:
            for code in one.held:
                if not code & DAMAGED:
                    rots = self._damage(state, place, one, code)
                    found.append(((place, "rots", _name(code)), rots))

    def _join(self, found: list[Made], state: State, place: int, one: One) -> None:
        """A process of the new start connects. It restores when no checkpoint of the run before is
        in flight any more."""
        if one.process == DEAD:
            joined = one._replace(process=NEW, asked=state.above)
            if self.config.fresh or self.config.late:
                joined = joined._replace(process=LIVE, step=self._first_step(state))
            made = _at(state, place, self.number(joined))
            found.append(((place, "connects", ""), self._all_joined(made)))
            return
        if state.budget[DEATH]:
            made = _spend(self._cut(state, place, DEAD), DEATH)
            found.append(((place, "dies", ""), made))
        if self.rules.waits_for_flight and self._has_older_flight(state):
            return
        if state.choice == UNCHOSEN:
            state = state._replace(choice=max(self.restored(state)[0], NOTHING))
        joined = one._replace(process=LIVE, step=self._first_step(state))
        made = _at(state, place, self.number(joined))
        found.append(((place, "restores", _name(state.choice)), self._all_joined(made)))

    def _obeyed(self, state: State) -> list[Obeyed]:
        return [self._ranks[number].one.obeys for number in state.ranks]

    def _all_joined(self, state: State) -> State:
        """The start is complete once all its ranks have restored."""
        ranks = [self._ranks[state.ranks[place]].one for place in self._members(state.world)]
        if all(one.process in (LIVE, AWAY) for one in ranks):
            return state._replace(choice=0)
        return state

    def _first_step(self, state: State) -> int:
        """The first step that a start saves."""
        return 1 + (state.choice >> STEP & 31 if state.choice > NOTHING else 0)

    def _has_older_flight(self, state: State) -> bool:
        """Whether the run before has checkpoints in flight, for which a restore waits."""
        return any(
            flying >> RUN + 2 & 15 != state.run
            for number in state.ranks
            for flying in self._ranks[number].one.flight
        )

    def _cut(self, state: State, place: int, process: int) -> State:
        """A session ends: only copied checkpoints stay in flight."""
        one = self._ranks[state.ranks[place]].one
        flight = tuple(flying for flying in one.flight if flying & 3 == COPIED)
        seen = one.seen
        if seen is not None:
            over = {flying >> 2 for flying in one.flight if flying & 3 != COPIED}
            seen = seen[0], tuple(code for code in seen[1] if code not in over)
        step, asked = (one.step, one.asked) if process != DEAD else (0, -1)
        return _at(
            state,
            place,
            self.number(
                one._replace(flight=flight, process=process, asked=asked, step=step, seen=seen)
            ),
        )

    def _all_cut(self, state: State, process: int) -> State:
        for place, number in enumerate(state.ranks):
            was = self._ranks[number].one.process
            if was != DEAD:  # a NEW process connects again
                state = self._cut(state, place, DEAD if was == NEW else process)
        return state

    def _damage(self, state: State, place: int, one: One, code: int) -> State:
        """Damages a checkpoint. The promise shrinks to what all ranks still have; to nothing while
        publishers may not know of the damage."""
        held = tuple(other | DAMAGED if other == code else other for other in one.held)
        made = _spend(_at(state, place, self.number(one._replace(held=held))), DAMAGE)
        chosen, count, _ = self.restored(made)
        top = -1 if self.late or chosen <= NOTHING else chosen >> SEQUENCE
        return made._replace(top=top, ever=min(made.ever, count))

    def _disasters(self, found: list[Made], state: State, ones: list[One]) -> None:
        """Faults of all ranks at once."""
        budget = state.budget
        live = sum([one.process != DEAD for one in ones])
        if budget[DEATH] and live > 1:
            made = _spend(self._all_cut(state, DEAD), DEATH)._replace(choice=0)
            found.append(((-1, "ends: all ranks die", ""), made))
        if budget[DAEMON]:
            made = _spend(self._daemon_dies(state, self.config.store), DAEMON)
            found.append(((-1, "is served by another daemon", ""), made))
        if budget[BLACKOUT]:
            made = self._daemon_dies(self._all_cut(state, DEAD), False)
            found.append(
                ((-1, "ends: the power fails", ""), _spend(made, BLACKOUT)._replace(choice=0))
            )
        members = self._members(state.world)
        if budget[START] and any(ones[place].process == DEAD for place in members):
            self._start(found, state)

    def _daemon_dies(self, state: State, store: bool) -> State:
        """The next daemon opens the volumes, and with a store continues copied checkpoints."""
        made = self._all_cut(state, AWAY)
        last = state.mark
        for place, number in enumerate(made.ranks):
            one = self._ranks[number].one
            flight = one.flight if store else ()
            codes = tuple(flying >> 2 for flying in flight)
            last = max((last, *map(_sequence, codes)))
            seen = (one.held, codes) if one.seen is not None else None
            made = _at(
                made,
                place,
                self.number(
                    one._replace(
                        flight=flight, obeys=UNTOLD, seen=seen,
                        asked=last if one.process == AWAY else one.asked,
                    )
                ),
            )  # fmt: skip
        return made._replace(last=last, given=(), above=last, decided=UNTOLD)

    def _start(self, found: list[Made], state: State) -> None:
        """The launcher ends the remaining ranks and starts again; copied ones stay in flight."""
        world = state.world
        if self.config.worlds:
            turn = (self.config.starts - state.budget[START]) % len(self.config.worlds)
            world = self.config.worlds[turn]
        made = _spend(self._all_cut(state, DEAD), START)._replace(
            run=state.run + 1, world=world, choice=NOTHING if self.config.fresh else UNCHOSEN,
            given=(), above=state.last,
        )  # fmt: skip
        found.append(((-1, f"starts with {world} ranks", ""), made))

    # -- what the real functions say -----------------------------------------------------------

    def agreed(self, state: State, short: int = -1) -> Obeyed:
        known = self._ranks
        key = (*[known[number].known for number in state.ranks], state.world, short)
        found = self._agreements.get(key)
        if found is None:
            agreement = self.rules.agree(
                self._as_ranks(key[:-2]), state.world, self.config.keep, [short][: short + 1]
            )
            found = self._agreements[key] = (
                agreement.oldest, agreement.newest, tuple(sorted(agreement.given_up)),
            )  # fmt: skip
        return found

    def _as_ranks(self, kinds: Iterable[int]) -> dict[int, Any]:
        group = self.rules.group
        known = [self._kinds.made[kind] for kind in kinds]
        return {
            rank: group.Rank(
                held=[self._as_held(code) for code in held],
                pending={code >> SEQUENCE: code & WORLD for code in pending},
                asked=asked if asked >= 0 else None,
            )
            for rank, (held, pending, asked) in enumerate(known)
        }

    def _as_held(self, code: int) -> Any:
        found = self._real.get(code)
        if found is None:
            found = self._real[code] = self.rules.group.Held(
                code >> SEQUENCE, code >> STEP & 31, code >> RUN & 15, code & WORLD,
                not code & DAMAGED,
            )  # fmt: skip
        return found

    def restored(self, state: State) -> tuple[int, int, str]:
        """What all ranks would restore if all processes were killed now (0: refused, or NOTHING),
        how many checkpoints are common, and what is wrong with that ("" when it is right)."""
        known = self._ranks
        key = tuple([known[number].held for number in state.ranks])
        found = self._restored.get(key)
        if found is None:
            found = self._restored[key] = self._restore(key)
        return found

    def _restore(self, kinds: tuple[int, ...]) -> tuple[int, int, str]:
        group = self.rules.group
        ranks = self._as_ranks(kinds)
        volumes = [self._kinds.made[kind][0] for kind in kinds]
        common = group.common(ranks)
        world = common[0].world_size if common else self.config.world
        holder = next((r for r in ranks if common and common[0] in ranks[r].held), 0)
        savers = range(world) if world > 1 else (holder,)
        answers = [group.choose(ranks, rank, world) for rank in savers]
        answer = answers[0]
        if any(other != answer for other in answers):
            return 0, 0, f"(2) the ranks restore different ones: {answers}"
        if answer is None:
            wrong = "(3) None although a record holds something" if any(volumes) else ""
            return NOTHING, 0, wrong
        if isinstance(answer, group.Refused):
            return 0, 0, ""
        code = (
            answer.sequence << SEQUENCE | answer.step << STEP | answer.incarnation << RUN
            | answer.world_size
        )  # fmt: skip
        if not all(code in volumes[rank] for rank in savers):
            return code, len(common), f"(2) not every rank has {_name(code)}"
        return code, len(common), ""

    # -- what must always hold -----------------------------------------------------------------

    def violation(self, state: State) -> str:
        """The invariant that does not hold; "" when all hold."""
        chosen, common, wrong = self.restored(state)
        top = state.top
        if wrong:
            return wrong
        if top >= 0 and chosen <= NOTHING:
            return f"(3) nothing is restored, and all ranks had {top}"
        if chosen > NOTHING and chosen >> SEQUENCE < top:
            return f"(1) {_name(chosen)} is restored, and all ranks had {top}"
        if common < state.ever and not self.config.damages:
            return f"(6) {common} common are left of {state.ever}"
        if state.choice > NOTHING and chosen != state.choice:
            return f"(2) a rank restores {_name(chosen)}, another one {_name(state.choice)}"
        if not self.config.daemons and (twice := self._numbered_twice(state)):
            return twice
        if self.is_faultless:
            said = self.agreed(state)
            if any(number > said[1] for number in said[2]):
                return f"(7) {said[2]} are given up, without any fault"
        ranks = [self._ranks[number] for number in state.ranks]
        short = [place for place, rank in enumerate(ranks) if rank.waits]
        if not short:
            return ""
        if self.config.is_enough:
            for place in short:
                if not self._is_coming(state, ranks, place):
                    return f"(5) rank {place} waits for a slot, and for a rank that waits"
        if not any(
            rank.moving
            or rank.is_unseen  # the daemon will look
            or rank.one.process == AWAY
            or (rank.one.flight and self._can_go_on(state, place, rank))
            for place, rank in enumerate(ranks)
        ):
            return self._stuck(state, short)
        return ""

    def _numbered_twice(self, state: State) -> str:
        """A step of a run with two sequences; "" when there is none."""
        ranks = [self._ranks[number] for number in state.ranks]
        names = ranks[0].names.union(*[rank.names for rank in ranks])
        if len(names) == len(ranks[0].numbered.union(*[rank.numbered for rank in ranks])):
            return ""
        found: dict[int, int] = {}
        for rank in ranks:
            for code in rank.numbered:
                step = code & (1 << SEQUENCE) - 1
                if found.setdefault(step, code >> SEQUENCE) != code >> SEQUENCE:
                    return f"(8) step {code >> STEP & 31} has two sequences"
        return ""

    def _can_go_on(self, state: State, place: int, rank: Rank) -> bool:
        """The rank has or gets a slot for its next checkpoint, or that checkpoint is given up."""
        one = rank.one
        if not rank.waits:
            return True
        said = self.agreed(state, place)
        head = next(flying for flying in one.flight if flying & 3 == WAITING)
        given_up = head >> SEQUENCE + 2 in said[2]
        return given_up or bool(self.expendable(one.held, said, one.lone))

    def _is_coming(self, state: State, ranks: list[Rank], place: int) -> bool:
        """The rank gets its slot without a rank that waits for a slot: some checkpoint can still
        become common, or be given up."""
        if self.expendable(ranks[place].one.held, self.agreed(state, place), ranks[place].one.lone):
            return True
        if any(rank.is_unseen for rank in ranks):
            return True
        members = [ranks[member] for member in self._members(state.world)]
        able = [self._can_go_on(state, other, rank) for other, rank in enumerate(members)]
        flights = [
            {flying >> 2 for flying in rank.one.flight if flying & 3 != WAITING} for rank in members
        ]
        every = {code for rank in members for code in rank.one.held}.union(*flights)
        return any(
            not all(code in rank.one.held for rank in members)
            and all(
                code in rank.one.held or code in flight or goes_on
                for rank, flight, goes_on in zip(members, flights, able, strict=True)
            )
            for code in every
        )

    def _stuck(self, state: State, short: list[int]) -> str:
        """No waiting rank can go on. Then the ranks for which it waits must be able to ask."""
        known = self._as_ranks([self._ranks[number].known for number in state.ranks])
        for place in short:
            agreement = self.rules.agree(known, state.world, self.config.keep, [place])
            late = self.rules.group.lagging(known, state.world, place, agreement)
            if not set(late) & self._asking(state):
                return f"(4) rank {place} waits for a slot, and for no rank that asks: {late}"
            if self.config.is_enough:
                return f"(5) rank {place} waits for a slot, in lockstep, for {late}"
        return ""


def _as_name(code: int) -> Name:
    return Name(code >> RUN & 15, 0, 0, code >> STEP & 31, 0)


def _sequence(code: int) -> int:
    return code >> SEQUENCE


def _list(items: Iterable[object]) -> str:
    return " ".join(map(str, items))


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number >> 1
    return bits


def _names(bits: int) -> tuple[int, ...]:
    return tuple([bit + 1 for bit in range(bits.bit_length()) if bits >> bit & 1])


def _at(state: State, place: int, number: int) -> State:
    """The state with another rank in this place."""
    ranks = state[0]
    return tuple.__new__(State, ((*ranks[:place], number, *ranks[place + 1 :]), *state[1:]))


def _cut(obeys: Obeyed, least: int, there: Iterable[int]) -> Obeyed:
    """The part of an agreement that matters for sequences from `least` on, and for `there`."""
    oldest, newest, given_up = obeys
    return (
        oldest if oldest > least else 0,
        newest if newest >= least else 0,
        tuple([number for number in given_up if number in there]),
    )


def _put(flight: tuple[int, ...], old: int, *new: int) -> tuple[int, ...]:
    at = flight.index(old)
    return (*flight[:at], *new, *flight[at + 1 :])


def _spend(state: State, what: int) -> State:
    left = state.budget[what]
    if left >= ALWAYS:
        return state
    return state._replace(budget=(*state.budget[:what], left - 1, *state.budget[what + 1 :]))


def _name(code: int) -> str:
    if code <= NOTHING:
        return "nothing"
    rotten = "!" if code & DAMAGED else ""
    return f"{code >> SEQUENCE}/run{code >> RUN & 15}.step{code >> STEP & 31}{rotten}"
