"""Fair shares of the DRAM budget: among users first, then among the sessions of each, so that many
jobs of one user leave another user as much as one job would. Numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that one session asks for, in bytes."""

    uid: int
    least: int  # with less, the session cannot continue; a multiple of the chunk
    wanted: int
    chunk: int
    #: Among the sessions of one user the lower ones get their least first, then the earlier ones.
    turn: int = 0


def fair(room: int, demands: Sequence[Demand], user_limit: int = 0) -> list[int]:
    """The share of each session in `room`, in whole chunks. No session gets more than its demand;
    the rest is for the others.

    Each session gets at least its `least` while `room` and `user_limit` (0: none) are enough for
    all of these. When they are not, the least amounts are assigned in rounds, one to each user in
    each round; a session that is assigned none has 0."""
    limit = user_limit or room
    shares = [0] * len(demands)
    users: dict[int, list[int]] = {}
    for index in _served(room, demands, limit):
        users.setdefault(demands[index].uid, []).append(index)
    floors = [sum(demands[i].least for i in mine) for mine in users.values()]
    caps = [min(sum(demands[i].wanted for i in mine), limit) for mine in users.values()]
    for mine, part in zip(users.values(), _level(room, floors, caps), strict=True):
        found = _level(part, [demands[i].least for i in mine], [demands[i].wanted for i in mine])
        for index, share in zip(mine, found, strict=True):
            chunk = demands[index].chunk
            shares[index] = max(demands[index].least, share // chunk * chunk)
    _round_up(room, limit, demands, shares)
    return shares


def _round_up(room: int, limit: int, demands: Sequence[Demand], shares: list[int]) -> None:
    """What is left over by whole chunks, a chunk each, to the first ones first."""
    left = room - sum(shares)
    of_user = Counter[int]()
    for demand, share in zip(demands, shares, strict=True):
        of_user[demand.uid] += share
    for index, demand in enumerate(demands):
        fits = demand.chunk <= min(left, limit - of_user[demand.uid], demand.wanted - shares[index])
        if shares[index] and fits:
            shares[index] += demand.chunk
            of_user[demand.uid] += demand.chunk
            left -= demand.chunk


def _served(room: int, demands: Sequence[Demand], limit: int) -> list[int]:
    """The sessions that get their least, in the order of the demands."""
    users: dict[int, list[int]] = {}
    for index, demand in enumerate(demands):
        users.setdefault(demand.uid, []).append(index)
    queues = [sorted(mine, key=lambda index: demands[index].turn) for mine in users.values()]
    found: list[int] = []
    of_user = Counter[int]()
    for index in (index for deal in zip_longest(*queues) for index in deal if index is not None):
        demand = demands[index]
        if demand.least <= min(room, limit - of_user[demand.uid]):
            found.append(index)
            of_user[demand.uid] += demand.least
            room -= demand.least
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
