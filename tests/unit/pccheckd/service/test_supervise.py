"""The watchdog's pings come from the loop; a disk that stands still is found by the clock."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.notify import Notifier
from pccheckd.config.options import Config
from pccheckd.core.engine import Engine
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Sessions
from pccheckd.service.supervise import Supervisor
from pccheckd.upkeep.stalls import DiskProgress


class Heard(Notifier):
    def __init__(self) -> None:
        super().__init__({})
        self.watchdog_s = 0.06
        self.pings = 0
        self.statuses: list[str] = []
        self.pinged = threading.Event()

    def send(self, *states: str) -> None:
        if "WATCHDOG=1" in states:
            self.pings += 1
            self.pinged.set()
        self.statuses += [state for state in states if state.startswith("STATUS=")]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(tmp_path, tmp_path / "a.sock", dram_bytes=64 << 20)


class Place:
    def __init__(self, config: Config, faults: list[str] | None = None) -> None:
        self.engine = Engine(config)
        self.registry = Registry(self.engine)
        self.notifier = Heard()
        sessions = SimpleNamespace(trainers=int, registry=self.registry, config=config)
        self.supervisor = Supervisor(
            self.notifier, cast(Sessions, sessions), faults=lambda: faults or []
        )


def test_a_stuck_loop_is_silent(config: Config) -> None:
    """Native threads and other Python threads go on meanwhile, as in a real hang."""
    place = Place(config)
    let_go, stuck = threading.Event(), threading.Event()

    async def serve() -> None:
        place.supervisor.start()
        await asyncio.to_thread(place.notifier.pinged.wait)
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: (stuck.set(), let_go.wait()))
        await asyncio.sleep(0)
        place.notifier.pinged.clear()
        await asyncio.to_thread(place.notifier.pinged.wait)
        await place.supervisor.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert stuck.wait(60)
    before = place.notifier.pings
    assert not threading.Event().wait(3 * place.notifier.watchdog_s)
    assert place.notifier.pings == before
    let_go.set()
    thread.join(30)
    assert not thread.is_alive() and place.notifier.pings > before


def test_a_sick_process_is_left_to_the_watchdog(config: Config) -> None:
    place = Place(config, ["the native core has not answered for 20 s"])
    place.supervisor.beat()
    assert place.notifier.pings == 0
    assert place.notifier.statuses[0].startswith("STATUS=degraded: the native core has not")


def test_a_fault_in_a_look_does_not_end_a_drain(config: Config) -> None:
    """The task that ends first ends the daemon: it has to be the drain, or its limit."""
    place, looks, enough = Place(config), 0, asyncio.Event()

    def broken() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            enough.set()
        raise RuntimeError("fault")

    place.registry.tenants = broken  # type: ignore[method-assign, assignment]

    async def drain() -> None:
        telling = asyncio.create_task(place.supervisor.while_draining(1000))
        await asyncio.wait_for(enough.wait(), 20)
        assert not telling.done()
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)

    asyncio.run(drain())
    assert place.notifier.pings >= 2


class Usage(SimpleNamespace):
    full_chunks = cached_chunks = free_chunks = 0


class Rank(SimpleNamespace):
    @property
    def binding(self) -> Rank:
        return self

    def note_stall(self, why: str) -> None:
        self.stalled = why


def tenant(state: State, **usage: int) -> Rank:
    one = SimpleNamespace(id=SimpleNamespace(sequence=5), state=state)
    return Rank(
        key="job", stalled="", usage=lambda: Usage(**usage),
        ledger=SimpleNamespace(moving=lambda: [one]), one=one,
    )  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(config: Config, clock: Clock, *tenants: Rank) -> DiskProgress:
    engine = Engine.__new__(Engine)
    engine._running, engine.stalled = {}, ""
    known = SimpleNamespace(tenants=lambda: tenants, jobs={}, engine=engine, config=config)
    return DiskProgress(cast(Registry, known), clock)


def test_a_disk_that_finishes_nothing_is_found_and_forgiven(config: Config) -> None:
    clock, stuck = Clock(), tenant(State.WRITING, full_chunks=3)
    watch = progress(config, clock, stuck)
    watch.look()
    clock.now += config.stall_limit_s
    watch.look()
    assert not stuck.stalled
    clock.now += 1
    watch.look()
    assert "finished nothing for 31 s" in stuck.stalled
    stuck.one.id.sequence += 1  # that one ended, the next has begun
    watch.look()
    assert not stuck.stalled


def test_a_trainer_that_does_not_copy_is_not_the_disks_fault(config: Config) -> None:
    clock, waiting = Clock(), tenant(State.COPYING)
    watch = progress(config, clock, waiting)
    for _ in range(3):
        clock.now += config.stall_limit_s
        watch.look()
    assert not waiting.stalled


def test_a_limit_of_bandwidth_is_not_a_stall(config: Config) -> None:
    config.max_bandwidth_bytes = config.chunk_bytes // 10  # ten seconds a chunk, four at a time
    clock, slow = Clock(), tenant(State.WRITING, full_chunks=3)
    watch = progress(config, clock, slow)
    watch.look()
    clock.now += config.stall_limit_s + 39
    watch.look()
    assert not slow.stalled
    clock.now += 2
    watch.look()
    assert slow.stalled


def test_a_call_that_hangs_is_seen(config: Config) -> None:
    watch = progress(config, Clock())
    engine = watch._registry.engine
    engine._running["a call"] = 7, time.monotonic() - config.stall_limit_s - 1
    watch.look()
    assert engine.stalled.startswith("a call to the storage for uid 7 has not returned for 31 s;")
