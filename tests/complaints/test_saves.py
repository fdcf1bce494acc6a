"""What users of other checkpoint software have reported of saving, tried here: a test for each
complaint. `test_named.py` names the tests of the others."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import CheckpointState, PCcheckClient
from tests.conftest import SMALL
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect
from tests.support.waiting import until

MIB = 1 << 20
FLOATS = MIB // 4  # of one MiB
LIMIT_S = 60.0
Save = Callable[[PCcheckClient, nn.Module, int], Any]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*SMALL) as made:
        yield made.start()


def training(client: PCcheckClient, count: int = 1000) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Attached, and its optimizer has its state."""
    model = nn.Sequential(nn.Linear(count, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    client.attach(model=model, optimizer=optimizer)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients are made once: the C library (glibc 2.36) sometimes finds no place for a new one in
    what an old one left, and the process then grows without our doing."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def dcp(client: PCcheckClient, model: nn.Module, number: int) -> Any:
    from pccheck.integrations.dcp import async_save

    return async_save({"model": model}, client=client, step=number)


SAVES: dict[str, Save] = {
    "attached": lambda client, _, number: client.checkpoint(step=number),
    "given": lambda client, model, n: client.checkpoint({"model": model.state_dict()}, step=n),
    "dcp": dcp,
}


@pytest.mark.parametrize("kind", SAVES)
def test_later_saves_silently_wrote_the_weights_of_the_first_one(daemon: Daemon, kind: str) -> None:
    """NeMo RL: structures of the first save were kept. Here values change in place, and tensors are
    replaced."""
    with PCcheckClient(f"later-{kind}", socket=daemon.socket, fresh=True) as client:
        model, optimizer = training(client)
        for number in range(1, 5):
            step(model, optimizer)
            if number == 3:
                client.gate()
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone() + 1
            SAVES[kind](client, model, number).wait_durable(LIMIT_S)
            found = client.recover()
            assert found.step == number
            for name, tensor in model.state_dict().items():
                assert torch.equal(found.state["model"][name].detach(), tensor), (number, name)


def test_a_cached_plan_silently_dropped_a_shard(daemon: Daemon) -> None:
    """Megatron-LM. Here a layer and its optimizer state appear after two saves."""
    with PCcheckClient("plan", socket=daemon.socket, fresh=True) as client:
        model, optimizer = training(client)
        for number in (1, 2):
            client.checkpoint(step=number).wait_durable(LIMIT_S)
        assert isinstance(model, nn.Sequential)
        model.append(nn.Linear(1, 3))
        optimizer.add_param_group({"params": list(model[1].parameters())})
        step(model, optimizer)
        client.checkpoint(step=3).wait_durable(LIMIT_S)
        found = client.recover()
        assert found.step == 3 and found.state["model"].keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state["model"][name].detach(), tensor), name
        kept = found.state["optimizer"]["state"]
        for index, entry in optimizer.state_dict()["state"].items():
            assert torch.equal(kept[index]["momentum_buffer"], entry["momentum_buffer"])


def resident(pid: int) -> int:
    """Bytes, with shared memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_host_memory_grew_by_a_checkpoint_with_every_save(daemon: Daemon) -> None:
    """PyTorch, Megatron-Bridge: until the workers were out of memory."""
    size, saves = 8, 24
    with PCcheckClient("growth", socket=daemon.socket, fresh=True) as client:
        model, optimizer = training(client, size // 2 * FLOATS)

        def save(numbers: range) -> list[int]:
            for number in numbers:
                step(model, optimizer)
                client.checkpoint(step=number).wait_durable(LIMIT_S)
            return [resident(os.getpid()), resident(daemon.pid)]

        before = save(range(1, 6))
        after = save(range(6, 6 + saves))
        grown = [late - early for early, late in zip(before, after, strict=True)]
        assert max(grown) < saves * size * MIB // 3, grown


def held_by(*pids: int) -> list[int]:
    """How many threads and descriptors."""
    folders = [Path(f"/proc/{pid}/{kind}") for pid in pids for kind in ("task", "fd")]
    return [len(list(folder.iterdir())) for folder in folders]


def test_each_run_of_a_sweep_left_threads_and_descriptors(daemon: Daemon) -> None:
    """In one process, as sweeps and notebooks make their clients. The daemon's pools start a thread
    now and then, up to their limits: less than one in each run."""
    runs = 8

    def run(number: int) -> None:
        with PCcheckClient("sweep", socket=daemon.socket, fresh=True) as client:
            model, optimizer = training(client)
            for at in (1, 2):
                client.checkpoint(step=2 * number + at)
                step(model, optimizer)

    run(0)
    early = held_by(os.getpid(), daemon.pid)
    for number in range(1, 1 + runs):
        run(number)

    def pairs() -> list[tuple[int, int]]:
        return list(zip(early, held_by(os.getpid(), daemon.pid), strict=True))

    until(lambda: all(late < before + runs for before, late in pairs()), pairs)


def test_staging_the_whole_state_took_the_memory_of_the_node(start_daemon: Start) -> None:
    """radixark Megatron: 650 GB; wanted were bounded buckets. Here the peaks of both processes are
    far below a second copy."""
    size, budget = 64, 8
    daemon = start_daemon("--dram", f"{budget}MiB")
    state = {"w": torch.arange(size * FLOATS, dtype=torch.float32)}
    with PCcheckClient("large", socket=daemon.socket) as client:
        try:  # the peak so far is forgotten
            for pid in (os.getpid(), daemon.pid):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError as error:
            pytest.skip(f"the peak of a process cannot be reset here: {error}")
        before = [resident(os.getpid()), resident(daemon.pid)]
        client.checkpoint(state, step=1).wait_durable(LIMIT_S)
        peaks = [_peak(os.getpid()), _peak(daemon.pid)]
        grown = [peak - early for early, peak in zip(before, peaks, strict=True)]
        assert max(grown) < size * MIB // 2, grown
        assert torch.equal(client.recover().state["w"], state["w"])


def _peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_saving_outran_the_disk_and_so_saving_failed(start_daemon: Start, on_busy: Any) -> None:
    """DLRover. Here each one is written, skipped or superseded by a newer one, and none fails."""
    daemon = start_daemon("--max-bandwidth", "2MiB")
    with PCcheckClient("burst", socket=daemon.socket, on_busy=on_busy) as client:
        model, optimizer = training(client, FLOATS // 4)
        handles, values = [], {}
        for number in range(1, 9):
            step(model, optimizer)
            values[number] = [one.detach().clone() for one in model.parameters()]
            handles.append(client.checkpoint(step=number))
        saved = client.flush(LIMIT_S)
        ends = [handle.state for handle in handles]
        allowed = {CheckpointState.DURABLE, CheckpointState.SUPERSEDED}
        if on_busy == "skip":
            allowed.add(CheckpointState.SKIPPED)
        assert set(ends) <= allowed, [(handle.state, handle.reason) for handle in handles]
        taken = [one.step for one in handles if one.state is not CheckpointState.SKIPPED]
        assert saved is not None and saved.step == taken[-1]
        found = client.recover()
        assert found.step == saved.step
        for tensor, value in zip(found.state["model"].values(), values[saved.step], strict=True):
            assert torch.equal(tensor.detach(), value)


def test_shared_memory_went_with_the_trainer_or_filled_dev_shm(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """DLRover: Python's resource tracker unlinked it when the trainer died; Docker gives 64 MB.
    Here it has no name that could be unlinked, and none of it is in /dev/shm."""
    daemon = start_daemon("--max-bandwidth", "2MiB")
    trainer = start_trainer(daemon)
    trainer.step()
    trainer.wait_copied(trainer.checkpoint())
    trainers, daemons = (Path(f"/proc/{p}/maps").read_text() for p in (trainer.pid, daemon.pid))
    assert "memfd:" in trainers and "memfd:" in daemons and "/dev/shm/" not in daemons
    trainer.kill()
    again = start_trainer(daemon)
    assert again.restore()["step"] == 1 and again.check(1) == ""


def test_every_checkpoint_wrote_the_frozen_base_again(daemon: Daemon) -> None:
    """dreamzero, Megatron-LM: 95 GB per checkpoint of a LoRA training. Here only the adapters are
    attached, and the base keeps what the script has loaded."""
    base, adapter = nn.Linear(2 * FLOATS, 1), nn.Linear(FLOATS // 8, 1)
    base.requires_grad_(False)
    optimizer = torch.optim.AdamW(adapter.parameters())
    step(adapter, optimizer)
    changed = 3 * sum(one.nbytes for one in adapter.parameters())
    with PCcheckClient("lora", socket=daemon.socket, fresh=True) as client:
        client.attach(adapters=adapter, optimizer=optimizer)
        client.checkpoint(step=1).wait_durable(LIMIT_S)
        (saved,) = client.steps()
        assert changed <= saved.nbytes <= 1.05 * changed
        kept = base.weight.clone()
        assert client.restore().step == 1 and torch.equal(base.weight, kept)
