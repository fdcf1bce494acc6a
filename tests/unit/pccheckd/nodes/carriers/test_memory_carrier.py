"""The carrier of the tests keeps the interface's promises, and its faults are those it is told."""

from __future__ import annotations

import asyncio

import pytest

from pccheckd.nodes.carriers.carrier import Carrier, CarrierError
from tests.support.memorycarrier import MemoryCarrier, MemoryStore, Plan

pytestmark = pytest.mark.anyio


async def test_nodes_share_what_the_store_holds() -> None:
    store = MemoryStore()
    one: Carrier = MemoryCarrier(store)
    other: Carrier = MemoryCarrier(store)
    await one.set("a", b"1")
    assert await one.swap("b", b"mine") == b"mine"
    assert await other.swap("b", b"yours") == b"mine"
    assert [await one.add("n", 2), await other.add("n", 3)] == [2, 5]
    assert await other.get(["b", "absent", "n", "a"]) == [b"mine", None, b"5", b"1"]


async def test_who_listens_hears_the_bell_and_gets_the_values() -> None:
    store = MemoryStore()
    carrier = MemoryCarrier(store)
    assert await carrier.ring("key", b"first", "bell") == 1
    waiting = asyncio.create_task(carrier.listen("bell", 1, ["key", "absent"], 60))
    await carrier.set("key", b"unheard")
    assert await carrier.listen("silent", 0, ["key"], 0.001) is None
    assert not waiting.done()
    await carrier.ring("key", b"second", "bell")
    assert await waiting == (2, [b"second", None])
    assert await carrier.listen("bell", 0, ["key"], 60) == (2, [b"second"])


async def test_a_store_hangs_breaks_and_forgets() -> None:
    store = MemoryStore()
    carrier = MemoryCarrier(store, limit_s=0.001)
    await carrier.set("key", b"value")
    store.answering.clear()
    with pytest.raises(CarrierError, match=r"did not answer within 0\.001 s"):
        await carrier.get(["key"])
    store.answering.set()
    store.broken = "connection reset"
    with pytest.raises(CarrierError, match="connection reset"):
        await carrier.add("n", 1)
    store.broken = ""
    assert await carrier.get(["key", "n"]) == [b"value", None]
    store.values.clear()
    assert await carrier.get(["key"]) == [None]


async def test_what_is_lost_and_what_is_not_answered() -> None:
    store = MemoryStore()
    with pytest.raises(CarrierError, match="lost"):
        await MemoryCarrier(store, Plan(lost=1)).add("n", 1)
    assert "n" not in store.values
    with pytest.raises(CarrierError, match="not answered"):
        await MemoryCarrier(store, Plan(unanswered=1)).add("n", 1)
    assert store.values["n"] == b"1"


async def test_a_repeated_set_may_bring_an_old_value_back() -> None:
    store = MemoryStore()
    carrier = MemoryCarrier(store, Plan(twice=1))
    await carrier.set("key", b"old")
    carrier.plan = Plan()
    await carrier.set("key", b"new")
    await carrier.settle()
    assert store.values["key"] == b"old"


@pytest.mark.parametrize("seed", range(3))
async def test_a_seed_gives_the_same_order_again(seed: int) -> None:
    async def order() -> list[tuple[str, str]]:
        store = MemoryStore()
        carriers = [MemoryCarrier(store, Plan(late=0.5), seed + n) for n in range(4)]
        await asyncio.gather(*(one.add(str(n), 1) for n, one in enumerate(carriers * 5)))
        return store.operations

    assert await order() == await order()
    assert [int(key) for _, key in await order()] != list(range(20))
