"""Tempting rules for several nodes that are wrong, each with a small job in which the search of
nodesmodel.py must find the mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

from pccheck_native.group import Refused
from pccheck_native.nodes import beginning
from pccheck_native.nodes.facts import FullName, Have, Promises, RankHas, Said, Space
from pccheck_native.nodes.lists import StartList
from pccheck_native.nodes.offers import Offer, StartAnswer
from tests.support.nodesmodel import Config, Model, Node, Rules, State, first_of, full, start_of

A2, A3 = (0, 1), (0, 1, 2)
LOST = "S2 S3 S4 S5"


def saved(nodes: Sequence[int], one: str) -> tuple[str, ...]:
    """All nodes have a checkpoint and were told that it is global."""
    each = [
        f"node {at} {what}"
        for at in nodes
        for what in (f"saves {one}", f"has {one} durable", f"publishes {one}")
    ]
    return (*each, *(f"node {at} hears {one}" for at in nodes))


def begun(nodes: Sequence[int], start: str) -> tuple[str, ...]:
    """A start has begun on these nodes."""
    promised = [f"node {at} promises to {start}" for at in nodes]
    return (*promised, f"{start} decides", *(f"node {at} restores" for at in nodes))


class Patched(Rules):
    """With another method of the decision."""

    method = ""

    def instead(self, real: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError

    def decide(
        self, offers: Sequence[Offer], who: StartList, round_: int, *, travel: bool
    ) -> StartAnswer | Refused:
        other = self.instead(getattr(beginning._Decision, self.method))
        with patch.object(beginning._Decision, self.method, other):
            return super().decide(offers, who, round_, travel=travel)


# -- at run time --------------------------------------------------------------------------------


class CountsDeliveries(Rules):
    """Nodes are counted with add(), and an add whose answer was lost is repeated."""

    def arrives(self, model: Model, there: int, value: int) -> int:
        return model.values.number(("again", model.values[value])) if there else value

    def say(self, haves: Sequence[Any]) -> Said:
        heard: list[Any] = [
            have if have is None or isinstance(have, Have) else have[1] for have in haves
        ]
        said = super().say(heard)
        offers = [name for have in heard if have for name in have.offered]
        for have, again in zip(heard, haves, strict=True):
            if have is not again:
                offers += have.offered
        found = {name for name in offers if offers.count(name) >= len(haves)}
        return said._replace(globals=tuple(sorted({*said.globals, *found}, reverse=True)))


class SilentGivenUp(Rules):
    """With no slot left, what a node that is not heard has not offered is given up."""

    def shortage(self, model: Model, state: State, at: int) -> int:
        node: Node = model.nodes[state.nodes[at]]
        haves = [
            model.values[state.have[model.key(node.start, i)]] for i in model.members[node.start]
        ]
        newest = node.known[0] if node.known and start_of(node.known[0]) == node.start else 0
        own = (one for one, _ in node.shards if start_of(one) == node.start and one > newest)
        lacking = (
            one for one in own if any(h is None or full(one).name not in h.offered for h in haves)
        )
        return min(lacking, default=0)


class OwnNewestIsEnough(Rules):
    """The old global one goes when a newer one is durable here."""

    def recyclable(self, mine: Promises, held: Sequence[FullName]) -> list[FullName]:
        own = sorted(one for one in held if mine.is_own(one))
        return super().recyclable(mine, held) or own[:-1]


class AllButOne(Rules):
    """Global when all members but one offer it."""

    def say(self, haves: Sequence[Have | None]) -> Said:
        said = super().say(haves)
        offers = [name for have in haves if have for name in have.offered]
        found = {name for name in offers if offers.count(name) >= len(haves) - 1}
        return said._replace(globals=tuple(sorted({*said.globals, *found}, reverse=True)))


class OffersCopied(Rules):
    """What is copied and not durable yet is offered."""

    def publish(self, mine: Promises, rank: RankHas) -> Have:
        have = super().publish(mine, rank)
        return have._replace(offered=tuple(sorted({*have.offered, *rank.in_flight})))


class KeysWithoutStart(Rules):
    """The keys of the store do not carry the start."""

    start_in_key = False


class ForgetsOffers(Rules):
    """A daemon that restarts forgets what it had offered."""

    def restarted(self, model: Model, at: int, node: Node) -> Node:
        return super().restarted(model, at, node)._replace(offered=())


class TakesAllForOffered(Rules):
    """A daemon that restarts takes all that it holds for offered."""

    def restarted(self, model: Model, at: int, node: Node) -> Node:
        own = tuple(one for one, _ in node.shards if start_of(one) == node.start)
        return super().restarted(model, at, node)._replace(offered=own)


class OffersWhatFailed(Rules):
    """What failed, and is on the disk when the daemon restarts, is offered."""

    def restarted(self, model: Model, at: int, node: Node) -> Node:
        made = super().restarted(model, at, node)
        if not node.failed or len(node.shards) == model.config.slots:
            return made
        part = model.config.places[node.start][at]
        shards = tuple(sorted((*node.shards, (node.failed, part))))
        return model.marked(made._replace(shards=shards))  # type: ignore[arg-type]


class OffersAll(Rules):
    """No slot stays without a promise."""

    def offer(self, mine: Promises, held: Sequence[FullName], space: Space) -> Promises:
        return super().offer(mine, held, space._replace(promises=99))


class SaysNothingOfFailures(Rules):
    """A failed copy is told to nobody; it is just not offered."""

    def publish(self, mine: Promises, rank: RankHas) -> Have:
        return super().publish(mine, rank)._replace(passed=None)


class RestoredMayGo(Rules):
    """What all ranks have restored may go at once."""

    def recyclable(self, mine: Promises, held: Sequence[FullName]) -> list[FullName]:
        own = mine._replace(known=tuple(one for one in mine.known if mine.is_own(one)))
        return super().recyclable(own, held)


class FloorByLaunch(Rules):
    """Known globals of several starts are ordered by the launches of these starts."""

    def hear(self, mine: Promises, said: Said, keep: int) -> Promises:
        after = super().hear(mine, said, 99)
        return after._replace(known=tuple(sorted(after.known, reverse=True))[:keep])


# -- how a start begins -------------------------------------------------------------------------


class NoFence(Rules):
    """A new start reads what the nodes hold, and the old one goes on."""

    fence = False


class NoFenceOfRounds(Rules):
    """What is in flight when a rank restores in mid-run is finished and offered."""

    fence_rounds = False


class FenceInMemory(Rules):
    """A daemon that restarts has forgotten what it promised."""

    def restarted(self, model: Model, at: int, node: Node) -> Node:
        made = super().restarted(model, at, node)
        born = [record for record in node.records if model.values[record].born]
        if not node.start or node.answer or not born:
            return made
        start = model.values[born[-1]].start[0] - ord("A")
        return made._replace(
            records=tuple(born),
            start=start,
            answer=model.values.number(StartAnswer(model.values[born[-1]].start, 0, None, ())),
            passed=max([first_of(start), *(q for q, _ in node.shards if start_of(q) == start)]),
        )


class LastAnswerWins(Rules):
    """The answer is written with set()."""

    answers_once = False


class DecidesAnew(Rules):
    """After the loss of the store a start decides anew."""

    carries_answer = False


class AsksMost(Rules):
    """The start is decided with the offers that came."""

    asks_all = False


class ComesBack(Rules):
    """A start that was displaced on a node promises there again, with a higher number."""

    comes_back = True

    def numbers(self, model: Model, state: State, start: int, node: Node) -> set[int]:
        named = state.lists[start]
        number = model.values[named].number if named else 0
        return {max(number, node.number + 1)}


class StepIsCheckpoint(Rules):
    """Equal steps of two starts are one checkpoint."""

    def decide(
        self, offers: Sequence[Offer], who: StartList, round_: int, *, travel: bool
    ) -> StartAnswer | Refused:
        newest: dict[Any, FullName] = {}
        for one in sorted(part.checkpoint for offer in offers for part in offer.parts):
            newest[one.name] = one
        offers = [
            offer._replace(
                parts=tuple(p._replace(checkpoint=newest[p.checkpoint.name]) for p in offer.parts)
            )
            for offer in offers
        ]
        return super().decide(offers, who, round_, travel=travel)


class ForgetsKnown(Rules):
    """Only what is held counts, not what was known to be global."""

    def decide(
        self, offers: Sequence[Offer], who: StartList, round_: int, *, travel: bool
    ) -> StartAnswer | Refused:
        offers = [offer._replace(known=()) for offer in offers]
        return super().decide(offers, who, round_, travel=travel)


class PromisedCounts(Rules):
    """A start counts from its promise, not from its answer."""

    def decide(
        self, offers: Sequence[Offer], who: StartList, round_: int, *, travel: bool
    ) -> StartAnswer | Refused:
        made = []
        for offer in offers:
            older: list[bytes] = []
            records = []
            for record in offer.records:
                if not record.born and record.start != who.start:
                    record = record._replace(restored=((0, None),), seen=tuple(older))
                older.append(record.start)
                records.append(record)
            made.append(offer._replace(records=tuple(records)))
        return super().decide(made, who, round_, travel=travel)


class AnySurvivor(Patched):
    """Any node that holds a whole copy goes on by itself."""

    method = "_most_are_here"

    def instead(self, real: Any) -> Any:
        return lambda _self, _top: None


class SourcesKnow(Patched):
    """A node that was no member of a start, and gave it its shards, goes on as if it had failed."""

    method = "_may_have_begun"

    def instead(self, real: Any) -> Any:
        return lambda _self, _pool: None


class OnlyTheTopCounts(Patched):
    """Most members of the newest start are enough, though that start began on some of them only."""

    method = "_not_replaced"

    def instead(self, real: Any) -> Any:
        return lambda _self, top: [top]


class NewestCompleteWins(Patched):
    """A newer one that may be global is passed over."""

    method = "_must_not_lose"

    def instead(self, real: Any) -> Any:
        return lambda _self, _top, _one, _whole: None


class HighestNumberWins(Patched):
    """Starts are ordered by their numbers."""

    method = "_top"

    def instead(self, real: Any) -> Any:
        def top(self: Any) -> Any:
            born = self._pool()
            newest = max(born, key=lambda one: (one.who.number, -one.start[0]), default=None)
            return newest or real(self)

        return top


class BeginsEmpty(Patched):
    """When nothing whole is there, the start begins at step 0."""

    method = "_restored_by"

    def instead(self, real: Any) -> Any:
        def restored_by(self: Any, top: Any) -> Any:
            found = real(self, top)
            return None if isinstance(found, Refused) else found

        return restored_by


class Mutant(NamedTuple):
    rules: type[Rules]
    broken: str  # the invariants that the search looks for
    config: Config


N = None


def one_has(at: int, *some: str) -> tuple[str, ...]:
    """A node has checkpoints durable, and did not talk of them."""
    return tuple(
        f"node {at} {what}" for one in some for what in (f"saves {one}", f"has {one} durable")
    )


#: Sharded with two nodes and two slots, unless said otherwise.
J = Config("", 2, (A2,), slots=2, steps=2)
TWO = J._replace(places=(A2, A2))
ALONE = Config("", 2, (A2, (0, N), (N, 0)), True, slots=2, steps=2)
OF_THREE = Config("", 3, (A3, (0, 1, N)), True, slots=2, steps=2, sources=True)
BOTH_PROMISED = ("node 0 promises to B", "node 1 promises to B")
MUTANTS = [
    Mutant(CountsDeliveries, "S6", J._replace(lates=1)),
    Mutant(SilentGivenUp, LOST, J._replace(steps=3, cuts=1)),
    Mutant(OwnNewestIsEnough, LOST, J._replace(steps=3)),
    Mutant(AllButOne, LOST, Config("", 3, (A3,), slots=2, steps=2, begin=(
        *one_has(0, "A1"), "node 0 publishes"))),
    Mutant(OffersCopied, LOST, J._replace(fails=1)),
    Mutant(KeysWithoutStart, "S6", TWO._replace(slots=3)),
    Mutant(ForgetsOffers, LOST, J._replace(slots=3, steps=4, daemons=1, begin=(
        *one_has(0, "A1", "A2", "A3"), "node 0 publishes A1 A2"))),
    Mutant(TakesAllForOffered, "L1 L3", J._replace(slots=3, steps=3, daemons=1)),
    Mutant(OffersWhatFailed, LOST, J._replace(steps=3, fails=1, daemons=1, begin=(
        "node 0 saves A1", "node 0 fails A1", "node 0 publishes -", *one_has(1, "A1", "A2")))),
    Mutant(OffersAll, "L3", J._replace(slots=3, steps=4)),
    Mutant(SaysNothingOfFailures, "L1", J._replace(steps=3, fails=1)),
    Mutant(RestoredMayGo, LOST, TWO._replace(steps=3)),
    Mutant(FloorByLaunch, "L1", TWO._replace(
        places=(A2, A2, (1, 0)), begin=(*saved(A2, "A1"), *begun(A2, "C")))),
    Mutant(NoFence, "S6 " + LOST, TWO._replace(begin=(
        "node 0 saves A1", "node 1 saves A1", *BOTH_PROMISED))),
    Mutant(NoFenceOfRounds, "S2", J._replace(slots=3, rounds=1, begin=(
        "node 0 saves A1", "node 1 saves A1", "node 0 offers to", "node 1 offers to"))),
    Mutant(FenceInMemory, LOST, TWO._replace(steps=3, daemons=1, begin=(
        *one_has(0, "A1", "A2"), "node 0 publishes A1 A2", "node 0 promises to B"))),
    Mutant(LastAnswerWins, "S1", OF_THREE._replace(begin=(
        *one_has(0, "A1"), *BOTH_PROMISED, *one_has(2, "A1", "A2")))),
    Mutant(DecidesAnew, "S1", OF_THREE._replace(stores=1, begin=(
        *one_has(0, "A1"), *one_has(2, "A1", "A2"), *BOTH_PROMISED, "B decides",
        "node 0 restores A1"))),
    Mutant(AsksMost, "S1", TWO._replace(
        replicated=True, stores=1, explicit=True, begin=one_has(0, "A1"))),
    Mutant(ComesBack, "L1 L3", TWO._replace(
        slots=3, places=(A2, A2, (1, 0)), begin=(*saved(A2, "A1"), *begun(A2, "B")))),
    Mutant(StepIsCheckpoint, "S3", TWO._replace(
        slots=3, explicit=True, begin=one_has(0, "A1", "A2"))),
    Mutant(ForgetsKnown, LOST, J._replace(
        slots=3, keep=2, steps=3, rolls=1, begin=(*saved(A2, "A1"), *one_has(0, "A2")))),
    Mutant(PromisedCounts, "L0", TWO),
    Mutant(AnySurvivor, LOST, ALONE),
    Mutant(NewestCompleteWins, LOST, Config("", 3, ((0, 1, N), A3), slots=2, steps=2, begin=(
        *saved(A2, "A1"), *begun(A3, "B"), *(one for at in A3 for one in one_has(at, "B2"))))),
    Mutant(SourcesKnow, LOST, OF_THREE._replace(
        slots=3, steps=3, places=(A3, (0, 1, N), (N, 0, 1)), begin=(
            *one_has(0, "A1"), *begun((0, 1), "B"), *saved((0, 1), "B2"),
            *(f"node {at} promises to C" for at in A3), "C decides B2", "node 1 restores",
            "node 2 restores"))),
    Mutant(OnlyTheTopCounts, LOST, OF_THREE._replace(
        sources=False, places=(A3, (0, 1, N), (N, 0, 1)), begin=(
            *saved(A3, "A1"), *BOTH_PROMISED, "node 1 promises to C", *one_has(2, "A2")))),
    Mutant(HighestNumberWins, LOST, ALONE._replace(explicit=True, begin=(
        *one_has(0, "A1"), *one_has(1, "A1", "A2"), "node 0 promises to B"))),
    Mutant(BeginsEmpty, "S5", TWO),
]  # fmt: skip
