"""What the nodes of a job hold, for a person who asks, also while the job does not run; and what a
start of these nodes would restore. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pccheck_native.group import Refused
from pccheck_native.nodes import plain
from pccheck_native.nodes.beginning import decide
from pccheck_native.nodes.homes import Homes, homes_of
from pccheck_native.nodes.lists import ListMember, StartList
from pccheck_native.nodes.offers import RECORDS_MAX, Offer, StartAnswer, Word
from pccheck_native.nodes.peer import HOLDING_BYTES_MAX


class Holding(NamedTuple):
    """What one node holds of a job."""

    offer: Offer
    version: str  # of its PCcheck
    is_live: bool  # processes of the job run there

    def packed(self) -> bytes:
        """With as many records of starts as HOLDING_BYTES_MAX takes: the newest."""
        offer = self.offer
        while True:
            lists = [one.to_plain() for one in offer.lists.values()]
            body = plain.packed([lists, offer.to_plain(), self.version, self.is_live])
            if len(body) <= HOLDING_BYTES_MAX or not offer.records:
                return body
            offer = offer._replace(records=offer.records[: len(offer.records) // 2])

    @classmethod
    def of_packed(cls, body: bytes) -> Holding:
        """Raises ValueError."""
        value = plain.unpacked(body)
        lists, offer, version, is_live = plain.items(value, "a holding", count=4)
        found = map(StartList.of_plain, plain.items(lists, "lists", RECORDS_MAX))
        return cls(
            Offer.of_plain(offer, {one.digest: one for one in found}),
            plain.text(version, "a version"),
            plain.flag(is_live, "live"),
        )


class Restorable(NamedTuple):
    """What a start of these nodes would restore, with as many ranks as the last one."""

    world_size: int
    answer: StartAnswer | Refused
    homes: Homes | None  # None: nothing would be restored


def restorable(holdings: Sequence[Holding], word: Word = Word()) -> Restorable | None:  # noqa: B008
    """None: no node knows of a start. The answer is the one that the nodes would get if each of
    them had the ranks that it had last, and the first one those of the nodes that are not here."""
    offers = [one.offer for one in holdings]
    records = [record for offer in offers for record in offer.records]
    last = max(records, key=lambda one: (one.born, one.promise), default=None)
    if last is None:
        return None
    ranks = {one.node: one.ranks for one in last.who.members}
    here = {one.node: one.host for one in offers}
    lacking = [rank for node, some in ranks.items() if node not in here for rank in some]
    mine = {node: sorted(ranks.get(node, ())) for node in here}
    first = min(here, key=lambda node: mine[node] or [last.who.world_size])
    mine[first] = sorted([*mine[first], *lacking])
    members = sorted(
        (ListMember(node, here[node], tuple(some), (b"",) * len(some))
         for node, some in mine.items() if some), key=lambda one: one.ranks,
    )  # fmt: skip
    highest = max(record.promise.number for record in records)
    found = last.who._replace(start=bytes(plain.ID), number=highest + 1, members=tuple(members))
    asked = [one._replace(promise=found.promise, word=word, answers=(), round=0) for one in offers]
    answer = decide(asked, found, travel=True)
    if isinstance(answer, Refused) or answer.restored is None:
        return Restorable(found.world_size, answer, None)
    homes = homes_of(asked, found, answer.restored, every=True)
    return Restorable(found.world_size, answer, homes)
