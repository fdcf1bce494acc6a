"""The daemon releases its context on a GPU that no trainer uses, and makes a new one for the next
trainer."""

from __future__ import annotations

import pytest

from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import GpuTrainer

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="counts the stand-in's contexts")
NOTHING = {"contexts": 0, "open_mappings": 0, "registered_bytes": 0, "streams": 0, "events": 0}


def is_released(node: Node) -> bool:
    return all(node.faults.words()[name] == value for name, value in NOTHING.items())


def saves(trainer: GpuTrainer) -> None:
    assert trainer.save() == "durable"
    assert trainer.recover()["wrong"] == ""


def test_a_gpu_that_no_trainer_uses_is_given_back(start_node: Start) -> None:
    """After the trainer was killed or closed, while the daemon's cache is still pinned. The next
    trainer restores from that cache, and pull works again."""
    node = start_node("--gpu-release", "200ms")
    for orderly in (False, True):
        trainer = node.connect()
        trainer.restore()
        assert node.faults.contexts == 1
        saves(trainer)
        assert node.transfer() == ("pull", "")
        if orderly:
            trainer.close()
        trainer.kill()
        node.faults.wait_for(lambda _: is_released(node))
    assert node.status()["gpus"][0]["copied_bytes"] > 0


def test_a_gpu_whose_trainer_only_computes_is_kept(start_node: Start) -> None:
    node = start_node("--gpu-release", "50ms")
    trainer = node.ready()
    other = node.connect(job="other")  # comes and goes
    saves(other)
    other.kill()
    node.wait_for(lambda: node.faults.closes > 0)
    opens = node.faults.opens
    for _ in range(5):
        saves(trainer)
    assert (node.faults.contexts, node.faults.opens) == (1, opens)


def test_two_gpus_in_turn_are_given_back_with_their_pins(start_node: Start) -> None:
    """The memory is pinned for each GPU that copies into it, until no GPU does."""
    node = start_node("--gpu-release", "50ms", devices=2)
    first = node.connect(environment={"PCCHECK_STANDIN_VISIBLE": "0"})
    saves(first)
    first.kill()
    second = node.connect(environment={"PCCHECK_STANDIN_VISIBLE": "1"})
    second.restore()
    for _ in range(3):
        saves(second)
    assert node.transfer() == ("pull", "")
    second.kill()
    node.faults.wait_for(lambda _: is_released(node))


def test_a_gpu_that_takes_one_process_is_left_to_the_trainer(start_node: Start) -> None:
    node = start_node(driver={"compute_mode": 3})
    trainer = node.connect()
    saves(trainer)
    assert node.faults.contexts == 0
    transfer, reason = node.transfer()
    assert transfer == "push"
    assert "compute mode" in reason


def test_other_processes_have_the_driver_between_two_pieces_of_pinned_memory(
    start_node: Start,
) -> None:
    """An existing pool is pinned in one pass for the next trainer."""
    node = start_node("--dram", "64MiB", "--gpu-release", "50ms")
    node.ready().kill()
    node.faults.wait_for(lambda _: is_released(node))
    node.faults.set(register_pause_us=0)
    node.connect()
    node.faults.wait_for(lambda f: f.register_pause_us > 0)
    assert node.faults.register_pause_us >= 4000
