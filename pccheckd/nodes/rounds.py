"""One round of a start, as a member sees it: what it offers, and what the others do.

The lists of earlier starts stand in an offer by their digests. Whoever decides has most of these
lists on its own disk; for another list it asks a member that has named that list."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from pccheck_native.nodes import plain
from pccheck_native.nodes.lists import StartList
from pccheck_native.nodes.offers import Offer

from .carriers.patient import Patient, checked, parsed

_T = TypeVar("_T")

BATCH = 64  # keys that are read at once
#: Whoever is asked for a list, and does not send it, is followed by the next one that has it.
ASKS_S = 1.0


class Round:
    """Owned by the member, while the round has no answer."""

    def __init__(
        self, patient: Patient, key: Callable[..., str], found: StartList, at: int, number: int,
        mine: Offer,
    ) -> None:  # fmt: skip
        """`key` makes a key of the start. `at`: this member."""
        self.number = number
        self.keys = key("offer", number, at), key("asked", number)  #: what `look` needs
        self._patient, self._key, self._at, self._mine = patient, key, at, mine
        self._lists = mine.lists | {found.digest: found.brief()}
        self._given_s: dict[bytes, float] = {}  # when this member gave a list
        self._said: list[_Said | None] = [None] * len(found.members)
        self._offers: list[Offer | None] = [None] * len(found.members)

    async def offer(self) -> None:
        self._given_s.clear()
        await self._patient.set(self.keys[0], self._mine.to_plain())

    async def look(self, mine: bytes | None, asked: bytes | None) -> bool:
        """Gives the lists for which this member is asked. False: what it offered has gone, and was
        offered again. The arguments are the values of `keys`."""
        if mine is None:
            await self.offer()
            return False
        for digest, at in parsed(_asked_of_plain, asked) or ():
            now_s = time.monotonic()
            is_due = now_s - self._given_s.get(digest, -ASKS_S) >= ASKS_S
            if at == self._at and digest in self._lists and is_due:
                self._given_s[digest] = now_s
                who = self._lists[digest].to_plain()
                await self._patient.set(self._key("who", digest.hex()), who)
        return True

    async def read(self, waits_s: float) -> Sequence[Offer | None]:
        """The offers that can be read by now. `waits_s`: how long this member has waited."""
        await fill(
            self._patient,
            self._said,
            lambda at: self._key("offer", self.number, at),
            _Said.of_plain,
        )
        named = (one.lists for one in self._said if one is not None)
        if lacking := frozenset[bytes]().union(*named) - self._lists.keys():
            await self._get_lists(sorted(lacking)[:BATCH], waits_s)
        read = functools.partial(Offer.of_plain, lists=self._lists)
        for at, one in enumerate(self._said):
            if one is not None and self._offers[at] is None and one.lists <= self._lists.keys():
                self._offers[at] = checked(read, one.value)
                if self._offers[at] is None:
                    self._said[at] = None  # the key is read again
        return self._offers

    async def _get_lists(self, lacking: Sequence[bytes], waits_s: float) -> None:
        values = await self._patient.get([self._key("who", one.hex()) for one in lacking])
        for digest, value in zip(lacking, values, strict=True):
            one = parsed(StartList.of_plain, value)
            if one is not None and one.digest == digest:  # anybody may have written another list
                self._lists[digest] = one.brief()
        asked = []
        for digest in lacking:
            if digest not in self._lists:
                have = [at for at, one in enumerate(self._said) if one and digest in one.lists]
                asked.append([digest, have[int(waits_s / ASKS_S) % len(have)]])
        if asked:
            await self._patient.set(self.keys[1], asked)


class _Said(NamedTuple):
    value: object  # a plain offer
    lists: frozenset[bytes]  # that it names

    @classmethod
    def of_plain(cls, value: object) -> _Said:
        return cls(value, Offer.named(value))


def _asked_of_plain(value: object) -> list[tuple[bytes, int]]:
    """Digests, and the members that are asked for them. Raises ValueError."""
    pairs = [plain.items(one, "a list", count=2) for one in plain.items(value, "lists", BATCH)]
    return [(plain.raw(one, "a list"), plain.number(at, "a member")) for one, at in pairs]


async def fill(
    patient: Patient, found: list[_T | None], key: Callable[[int], str],
    read: Callable[[object], _T],
) -> None:  # fmt: skip
    """Reads what is missing in `found`."""
    lacking = [at for at, one in enumerate(found) if one is None]
    for first in range(0, len(lacking), BATCH):
        part = lacking[first : first + BATCH]
        for at, value in zip(part, await patient.get(list(map(key, part))), strict=True):
            found[at] = parsed(read, value)
