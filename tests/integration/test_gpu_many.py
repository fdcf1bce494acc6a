"""Several GPUs in one process, and several ranks with a GPU each."""

from __future__ import annotations

import signal

import pytest
import torch

from pccheck.state.devices import HOST
from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import PARTS, GpuTrainer, Part
from tests.support.trainer import RemoteError

stand_in = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
two_gpus = pytest.mark.skipif(
    fakegpu.is_real() and torch.cuda.device_count() < 2, reason="needs two GPUs"
)

SPREAD = (
    Part(300_000, device=1), Part(300_000, device=0), Part(3_000, device=HOST),
    Part(70_001, "bfloat16", device=1), Part(500, device=1, kind="buffer"),
    Part(500, device=0, kind="buffer"),
)  # fmt: skip


@two_gpus
@pytest.mark.parametrize("snapshot", ["overlap", "device"])
@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_one_process_with_two_gpus(start_node: Start, transfer: str, snapshot: str) -> None:
    node = start_node(devices=2)
    trainer = node.ready(SPREAD, transfer=transfer, snapshot=snapshot)
    for _ in range(4):
        trainer.step()
        last = trainer.checkpoint()
    trainer.step()
    assert trainer.wait_durable(last) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (6, "")
    assert len(node.status()["gpus"]) == (2 if transfer == "pull" else 0)
    trainer.kill()
    again = node.connect(SPREAD)
    assert again.restored() == (6, "")


@two_gpus
def test_each_gpus_stream_waits_for_its_part(start_node: Start) -> None:
    node = start_node(devices=2)
    trainer = node.ready(SPREAD)
    node.daemon.kill(signal.SIGSTOP)
    handle = trainer.checkpoint()
    trainer.step()
    assert not trainer.idle(0)
    assert not trainer.idle(1)
    node.daemon.kill(signal.SIGCONT)
    assert trainer.wait_durable(handle) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (2, "")
    assert trainer.check(3) == ""


@stand_in
@pytest.mark.parametrize("nth", [1, 4])
def test_one_gpus_failure_lets_both_streams_go(start_node: Start, nth: int) -> None:
    node = start_node(devices=2)
    trainer = node.ready(SPREAD)
    node.faults.fail_copy(nth, 1, behind=False)
    handle = trainer.checkpoint()
    trainer.step()
    assert trainer.check(3) == ""
    assert trainer.state(handle) == "failed"
    handle = trainer.checkpoint()
    trainer.step()
    assert trainer.wait_durable(handle) == "durable"
    assert trainer.recover()["wrong"] == ""


@two_gpus
def test_a_deadline_lets_both_streams_go(start_node: Start) -> None:
    node = start_node(devices=2)
    trainer = node.ready(SPREAD, stall_limit_s=0.5)
    node.daemon.kill(signal.SIGSTOP)
    handle = trainer.checkpoint()
    trainer.step()
    trainer.synchronize()
    assert trainer.state(handle) == "failed"
    assert trainer.check(3) == ""
    node.daemon.kill(signal.SIGCONT)


@stand_in
def test_gpus_have_other_numbers_here_and_there(start_node: Start) -> None:
    """CUDA_VISIBLE_DEVICES of the trainer: its first GPU is the daemon's second."""
    node = start_node(devices=2)
    for visible, parts in (("1", PARTS), ("1,0", SPREAD)):
        environment = {"PCCHECK_STANDIN_VISIBLE": visible}
        trainer = node.connect(parts, job=f"job-{len(parts)}", environment=environment)
        trainer.step()
        handle = trainer.checkpoint()
        trainer.step()
        assert trainer.wait_durable(handle) == "durable"
        assert node.status()["sessions"][-1]["transfer"] == "pull"
        assert trainer.recover()["wrong"] == ""
        trainer.kill()


def ranks(node: Node, launch: str) -> list[GpuTrainer]:
    made = []
    for rank in range(2):
        device = 0 if fakegpu.is_real() and torch.cuda.device_count() < 2 else rank
        parts = tuple(part._replace(device=device) for part in PARTS)
        environment = {
            "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": launch,
            "LOCAL_WORLD_SIZE": "2",
        }  # fmt: skip
        made.append(node.connect(parts, rank=rank, world_size=2, environment=environment))
    return made


def test_ranks_with_a_gpu_each_recover_the_newest_common_step(start_node: Start) -> None:
    node = start_node(devices=2)
    group = ranks(node, "0")
    for trainer in group:
        assert not trainer.restore()["found"]
    for _ in range(3):
        for trainer in group:
            trainer.step()
            last = trainer.checkpoint()
    for trainer in group:
        trainer.wait_durable(last)
    group[0].save()  # step 4: rank 1 never gets there
    document = node.status()
    assert [one["transfer"] for one in document["sessions"]] == ["pull", "pull"]
    assert sum(one["mappings"] for one in document["sessions"]) >= 4
    for trainer in group:
        trainer.kill()
    again = ranks(node, "1")
    assert [trainer.restore()["step"] for trainer in again] == [3, 3]
    assert [trainer.check(3) for trainer in again] == ["", ""]
    for trainer in again:
        trainer.step()
        last = trainer.checkpoint()
    assert [trainer.wait_durable(last) for trainer in again] in (
        [["durable", "global"], ["global", "global"], ["durable", "durable"]]
    )


def test_a_rank_that_dies_takes_nothing_of_the_other(start_node: Start) -> None:
    node = start_node(devices=2)
    group = ranks(node, "0")
    for trainer in group:
        trainer.restore()
        trainer.save()
    node.daemon.kill(signal.SIGSTOP)
    handles = []
    for trainer in group:
        trainer.step()
        handles.append(trainer.checkpoint())
    group[0].kill()
    node.daemon.kill(signal.SIGCONT)
    try:  # durable on this rank, or given up with the other's: whichever the daemon noticed first
        assert group[1].wait_durable(handles[1]) == "durable"
    except RemoteError as error:
        assert "rank 0 did not save this checkpoint" in str(error)
    group[1].step()
    assert group[1].check(3) == ""
    group[1].kill()
    again = ranks(node, "1")
    assert [trainer.restore()["step"] for trainer in again] == [1, 1]
    assert [trainer.check(1) for trainer in again] == ["", ""]


LARGE = (Part(1_300_000), Part(200_000), Part(3_000, device=HOST))


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_jobs_share_little_memory(start_node: Start, transfer: str) -> None:
    """Pinned memory of one job goes to the other job while both go on."""
    node = start_node("--dram", "12MiB")
    first = node.ready(LARGE, transfer=transfer)
    second = node.ready(LARGE, transfer=transfer, job="other")
    for _ in range(3):
        handles = []
        for trainer in (first, second):
            trainer.step()
            handles.append(trainer.checkpoint())
        for trainer, handle in zip((first, second), handles, strict=True):
            trainer.step()
            assert trainer.wait_durable(handle) == "durable"
    for trainer in (first, second):
        found = trainer.recover()
        assert (found["step"], found["wrong"]) == (7, "")
    assert {rank["job"]: rank["dram"]["bytes"] >> 20 for rank in node.status()["ranks"]} == {
        "job": 6, "other": 6,
    }  # fmt: skip
    third = node.ready(LARGE, transfer=transfer, job="third")  # after segments were read through
    assert {rank["dram"]["bytes"] >> 20 for rank in node.status()["ranks"]} <= {2, 3, 4, 5}
    for trainer, step in ((first, 8), (third, 2)):
        handle = trainer.checkpoint()
        trainer.step()
        assert trainer.wait_durable(handle) == "durable"
        assert trainer.recover()["step"] == step
