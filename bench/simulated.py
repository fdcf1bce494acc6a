"""Simulated time, and a store in it, for `bench.scale`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import selectors
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from pccheckd.nodes import member, rounds
from pccheckd.nodes.carriers.carrier import VALUE_MAX
from pccheckd.nodes.carriers.patient import parsed

_T = TypeVar("_T")

#: From a node to the store and back, by way of a trainer: as bench.nodes measures on one machine.
TRIP_S = 0.001
#: torch's TCPStore with several clients here: 12 us for an operation, 1.2 us for each further key
#: of multi_get; and a network card of 10 Gbit/s.
OPERATION_S, KEY_S, BYTES_PER_S = 12e-6, 1.2e-6, 1.25e9
#: Until a node has read what it got, and knows what follows from it, for each value.
VALUE_S = 16e-6

#: Which node's code runs.
_NODE: contextvars.ContextVar[int] = contextvars.ContextVar("node", default=-1)


@contextlib.contextmanager
def busy(node: int) -> Iterator[None]:
    """What runs here, and the tasks that it makes, is the work of this node."""
    token = _NODE.set(node)
    try:
        yield
    finally:
        _NODE.reset(token)


class _Selector(selectors.SelectSelector):
    """Nothing is waited for: time passes instead."""

    clock: Clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all wait for each other"
            self.clock.pass_s(timeout)
        return ready


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes when nothing else happens. The CPU time that each node's
    Python took is measured, and no simulated time."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.used_s: defaultdict[int, float] = defaultdict(float)  #: CPU, by node
        selector = _Selector()
        selector.clock = self
        super().__init__(selector)
        self.set_task_factory(_measured)

    def time(self) -> float:
        return self._now_s

    def pass_s(self, seconds: float) -> None:
        self._now_s += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *given: Any
    ) -> Any:
        """At once: what a thread does takes no simulated time."""
        future = self.create_future()
        future.set_result(function(*given))
        return future

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        node, began_s = _NODE.get(), time.perf_counter()
        try:
            yield
        finally:
            self.used_s[node] += time.perf_counter() - began_s


class _Steps(Coroutine[Any, Any, _T]):
    """A coroutine whose steps are measured."""

    def __init__(self, clock: Clock, work: Coroutine[Any, Any, _T]) -> None:
        self._clock, self._work = clock, work

    def send(self, value: Any) -> Any:
        with self._clock.step():
            return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        with self._clock.step():
            return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()


def _measured(loop: Any, work: Any, **more: Any) -> asyncio.Task[Any]:
    """A task whose steps the clock measures."""
    return asyncio.Task(_Steps(loop, work), loop=loop, **more)


def simulate(work: Callable[[Clock], Coroutine[Any, Any, _T]]) -> _T:
    """Runs it in a time of its own."""
    clock = Clock()
    simulated = SimpleNamespace(monotonic=clock.time)
    names = ("member", "rounds", "exchange", "carriers.patient")
    with contextlib.ExitStack() as patches:
        for name in names:
            module = sys.modules[f"pccheckd.nodes.{name}"]
            patches.enter_context(mock.patch.object(module, "time", simulated))
        # Each node reads what all have written: here that is read once.
        read = functools.cache(parsed)
        for reader in (member, rounds):
            patches.enter_context(mock.patch.object(reader, "parsed", read))
        with asyncio.Runner(loop_factory=lambda: clock) as runner:
            return runner.run(work(clock))


@dataclass(frozen=True, slots=True)
class Counted:
    """What the store has carried out."""

    operations: int
    keys: int  # read by an operation for many keys
    bytes: int

    def __sub__(self, before: Counted) -> Counted:
        return Counted(
            self.operations - before.operations, self.keys - before.keys, self.bytes - before.bytes
        )

    def each(self, times: int) -> Counted:
        """Of one of so many."""
        return Counted(self.operations // times, self.keys // times, self.bytes // times)


class SimulatedStore:
    """One process, which carries out one operation after the other."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.values: dict[str, bytes] = {}
        self.busy_s = 0.0
        self._free_s = 0.0
        self._operations = self._keys = self._bytes = 0
        self._waiting: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}

    def counted(self) -> Counted:
        return Counted(self._operations, self._keys, self._bytes)

    async def do(self, work: Callable[[], _T], operations: int, keys: int, sent: int) -> _T:
        """`work` happens when the store comes to it."""
        arrives_s = self.clock.time() + TRIP_S / 2
        await asyncio.sleep(max(arrives_s, self._free_s) - self.clock.time())
        result = work()
        size = sent + _size(result)
        took_s = operations * OPERATION_S + keys * KEY_S + size / BYTES_PER_S
        begins_s = max(self.clock.time(), self._free_s)
        self._free_s = begins_s + took_s
        self.busy_s += took_s
        self._operations += operations
        self._keys += keys
        self._bytes += size
        await asyncio.sleep(self._free_s + TRIP_S / 2 - self.clock.time())
        return result

    def rung(self, bell: str) -> int:
        return int(self.values.get(bell, b"0"))

    def ring(self, bell: str) -> int:
        count = self.rung(bell) + 1
        self.values[bell] = b"%d" % count
        left = []
        for after, future in self._waiting.pop(bell, []):
            if count > after and not future.done():
                future.set_result(None)
            elif not future.done():
                left.append((after, future))
        if left:
            self._waiting[bell] = left
        return count

    async def rings(self, bell: str, after: int) -> None:
        if self.rung(bell) <= after:
            future = self.clock.create_future()
            self._waiting.setdefault(bell, []).append((after, future))
            await future


class SimulatedCarrier:
    """A `Carrier` of one node, with the operations that `JobStore` makes of each call."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store

    async def set(self, key: str, value: bytes) -> None:
        assert len(value) <= VALUE_MAX
        await self._store.do(lambda: self._store.values.__setitem__(key, value), 2, 0, len(value))

    async def add(self, key: str, amount: int) -> int:
        def work() -> int:
            total = self._store.rung(key) + amount
            self._store.values[key] = b"%d" % total
            return total

        return await self._store.do(work, 1, 0, 8)

    async def swap(self, key: str, value: bytes) -> bytes:
        assert len(value) <= VALUE_MAX
        return await self._store.do(
            lambda: self._store.values.setdefault(key, value), 1, 0, len(value)
        )

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        many = len(keys) if len(keys) >= 4 else 0
        operations = 3 if many else len(keys)
        values = await self._store.do(
            lambda: [*map(self._store.values.get, keys)], operations, many, 40 * len(keys)
        )
        await asyncio.sleep(VALUE_S * len(keys))
        return values

    async def ring(self, key: str, value: bytes, bell: str) -> int:
        assert len(value) <= VALUE_MAX

        def work() -> int:
            self._store.values[key] = value
            return self._store.ring(bell)

        return await self._store.do(work, 3, 0, len(value))

    async def listen(
        self, bell: str, after: int, keys: Sequence[str], limit_s: float
    ) -> tuple[int, list[bytes | None]] | None:
        try:
            async with asyncio.timeout(limit_s):
                await self._store.do(lambda: None, 2, 0, 8)
                await self._store.rings(bell, after)
        except TimeoutError:
            return None
        count = self._store.rung(bell)
        return count, await self.get(keys)


def _size(result: Any) -> int:
    if isinstance(result, list):
        return sum(map(_size, result))
    return len(result) if isinstance(result, bytes) else 8
