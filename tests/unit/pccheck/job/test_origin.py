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


def test_a_long_command_is_shortened_to_its_first_words() -> None:
    short = origin.Origin("node1", "/work", "train.py --lr 1", 12)
    assert short.shortened() == short
    worker = " ".join(["default_worker.py", *(f"--node-ip-{n}=127.0.0.1" for n in range(50))])
    text = str(short._replace(command=worker).shortened())
    assert text.startswith("default_worker.py --node-ip-0=127.0.0.1 ") and len(text) < 170
    assert text.endswith("=127.0.0.1 ... (pid 12 on node1, in /work)")
    assert short._replace(command="x" * 999).shortened().command == "x" * 120 + " ..."
