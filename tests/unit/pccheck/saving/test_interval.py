"""When should_checkpoint() says yes: a loop and a disk that only have times."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from pccheck.flight.in_flight import InFlight
from pccheck.saving.interval import GUESS, IN_A_ROW, WARM_STEPS, Interval
from pccheck_wire.messages import CheckpointState

DURABLE, COPIED, FAILED = CheckpointState.DURABLE, CheckpointState.COPIED, CheckpointState.FAILED


class Checkpoint(InFlight):
    """Durable at a time, or never."""

    def __init__(self, step: int, world: World, durable_s: float) -> None:
        super().__init__(step)
        self.requested_ns = int(world.now_s * 1e9)
        self._world, self.durable_s = world, durable_s

    @property
    def state(self) -> CheckpointState:
        return DURABLE if self._world.now_s >= self.durable_s else COPIED


@dataclass
class World:
    """Steps of `step_s`, each `slower` times as long beside a checkpoint that is written, which
    takes the disk `write_s`; `call_s` is what checkpoint() itself takes."""

    step_s: float = 1.0
    write_s: float = 0.1
    call_s: float = 0.0
    slower: float = 1.0
    now_s: float = 100.0
    step: int = 0
    free_s: float = 0.0  # when the disk is
    saved: list[int] = field(default_factory=list)
    flying: list[Checkpoint] = field(default_factory=list)

    def train(self, interval: Interval, steps: int) -> list[int]:
        """The steps after which it saved."""
        before = len(self.saved)
        for _ in range(steps):
            self.step += 1
            busy = any(one.state is COPIED for one in self.flying)
            self.now_s += self.step_s * (self.slower if busy else 1.0)
            if interval.due(self.step, self.now_s):
                self.saved.append(self.step)
                self.save(interval)
        return self.saved[before:]

    def save(self, interval: Interval) -> None:
        self.free_s = max(self.free_s, self.now_s) + self.write_s
        made = Checkpoint(self.step, self, self.free_s)
        self.flying = [one for one in self.flying if one.state is COPIED] + [made]
        interval.requested(made)
        self.now_s += self.call_s


class Parked(Checkpoint):
    """Copied at a time, and never written."""

    @property
    def state(self) -> CheckpointState:
        return COPIED if self._world.now_s >= self.durable_s else CheckpointState.COPYING


@dataclass
class InMemory(World):
    """Of `every` checkpoints one goes to the disk; the copy of another one takes `copy_s`."""

    copy_s: float = 0.0
    every: int = 10

    def save(self, interval: Interval) -> None:
        if len(self.saved) % self.every == 0:
            super().save(interval)
            return
        made = Parked(self.step, self, self.now_s + self.copy_s)
        made.in_memory = True
        interval.requested(made)


def make(slowdown: float = 1.03, durable_every: float = 1) -> Interval:
    return Interval(slowdown, lambda number: number, durable_every)


def apart(steps: list[int]) -> int:
    """How far the last two are apart."""
    return steps[-1] - steps[-2]


def test_a_fast_disk_saves_every_step() -> None:
    saved = World(write_s=0.01).train(make(), 200)
    assert saved[0] == 1 + WARM_STEPS and saved[1] - saved[0] == GUESS
    assert apart(saved) == 1


@pytest.mark.parametrize("write_s", [3.5, 12.0, 70.5])
def test_a_slow_disk_is_kept_busy_and_never_behind(write_s: float) -> None:
    world = World(write_s=write_s)
    saved = world.train(make(), 3000)
    assert write_s - 1 <= apart(saved) <= 1.3 * write_s + 2
    assert world.free_s - world.now_s < 2 * write_s  # no queue has built up


@pytest.mark.parametrize(("call_s", "q"), [(0.3, 1.03), (0.3, 1.1), (2.0, 1.05)])
def test_what_a_checkpoint_costs_stays_within_the_slowdown(call_s: float, q: float) -> None:
    world = World(call_s=call_s)
    interval = make(q)
    world.train(interval, 1000)
    began_s, first = world.now_s, world.step
    world.train(interval, 1000)
    slowdown = (world.now_s - began_s) / (world.step - first)
    assert 1 + (q - 1) / 2 <= slowdown <= q + 1e-3


def test_steps_that_are_slower_beside_a_checkpoint_count_as_cost() -> None:
    world = World(write_s=2.5, slower=1.2)
    interval = make(1.03)
    world.train(interval, 1000)
    began_s, first = world.now_s, world.step
    world.train(interval, 1000)
    assert (world.now_s - began_s) / (world.step - first) <= 1.04


def test_memory_only_checkpoints_follow_the_copy() -> None:
    world = InMemory(copy_s=3.5, write_s=500.0, every=10**9)
    assert apart(world.train(make(durable_every=math.inf), 300)) == 4


@pytest.mark.parametrize(("write_s", "steps"), [(0.1, 1), (35.0, 4)])
def test_every_tenth_gives_the_disk_ten_intervals(write_s: float, steps: int) -> None:
    world = InMemory(copy_s=0.1, write_s=write_s)
    saved = world.train(make(durable_every=10), 3000)
    assert steps <= apart(saved) <= 1.3 * steps
    assert world.free_s - world.now_s < 2 * write_s


def test_a_disk_that_becomes_slower_or_faster_is_followed() -> None:
    world, interval = World(write_s=0.1), make()
    assert apart(world.train(interval, 200)) == 1
    world.write_s = 20.0
    assert 19 <= apart(world.train(interval, 1000)) <= 30
    world.write_s = 0.1
    assert apart(world.train(interval, 1000)) == 1


def test_one_shorter_measurement_changes_nothing() -> None:
    world, interval = World(write_s=9.5), make()
    world.train(interval, 400)
    before = interval.steps
    world.write_s = 4.0
    world.train(interval, before)
    assert interval.steps == before
    world.train(interval, before * (IN_A_ROW + 6))
    assert interval.steps < before


def test_a_disk_that_hangs_gets_fewer_and_fewer() -> None:
    world, interval = World(write_s=1.5), make()
    world.train(interval, 100)
    world.write_s = 1e9
    saved = world.train(interval, 1000)
    assert 2 <= len(saved) <= 5
    assert 1 < saved[-1] - saved[0] < 900


def test_checkpoints_that_fail_tell_nothing() -> None:
    world, interval = World(), make()
    saved = []
    for _ in range(100):
        world.step, world.now_s = world.step + 1, world.now_s + 1
        if interval.due(world.step, world.now_s):
            saved.append(world.step)
            interval.requested(InFlight.ended(world.step, FAILED, "no daemon"))
    assert saved == list(range(1 + WARM_STEPS, 101, GUESS))


def test_ranks_that_measure_otherwise_save_after_the_same_steps() -> None:
    barrier, numbers = threading.Barrier(2, timeout=90), [0, 0]

    def agree(rank: int, number: int) -> int:
        numbers[rank] = number
        barrier.wait()
        largest = max(numbers)
        barrier.wait()
        return largest

    def train(rank: int, world: World) -> list[int]:
        return world.train(Interval(1.03, lambda number: agree(rank, number)), 400)

    with ThreadPoolExecutor(2) as pool:
        fast = pool.submit(train, 0, World(write_s=0.1))
        slow = pool.submit(train, 1, World(write_s=7.5, step_s=1.02))
        assert fast.result() == slow.result()
        assert 7 <= apart(fast.result()) <= 11


def test_after_going_back_it_begins_anew() -> None:
    world, interval = World(write_s=0.01), make()
    world.train(interval, 50)
    world.step = 20  # restore()
    saved = world.train(interval, 30)
    assert saved[0] <= 20 + 2 + WARM_STEPS
    assert apart(saved) == 1
