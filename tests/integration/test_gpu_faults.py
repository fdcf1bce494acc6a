"""One fault of the driver after another, on the stand-in: the checkpoint that meets it is durable
or fails cleanly, training goes on, nothing stays mapped, and the next checkpoint is right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pccheck import DeviceError
from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import GpuTrainer, Part, expected, raw
from tests.support.standin import ALWAYS, ON_DEVICE, TO_DEVICE, TO_HOST
from tests.support.trainer import RemoteError

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
WIDE = (Part(600_000), Part(7, "bfloat16"))  # five chunks with the moments
OWN = 2_700_000  # float32 elements: an allocation of its own
LOST = 700  # an error after which the context is of no use


def ended(trainer: GpuTrainer, handle: int) -> str:
    try:
        return trainer.wait_durable(handle)
    except RemoteError as error:
        assert error.kind == "CheckpointFailedError", error
        return trainer.state(handle)


def goes_on(trainer: GpuTrainer, tries: int = 2) -> None:
    """Checks that training is undamaged, and that one of the next checkpoints is durable and
    right."""
    step = trainer.step()
    assert trainer.check(step) == ""
    for _ in range(tries):
        handle = trainer.checkpoint()
        trainer.step()
        if ended(trainer, handle) == "durable":
            break
    else:
        raise AssertionError(f"none succeeds: {trainer.reason(handle)}; {trainer.warnings}")
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (trainer.step(0) - 1, "")


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("behind", [False, True])
def test_a_pulled_copy_fails(node: Node, nth: int, behind: bool) -> None:
    trainer = node.ready()
    node.faults.fail_copy(nth, 1, behind=behind)
    handle = trainer.checkpoint()
    trainer.step()
    assert ended(trainer, handle) == "failed"
    assert "DEVICE" in trainer.reason(handle) or "GPU" in trainer.reason(handle)
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (1, "")
    goes_on(trainer, tries=1)
    assert node.transfer()[0] == "pull"
    assert node.status()["gpus"][0]["failures"] > 0


def test_pulled_copies_that_always_fail_end_in_push(node: Node) -> None:
    trainer = node.ready()
    node.faults.set(copy_fail_kinds=TO_HOST, copy_fail_code=1, copy_fail_at=2**64 - 1)
    for _ in range(4):
        assert ended(trainer, trainer.checkpoint()) in ("failed", "durable")
        trainer.step()
    goes_on(trainer, tries=1)
    transfer, reason = node.transfer()
    assert transfer == "push"
    assert reason


def test_a_failing_disk_is_no_reason_to_push(start_node: Start) -> None:
    """Checkpoints fail during their copies, one after another, and the GPU is not the cause."""
    node = start_node("--slots", "16", shim="dead:data:1")
    trainer = node.ready(WIDE)
    node.daemon.armed.touch()
    for _ in range(3):
        node.faults.hold_copies(after=3)  # a chunk comes to the disk, others are on their way
        assert ended(trainer, trainer.checkpoint()) == "failed"
        node.faults.release_copies()
        node.faults.wait_for(lambda f: f.to_host_queued == 0)  # else they take the next one's 3
        trainer.step()
    node.daemon.armed.unlink()
    goes_on(trainer)
    transfer, reason = node.transfer()
    assert transfer == "pull", reason


@pytest.mark.parametrize("behind", [False, True])
def test_the_daemons_context_is_lost(node: Node, behind: bool) -> None:
    """The checkpoint fails, later ones are pushed, and status reports it until the daemon is
    restarted."""
    trainer = node.ready()
    node.faults.fail_copy(2, LOST, behind=behind)
    handle = trainer.checkpoint()
    trainer.step()
    assert ended(trainer, handle) == "failed"
    goes_on(trainer, tries=1)
    transfer, reason = node.transfer()
    assert transfer == "push"
    assert "lost" in reason
    document = node.status()
    assert document["gpus"][0]["lost"]
    assert document["daemon"]["state"] == "degraded"
    trainer.kill()
    again = node.connect()
    done = again.restore()
    assert again.check(done["step"]) == ""
    goes_on(again, tries=1)
    again.kill()
    node.daemon.stop()
    node.start()
    third = node.connect()
    third.restore()
    goes_on(third)
    assert node.transfer()[0] == "pull"


def test_the_daemons_context_is_lost_between_checkpoints(node: Node) -> None:
    trainer = node.ready()
    node.faults.set(lose_context=LOST)
    handle = trainer.checkpoint()
    trainer.step()
    assert ended(trainer, handle) == "failed"
    goes_on(trainer, tries=1)
    assert node.transfer()[0] == "push"
    node.daemon.stop()  # a lost context lets go of nothing before its process ends


def test_a_handle_does_not_open_later(start_node: Start) -> None:
    """Moments appear, and the daemon cannot open their allocation: push is used from then on."""
    node = start_node("--dram", "128MiB")
    trainer = node.connect((Part(OWN), Part(500)))
    assert ended(trainer, trainer.checkpoint()) == "durable"
    assert node.transfer()[0] == "pull"
    node.faults.fail_open(201, times=1)
    goes_on(trainer, tries=1)
    assert node.transfer()[0] == "push"
    assert node.faults.open_mappings == 0


def test_memory_is_not_exported_any_more(start_node: Start) -> None:
    node = start_node("--dram", "128MiB")
    trainer = node.connect((Part(OWN), Part(500)))
    assert ended(trainer, trainer.checkpoint()) == "durable"
    trainer.faults.fail_export(801)
    goes_on(trainer, tries=1)
    assert node.transfer()[0] == "push"


def allocate_anew(trainer: Any) -> bool:
    """Frees part 0 and allocates as much again; returns whether the address is the same."""
    trainer.gpu.synchronize()
    old = trainer.model.part0.data
    address, now = old.data_ptr(), trainer.optimizer.now
    trainer.gpu.free(old)
    fresh = trainer.gpu.tensor((OWN,))
    raw(fresh).copy_(expected(now, 0, 4 * OWN))
    trainer.model.part0.data = fresh
    return bool(fresh.data_ptr() == address)


def test_other_memory_at_the_old_address(start_node: Start) -> None:
    """Python sees no difference, but the daemon has mapped memory that was freed."""
    node = start_node("--dram", "128MiB")
    trainer = node.ready((Part(OWN), Part(500)))
    assert trainer.evaluate(allocate_anew)
    handle = trainer.checkpoint()
    trainer.step()
    assert ended(trainer, handle) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (2, "")
    assert (node.faults.closes, node.faults.scrambled) == (1, 0)


def test_slow_copies(node: Node) -> None:
    trainer = node.ready()
    node.faults.slow_copies(50_000)
    for _ in range(3):
        goes_on(trainer, tries=1)
    assert set(trainer.states()) == {"durable"}


# -- in the trainer


def test_the_page_cannot_be_registered(node: Node) -> None:
    trainer = node.process()
    trainer.faults.fail_register()
    node.open(trainer)
    goes_on(trainer, tries=1)
    transfer, reason = node.transfer()
    assert transfer == "push"
    assert "page" in reason


def test_a_pushed_copy_is_refused(node: Node) -> None:
    trainer = node.ready(transfer="push")
    trainer.faults.fail_copy(2, 1, behind=False)
    handle = trainer.checkpoint()
    trainer.step()
    assert ended(trainer, handle) == "failed"
    goes_on(trainer, tries=1)


@pytest.mark.parametrize("transfer", ["pull", "push"])
@pytest.mark.parametrize("snapshot", ["overlap", "device"])
def test_the_trainers_context_is_lost(node: Node, transfer: str, snapshot: str) -> None:
    """No later checkpoint can be saved, no call hangs, and the previous checkpoint is safe."""
    trainer = node.ready(transfer=transfer, snapshot=snapshot, stall_limit_s=2)
    trainer.faults.set(lose_context=LOST)
    for _ in range(3):
        handle = trainer.checkpoint()
        assert trainer.state(handle) in ("failed", "skipped")
        trainer.evaluate(ask)
    assert trainer.warnings
    trainer.close()
    trainer.kill()
    again = node.connect()
    assert again.restored() == (1, "")
    goes_on(again)


def ask(trainer: Any) -> None:
    trainer.client.gate()


def test_the_trainers_context_is_lost_under_a_copy(node: Node) -> None:
    trainer = node.ready(stall_limit_s=2)
    node.faults.hold_copies()
    handle = trainer.checkpoint()
    trainer.step()
    node.faults.wait_for(lambda f: f.held_copies > 0)
    trainer.faults.set(lose_context=LOST)
    node.faults.release_copies()
    assert ended(trainer, handle) in ("durable", "failed")  # the daemon's copy is right
    trainer.close()
    trainer.kill()
    again = node.connect()
    done = again.restore()
    assert done["step"] in (1, 2)
    assert again.check(done["step"]) == ""


@pytest.mark.parametrize("snapshot", ["overlap", "device"])
def test_no_room_for_staging(start_node: Start, snapshot: str) -> None:
    """checkpoint() then returns when the tensors have been read, with one warning."""
    node = start_node("--dram", "128MiB", memory_bytes=49 << 20)
    parts = (Part(OWN), Part(OWN // 2, kind="buffer"), Part(500))
    trainer = node.connect(parts, snapshot=snapshot)
    for _ in range(3):
        trainer.step()
        handle = trainer.checkpoint()
        trainer.forward()  # nothing was promised to hold it back
        trainer.evaluate(undo_forward)
        assert ended(trainer, handle) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (3, "")
    assert len([w for w in trainer.warnings if "now returns only when" in w]) == 1


def fill(trainer: Any) -> None:
    """Allocates all memory of the GPU, as torch's cache may."""
    size = 16 << 20
    while size >= 4096:
        try:
            trainer.gpu.keep_unused(size)
        except fakegpu.DriverError:
            size //= 2


def test_a_gpu_whose_memory_torch_keeps_for_later(start_node: Start) -> None:
    """There is no memory for the daemon's context, nor for the probe, until torch frees some."""
    node = start_node("--dram", "128MiB", memory_bytes=96 << 20, context_bytes=8 << 20)
    trainer = node.connect((Part(OWN), Part(500)), attach=False)
    trainer.step()
    trainer.evaluate(fill)
    trainer.attach()
    assert ended(trainer, trainer.checkpoint()) == "durable"
    assert node.transfer() == ("pull", "")
    assert trainer.warnings == []


def test_the_daemon_has_its_part_of_a_gpu_before_training_begins(start_node: Start) -> None:
    node = start_node("--dram", "128MiB", memory_bytes=96 << 20, context_bytes=8 << 20)
    trainer = node.connect((Part(OWN), Part(500)))
    assert node.faults.contexts == 1
    trainer.evaluate(fill)
    trainer.evaluate(hold_back)
    assert ended(trainer, trainer.checkpoint()) == "durable"
    assert node.transfer() == ("pull", "")


def test_a_gpu_that_is_full_for_a_while(start_node: Start) -> None:
    """Push is used, and pull when there is memory again."""
    node = start_node("--dram", "128MiB", memory_bytes=96 << 20, context_bytes=8 << 20)
    trainer = node.connect((Part(OWN), Part(500)), attach=False)
    trainer.step()
    trainer.evaluate(fill)
    trainer.evaluate(hold_back)
    trainer.attach()
    assert ended(trainer, trainer.checkpoint()) == "durable"
    assert node.transfer()[0] == "push"
    trainer.evaluate(release)
    for _ in range(12):
        trainer.step()
        assert ended(trainer, trainer.checkpoint()) == "durable"
    assert node.transfer() == ("pull", "")


def test_staging_is_tried_again_when_there_is_room(start_node: Start) -> None:
    node = start_node("--dram", "128MiB", memory_bytes=96 << 20)
    trainer = node.connect((Part(OWN), Part(OWN // 2, kind="buffer"), Part(500)))
    trainer.step()
    trainer.evaluate(fill)
    trainer.evaluate(hold_back)
    assert ended(trainer, trainer.checkpoint()) == "durable"
    assert trainer.evaluate(staged) == 0
    trainer.evaluate(release)
    for _ in range(12):
        trainer.step()
        assert ended(trainer, trainer.checkpoint()) == "durable"
    assert trainer.evaluate(staged) > 0


def staged(_trainer: Any) -> int:
    """The number of copies on the device; only staging makes them here."""
    return fakegpu.Faults(Path(os.environ["PCCHECK_STANDIN_FAULTS"])).copies_on_device


def hold_back(trainer: Any) -> None:
    """Uses the memory that torch keeps for later."""
    trainer.held, trainer.gpu._unused = trainer.gpu._unused, {}


def release(trainer: Any) -> None:
    trainer.gpu._unused = trainer.held
    trainer.gpu.empty_cache()


def undo_forward(trainer: Any) -> None:
    from tests.support.gputrainer import advance

    for tensor in trainer.model.buffers():
        advance(trainer.gpu, tensor, -1)


def test_copies_on_the_device_fail(node: Node) -> None:
    trainer = node.ready(snapshot="device")
    trainer.faults.fail_copy(ALWAYS, 1, kinds=ON_DEVICE, behind=False)
    assert ended(trainer, trainer.checkpoint()) == "failed"
    trainer.faults.set(copy_fail_at=0)
    goes_on(trainer, tries=1)


@pytest.mark.parametrize("behind", [False, True])
def test_a_restore_fails_and_succeeds(node: Node, behind: bool) -> None:
    trainer = node.ready()
    trainer.kill()
    again = node.connect()
    again.faults.fail_copy(3, 1, kinds=TO_DEVICE, behind=behind)
    with pytest.raises(RemoteError) as caught:
        again.restore()
    assert caught.value.kind == DeviceError.__name__
    assert again.state(again.checkpoint(step=9)) == "failed"  # the state is a mix
    again.faults.set(copy_fail_at=0)
    if behind:  # what fails on the way is sticky: this client's GPU is of no use any more
        with pytest.raises(RemoteError, match="GPU"):
            again.restore()
        again.close()
        again.reopen(job="job", socket=str(node.daemon.socket))
    assert again.restored() == (1, "")
    goes_on(again)


def test_memory_that_is_not_registered_is_restored_to(node: Node) -> None:
    trainer = node.ready()
    trainer.kill()
    again = node.process()
    again.faults.fail_register()
    node.open(again)
    assert again.restored() == (1, "")
    assert again.faults.pageable_copies > 1
