"""The names of checkpoints (names.py), and what ranks get that make unequal calls.

The enumeration plays short programmes of calls on all ranks, in each order that lockstep allows
(nobody ends a step that another rank has not begun) or in any order, with one or two odd calls. It
uses the client's `Steps` and the daemon's `Job`. Two things must hold in each:

(unsafe) One sequence is never given to two states.
(lost) After the odd call and a restore by all, the ranks have their next checkpoints in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from pccheck.job.steps import Steps
from pccheck_native.names import KEPT, Bases, Name, Numbers, in_later_line, why_apart
from pccheckd.group.idle import IdleDisk
from pccheckd.group.job import Job
from pccheckd.group.starts import StartKind, Starts
from tests.support.jobs import CONFIG, Tenant, arrival, owner, save_request

# -- numbers ------------------------------------------------------------------------------------


def name(step: int, row: int = 0, *, base: int = 0, descents: int = 0, start: int = 1) -> Name:
    return Name(start, base, descents, step, row)


def test_a_name_has_one_number() -> None:
    numbers = Numbers()
    assert [numbers.give(name(1), 0), numbers.give(name(2), 1)] == [1, 2]
    assert [numbers.find(name(1)), numbers.find(name(2)), numbers.find(name(3))] == [1, 2, None]
    assert numbers.name_of(2) == name(2) and numbers.last == 2


def test_a_step_saved_again_has_another_number() -> None:
    numbers = Numbers()
    first = numbers.give(name(1), 0)
    assert numbers.find(name(1, 1)) is None
    assert numbers.give(name(1, 1), first) == 2


def test_numbers_of_volumes_are_passed() -> None:
    numbers = Numbers()
    numbers.passed(7)
    numbers.passed(3)
    assert numbers.give(name(1), 0) == 8
    assert numbers.give(name(2), 11) == 12


def test_the_oldest_names_are_forgotten() -> None:
    numbers = Numbers()
    for step in range(KEPT + 1):
        numbers.give(name(step), numbers.last)
    assert numbers.find(name(0)) is None and numbers.find(name(1)) == 2
    assert numbers.name_of(1) is None


def test_only_a_rank_in_a_later_line_never_asks() -> None:
    newest = {0: name(9), 1: name(1, base=1), 2: name(4, start=2)}
    assert in_later_line(name(2), newest.items()) == (1, name(1, base=1))
    assert in_later_line(name(2, base=1), newest.items()) is None


def test_the_reason_says_how_ranks_are_apart() -> None:
    assert "same restore()" in why_apart(name(5, base=1), 1, name(6))
    assert "without restore()" in why_apart(name(5, descents=1), 1, name(6))
    assert why_apart(name(5), 1, name(6)) == "rank 1 did not ask for this checkpoint"


# -- bases --------------------------------------------------------------------------------------


def test_restores_before_the_first_step_are_the_beginning() -> None:
    bases = Bases()
    for process, times in (("a", 1), ("b", 3)):
        for _ in range(times):
            bases.restored(process, 5, 0)
    assert [bases.of(process, 0) for process in "abc"] == [0, 0, 0]


def test_a_restore_by_all_is_a_new_base() -> None:
    bases = Bases()
    for turn in (1, 2):
        for process in "abb":
            bases.restored(process, 5, turn)
        assert [bases.of(process, 5) for process in "ab"] == [turn, turn]


def test_what_comes_late_still_belongs_to_the_base_before() -> None:
    bases = Bases()
    bases.restored("a", 5, 1)
    assert bases.of("b", 0) == 0
    bases.restored("b", 5, 1)
    assert bases.of("b", 5) == bases.of("a", 5) == 1


def test_restores_of_different_checkpoints_are_different_bases() -> None:
    bases = Bases()
    bases.restored("a", 5, 1)
    bases.restored("b", 6, 1)
    assert bases.of("a", 5) != bases.of("b", 6)


def test_a_second_choice_of_all_is_one_base() -> None:
    """restore(), a look at what came back, and restore(step=...)."""
    bases = Bases()
    for process in "aabb":
        bases.restored(process, 9, 1)
    for process in "ab":
        bases.restored(process, 5, 1)
    assert bases.of("a", 5) == bases.of("b", 5) == 2


def test_starts_from_different_checkpoints_are_different_bases() -> None:
    """restore() on one rank, restore(step=...) on the other one."""
    bases = Bases()
    bases.restored("a", 9, 0)
    bases.restored("b", 5, 0)
    assert bases.of("a", 0) != bases.of("b", 0)
    bases.restored("c", 9, 0)
    bases.restored("c", 5, 0)  # thinks better of it
    assert bases.of("c", 0) == bases.of("b", 0)
    bases.restored("b", 9, 0)
    assert bases.of("b", 0) == bases.of("a", 0) == 0


def test_a_restarted_daemon_takes_the_base_from_the_clients() -> None:
    bases = Bases()
    assert [bases.of("a", 5, 1), bases.of("b", 0), bases.of("c", 5, 4)] == [1, 0, 1]
    assert [bases.of("d", 3, 0), bases.of("e", 3, 0), bases.of("f", 4, 0)] == [0, 0, 2]


def test_turns_count_in_a_start() -> None:
    """A restore that brings the process to a newer start is turn 0 there."""
    steps = Steps()
    for sequence, incarnation, turn in ((5, 1, 0), (6, 1, 1), (7, 2, 2), (7, 2, 0)):
        assert steps.next_turn(min(incarnation, 1) if turn else incarnation) == turn
        steps.restored(sequence, incarnation)
        if sequence < 7:
            steps.moved()
    assert (steps.base, steps.base_turn) == (7, 0)
    steps.moved()
    assert steps.next_turn(2) == 3


def test_a_look_brings_a_process_to_its_start_too() -> None:
    """recover() in a newer start, an outage, and restore()."""
    steps = Steps()
    steps.restored(5, 1)
    steps.moved()
    assert steps.next_turn(2) == 0


def test_a_process_of_an_older_start_begins_as_the_others_did() -> None:
    bases = Bases()
    bases.restored("a", 5, 0)
    bases.came("b")
    bases.restored("b", 5, 1)
    assert [bases.of(process, 0) for process in "ab"] == [0, 0]
    for process, turn in (("a", 1), ("b", 2)):
        bases.restored(process, 5, turn)
    assert [bases.of(process, 5) for process in "ab"] == [1, 1]


def test_bases_of_many_processes_are_bounded() -> None:
    bases = Bases()
    for number in range(3 * KEPT):
        bases.restored(number, number, 1)
    assert len(bases._places) <= KEPT and len(bases._opened) <= KEPT


# -- programmes ---------------------------------------------------------------------------------


class State(NamedTuple):
    """What a rank's tensors hold: which visit of which step."""

    visit: int
    step: int


class Player:
    """A rank that plays its programme: the client's counts, and the job's answers."""

    def __init__(self, job: Job, rank: int, world: int) -> None:
        self.job, self.rank, self.world = job, rank, world
        self.steps = Steps()
        self.state = State(0, 0)
        self.got: dict[int, State] = {}
        self.saved: list[int] = []  # by each save of the programme: its sequence; 0: none
        self.owner = owner(rank, world=world)
        job.join(arrival(rank, self.owner, launch="", was=0))
        job.tenants[rank].seat.owner = self.owner

    def save(self) -> None:
        """checkpoint() of the present step."""
        self.steps.called(self.state.step)
        steps = self.steps
        asked = save_request(
            step=self.state.step, base=steps.base, turn=steps.base_turn, descents=steps.descents,
            row=steps.row,
        )  # fmt: skip
        _, sequence, end, *_ = self.job.number(self.rank, asked)
        if end is None:
            self.job.tenants[self.rank].ledger.on_its_way[sequence] = self.world
            self.got[sequence] = self.state
            self.saved.append(sequence)
        else:
            self.saved.append(0)

    def restore(self, sequence: int) -> None:
        """restore(): the message to the daemon, and the counts."""
        start = self.job.members.starts.of(self.rank, self.owner.process)
        assert start is not None
        turn = self.steps.next_turn(start.incarnation)
        start.bases.restored((self.rank, self.owner.process), sequence, turn)
        self.steps.restored(sequence, start.incarnation)

    def play(self, call: str, visit: int) -> None:
        state = self.state
        match call:
            case "step":
                self.steps.moved()  # an attached optimizer's hook, or gate()
                self.state = State(state.visit, state.step + 1)
            case "save":
                self.save()
            case "restore":
                self.restore(100)  # the checkpoint of step 0, on all ranks
                self.state = State(visit, 0)
            case "again":
                self.restore(100)
                self.restore(100)
                self.state = State(visit, 0)
            case "alone":  # rank 0 restores in mid-run, and nobody else does
                self.restore(100)
                self.state = State(-1 - state.visit, 0)
            case "back":  # without a restore
                self.state = State(visit, max(0, state.step - 2))
            case "leave out" | "recover":
                pass
            case "repeat":
                self.save()
                self.saved.pop()
                self.save()


def job(world: int) -> Job:
    made = Job(7, "gpt", CONFIG, IdleDisk(tuple), clock=lambda: 0.0)
    for rank in range(world):
        made.loaded(Tenant(rank))  # type: ignore[arg-type]
    return made


def play(calls: Sequence[Sequence[str]], order: Sequence[int]) -> list[Player]:
    """`calls` of each rank, one rank after the other as `order` says."""
    played = job(len(calls))
    players = [Player(played, rank, len(calls)) for rank in range(len(calls))]
    at, visits = [0] * len(calls), [0] * len(calls)
    for rank in order:
        call = calls[rank][at[rank]]
        visits[rank] += call in ("restore", "again", "back")
        players[rank].play(call, visits[rank])
        at[rank] += 1
    return players


def unsafe(players: list[Player]) -> str:
    """Which sequence names two states; "" when none does."""
    for one, other in itertools.combinations(players, 2):
        for sequence in one.got.keys() & other.got.keys():
            if one.got[sequence] != other.got[sequence]:
                return f"{sequence} is {one.got[sequence]} and {other.got[sequence]}"
    return ""


def programme(moves: Sequence[str], odd: dict[int, str]) -> list[str]:
    """Each save comes after a step. An odd call replaces, or is added before, the move."""
    calls: list[str] = []
    for at, move in enumerate(moves):
        strange = odd.get(at, "")
        if move == "save":
            calls += ["alone"] if strange == "alone" else []
            calls += ["step", strange if strange in ("leave out", "repeat") else "save"]
        elif move == "restore" and strange in ("again", "recover"):
            calls += ["again"] if strange == "again" else ["recover", "restore"]
        else:
            calls.append(move)
        if move == "save" and strange == "recover":
            calls.append("recover")
    return calls


def lockstep(calls: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """Some orders in which no rank passes a "step" that another rank has not come to: each rank is
    the first one in each part, or the last."""
    parts = [_parts(one) for one in calls]
    count = max(map(len, parts))
    ranks = range(len(calls))
    met: set[tuple[int, ...]] = set()  # who is first in an empty part makes no difference
    for firsts in itertools.product(ranks, repeat=count):
        order: list[int] = []
        for part, first in enumerate(firsts):
            for rank in (first, *(other for other in ranks if other != first)):
                order += [rank] * (len(parts[rank][part]) if part < len(parts[rank]) else 0)
        if (key := tuple(order)) not in met:
            met.add(key)
            yield order


def _parts(calls: Sequence[str]) -> list[list[str]]:
    """From one step to the next."""
    parts: list[list[str]] = [[]]
    for call in calls:
        if call == "step":
            parts.append([])
        parts[-1].append(call)
    return parts


MOVES_MAX = 5
ODD = ("leave out", "repeat", "again", "recover")


def programmes(moves: Sequence[str], length_max: int) -> Iterator[tuple[tuple[str, ...], int, str]]:
    for length in range(2, length_max + 1):
        for chosen in itertools.product(moves, repeat=length):
            yield chosen, -1, ""
            for at, odd in itertools.product(range(length), ODD):
                if (odd in ("again",)) <= (chosen[at] == "restore") and (
                    odd not in ("leave out", "repeat") or chosen[at] == "save"
                ):
                    yield chosen, at, odd


@pytest.mark.parametrize("saves", [2, 3])
def test_a_restore_by_all_heals_a_restore_on_one_rank(saves: int) -> None:
    """Whichever rank is first. With one save in between (names.py, Limit) nothing shows that the
    other rank took no part."""
    played = 0
    for before, after in itertools.product((1, 2), range(1, 4)):
        moves = ("save",) * (before + saves) + ("restore",) + ("save",) * after
        calls = [programme(moves, {before: "alone"}), programme(moves, {})]
        for order in lockstep(calls):
            players = play(calls, order)
            played += 1
            assert not (wrong := unsafe(players)), f"{moves} {order}: {wrong}"
            mine, its = (one.saved[-after:] for one in players)
            assert mine == its and all(mine), f"{moves} {order}: {mine} {its}"
    assert played > 300


def is_lost(players: list[Player], moves: Sequence[str], at: int, odd: str) -> bool:
    """Whether no save after the odd call, and after the next restore by all if the call was left
    out or repeated, is one sequence on all ranks."""
    begins = at + 1
    if odd in ("leave out", "repeat") and "restore" in moves[begins:]:
        begins += moves[begins:].index("restore")
    later = moves[begins:].count("save")
    tails = [set(one.saved[-later:]) - {0} for one in players] if later else []
    return bool(tails) and not set.intersection(*tails)


def wrong_programmes(world: int) -> Iterator[str]:
    """What is wrong with each programme of restores by all and one odd call; "" for nothing."""
    for moves, at, odd in programmes(("save", "restore"), MOVES_MAX if world == 2 else 4):
        calls = [programme(moves, {at: odd})] + [programme(moves, {})] * (world - 1)
        for order in lockstep(calls):
            players = play(calls, order)
            wrong = unsafe(players)
            if not wrong and is_lost(players, moves, at, odd):
                wrong = f"lost {[one.saved for one in players]}"
            yield wrong and f"{moves} {odd}@{at} {order}: {wrong}"


@pytest.mark.parametrize("world", [2, 3])
def test_restores_by_all_with_one_odd_call_lose_nothing(world: int) -> None:
    found = list(wrong_programmes(world))
    assert not any(found), next(filter(None, found))
    assert len(found) > 2_000


def test_going_back_without_a_restore_is_safe_with_equal_calls() -> None:
    played = 0
    for moves, at, _ in programmes(("save", "back", "restore"), 4):
        if at >= 0:
            continue
        calls = [programme(moves, {})] * 2
        for order in lockstep(calls):
            players = play(calls, order)
            played += 1
            assert not (wrong := unsafe(players)), f"{moves} {order}: {wrong}"
            assert players[0].saved == players[1].saved, f"{moves} {order}"
    assert played > 300


def test_limit_unequal_calls_that_go_back_share_a_name() -> None:
    """The limit that names.py and docs/ranks.md state: nothing distinguishes the two states."""
    moves = ("save", "save", "back", "save")
    calls = [programme(moves, {0: "leave out", 1: "leave out"}), programme(moves, {})]
    order = [1] * len(calls[1]) + [0] * len(calls[0])
    assert unsafe(play(calls, order))


def test_a_late_rank_finds_the_numbers_in_any_order() -> None:
    """Without lockstep: each way to mix the saves of two ranks, one of which may save once more."""
    played = 0
    for extra in (None, *range(5)):
        calls = [["step", "save"] * 5 for _ in range(2)]
        if extra is not None:
            calls[1][2 * extra + 1] = "repeat"
        for places in itertools.combinations(range(10), 5):
            order = [rank for at in range(10) for rank in [int(at in places)] * 2]
            players = play(calls, order)
            played += 1
            assert not unsafe(players)
            mine, its = (one.saved[:extra] for one in players)
            assert mine == its
    assert played == 6 * 252


# -- the enumeration sees what is wrong ---------------------------------------------------------


class OwnRestores(Bases):
    """The base counts the restores of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Any, int] = {}

    def restored(self, process: Any, sequence: int, turn: int) -> None:
        self.counts[process] = self.counts.get(process, 0) + 1

    def of(self, process: Any, told: int, turn: int = 0) -> int:
        return self.counts.get(process, 0)


class OnlyWhat(Bases):
    """The base is what was restored, whichever time."""

    def of(self, process: Any, told: int, turn: int = 0) -> int:
        return told


class NewestBase(Bases):
    """What a process asks for belongs to the newest base."""

    def of(self, process: Any, told: int, turn: int = 0) -> int:
        return self._last


@pytest.mark.parametrize("wrong", [OwnRestores, OnlyWhat, NewestBase])
def test_a_wrong_base_is_seen(wrong: type[Bases], monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Starts._begin

    def begins(self: Starts, kind: StartKind, known: int) -> Any:
        start = begin(self, kind, known)
        start.bases = wrong()
        return start

    monkeypatch.setattr(Starts, "_begin", begins)
    assert any(wrong_programmes(2))
