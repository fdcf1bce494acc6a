"""Restoring to a GPU: copies of many chunks run at once, and a restore that is interrupted ends
cleanly."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pccheck import DeviceError
from pccheck.restoring import begin
from tests.support import fakegpu
from tests.support.gpunode import Node
from tests.support.gputrainer import Part
from tests.support.standin import TO_DEVICE, Faults
from tests.support.trainer import RemoteError
from tests.support.volumes import damage

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
CHUNK = 1 << 20
#: Some ten chunks with the moments.
PARTS = (Part(1_200_000), Part(7, "bfloat16"), Part(5_000, kind="buffer"))
LOST = 700  # an error after which the context is of no use


def saved(node: Node, steps: int) -> None:
    """A trainer has saved steps 1 to `steps` and ended; no checkpoint is in DRAM."""
    trainer = node.ready(PARTS)
    for _ in range(steps - 1):
        assert trainer.wait_durable(trainer.checkpoint()) == "durable"
        trainer.step()
    trainer.close()
    trainer.kill()
    node.daemon.stop()


def test_many_chunks_are_in_flight(node: Node) -> None:
    saved(node, 1)
    node.start()
    again = node.connect(PARTS)
    again.faults.slow_copies(20_000, kinds=TO_DEVICE)
    assert again.restored() == (1, "")
    assert again.faults.to_device_queued_most > CHUNK  # parts of two chunks at least
    assert again.faults.to_device_queued == 0
    # The probe at attach(): what only the next checkpoint needs is left to that one.
    assert again.faults.pageable_copies <= 1
    assert again.save() == "durable"
    assert node.transfer() == ("pull", "")


def place_when_pinned(trainer: Any) -> None:
    """Has restore() compare the checkpoint with what is attached only when the memory is pinned."""
    faults, real = Faults(Path(os.environ["PCCHECK_STANDIN_FAULTS"])), begin.Placement

    def placement(*arguments: Any, **options: Any) -> begin.Placement:
        faults.wait_for(lambda f: f.registered_bytes > 10 * CHUNK)
        return real(*arguments, **options)

    begin.Placement = placement  # type: ignore[misc, assignment]


def test_memory_is_pinned_beside_what_comes_before_the_load(node: Node) -> None:
    trainer = node.ready(PARTS)
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    trainer.kill()
    again = node.connect(PARTS)
    again.evaluate(place_when_pinned)
    assert again.restored() == (2, "")


@pytest.mark.parametrize("at", [-100, 5 * CHUNK, 0])
def test_damage_under_copies_falls_to_the_one_before(node: Node, at: int) -> None:
    """Chunks before the damaged block are being copied, or are copied, when the damage is found."""
    saved(node, 2)
    damage(node.daemon.storage, 2, at=at)
    node.start()
    again = node.connect(PARTS)
    again.faults.slow_copies(5_000, kinds=TO_DEVICE)
    done = again.restore()
    assert (done["step"], done["skipped"]) == (1, [2])
    assert again.check(1) == ""
    assert again.save() == "durable"
    found = again.recover()
    assert (found["step"], found["wrong"]) == (2, "")


@pytest.mark.parametrize("after", [0, 3])
def test_the_context_is_lost_under_a_restore(node: Node, after: int) -> None:
    """restore() raises; another process restores the same checkpoint."""
    saved(node, 1)
    node.start()
    again = node.connect(PARTS)
    again.faults.hold_copies(after=after, kinds=TO_DEVICE)
    loss = threading.Thread(target=lose, args=(again.faults,))
    loss.start()
    with pytest.raises(RemoteError) as caught:
        again.restore()
    loss.join()
    assert caught.value.kind == DeviceError.__name__
    again.faults.release_copies()
    again.close()
    again.kill()
    third = node.connect(PARTS)
    assert third.restored() == (1, "")


def lose(faults: Faults) -> None:
    """Loses the context while copies are under way."""
    faults.wait_for(lambda f: f.held_copies > 0)
    faults.set(lose_context=LOST)


def test_the_daemon_dies_under_a_restore(node: Node) -> None:
    """After the exception no copy writes to the tensors."""
    saved(node, 1)
    node.start()
    again = node.connect(PARTS)
    again.faults.hold_copies(after=1, kinds=TO_DEVICE)

    def kill() -> None:
        again.faults.wait_for(lambda f: f.held_copies > 0)
        node.daemon.kill()
        again.faults.release_copies()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RemoteError):
        again.restore()
    killer.join()
    assert again.faults.to_device_queued == 0
    node.start()
    assert again.restored() == (1, "")
