"""Regressions of the GPU data path: each of these promises was once broken."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import GpuTrainer, Part
from tests.support.standin import TO_DEVICE
from tests.support.trainer import RemoteError

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
OWN = 2_700_000  # float32 elements: an allocation of its own
PARTS = (Part(300_000), Part(90_001, "float16"))


def durable_and_right(trainer: GpuTrainer, handle: int, step: int) -> None:
    assert trainer.wait_durable(handle) == "durable", trainer.reason(handle)
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (step, "")


def test_a_gpu_without_two_free_mebibytes(node: Node) -> None:
    """torch has allocated all memory, so there is none for the probe: tensors are pushed. Before,
    every checkpoint failed."""
    trainer = node.connect(PARTS, attach=False)
    trainer.step()
    trainer.faults.fail_alloc()
    trainer.attach()
    handle = trainer.checkpoint()
    trainer.step()
    durable_and_right(trainer, handle, 1)
    assert node.transfer()[0] == "push"


def test_memory_that_the_daemon_cannot_pin(node: Node) -> None:
    """The driver pins the page of the probe, but not the pool: tensors are pushed. Before, the
    session got no memory, and every checkpoint stalled."""
    first = node.connect(PARTS)
    first.step()
    durable_and_right(first, first.checkpoint(), 1)
    first.kill()
    node.faults.fail_register()
    trainer = node.connect(PARTS, job="other", stall_limit_s=3)
    trainer.step()
    with pytest.raises(RemoteError, match="shares the memory again"):
        trainer.wait_durable(trainer.checkpoint())  # memory came after it was exposed
    trainer.step()
    durable_and_right(trainer, trainer.checkpoint(), 2)
    transfer, reason = node.transfer()
    assert transfer == "push"
    assert "pin" in reason


def allocate_anew(trainer: Any) -> None:
    trainer.move_part0()
    trainer.move_part0()


def test_a_handle_whose_old_mapping_is_in_the_way(start_node: Start) -> None:
    """Drivers refuse a handle with ALREADY_MAPPED (208) while the importer still maps earlier
    memory of that address. The daemon closes the old mappings and tries again."""
    node = start_node("--dram", "128MiB")
    trainer = node.connect((Part(OWN), Part(500)))
    trainer.step()
    durable_and_right(trainer, trainer.checkpoint(), 1)
    trainer.step()
    trainer.evaluate(allocate_anew)
    node.faults.fail_open(208, times=1)
    durable_and_right(trainer, trainer.checkpoint(), 2)
    assert node.transfer()[0] == "pull"


def record_then_attach(trainer: Any) -> None:
    with trainer.gpu.capture() as trainer.graph:
        trainer.optimizer.step()
    trainer.optimizer.now -= 1  # recorded, not run
    for entry in trainer.optimizer.state.values():
        entry["steps"] -= 1
    trainer.client.attach(model=trainer.model, optimizer=trainer.optimizer)


def checkpoint_and_replay(trainer: Any) -> None:
    trainer.handles.append(trainer.client.checkpoint(step=trainer.optimizer.now))
    trainer.graph.replay()
    trainer.optimizer.now += 1
    for entry in trainer.optimizer.state.values():
        entry["steps"] += 1


def test_a_step_recorded_before_attach(node: Node) -> None:
    """Optimizers that are not `capturable` can be recorded as well (for example SGD): a hook is
    trusted only after it has run."""
    trainer = node.connect(PARTS, attach=False)
    trainer.step()
    trainer.evaluate(record_then_attach)
    node.faults.slow_copies(200_000)
    trainer.evaluate(checkpoint_and_replay)
    durable_and_right(trainer, 0, 1)


def test_what_is_not_pulled_any_more_is_not_mapped_either(start_node: Start) -> None:
    """Before, the daemon unmapped nothing when the trainer changed to push, so freed memory could
    not be used again."""
    node = start_node("--dram", "128MiB")
    trainer = node.connect((Part(OWN), Part(500)))
    trainer.step()
    durable_and_right(trainer, trainer.checkpoint(), 1)
    assert node.faults.open_mappings > 0
    trainer.faults.fail_export(1)
    trainer.step()
    trainer.evaluate(allocate_anew)
    durable_and_right(trainer, trainer.checkpoint(), 2)
    assert node.transfer()[0] == "push"
    node.faults.wait_for(lambda f: f.open_mappings == 0)


def test_a_restore_after_one_that_broke_off_early(node: Node) -> None:
    """The first restore ends at a failure of the GPU while the daemon still reads; the second waits
    for the daemon. Before, it was refused as busy."""
    trainer = node.connect((Part(3_000_000), Part(500)))
    trainer.step()
    durable_and_right(trainer, trainer.checkpoint(), 1)
    for _ in range(5):
        trainer.faults.fail_copy(1, 1, kinds=TO_DEVICE, behind=False)
        with pytest.raises(RemoteError, match="GPU"):
            trainer.restore()
        trainer.faults.set(copy_fail_at=0)
        assert trainer.restored() == (1, "")


def long_kernel(trainer: Any) -> None:
    trainer.gpu.launch(lambda: time.sleep(3.0))


def test_a_cpu_far_ahead_of_its_stream(node: Node) -> None:
    """The stall limit counts only while a stream waits for the daemon. Before, it also counted
    until the GPU had reached the snapshot, so a trainer that was far ahead never got a
    checkpoint."""
    trainer = node.connect(PARTS)
    trainer.step()
    durable_and_right(trainer, trainer.checkpoint(), 1)
    trainer.shorten(1.0)
    trainer.step()
    trainer.evaluate(long_kernel)
    handle = trainer.checkpoint()
    trainer.step()
    trainer.synchronize()
    durable_and_right(trainer, handle, 2)
    assert trainer.check(3) == ""
    assert trainer.warnings == []
