"""Row 4 of the fault plan: block-level EIO under ext4 and xfs, with the real engines.

Every case is a daemon on a device whose reads, writes or flushes fail: from a random operation on,
once or until the device is repaired. Training continues during the fault. After the repair the
newest acknowledged checkpoint is recovered with the right bytes, and new ones become durable.

    python -m tests.integration.fault_campaign [--cases 120] [--seed 1] [--only SEED:NUMBER]
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from pccheck_wire.errors import PccheckError
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Opened
from tests.support import faultydisk
from tests.support.daemon import Daemon
from tests.support.faultydisk import FaultyDisk
from tests.support.rank import Rank, payload_of

SIZE = 1_500_000
FLAGS = ("--chunk", "256KiB", "--block-bytes", "64KiB")
ACKNOWLEDGED = (State.DURABLE, State.GLOBAL)
KINDS = {"read": faultydisk.READ, "write": faultydisk.WRITE, "flush": faultydisk.FLUSH,
         "any": faultydisk.READ | faultydisk.WRITE | faultydisk.FLUSH}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    file_system: str
    engine: str
    kind: str
    persistent: bool
    skip: int
    dram: str  # with 1MiB a recovery reads the device, and no checkpoint can move to another slot

    def __str__(self) -> str:
        lasting = "persistent" if self.persistent else "transient"
        what = f"{lasting} {self.kind} after {self.skip}"
        return f"{self.file_system} {self.engine}, {self.dram}: {what}"


def cases(seed: int) -> Iterator[Case]:
    """Endless; every combination once in each round."""
    chance = random.Random(seed)
    while True:
        for file_system, engine, kind, persistent in itertools.product(
            ("ext4", "xfs"), ("pwrite", "mmap"), KINDS, (False, True)
        ):
            dram = chance.choice(("1MiB", "16MiB")) if kind != "read" else "1MiB"
            yield Case(file_system, engine, kind, persistent, chance.randrange(15), dram)


class Life:
    """One case: a daemon, a trainer, and what the daemon acknowledged."""

    def __init__(self, disk: FaultyDisk, case: Case, seen: Counter[str]) -> None:
        self.disk, self.case, self.seen = disk, case, seen
        self.step = self.acknowledged = 0

    def save(self, rank: Rank) -> bool:
        """Saves a checkpoint and waits for its end; true when it is acknowledged."""
        self.step += 1
        state = rank.wait(rank.begin(self.step, payload_of(self.step, SIZE)))
        self.seen[State(state.outcome).name.lower()] += 1
        if state.outcome in ACKNOWLEDGED:
            self.acknowledged = self.step
        return state.outcome in ACKNOWLEDGED

    def read(self, rank: Rank) -> int:
        """Restores and checks the bytes; returns the step, 0 when nothing could be read."""
        try:
            opened = rank.open()
            if not isinstance(opened, Opened):
                return 0
            code, data = rank.load(opened)
        except PccheckError as error:
            assert error.message
            return 0
        if code != 0:
            return 0
        assert data == payload_of(opened.step, SIZE), f"wrong bytes of step {opened.step}"
        return opened.step

    def suffer(self, daemon: Daemon) -> None:
        with Rank(daemon.socket) as rank:
            rank.register(SIZE)
            assert self.save(rank) and self.save(rank)
            self.disk.fail(
                KINDS[self.case.kind], skip=self.case.skip, persistent=self.case.persistent
            )
            for _ in range(4):
                self.save(rank)
                self.read(rank)
            self.seen["struck"] += self.disk.mend() > 0
            well = any(self.save(rank) for _ in range(6))  # false when the file system has stopped
            self.seen["went on at once" if well else "file system gave up"] += 1
        assert daemon.process is not None and daemon.process.poll() is None, "the daemon died"
        assert daemon.stop() in (0, 1)

    def recover(self, daemon: Daemon) -> None:
        daemon.start()
        with Rank(daemon.socket, launch="again") as rank:
            found = self.read(rank)
            assert found >= self.acknowledged, f"step {found} of {self.acknowledged}"
            rank.restore()
            rank.register(SIZE)
            self.step = max(self.step, found)
            assert self.save(rank), "nothing becomes durable on a mended device"
            assert self.read(rank) == self.step
        assert daemon.stop() == 0


def run_case(disk: FaultyDisk, case: Case, seen: Counter[str]) -> None:
    storage = disk.mount / "storage"
    with Daemon(*FLAGS, "--engine", case.engine, "--dram", case.dram, storage=storage) as daemon:
        try:
            life = Life(disk, case, seen)
            daemon.start()
            life.suffer(daemon)
            disk.remount()
            life.recover(daemon)
            assert "Traceback" not in daemon.log.read_text(), "an error without words"
        except BaseException:
            disk.mend()
            print(f"{case}:\n{daemon.log.read_text()[-6000:]}", flush=True)
            raise
    shutil.rmtree(storage)


def run(count: int, seed: int, only: int | None = None, stride: int = 1) -> Counter[str]:
    """Plays every `stride`-th case and returns the counts. Raises at the first violation, after
    printing how to repeat the case."""
    seen: Counter[str] = Counter()
    with ExitStack() as stack:
        disks: dict[str, FaultyDisk] = {}
        for number, case in enumerate(itertools.islice(cases(seed), count * stride)):
            if number % stride or only not in (None, number):
                continue
            if case.file_system not in disks:
                disks[case.file_system] = stack.enter_context(FaultyDisk(case.file_system))
            try:
                run_case(disks[case.file_system], case, seen)
            except BaseException:
                print(f"again: python -m {__spec__.name} --only {seed}:{number}", flush=True)
                raise
            seen["cases"] += 1
    return seen


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=144)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="SEED:NUMBER")
    flags = parser.parse_args()
    if why := faultydisk.missing():
        print(f"fault_campaign: skipped: {why}")
        return 0
    if flags.only:
        seed, number = map(int, flags.only.split(":"))
        seen = run(number + 1, seed, number)
    else:
        seen = run(flags.cases, flags.seed)
    told = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    print(f"fault_campaign: {told}; 0 violations, seed {flags.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
