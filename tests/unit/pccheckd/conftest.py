from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pccheckd.jobs.registry import Registry
from tests.support.loaded import registry_of


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """Over three checkpoints of one rank (tests/support/loaded.py)."""
    with registry_of(tmp_path) as made:
        yield made
