"""Fair shares of the DRAM budget: among users first, then among the sessions of each, so that many
jobs of one user leave another user as much as one job would. Numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Wish:
    """Of one session, in bytes."""

    uid: int
    least: int  # without it, the session cannot go on; a multiple of the chunk
    wanted: int
    chunk: int
    #: Among the sessions of one user the lower ones get their least first, then the earlier ones.
    turn: int = 0


def fair(room: int, wishes: Sequence[Wish], user_limit: int = 0) -> list[int]:
    """What each may have of `room`, in whole chunks: no session more than it wants, and what one
    does not want is for the others.

    Each has at least its least while `room` and `user_limit` (0: none) hold that of all. When they
    do not, leasts are dealt out in rounds, one to each user in each round; who gets none has 0."""
    limit = user_limit or room
    shares = [0] * len(wishes)
    users: dict[int, list[int]] = {}
    for index in _served(room, wishes, limit):
        users.setdefault(wishes[index].uid, []).append(index)
    floors = [sum(wishes[i].least for i in mine) for mine in users.values()]
    caps = [min(sum(wishes[i].wanted for i in mine), limit) for mine in users.values()]
    for mine, part in zip(users.values(), _level(room, floors, caps), strict=True):
        found = _level(part, [wishes[i].least for i in mine], [wishes[i].wanted for i in mine])
        for index, share in zip(mine, found, strict=True):
            chunk = wishes[index].chunk
            shares[index] = max(wishes[index].least, share // chunk * chunk)
    _round_up(room, limit, wishes, shares)
    return shares


def _round_up(room: int, limit: int, wishes: Sequence[Wish], shares: list[int]) -> None:
    """What is left over by whole chunks, a chunk each, to the first ones first."""
    left = room - sum(shares)
    of_user = Counter[int]()
    for wish, share in zip(wishes, shares, strict=True):
        of_user[wish.uid] += share
    for index, wish in enumerate(wishes):
        fits = wish.chunk <= min(left, limit - of_user[wish.uid], wish.wanted - shares[index])
        if shares[index] and fits:
            shares[index] += wish.chunk
            of_user[wish.uid] += wish.chunk
            left -= wish.chunk


def _served(room: int, wishes: Sequence[Wish], limit: int) -> list[int]:
    """Those who get their least, in the order of the wishes."""
    users: dict[int, list[int]] = {}
    for index, wish in enumerate(wishes):
        users.setdefault(wish.uid, []).append(index)
    queues = [sorted(mine, key=lambda index: wishes[index].turn) for mine in users.values()]
    found: list[int] = []
    of_user = Counter[int]()
    for index in (index for deal in zip_longest(*queues) for index in deal if index is not None):
        wish = wishes[index]
        if wish.least <= min(room, limit - of_user[wish.uid]):
            found.append(index)
            of_user[wish.uid] += wish.least
            room -= wish.least
    return sorted(found)


def _level(room: int, floors: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Each as much as the others, but no less than its floor and no more than its cap."""

    def at(level: int) -> list[int]:
        return [max(low, min(cap, level)) for low, cap in zip(floors, caps, strict=True)]

    low, high = 0, max(caps, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(at(middle)) <= room:
            low = middle
        else:
            high = middle - 1
    return at(low)
