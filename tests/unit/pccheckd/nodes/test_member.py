"""Two nodes and a store: how they come to one list, in orders that a real store seldom shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from pccheck_native.group import Refused
from pccheck_native.nodes.facts import Have, Said, SaveName
from pccheck_native.nodes.lists import ListMember, NodeHello, Promise, StartList
from pccheck_native.nodes.offers import Offer, StartAnswer, StartRecord
from pccheckd.nodes.carriers.patient import packed
from pccheckd.nodes.member import MemberPhase, NodeMember
from pccheckd.nodes.rounds import BATCH
from tests.support.memorycarrier import MemoryCarrier, MemoryStore

pytestmark = pytest.mark.anyio

LIMIT_S = 60.0
_T = TypeVar("_T")


class Node:
    """A `NodeKeeper` with one rank and no checkpoints."""

    def __init__(
        self, rank: int, life: int, promised: Promise | None = None, *, world_size: int = 2,
        node: int | None = None, host: str = "",
    ) -> None:  # fmt: skip
        self._rank, self._nonce = rank, bytes([rank, life]) * 8
        self.promised, self._world_size = promised or Promise(), world_size
        self._node, self._host = rank if node is None else node, host or f"n{rank}"
        self.answers: list[StartAnswer] = []

    is_live = True
    awaited: StartList | None = None

    def unanswered(self) -> StartList | None:
        return self.awaited

    def hello(self) -> NodeHello:
        return NodeHello(bytes([self._node]) * 16, self._host, "launch", self._world_size,
                         {self._rank: self._nonce}, self.promised)  # fmt: skip

    def lives(self) -> StartList | None:
        return None

    async def promise(self, found: StartList) -> Refused | None:
        self.promised = found.promise
        return None

    async def offer(self, found: StartList, round_: int) -> Offer:
        return Offer(self.hello().node, self.hello().host, Promise(found.number, found.start))

    async def record(self, found: StartList, answer: StartAnswer, servers: object) -> None:
        self.answers.append(answer)
        self.servers = servers

    def have(self) -> Have | None:
        return None

    def heard(self, said: Said, lacks: object) -> None:
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


@pytest.mark.parametrize("value", [b"", b"\x81\x90\xc0", b"\xff\xfe", b"9" * 5000, b"\x90"])
async def test_garbage_in_the_store_counts_as_nothing(value: bytes) -> None:
    store = MemoryStore()
    store.values |= {"job/hellos": b"1", "job/hello/1": value, "job/list/1": value or b"x",
                     "job/last-list": value}  # fmt: skip
    await begun(*(NodeMember(MemoryCarrier(store), "job", Node(rank, 0)) for rank in range(2)))


async def test_a_promise_without_an_answer_is_taken_up_by_a_new_daemon() -> None:
    """The other node has the answer already, and looks at no list any more."""
    store = MemoryStore()
    nodes = [Node(rank, 0) for rank in range(2)]
    first = NodeMember(MemoryCarrier(store), "job", nodes[0])
    task = asyncio.create_task(first.run())
    second = NodeMember(MemoryCarrier(store), "job", nodes[1])
    await started(second, lambda: any(key.endswith("/offer/0/1") for key in store.values))
    async with asyncio.timeout(LIMIT_S):
        while first.phase is not MemberPhase.RUNNING:
            await asyncio.sleep(0.001)
    assert not nodes[1].answers
    nodes[1].awaited = second.list
    await begun(NodeMember(MemoryCarrier(store), "job", nodes[1]))
    assert len(nodes[1].answers) == 1 and "job/list/2" not in store.values
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_daemon_back_in_an_older_list_holds_nobody_up() -> None:
    """The third node promises to a list with the others' processes of before. Its daemon comes back
    behind the hellos of their new processes, and waits for an answer to that promise."""
    store = MemoryStore()
    nodes = [Node(rank, 0, world_size=3) for rank in range(3)]
    await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
    promised = nodes[0].promised
    nodes = [Node(rank, 1, promised, world_size=3) for rank in range(3)]
    third = NodeMember(MemoryCarrier(store), "job", nodes[2])
    await started(third, lambda: third.phase is MemberPhase.BEGINNING)
    nodes[2].awaited = third.list
    others = [NodeMember(Slow(store), "job", node) for node in nodes[:2]]
    await begun(*others, NodeMember(MemoryCarrier(store), "job", nodes[2]))


async def test_two_lists_with_some_members_each_give_way_to_a_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second node is in both, and takes the newer one, with an old process of the first."""
    monkeypatch.setattr("pccheckd.nodes.member.TRUSTS_S", 0.05)
    store, nodes = MemoryStore(), [Node(rank, 1) for rank in range(2)]
    for number, first in enumerate((nodes[0], Node(0, 0)), 1):
        hellos = first.hello(), nodes[1].hello()
        members = (ListMember(h.node, h.host, (*h.nonces,), (*h.nonces.values(),)) for h in hellos)
        found = StartList(bytes([number]) * 16, number, "launch", 2, False, 1, tuple(members))
        store.values[f"job/list/{number}"] = packed(found.to_plain())
    await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
    assert "job/list/3" in store.values


class Slow(MemoryCarrier):
    """Says hello at once, and reads nothing until there are three new ones."""

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        while "/hellos" in keys[0] and int(self._store.values["job/hellos"]) < 7:
            await asyncio.sleep(0)
        return await super().get(keys)


@pytest.mark.parametrize("losses", [1, 2, 5, 9, 14, 20, 30])
async def test_a_store_that_comes_back_empty_is_noticed(losses: int) -> None:
    """After so many operations; whoever says hello first hides it from the count."""

    class Losing(MemoryStore):
        async def do(self, name: str, key: str, operation: Callable[[dict[str, bytes]], _T]) -> _T:
            if len(self.operations) == losses:
                self.values.clear()
            await asyncio.sleep(0)
            return await super().do(name, key, operation)

    store = Losing()
    nodes = [Node(rank, 0, world_size=3) for rank in range(3)]
    await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))


async def test_a_node_that_has_skipped_its_list_says_hello_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has read the number of the last list in the store of before."""
    monkeypatch.setattr("pccheckd.nodes.member.AGAIN_S", 0.05)

    class Switched(MemoryCarrier):
        has_switched = False

        async def get(self, keys: Sequence[str]) -> list[bytes | None]:
            if keys == ["job/last-list"] and not self.has_switched:
                self.has_switched = True
                return [b"\x02"]
            return await super().get(keys)

    store = MemoryStore()
    carriers = [Switched(store), MemoryCarrier(store)]
    await begun(*(NodeMember(one, "job", Node(rank, 0)) for rank, one in enumerate(carriers)))


async def test_a_list_with_the_number_of_an_earlier_store_is_found() -> None:
    store = MemoryStore()
    store.values["job/last-list"] = b"\x04"
    await begun(*(NodeMember(MemoryCarrier(store), "job", Node(rank, 0)) for rank in range(2)))
    assert "job/list/5" in store.values


async def test_lists_of_earlier_starts_are_not_read_again() -> None:
    store, old = MemoryStore(), set[str]()
    for life in range(3):
        store.operations.clear()
        nodes = [Node(rank, life) for rank in range(2)]
        await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
        gotten = {one for name, keys in store.operations if name == "get" for one in keys.split()}
        assert gotten.isdisjoint(old)
        old |= {key for key in store.values if "job/list/" in key}


async def test_a_huge_count_of_hellos_takes_no_memory_and_is_told() -> None:
    store = MemoryStore()
    store.values["job/hellos"] = b"9" * 12
    member = NodeMember(MemoryCarrier(store), "job", Node(0, 0))
    await member.run()
    assert member.refused is not None and "counts 1000000000000 starts" in member.refused.reason
    assert not member.hellos


async def test_a_node_that_comes_back_under_another_host_name_is_no_clone() -> None:
    store = MemoryStore()
    for name in ("pod-1", "pod-2"):
        nodes = [Node(0, 0), Node(1, 0, host=name)]
        await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))


@pytest.mark.parametrize("host", ["", "n1"])
async def test_both_nodes_with_one_id_are_refused(host: str) -> None:
    store = MemoryStore()
    nodes = [Node(0, 0, node=7, host="n0"), Node(1, 0, node=7, host=host or "n0")]
    members = [NodeMember(MemoryCarrier(store), "job", node) for node in nodes]
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(member.run() for member in members))
    for member in members:
        assert member.refused is not None and "has one id" in member.refused.reason
        assert all(f"(rank {rank})" in member.refused.reason for rank in (0, 1)), member.refused
    again = [Node(0, 1, node=7), Node(1, 1, node=8)]  # the copy has got an id of its own
    await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in again))


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


async def refusals(*members: NodeMember) -> list[str]:
    """Of all members, which end."""
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(member.run() for member in members))
    return [member.refused.reason for member in members if member.refused is not None]


async def test_who_cannot_promise_tells_the_other_members() -> None:
    class Full(Node):
        async def promise(self, found: StartList) -> Refused | None:
            return Refused("the disk is full", "make room")

    store = MemoryStore()
    nodes = [Node(0, 0), Full(1, 0)]
    found = await refusals(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
    assert found == ["host n1 refused this start: the disk is full", "the disk is full"]


async def test_who_fails_in_a_round_tells_the_other_members() -> None:
    class Failing(Node):
        async def offer(self, found: StartList, round_: int) -> Offer:
            raise OSError("no space left")

    store = MemoryStore()
    first, second = (NodeMember(MemoryCarrier(store), "job", one) for one in
                     (Node(0, 0), Failing(1, 0)))  # fmt: skip
    other = asyncio.create_task(first.run())
    with pytest.raises(OSError, match="no space left"):
        await second.run()
    await second.fail(Refused("no space left", ""))
    await asyncio.wait_for(other, LIMIT_S)
    assert first.refused and first.refused.reason == "host n1 refused this start: no space left"


class Holding(Node):
    """It has the records of some earlier starts."""

    def __init__(self, rank: int, *starts: int, world_size: int = 2) -> None:
        super().__init__(rank, 0, world_size=world_size)
        self._records = tuple(map(_record, starts))

    async def offer(self, found: StartList, round_: int) -> Offer:
        offer = await super().offer(found, round_)
        return offer._replace(records=self._records)


def _record(start: int) -> StartRecord:
    members = (ListMember(bytes([9]) * 16, "old", (0,), (bytes([start]) * 16,)),)
    found = StartList(bytes([start]) * 16, start, "launch", 1, False, 1, members)
    answer = StartAnswer(found.start, 0, None, tuple(bytes([n]) * 16 for n in range(1, start)))
    return StartRecord(found).with_answer(answer)


async def test_a_list_that_the_decider_lacks_is_asked_for() -> None:
    """Once, although two nodes have it. What the decider has, too, nobody sends."""
    store = MemoryStore()
    holds = [(1,), (1, 2), (1, 2)]
    nodes = [Holding(rank, *starts, world_size=3) for rank, starts in enumerate(holds)]
    members = [NodeMember(MemoryCarrier(store), "job", node) for node in nodes]
    found = await refusals(*members)  # nobody here was a member of those starts
    assert len(found) == 3 and all("host old" in one for one in found)
    sent = [key for name, key in store.operations if name == "set" and "/who/" in key]
    assert len(sent) == 1


async def test_who_does_not_send_a_list_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pccheckd.nodes.rounds.ASKS_S", 0.05)

    class Mute(MemoryCarrier):
        async def set(self, key: str, value: bytes) -> None:
            if "/who/" not in key:
                await super().set(key, value)

    store = MemoryStore()
    carriers = [MemoryCarrier(store), Mute(store), MemoryCarrier(store)]
    nodes = [Holding(0, world_size=3), *(Holding(rank, 1, world_size=3) for rank in (1, 2))]
    members = [NodeMember(one, "job", node) for one, node in zip(carriers, nodes, strict=True)]
    assert len(await refusals(*members)) == 3


async def test_of_many_hellos_only_the_last_node_reads_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pccheckd.nodes.member.READS_AFTER_S", 1e6)  # on any machine
    store, many = MemoryStore(), 4 * BATCH
    nodes = [Node(rank, 0, world_size=many) for rank in range(many)]
    members = [NodeMember(MemoryCarrier(store), "job", node) for node in nodes]
    await begun(*members)
    read = [key for name, key in store.operations if name == "get" and "/hello/" in key]
    assert sum(len(keys.split()) for keys in read) < many * many / 4


async def test_a_last_hello_that_never_comes_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pccheckd.nodes.member.READS_AFTER_S", 0.1)
    store, many = MemoryStore(), BATCH
    members = [
        NodeMember(MemoryCarrier(store), "job", Node(rank, 0, world_size=many))
        for rank in range(many)
    ]
    tasks = [asyncio.create_task(one.run()) for one in members[:-1]]
    async with asyncio.timeout(LIMIT_S):
        while store.values.get("job/hellos") != b"%d" % (many - 1):
            await asyncio.sleep(0.001)
    last = asyncio.create_task(members[-1].run())
    while store.values.get("job/hellos") != b"%d" % many:
        await asyncio.sleep(0)
    store.values["job/hellos"] = b"%d" % (many + 3)  # of nodes that have ended since
    async with asyncio.timeout(LIMIT_S):
        while any(member.phase is not MemberPhase.RUNNING for member in members):
            await asyncio.sleep(0.001)
    for task in (*tasks, last):
        task.cancel()
    await asyncio.gather(*tasks, last, return_exceptions=True)


class Replicated(Node):
    def hello(self) -> NodeHello:
        return super().hello()._replace(replicated=True)


async def test_nodes_that_do_not_fit_together_are_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccheckd.nodes.member.APART_S", 0.1)
    store = MemoryStore()
    nodes = [Replicated(0, 0), Node(1, 0)]
    found = await refusals(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
    assert len(found) == 2 and all("host n0 saves with replicated=True" in one for one in found)


async def test_the_hello_of_an_earlier_life_refuses_nobody() -> None:
    store = MemoryStore()
    old = NodeMember(MemoryCarrier(store), "job", Replicated(1, 0))
    await started(old, lambda: "job/hello/1" in store.values)
    first = NodeMember(MemoryCarrier(store), "job", Node(0, 1))
    await started(first, lambda: "replicated=True" in first.missing)
    await begun(*(NodeMember(MemoryCarrier(store), "job", Node(rank, 2)) for rank in range(2)))


async def started(member: NodeMember, holds: Callable[[], bool]) -> None:
    """It runs until the condition holds."""
    task = asyncio.create_task(member.run())
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.001)
    task.cancel()


@pytest.mark.parametrize("when", ["/hello/1", "/list/1", "/offer/0/0", "/answer/0"])
async def test_a_store_that_loses_all_while_a_start_begins_stops_nothing(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccheckd.nodes.member.LISTEN_S", 0.05)
    monkeypatch.setattr("pccheckd.nodes.carriers.patient.LISTEN_S", 0.05)
    monkeypatch.setattr("pccheckd.nodes.member.QUIET_S", 0.05)

    class Losing(MemoryStore):
        has_lost = False

        async def do(self, name: str, key: str, operation: Callable[[dict[str, bytes]], _T]) -> _T:
            result = await super().do(name, key, operation)
            if not self.has_lost and name in ("set", "swap") and key.endswith(when):
                self.has_lost = True
                self.values.clear()
            return result

    store = Losing()
    nodes = [Saver(rank) for rank in range(2)]
    for node in nodes:
        node.saved = Have()
    await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
    assert store.has_lost


async def test_an_answer_that_only_one_member_has_read_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pccheckd.nodes.member.LISTEN_S", 0.05)
    monkeypatch.setattr("pccheckd.nodes.carriers.patient.LISTEN_S", 0.05)
    monkeypatch.setattr("pccheckd.nodes.member.QUIET_S", 0.05)
    store = MemoryStore()
    sees = asyncio.Event()

    class Blind(MemoryCarrier):
        async def get(self, keys: Sequence[str]) -> list[bytes | None]:
            found = await super().get(keys)
            hidden = not sees.is_set()
            return [None if hidden and "/answer/" in key else value
                    for key, value in zip(keys, found, strict=True)]  # fmt: skip

    first = NodeMember(MemoryCarrier(store), "job", one := Saver(0))
    one.saved = Have()

    async def lose() -> None:
        while first.phase is not MemberPhase.RUNNING:
            await asyncio.sleep(0.001)
        store.values.clear()
        sees.set()

    losing = asyncio.create_task(lose())
    await begun(first, NodeMember(Blind(store), "job", Saver(1)))
    await losing


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_silent_store_is_logged_while_processes_live(
    is_live: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pccheckd.nodes.carriers.patient.WARN_AFTER_S", 0.0)
    monkeypatch.setattr("pccheckd.nodes.carriers.patient.RETRY_S", 0.001)
    store, node = MemoryStore(), Node(0, 0)
    store.broken, node.is_live = "no process speaks", is_live
    member = NodeMember(MemoryCarrier(store), "job", node)
    await started(member, lambda: member.patient.operations > 5)
    assert ("the other nodes cannot be reached" in caplog.text) == is_live


async def test_who_waits_is_told_for_which_ranks() -> None:
    """One node waits before the second node comes, and then for the third one only. A later launch
    with the same id finds the hellos of the nodes before, and waits for an answer of theirs."""
    store = MemoryStore()
    nodes = [Node(rank, 0, world_size=3) for rank in range(3)]
    members = [NodeMember(MemoryCarrier(store), "job", node) for node in nodes]
    tasks = [asyncio.create_task(members[0].run())]
    await until_told(members[0], "ranks 1 to 2 of 3 have not connected")
    tasks.append(asyncio.create_task(members[1].run()))
    await until_told(members[0], "rank 2 of 3 has not connected")
    await until_told(members[1], "rank 2 of 3 has not connected")
    for task in tasks:
        task.cancel()
    await begun(*(NodeMember(MemoryCarrier(store), "job", node) for node in nodes))
    again = NodeMember(MemoryCarrier(store), "job", Node(0, 1, world_size=3))
    task = asyncio.create_task(again.run())
    await until_told(again, "host n1 (rank 1) and host n2 (rank 2) offered nothing for")
    task.cancel()


async def until_told(member: NodeMember, words: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while words not in member.missing:
            await asyncio.sleep(0.001)


class Saver(Node):
    """A node with one rank. It has the checkpoints of `saved`, and keeps the facts that it hears in
    `said`."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 0)
        self.saved: Have | None = None
        self.said = Said()

    def have(self) -> Have | None:
        return self.saved

    def heard(self, said: Said, lacks: object) -> None:
        self.said = said


class Deaf(MemoryCarrier):
    """While `is_deaf` is set, no bell is heard."""

    is_deaf = False

    async def listen(
        self, bell: str, after: int, keys: Sequence[str], limit_s: float
    ) -> tuple[int, list[bytes | None]] | None:
        heard = await super().listen(bell, after, keys, limit_s)
        while self.is_deaf:
            await asyncio.sleep(1.0)
        return heard


async def test_a_deciders_own_checkpoint_is_global_without_a_message() -> None:
    name = SaveName(0, 0, 1, 0)
    have = Have((name,), (name,), name)
    store, nodes = MemoryStore(), [Saver(0), Saver(1)]
    carrier = Deaf(store)
    members = [
        NodeMember(carrier if rank == 0 else MemoryCarrier(store), "job", node)
        for rank, node in enumerate(nodes)
    ]
    tasks = [asyncio.create_task(member.run()) for member in members]
    async with asyncio.timeout(LIMIT_S):
        while any(member.phase is not MemberPhase.RUNNING for member in members):
            await asyncio.sleep(0)
        nodes[1].saved = have
        members[1].changed()
        while members[0].view.haves[1:] != [have]:
            await asyncio.sleep(0)
        assert nodes[0].said == Said()  # the first member has not saved it yet
        carrier.is_deaf = True
        nodes[0].saved = have
        members[0].changed()
        while not all(node.said.globals == (name,) for node in nodes):
            await asyncio.sleep(0)
    assert ("ring", f"job/{members[0].list.start.hex()}/have/0") not in store.operations
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Ending(MemoryStore):
    """It holds what the first node says, or has ended before."""

    async def do(self, name: str, key: str, operation: Callable[[dict[str, bytes]], _T]) -> _T:
        if name == "ring" and key.endswith("/said"):
            assert self.first.said == Said()
        return await super().do(name, key, operation)

    first: Saver


async def test_who_decides_tells_its_own_ranks_last() -> None:
    """Those may end then, and one of them may have the store."""
    name = SaveName(0, 0, 1, 0)
    store, nodes = Ending(), [Saver(0), Saver(1)]
    store.first = nodes[0]
    members = [NodeMember(MemoryCarrier(store), "job", node) for node in nodes]
    for node in nodes:
        node.saved = Have((name,), (name,), name)
    tasks = [asyncio.create_task(member.run()) for member in members]
    async with asyncio.timeout(LIMIT_S):
        while not all(node.said.globals == (name,) for node in nodes):
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_first_checkpoint_of_who_decides_is_not_global_alone() -> None:
    name = SaveName(0, 0, 1, 0)
    store, nodes = MemoryStore(), [Saver(0), Saver(1)]
    members = [NodeMember(MemoryCarrier(store), "job", node) for node in nodes]
    nodes[0].saved = Have((name,), (name,), name)
    tasks = [asyncio.create_task(member.run()) for member in members]
    async with asyncio.timeout(LIMIT_S):
        while not any(key.endswith("have/0") for _, key in store.operations):
            await asyncio.sleep(0)
    assert nodes[0].said == nodes[1].said == Said()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_offer_that_is_withdrawn_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others may count on what this node does not have any more."""
    monkeypatch.setattr("pccheckd.nodes.member.QUIET_S", 1e9)
    name = SaveName(0, 0, 1, 0)
    store, nodes = MemoryStore(), [Saver(0), Saver(1)]
    members = [NodeMember(MemoryCarrier(store), "job", node) for node in nodes]
    tasks = [asyncio.create_task(member.run()) for member in members]
    async with asyncio.timeout(LIMIT_S):
        for have in (Have((name,), (name,), name), Have((), (name,), name)):
            nodes[1].saved = have
            members[1].changed()
            while members[0].view.haves[1:] != [have]:
                await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
