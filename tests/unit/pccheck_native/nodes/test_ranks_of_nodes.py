"""Nodes with several ranks and several checkpoints in flight, on seeded walks: copies fail, ranks
leave checkpoints out, nodes hear late. The model of nodesmodel.py has one rank on each node."""

from __future__ import annotations

import random

import pytest

from pccheck_native.nodes.facts import (
    FullName,
    Have,
    RankHas,
    SaveName,
    begin,
    give_up,
    hear,
    offer,
    publish,
    recyclable,
    room,
    say,
)
from tests.unit.pccheck_native.nodes.cluster import A, name

FLIGHTS, KEEP = 2, 1


class ARank:
    def __init__(self) -> None:
        self.durable: set[SaveName] = set()
        self.flying: set[SaveName] = set()
        self.asked = 0

    def has(self) -> RankHas:
        return RankHas(frozenset(self.durable), frozenset(self.flying), name(self.asked))


class ANode:
    def __init__(self, slots: int, ranks: int) -> None:
        self.slots, self.space = slots, room(slots, FLIGHTS, KEEP)
        self.ranks = [ARank() for _ in range(ranks)]
        self.mine = begin(A, None, (), KEEP)
        self.given_up: tuple[SaveName, ...] = ()

    def ask(self, rank: ARank, step: int) -> bool:
        """False: no slot is free."""
        if len(rank.durable) + len(rank.flying) == self.slots:
            free = recyclable(self.mine, [FullName(A, one) for one in rank.durable])
            if not free:
                return False
            rank.durable.remove(free[0].name)
        rank.asked = step
        rank.flying.add(name(step))
        self.settle()
        return True

    def end(self, rank: ARank, one: SaveName, *, well: bool) -> None:
        rank.flying.remove(one)
        if well:
            rank.durable.add(one)
            held = {each for other in self.ranks for each in other.durable} - {*self.given_up}
            self.mine = offer(self.mine, {FullName(A, each) for each in held}, self.space)
        self.settle()

    def settle(self) -> None:
        self.mine = give_up(self.mine, [rank.has() for rank in self.ranks])

    def publish(self) -> Have:
        return publish(self.mine, [rank.has() for rank in self.ranks])

    def hear(self, haves: list[Have | None]) -> None:
        said = say(haves)
        self.given_up = said.given_up
        self.mine = hear(self.mine, said, KEEP)


class Walk:
    def __init__(self, seed: int, slots: int) -> None:
        self.rng = random.Random(seed)
        self.nodes = [ANode(slots, self.rng.randint(1, 3)) for _ in range(self.rng.randint(2, 3))]
        self.stored: list[list[Have | None]] = [[None] * len(self.nodes)]  # each state of the store

    def move(self) -> None:
        node = self.rng.choice(self.nodes)
        rank = self.rng.choice(node.ranks)
        what = self.rng.random()
        if what < 0.35 and len(rank.flying) < FLIGHTS:
            asked = node.ask(rank, rank.asked + (1 if self.rng.random() < 0.9 else 2))
            assert asked or rank.flying or not node.space.spare, "a save waits for a message"
        elif what < 0.65 and rank.flying:
            node.end(rank, min(rank.flying), well=self.rng.random() < 0.9)
        elif what < 0.85:
            self.store(node)
        else:
            node.hear(self.rng.choice(self.stored[-4:]))
        self.check()

    def store(self, node: ANode) -> None:
        at = self.nodes.index(node)
        self.stored.append([*self.stored[-1][:at], node.publish(), *self.stored[-1][at + 1 :]])

    def check(self) -> None:
        """Every rank holds the newest global, and it is given up nowhere."""
        newest = max((known.name for node in self.nodes for known in node.mine.known), default=None)
        if newest is not None:
            assert all(newest in rank.durable for node in self.nodes for rank in node.ranks)
            assert newest not in say(self.stored[-1]).given_up

    def heal(self) -> None:
        """Without further faults, in lockstep, a new checkpoint becomes global."""
        last = max(rank.asked for node in self.nodes for rank in node.ranks)
        for step in range(last + 1, last + 9):
            for node in self.nodes:
                for rank in node.ranks:
                    for one in sorted(rank.flying):
                        node.end(rank, one, well=True)
            for _ in range(2):
                for node in self.nodes:
                    self.store(node)
                for node in self.nodes:
                    node.hear(self.stored[-1])
            for node in self.nodes:
                for rank in node.ranks:
                    node.ask(rank, step)
            self.check()
        for node in self.nodes:
            assert node.mine.newest and node.mine.newest > name(last)


@pytest.mark.parametrize("slots", [FLIGHTS + KEEP + 1, FLIGHTS + KEEP])
def test_the_newest_global_stays_on_every_rank(slots: int) -> None:
    globals_made = 0
    for seed in range(40):
        walk = Walk(seed, slots)
        for _ in range(150):
            walk.move()
        globals_made += any(node.mine.known for node in walk.nodes)
        walk.heal()
    assert globals_made > 15
