"""group.py and the publishers of the volumes, in every state that a small job can reach.

What must hold in each state (tests/support/groupmodel.py checks it):

(1) If all processes are killed now, the ranks restore a checkpoint that is not older than the
    newest one that all ranks were told is durable. A checkpoint that all ranks had copied, and that
    the rules ended without a failure, counts as told.
(2) All ranks restore the same checkpoint, and every rank has it.
(3) If all ranks had a checkpoint, one is restored. The answer is None only if no record holds a
    checkpoint.
(4) No rank waits for a slot for ever.
(5) In lockstep, with N + keep slots, no rank waits for a waiting rank.
(6) `keep` common checkpoints stay.
(7) Without a fault no checkpoint newer than the newest common one is given up.
(8) A step of a run has one sequence, on the ranks that were late, too.

Then the rules are broken, one at a time, and the same search must find it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from pccheck_native.names import Name, Numbers
from tests.support import groupmodel
from tests.support.groupmodel import ALWAYS, Config, Outcome, Rules, Search

STATES_MIN = 1_000_000

# The longest first. Those without a limit are searched to the last state, of which there are:
ALL_STATES = {
    "a session ends, unseen": 21_569, "two lanes, heard late": 82_700, "deaths and starts": 48_351,
    "a session ends, skips": 16_924, "the daemon dies": 18_527, "two after one": 32_664,
    "any number fails": 29_780, "three ranks, two kept": 24_476, "two, one, two": 24_224,
    "a start of fewer ranks": 14_989, "damage": 9_529, "damage of two": 8_258,
    "one after two, two kept": 6_804, "three ranks, heard late": 6_246, "a start": 5_081,
    "two after one, stale": 7_200, "one lane, unseen": 3_671, "one lane, stale": 1_662,
    "the daemon dies without a store": 35_016, "a late rank": 58_350,
    "a late rank of three": 13_915,
}  # fmt: skip
CONFIGS = [
    Config("three ranks", 3, 3, 1, 2, limit=60_000),
    Config("a session ends, unseen", 2, 2, 1, 1, "unseen", cuts=1),
    Config("two lanes, heard late", 2, 4, 2, 2, "late"),
    Config("three lanes", 2, 5, 2, 3, limit=50_000),
    Config("deaths and starts", 2, 3, 2, 1, deaths=1, blackouts=1, starts=2),
    Config("the daemon dies, with a store", 2, 3, 2, 1, "late", deaths=1, daemons=1, starts=1,
           store=True, limit=60_000),
    Config("three ranks, faults", 3, 2, 1, 1, fails=1, cuts=1, limit=60_000),
    Config("out of lockstep", 2, 4, 1, 2, "late", lead=4, queue=2, limit=60_000),
    Config("two lanes, faults", 2, 3, 1, 2, "late", fails=1, skips=1, limit=60_000),
    Config("two lanes, stale, a session ends", 2, 3, 1, 2, "stale", cuts=1, limit=60_000),
    Config("a slot to spare", 2, 6, 2, 3, "late", limit=50_000),
    Config("deaths, unseen", 2, 3, 2, 1, "unseen", deaths=1, starts=1, limit=50_000),
    Config("a session ends, skips", 2, 2, 1, 1, "late", cuts=1, skips=1),
    Config("the daemon dies", 2, 2, 1, 1, "stale", daemons=1, store=True),
    Config("the daemon dies without a store", 2, 2, 1, 1, "late", daemons=1, cuts=1),
    Config("a start of fewer ranks", 3, 2, 1, 1, deaths=1, starts=1, worlds=(2,)),
    Config("two starts of fewer and more ranks", 3, 2, 1, 1, deaths=2, starts=2, worlds=(2, 3),
           limit=40_000),
    Config("a start of more ranks, heard late", 2, 2, 1, 1, "late", deaths=1, starts=1, worlds=(3,),
           limit=40_000),
    Config("a start of fewer ranks, stale", 3, 2, 1, 1, "stale", deaths=1, starts=1, worlds=(2,),
           limit=30_000),
    Config("a start of more ranks, the daemon dies", 2, 3, 2, 1, "late", deaths=1, starts=1,
           worlds=(3,), daemons=1, store=True, limit=40_000),
    Config("a fresh start", 2, 3, 1, 2, "late", deaths=1, starts=1, fresh=True, limit=40_000),
    Config("a late rank", 2, 3, 1, 2, "late", lead=5, queue=2, late=True),
    Config("a late rank of three", 3, 2, 1, 1, lead=4, late=True),
    Config("a late rank, a session ends", 2, 3, 1, 1, "late", lead=5, queue=2, late=True, cuts=1,
           skips=1, limit=60_000),
    Config("a late rank, faults", 2, 3, 2, 1, "unseen", lead=5, late=True, fails=1, limit=50_000),
    Config("a fresh start, faults", 2, 2, 1, 1, "late", deaths=1, starts=1, fails=1, skips=1,
           fresh=True, limit=40_000),
    Config("two after one", 1, 3, 1, 2, "late", deaths=1, starts=1, worlds=(2,)),
    Config("two after one, stale", 1, 2, 1, 1, "stale", deaths=1, starts=1, worlds=(2,), fails=1),
    Config("two after one that was rank 1", 1, 3, 1, 2, "late", deaths=1, starts=1, worlds=(2,),
           alone=1, fresh=True, limit=40_000),
    Config("one after two", 2, 3, 1, 2, "late", deaths=1, starts=1, worlds=(1,), limit=40_000),
    Config("one after two, two kept", 2, 3, 2, 1, "late", deaths=1, starts=1, worlds=(1,)),
    Config("one after two, fresh", 2, 4, 2, 1, "late", deaths=1, starts=1, worlds=(1,), fails=1,
           fresh=True, limit=40_000),
    Config("one after three", 3, 2, 1, 1, "late", deaths=1, starts=1, worlds=(1,), limit=40_000),
    Config("two, one, two", 2, 2, 1, 1, "late", deaths=2, starts=2, worlds=(1, 2)),
    Config("two, rank 1, three, the daemon dies", 2, 2, 1, 1, "late", deaths=2, starts=2,
           worlds=(1, 3), alone=1, daemons=1, store=True, limit=40_000),
    Config("three ranks, two kept", 3, 3, 2, 1, "late"),
    Config("a start", 2, 2, 1, 1, "late", deaths=1, starts=1),
    Config("any number fails", 2, 2, 1, 1, "late", fails=ALWAYS, skips=ALWAYS),
    Config("damage", 2, 2, 1, 1, "late", damages=1),
    Config("damage of two", 2, 3, 2, 1, damages=2),
    Config("three ranks, heard late", 3, 2, 1, 1, "late"),
    Config("one lane, stale", 2, 3, 2, 1, "stale"),
    Config("one lane, unseen", 2, 3, 2, 1, "unseen"),
]  # fmt: skip


# -- mutants ------------------------------------------------------------------------------------


class FloorTooHigh(Rules):
    """The newest common one may go as well."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        said = super().agree(ranks, world, keep, short)
        return said._replace(oldest=said.newest + 1 if said.newest else 0)


class KeepIgnored(Rules):
    """Only the newest common one stays."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        return super().agree(ranks, world, 1, short)


class FewCount(Rules):
    """What is below the common ones goes before there are `keep` of them."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        said = super().agree(ranks, world, keep, short)
        common = [one.sequence for one in self.group.common(ranks)[:keep]]
        return said._replace(oldest=min(common, default=0))


class PendingGivenUp(Rules):
    """What a rank has in flight is given up when another one has it already."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        said = super().agree(ranks, world, keep, short)
        held = {one.sequence for known in ranks.values() for one in known.held}
        late = held & {number for known in ranks.values() for number in known.pending}
        return said._replace(given_up=said.given_up | late)


class PendingOfThisStart(Rules):
    """What is in flight counts as asked for by the start that is there now, whatever its size."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        ranks = {
            rank: known._replace(pending=dict.fromkeys(known.pending, world))
            for rank, known in ranks.items()
        }
        return super().agree(ranks, world, keep, short)


class AloneIsRankZero(Rules):
    """What one rank saved alone has to be on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        real = self.group

        class Lacking(real._Lacking):  # type: ignore[misc, name-defined]
            def _of(self, number: int, size: int) -> Any:
                if size > 1 or 0 in self._has[number] | self._held[number]:
                    return super()._of(number, size)
                return real._Members(self._ranks, {0})

        self.group._Lacking = Lacking


class OneDecidesAlone(Rules):
    """A start of one rank keeps its own newest, whatever a start of several ranks has left."""

    def is_lone(self, held: tuple[int, ...], *, lone: bool) -> bool:
        return lone


class BelowNewestGivenUp(Rules):
    """What is below the newest common one is given up while it may yet become common."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        said = super().agree(ranks, world, keep, short)
        kept = {one.sequence for one in self.group.common(ranks)[:keep]}
        held = {one.sequence for known in ranks.values() for one in known.held} - kept
        return said._replace(given_up=said.given_up | {n for n in held if n < said.newest})


class LiveCount(Rules):
    """What all live ranks have is given up, though a dead one's is still being written."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        said = super().agree(ranks, world, keep, short)
        live = [{one.sequence for one in r.held} for r in ranks.values() if r.asked is not None]
        common = {one.sequence for one in self.group.common(ranks)}
        shared = set.intersection(*live) - common if live else set()
        return said._replace(given_up=said.given_up | shared)


class UnaskedGivenUp(Rules):
    """With no slot left, what a live rank has not asked for yet is given up."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        said = super().agree(ranks, world, keep, short)
        common = {one.sequence for one in self.group.common(ranks)}
        more = {one.sequence for rank in short for one in ranks[rank].held} - common
        return said._replace(given_up=said.given_up | more)


class DeadWaitedFor(Rules):
    """With no slot left, what only a rank without a process could bring is not given up."""

    def agree(self, ranks: Any, world: int, keep: int, short: Iterable[int]) -> Any:
        return super().agree(ranks, world, keep, ())


class CommonByStep(Rules):
    """Equal steps count as one checkpoint."""

    def __init__(self) -> None:
        super().__init__()

        def common(ranks: Any) -> list[Any]:
            steps = [{one.step for one in known.held} for known in ranks.values()]
            shared = set.intersection(*steps)
            every = {one for known in ranks.values() for one in known.held if one.step in shared}
            return sorted(every, reverse=True)

        self.group.common = common


class CommonWithoutOne(Rules):
    """The last rank is not asked."""

    def __init__(self) -> None:
        super().__init__()
        real = self.group.common

        def common(ranks: Any) -> list[Any]:
            known = dict(ranks)
            known[max(ranks)] = self.group.Rank(held=known[0].held)
            found: list[Any] = real(known)
            return found

        self.group.common = common


class ChoosesOwn(Rules):
    """Each rank restores its own newest."""

    def __init__(self) -> None:
        super().__init__()
        self.group.choose = lambda ranks, rank, _world: max(
            (one for one in ranks[rank].held if one.usable), default=None
        )


class NumbersDiffer(Rules):
    """Each rank gets numbers of its own."""

    def __init__(self) -> None:
        super().__init__()

        class Own(Numbers):
            def find(self, name: Name) -> int | None:
                return None

        self.numbers = Own


class OwnNewestSupersedes(Rules):
    """A rank's own newest one supersedes, as on the volume of a lone rank."""

    def is_superseded(self, held: tuple[int, ...], sequence: int, obeys: Any, lone: bool) -> bool:
        return any(one >> 12 > sequence for one in held)


class ShortageTakesNewest(Rules):
    """With no slot left, the newest common one may go."""

    def is_dispensable(self, sequence: int, obeys: Any) -> bool:
        return sequence <= obeys[1]


class Forgets(Rules):
    """What has just become durable is neither held nor in flight, until the daemon looks."""

    def __init__(self) -> None:
        super().__init__()
        self.forgets = True


class TakesWhatIsGone(Rules):
    """A process that comes late may take what was given up without it."""

    def __init__(self) -> None:
        super().__init__()
        self.takes_gone = True


class RestoresInFlight(Rules):
    """A start restores while checkpoints of the run before are being written."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_for_flight = False


MUTANTS = [
    (FloorTooHigh, "(3)", Config("", 2, 2, 1, 1)),
    (KeepIgnored, "(6)", Config("", 2, 3, 2, 1)),
    (FewCount, "(6)", Config("", 2, 4, 2, 2, "late")),
    (PendingGivenUp, "(3)", Config("", 2, 2, 1, 1, "late", fails=1)),
    (PendingOfThisStart, "(3)", Config("", 1, 2, 1, 1, "late", deaths=1, starts=1, worlds=(2,))),
    (AloneIsRankZero, "(3)", Config("", 1, 2, 1, 1, "late", deaths=1, starts=1, worlds=(2,),
                                    alone=1)),
    (OneDecidesAlone, "(3)", Config("", 2, 2, 1, 1, "late", deaths=1, starts=1, worlds=(1,))),
    (BelowNewestGivenUp, "(6)", Config("", 2, 4, 2, 2, "late")),
    (LiveCount, "(3)", Config("", 2, 2, 1, 1, "late", deaths=1)),
    (UnaskedGivenUp, "(3)", Config("", 2, 2, 1, 1, "late", lead=3, fails=1)),
    (DeadWaitedFor, "(4)", Config("", 2, 2, 1, 1, deaths=1)),
    (CommonByStep, "(2)", Config("", 2, 2, 1, 1, deaths=1, starts=1, fresh=True)),
    (CommonWithoutOne, "(2)", Config("", 2, 2, 1, 1)),
    (ChoosesOwn, "(2)", Config("", 2, 2, 1, 1)),
    (NumbersDiffer, "(8)", Config("", 2, 2, 1, 1)),
    (OwnNewestSupersedes, "(7)", Config("", 2, 3, 1, 2)),
    (ShortageTakesNewest, "(3)", Config("", 2, 1, 1, 1)),
    (Forgets, "(3)", Config("", 2, 2, 1, 1, "unseen", fails=1)),
    (TakesWhatIsGone, "(3)", Config("", 2, 2, 1, 1, "late", lead=3, cuts=1)),
    (RestoresInFlight, "(2)", Config("", 2, 2, 1, 1, deaths=1, starts=1)),
]  # fmt: skip


# -- the searches -------------------------------------------------------------------------------


def search(config: Config, rules: type[Rules]) -> Outcome:
    return Search(config, rules()).run()


def least(config: Config) -> int:
    """How many states its search has to see."""
    return ALL_STATES.get(config.name, config.limit)


def test_the_example_of_the_model_is_what_it_does() -> None:
    """Each row of the table at the top of groupmodel.py is a state, and its move leads there."""
    rows = re.findall(r"^    (rank \d [a-z].*)$", groupmodel.__doc__ or "", re.MULTILINE)
    search = Search(Config("", 2, 2, 1, 1), Rules())
    state = search.first()
    for row in rows:
        move, *cells = re.split(r" {2,}", row)
        moves = {"rank {} {} {}".format(*label): made for label, made in search.successors(state)}
        state = moves[move]
        assert search.row(state) == cells and not search.violation(search.canonical(state))
    assert len(rows) == 19


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_state_is_safe(config: Config) -> None:
    found = search(config, Rules)
    assert not found.violation, "\n".join(["", *found.trace, found.violation])
    assert found.states >= least(config)
    assert found.closed or config.name not in ALL_STATES


@pytest.mark.parametrize(
    "config",
    [
        Config("a start", 2, 2, 1, 1, "late", deaths=1, starts=1),
        Config("three ranks", 3, 2, 1, 1, fails=1, limit=20_000),
        Config("damage", 2, 2, 1, 1, "late", damages=1),
    ],
    ids=lambda config: config.name,
)
def test_ranks_that_change_places_reach_the_same_states(config: Config) -> None:
    """So it is enough to search one of the states that differ in nothing else."""
    each = Search(config, Rules(), in_places=True).run()
    assert each.closed and each.states == search(config, Rules).states


def test_a_million_states() -> None:
    """Each search has asserted its own part of them."""
    assert {config.name for config in CONFIGS if config.limit > STATES_MIN} == ALL_STATES.keys()
    assert sum(map(least, CONFIGS)) >= STATES_MIN


@pytest.mark.parametrize(
    ("slots", "keep", "broken"), [(1, 1, "(4)"), (2, 2, "(6)")], ids=["nothing", "kept"]
)
def test_one_slot_less_is_not_enough(slots: int, keep: int, broken: str) -> None:
    """Nothing can be saved any more, or `keep` is not kept."""
    assert search(Config("", 2, slots, keep, 1), Rules).violation.startswith(broken)


@pytest.mark.parametrize(
    ("mutant", "broken", "config"), MUTANTS, ids=[mutant.__name__ for mutant, _, _ in MUTANTS]
)
def test_a_broken_rule_is_seen(mutant: type[Rules], broken: str, config: Config) -> None:
    if broken != "(4)" and config.slots >= config.lanes + config.keep:
        assert not search(config._replace(limit=5000), Rules).violation
    found = search(config._replace(limit=200_000), mutant)
    assert found.violation.startswith(broken), found.violation or f"{found.states} states, all well"
