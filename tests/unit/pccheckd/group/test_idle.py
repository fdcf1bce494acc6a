"""When what is in memory only gets the disk: never while it would delay a checkpoint for it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from pccheckd.group.idle import IdleDisk, Use, is_idle

FREE = Use(moves=False, saves=False, next_s=math.inf)
BUSY = FREE._replace(moves=True)


def saves_in(next_s: float) -> Use:
    return Use(moves=False, saves=True, next_s=next_s)


@pytest.mark.parametrize(
    ("mine", "others", "idle"),
    [
        ([FREE, FREE], [], True),
        ([FREE, FREE], [FREE], True),
        ([FREE, BUSY], [], False),
        ([FREE], [FREE, BUSY], False),
        ([FREE], [saves_in(2.5)], True),
        ([FREE], [saves_in(1.5)], False),
        ([FREE], [saves_in(math.inf)], True),
        ([saves_in(math.inf)], [], False),
    ],
)
def test_the_disk_is_idle_if_nothing_would_be_delayed(
    mine: list[Use], others: list[Use], *, idle: bool
) -> None:
    assert is_idle(mine, others, write_s=1.0) is idle


class Rank:
    """A rank with a trainer, and 100 bytes in memory; the disk writes 100 bytes a second."""

    def __init__(self, *, fills_disk: bool = True) -> None:
        self.moving: list[int] = []
        self.next_s = math.inf
        self.ledger: Any = SimpleNamespace(
            moving=lambda: self.moving, next_s=lambda _: self.next_s, bytes_per_s=100.0,
            parked=lambda: [SimpleNamespace(payload_bytes=100)],
        )  # fmt: skip
        self.seat: Any = SimpleNamespace(owner="trainer")
        self.unparking: Any = SimpleNamespace(fills_disk=fills_disk)


class Node:
    """Jobs of one rank each; `looks` are the jobs that were told to look again."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks: Any = ranks
        self.disk = IdleDisk(lambda: self.ranks, clock=lambda: 0)
        self.looks: list[int] = []
        self._calls = [lambda n=n: self.looks.append(n) for n in range(len(ranks))]

    def takes(self, job: int) -> bool:
        return self.disk.takes([self.ranks[job]], self._calls[job])  # type: ignore[arg-type]


def test_one_job_waits_for_another_and_is_told() -> None:
    other = Rank()
    node = Node(Rank(), other)
    other.moving = [1]
    assert not node.takes(0)
    node.disk.moved()  # but not to its end
    assert node.looks == []
    other.moving = []
    node.disk.moved()
    assert node.looks == [0] and node.takes(0)
    node.disk.moved()
    assert node.looks == [0]


def test_jobs_get_the_disk_in_turn() -> None:
    first, second = Rank(), Rank()
    node = Node(first, second)
    assert node.takes(0)
    first.moving = [1]
    assert not node.takes(1)
    first.moving = []
    assert not node.takes(0), "the other one has waited"
    assert node.looks == [1, 0]
    assert node.takes(1)
    second.moving = [1]
    assert not node.takes(0)


def test_one_that_waited_in_vain_does_not_keep_the_disk() -> None:
    """It has nothing in memory any more."""
    first = Rank()
    node = Node(first, Rank())
    assert node.takes(0)
    first.moving = [1]
    assert not node.takes(1)
    first.moving = []
    assert not node.takes(0)
    assert node.takes(0)


def test_a_write_has_to_fit_before_the_next_one_for_the_disk() -> None:
    saver = Rank(fills_disk=False)
    node = Node(Rank(), saver)
    saver.next_s = 1.9
    assert not node.takes(0)
    saver.next_s = 2.1
    assert node.takes(0)
    saver.next_s, saver.seat.owner = 1.9, None
    assert node.takes(0), "its trainer has ended"


def test_a_write_of_unknown_length_waits_for_what_moves_only() -> None:
    saver = Rank(fills_disk=False)
    node = Node(Rank(), saver)
    for rank in node.ranks:
        rank.ledger.bytes_per_s = 0.0
    saver.next_s = 0.1
    assert node.takes(0)
