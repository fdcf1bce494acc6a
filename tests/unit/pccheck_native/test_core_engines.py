"""The binding's storage engines: which one a volume gets, and how fast one is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pccheck_native import ENGINES, NativeError, Volume
from tests.support.coreloop import Loop, make_volume
from tests.support.descriptors import open_files


@pytest.mark.parametrize("engine", [name for name, _, _ in ENGINES])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_engines_leave_nothing_open(tmp_path: Path, engine: str, limit: int) -> None:
    """Neither what an engine opens beside the volume, nor what an engine has opened before another
    one replaced it."""
    path = make_volume(tmp_path / "v")
    (tmp_path / "none").write_bytes(bytes(100_000))
    files = open_files()
    for writable in (True, False):
        volume = Volume(path, writable=writable, engine=engine)
        assert volume.engine in (engine, ENGINES[0][0])
        assert volume.bytes_per_second == 0
        volume.limit(limit)
        assert volume.bytes_per_second == limit
        volume.close()
        with pytest.raises(ValueError):
            _ = volume.engine
        with pytest.raises(ValueError):
            _ = volume.bytes_per_second
        with pytest.raises(ValueError):
            volume.limit(0)
        with pytest.raises(NativeError, match="NOT_A_VOLUME"):
            Volume(tmp_path / "none", writable=writable, engine=engine)
    assert open_files() == files
    with Loop(path, engine=engine) as loop:
        extents = [bytearray(os.urandom(200_000))]
        sequence = loop.save(1, extents)
        assert loop.volume.read(sequence, 0, 200_000) == extents[0]
        loop.volume.verify(sequence)
    assert open_files() == files


def test_an_engine_is_named_or_refused(tmp_path: Path) -> None:
    path = make_volume(tmp_path / "v")
    for name in ("auto", "", "PWRITE", "pwrite\0", None):
        with pytest.raises(ValueError, match="there is no engine"):
            Volume(path, writable=False, engine=name)  # type: ignore[arg-type]
