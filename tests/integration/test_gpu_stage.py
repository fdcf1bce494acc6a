"""snapshot="device" with many tensors: few launches, and no call waits in the driver. Drivers that
take no batches of copies; batches that fail."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import GpuTrainer, Part
from tests.support.standin import ALWAYS, ON_DEVICE, SAMPLES
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's counters")
#: As many tensors as GPT-2 with Adam, half of them moments side by side. A frozen tensor lies
#: between each two others, and all frozen ones come first in the payload.
MANY = tuple(Part(200, kind=kind) for _ in range(389) for kind in ("trained", "frozen"))
TENSORS = 389 * 3
NOT_SUPPORTED = 801
SHORT_LIMIT_S = 0.5
LATE_S = 30.0  #: calls that wait for the GPU end then


def behind_a_busy_stream(trainer: Any) -> tuple[int, int, int]:
    """A checkpoint while the GPU is behind, and its streams take few launches: the call returns.
    The checkpoint, the number of its launches, and that of the copies that they brought."""
    faults = fakegpu.Faults(Path(os.environ["PCCHECK_STANDIN_FAULTS"]))
    goes_on = threading.Event()
    trainer.gpu.synchronize()
    trainer.gpu.launch(goes_on.wait)
    faults.set(launch_queue=12 + SAMPLES)
    launches, copies = faults.launches, faults.copies_on_device
    handle = trainer.checkpoint()
    launches = faults.launches - launches
    assert faults.copies_on_device == copies
    goes_on.set()
    trainer.gpu.synchronize()
    faults.set(launch_queue=0)
    return handle, launches, faults.copies_on_device - copies


def saved(trainer: GpuTrainer, step: int, handle: int | None = None) -> int:
    """A checkpoint of this step has its bytes, and the next step its own; how many launches the
    call has made."""
    before = trainer.faults.launches
    handle = trainer.checkpoint() if handle is None else handle
    launches = trainer.faults.launches - before
    trainer.step()
    assert trainer.wait_durable(handle) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (step, "")
    assert trainer.check(step + 1) == ""
    return launches


def two_behind_a_busy_stream(trainer: Any) -> tuple[list[int], bool]:
    """Two checkpoints, each with a step behind it, while the GPU is busy with what comes before
    them; and whether the calls have waited for it."""
    goes_on = threading.Event()
    trainer.gpu.launch(goes_on.wait)
    late = threading.Timer(LATE_S, goes_on.set)
    late.start()
    handles = []
    for _ in range(2):
        handles.append(trainer.checkpoint())
        trainer.step()
    waited = goes_on.is_set()
    late.cancel()
    goes_on.set()
    return handles, waited


def both_saved(trainer: GpuTrainer, handles: list[int]) -> None:
    """Of steps 2 and 3; step 4 has come. The newer one may be durable first."""
    ends = [trainer.wait_durable(handle) for handle in handles]
    assert ends in (["durable", "durable"], ["superseded", "durable"])
    for step in (2, 3)[ends.count("superseded") :]:
        found = trainer.recover(step=step)
        assert (found["step"], found["wrong"]) == (step, "")
    assert trainer.check(4) == ""


@pytest.mark.parametrize("snapshot", ["overlap", "device"])
def test_no_call_waits_for_staging_memory(start_node: Start, snapshot: str) -> None:
    trainer = start_node("--slots", "6").ready(snapshot=snapshot)
    handles, waited = trainer.evaluate(two_behind_a_busy_stream)
    assert not waited
    both_saved(trainer, handles)


def test_what_was_staged_and_is_not_read_is_given_up(node: Node) -> None:
    """The next checkpoint waits for that on the GPU, and has its own bytes."""
    trainer = node.ready(snapshot="device", stall_limit_s=SHORT_LIMIT_S)
    node.faults.hold_copies()
    first = trainer.checkpoint()
    trainer.step()
    second = trainer.checkpoint()
    trainer.step()
    until(lambda: trainer.state(first) == "failed")
    assert "a GPU stream waited for it" in trainer.reason(first)
    trainer.synchronize()
    assert trainer.check(4) == ""
    node.faults.release_copies()
    assert trainer.wait_durable(second) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (3, "")


def test_many_tensors_take_few_launches(node: Node) -> None:
    trainer = node.ready(MANY, snapshot="device")
    handle, launches, copies = trainer.evaluate(behind_a_busy_stream)
    assert launches <= 8 + SAMPLES
    assert 2 * 389 <= copies < TENSORS  # neighbours are one copy
    saved(trainer, 2, handle)


def test_buffers_take_few_launches(node: Node) -> None:
    """They are copied on the device whatever the snapshot is, and may change at once."""
    trainer = node.ready((*(Part(700, kind="buffer"), Part(700)) * 300, Part(5)))
    handle, launches, copies = trainer.evaluate(behind_a_busy_stream)
    assert launches <= 12 + SAMPLES
    assert copies == 300
    saved(trainer, 2, handle)


def test_a_driver_that_refuses_batches(node: Node) -> None:
    trainer = node.ready(MANY, snapshot="device")
    trainer.faults.set(batch_fail_code=NOT_SUPPORTED)
    assert saved(trainer, 2) > 2 * 389
    trainer.faults.set(batch_fail_code=0)
    assert saved(trainer, 3) <= 8 + SAMPLES


def test_a_batch_that_fails_is_copied_one_by_one(node: Node) -> None:
    trainer = node.ready(MANY, snapshot="device")
    trainer.faults.fail_copy(500, 1, kinds=ON_DEVICE, behind=False)
    assert saved(trainer, 2) > 2 * 389


def test_a_copy_that_fails_fails_its_checkpoint(node: Node) -> None:
    trainer = node.ready(MANY, snapshot="device")
    trainer.faults.fail_copy(ALWAYS, 1, kinds=ON_DEVICE, behind=False)
    assert trainer.state(trainer.checkpoint()) == "failed"
    trainer.faults.set(copy_fail_at=0)
    trainer.step()
    assert saved(trainer, 3) <= 8 + SAMPLES
