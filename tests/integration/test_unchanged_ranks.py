"""Unchanged tensors are written once, also if ranks share the work and another number of ranks
restores; and with kills between a base and the checkpoint that refers to it. (DTensors:
test_sharded.py; GPUs: test_gpu_unchanged.py.)"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.conftest import SMALL
from tests.support.ctl import Ctl, written
from tests.support.daemon import Daemon, Start
from tests.support.loratrainer import ADAPTERS, CHANGED, FROZEN, LAYERS, LoraTrainer, frozen
from tests.support.manager import ServedDaemon
from tests.support.volumes import bases

GEOMETRY = ("--block-bytes", "16KiB", "--chunk", "256KiB", "--dram", "128MiB")


def ranks(stack: ExitStack, daemon: Daemon, world_size: int) -> list[LoraTrainer]:
    group = [
        stack.enter_context(LoraTrainer(LOCAL_WORLD_SIZE=str(world_size)))
        for _ in range(world_size)
    ]
    for rank, one in enumerate(group):
        one.open(
            [], socket=str(daemon.socket), job="lora", rank=rank, world_size=world_size,
            replicated=True,
        )  # fmt: skip
    return group


def all_of(group: list[LoraTrainer], command: str, *arguments: object) -> list[object]:
    """Runs a call in all trainers at the same time; returns the results."""
    for one in group:
        one.post(command, *arguments)
    return [one.answer() for one in group]


@pytest.mark.timeout(1800)
def test_replicated_ranks_refer_each_to_its_part(
    start_daemon: Start, ctl: Ctl, tmp_path: Path, stack: ExitStack
) -> None:
    daemon = start_daemon(*GEOMETRY)
    group = ranks(stack, daemon, 2)
    for step in range(1, 5):
        all_of(group, "train", step)
    sizes = written(ctl, daemon.socket)
    assert FROZEN < sum(sizes[1]) < 1.1 * (FROZEN + CHANGED)
    assert max(sizes[1]) < 0.6 * FROZEN
    for step in range(2, 5):
        assert 2 * ADAPTERS < sum(sizes[step]) <= 1.05 * (CHANGED + (64 << 10)), sizes
    assert bases(daemon.storage).items() >= {(rank, 4): 1 for rank in range(2)}.items()
    wanted = group[0].digest()
    daemon.kill()
    for one in group:
        one.kill()

    assert ctl(daemon.storage, "verify").code == 0
    exported = tmp_path / "lora.pt"
    assert ctl(daemon.storage, "export", "lora", "-o", exported, "--rank", 1).code == 0
    model = torch.load(exported)["model"]
    assert all(torch.equal(model[f"base{number}"], frozen(number)) for number in range(LAYERS))

    daemon.start()
    step = 4
    for world_size in (3, 1, 2):
        group = ranks(stack, daemon, world_size)
        assert all_of(group, "resume") == [step] * world_size
        assert all_of(group, "digest") == [wanted] * world_size
        for _ in range(4):  # it is divided otherwise: written again, at most twice, then once
            step += 1
            all_of(group, "train", step)
        assert sum(written(ctl, daemon.socket)[step][:world_size]) <= 1.2 * CHANGED
        wanted = group[0].digest()
        for one in group:
            one.kill()
    assert ctl(daemon.storage, "verify").code == 0


FEW = 9 << 20  # frozen bytes
#: Who is killed, when the checkpoint that refers is in which state, and whether a manager keeps
#: what the daemon had copied.
KILLS = [
    ("trainer", "copying", False), ("daemon", "copying", False), ("both", "copied", True),
    ("daemon", "writing", True), ("both", "writing", False), ("trainer", "copied", False),
]  # fmt: skip


@pytest.mark.timeout(1800)
def test_kills_between_a_base_and_what_refers_to_it(ctl: Ctl, stack: ExitStack) -> None:
    daemon = stack.enter_context(
        ServedDaemon(*SMALL, "--block-bytes", "16KiB", "--max-bandwidth", "32MiB")
    ).start()
    digests: dict[int, str] = {}
    promised = 0
    for who, when, kept in KILLS:
        one = stack.enter_context(LoraTrainer())
        step = resumed(one, daemon, promised, digests)
        for _ in range(2):  # first the base is durable, and then the checkpoint that refers to it
            step += 1
            one.train(step)
            digests[step] = one.digest()
        promised = step
        handle = one.save(step + 1)
        digests[step + 1] = one.digest()
        state = one.watch(handle, when)
        if who != "daemon":
            one.kill()
        if who != "trainer":
            daemon.kill()
            if not kept:
                for name in daemon.manager.names():
                    daemon.manager.drop(name)
            daemon.start()
        copied = state in ("copied", "writing") and (kept or who == "trainer")
        promised = step + 1 if copied or state == "durable" else step
        one.kill()
    resumed(stack.enter_context(LoraTrainer()), daemon, promised, digests)
    assert bases(daemon.storage)
    assert ctl(None, "--socket", daemon.socket, "verify", "lora").code == 0


def resumed(one: LoraTrainer, daemon: Daemon, promised: int, digests: dict[int, str]) -> int:
    """Restores; returns the step, which is not older than promised and has the right content."""
    one.open([FEW], socket=str(daemon.socket), job="lora")
    step: int = one.resume() or 0
    assert step >= promised
    assert not step or one.digest() == digests[step]
    return step
