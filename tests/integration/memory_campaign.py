"""Kills trainers whose checkpoints are in memory only, with and without their daemon.

    python -m tests.integration.memory_campaign --rounds 200 --seed 1

A round draws a group (1, 2 or 4 ranks of unequal sizes), a disk, which checkpoints go to the disk,
and a chain of starts; each start ends with the death of one rank or of all, and of the daemon in
some. The ranks are in lockstep, as training is: none requests a step before all have read the one
before.

Checked at every restore, against what the ranks have observed:

- All ranks restore the same step of one start, with the bytes of that start, rank and step.
- The step is not older than what all ranks had seen copied; if the daemon was killed without a
  descriptor store, not older than what all had seen durable.
- After the death of processes at most the step in flight is lost, if no rank skipped one.
- A restore is never empty when all ranks had seen a checkpoint copied (or durable).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import mmap
import multiprocessing
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from pccheck_native import LEVEL_DISK, LEVEL_MEMORY, OUTCOME_GIVEN_UP
from pccheck_store.observer import TRACE_S_MAX, Observer
from pccheck_wire.errors import DaemonUnreachableError, NoCheckpointError, PccheckError
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Opened, Restored
from tests.support.daemon import Daemon
from tests.support.manager import ServedDaemon
from tests.support.rank import Rank, payload_of
from tests.support.waiting import until

FLAGS = ("--chunk", "256KiB", "--block-bytes", "64KiB", "--dram", "64MiB")
PACES = ((), ("--max-bandwidth", "16MiB"), ("--max-bandwidth", "2MiB"))
WORLDS = (1, 1, 2, 2, 4)
DEATHS = ("all", "one", "daemon with a store, then all", "daemon, then all")
SIZES = (300_000, 1 << 20, 1_500_000)
STARTS, STEPS_MAX, RANKS_MAX = 3, 256, 4
EVIDENCE = 80  # lines of the trace and of the log that are kept with a violation
REQUESTED, READ, COPIED, DURABLE, SKIPPED = 1, 2, 4, 8, 16
_SEEN: dict[int, int] = {
    State.COPIED: COPIED, State.WRITING: COPIED, State.DURABLE: COPIED | DURABLE,
    State.GLOBAL: COPIED | DURABLE, State.SKIPPED: SKIPPED, State.FAILED: SKIPPED,
    OUTCOME_GIVEN_UP: COPIED | DURABLE,
}  # fmt: skip
_Processes = multiprocessing.get_context("forkserver")


def data_of(start: int, rank: int, step: int, size: int) -> bytes:
    return payload_of((start * STEPS_MAX + step) * RANKS_MAX + rank + 1, size)


class Board:
    """What the ranks of one start have observed: a byte for each rank and step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(RANKS_MAX * STEPS_MAX))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def note(self, rank: int, step: int, flags: int) -> None:
        self._map[rank * STEPS_MAX + step] |= flags

    def newest(self, world: int, flag: int) -> int:
        """The newest step that every rank has this flag of; 0: there is none."""
        steps = range(STEPS_MAX - 1, 0, -1)
        every = (all(self._map[r * STEPS_MAX + n] & flag for r in range(world)) for n in steps)
        return next((n for n, has in zip(steps, every, strict=True) if has), 0)

    def of(self, rank: int) -> dict[int, int]:
        """The flags of the steps that a rank has requested."""
        its = self._map[rank * STEPS_MAX : (rank + 1) * STEPS_MAX]
        return {step: flags for step, flags in enumerate(its) if flags}

    def has(self, flag: int) -> bool:
        return any(one & flag for one in self._map[:])


@dataclass(frozen=True)
class Group:
    """What is drawn for a round."""

    world: int
    sizes: tuple[int, ...]
    disk_every: int  # each so many checkpoints go to the disk; 0: none do


def train(socket: Path, group: Group, start: int, rank: int, first: int, board: Path) -> None:
    """A rank's process: saves until it is killed."""
    seen = Board(board)
    with (
        contextlib.suppress(ConnectionResetError, DaemonUnreachableError),  # the daemon was killed
        _connect(socket, group, start, rank) as link,
    ):
        link.restore() if first > 1 else link.open()
        link.register(group.sizes[rank], memory=True)
        steps: dict[int, int] = {}
        for step in range(first, STEPS_MAX):
            level = (
                LEVEL_DISK if group.disk_every and step % group.disk_every == 0 else LEVEL_MEMORY
            )
            data = data_of(start, rank, step, group.sizes[rank])
            steps[link.begin(step, data, level=level, row=step)] = step
            seen.note(rank, step, REQUESTED)
            while seen.newest(group.world, READ) < step:
                for snapshot, its in list(steps.items()):
                    _observe(link, seen, rank, snapshot, its)
                time.sleep(0.0005)
            for old in sorted(steps)[:-8]:
                del steps[old]


def _connect(socket: Path, group: Group, start: int, rank: int) -> Rank:
    return Rank(socket, rank=rank, world_size=group.world, launch=f"start {start}")


def _observe(link: Rank, seen: Board, rank: int, snapshot: int, step: int) -> None:
    state = link.native.state(snapshot)
    if state is not None:
        flags = READ if state.source_read else 0
        seen.note(rank, step, flags | _SEEN.get(state.outcome, 0))


@dataclass
class Tally:
    deaths: collections.Counter[str] = field(default_factory=collections.Counter)
    restored: int = 0
    empty: int = 0
    lost: collections.Counter[int] = field(default_factory=collections.Counter)
    skipped: int = 0
    violations: list[str] = field(default_factory=list)


class Round:
    def __init__(self, tally: Tally, number: int, seed: int, root: Path) -> None:
        self.tally, self.number, self.root = tally, number, root
        self.rng = rng = random.Random(seed * 1_000_003 + number)
        world = rng.choice(WORLDS)
        sizes = tuple(rng.choice(SIZES) for _ in range(world))
        self.group = Group(world, sizes, rng.choice((0, 0, 3, 10)))
        self.flags = *FLAGS, *rng.choice(PACES)
        self.first, self.least = 1, 0
        self.newest = 0  # that every rank had requested; 0: how many are lost is not checked

    def play(self, label: str) -> None:
        with ServedDaemon(*self.flags) as daemon:
            daemon.start()
            for start in range(STARTS):
                death = self.rng.choice(DEATHS)
                known = len(self.tally.violations)
                self._start(daemon, start, death)
                where = f"{label}, start {start}, {self.group}, {death}"
                try:
                    self._judge(daemon, where, start)
                except NoCheckpointError as error:  # the ranks have none in common
                    if self.least:
                        self.tally.violations.append(f"{where}, {self.least} was safe: {error}")
                    self.tally.empty += 1
                    self._keep_evidence(daemon, start, known)
                    return
                self._keep_evidence(daemon, start, known)

    def _keep_evidence(self, daemon: ServedDaemon, start: int, known: int) -> None:
        """Adds to violations that are new how each checkpoint ended, and the end of the log."""
        if len(self.tally.violations) == known:
            return
        with Observer(str(daemon.socket)) as observer:
            ended = observer.trace(TRACE_S_MAX)["checkpoints"]
        lines = [
            f"  rank {one['rank']} step {one['step']} (sequence {one['sequence']}, run "
            f"{one['incarnation']}, {'memory' if one['in_memory'] else 'disk'}) requested "
            f"{one['requested'] / 1e9:.4f}, ended {one['ended'] / 1e9:.4f} {one['state']}: "
            f"{one['error']} {one['reason']}"
            for one in ended[-EVIDENCE:]
        ]
        board = Board(self.root / f"{self.number}-{start}")
        lines += [f"  rank {rank} had seen {board.of(rank)}" for rank in range(self.group.world)]
        lines += [f"  {line}" for line in daemon.log.read_text().splitlines()[-EVIDENCE:]]
        self.tally.violations[-1] += "\n" + "\n".join(lines)

    def _start(self, daemon: ServedDaemon, start: int, death: str) -> None:
        board = Board(self.root / f"{self.number}-{start}")
        world, last = self.group.world, self.first + self.rng.randint(0, 12)
        ranks = [
            _Processes.Process(
                target=train,
                args=(daemon.socket, self.group, start, rank, self.first, board.path),
            )
            for rank in range(world)
        ]
        for one in ranks:
            one.start()
        until(
            lambda: board.newest(world, REQUESTED) >= last, lambda: daemon.log.read_text()[-3000:]
        )
        time.sleep(self.rng.random() * 0.03)  # not synchronisation: the moment is the test
        keeps = COPIED
        if "daemon" in death:
            daemon.kill()
            keeps = COPIED if "store" in death else DURABLE
        victim = self.rng.randrange(world)
        ranks[victim].kill()
        time.sleep(self.rng.random() * 0.03)
        for one in ranks:
            one.kill()
            one.join()
        if "daemon" in death:
            if "store" not in death:
                for name in daemon.manager.names():
                    daemon.manager.drop(name)
            daemon.start()
        self.tally.deaths[death] += 1
        self.tally.skipped += (skipped := board.has(SKIPPED))
        self.least = max(board.newest(world, keeps), self.first - 1)
        exact = "daemon" not in death and not skipped
        self.newest = board.newest(world, REQUESTED) if exact else 0

    def _judge(self, daemon: Daemon, label: str, start: int) -> None:
        """All ranks of a start that saves nothing restore; the next start continues from there."""
        found = set()
        links = [
            _connect(daemon.socket, self.group, 1000 + start, r) for r in range(self.group.world)
        ]
        try:
            for rank, link in enumerate(links):
                opened = link.open()
                if not isinstance(opened, Opened):
                    found.add((0, 0))
                    continue
                code, data = link.load(opened)
                link.ask(Restored(opened.sequence))
                whose = [
                    one for one in range(start + 1)
                    if data == data_of(one, rank, opened.step, self.group.sizes[rank])
                ]  # fmt: skip
                if code or not whose:
                    self.tally.violations.append(f"{label}: rank {rank} has other bytes ({code})")
                found.add((opened.step, whose[-1] if whose else -1))
        finally:
            for link in links:
                link.close()
        if len(found) != 1:
            self.tally.violations.append(f"{label}: mixed: {found}")
            return
        ((step, _),) = found
        if step < self.least:
            self.tally.violations.append(f"{label}: step {step}, and {self.least} was safe")
        if self.newest:
            self.tally.lost[self.newest - step] += 1
            if self.newest - step > 1:
                self.tally.violations.append(f"{label}: step {step} of {self.newest}")
        self.tally.restored += step > 0
        self.tally.empty += step == 0
        self.first = step + 1


def run(rounds: int, seed: int, only: int | None = None) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="pcc-") as root:
        for number in range(rounds):
            if only in (None, number):
                one = Round(tally, number, seed, Path(root))
                try:
                    one.play(f"round {number}")
                except (AssertionError, PccheckError) as error:
                    tally.violations.append(f"round {number} ({one.group}): {error}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    tally = run(options.rounds, options.seed, options.only)
    print(
        f"seed {options.seed}: {options.rounds} rounds, {tally.restored} restores, "
        f"{tally.empty} empty, {tally.skipped} starts with a skipped checkpoint, "
        f"{len(tally.violations)} violations"
    )
    print("steps lost by the death of processes, how often:", dict(sorted(tally.lost.items())))
    for name, count in sorted(tally.deaths.items()):
        print(f"  {name:32} {count}")
    for violation in tally.violations:
        print("VIOLATION", violation)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
