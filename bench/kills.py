"""What a kill costs: kills at random moments against the paper's model of recovery (4.2).

    python -m bench.kills [--kills 8] [--settings "1,10 2,1,auto"] [--mib 64] [--mib-per-s 128]
                          [--step-ms 50]

A trainer with steps of a given length saves every `f` steps to a disk of a given rate, N
checkpoints in flight. It is killed at a random moment, alone or together with the daemon, and
started again. The recovery lasts from the call of restore() until the step that had been done when
the kill came is done again. The paper bounds it by

    l + t f + t min(N f, T_w / t)

(l the load, t a step, T_w from the request of a checkpoint to durable). The daemon outlives a
trainer that is killed alone, and so does what it has copied: less is lost than in the model.
Start of Python and import of torch are in neither.

A setting is N,f or N,f,durable_every. With "auto" checkpoints stay in memory, and the newest one is
written whenever the disk is idle: for the model these are one in flight, as often as the disk
takes one.
Writes bench/results/kills-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import math
import mmap
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from bench import common
from bench.common import MIB, BenchError, Spread
from bench.figures.trainers import Paced
from bench.ours import Daemon
from pccheck import PCcheckClient
from pccheck_store.observer import Observer
from pccheckctl.output.documents import rows, whole

STEPS_MAX = 100_000
LIMIT_S = 120.0
CHUNK_MIB = 16  # pccheckd's default
SETTINGS = "1,10 2,5 2,20 4,5 2,1,auto"
DurableEvery = int | Literal["auto"]
VICTIMS = ("trainer", "trainer and daemon")


class Progress:
    """What a trainer has done, in a file that outlives it: CLOCK_MONOTONIC ns."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(8 * (STEPS_MAX + 4))
            self._times = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

    def __getitem__(self, step: int) -> int:
        """When the step was last done."""
        return self._times[4 + step]

    def did(self, step: int) -> None:
        self._times[4 + step] = time.monotonic_ns()
        self._times[0] = step

    @property
    def done(self) -> int:
        """The last step."""
        return self._times[0]

    @property
    def load(self) -> tuple[int, int, int]:
        """The step that came back last, and when its restore began and ended."""
        return self._times[1], self._times[2], self._times[3]

    @load.setter
    def load(self, found: tuple[int, int, int]) -> None:
        self._times[1], self._times[2], self._times[3] = found


def train(options: argparse.Namespace) -> None:
    """The victim."""
    progress = Progress(options.progress)
    trainer = Paced(options.mib * MIB, options.step_ms / 1e3)
    with PCcheckClient(
        job="kills", socket=options.trainer, on_error="raise", durable_every=options.durable_every
    ) as client:
        client.attach(model=trainer.state.model, optimizer=trainer.optimizer)
        began = time.monotonic_ns()
        found = client.restore()
        ended = time.monotonic_ns()
        if found:
            trainer.steps_done = found.step or 0
            if trainer.saved_step() != trainer.steps_done:
                raise BenchError(f"step {trainer.steps_done} came back as {trainer.saved_step()}")
        progress.did(trainer.steps_done)
        progress.load = trainer.steps_done, began, ended
        while True:
            trainer.step(client.gate)
            progress.did(trainer.steps_done)
            if trainer.steps_done % options.every == 0:
                client.checkpoint(step=trainer.steps_done)


@dataclass(frozen=True, slots=True)
class Setting:
    in_flight: int
    every: int
    durable_every: DurableEvery = 1

    @classmethod
    def read(cls, text: str) -> Setting:
        in_flight, every, *durable_every = text.split(",")
        return cls(int(in_flight), int(every), *map(durable_every_of, durable_every))

    def text(self) -> str:
        more = "" if self.durable_every == 1 else f", durable_every={self.durable_every}"
        return f"{self.in_flight} | {self.every}{more}"

    def on_disk(self, options: argparse.Namespace) -> tuple[int, int]:
        """Checkpoints in flight to the disk, and the steps from one to the next."""
        if self.durable_every != "auto":
            return self.in_flight, self.every * self.durable_every
        write_s = options.mib / options.mib_per_s
        return 1, max(self.every, math.ceil(write_s / (options.step_ms / 1e3)))


def durable_every_of(text: str) -> DurableEvery:
    return "auto" if text == "auto" else int(text)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill and the recovery from it."""

    load_s: float
    lost_steps: int
    recovery_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of kill: what was measured, and what the model says."""

    setting: Setting
    killed: str
    step_s: float
    write_s: float
    load_s: float
    bound_s: float
    mean_s: float
    kills: list[Kill]


class Victim:
    """A daemon, and one trainer after another."""

    def __init__(self, options: argparse.Namespace, setting: Setting, scratch: Path):
        self.options, self.setting = options, setting
        dram = max(32, options.mib * (setting.in_flight + 1))
        if setting.durable_every != 1:  # the manifest of each state may take a chunk of its own
            dram += 3 * CHUNK_MIB
        self.daemon = Daemon(
            "--slots", str(setting.in_flight + 1), "--keep", "1", "--dram", f"{dram}MiB",
            "--chunk", f"{CHUNK_MIB}MiB",
            "--max-bandwidth", f"{options.mib_per_s}MiB", storage=scratch / "storage",
        )  # fmt: skip
        self._path = scratch / "progress"
        self.progress = Progress(self._path)
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Returns when the trainer trains."""
        options, before = self.options, self.progress.load
        words = [
            "--trainer", self.daemon.socket, "--progress", self._path,
            "--every", self.setting.every, "--durable-every", self.setting.durable_every,
            "--mib", options.mib, "--step-ms", options.step_ms,
        ]  # fmt: skip
        self._process = subprocess.Popen([sys.executable, "-m", "bench.kills", *map(str, words)])
        self.until(lambda: self.progress.load != before)

    def until(self, holds: Callable[[], bool]) -> None:
        assert self._process is not None
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self.daemon.log.read_text()
                raise BenchError(f"the trainer has ended or hangs. The daemon's log:\n{log}")
            time.sleep(0.002)

    def train(self, steps: int) -> None:
        """Returns when so many more steps are done."""
        last = self.progress.done + steps
        self.until(lambda: self.progress.done >= last)

    def kill(self, *, daemon: bool) -> Kill:
        """Ends them at this moment, and starts them again."""
        self.end()
        if daemon:
            self.daemon.kill()
        killed, last = time.monotonic_ns(), self.progress.done
        if daemon:
            self.daemon.start()
        self.begin()
        restored, began, ended = self.progress.load
        self.until(lambda: self.progress[last] > killed)
        return Kill((ended - began) / 1e9, last - restored, (self.progress[last] - began) / 1e9)

    def end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def write_s(self) -> list[float]:
        """From request to durable, of each checkpoint that this daemon knows."""
        with Observer(str(self.daemon.socket)) as observer:
            found = rows(observer.trace(3600), "checkpoints")
        return [
            (whole(one, "durable") - whole(one, "requested")) / 1e9
            for one in found
            if whole(one, "durable")
        ]

    def step_s(self, steps: int) -> list[float]:
        """Of the last steps."""
        last = self.progress.done
        times = [self.progress[step] for step in range(last - steps, last + 1)]
        return [(b - a) / 1e9 for a, b in pairwise(times)]


@contextmanager
def victim(options: argparse.Namespace, setting: Setting) -> Iterator[Victim]:
    with common.scratch(options.directory) as scratch:
        (scratch / "storage").mkdir()
        made = Victim(options, setting, scratch)
        try:
            made.daemon.start()
            made.begin()
            yield made
        finally:
            made.end()
            with suppress(AssertionError):
                made.daemon.stop()
            made.daemon.cleanup()


def measure(options: argparse.Namespace, setting: Setting) -> list[Measured]:
    in_flight, every = setting.on_disk(options)
    chance = random.Random(options.seed)
    found: dict[str, list[Kill]] = {who: [] for who in VICTIMS}
    steps_s: list[float] = []
    writes_s: list[float] = []
    with victim(options, setting) as at:
        for _ in range(options.kills):
            for who in VICTIMS:
                # All lanes are in use by then; the moment is anywhere between two checkpoints.
                run = (in_flight + 2) * every
                at.train(run)
                time.sleep(chance.random() * every * options.step_ms / 1e3)
                steps_s += at.step_s(run)
                writes_s += at.write_s()
                found[who].append(at.kill(daemon=who != "trainer"))
    step_s, write_s = statistics.fmean(steps_s), statistics.median(writes_s)
    late_s = min(in_flight * every * step_s, write_s)
    made = []
    for who, kills in found.items():
        load_s = statistics.median(kill.load_s for kill in kills)
        bound_s, mean_s = (load_s + part * every * step_s + late_s for part in (1, 0.5))
        made.append(Measured(setting, who, step_s, write_s, load_s, bound_s, mean_s, kills))
    return made


def table(found: list[Measured]) -> list[str]:
    lines = [
        "| N | f | killed | t, ms | T_w, s | lost steps | recovery, s | mean, s | model's mean, s "
        "| model's bound, s | above it |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        took = [kill.recovery_s for kill in one.kills]
        lost = Spread.of([kill.lost_steps for kill in one.kills])
        over = sum(seconds > one.bound_s for seconds in took)
        lines.append(
            f"| {one.setting.text()} | {one.killed} | {one.step_s * 1e3:.1f} "
            f"| {one.write_s:.2f} | {lost.text(0)} | {Spread.of(took).text(2)} "
            f"| {statistics.fmean(took):.2f} | {one.mean_s:.2f} | {one.bound_s:.2f} "
            f"| {over} of {len(took)} |"
        )
    return lines


def main() -> int:
    parser = common.arguments(__doc__)
    parser.add_argument("--kills", type=int, default=8, help="of each kind, for each N and f")
    parser.add_argument("--settings", default=SETTINGS, help="N,f or N,f,durable_every")
    parser.add_argument("--mib", type=int, default=64, help="of the state")
    parser.add_argument("--mib-per-s", type=int, default=128, help="of the disk")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--every", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--durable-every", type=durable_every_of, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        train(options)
    facts = common.facts_of(options.directory)
    settings = [Setting.read(text) for text in options.settings.split()]
    found = [one for setting in settings for one in measure(options, setting)]
    lines = common.heading("What a kill costs, and the paper's model", facts)
    lines += [
        f"A state of {options.mib} MiB, steps of {options.step_ms:g} ms, a disk of "
        f"{options.mib_per_s} MiB/s, {options.kills} kills of each kind; median [min-max].", "",
    ]  # fmt: skip
    lines += table(found)
    common.write_results("kills", {"facts": facts, "runs": found}, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
