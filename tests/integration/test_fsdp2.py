"""examples/fsdp2.py: two ranks that are killed and go on are bit for bit two that were not; three
go on, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.torchrun import torchrun

Start = Callable[..., Daemon]


def launch(daemon: Daemon, job: str, losses: Path, *flags: str, ranks: int = 2) -> tuple[int, str]:
    losses.mkdir(exist_ok=True)
    program = ("examples/fsdp2.py", "--losses", str(losses), "--every", "3")
    with torchrun(daemon, job, ranks, *program, *flags) as launcher:
        said, _ = launcher.communicate()
    return launcher.returncode, said


def told(losses: Path) -> list[dict[str, str]]:
    """By rank and step; a step that was done again counts the last time."""
    return [
        dict(line.split() for line in (losses / str(rank)).read_text().splitlines())
        for rank in range(2)
    ]


@pytest.mark.timeout(600)
def test_killed_ranks_go_on_as_if_they_had_not_been(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert launch(daemon, "whole", whole, "--steps", "12")[0] == 0
    assert launch(daemon, "job", killed, "--steps", "12", "--kill-at", "8")[0] != 0
    before = told(killed)
    assert all(len(rank) == 8 for rank in before)
    code, said = launch(daemon, "job", killed, "--steps", "12")
    assert code == 0, said
    assert told(killed) == told(whole)
    lines = (killed / "0").read_text().splitlines()
    assert len(lines) < 8 + 12  # it did go on, and not from the start
    assert len(set(told(whole)[0].values())) == 12

    code, said = launch(daemon, "job", tmp_path / "other", "--steps", "14", ranks=3)
    assert code == 0, said
    steps = [line.split()[0] for line in (tmp_path / "other/2").read_text().splitlines()]
    assert steps == ["13", "14"]
