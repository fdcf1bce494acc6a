"""What sessions have of the DRAM, over tenants that are only numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_wire.errors import RefusedError
from pccheckd.core import grant as grant_module
from pccheckd.core.grant import load_chunks
from pccheckd.core.port import Port
from pccheckd.jobs import memory as memory_module
from pccheckd.jobs.memory import Dram

CHUNK = 10
WRITERS = 6
LOAD_CHUNKS = load_chunks(WRITERS)
UID = 1000


class Pool:
    def __init__(self, budget: int) -> None:
        self.budget, self.used = budget, 0

    def usage(self) -> tuple[int, int]:
        return self.budget, self.used


class Tenant:
    """Segments as a tenant has them; with `keeps` its client gives nothing back."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.segments: list[int] = []
        self.going = 0
        self.keeps = False
        self.left = 0  # in the first segment
        self.busy = False  # saves are in flight

    def grow(self, nbytes: int) -> int:
        more = min(nbytes - sum(self.segments), self.pool.budget - self.pool.used)
        if more > 0 and not self.going:
            self.segments.append(more)
            self.pool.used += more
        return sum(self.segments)

    def usage(self) -> SimpleNamespace:
        return SimpleNamespace(left_chunks=self.left)

    def shrink(self, nbytes: int) -> tuple[int, int, int]:
        lasting = self.segments[: len(self.segments) - self.going]
        if self.left and not self.busy:
            self.going, lasting, self.left = len(self.segments), [], 0
        while len(lasting) > 1 and sum(lasting) > nbytes:
            lasting.pop()
            self.going += 1
        if not self.keeps:
            self.pool.used -= sum(self.segments[len(lasting) :])
            self.segments, self.going = lasting, 0
        return sum(self.segments), sum(lasting), self.going

    def load(self, volume: object, *_: object) -> None:
        if volume is not None:
            raise ValueError(volume)

    def release_memory(self) -> None:
        self.pool.used -= sum(self.segments)
        self.segments, self.going = [], 0


class Engine:
    """Calls are made at once, after the loop has turned."""

    def __init__(self, budget: int) -> None:
        self.pool = Pool(budget)

    async def call(self, _uid: int, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    drive = call

    async def grow(self, function: Callable[[int], int], nbytes: int) -> int:
        return int(await self.call(0, function, nbytes))


class Node:
    def __init__(self, chunks: int, limit_chunks: int = 0) -> None:
        self.engine: Any = Engine(chunks * CHUNK)
        self.config: Any = SimpleNamespace(
            max_dram_per_user_bytes=limit_chunks * CHUNK, writers=WRITERS
        )
        self.engine.config = self.config
        self.tenants: list[Any] = []
        self.memory = Dram(self.engine, lambda: self.tenants)
        self.stuck: list[int] = []
        self.ended: list[int] = []
        self.busy: set[int] = set()

    def tenant(self, uid: int = UID) -> Any:
        native: Any = Tenant(self.engine.pool)
        port = Port(self.engine, uid, lambda _event: None, CHUNK, 1, native)
        tenant = SimpleNamespace(
            binding=SimpleNamespace(port=port, lock=asyncio.Lock()), quiet=False,
            seat=SimpleNamespace(owner=object(), last_used_ns=0),
            volumes=SimpleNamespace(is_done=False), key=SimpleNamespace(uid=uid),
            ledger=SimpleNamespace(live=list),
        )  # fmt: skip
        self.tenants.append(tenant)
        return tenant

    async def claim(self, session: int, tenant: Any, chunks: int) -> int:
        by: Any = SimpleNamespace(
            number=session, uid=tenant.key.uid, port=tenant.binding.port, ending=False,
            tenant=SimpleNamespace(key=f"s{session}"),
            keeps_memory=lambda: self.stuck.append(session),
            is_busy=lambda: session in self.busy, give_way=lambda: self.ended.append(session),
        )  # fmt: skip
        return await self.memory.claim(by, chunks * CHUNK) // CHUNK

    def leaves(self, session: int, tenant: Any, *, ago_s: float = 0.0) -> None:
        self.memory.gone(session)
        tenant.seat.owner, tenant.quiet = None, True
        tenant.seat.last_used_ns = memory_module.time.monotonic_ns() - int(ago_s * 1e9)

    async def settled(self, *chunks: int) -> None:
        """Until the tenants have so many."""
        for _ in range(2000):
            self.memory.balance()
            await asyncio.sleep(0.001)
            if self.has() == list(chunks):
                return
        raise AssertionError(self.has())

    def has(self) -> list[int]:
        return [tenant.binding.port.grant.nbytes // CHUNK for tenant in self.tenants]


async def test_memory_that_somebody_may_still_write_to_is_replaced() -> None:
    node = Node(16)
    tenant = node.tenant()
    await node.claim(1, tenant, 16)
    await node.settled(16)
    channel = tenant.binding.port.native
    channel.left, channel.busy, channel.keeps = 3, True, True
    tenant.binding.port.grant.adopted(16 * CHUNK)
    for _ in range(50):  # not while that would hold up what is in flight
        node.memory.balance()
        await asyncio.sleep(0.001)
    assert node.has() == [16] and channel.left == 3 and not channel.going
    channel.busy = False
    while not channel.going:  # the client is asked for it, and has it
        node.memory.balance()
        await asyncio.sleep(0.001)
    channel.keeps = False
    while channel.going:
        await asyncio.sleep(0.001)
    await node.settled(16)
    assert not channel.left


async def test_a_newcomer_gets_its_share_and_it_goes_back() -> None:
    node = Node(16)
    first, second = node.tenant(), node.tenant()
    await node.claim(1, first, 20)
    await node.settled(16, 0)
    assert await node.claim(2, second, 6) >= 2
    await node.settled(10, 6)
    node.leaves(2, second, ago_s=10)
    for _ in range(50):  # it may come back, and finds what it had
        node.memory.balance()
        await asyncio.sleep(0)
    assert node.has() == [10, 6]
    second.seat.last_used_ns -= int(memory_module.LEFT_ALONE_S * 1e9)
    await node.settled(16, 0)


async def test_a_newcomer_takes_what_was_left_a_moment_ago() -> None:
    node = Node(16)
    tenants = [node.tenant() for _ in range(3)]
    await node.claim(1, tenants[0], 8)
    await node.claim(2, tenants[1], 8)
    await node.settled(8, 8, 0)
    node.leaves(2, tenants[1])
    await node.claim(3, tenants[2], 8)
    await node.settled(8, 0, 8)


async def test_nothing_moves_while_the_same_sessions_are_there() -> None:
    node = Node(17)
    tenants = [node.tenant() for _ in range(3)]
    for session, tenant in enumerate(tenants):
        await node.claim(session, tenant, 9 + session)
    await node.settled(6, 6, 5)
    for _ in range(50):
        node.memory.balance()
        await asyncio.sleep(0)
        grants = [tenant.binding.port.grant for tenant in tenants]
        assert all(grant.aim_bytes == grant.nbytes for grant in grants)
        assert node.has() == [6, 6, 5]


async def test_memory_does_not_grow_beside_a_load_that_has_enough() -> None:
    node = Node(2 * LOAD_CHUNKS)
    tenant, other = node.tenant(), node.tenant()
    port = tenant.binding.port
    volume: Any = None
    await port.load(volume, 1, 0, 1, 1)
    await node.claim(1, tenant, 2 * LOAD_CHUNKS)
    await node.settled(LOAD_CHUNKS, 0)
    for _ in range(50):
        await asyncio.sleep(0)
        assert node.has() == [LOAD_CHUNKS, 0]
    await node.claim(2, other, 4)  # what a load holds up can still change
    await node.settled(LOAD_CHUNKS, 4)
    port._on_event(SimpleNamespace(kind="load_ended"))
    await node.settled(2 * LOAD_CHUNKS - 4, 4)
    await port.load(volume, 1, 0, 1, 2)
    node.memory.gone(2)
    await other.binding.port.release_memory()
    await node.claim(1, tenant, 2 * LOAD_CHUNKS)
    await port.release_memory()  # waits for no load


async def test_a_load_that_does_not_begin_holds_nothing_up() -> None:
    node = Node(2 * LOAD_CHUNKS)
    tenant = node.tenant()
    volume: Any = "removed"
    with pytest.raises(RefusedError):
        await tenant.binding.port.load(volume, 1, 0, 1, 1)
    await node.claim(1, tenant, 2 * LOAD_CHUNKS)
    await node.settled(2 * LOAD_CHUNKS)


async def test_who_keeps_what_he_was_asked_for_is_told_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grant_module, "BACK_LIMIT_S", 0.05)
    monkeypatch.setattr(memory_module, "CLAIM_LIMIT_S", 0.5)
    node = Node(8)
    first, second = node.tenant(), node.tenant()
    await node.claim(1, first, 8)
    await node.settled(8, 0)
    first.binding.port.native.keeps = True
    with pytest.raises(RefusedError, match="being returned") as refused:
        await node.claim(2, second, 8)
    assert refused.value.retryable and "80 B of 80 B (--dram) are used" in refused.value.message
    assert node.stuck and set(node.stuck) == {1}
    first.binding.port.native.keeps = False  # its session was ended
    await node.settled(4, 4)


async def test_who_was_stopped_together_with_the_daemon_keeps_his_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that was paused for minutes: no client could return memory meanwhile."""
    paused_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + paused_s)
    monkeypatch.setattr(grant_module, "time", clock)
    monkeypatch.setattr(memory_module, "CLAIM_LIMIT_S", 0.5)
    node = Node(8)
    first, second = node.tenant(), node.tenant()
    await node.claim(1, first, 8)
    await node.settled(8, 0)
    first.binding.port.native.keeps = True
    with pytest.raises(RefusedError, match="being returned"):
        await node.claim(2, second, 8)
    paused_s = 1000.0
    await asyncio.sleep(10 * grant_module.RETRY_S)
    assert not node.stuck
    first.binding.port.native.keeps = False
    await node.settled(4, 4)


async def test_memory_that_grows_for_a_session_without_room_is_not_lost() -> None:
    """There was room when it began to grow; then a session of another user came."""
    node = Node(4)
    first, second, third = (node.tenant(uid) for uid in (UID, UID, UID + 1))
    await node.claim(1, first, 2)
    told, call = asyncio.Event(), node.engine.call

    async def told_late(uid: int, function: Any, *arguments: Any) -> Any:
        grown = await call(uid, function, *arguments)
        if function == second.binding.port.native.grow:
            await told.wait()
        return grown

    node.engine.call = told_late
    newcomer = asyncio.create_task(node.claim(2, second, 2))
    while not second.binding.port.grant.aim_bytes:
        await asyncio.sleep(0)
    other = asyncio.create_task(node.claim(3, third, 2))
    await asyncio.sleep(3 * memory_module._RETRY_S)  # both claims are looked at again
    told.set()
    await asyncio.gather(newcomer, return_exceptions=True)
    while not other.done():
        if 2 in node.ended and second.seat.owner is not None:
            node.leaves(2, second)
        await asyncio.sleep(0.001)
    assert await other == 2
    await node.settled(2, 0, 2)


async def test_memory_that_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By RLIMIT_AS or strict overcommit: the budget has room, and nobody holds anything."""
    monkeypatch.setattr(memory_module, "CLAIM_LIMIT_S", 0.1)
    node = Node(8)
    tenant = node.tenant()
    tenant.binding.port.native.grow = lambda _nbytes: 0
    with pytest.raises(RefusedError, match=r"0 B of .* but the system refuses the rest: memory li"):
        await node.claim(1, tenant, 4)


async def test_many_who_wait_cost_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose claims wait must not keep the loop from the others."""
    monkeypatch.setattr(memory_module, "CLAIM_LIMIT_S", 0.5)
    sessions = 40
    node = Node(8 * sessions)
    tenants = [node.tenant() for _ in range(sessions)]
    await node.claim(0, tenants[0], 8 * sessions)
    await node.settled(8 * sessions, *([0] * (sessions - 1)))
    tenants[0].binding.port.native.keeps = True
    divided, balance = 0, node.memory.balance

    def counted() -> None:
        nonlocal divided
        divided += 1
        balance()

    monkeypatch.setattr(node.memory, "balance", counted)
    began = time.monotonic()
    claims = [node.claim(number, tenants[number], 8) for number in range(1, sessions)]
    results = await asyncio.gather(*claims, return_exceptions=True)
    assert all(isinstance(result, RefusedError) for result in results)
    looks = (time.monotonic() - began) / memory_module._RETRY_S
    assert divided <= 2 * sessions + 2 * looks
    tenants[0].binding.port.native.keeps = False
    await node.settled(*([8] * sessions))


async def test_a_limit_that_is_lowered() -> None:
    node = Node(32)
    first, second = node.tenant(), node.tenant()
    await node.claim(1, first, 10)
    await node.claim(2, second, 10)
    await node.settled(10, 10)
    node.config.max_dram_per_user_bytes = 8 * CHUNK
    await node.settled(4, 4)
    node.leaves(2, second)
    await node.settled(8, 0)  # one's own limit is not filled with what nobody uses
    third = node.tenant()
    await node.claim(3, third, 3)
    await node.settled(5, 0, 3)


OTHER = UID + 1


async def test_a_session_of_a_user_with_many_ends_for_another_user() -> None:
    """The newest that is not busy; a newcomer of the same user ends nobody."""
    node = Node(8)
    tenants = [node.tenant() for _ in range(4)]
    for session, tenant in enumerate(tenants):
        await node.claim(session, tenant, 2)
    with pytest.raises(RefusedError, match="each of 5 sessions, 5 of them of uid 1000"):
        await node.claim(4, node.tenant(), 2)
    assert not node.ended
    node.busy = {3}
    claims = [asyncio.create_task(node.claim(5 + n, node.tenant(OTHER), 2)) for n in range(2)]
    while len(node.ended) < 2:
        await asyncio.sleep(0.001)
    assert node.ended == [2, 1]
    for session in (1, 2):
        await asyncio.sleep(0.1)  # they take their time; nobody else ends meanwhile
        node.leaves(session, tenants[session])
    assert await asyncio.gather(*claims) == [2, 2]
    assert node.ended == [2, 1] and not node.stuck
    with pytest.raises(RefusedError, match="each of 5 sessions, 3 of them of uid 1000"):
        await node.claim(7, tenants[1], 2)
    with pytest.raises(RefusedError, match="each of 5 sessions, 3 of them of uid 1001"):
        await node.claim(8, node.tenant(OTHER), 2)


async def test_two_chunks_each_or_a_reason() -> None:
    node = Node(5)
    tenants = [node.tenant() for _ in range(3)]
    await node.claim(1, tenants[0], 5)
    await node.claim(2, tenants[1], 5)
    with pytest.raises(RefusedError, match="two chunks for each of 3 sessions"):
        await node.claim(3, tenants[2], 5)
    await node.settled(3, 2, 0)  # the refused one is not waited for
