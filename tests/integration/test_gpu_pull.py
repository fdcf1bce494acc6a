"""Pull: the daemon copies exactly the needed bytes from the trainer's GPU memory, and unmaps it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from pccheck.state.devices import HOST
from tests.support import fakegpu
from tests.support.gpunode import Node, Start
from tests.support.gputrainer import Part, expected, raw

OWN = 2_700_000  # float32 elements: an allocation of its own
CHUNK, AHEAD = 16 << 20, 48 << 20


def test_a_checkpoint_is_pulled_and_comes_back(node: Node) -> None:
    trainer = node.connect()
    assert not trainer.restore()["found"]
    for _ in range(5):
        trainer.step()
        trainer.checkpoint()
    assert trainer.wait_durable(4) in ("durable", "global")
    document = node.status()
    assert document["sessions"][0]["transfer"] == "pull"
    assert "CUDA IPC" in document["daemon"]["transfer_reason"]
    assert document["gpus"][0]["copied_bytes"] > 0
    mapped = document["sessions"][0]["mappings"]
    assert mapped > 0
    node.daemon.logs(f": {mapped} allocations of GPU memory (")
    assert trainer.recover() == {
        "found": True, "step": 5, "sequence": 5, "source": "dram", "skipped": [], "wrong": "",
    }  # fmt: skip
    trainer.kill()

    again = node.connect()
    assert again.restore()["source"] == "dram"
    assert again.check(5) == ""
    again.kill()
    node.daemon.kill()
    node.start()
    third = node.connect()
    assert third.restore()["source"] == "volume"
    assert third.check(5) == ""
    assert third.save() == "durable"
    assert third.recover()["wrong"] == ""
    assert trainer.warnings == again.warnings == third.warnings == []


def odd_state(trainer: Any) -> None:
    """A module with tensors of every kind."""
    gpu, model = trainer.gpu, torch.nn.Module()
    torch.manual_seed(3)
    for dtype in (
        torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
        torch.uint8, torch.int64, torch.float64, torch.complex64, torch.bool,
    ):  # fmt: skip
        tensor = gpu.tensor((3, 5, 7), dtype)
        top = 2 if dtype is torch.bool else 256
        raw(tensor).copy_(torch.randint(top, (raw(tensor).numel(),), dtype=torch.uint8))
        model.register_buffer(str(dtype).replace("torch.", "as_"), tensor)
    base = gpu.like(torch.rand(8, 6))
    model.register_buffer("base", base)
    model.register_buffer("transposed", base.t())
    model.register_buffer("strided", base[::2, 1:4])
    model.register_buffer("expanded", gpu.like(torch.rand(1, 4)).expand(3, 4))
    model.register_buffer("scalar", gpu.like(torch.tensor(1.5, dtype=torch.float64)))
    model.register_buffer("empty", gpu.tensor((0, 3)))
    model.register_buffer("on_host", torch.rand(3, 3))
    model.first = torch.nn.Parameter(gpu.like(torch.rand(100, 30)))
    model.tied = model.first
    model.large = torch.nn.Parameter(gpu.like(torch.rand(700_001)))
    trainer.odd = model
    trainer.client.attach(model=model)


def clones(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
    return one.dtype == other.dtype and torch.equal(raw(one), raw(other))


def save_odd(trainer: Any) -> int:
    trainer.gpu.synchronize()
    trainer.before = clones(trainer.odd.state_dict())
    made = trainer.client.checkpoint(step=1)
    made.wait_durable(60)
    return len(trainer.before)


def recovered_odd(trainer: Any) -> list[str]:
    """Names of the tensors that differ in the state of recover()."""
    state = trainer.client.recover().state["model"]
    live = trainer.odd.state_dict()
    wrong = [
        name for name, tensor in state.items()
        if not same(tensor, trainer.before[name])
        or (tensor.shape, tensor.stride()) != (live[name].shape, live[name].stride())
        or tensor.device.type != "cpu"
    ]  # fmt: skip
    base = state["base"].untyped_storage().data_ptr()
    for name in ("transposed", "strided"):
        if state[name].untyped_storage().data_ptr() != base:
            wrong.append(f"{name} is no view on base")
    if state["tied"].data_ptr() != state["first"].data_ptr():
        wrong.append("tied")
    return wrong if state.keys() == live.keys() else ["keys"]


def scribble_and_restore(trainer: Any) -> list[str]:
    live = trainer.odd.state_dict()
    where = {name: tensor.data_ptr() for name, tensor in live.items()}
    for name in live:
        if name not in ("transposed", "strided", "expanded"):
            raw(live[name]).fill_(1)
    live["expanded"][:1].fill_(7)
    trainer.gpu.synchronize()
    trainer.client.restore()
    now = trainer.odd.state_dict()
    return [
        name for name, tensor in now.items()
        if not same(tensor, trainer.before[name]) or tensor.data_ptr() != where[name]
    ]  # fmt: skip


def test_everything_that_a_tensor_can_be(node: Node) -> None:
    trainer = node.connect(attach=False)
    trainer.evaluate(odd_state)
    assert trainer.evaluate(save_odd) == 20
    assert node.transfer()[0] == "pull"
    assert trainer.evaluate(recovered_odd) == []
    assert trainer.evaluate(scribble_and_restore) == []
    node.daemon.kill()
    node.start()
    trainer.kill()
    again = node.connect(attach=False)
    again.evaluate(odd_state)
    again.evaluate(take_before)
    assert again.evaluate(recovered_odd) == []
    assert again.evaluate(scribble_and_restore) == []


def take_before(trainer: Any) -> None:
    """Made again from the same seed, the state equals the saved one."""
    trainer.before = clones(trainer.odd.state_dict())


def test_state_that_appears_is_exposed_beside_the_rest(start_node: Start) -> None:
    """Moments come with the first step: the payload outgrows its slots, a new volume is made."""
    node = start_node("--dram", "128MiB")
    parts = (Part(OWN), Part(1_000), Part(1_000, kind="buffer"), Part(50, device=HOST))
    trainer = node.connect(parts)
    first = trainer.checkpoint()
    assert trainer.wait_durable(first) == "durable"
    opened = node.faults.opens
    for _ in range(3):
        trainer.step()
        last = trainer.checkpoint()
    assert trainer.wait_durable(last) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (3, "")
    assert len(node.status()["ranks"]) == 1
    if not fakegpu.is_real():
        assert opened == 3  # the large one, the block of small ones, and what is staged
        assert (node.faults.opens, node.faults.closes) == (4, 0)
    trainer.kill()
    again = node.connect(parts)
    assert again.restore()["step"] == 3
    assert again.check(3) == ""  # moments were made anew, on the GPU


def replace_part0(trainer: Any) -> None:
    """Replaces the memory of part 0; the content stays."""
    trainer.gpu.synchronize()
    trainer.old = trainer.model.part0.data
    trainer.model.part0.data = trainer.gpu.like(trainer.old)
    trainer.gpu.synchronize()


def add_part(trainer: Any) -> None:
    now, tensor = trainer.optimizer.now, trainer.gpu.tensor((OWN,))
    raw(tensor).copy_(expected(now, 2, 4 * OWN))
    trainer.model.register_buffer("part2", tensor)
    trainer.model.numbers["part2"] = 2


def shrink_part1(trainer: Any) -> None:
    trainer.gpu.synchronize()
    parameter = trainer.model.part1
    parameter.data = parameter.data[: parameter.numel() // 2]
    moment = trainer.optimizer.state[parameter]["moment"]
    trainer.optimizer.state[parameter]["moment"] = moment[: moment.numel() // 2]


def free_old(trainer: Any) -> None:
    trainer.gpu.free(trainer.old)


def test_what_changes_between_checkpoints_is_exposed_anew(start_node: Start) -> None:
    node = start_node("--dram", "256MiB")
    trainer = node.connect((Part(OWN), Part(5_000)))
    for change in (None, replace_part0, shrink_part1, add_part, replace_part0):
        if change is not None:
            trainer.evaluate(change)
        trainer.step()
        handle = trainer.checkpoint()
        trainer.step()
        assert trainer.wait_durable(handle) == "durable"
        found = trainer.recover()
        assert (found["step"], found["wrong"]) == (trainer.evaluate(now) - 1, "")
        if change is replace_part0 and not fakegpu.is_real():
            trainer.evaluate(free_old)
    assert trainer.warnings == []
    if not fakegpu.is_real():
        assert node.faults.closes == 3  # two replaced, and what staging had outgrown
        assert node.faults.scrambled == 0


def now(trainer: Any) -> int:
    return int(trainer.optimizer.now)


def use_more(trainer: Any) -> None:
    trainer.others = [trainer.gpu.tensor((OWN,)) for _ in range(3)]


def test_only_what_is_needed_is_mapped(node: Node) -> None:
    trainer = node.connect((*[Part(200)] * 90, Part(OWN)))
    trainer.evaluate(use_more)
    trainer.save()
    (session,) = node.status()["sessions"]
    if not fakegpu.is_real():  # a block of small ones, one allocation, its moment, and the probe's
        assert session["mappings"] == node.faults.open_mappings == node.faults.opens == 4
        assert session["exposed_bytes"] < trainer.faults.allocated_bytes - 3 * 4 * OWN
    trainer.close()
    if not fakegpu.is_real():
        node.faults.wait_for(lambda f: f.open_mappings == 0)
        assert trainer.faults.registered_bytes == 0
    assert node.status()["pool"]["used_bytes"] >= 0
    trainer.step()
    assert trainer.check(2) == ""  # its memory is its own again, and the streams work


def test_many_small_tensors_take_few_copies(node: Node) -> None:
    """They are in one block of torch's allocator, and are copied with the gaps between them."""
    parts = (*(Part(1 + i % 3) for i in range(300)), Part(2, kind="buffer"), Part(9_000))
    trainer = node.ready(parts)
    copies = node.faults.copies_to_host
    for _ in range(3):
        assert trainer.wait_durable(trainer.checkpoint()) == "durable"
        trainer.step()
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (4, "")
    if not fakegpu.is_real():
        assert node.faults.copies_to_host - copies < 30
    trainer.kill()
    again = node.connect(parts)
    assert again.restored() == (4, "")


def test_restarts_leave_nothing_behind(node: Node) -> None:
    pinned = set()
    for step in range(5):
        trainer = node.connect()
        done = trainer.restore()
        assert done["step"] == step
        assert trainer.check(step) == ""
        if step > 1:  # while its memory was still being made, the first had to use some twice
            assert done["source"] == "dram"
        trainer.save()
        trainer.kill()
        if not fakegpu.is_real():
            node.faults.wait_for(lambda f: f.open_mappings == 0)
            assert node.faults.contexts == 1
            assert node.faults.allocations == 0
            if step > 0:
                pinned.add(node.faults.registered_bytes)
    assert len(pinned) <= 1


@pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
@pytest.mark.parametrize("snapshot", ["overlap", "device"])
def test_a_byte_of_a_dead_trainer_never_counts(node: Node, snapshot: str) -> None:
    """SIGKILL in mid-copy: later copies read garbage, and the previous checkpoint is recovered."""
    trainer = node.connect(snapshot=snapshot)
    assert trainer.save() == "durable"
    trainer.step()
    node.faults.hold_copies(after=1)
    trainer.checkpoint()
    node.faults.wait_for(lambda f: f.held_copies > 0)
    trainer.kill()
    node.faults.release_copies()
    node.faults.wait_for(lambda f: f.open_mappings == 0)
    assert node.faults.scrambled > 0
    again = node.connect()
    assert again.restored() == (1, "")


@pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
def test_few_copies_are_ahead_of_those_of_training(start_node: Start) -> None:
    """The trainer's own copies use the same engine: its `.item()` waits for copies that are
    ahead."""
    node = start_node("--chunk", "16MiB", "--dram", "256MiB")
    trainer = node.ready((Part(8 << 20),))  # six chunks, with the moments
    node.faults.hold_copies(after=0)
    handle = trainer.checkpoint()
    node.faults.wait_for(lambda f: f.to_host_queued >= 2 * CHUNK)
    time.sleep(0.2)  # in which the copier enqueues what it may
    assert node.faults.to_host_queued <= AHEAD
    node.faults.release_copies()
    assert trainer.wait_durable(handle) == "durable"
    assert trainer.recover()["wrong"] == ""


def test_what_was_copied_outlives_its_trainer(start_node: Start) -> None:
    node = start_node("--max-bandwidth", "6MiB")
    trainer = node.connect()
    trainer.step()
    assert trainer.wait_copied(trainer.checkpoint()) in ("copied", "writing")
    trainer.kill()
    again = node.connect()
    assert again.restored() == (1, "")
