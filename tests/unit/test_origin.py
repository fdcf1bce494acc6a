"""Which process made a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pccheck.job import origin


def test_a_script_that_changes_its_directory_and_arguments_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = origin.this_process()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["other.py", "--lr", "1"])
    assert origin.this_process() == before
