"""Pull of memory that has descriptors in the place of handles, as torch's expandable segments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fakegpu
from tests.support.gpunode import Node
from tests.support.gputrainer import PARTS, GpuTrainer, Part

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's counts")
#: More than a piece of 2 MiB.
LARGE = (*PARTS, Part(3_000_000))


def saves(trainer: GpuTrainer, steps: int = 3) -> None:
    """Saves this many steps, each followed at once by an update; checks the newest checkpoint."""
    for _ in range(steps):
        trainer.step()
        last = trainer.checkpoint()
    trainer.step()
    assert trainer.wait_durable(last) == "durable"
    assert trainer.recover()["wrong"] == ""
    assert trainer.warnings == []


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_expandable_segments_are_pulled_and_restored(node: Node) -> None:
    trainer = node.connect(LARGE, expands=True)
    saves(trainer)
    assert node.transfer() == ("pull", "")
    assert trainer.faults.copies_to_host == 0
    assert node.faults.open_mappings > 10  # pieces
    trainer.kill()
    node.faults.wait_for(lambda f: f.open_mappings == 0 and f.reserved_bytes == 0)
    again = node.connect(LARGE, expands=True)
    assert again.check(again.restore()["step"]) == ""
    saves(again)
    assert node.transfer() == ("pull", "")
