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
#: (sequence, step) of what the newest record names; two older ones were written and let go.
KEPT = [(4, 40), (3, 30)]
TREE = b"which bytes are which tensor"


def content(step: int) -> bytearray:
    return bytearray(random.Random(step).randbytes(9_000 + step))


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_golden_volume_is_read(version: int, tmp_path: Path) -> None:
    path = shutil.copy(GOLDEN / f"v{version}.pcc", tmp_path / "rank-0.0.pcc")
    volume = Volume(path, writable=False)
    info = volume.info()
    assert (info.job, info.uid, info.rank, info.keep, info.slots) == ("job", 7, 0, 2, 4)
    found = sorted(((e.sequence, e.step) for e in volume.table() if e.sequence), reverse=True)
    assert found == KEPT
    for sequence, step in KEPT:
        wanted = content(step)
        assert volume.read(sequence, 0, len(wanted)) == wanted
        volume.verify(sequence)
    volume.close()


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_golden_volume_is_written_on(version: int, tmp_path: Path) -> None:
    from tests.support.coreloop import Loop

    path = Path(shutil.copy(GOLDEN / f"v{version}.pcc", tmp_path / "rank-0.0.pcc"))
    with Loop(path) as loop:
        assert loop.save(1, [content(50)], TREE, step=50) == 5
        assert loop.volume.read(5, 0, len(content(50))) == content(50)


def write() -> Path:
    from tests.support.coreloop import Loop

    path = GOLDEN / f"v{FORMAT_VERSION}.pcc"
    if path.exists():
        sys.exit(f"{path} is there already: a released format does not change")
    with Loop(path, payload_capacity=16 << 10) as loop:
        for number in range(1, 5):
            loop.save(number, [content(number * 10)], TREE, step=number * 10)
    return path


if __name__ == "__main__":
    print(write())
