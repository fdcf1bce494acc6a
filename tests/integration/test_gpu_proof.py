"""A driver that maps other memory for the daemon, or copies other bytes, than the trainer has:
nothing wrong is saved."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import fakegpu
from tests.support.gpunode import Node
from tests.support.gputrainer import Part

from .gpu_lies_campaign import late_step

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="a card's driver does not lie")
#: Each in an allocation of its own, of one length, for which the driver's lie exchanges them.
PARTS = (Part(2_700_000), Part(2_700_000))


@pytest.mark.parametrize("snapshot", ["overlap", "blocking"])
def test_a_handle_that_opens_other_memory(snapshot: str) -> None:
    with Node("--dram", "128MiB", lie="other") as node:
        trainer = node.start().connect(PARTS, snapshot=snapshot)
        assert node.transfer()[0] == "pull", node.transfer()
        trainer.step()
        handle = trainer.checkpoint()
        trainer.step()
        assert trainer.ended(handle) == "failed"
        assert "did not show that it reads" in trainer.reason(handle)
        assert "doctor --gpu" in trainer.reason(handle)
        for _ in range(2):
            handle = trainer.checkpoint()
            trainer.step()
            assert trainer.wait_durable(handle) == "durable"
        found = trainer.recover()
        assert (found["step"], found["wrong"]) == (3, "")
        transfer, reason = node.transfer()
        assert transfer == "push" and "reads on GPU 0" in reason
        assert "did not show that it reads" in node.daemon.log.read_text()
        assert trainer.check(4) == ""


@pytest.mark.parametrize(
    ("lie", "ways"),
    [
        ("short", {"transfer": "push"}),
        ("event", {"transfer": "push"}),
        ("event-wait", {"transfer": "push", "snapshot": "device"}),
        ("batch", {"transfer": "pull", "snapshot": "device"}),
    ],
)
def test_copies_that_are_not_those_of_the_stream(lie: str, ways: dict[str, Any]) -> None:
    """Whoever makes them, and wherever they are made."""
    with Node("--dram", "128MiB", devices=2, lie=lie) as node:
        trainer = node.start().connect(PARTS, **ways)
        for _ in range(3):
            trainer.evaluate(late_step)
            handle = trainer.checkpoint()
            assert trainer.ended(handle) == "failed"
            assert "other bytes were copied" in trainer.reason(handle)


def test_copies_that_bring_what_was_there_before() -> None:
    with Node("--dram", "128MiB", lie="stale") as node:
        trainer = node.start().connect(PARTS)
        assert trainer.save() == "durable"
        for _ in range(3):
            trainer.step()
            handle = trainer.checkpoint()
            assert trainer.ended(handle) == "failed"
            assert "other bytes were copied" in trainer.reason(handle)
        for _ in range(2):
            trainer.step()
            handle = trainer.checkpoint()
            assert trainer.wait_durable(handle) == "durable"
        found = trainer.recover()
        assert (found["step"], found["wrong"]) == (6, "")
        transfer, reason = node.transfer()
        assert transfer == "push" and "3 pulled copies in a row" in reason
