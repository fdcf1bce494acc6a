"""The watch over the event loop sees what it is there for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.loopcheck import watched

_BLOCKS = (
    "import asyncio, sys; from tests.support import loopcheck; "
    "from pccheckd import cli\n"
    "async def block(): open(sys.argv[2] + '/file', 'w')\n"
    "cli.main = lambda _: asyncio.run(block()) or 0\n"
    "loopcheck.main(sys.argv[1:])"
)


def test_a_call_that_may_block_is_reported_on_a_loop_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "found"
    monkeypatch.setenv("PCC_LOOP_CHECK", str(found))
    call = watched("Volume.close", lambda: 7)

    async def work() -> None:
        assert await asyncio.to_thread(call) == 7
        assert not found.exists()
        assert call() == 7

    assert call() == 7
    asyncio.run(work())
    text = found.read_text()
    assert text.startswith("Volume.close was called on the event loop") and "in work" in text


def test_a_file_of_the_storage_that_is_opened_on_a_loop_is_reported(tmp_path: Path) -> None:
    found = tmp_path / "found"
    (tmp_path / "storage").mkdir()
    subprocess.run(
        [sys.executable, "-c", _BLOCKS, "--storage", str(tmp_path / "storage")], check=True,
        env=os.environ | {"PCC_LOOP_CHECK": str(found)},
    )  # fmt: skip
    assert "open of " in found.read_text()
