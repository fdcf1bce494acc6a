"""A power cut under a file system. While a daemon saves, all requests to the disk are recorded
(dm-log-writes), and then replayed up to each moment at which a checkpoint had become durable. The
checkpoint that was reported as durable by then, or a newer one, must be recovered with its bytes.

The seed chooses which writes that no flush covers yet are replayed as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from pccheck_native import Volume, catalog
from tests.guest.inside.logwrites import Entry, Log, apply, apply_part
from tests.guest.inside.shell import mounted, sh
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of

(SEED,) = map(int, re.findall(r"seed=(\d+)", Path("/proc/cmdline").read_text()))
STEPS = 8
PARTS = 2  #: random parts of what each flush covers
SIZE = 400_000
FLAGS = ("--chunk", "64KiB", "--block-bytes", "16KiB", "--dram", "16MiB")
SECTORS = {"data": 400 << 11, "log": 2 << 21, "replay": 400 << 11, "changes": 400 << 11}
MAPPER = Path("/dev/mapper")
MAKE = {
    "ext4": "mkfs.ext4 -q -E nodiscard,lazy_itable_init=0,lazy_journal_init=0",
    "xfs": "mkfs.xfs -q -K",
}
OPTIONS = {"ext4": "defaults", "xfs": "nouuid"}


@dataclass
class Tally:
    """How many states of the disk were tried, and how the recoveries ended."""

    settled: int = 0
    parts: int = 0
    recovered: int = 0
    empty: int = 0


def make_device(name: str, table: str) -> None:
    sh(f"DM_DISABLE_UDEV=1 dmsetup create {name} --table '{table}'")


def remove_device(name: str) -> None:
    sh(f"DM_DISABLE_UDEV=1 dmsetup remove --retry {name}")


@pytest.fixture(scope="module", autouse=True)
def _disks() -> None:
    """Parts of one disk."""
    start = 0
    for name, sectors in SECTORS.items():
        make_device(name, f"0 {sectors} linear /dev/vdc {start}")
        start += sectors


@contextlib.contextmanager
def recorded() -> Iterator[Path]:
    for name in ("data", "replay"):
        sh(f"blkdiscard -z {MAPPER / name}")
    make_device("logged", f"0 {SECTORS['data']} log-writes {MAPPER / 'data'} {MAPPER / 'log'}")
    try:
        yield MAPPER / "logged"
    finally:
        remove_device("logged")


def mark(text: str) -> None:
    sh(f"dmsetup message logged 0 mark {text}")


def save_steps(place: Path, engine: str) -> None:
    """Saves with two checkpoints in flight; marks each in the log once its trainer knows that it is
    durable."""
    with Daemon(*FLAGS, "--engine", engine, storage=place / "storage") as daemon:
        daemon.start()
        with Rank(daemon.socket) as rank:
            rank.register(SIZE)
            told = sh(f"pccheckctl --socket {daemon.socket} status --json")
            assert json.loads(told)["daemon"]["engine"] == engine, told
            snapshots = {}
            for step in range(1, STEPS + 1):
                snapshots[step] = rank.begin(step, payload_of(step, SIZE))
                if step % 2 == 0:
                    for one in (step - 1, step):
                        rank.wait(snapshots[one])
                        mark(f"durable-{one}")
        daemon.kill()


def recovered_step(storage: Path) -> int:
    """The step of the newest checkpoint, 0 without one; checks its bytes."""
    if not storage.is_dir():
        return 0
    found = catalog.scan(storage)
    assert not found.unreadable, found.unreadable
    if not found.checkpoints:
        return 0
    newest = max(found.checkpoints, key=lambda one: one.id.sequence)
    with closing(Volume(newest.volume_path, writable=False)) as volume:
        data = volume.read(newest.id.sequence, 0, newest.payload_bytes)
    assert data == payload_of(newest.id.step, SIZE), f"wrong bytes of step {newest.id.step}"
    return newest.id.step


class Disk:
    """The disk as it was at some moment; each look is at a snapshot, for mounting writes to it."""

    def __init__(self, log: Log, kind: str, tally: Tally) -> None:
        self._log = log
        self._kind = kind
        self._tally = tally
        self._fd = os.open(MAPPER / "replay", os.O_RDWR)

    def add(self, entry: Entry) -> None:
        apply(self._log, entry, self._fd)

    def look(self, promised: int, covered: list[Entry] | None = None, seed: int = 0) -> None:
        """Recovers; with a part of what the next flush would cover, if that is given."""
        os.fsync(self._fd)
        make_device("cut", f"0 {SECTORS['replay']} snapshot {MAPPER / 'replay'} "
                           f"{MAPPER / 'changes'} N 8")  # fmt: skip
        try:
            if covered is not None:
                with (MAPPER / "cut").open("rb+", buffering=0) as target:
                    apply_part(self._log, covered, target.fileno(), random.Random(seed))
                    os.fsync(target.fileno())
            with mounted(str(MAPPER / "cut"), Path("/mnt/cut"), OPTIONS[self._kind]) as place:
                step = recovered_step(place / "storage")
        finally:
            remove_device("cut")
        assert step >= promised, f"step {step} was recovered, {promised} was durable"
        self._tally.recovered += step > 0
        self._tally.empty += step == 0

    def serve(self) -> None:
        """A daemon recovers as well, and saves again."""
        with (
            mounted(str(MAPPER / "replay"), Path("/mnt/cut"), OPTIONS[self._kind]) as place,
            Daemon(*FLAGS, storage=place / "storage") as daemon,
        ):
            daemon.start()
            with Rank(daemon.socket) as rank:
                rank.register(SIZE)
                opened, data = rank.restore()
                assert (opened.step, data) == (STEPS, payload_of(STEPS, SIZE))
                rank.save(STEPS + 1, payload_of(STEPS + 1, SIZE))

    def close(self) -> None:
        os.close(self._fd)


def cut_everywhere(log: Log, kind: str) -> Tally:
    tally = Tally()
    promised, is_mounted = 0, False
    covered: list[Entry] = []
    with closing(Disk(log, kind, tally)) as disk:
        for number, entry in enumerate(log.entries()):
            is_mounted = is_mounted or entry.mark == "mounted"
            if entry.mark.startswith("durable-"):
                promised = max(promised, int(entry.mark.removeprefix("durable-")))
            try:
                if not entry.settles:
                    covered.append(entry)
                elif is_mounted:
                    for part in range(PARTS if covered else 0):
                        disk.look(promised, covered, SEED * 1_000_003 + number * PARTS + part)
                        tally.parts += 1
            except AssertionError as error:
                raise AssertionError(f"before entry {number} ({entry}): {error}") from error
            if not entry.settles:
                continue
            for one in (*covered, entry):
                disk.add(one)
            covered = []
            if is_mounted:
                disk.look(promised)
                tally.settled += 1
        disk.serve()
    return tally


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("engine", ["pwrite", "mmap"])
def test_what_was_durable_survives_every_cut(kind: str, engine: str) -> None:
    with recorded() as device:
        sh(f"{MAKE[kind]} {device}")
        with mounted(str(device), Path("/mnt/logged")) as place:
            sh("sync")
            mark("mounted")
            save_steps(place, engine)
            mark("killed")
    with closing(Log(MAPPER / "log")) as log:
        tally = cut_everywhere(log, kind)
    print(
        f"{kind} {engine} seed {SEED}: {tally.settled} cuts at a flush or a mark, {tally.parts} "
        f"with a part of what was not flushed; {tally.recovered} recovered, {tally.empty} before "
        "the first checkpoint, 0 violations"
    )
    assert tally.settled >= 3 * STEPS and tally.recovered > tally.empty
