"""Volumes that released versions wrote stay readable, byte for byte.

A new format version adds a file here and never touches the old ones:

    python -m tests.format.test_golden     # writes golden/vN.pcc for the version of this checkout
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from pccheck_native import FORMAT_VERSION, SLOT_HEALTHY, Volume

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(int(path.stem[1:]) for path in GOLDEN.glob("v*.pcc"))
#: (sequence, step) of what the newest record names; one more was written and let go. The two newest
#: refer to the first one, which has to stay.
KEPT = [(4, 40), (3, 30), (1, 10)]
FROZEN = 16 << 10
TREE = b"which bytes are which tensor"
START, LIST = b"\x5a" * 16, b"\x17" * 16


def content(step: int) -> bytearray:
    frozen = random.Random(0).randbytes(FROZEN)
    return bytearray(frozen + random.Random(step).randbytes(9_000 + step))


def test_this_version_has_a_golden_volume() -> None:
    assert FORMAT_VERSION in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_volume_is_read(version: int, tmp_path: Path) -> None:
    path = shutil.copy(GOLDEN / f"v{version}.pcc", tmp_path / "rank-0.0.pcc")
    volume = Volume(path, writable=False)
    info = volume.info()
    assert (info.job, info.uid, info.rank, info.keep, info.slots) == ("job", 7, 0, 2, 4)
    assert (info.start, info.promise) == (START, (6, START, LIST))
    table = {entry.sequence: entry for entry in volume.table() if entry.sequence}
    assert sorted(((e.sequence, e.step) for e in table.values()), reverse=True) == KEPT
    assert {entry.sequence: entry.base for entry in table.values()} == {1: 0, 3: 1, 4: 1}
    assert {entry.start for entry in table.values()} == {START}
    assert table[3].flags == SLOT_HEALTHY
    for sequence, step in KEPT:
        wanted = content(step)
        assert volume.read(sequence, 0, len(wanted)) == wanted
        volume.verify(sequence)
    volume.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_volume_is_written_on(version: int, tmp_path: Path) -> None:
    from tests.support.coreloop import Loop

    path = Path(shutil.copy(GOLDEN / f"v{version}.pcc", tmp_path / "rank-0.0.pcc"))
    with Loop(path) as loop:
        new = content(50)
        assert loop.save(1, [new], TREE, step=50, frozen=FROZEN) == 5
        assert loop.volume.read(5, 0, len(new)) == new
        assert [one.base for one in loop.volume.table() if one.sequence == 5] == [1]


def write() -> Path:
    from tests.support.coreloop import Loop

    path = GOLDEN / f"v{FORMAT_VERSION}.pcc"
    if path.exists():
        sys.exit(f"{path} is there already: a released format does not change")
    with Loop(path, payload_capacity=FROZEN + (16 << 10)) as loop:
        loop.volume.begin_incarnation(1, 1, START)
        loop.volume.promise(6, START, LIST)
        for number in range(1, 5):
            step = number * 10
            loop.save(number, [content(step)], TREE, step=step, frozen=FROZEN)
        loop.volume.flag(3, set=SLOT_HEALTHY, now=True)
    return path


if __name__ == "__main__":
    print(write())
