"""`checkpoint(to="device")`: the last step of a dead trainer, and the ends of those that training
withdraws. `make last-step-campaign` plays more deaths."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from typing import Any

import pytest

from pccheck.warn import LOG
from tests.support import fakegpu
from tests.support.ctl import Ctl
from tests.support.gpunode import Node
from tests.support.gpuranks import (
    after_an_error,
    handed_over,
    launched,
    ranks,
    restored,
    save,
)
from tests.support.gputrainer import GpuTrainer, Part
from tests.support.standin import SAMPLES
from tests.support.torchstore import TorchStore
from tests.support.waiting import until

from . import rank_step_campaign
from .last_step_campaign import GEOMETRY, PARTS, SHARED, run

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's dead processes")


def test_10_deaths() -> None:
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = run(10, seed)
    print(f"seed {seed}", dict(tally.outcomes))
    assert not tally.violations, (seed, tally.violations)
    assert sum(tally.outcomes.values()) == 10


def test_5_deaths_of_a_rank() -> None:
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = rank_step_campaign.run(5, seed)
    print(f"seed {seed}", dict(tally.outcomes))
    assert not tally.violations, (seed, tally.violations)
    assert sum(tally.outcomes.values()) == 5


def test_nothing_is_copied_and_the_update_ends_it(ctl: Ctl) -> None:
    with Node(*GEOMETRY, "--dram", "32MiB", dead="keep") as node:
        trainer = node.start().ready(PARTS)
        trainer.step()
        copies = node.faults.copies_to_host
        handle = trainer.checkpoint(to="device")
        trainer.synchronize()
        node.wait_for(lambda: trainer.state(handle) == "copying")
        said = ctl(None, "status", "--socket", node.daemon.socket).out
        assert re.search(r"job +0 +3 +on the GPU ", said), said
        trainer.step()
        trainer.synchronize()
        assert trainer.ended(handle) == "skipped"
        assert "training went on" in trainer.reason(handle)
        assert node.faults.copies_to_host == copies
        assert not trainer.warnings
        assert "was skipped" not in node.daemon.log.read_text()  # this is how most of them end


def test_a_wait_and_the_end_of_the_process_have_it_written() -> None:
    with Node(*GEOMETRY, "--dram", "32MiB") as node:
        trainer = node.start().ready(PARTS)
        trainer.step()
        assert trainer.wait_durable(trainer.checkpoint(to="device")) == "durable"
        now = trainer.step()
        trainer.checkpoint(to="device")
        trainer.close()
        found = node.connect(PARTS).recover()
        assert (found["step"], found["wrong"]) == (now, "")


def test_what_is_pushed_beside_it_may_be_of_the_next_step() -> None:
    """The update withdraws the step, and the client's copies come after the update."""
    parts = (Part(300_000), Part(700_000, shareable=False))
    with Node("--dram", "512MiB", dead="keep") as node:
        trainer = node.start().connect(parts)
        for _ in range(3):  # the second one lays out apart what cannot be shared
            trainer.save()
        assert node.transfer()[0] == "pull" and "are pushed" in node.transfer()[1]
        trainer.step()
        copies = trainer.faults.copies_to_host + SAMPLES
        trainer.faults.hold_copies(after=SAMPLES)
        handle = trainer.checkpoint(to="device")
        trainer.faults.wait_for(lambda f: f.held_copies > 0)
        node.daemon.kill(signal.SIGSTOP)
        trainer.step()
        until(trainer.idle)
        trainer.faults.release_copies()
        trainer.faults.wait_for(lambda f: f.copies_to_host > copies)
        node.daemon.kill(signal.SIGCONT)
        assert trainer.ended(handle) == "skipped"
        assert "training went on" in trainer.reason(handle)


def test_it_is_skipped_where_the_daemon_does_not_pull() -> None:
    with Node(*GEOMETRY, "--dram", "32MiB") as node:
        trainer = node.start().ready(PARTS, transfer="push")
        handle = trainer.checkpoint(to="device")
        assert trainer.state(handle) == "skipped"
        assert "does not pull" in trainer.reason(handle)


def die(group: list[GpuTrainer]) -> None:
    """When their GPUs have done what they were told."""
    for trainer in group:
        trainer.synchronize()
    assert not any(trainer.warnings for trainer in group)
    for trainer in group:
        trainer.kill()


def begin(group: list[GpuTrainer]) -> None:
    """Step 1 is global, and the last of three more is on the GPUs."""
    for trainer, handle in zip(group, save(group), strict=True):
        assert trainer.wait_global(handle) == "global"
    for _ in range(3):
        save(group, to="device")


def test_a_job_can_be_finished_after_an_error(ctl: Ctl) -> None:
    """The step that another rank has is read when the session has ended, so nothing waits for it
    before."""
    with Node(*GEOMETRY, "--dram", "64MiB", devices=2, dead="keep") as node:
        group, handle = a_step_on_both_gpus(node.start(), 0)
        group[0].faults.set(lose_context=700)
        assert group[0].evaluate(finished) == ("FAILED", [])
        (told,) = [text for text in group[0].warnings if "a restart resumes" in text]
        assert "step 1: a restart resumes there, or at a later one" in told
        listed = ctl(None, "list", "--rank", "0", "--socket", node.daemon.socket).out
        assert re.search(r"job +0 +5 .*finished", listed), listed
        rank_1_has_it(node, group, handle)


@pytest.mark.parametrize("replicated", [False, True])
def test_the_last_step_of_two_ranks(replicated: bool) -> None:
    """What both had on their GPUs when they died. What one of them had withdrawn is lost."""
    with Node(*GEOMETRY, "--dram", "64MiB", devices=2, dead="keep") as node:
        node.start()
        group = ranks([node], PARTS, replicated=replicated, **launched(0))
        begin(group)
        die(group)
        group = ranks([node], PARTS, replicated=replicated, **launched(1))
        assert restored(group) == [(4, ""), (4, "")]
        save(group, to="device")
        group[0].step()  # and the update of rank 1 never comes
        die(group)
        group = ranks([node], PARTS, replicated=replicated, **launched(2))
        assert restored(group) == [(4, ""), (4, "")]


def test_the_last_step_of_two_nodes(store: TorchStore) -> None:
    listen = ("--dram", "64MiB", "--listen", "127.0.0.1")
    with Node(*GEOMETRY, *listen, dead="keep") as one, Node(*GEOMETRY, *listen, dead="keep") as two:
        nodes = [one.start(), two.start()]
        group = ranks(nodes, PARTS, environment=store.environment("before", 1, 0))
        begin(group)
        die(group)
        group = ranks(nodes, PARTS, environment=store.environment("after", 1, 0))
        assert restored(group) == [(4, ""), (4, "")]


def test_what_was_staged_is_withdrawn_before_it_is_overwritten() -> None:
    """With snapshot="device", and a CPU that is ahead of the GPU; then the process dies."""
    with Node(*GEOMETRY, "--dram", "32MiB", dead="keep") as node:
        trainer = node.start().ready(PARTS, snapshot="device")
        handles = trainer.evaluate(three_behind_a_busy_stream)
        trainer.synchronize()
        assert [trainer.ended(handle) for handle in handles[:2]] == ["skipped"] * 2
        trainer.evaluate(handed_over)
        trainer.kill()
        found = node.connect(PARTS).recover()
        assert (found["step"], found["wrong"]) == (5, "")


def three_behind_a_busy_stream(trainer: Any) -> list[int]:
    goes_on = threading.Event()
    trainer.gpu.launch(goes_on.wait)
    handles = []
    for _ in range(3):
        trainer.step()
        handles.append(trainer.checkpoint(to="device"))
    goes_on.set()
    return handles


def test_a_step_stays_until_the_gpu_has_begun_the_next_one() -> None:
    """The CPU is ahead: it has asked for the copy of a step that the GPU has not begun, and for
    which there is no place beside what is copied and what is on the GPU."""
    with Node(*GEOMETRY, "--dram", "32MiB", dead="keep") as node:
        trainer = node.start().ready(PARTS)
        assert trainer.wait_copied(trainer.checkpoint(to="memory")) == "copied"
        trainer.step()
        handle = trainer.checkpoint(to="device")
        trainer.synchronize()
        trainer.evaluate(handed_over)
        trainer.evaluate(asks_for_more)
        node.wait_for(lambda: asked(node) == 5)
        assert trainer.state(handle) == "copying"
        trainer.kill()
        found = node.connect(PARTS).recover()
        assert (found["step"], found["wrong"]) == (3, "")


def asks_for_more(trainer: Any) -> None:
    trainer.gpu.launch(threading.Event().wait)
    for level in ("device", "memory"):
        trainer.step()
        trainer.handles.append(trainer.client.checkpoint(step=trainer.optimizer.now, to=level))


def asked(node: Node) -> int:
    """The newest step that the daemon has a request of."""
    (row,) = node.status()["ranks"]
    return max(one["step"] for one in row["checkpoints"])


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_a_copy_takes_the_place_of_the_same_step(on_busy: str) -> None:
    with Node(*GEOMETRY, "--dram", "32MiB", dead="keep") as node:
        trainer = node.start().ready(SHARED, on_busy=on_busy)  # nothing is staged
        assert trainer.wait_copied(trainer.checkpoint(to="memory")) == "copied"
        trainer.step()
        handles = [trainer.checkpoint(to="device") for _ in range(2)]
        copied = trainer.checkpoint(to="memory")
        node.wait_for(lambda: trainer.state(handles[0]) == "skipped")  # a wait has it written
        assert trainer.wait_copied(copied) in ("copied", "writing", "durable")


def test_a_driver_that_does_not_keep_a_dead_ones_memory() -> None:
    """What the stream had copied before the death is not what the daemon pulls after it."""
    with Node(*GEOMETRY, "--dram", "32MiB", dead="scramble") as node:
        trainer = node.start().ready(PARTS)
        assert trainer.wait_durable(trainer.checkpoint()) == "durable"
        trainer.step()
        trainer.checkpoint(to="device")
        trainer.synchronize()
        trainer.evaluate(handed_over)
        trainer.kill()
        found = node.connect(PARTS).recover()
        assert (found["step"], found["wrong"]) == (2, "")
        node.daemon.logs("other bytes")


def finished(trainer: Any) -> tuple[str, list[str]]:
    """How the last step has ended, and what close(done=True) has logged."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    trainer.client.close(done=True)
    return trainer.handles[-1].state.name, told


def test_a_broken_gpu_is_named_where_no_other_rank_has_the_step() -> None:
    with Node(*GEOMETRY, "--dram", "32MiB") as node:
        trainer = node.start().ready(PARTS)
        trainer.checkpoint(to="device")
        trainer.synchronize()
        trainer.evaluate(handed_over)
        trainer.faults.set(lose_context=700)
        state, reason = trainer.evaluate(after_an_error)
        assert state == "FAILED" and "could not be copied (DEVICE_LOST)" in reason, reason


def a_step_on_both_gpus(node: Node, launch: int) -> tuple[list[GpuTrainer], int]:
    """Ranks that share all that is on their GPUs, with step 5 there; the handle of rank 1."""
    group = ranks([node], SHARED, replicated=True, **launched(launch))
    begin(group)
    handle = save(group, to="device")[1]
    for trainer in group:
        trainer.synchronize()
        trainer.evaluate(handed_over)
    return group, handle


def rank_1_has_it(node: Node, group: list[GpuTrainer], handle: int) -> None:
    """Rank 0 has ended. Both ranks resume from step 5."""
    node.daemon.logs("was read from that of rank 1")
    assert group[1].wait_durable(handle) in ("durable", "global")
    group[1].kill()
    group = ranks([node], SHARED, replicated=True, **launched(1))
    assert restored(group) == [(5, ""), (5, "")]


def test_another_rank_has_what_a_dead_one_does_not_give_any_more() -> None:
    """A driver that does not keep a dead process's memory."""
    with Node(*GEOMETRY, "--dram", "64MiB", devices=2, dead="scramble") as node:
        group, handle = a_step_on_both_gpus(node.start(), 0)
        group[0].kill()
        rank_1_has_it(node, group, handle)


def test_another_rank_has_what_a_broken_gpu_held() -> None:
    """The trainer sees a CUDA error, and ends in order."""
    with Node(*GEOMETRY, "--dram", "64MiB", devices=2, dead="keep") as node:
        group, handle = a_step_on_both_gpus(node.start(), 0)
        group[0].faults.set(lose_context=700)
        state, reason = group[0].evaluate(after_an_error)
        assert state == "FAILED" and "another rank" in reason
        rank_1_has_it(node, group, handle)
