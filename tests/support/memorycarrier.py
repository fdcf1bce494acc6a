"""A carrier in this process's memory, for tests of what nodes tell each other. Each node has a
`MemoryCarrier` of its own over one `MemoryStore`; faults are the store's, or drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from pccheckd.nodes.carriers.carrier import VALUE_MAX, CarrierError

_T = TypeVar("_T")


class MemoryStore:
    """What all carriers share. `answering.clear()` hangs them, `answering.set()` heals them,
    `values.clear()` loses what they hold, and `broken` is the text of the error that all get."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.operations: list[tuple[str, str]] = []  # name and key of each that was carried out
        self.broken = ""
        self.answering = asyncio.Event()
        self.answering.set()
        self._changed = asyncio.Condition()

    async def do(self, name: str, key: str, operation: Callable[[dict[str, bytes]], _T]) -> _T:
        assert key.isascii()
        self.operations.append((name, key))
        result = operation(self.values)
        assert all(len(value) <= VALUE_MAX for value in self.values.values())
        async with self._changed:
            self._changed.notify_all()
        return result

    async def rings(self, bell: str, after: int) -> int:
        """Waits until the bell has rung more than `after` times."""
        async with self._changed:
            await self._changed.wait_for(lambda: int(self.values.get(bell, b"0")) > after)
            return int(self.values[bell])


@dataclass(frozen=True, slots=True)
class Plan:
    """Chances, from 0 to 1: that an operation fails before it arrives (`lost`) or after it was
    carried out (`unanswered`), arrives behind later ones (`late`), or that a `set` arrives a second
    time, later (`twice`)."""

    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    twice: float = 0.0


class MemoryCarrier:
    """A `Carrier`. Late is up to `turns` turns of the event loop, so that no clock is needed."""

    def __init__(
        self, store: MemoryStore, plan: Plan = Plan(), seed: int = 0, *,
        limit_s: float = 5.0, turns: int = 50,
    ) -> None:  # fmt: skip
        self._store, self.plan, self._limit_s, self._turns = store, plan, limit_s, turns
        self._random = random.Random(seed)
        self._going: set[asyncio.Task[None]] = set()

    async def set(self, key: str, value: bytes) -> None:
        def work(values: dict[str, bytes]) -> None:
            values[key] = bytes(value)

        await self._carry("set", key, work)
        if self._happens(self.plan.twice):
            task = asyncio.create_task(self._again(key, work))
            self._going.add(task)
            task.add_done_callback(self._going.discard)

    async def add(self, key: str, amount: int) -> int:
        def work(values: dict[str, bytes]) -> int:
            total = int(values.get(key, b"0")) + amount
            values[key] = b"%d" % total
            return total

        return await self._carry("add", key, work)

    async def swap(self, key: str, value: bytes) -> bytes:
        return await self._carry("swap", key, lambda values: values.setdefault(key, bytes(value)))

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return await self._carry("get", " ".join(keys), lambda values: [*map(values.get, keys)])

    async def ring(self, key: str, value: bytes, bell: str) -> int:
        def work(values: dict[str, bytes]) -> int:
            values[key] = bytes(value)
            total = int(values.get(bell, b"0")) + 1
            values[bell] = b"%d" % total
            return total

        return await self._carry("ring", key, work)

    async def listen(
        self, bell: str, after: int, keys: Sequence[str], limit_s: float
    ) -> tuple[int, list[bytes | None]] | None:
        await self._carry("listen", bell, lambda values: None)
        try:
            async with asyncio.timeout(limit_s):
                count = await self._store.rings(bell, after)
        except TimeoutError:
            return None
        return count, await self.get(keys)

    async def settle(self) -> None:
        """Waits until what arrives a second time has arrived."""
        await asyncio.gather(*self._going)

    async def _carry(self, name: str, key: str, operation: Callable[[dict[str, bytes]], _T]) -> _T:
        async with self._reached():
            if self._happens(self.plan.late):
                await self._later()
            if self._happens(self.plan.lost):
                raise CarrierError(f"{name} {key}: lost by the plan")
            result = await self._store.do(name, key, operation)
            if self._happens(self.plan.unanswered):
                raise CarrierError(f"{name} {key}: carried out, and not answered, by the plan")
            return result

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._store.answering.wait()
        except TimeoutError:
            raise CarrierError(f"the store did not answer within {self._limit_s:g} s") from None
        if self._store.broken:
            raise CarrierError(self._store.broken)
        yield

    async def _again(self, key: str, operation: Callable[[dict[str, bytes]], None]) -> None:
        await self._later()
        await self._store.do("set", key, operation)

    async def _later(self) -> None:
        for _ in range(self._random.randrange(1, self._turns)):
            await asyncio.sleep(0)

    def _happens(self, chance: float) -> bool:
        return self._random.random() < chance
