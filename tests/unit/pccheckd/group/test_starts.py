"""Which processes are one start of a job: what launchers, schedulers, deaths and reconnects do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from pccheckd.group.starts import STARTS_KEPT, Arrival, Start, Starts


class Process:
    """A process of one rank, with the incarnation that the daemon gave it last."""

    count = 0

    def __init__(self, rank: int, launch: str = "", world: int = 2) -> None:
        Process.count += 1
        self.rank, self.launch, self.world = rank, launch, world
        self.name = Process.count.to_bytes(4, "big")
        self.incarnation = 0

    def joins(self, starts: Starts, known: int = 0, found: int | None = None) -> int:
        """Its first session, or another one. `known`: the newest incarnation in the volumes;
        `found`: in those of its rank."""
        who = Arrival(self.rank, self.name, self.launch, self.world, was=self.incarnation)
        self.incarnation = starts.join(who, known, found).incarnation
        return self.incarnation

    def leaves(self, starts: Starts) -> None:
        starts.left(self.rank, self.name)

    def asks(self, starts: Starts) -> int:
        """For a checkpoint, in which incarnation; 0: it is fenced."""
        start = starts.may_ask(self.rank, self.name)
        return start.incarnation if start is not None else 0

    def restores(self, starts: Starts) -> int:
        self.incarnation = starts.follow(self.rank, self.name).incarnation
        return self.incarnation

    def start(self, starts: Starts) -> Start | None:
        return starts.of(self.rank, self.name)


def launched(starts: Starts, launch: str = "", world: int = 2) -> list[Process]:
    """All ranks of a launch, joined in order."""
    made = [Process(rank, launch, world) for rank in range(world)]
    for process in made:
        process.joins(starts)
    return made


def ended(starts: Starts, processes: list[Process]) -> None:
    for process in processes:
        process.leaves(starts)


def are_one(starts: Starts, processes: list[Process]) -> bool:
    return all(process.start(starts) is starts.current for process in processes)


# -- what launchers do --------------------------------------------------------------------------


@pytest.mark.parametrize("launches", [["run/0", "run/1", "run/2"], ["run"] * 3, [""] * 3])
def test_each_launch_is_a_start(launches: list[str]) -> None:
    """torchrun counts its restarts; a loop in a script repeats an id; and there may be none."""
    starts = Starts()
    for number, launch in enumerate(launches, 1):
        ranks = launched(starts, launch)
        assert are_one(starts, ranks)
        assert [rank.asks(starts) for rank in ranks] == [number, number]
        ended(starts, ranks)


def test_the_first_incarnation_follows_what_the_volumes_name() -> None:
    assert Process(0).joins(Starts(), known=7) == 8


def test_the_ranks_of_a_launch_join_in_any_order() -> None:
    starts = Starts()
    ranks = [Process(rank, "x", 3) for rank in (2, 0, 1)]
    assert [rank.joins(starts) for rank in ranks] == [1, 1, 1]
    assert starts.current is not None and starts.current.closed


def test_a_start_that_was_killed_before_all_had_joined_and_the_next_at_once() -> None:
    """With the same launch id and without a pause: new processes do not join the dead start."""
    starts = Starts()
    dead = Process(0, "run", 3)
    dead.joins(starts)
    dead.leaves(starts)
    ranks = launched(starts, "run", 3)
    assert are_one(starts, ranks)
    assert starts.current is not None and starts.current.missing() == []


def test_the_place_of_one_that_ended_without_a_checkpoint_is_free() -> None:
    starts = Starts()
    dead, other = Process(0), Process(1)
    assert (dead.joins(starts), other.joins(starts)) == (1, 1)
    ended(starts, [dead, other])
    assert starts.current is None  # it never was
    assert are_one(starts, launched(starts))


def test_a_start_that_lost_a_rank_after_a_checkpoint_and_the_next_at_once() -> None:
    """The second rank comes first, into the start that was never complete; and moves along."""
    starts = Starts()
    dead = Process(0, "run")
    dead.joins(starts)
    assert dead.asks(starts) == 1
    dead.leaves(starts)
    one, zero = Process(1, "run"), Process(0, "run")
    one.joins(starts)
    assert zero.joins(starts) == 2
    assert are_one(starts, [zero, one])
    assert [one.asks(starts), zero.asks(starts)] == [2, 2]


def test_a_new_process_of_one_rank_is_a_new_start() -> None:
    """The other one gets no more checkpoints until it restores."""
    starts = Starts()
    ranks = launched(starts, "x")
    assert [rank.asks(starts) for rank in ranks] == [1, 1]
    ranks[1].leaves(starts)
    new = Process(1, "x")
    assert new.joins(starts) == 2
    assert ranks[0].asks(starts) == 0
    assert starts.current is not None and starts.current.missing() == [0]
    assert ranks[0].restores(starts) == 2
    assert starts.current.missing() == []
    assert [ranks[0].asks(starts), new.asks(starts)] == [2, 2]


def test_a_process_that_asked_for_nothing_moves_along() -> None:
    starts = Starts()
    ranks = launched(starts, "x")
    ranks[1].leaves(starts)
    new = Process(1, "x")
    assert new.joins(starts) == 2
    assert ranks[0].asks(starts) == 2


def test_a_process_that_ended_while_it_restored_takes_no_place() -> None:
    starts = Starts()
    old, other = launched(starts)
    assert old.asks(starts) == other.asks(starts) == 1
    ended(starts, [other])
    new = Process(1)
    assert new.joins(starts) == 2
    ended(starts, [old])
    assert old.restores(starts) == 1
    assert Process(0).joins(starts) == 2


def test_the_only_process_ended_while_it_restored() -> None:
    starts = Starts()
    alone = Process(0, world=1)
    assert alone.joins(starts) == 1
    ended(starts, [alone])
    assert alone.restores(starts) == 1


def test_another_world_size_is_another_start() -> None:
    starts = Starts()
    two = launched(starts, "x", 2)
    assert [rank.asks(starts) for rank in two] == [1, 1]
    ended(starts, two)
    three = launched(starts, "x", 3)
    assert are_one(starts, three)
    assert starts.current is not None
    assert (starts.current.incarnation, starts.current.world_size) == (2, 3)


def test_a_process_never_asks_in_a_start_that_is_not_the_newest() -> None:
    """The process has requested nothing, and cannot move to a start of another size."""
    starts = Starts()
    old = launched(starts, "x", 2)
    old[1].leaves(starts)
    other = Process(1, "y", 3)
    assert other.joins(starts) == 2
    assert [old[0].asks(starts), old[0].asks(starts)] == [0, 0]


@pytest.mark.parametrize("world", [2, 3])
def test_a_zombie_that_joins_and_dies_takes_nothing_away(world: int) -> None:
    """The zombie is of an older launch, and comes while a session is disconnected."""
    starts = Starts()
    ranks = launched(starts, "new")
    assert [rank.asks(starts) for rank in ranks] == [1, 1]
    ranks[0].leaves(starts)
    zombie = Process(0, "old", world)
    assert zombie.joins(starts) == 2
    assert ranks[1].asks(starts) == 0  # nobody can know which one it is
    zombie.leaves(starts)
    assert ranks[0].joins(starts) == 1
    assert [rank.asks(starts) for rank in ranks] == [1, 1]


@pytest.mark.parametrize("world", [2, 3])
def test_a_zombie_that_saved_and_died_fences_nobody_for_ever(world: int) -> None:
    """A process that restores afterwards may save, also with another launch id or size."""
    starts = Starts()
    ranks = launched(starts, "new")
    assert [rank.asks(starts) for rank in ranks] == [1, 1]
    ranks[0].leaves(starts)
    zombie = Process(0, "old", world)
    zombie.joins(starts)
    assert zombie.asks(starts) == 2
    zombie.leaves(starts)
    assert ranks[0].joins(starts) == 1
    assert [rank.asks(starts) for rank in ranks] == [0, 0]
    assert [rank.restores(starts) for rank in ranks] == [3, 3]
    assert [rank.asks(starts) for rank in ranks] == [3, 3]


def test_different_launches_are_never_one_start() -> None:
    starts = Starts()
    one, other = Process(0, "x"), Process(1, "y")
    assert (one.joins(starts), other.joins(starts)) == (1, 2)
    assert one.asks(starts) == 0
    one.restores(starts)
    assert not are_one(starts, [one, other])


# -- sessions that end and come back ------------------------------------------------------------


def test_a_reconnect_is_no_start() -> None:
    starts = Starts()
    ranks = launched(starts)
    assert ranks[0].asks(starts) == 1
    ranks[0].leaves(starts)
    assert starts.current is not None and starts.current.missing() == [0]
    assert ranks[0].joins(starts) == 1
    assert starts.current.missing() == []
    assert [rank.asks(starts) for rank in ranks] == [1, 1]


def test_a_reconnect_while_the_others_join_is_one_start_with_them() -> None:
    starts = Starts()
    ranks = [Process(0), Process(1)]
    ranks[0].joins(starts)
    ranks[0].leaves(starts)
    ranks[1].joins(starts)
    ranks[0].joins(starts)
    assert are_one(starts, ranks)


def test_all_reconnect_to_a_new_daemon() -> None:
    old, starts = Starts(), Starts()
    ended(old, launched(old))
    ranks = launched(old)
    assert [rank.joins(starts, known=2) for rank in ranks] == [2, 2]
    assert [rank.asks(starts) for rank in ranks] == [2, 2]
    assert launched(starts)[0].incarnation == 3


def test_one_rank_is_replaced_while_there_is_no_daemon() -> None:
    """In either order of connecting, the other process is fenced until it restores."""
    for new_first in (False, True):
        old, starts = Starts(), Starts()
        ranks = launched(old)
        new = Process(1)
        for process in [new, ranks[0]] if new_first else [ranks[0], new]:
            process.joins(starts, known=1)
        assert (ranks[0].incarnation, new.incarnation) == (1, 2)
        assert ranks[0].asks(starts) == 0
        assert new.asks(starts) == 2
        assert ranks[0].restores(starts) == 2
        assert ranks[0].asks(starts) == 2


@pytest.mark.parametrize("late_first", [False, True])
@pytest.mark.parametrize("launch", ["", "run"])
def test_a_daemon_that_ended_before_all_ranks_had_joined(late_first: bool, launch: str) -> None:
    """Only ranks 0 and 2 had registered in start 2: the volume of rank 1 names start 1."""
    old, starts = Starts(), Starts()
    ended(old, launched(old, launch, 3))
    early = [Process(0, launch, 3), Process(2, launch, 3)]
    late = Process(1, launch, 3)
    assert [one.joins(old, 1, found=1) for one in early] == [2, 2]
    if late_first:
        late.joins(starts, 2, found=1)
    for one in early:
        one.joins(starts, 2, found=2)
    if not late_first:
        late.joins(starts, 2, found=1)
    assert are_one(starts, [*early, late])
    newest = 3 if late_first else 2
    assert [one.asks(starts) for one in (*early, late)] == [newest] * 3
    assert starts.current is not None and starts.current.closed
    assert Process(0, launch, 3).joins(starts, newest, found=newest) == newest + 1


@pytest.mark.parametrize("late_first", [False, True])
@pytest.mark.parametrize("found", [2, 3, None])
def test_a_place_that_may_have_been_taken_is_not_free(found: int | None, late_first: bool) -> None:
    """The volume of rank 1 names start 2 or a newer one, or cannot be read."""
    starts = Starts()
    there, late = Process(0), Process(1)
    there.incarnation = 2
    for process in [late, there] if late_first else [there, late]:
        process.joins(starts, 2, found=2 if process is there else found)
    assert (there.incarnation, late.incarnation) == (2, 3)
    assert there.asks(starts) == 0
    assert late.asks(starts) == 3


def test_late_ranks_of_another_launch_or_size_complete_nothing() -> None:
    for launch, world in (("other", 2), ("", 3)):
        for late_first in (False, True):
            starts = Starts()
            there, late = Process(0), Process(1, launch, world)
            there.incarnation = 2
            for process in [late, there] if late_first else [there, late]:
                process.joins(starts, 2, found=2 if process is there else 1)
            assert (there.incarnation, late.incarnation) == (2, 3)


def test_the_volumes_have_newer_runs_than_who_comes_back() -> None:
    """They were brought from elsewhere: the run comes after them, for both of its ranks."""
    old, starts = Starts(), Starts()
    ranks = launched(old)
    assert [rank.joins(starts, known=5) for rank in ranks] == [6, 6]
    assert are_one(starts, ranks)


def test_a_rank_alone() -> None:
    """A rank that saves alone has a world of its own, whatever its number."""
    starts = Starts()
    alone = Process(3, world=1)
    alone.joins(starts)
    assert starts.current is not None
    assert (starts.current.missing(), starts.current.closed) == ([], True)
    alone.leaves(starts)
    assert starts.current is None
    alone.joins(starts)
    alone.asks(starts)
    alone.leaves(starts)
    assert starts.current is not None and starts.current.missing() == [0]


def test_what_a_start_saved_is_no_past_of_its_later_ranks() -> None:
    """Until a process has asked for checkpoints itself."""
    starts = Starts()
    ranks = launched(starts)
    assert ranks[0].asks(starts) == 1
    assert [starts.before(rank.rank, rank.name) for rank in ranks] == [None, 1]
    assert starts.before(0, b"stranger") is None


def test_a_stranger_has_no_start() -> None:
    starts = Starts()
    stranger = Process(0)
    assert stranger.asks(starts) == 0
    stranger.leaves(starts)
    with pytest.raises(KeyError):
        stranger.restores(starts)


def test_not_all_starts_are_remembered() -> None:
    starts = Starts()
    for number in range(3 * STARTS_KEPT):
        ranks = launched(starts)
        assert [rank.asks(starts) for rank in ranks] == [number + 1] * 2
        ended(starts, ranks)
    assert ranks[0].joins(starts) == 3 * STARTS_KEPT


# -- every order of events ----------------------------------------------------------------------


class World(NamedTuple):
    """Two ranks with three processes each, which end and come back; one per rank at a time."""

    starts: Starts
    live: frozenset[int]
    incarnations: tuple[int, ...]

    def key(self) -> object:
        known = [
            (
                start.incarnation, start.kind.launch, start.closed, start.known_as,
                [(r, m.process, m.live, m.begun) for r, m in sorted(start.members.items())],
            )
            for start in self.starts._starts
        ]  # fmt: skip
        return repr(known), self.live, self.incarnations


def copied(starts: Starts) -> Starts:
    made = Starts()
    made._starts = [
        replace(start, members={rank: replace(one) for rank, one in start.members.items()})
        for start in starts._starts
    ]
    return made


def processes(launches: tuple[str, str, str], worlds: tuple[int, int, int]) -> list[Process]:
    made = [
        Process(rank, launch, world)
        for rank in (0, 1)
        for launch, world in zip(launches, worlds, strict=True)
    ]
    for number, process in enumerate(made):
        process.name = bytes([number])
    return made


def events(world: World, every: list[Process]) -> Iterator[tuple[str, World, str]]:
    """What may happen next, and what is wrong with it."""
    for number, process in enumerate(every):
        name, rank = process.name, process.rank
        taken = any(every[other].rank == rank for other in world.live)
        for event in ("leaves", "asks", "restores") if number in world.live else ("joins",):
            if event == "joins" and taken:
                continue  # the daemon serves one process of a rank
            starts, live, wrong = copied(world.starts), world.live, ""
            before = max((start.incarnation for start in starts._starts), default=0)
            start: Start | None = None
            if event == "joins":
                was = world.incarnations[number]
                who = Arrival(rank, name, process.launch, process.world, was=was)
                start = starts.join(who, max(world.incarnations))
                live = live | {number}
            elif event == "leaves":
                starts.left(rank, name)
                live = live - {number}
            elif event == "asks":
                start = starts.may_ask(rank, name)
                if start is not None and start is not starts.current:
                    wrong = "it asks in a start that is not the newest"
            else:
                start = starts.follow(rank, name)
            incarnations = list(world.incarnations)
            if start is not None:
                if start.incarnation < incarnations[number]:
                    wrong = "its incarnation went down"
                if start.incarnation > before + 1:
                    wrong = "an incarnation was left out"
                incarnations[number] = start.incarnation
            made = World(starts, live, tuple(incarnations))
            yield f"{event} {rank}.{number}", made, wrong or is_wrong(made, every)


def is_wrong(world: World, every: list[Process]) -> str:
    starts = world.starts
    kind = {process.name: (process.launch, process.world) for process in every}
    for start in starts._starts:
        members = [member for member in start.members.values() if member.live]
        if len({kind[member.process] for member in members}) > 1:
            return "processes of two launches are one start"
        if any(every[member.process[0]].rank != rank for rank, member in start.members.items()):
            return "a process is in another one's place"
    live = [every[number] for number in sorted(world.live)]
    for process in live:
        if sum(process.name in [m.process for m in s.members.values()] for s in starts._starts) > 1:
            return "a process is in two starts"
    if len({kind[process.name] for process in live}) != 1 or len(live) < 2:
        return ""
    # All ranks of one launch, and nobody else is there.
    current = starts.current
    for process in live:
        start = process.start(starts)
        newest = current is not None and kind[process.name] == (
            current.kind.launch,
            current.world_size,
        )
        if start is not current and newest and start and not start.members[process.rank].begun:
            return "a rank that has asked for nothing is not in the newest start of its launch"
    after = copied(starts)
    for process in live:
        after.follow(process.rank, process.name)
    if any(after.may_ask(process.rank, process.name) is None for process in live):
        return "not all may save after they have restored"
    return "" if are_one(after, live) else "they are not one start after they have restored"


@pytest.mark.parametrize(
    ("launches", "worlds"),
    [
        (("a", "a", "b"), (2, 2, 2)),
        (("a", "b", "b"), (2, 2, 2)),
        (("", "", ""), (2, 2, 2)),
        (("a", "b", "a"), (2, 3, 2)),
    ],
    ids=["the second launch", "the first process was another launch", "no ids", "sizes"],
)
def test_every_order_of_events(
    launches: tuple[str, str, str], worlds: tuple[int, int, int]
) -> None:
    every = processes(launches, worlds)
    first = World(Starts(), frozenset(), (0,) * len(every))
    seen = {first.key()}
    frontier: list[tuple[World, tuple[str, ...]]] = [(first, ())]
    while frontier and len(seen) < 6000:
        following = []
        for world, way in frontier:
            for event, made, wrong in events(world, every):
                assert not wrong, f"{'; '.join((*way, event))}: {wrong}"
                key = made.key()
                if key not in seen:
                    seen.add(key)
                    following.append((made, (*way, event)))
        frontier = following
    print(len(seen))
    assert len(seen) >= 6000


def test_a_rank_does_not_join_those_that_saved_and_have_all_ended() -> None:
    """A launch was killed when one of its ranks had saved, and another had not connected yet: what
    the next launch saves is no part of the same checkpoint."""
    starts = Starts()
    first = Process(1)
    first.joins(starts)
    assert first.asks(starts) == 1
    first.leaves(starts)
    assert Process(0).joins(starts) == 2


def test_a_start_has_an_id_that_its_processes_bring_back() -> None:
    starts = Starts()
    first, second = launched(starts)
    mine = first.start(starts)
    assert mine is not None
    assert second.start(starts) is mine
    assert len(mine.id) == 16
    restarted = Starts()
    known = mine.incarnation
    came = Arrival(0, first.name, world_size=2, was=known, start_id=mine.id)
    again = restarted.join(came, known)
    late = came._replace(rank=1, process=second.name, start_id=b"another")
    other = restarted.join(late, known)
    assert again is other
    assert again.id == mine.id
    for odd in (b"", b"short", b"long" * 5):
        drawn = Starts().join(came._replace(start_id=odd), known)
        assert len(drawn.id) == 16
        assert drawn.id != mine.id
