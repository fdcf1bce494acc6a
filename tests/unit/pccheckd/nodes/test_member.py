"""Two nodes and a store: how they come to one list, in orders that a real store seldom shows."""

from __future__ import annotations

import asyncio

import pytest

from pccheck_native.group import Refused
from pccheck_native.nodes.facts import Have, Said
from pccheck_native.nodes.lists import NodeHello, Promise, StartList
from pccheck_native.nodes.offers import Offer, StartAnswer
from pccheckd.nodes.member import MemberPhase, NodeMember
from tests.support.memorycarrier import MemoryCarrier, MemoryStore

pytestmark = pytest.mark.anyio

LIMIT_S = 60.0


class Node:
    """A `NodeKeeper` with one rank and no checkpoints."""

    def __init__(self, rank: int, life: int, promised: Promise | None = None) -> None:
        self._rank, self._nonce = rank, bytes([rank, life]) * 8
        self.promised = promised or Promise()
        self.answers: list[StartAnswer] = []

    def hello(self) -> NodeHello:
        return NodeHello(bytes([self._rank]) * 16, f"n{self._rank}", "launch", 2,
                         {self._rank: self._nonce}, self.promised)  # fmt: skip

    def lives(self) -> StartList | None:
        return None

    async def promise(self, found: StartList) -> Refused | None:
        self.promised = found.promise
        return None

    async def offer(self, found: StartList, round_: int) -> Offer:
        return Offer(self.hello().node, self.hello().host, Promise(found.number, found.start))

    async def record(self, found: StartList, answer: StartAnswer) -> None:
        self.answers.append(answer)

    def have(self) -> Have | None:
        return None

    def heard(self, said: Said) -> None:
        pass


class Late(MemoryCarrier):
    """Its first hello arrives when there is a list."""

    async def set(self, key: str, value: bytes) -> None:
        if "/hello/" in key and "job/list/2" not in self._store.values:
            while "job/list/2" not in self._store.values:
                await asyncio.sleep(0)
        await super().set(key, value)


async def begun(*members: NodeMember) -> None:
    """All of them have begun the same start."""
    tasks = [asyncio.create_task(member.run()) for member in members]
    try:
        async with asyncio.timeout(LIMIT_S):
            while any(member.phase is not MemberPhase.RUNNING for member in members):
                await asyncio.sleep(0.001)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert len({member.list.start for member in members if member.list}) == 1


async def test_ranks_that_start_again_are_one_start() -> None:
    store = MemoryStore()
    for life in range(3):
        nodes = [Node(rank, life) for rank in range(2)]
        await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
        assert [len(node.answers) for node in nodes] == [1, 1]


async def test_a_list_made_before_a_hello_had_arrived_is_replaced() -> None:
    """The first node has its number already; the second node finds the hello of the life before."""
    store = MemoryStore()
    await begun(*(NodeMember(MemoryCarrier(store), "job", Node(rank, 0)) for rank in range(2)))
    assert "job/list/2" not in store.values
    first = NodeMember(Late(store), "job", Node(0, 1))
    await begun(first, NodeMember(MemoryCarrier(store), "job", Node(1, 1)))


async def test_a_list_from_before_a_promise_is_replaced() -> None:
    """The first node has promised to a list with a process of the life before. The second node
    finds the hello from before that promise, and makes a list with the same number."""
    store = MemoryStore()
    nodes = [Node(rank, 0) for rank in range(2)]
    for life in range(1, 9):  # which of the two lists is higher is random
        await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
        nodes = [Node(rank, life, nodes[rank].promised) for rank in range(2)]
        early = NodeMember(MemoryCarrier(store), "job", nodes[0])
        task = asyncio.create_task(early.run())
        while early.phase is not MemberPhase.BEGINNING:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(NodeMember(MemoryCarrier(store), "job", nodes[1]).run())
        async with asyncio.timeout(LIMIT_S):
            while not all(node.answers for node in nodes):
                assert early.refused is None
                await asyncio.sleep(0.001)
        for one in (task, late):
            one.cancel()
        await asyncio.gather(task, late, return_exceptions=True)
        nodes = [Node(rank, 100 + life, nodes[rank].promised) for rank in range(2)]
