"""Kills the ranks of an FSDP2 job, or its daemon with them, and restarts it with 4, 2 or 1 ranks.

    python -m tests.integration.sharded_campaign --rounds 20 --seed 1

One job goes through all rounds. It requests a checkpoint at every step, with on_busy="skip". One
rank, all ranks, or daemon and ranks are killed at a random moment.

Checked at every restore: all ranks restore the same step; parameters and moments are equal, bit by
bit, to those that the saving run had after that step; and the step is not older than the newest
step that a rank had seen common.

"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.programs import Program
from tests.support.torchrun import started
from tests.support.waiting import PATIENCE

START_S = 90.0 * PATIENCE
VICTIMS = ("all", "one", "one, then all", "daemon, then all", "all, then daemon")
RANKS = (4, 1, 2, 4)  # of the starts, in turn
FLAGS = ("--chunk", "64KiB", "--block-bytes", "64KiB", "--dram", "16MiB", "--slots", "4")


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    restored: int = 0
    recut: int = 0  # restored by another number of ranks than saved it
    steps: int = 0
    common: int = 0  # rounds in which a new step was seen common
    violations: list[str] = field(default_factory=list)


class Campaign:
    """The job, and what its ranks have seen."""

    def __init__(self, tally: Tally, place: Path, daemon: Daemon) -> None:
        self.tally = tally
        self.place = place
        self.daemon = daemon
        self.digests: dict[int, tuple[str, int]] = {}  # step -> digest, number of ranks
        self.common = 0  # the newest step that every rank has seen common

    def round(self, number: int, ranks: int, victim: str, rng: random.Random) -> None:
        label = f"round {number} ({ranks} ranks, {victim})"
        out = self.place / str(number)
        out.mkdir()
        steps = rng.randint(1, 12)
        with self._started(out, ranks) as launcher:
            self._wait(out, ranks, steps, launcher)
            time.sleep(rng.random() * 0.05)  # not synchronisation: when it dies is the test
            self._kill(victim, out, ranks, launcher)
        self._judge(label, out, ranks)
        self.tally.kills[victim] += 1
        self.tally.starts[f"{ranks} ranks"] += 1

    @contextlib.contextmanager
    def _started(self, out: Path, ranks: int) -> Iterator[Program]:
        program = (
            "tests.support.shardtraining", out, "--steps", "1000000",
            "--on-busy", "skip", "--cut", "fsdp" if ranks > 1 else "none",
        )  # fmt: skip
        with (out / "said").open("w") as said:
            launcher = started(self.daemon, "job", ranks, *program, output=said)
            try:
                yield launcher
            finally:
                for pid in _pids(out, ranks):
                    _end(pid)
                if any(not _lines(out, rank) for rank in range(ranks)):
                    launcher.terminate()  # some did not start
                launcher.wait(START_S)

    def _wait(self, out: Path, ranks: int, steps: int, launcher: Program) -> None:
        """Until every rank has made that many steps."""
        deadline = time.monotonic() + START_S
        while any(len(_lines(out, rank)) < steps + 1 for rank in range(ranks)):
            if launcher.poll() is not None or time.monotonic() > deadline:
                tail = (out / "said").read_text()[-1500:]
                raise AssertionError(f"the ranks did not make {steps} steps: {tail}")
            time.sleep(0.005)

    def _kill(self, victim: str, out: Path, ranks: int, launcher: Program) -> None:
        pids = _pids(out, ranks)
        if victim == "daemon, then all":
            self.daemon.kill()
        if victim.startswith("one"):
            _end(pids[-1])  # torchrun ends the others by SIGTERM
            if victim == "one":
                launcher.wait(START_S)
        for pid in pids:
            _end(pid)
        if victim == "all, then daemon":
            self.daemon.kill()
        if "daemon" in victim:
            self.daemon.start()

    def _judge(self, label: str, out: Path, ranks: int) -> None:
        lines = [_lines(out, rank) for rank in range(ranks)]
        first = {tuple(one[0]) for one in lines}
        if len(first) != 1:
            self.tally.violations.append(f"{label}: ranks restored {sorted(first)}")
            return
        step, digest = int(lines[0][0][0]), lines[0][0][1]
        if step < self.common:
            self.tally.violations.append(f"{label}: restored {step}, and {self.common} was common")
        if step:
            self.tally.restored += 1
            wanted, saved_by = self.digests.get(step, ("no digest", 0))
            self.tally.recut += saved_by != ranks
            if digest != wanted:
                self.tally.violations.append(f"{label}: step {step} is {digest}, not {wanted}")
        self.digests = {number: was for number, was in self.digests.items() if number <= step}
        seen: list[int] = []
        for one in lines:
            seen.append(max((int(line[2]) for line in one[1:]), default=0))
            for line in one[1:]:
                made = self.digests.setdefault(int(line[0]), (line[1], ranks))
                if made[0] != line[1]:
                    self.tally.violations.append(f"{label}: ranks differ in step {line[0]}")
        self.tally.steps += len(lines[0]) - 1
        self.tally.common += max(seen) > step
        self.common = max(step, *seen)  # what one rank has seen common, all ranks have


def _lines(out: Path, rank: int) -> list[list[str]]:
    """The complete lines: the last line may be cut off."""
    path = out / str(rank)
    text = path.read_text() if path.exists() else ""
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def _pids(out: Path, ranks: int) -> list[int]:
    paths = [out / f"{rank}.pid" for rank in range(ranks)]
    return [int(path.read_text()) for path in paths if path.exists()]


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run(rounds: int, seed: int) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    with tempfile.TemporaryDirectory() as place, Daemon(*FLAGS) as daemon:
        daemon.start()
        campaign = Campaign(tally, Path(place), daemon)
        for number in range(rounds):
            ranks, victim = RANKS[number % len(RANKS)], rng.choice(VICTIMS)
            try:
                campaign.round(number, ranks, victim, rng)
            except AssertionError as error:
                tally.violations.append(f"round {number} ({ranks} ranks, {victim}): {error}")
                break  # the next restored step is unknown
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tally = run(options.rounds, options.seed)
    print(f"seed {options.seed}: {options.rounds} rounds, {tally.common} with new common steps, "
          f"{tally.steps} steps, {tally.restored} restored, {tally.recut} of them by another "
          "number of ranks, "
          f"{len(tally.violations)} violations")  # fmt: skip
    for name, count in sorted((tally.kills + tally.starts).items()):
        print(f"  {name:24} {count}")
    for violation in tally.violations:
        print("VIOLATION", violation)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
