"""Checkpoints that wait for a slot while the memory of their tensors is replaced."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import GpuTrainer, Part, raw
from tests.support.trainer import RemoteError

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
OWN = 2_700_000  # float32 elements: an allocation of its own
PARTS = (Part(OWN), Part(500))
FULL = ("--slots", "3", "--keep", "2", "--dram", "192MiB")  # one checkpoint in flight
SLOW = "slow:data:1000000"  # while it is armed


def replace_part0(trainer: Any) -> None:
    """Like `p.data = other`, in stream order; no gate waits, and the old memory does not change."""
    old = trainer.model.part0.data
    fresh = trainer.gpu.tensor(old.shape)
    trainer.gpu.launch(lambda: raw(fresh).copy_(raw(old)))
    trainer.model.part0.data = fresh


def fill_up(node: Node, **options: Any) -> tuple[GpuTrainer, int, int]:
    """A trainer on a slow disk, with a checkpoint that has the only lane and another one that
    waits."""
    trainer = node.ready(PARTS, **options)
    node.daemon.armed.touch()
    first = trainer.checkpoint()
    assert trainer.wait_copied(first) in ("copied", "writing")
    trainer.step()
    second = trainer.checkpoint()
    assert trainer.state(second) == "requested"
    return trainer, first, second


def test_a_replaced_tensor_does_not_fail_the_one_that_waits(start_node: Start) -> None:
    node = start_node(*FULL, shim=SLOW)
    trainer, first, second = fill_up(node)
    trainer.evaluate(replace_part0)
    third = trainer.checkpoint()
    node.daemon.armed.unlink()
    told = {trainer.wait_durable(handle) for handle in (first, second, third)}
    assert told <= {"durable", "superseded"}
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (3, "")
    assert trainer.save() == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (4, "")
    assert node.transfer() == ("pull", "")
    assert node.faults.scrambled == 0
    assert trainer.warnings == []


def test_pull_that_was_demanded_fails_the_newer_one(start_node: Start) -> None:
    """The waiting checkpoint does not fail; the next one is pulled."""
    node = start_node(*FULL, shim=SLOW)
    trainer, first, second = fill_up(node, transfer="pull")
    trainer.evaluate(replace_part0)
    third = trainer.checkpoint()
    node.daemon.armed.unlink()
    assert "waits for a slot" in trainer.reason(third)
    for handle in (first, second):
        assert trainer.wait_durable(handle) in ("durable", "superseded")
    with pytest.raises(RemoteError, match="waits for a slot"):
        trainer.wait_durable(third)
    assert trainer.save() == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (4, "")
