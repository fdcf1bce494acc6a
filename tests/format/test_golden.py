"""Volumes that earlier versions wrote stay readable, byte for byte.

A new format version adds a file here and never touches the old ones:

    python -m tests.format.test_golden     # writes golden/vN.pcc for the version of this checkout
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from pccheck_native import FORMAT_VERSION, Volume

GOLDEN = Path(__file__).parent / "golden"
#: (sequence, step) of what the newest record names; two older ones were written and let go. From
#: version 2 on the two newest refer to the first one, which has to stay.
KEPT = {1: [(4, 40), (3, 30)], 2: [(4, 40), (3, 30), (1, 10)]}
FROZEN = 16 << 10
TREE = b"which bytes are which tensor"


def content(step: int, version: int) -> bytearray:
    frozen = random.Random(0).randbytes(FROZEN) if version > 1 else b""
    return bytearray(frozen + random.Random(step).randbytes(9_000 + step))


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_golden_volume_is_read(version: int, tmp_path: Path) -> None:
    path = shutil.copy(GOLDEN / f"v{version}.pcc", tmp_path / "rank-0.0.pcc")
    volume = Volume(path, writable=False)
    info = volume.info()
    assert (info.job, info.uid, info.rank, info.keep, info.slots) == ("job", 7, 0, 2, 4)
    found = sorted(((e.sequence, e.step) for e in volume.table() if e.sequence), reverse=True)
    assert found == KEPT[version]
    based = {entry.sequence: entry.base for entry in volume.table() if entry.base}
    assert based == ({3: 1, 4: 1} if version > 1 else {})
    for sequence, step in KEPT[version]:
        wanted = content(step, version)
        assert volume.read(sequence, 0, len(wanted)) == wanted
        volume.verify(sequence)
    volume.close()


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_golden_volume_is_written_on(version: int, tmp_path: Path) -> None:
    from tests.support.coreloop import Loop

    path = Path(shutil.copy(GOLDEN / f"v{version}.pcc", tmp_path / "rank-0.0.pcc"))
    with Loop(path) as loop:
        new = content(50, version)
        assert loop.save(1, [new], TREE, step=50, frozen=FROZEN) == 5
        assert loop.volume.read(5, 0, len(new)) == new
        assert [one.base for one in loop.volume.table() if one.sequence == 5] == [
            1 if version > 1 else 0
        ]


def write() -> Path:
    from tests.support.coreloop import Loop

    path = GOLDEN / f"v{FORMAT_VERSION}.pcc"
    if path.exists():
        sys.exit(f"{path} is there already: a released format does not change")
    with Loop(path, payload_capacity=FROZEN + (16 << 10)) as loop:
        for number in range(1, 5):
            step = number * 10
            state = content(step, FORMAT_VERSION)
            loop.save(number, [state], TREE, step=step, frozen=FROZEN)
    return path


if __name__ == "__main__":
    print(write())
