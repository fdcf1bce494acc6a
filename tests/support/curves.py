"""Training scripts in processes of their own: reads their losses, kills them, compares two runs.

A script prints `step 7 loss 0.25` for each step, with all digits, so that equal text is equal bits;
ranks print `rank 1 step 7 loss 0.25`. Two such texts may share a line, because Python under
torchrun writes a line and its end separately. After a restore a script prints `resumed at step 7`;
or the client prints where a job that is named after its script continues.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support import programs
from tests.support.programs import Program

ROOT = Path(__file__).parents[2]
LOSS = re.compile(r"(?:rank (\d+) )?step (\d+) loss (-?(?:[\d.]+(?:e[+-]\d+)?|inf|nan))")
RESUMED = re.compile(r"(?:resumed at|continues from) step (\d+)")
LIMIT_S = 600.0


@dataclass
class Run:
    """What one launch of a script printed, and when."""

    losses: dict[int, dict[int, str]] = field(default_factory=dict)  # step -> rank -> loss
    seen_s: dict[int, float] = field(default_factory=dict)
    resumed: int = 0  #: the step; 0 when it began at the start
    said: list[str] = field(default_factory=list)  #: all other lines
    started_s: float = field(default_factory=time.monotonic)

    @property
    def first_s(self) -> float:
        return min(self.seen_s.values())

    @property
    def last(self) -> int:
        return max(self.losses, default=0)

    def seconds_per_step(self, first: int, last: int) -> float:
        return (self.seen_s[last] - self.seen_s[first]) / (last - first)


@dataclass(frozen=True, slots=True)
class Difference:
    """A step at which two runs have different losses."""

    step: int
    rank: int
    loss: str
    wanted: str

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}: loss {self.loss} instead of {self.wanted}"


def differences(wanted: Run, *others: Run) -> list[Difference]:
    """The differences by step. A step that several runs made is compared for each run."""
    found = [
        Difference(step, rank, loss, wanted.losses.get(step, {}).get(rank, "none"))
        for run in others
        for step, ranks in run.losses.items()
        for rank, loss in ranks.items()
    ]
    return sorted(
        (one for one in found if one.loss != one.wanted), key=lambda one: (one.step, one.rank)
    )


class Trainer:
    """One launch of a script, by Python or, with `ranks`, by torchrun. Iterate over `steps()`."""

    def __init__(
        self,
        script: Path,
        *flags: object,
        variables: dict[str, str],
        ranks: int = 0,
        cwd: Path | None = None,
    ) -> None:
        """`variables` are added to the environment; PCcheck's own variables are not inherited."""
        self._script = str(script)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PCCHECK_")}
        # Models this small gain nothing from more threads.
        environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
        if programs.inside and not ranks:  # in a test, where no script imports torch for itself
            place = cwd or Path.cwd()
            self.follow(programs.python(self._script, *flags, environment=environment, cwd=place))
            return
        process = subprocess.Popen(
            [sys.executable, *(torchrun if ranks else []), self._script, *map(str, flags)],
            cwd=cwd, env=environment, text=True, bufsize=1,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.follow(process)

    def follow(self, process: subprocess.Popen[str] | Program) -> None:
        """Reads what this process prints."""
        self.run = Run()
        self.process = process
        self._limit = threading.Timer(LIMIT_S, self.send_kill)
        self._limit.daemon = True
        self._limit.start()

    def steps(self) -> Iterator[int]:
        """Yields each step when its line arrives, until the script ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            for found in LOSS.finditer(line):
                step = int(found[2])
                self.run.losses.setdefault(step, {})[int(found[1] or 0)] = found[3]
                self.run.seen_s.setdefault(step, time.monotonic())
                yield step
            if resumed := RESUMED.search(line):
                self.run.resumed = int(resumed[1])
            if rest := LOSS.sub("", line).strip():
                self.run.said.append(rest)

    def finish(self) -> Run:
        """Reads to the end. Raises RuntimeError with the last lines when the script failed."""
        for _ in self.steps():
            pass
        self._limit.cancel()
        if code := self.process.wait():
            how = (
                f"was killed after {LIMIT_S:.0f} s"
                if code == -signal.SIGKILL
                else f"ended with {code}"
            )
            raise RuntimeError("\n".join([f"{self._script} {how}", *self.run.said[-30:]]))
        return self.run

    def kill(self) -> Run:
        """Sends SIGKILL, and returns when all that was printed is read."""
        self.send_kill()
        for _ in self.steps():
            pass
        self._limit.cancel()
        self.process.wait()
        return self.run

    def send_kill(self) -> None:
        """Kills every process that runs the script: torchrun, ranks, workers of data loaders. A
        private daemon, also a child, is not killed."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            command = launcher.cmdline()
            for one in (launcher, *launcher.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if one.cmdline() == command or self._script in one.cmdline():
                        one.kill()
