"""The gate on a GPU: the stream waits for the copy, with a limit; the CPU does not wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pccheck.state.devices import HOST
from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import PARTS, GpuTrainer, Part, off_by, raw
from tests.support.standin import SAMPLES
from tests.support.trainer import RemoteError
from tests.support.waiting import until

stand_in = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
STALL_LIMIT_S = 2.0
SHORT_LIMIT_S = 2.0 if fakegpu.is_real() else 0.5  # a real driver makes a context meanwhile


@contextmanager
def held_back(node: Node, pushes: GpuTrainer | None = None) -> Iterator[None]:
    """Holds all copies of the daemon from GPUs within the block; or those of a trainer."""
    faults = (pushes or node).faults
    if fakegpu.is_real():
        node.daemon.kill(signal.SIGSTOP)
    else:
        faults.hold_copies(after=SAMPLES if pushes else 0)
    yield
    if fakegpu.is_real():
        node.daemon.kill(signal.SIGCONT)
    else:
        faults.release_copies()


def under_way(trainer: GpuTrainer, handle: int) -> bool:
    return trainer.state(handle) in ("requested", "copying")


def saved_step_2(trainer: GpuTrainer, handle: int) -> None:
    assert trainer.wait_durable(handle) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (2, "")


def part0_now(trainer: Any) -> str:
    """How part 0 differs from step 2, without waiting for the stream."""
    return off_by(raw(trainer.model.part0), 2, 0)


@pytest.mark.parametrize("own_stream", [False, True])
def test_the_stream_waits_and_the_cpu_does_not(node: Node, own_stream: bool) -> None:
    """Tensors that forward changes before the gate were copied aside: they are of step 2, too."""
    trainer = node.ready(own_stream=own_stream)
    with held_back(node):
        handle = trainer.checkpoint()
        assert trainer.step() == 3
        assert under_way(trainer, handle)
        assert not trainer.idle()
        if not fakegpu.is_real():
            assert trainer.faults.waits > 0
            assert trainer.evaluate(part0_now) == ""
    trainer.synchronize()
    assert trainer.check(3) == ""
    saved_step_2(trainer, handle)
    assert trainer.warnings == []


def test_the_cpu_waits_for_what_lies_on_the_host_only(node: Node) -> None:
    trainer = node.ready((Part(400_000), Part(400_000, device=HOST)))
    with held_back(node):
        if fakegpu.is_real():
            return  # a daemon that is stopped takes nothing from the host either
        handle = trainer.checkpoint()
        assert trainer.step() == 3
        assert under_way(trainer, handle)
    saved_step_2(trainer, handle)


@stand_in
@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_without_the_gate_the_damage_is_seen(node: Node, transfer: str) -> None:
    """The same with an update that has no gate and that torch does not count: what is copied is not
    what was sampled before."""
    trainer = node.ready(gate="manual", transfer=transfer)
    pushes = trainer if transfer == "push" else None
    with held_back(node, pushes):
        handle = trainer.checkpoint()
        trainer.update_unasked(counted=False)
        (pushes or node).faults.wait_for(lambda f: f.held_copies > 0)
        until(trainer.idle)
    assert trainer.ended(handle) == "failed"
    assert "other bytes were copied" in trainer.reason(handle)
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"


@stand_in
@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_a_step_in_a_stream_of_its_own(start_node: Start, transfer: str) -> None:
    """The checkpoint is made in another stream, which nothing orders behind the step."""
    trainer = start_node().ready(transfer=transfer)
    assert trainer.step_aside(0.3) == 3
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (3, "")


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_an_update_that_torch_counts_fails_the_checkpoint(node: Node, transfer: str) -> None:
    trainer = node.ready(gate="manual", transfer=transfer)
    with held_back(node, trainer if transfer == "push" else None):
        handle = trainer.checkpoint()
        trainer.update_unasked(counted=True)
    assert trainer.ended(handle) == "failed"
    assert "model.part0 was changed" in trainer.reason(handle)
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    assert "off" not in trainer.recover()["wrong"]


def test_a_manual_gate(node: Node) -> None:
    trainer = node.ready(gate="manual")
    with held_back(node):
        handle = trainer.checkpoint()
        trainer.evaluate(ask_and_update)
        assert under_way(trainer, handle)
        assert not trainer.idle()
    trainer.synchronize()
    saved_step_2(trainer, handle)


def ask_and_update(trainer: Any) -> None:
    trainer.client.gate()
    trainer.update_unasked(counted=False)


def test_buffers_may_change_at_once(node: Node) -> None:
    """Batch statistics change many times without a gate. So may a frozen average, once the client
    has seen it change."""
    parts = (Part(300_000), Part(70_000, kind="buffer"), Part(500, "int8", kind="buffer"),
             Part(9_000, "bfloat16", kind="frozen"))  # fmt: skip
    trainer = node.connect(parts)
    trainer.save()
    with held_back(node):
        moved = trainer.checkpoint()
        trainer.step(ask=False)
    assert trainer.ended(moved) == "failed" and "part3" in trainer.reason(moved)
    trainer.wait_durable(trainer.checkpoint())  # exposes what is copied at once from now on
    with held_back(node):
        handle = trainer.checkpoint()
        for _ in range(3):
            trainer.forward(ask=False)
        if not fakegpu.is_real():
            trainer.synchronize()
        assert under_way(trainer, handle)
    saved_step_2(trainer, handle)


def test_a_snapshot_on_the_device_lets_the_update_go(node: Node) -> None:
    trainer = node.ready(snapshot="device")
    with held_back(node):
        handle = trainer.checkpoint()
        trainer.step()
        trainer.synchronize()
        assert trainer.check(3) == ""
        assert under_way(trainer, handle)
    saved_step_2(trainer, handle)
    for _ in range(4):  # staging memory is used again, each time after it was read
        trainer.step()
        last = trainer.checkpoint()
    assert trainer.wait_durable(last) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (7, "")


def test_staging_memory_in_use_is_busy(node: Node) -> None:
    trainer = node.ready(snapshot="device", on_busy="skip")
    with held_back(node):
        handle = trainer.checkpoint()
        trainer.step()
        assert trainer.state(trainer.checkpoint()) == "skipped"
        trainer.step()
        trainer.synchronize()
    saved_step_2(trainer, handle)


def busy_for_long(trainer: Any) -> tuple[int, list[str]]:
    """Enqueues checkpoints behind work that takes the GPU far longer than the stall limit."""
    goes_on = threading.Event()
    trainer.gpu.launch(goes_on.wait)
    threading.Timer(3 * STALL_LIMIT_S, goes_on.set).start()
    for _ in range(3):
        trainer.step()
        trainer.checkpoint()
    never_begun = [h for h in trainer.handles if h._in_flight.snapshot == 0]
    return len(trainer.handles) - 1, [h.state.name for h in never_begun]


@stand_in
@pytest.mark.parametrize("transfer", ["pull", "push"])
@pytest.mark.parametrize("snapshot", ["device", "blocking"])
def test_a_gpu_with_much_to_do_is_no_stall(start_node: Start, snapshot: str, transfer: str) -> None:
    node = start_node("--slots", "6")  # none waits for the disk
    trainer = node.ready(snapshot=snapshot, transfer=transfer, stall_limit_s=STALL_LIMIT_S)
    last, never_begun = trainer.evaluate(busy_for_long)
    assert trainer.wait_durable(last) == "durable"
    assert not never_begun
    assert {trainer.ended(handle) for handle in range(last)} <= {"durable", "superseded"}
    assert trainer.warnings == []
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (5, "")


def checkpoint_and_damage(trainer: Any) -> bool:
    made = trainer.client.checkpoint(step=trainer.optimizer.now)
    trainer.handles.append(made)
    read = made._in_flight.is_read()
    trainer.update_unasked(counted=False)
    return bool(read)


def test_a_blocking_snapshot_was_read_on_return(node: Node) -> None:
    trainer = node.ready(snapshot="blocking")
    assert trainer.evaluate(checkpoint_and_damage)
    saved_step_2(trainer, 1)


# -- deadlines


def recovers(trainer: GpuTrainer) -> None:
    """Checks that checkpoints succeed again after some time."""

    def succeeds() -> bool:
        trainer.step()
        handle = trainer.checkpoint()
        if trainer.state(handle) in ("skipped", "failed"):
            return False
        assert trainer.wait_durable(handle) == "durable"
        assert trainer.recover()["wrong"] == ""
        return True

    until(succeeds, lambda: trainer.warnings, every_s=0)


def test_a_stream_is_let_go_at_the_deadline(node: Node) -> None:
    """The checkpoint then fails, later checkpoints are skipped, training goes on."""
    trainer = node.ready(stall_limit_s=SHORT_LIMIT_S)
    with held_back(node):
        handle = trainer.checkpoint()
        assert trainer.step() == 3
        trainer.synchronize()  # without the deadline this would never return
        assert trainer.state(handle) == "failed"
        assert "stall_limit_s" in trainer.reason(handle)
        assert trainer.state(trainer.checkpoint()) == "skipped"
        trainer.step(3)
        assert trainer.check(6) == ""
    assert len([w for w in trainer.warnings if "did not copy it within" in w]) == 1
    recovers(trainer)


def test_a_dead_daemon_lets_the_stream_go(node: Node) -> None:
    trainer = node.ready()
    with held_back(node):
        handle = trainer.checkpoint()
        trainer.step()
        assert not trainer.idle()
        node.daemon.kill()
        trainer.synchronize()
    assert trainer.check(3) == ""
    assert trainer.state(handle) == "failed"
    for _ in range(5):
        trainer.step()
        trainer.checkpoint()
    assert len([w for w in trainer.warnings if "pccheckd" in w]) == 1, trainer.warnings
    node.faults.release_copies()
    node.start()
    recovers(trainer)


def test_a_late_daemon_does_not_vouch(node: Node) -> None:
    """The daemon is stopped beyond the deadline and continued. The update went on, so the
    checkpoint failed."""
    trainer = node.ready(stall_limit_s=SHORT_LIMIT_S)
    node.daemon.kill(signal.SIGSTOP)
    handle = trainer.checkpoint()
    trainer.step()
    trainer.synchronize()
    assert trainer.state(handle) == "failed"
    node.daemon.kill(signal.SIGCONT)
    recovers(trainer)
    assert trainer.state(handle) == "failed"
    trainer.kill()
    again = node.connect()
    done = again.restore()
    assert done["step"] > 2
    assert again.check(done["step"]) == ""


def test_an_interrupt_lets_the_stream_go(node: Node) -> None:
    """close() while a copy is under way: the stream does not wait any longer."""
    trainer = node.ready(stall_limit_s=SHORT_LIMIT_S)
    with held_back(node):
        handle = trainer.checkpoint()
        trainer.step()
        trainer.close()
        trainer.synchronize()
        assert trainer.state(handle) == "failed"
    assert trainer.check(3) == ""


# -- graphs


def checkpoint_in_capture(trainer: Any) -> str:
    from pccheck import UsageError

    with trainer.gpu.capture():
        try:
            trainer.client.checkpoint(step=2)
        except UsageError as error:
            return error.hint
    return "nothing was raised"


def test_no_checkpoint_while_a_graph_is_recorded(node: Node) -> None:
    trainer = node.ready()
    assert "before or after the recording" in trainer.evaluate(checkpoint_in_capture)
    handle = trainer.checkpoint()
    saved_step_2(trainer, handle)
    if not fakegpu.is_real():
        assert trainer.faults.broken_captures == 0


def record_a_step(trainer: Any) -> None:
    trainer.graph = None  # the one before would be destroyed in the recording, and spoil it
    with trainer.gpu.capture() as trainer.graph:
        trainer.optimizer.step()
    if fakegpu.is_real():
        trainer.gpu.synchronize()
    trainer.optimizer.now -= 1  # recorded, not run
    for entry in trainer.optimizer.state.values():
        entry["steps"] -= 1


def replay(trainer: Any) -> None:
    trainer.graph.replay()
    trainer.forward()
    trainer.optimizer.now += 1
    for entry in trainer.optimizer.state.values():
        entry["steps"] += 1


DEVICE_PARTS = PARTS[:4]


def test_a_recorded_step_ends_the_trust_in_hooks(node: Node) -> None:
    """Replays run no hooks: from then on checkpoint() returns when the copy is complete."""
    trainer = node.ready(DEVICE_PARTS)
    trainer.evaluate(record_a_step)
    assert any('gate="manual"' in w for w in trainer.warnings)
    trainer.evaluate(checkpoint_and_replay)
    saved_step_2(trainer, 1)
    assert trainer.check(3) == ""
    if not fakegpu.is_real():
        assert trainer.faults.broken_captures == 0


def checkpoint_and_replay(trainer: Any) -> None:
    trainer.checkpoint()
    replay(trainer)


def test_a_manual_gate_before_replay(node: Node) -> None:
    trainer = node.ready(DEVICE_PARTS, gate="manual")
    trainer.evaluate(record_a_step)
    with held_back(node):
        handle = trainer.checkpoint()
        trainer.evaluate(ask_and_replay)
        assert under_way(trainer, handle)
        assert not trainer.idle()
    saved_step_2(trainer, handle)
    assert trainer.check(3) == ""


def ask_and_replay(trainer: Any) -> None:
    trainer.client.gate()
    replay(trainer)


def test_a_graph_recorded_while_a_copy_is_under_way_is_not_spoilt(node: Node) -> None:
    trainer = node.ready(DEVICE_PARTS, gate="manual", transfer="push")
    for _ in range(3):
        trainer.evaluate(checkpoint_then_record)
        trainer.evaluate(ask_and_replay)
    assert trainer.wait_durable(3) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (4, "")
    if not fakegpu.is_real():
        assert trainer.faults.broken_captures == 0


def checkpoint_then_record(trainer: Any) -> None:
    trainer.checkpoint()
    record_a_step(trainer)


def test_an_error_that_is_raised(node: Node) -> None:
    """on_error="raise": the step goes on, and the next checkpoint() raises the failure."""
    trainer = node.ready(stall_limit_s=SHORT_LIMIT_S, on_error="raise")
    with held_back(node):
        trainer.checkpoint()
        trainer.step()
        trainer.synchronize()
        with pytest.raises(RemoteError, match="CheckpointFailed"):
            trainer.checkpoint()
