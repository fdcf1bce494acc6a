from __future__ import annotations

from pathlib import Path

import pytest

from .fakes import FakeProc


@pytest.fixture
def fake(tmp_path: Path) -> FakeProc:
    """One process, 70, which nothing speaks against."""
    made = FakeProc(tmp_path / "proc")
    made.process(70)
    return made
