"""Push from a GPU: used where pull is impossible, with the reason; right, and without deadlocks."""

from __future__ import annotations

import pytest

from pccheck.state.devices import HOST
from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import PARTS, GpuTrainer, Part
from tests.support.standin import SAMPLES
from tests.support.trainer import RemoteError

stand_in = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
LARGE = (Part(3_000_000), Part(5_000, kind="buffer"), Part(100_000, device=HOST))


def saves(trainer: GpuTrainer, steps: int = 3) -> None:
    """Saves this many steps, each followed at once by an update; checks the newest checkpoint."""
    for _ in range(steps):
        trainer.step()
        last = trainer.checkpoint()
    trainer.step()
    assert trainer.wait_durable(last) == "durable"
    found = trainer.recover()
    assert found["wrong"] == ""
    assert found["step"] == trainer.step(0) - 1
    assert trainer.warnings == []


def pushed(node: Node, trainer: GpuTrainer, why: str) -> None:
    """Checks that push was chosen, for this reason, and that the state can be restored, also to the
    GPU."""
    saves(trainer)
    transfer, reason = node.transfer()
    assert transfer == "push"
    assert why in reason
    trainer.kill()
    again = node.connect()
    step = again.restore()["step"]
    assert again.check(step) == ""
    again.kill()


def test_push_can_be_asked_for(node: Node) -> None:
    trainer = node.connect(transfer="push")
    saves(trainer)
    if not fakegpu.is_real():
        assert node.faults.opens == 0
        assert trainer.faults.copies_to_host > 0
        assert trainer.faults.pageable_copies == 0
    pushed(node, trainer, "the client has")


def test_memory_that_cannot_be_shared(node: Node) -> None:
    """As in a memory pool. (Expandable segments have descriptors.)"""
    parts = tuple(part._replace(shareable=False) for part in PARTS)
    pushed(node, node.connect(parts), "neither a CUDA IPC handle nor a descriptor")


@stand_in
def test_one_tensor_that_cannot_be_shared(node: Node) -> None:
    saves(node.connect((*PARTS, Part(50_000, shareable=False))))
    transfer, reason = node.transfer()
    assert transfer == "pull"
    assert "195 KiB of GPU memory that cannot be shared are pushed" in reason


def test_a_daemon_without_a_driver(start_node: Start) -> None:
    if fakegpu.is_real():
        pytest.skip("this daemon has a driver")
    node = start_node(blind=True)
    pushed(node, node.connect(), "no CUDA driver")


@stand_in
@pytest.mark.parametrize(("code", "word"), [(1, "INVALID_VALUE"), (201, "another user"), (205, "")])
def test_a_daemon_that_cannot_open_handles(node: Node, code: int, word: str) -> None:
    node.faults.fail_open(code)
    pushed(node, node.connect(), word)


@stand_in
def test_a_driver_that_does_not_know_how_long_imported_memory_is(node: Node) -> None:
    """The daemon asks in another way; if that fails as well, it reports both errors."""
    node.faults.set(range_fail=1)
    trainer = node.connect()
    saves(trainer)
    assert node.transfer() == ("pull", "")
    trainer.kill()
    node.faults.set(range_fail=3)
    trainer = node.connect(job="other")
    saves(trainer)
    transfer, reason = node.transfer()
    assert transfer == "push"
    assert "INVALID_VALUE (1)" in reason and "NOT_SUPPORTED (801)" in reason


@stand_in
def test_no_stream_memory_operations(node: Node) -> None:
    trainer = node.process()
    trainer.faults.set(no_memory_ops=1)
    node.open(trainer)
    pushed(node, trainer, "wait for 64-bit words")


@stand_in
def test_a_daemon_that_sees_another_gpu(start_node: Start) -> None:
    node = start_node(devices=2, visible="1")
    pushed(node, node.connect(), "does not see")


@stand_in
def test_a_daemon_whose_memory_is_not_pinned(node: Node) -> None:
    node.faults.fail_register()
    pushed(node, node.connect(), "ENOMEM")


@stand_in
def test_a_driver_that_does_not_start(start_node: Start) -> None:
    node = start_node(driver={"init_fail_code": 100})
    pushed(node, node.connect(), "no CUDA driver")


def pulls_later(node: Node, trainer: GpuTrainer) -> None:
    """Checks that the next checkpoints are pushed, and that pull is tried again after some of
    them."""
    assert node.transfer()[0] == "push"
    for _ in range(12):
        saves(trainer, 1)
    assert node.transfer() == ("pull", "")


@stand_in
def test_a_driver_that_works_after_some_time(start_node: Start) -> None:
    """As at boot: kernel modules and devices are loaded after the daemon starts."""
    node = start_node(driver={"init_fail_code": 802})
    trainer = node.connect()
    saves(trainer)
    node.faults.set(init_fail_code=0)
    node.wait_for(lambda: node.status()["daemon"]["transfer"] == "pull")
    pulls_later(node, trainer)


@stand_in
def test_a_driver_that_is_slow_to_start(start_node: Start) -> None:
    """No client waits for the driver for long; it is used as soon as it answers."""
    node = start_node(driver={"init_hold": 1})
    trainer = node.connect()
    saves(trainer)
    assert node.transfer()[1] == "the CUDA driver does not answer"
    node.faults.set(init_hold=0)
    node.wait_for(lambda: node.status()["daemon"]["transfer"] == "pull")
    pulls_later(node, trainer)


@stand_in
def test_a_handle_that_does_not_open_once(node: Node) -> None:
    node.faults.fail_open(201, times=1)
    trainer = node.connect()
    saves(trainer)
    pulls_later(node, trainer)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_pull_that_was_demanded_and_cannot_be_had(node: Node, on_error: str) -> None:
    parts = tuple(part._replace(shareable=False) for part in PARTS)
    trainer = node.connect(parts, transfer="pull", on_error=on_error)
    trainer.step()
    if on_error == "raise":
        with pytest.raises(RemoteError, match="is not available") as caught:
            trainer.checkpoint()
        assert caught.value.kind == "DeviceError"
        assert trainer.step() == 2
        return
    for _ in range(3):
        assert trainer.state(trainer.checkpoint()) == "failed"
        trainer.step()
    assert len([w for w in trainer.warnings if "is not available" in w]) == 1
    assert trainer.check(4) == ""


# -- the order of copies and waits


@stand_in
def test_all_copies_are_enqueued_and_the_cpu_goes_on(node: Node) -> None:
    trainer = node.connect(transfer="push")
    assert trainer.save() == "durable"
    trainer.step()
    trainer.faults.hold_copies(after=SAMPLES)
    handle = trainer.checkpoint()
    assert trainer.step() == 3  # the copies stand still, and were enqueued
    assert not trainer.idle()
    assert trainer.state(handle) in ("requested", "copying")
    trainer.faults.release_copies()
    trainer.synchronize()
    assert trainer.wait_durable(handle) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (2, "")


@stand_in
def test_the_host_waits_while_copies_are_to_be_enqueued(start_node: Start) -> None:
    """The DRAM is smaller than the snapshot: no stream may wait for copies that are not enqueued
    yet."""
    node = start_node("--dram", "3MiB")
    trainer = node.connect(LARGE, transfer="push")
    assert trainer.save() == "durable"
    trainer.step()
    trainer.faults.hold_copies(after=SAMPLES)
    handle = trainer.checkpoint()
    trainer.post("step")
    trainer.faults.wait_for(lambda f: f.held_copies == 1)
    assert trainer.faults.waits == 0
    trainer.faults.release_copies()
    assert trainer.answer() == 3
    assert trainer.wait_durable(handle) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (2, "")


@stand_in
@pytest.mark.parametrize("transfer", ["push", "pull"])
@pytest.mark.parametrize("snapshot", ["overlap", "device", "blocking"])
def test_one_hardware_queue_is_no_deadlock(start_node: Start, transfer: str, snapshot: str) -> None:
    """All streams share one hardware queue, as on some GPUs: a stream that waits for a later copy
    in the queue would wait for ever. The DRAM is a tenth of the snapshot."""
    node = start_node("--dram", "3MiB")
    node.faults.set(one_queue=1)
    trainer = node.process()
    trainer.faults.set(one_queue=1)
    node.open(trainer, LARGE, transfer=transfer, snapshot=snapshot)
    saves(trainer)
    assert "failed" not in trainer.states()


@stand_in
def test_without_pinned_memory_it_is_slow_and_right(node: Node) -> None:
    trainer = node.process()
    node.open(trainer, transfer="push")
    trainer.faults.fail_register()
    saves(trainer)
    assert trainer.faults.pageable_copies > 1


@stand_in
def test_a_push_that_is_given_up_lets_go(start_node: Start) -> None:
    """The host waits for copies to be enqueued at most for the stall limit."""
    node = start_node("--dram", "3MiB")
    trainer = node.connect(LARGE, transfer="push")
    assert trainer.save() == "durable"
    trainer.shorten(0.5)
    trainer.step()
    trainer.faults.slow_copies(150_000)
    handle = trainer.checkpoint()
    assert trainer.step() == 3
    assert trainer.state(handle) == "failed"
    trainer.faults.slow_copies(0)
    assert trainer.check(3) == ""
    assert trainer.recover()["wrong"] == ""
