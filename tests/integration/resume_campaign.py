"""Kills trainings of several frameworks again and again, and compares them with whole runs.

    python -m tests.integration.resume_campaign [--only NAME ...] [--seed 1] [--kills 3] [--own]

Each shape of training (tests/frameworks/resume_campaign has one file for each framework) runs once
without PCcheck and without interruption. Then the same training, with PCcheck, is killed with
SIGKILL when it has reported step k, started again by the same request, killed when it has reported
a later step, and so on; the last start ends. The steps are drawn from the seed. Every loss of every
start, and the last parameters, must be those of the whole run, bit for bit.

A shape that differs is killed at the same steps once more, with the checkpoints of its framework
(or torch.save) in place of PCcheck. At most ALLOWED shapes may differ, and only if they differ
there, too, a page says so, and a warning was printed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.frameworks.forked import Forks
from tests.frameworks.resume_campaign.asked import EVERY, STEPS
from tests.support.daemon import Daemon
from tests.support.programs import ROOT

TRAININGS = "tests.frameworks.resume_campaign"
FLAGS = ("--chunk", "1MiB", "--block-bytes", "64KiB", "--dram", "128MiB", "--slots", "5")
#: Before the first there is a checkpoint, and after the last there are steps to be made.
KILLS = range(3 * EVERY, STEPS - 5)
ALLOWED = 4
LIMIT_S = 240.0


@dataclass(frozen=True)
class Shape:
    """A training, and where its difference is told when it has one: a page with a phrase on it, and
    a part of a warning."""

    framework: str
    name: str
    ranks: int = 1
    page: str = ""
    phrase: str = ""
    warning: str = ""

    @property
    def label(self) -> str:
        return f"{self.framework}-{self.name}"


FROZEN = "restore() does not set requires_grad"
SHAPES = (
    Shape("own", "swapped"),
    Shape("own", "schedule-free"),
    Shape("own", "scaler"),
    Shape("own", "gan"),
    Shape("own", "lbfgs"),
    Shape("own", "swa"),
    Shape("own", "schedules"),
    Shape("own", "workers"),
    Shape("own", "stream"),
    Shape("own", "unfreezing", page="docs/python.md",
          phrase="`requires_grad` of the parameters", warning=FROZEN),
    Shape("own", "quantized"),
    Shape("own", "compiled"),
    Shape("own", "interval"),
    Shape("ranks", "ddp", ranks=2),
    Shape("ranks", "fsdp2", ranks=2),
    Shape("huggingface", "epochs"),
    Shape("huggingface", "saver-then-swap"),
    Shape("huggingface", "swap-then-saver"),
    Shape("huggingface", "schedule-free"),
    Shape("huggingface", "stream"),
    Shape("lightning", "epochs"),
    Shape("lightning", "average"),
    Shape("lightning", "saver-then-swap"),
    Shape("lightning", "swap-then-saver"),
    Shape("lightning", "manual"),
    Shape("lightning", "unfreezing", page="docs/frameworks.md",
          phrase="a run that BackboneFinetuning has unfrozen continues with a frozen backbone",
          warning=FROZEN),
    Shape("accelerate", "skipping"),
    Shape("accelerate", "stateful"),
    Shape("deepspeed", "zero1-bfloat16"),
    Shape("deepspeed", "zero2", ranks=2),
)  # fmt: skip


@dataclass
class Start:
    """What one start has printed: for each rank the numbers by step and part."""

    began: int = -1
    numbers: list[dict[str, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  #: all other lines
    codes: list[int] = field(default_factory=list)

    @property
    def tail(self) -> str:
        return "\n".join(self.said[-8:])

    def read(self, lines: list[list[str]]) -> None:
        for rank in lines:
            self.numbers.append({})
            for line in rank:
                place, _, values = line.partition(" = ")
                if line.startswith("STEP ") and values:
                    self.numbers[-1][place] = values
                elif line.startswith("FROM "):
                    self.began = int(line.split()[1])
                elif line.startswith("END "):
                    self.ends.append(line)
                else:
                    self.said.append(line)


@dataclass
class Outcome:
    """`first` is where the killed training first differs; empty when it is equal."""

    restored: list[int] = field(default_factory=list)
    first: str = ""
    broken: str = ""  #: why the training was not judged
    said: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "BROKEN" if self.broken else self.first or "equal"


class Campaign:
    """The starts of one shape."""

    def __init__(self, forks: Forks, shape: Shape, place: Path, kills: list[int]) -> None:
        self._forks, self._shape, self._place, self._kills = forks, shape, place, kills
        self._count = iter(range(1000))

    def run(self, with_own: bool) -> tuple[Outcome, Outcome | None]:
        """With PCcheck; and with the framework's own checkpoints, if the first one differs or
        `with_own`."""
        whole = self._start("", 0)
        if any(whole.codes):
            return Outcome(broken=f"the whole run ended with {whole.codes}: {whole.tail}"), None
        with Daemon(*FLAGS) as daemon:
            daemon.start()
            ours = self._killed(whole, "pccheck", str(daemon.socket))
            daemon.stop()
        own = self._killed(whole, "own", "") if ours.first or with_own else None
        return ours, own

    def _killed(self, whole: Start, saves: str, socket: str) -> Outcome:
        outcome = Outcome()
        starts = []
        for kill_at in (*self._kills, 0):
            start = self._start(saves, kill_at, socket)
            starts.append(start)
            outcome.said += start.said
            outcome.restored += [start.began] if len(starts) > 1 else []
            wanted = [-signal.SIGKILL if kill_at else 0] * self._shape.ranks
            if start.codes != wanted:
                outcome.broken = f"start {len(starts)} ended with {start.codes}: {start.tail}"
                return outcome
            if len(starts) > 1 and start.began < 1:
                outcome.broken = f"start {len(starts)} began at step {start.began}"
                return outcome
        outcome.first = difference(whole, starts)
        return outcome

    def _start(self, saves: str, kill_at: int, socket: str = "") -> Start:
        """Runs the training to its end, or kills its ranks once the first of them has reported the
        step."""
        output = self._place / f"printed-{next(self._count)}"
        folder = self._place / self._shape.label
        folder.mkdir(exist_ok=True)
        start = Start()
        first = output.with_suffix(".0")
        os.mkfifo(first)
        pipe, processes = os.open(first, os.O_RDONLY | os.O_NONBLOCK), list[int]()
        try:
            pids = self._forks.start(
                output, ranks=self._shape.ranks, shape=self._shape.name, saves=saves,
                folder=str(folder), socket=socket, kill_at=kill_at,
            )  # fmt: skip
            processes = [os.pidfd_open(pid) for pid in pids]
            text = _followed(pipe, processes, kill_at)
            start.codes = self._forks.wait()
            with contextlib.suppress(BlockingIOError):  # a loader's worker process has it open
                text += os.read(pipe, 1 << 20)
        finally:
            for each in (pipe, *processes):
                os.close(each)
        others = [output.with_suffix(f".{r}").read_bytes() for r in range(1, self._shape.ranks)]
        start.read([_whole_lines(one) for one in (text, *others)])
        return start


def _followed(pipe: int, processes: list[int], kill_at: int) -> bytes:
    """What the first rank prints until all processes have closed the pipe, or until the kill: a
    loader's worker processes outlive it by some seconds."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    text, deadline = b"", time.monotonic() + LIMIT_S
    while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        new = os.read(pipe, 1 << 16)
        text += new
        if not new:
            return text
        if kill_at and max(_steps(text), default=0) >= kill_at:
            break
    for each in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(each, signal.SIGKILL)
    return text


def _steps(text: bytes) -> list[int]:
    return [int(line.split()[1]) for line in _whole_lines(text) if line.startswith("STEP ")]


def _whole_lines(text: bytes) -> list[str]:
    """The last line may be cut off."""
    return text.decode(errors="replace").split("\n")[:-1]


def difference(whole: Start, starts: list[Start]) -> str:
    """The first step with other numbers than in the whole run; empty when there is none."""
    found: list[tuple[int, str]] = []
    for rank, wanted in enumerate(whole.numbers):
        made = {place for start in starts for place in start.numbers[rank]}
        found += [(_step(place), "missing") for place in wanted.keys() - made]
        for start in starts:
            for place, values in start.numbers[rank].items():
                if wanted.get(place) != values:
                    found.append((_step(place), "other" if place in wanted else "not in it"))
    if found:
        step, how = min(found)
        return f"step {step} ({how}), {len({one for one, _ in found})} steps"
    return "" if starts[-1].ends == whole.ends else "the last parameters"


def _step(place: str) -> int:
    return int(place.split()[1])


@dataclass
class Row:
    """A shape, as the table has it."""

    shape: Shape
    kills: list[int]
    ours: Outcome
    own: Outcome | None

    @property
    def equal(self) -> bool:
        return not self.ours.first and not self.ours.broken

    @property
    def wrong(self) -> str:
        """Why the rule does not hold; empty if it does."""
        if self.ours.broken or self.equal:
            return self.ours.broken
        return excuse(self.shape, self.ours, self.own)

    def __str__(self) -> str:
        cells = [self.shape.label, " ".join(map(str, self.kills))]
        cells += [" ".join(map(str, self.ours.restored)), str(self.ours)]
        cells += [str(self.own) if self.own else ""]
        told = not self.equal and not self.wrong
        cells += [f'{self.shape.page}: "{self.shape.phrase}"' if told else ""]
        return "| " + " | ".join(cells) + " |"


def excuse(shape: Shape, ours: Outcome, own: Outcome | None) -> str:
    """Why a difference is no limit of the framework that is told; empty if it is."""
    if own is None or own.broken:
        return f"its own checkpoints were not judged: {own and own.broken}"
    if not own.first:
        return f"it differs from {ours.first} on, and with its own checkpoints it is equal"
    if not shape.page:
        return f"it differs from {ours.first} on, and no page says so"
    if shape.phrase not in " ".join((ROOT / shape.page).read_text().split()):
        return f"{shape.page} does not say {shape.phrase!r}"
    if not any(shape.warning in line for line in ours.said):
        return f"no warning said {shape.warning!r}"
    return ""


def run(shapes: Iterable[Shape], seed: int, count: int, with_own: bool = False) -> list[Row]:
    """Prints the table. `shapes` are sorted by framework."""
    print("| training | killed at | continued from | with PCcheck | own checkpoint | told in |")
    print("|---|---|---|---|---|---|", flush=True)
    rows = []
    for framework, group in itertools.groupby(shapes, lambda shape: shape.framework):
        with Forks(f"{TRAININGS}.{framework}") as forks:
            for shape in group:
                kills = sorted(random.Random(f"{shape.label} {seed}").sample(KILLS, count))
                with tempfile.TemporaryDirectory() as place:
                    outcomes = Campaign(forks, shape, Path(place), kills).run(with_own)
                rows.append(Row(shape, kills, *outcomes))
                print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    labels = [shape.label for shape in SHAPES]
    parser.add_argument("--only", nargs="+", choices=labels, metavar="NAME", default=labels,
                        help=", ".join(labels))  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=3, help="of each training")
    parser.add_argument("--own", action="store_true",
                        help="also the own checkpoints of trainings that are equal")  # fmt: skip
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.label in options.only]
    rows = run(shapes, options.seed, options.kills, options.own)
    equal = sum(row.equal for row in rows)
    problems = [f"{row.shape.label}: {row.wrong}" for row in rows if row.wrong]
    if len(rows) - equal > ALLOWED:
        problems.append(f"{len(rows) - equal} trainings are not equal; {ALLOWED} may differ")
    print(f"seed {options.seed}: {len(rows)} trainings, each killed {options.kills} times: {equal} "
          f"equal, {len(rows) - equal} not; {len(problems)} violations")  # fmt: skip
    for problem in problems:
        print("VIOLATION", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
