"""One run: a trainer with a contender at an interval, and what it cost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench import common
from bench.common import BenchError
from bench.figures.contender import Contender, Landed
from bench.figures.registry import Make
from bench.figures.trainers import Trainer

#: Checkpoints before the clock starts, and while it runs. Where the disk needs longer for a
#: checkpoint than training for an interval, training does not wait for the first ones.
DISK_BOUND, NOT_DISK_BOUND = (3, 4), (1, 1)
LAG_SAMPLES = 500


@dataclass(frozen=True, slots=True)
class Cost:
    """One run. `slowdown` is against steps without checkpoints in the same round."""

    step_s: float
    slowdown: float
    held_ms: float  # the training thread, for a checkpoint: the call and the next gate
    safe_s: float  # from the call until a restart could get it
    lag_steps: float  # what a crash would lose on average
    process_lag_steps: float  # the same if only the training process dies


def lag(ends: list[float], first: int, landed: Landed, since: float, until: float) -> float:
    """Steps done and not yet safe, on average over the time from `since` until `until`.

    `ends[i]` is when step `first + i` ended; `landed` has steps with the time from which on a
    restart would get them."""
    total = 0
    for sample in range(LAG_SAMPLES):
        now = since + (sample + 0.5) / LAG_SAMPLES * (until - since)
        done = first - 1 + sum(end <= now for end in ends)
        safe = max((step for step, when in landed if when <= now), default=first - 1)
        total += done - safe
    return total / LAG_SAMPLES


@contextmanager
def running(make: Make, trainer: Trainer, directory: Path) -> Iterator[Contender]:
    """A contender that has been warmed, in a directory of its own."""
    common.settle()
    common.warm_memory(4 * trainer.payload_bytes)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        contender = make(trainer, Path(place))
        try:
            contender.start()
            for _ in range(contender.warm_saves):
                trainer.step(contender.gate)
                contender.save(trainer.steps_done)
            contender.gate()
            contender.finish()
            yield contender
        except BaseException:
            with suppress(Exception):  # what came first is what matters
                contender.stop()
            raise
        contender.stop()


def bare_step(trainer: Trainer, steps: int) -> float:
    """Seconds of a step without checkpoints: the fastest of three runs of `steps` steps. Other work
    on the machine can only make a run slower."""

    def once() -> float:
        start = time.monotonic()
        for _ in range(steps):
            trainer.step(lambda: None)
        return (time.monotonic() - start) / steps

    for _ in range(3):  # whatever delayed the trainer before is over then
        trainer.step(lambda: None)
    return min(once() for _ in range(3))


def run(
    trainer: Trainer, contender: Contender, every: int, counts: tuple[int, int], bare_s: float
) -> Cost:
    """`counts`: checkpoints before the clock starts, and while it runs. The clock starts and stops
    right after the call for a checkpoint."""
    warm, counted = counts
    held: list[float] = []
    called: dict[int, float] = {}
    ends: list[float] = []
    first = trainer.steps_done + 1
    since = time.monotonic()

    def gate() -> None:
        ready = time.monotonic()
        contender.gate()
        if held:
            held[-1] += time.monotonic() - ready

    for number in range(1, (warm + counted) * every + 1):
        trainer.step(gate)
        ends.append(time.monotonic())
        if number % every == 0:
            called[trainer.steps_done] = time.monotonic()
            contender.save(trainer.steps_done)
            held.append(time.monotonic() - called[trainer.steps_done])
        if number == warm * every:
            since = time.monotonic()
    until = time.monotonic()
    gate()
    contender.finish()
    landed = [(step, when) for step, when in contender.landed() if step in called]
    if not landed:
        raise BenchError("no checkpoint of a run became durable")
    step_s = (until - since) / (counted * every)
    return Cost(
        step_s=step_s,
        slowdown=step_s / bare_s,
        held_ms=1e3 * common.Spread.of(held[warm:]).median,
        safe_s=common.Spread.of([when - called[step] for step, when in landed]).median,
        lag_steps=lag(ends, first, landed, since, until),
        process_lag_steps=lag(ends, first, contender.kept(), since, until),
    )


def persist(trainer: Trainer, contender: Contender, count: int) -> list[float]:
    """Seconds from the call until a restart could get it, one checkpoint after the other."""
    seconds = []
    for _ in range(count):
        trainer.step(contender.gate)
        start = time.monotonic()
        contender.save(trainer.steps_done)
        contender.gate()
        contender.finish()
        seconds.append(dict(contender.landed())[trainer.steps_done] - start)
    return seconds


def load(trainer: Trainer, contender: Contender, *, process: bool = False) -> float:
    """Seconds that a restart takes, after the end of everything or of the training process alone.
    Raises BenchError unless it gets all of what was saved last."""
    persist(trainer, contender, 1)
    saved = trainer.steps_done
    if process:
        contender.reconnect()
    else:
        contender.restart()
    start = time.monotonic()
    contender.load()
    seconds = time.monotonic() - start
    found = trainer.saved_step()
    if found not in (0, saved):
        raise BenchError(f"a restart got step {found}, but step {saved} was safe")
    return seconds
