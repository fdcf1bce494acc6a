"""Threads and processes beside the one that trains: what a thread changes while a checkpoint is
copied fails that checkpoint, and a checkpoint() that comes from a thread is noticed. Memory that
other processes write is warned of."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pccheck import CheckpointFailedError, CheckpointState, PCcheckClient, PccheckWarning
from pccheck.state.plan import Snapshot
from tests.support.daemon import Daemon
from tests.support.programs import CONTEXT

SIZE = 200_000  # elements of a parameter: not copied at once


def elsewhere(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(2))
        self.register_buffer("count", torch.zeros(3))


class Kit:
    """A client; `changing` is changed by another thread while the next checkpoint is copied."""

    def __init__(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.client = PCcheckClient(job="job", socket=daemon.socket, **options)
        self.model = Net()
        self.changing: torch.Tensor | None = None

        def worth_a_base(_snapshot: Snapshot) -> int:
            """Asked for when a snapshot is handed over to the core."""
            tensor, self.changing = self.changing, None
            if tensor is not None:
                elsewhere(lambda: tensor.detach().add_(1))
            return 0

        monkeypatch.setattr(Snapshot, "worth_a_base", property(worth_a_base))

    def optimizer(self) -> torch.optim.Optimizer:
        made = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.client.attach(model=self.model, optimizer=made)
        return made

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.model.first.grad = torch.ones(SIZE)
        optimizer.step()

    def fails(self, tensor: torch.Tensor, name: str, step: int = 1) -> None:
        """A change of the tensor fails that checkpoint by name, and the next one is saved."""
        self.changing = tensor
        torn = self.client.checkpoint(step=step)
        assert torn.exception(30) is not None
        assert torn.state is CheckpointState.FAILED
        assert f"{name} was changed while it was copied" in torn.reason
        with pytest.warns(PccheckWarning, match=f"step {step} failed"):
            self.client.checkpoint(step=step + 1).wait_durable(30)
        found = self.client.recover()
        assert found.step == step + 1
        for path, saved in self.model.state_dict().items():
            assert torch.equal(found.state["model"][path], saved)


def test_a_change_while_an_unhooked_checkpoint_waits_fails_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PCcheckClient(job="other", socket=daemon.socket):  # the daemon has another client, too
        kit = Kit(daemon, monkeypatch)
        kit.client.attach(model=kit.model)
        kit.fails(kit.model.last, "model.last")
        kit.fails(kit.model.count, "model.count", step=5)
        kit.client.close()


def test_a_change_before_the_first_step_fails_the_checkpoint(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(daemon, monkeypatch, solo=True)
    optimizer = kit.optimizer()
    kit.fails(kit.model.first, "model.first")
    kit.step(optimizer)
    kit.client.close()


@pytest.mark.parametrize("gate", ["auto", "manual"])
def test_a_change_while_a_blocking_snapshot_waits_fails_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, gate: Any
) -> None:
    kit = Kit(daemon, monkeypatch, snapshot="blocking", gate=gate)
    kit.step(kit.optimizer())
    kit.fails(kit.model.last, "model.last")
    kit.client.close()


def test_a_change_after_the_first_one_fails_its_checkpoint(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure makes later calls wait, which may not hide later changes."""
    kit = Kit(daemon, monkeypatch)
    kit.step(kit.optimizer())
    kit.changing = kit.model.last
    first = kit.client.checkpoint(step=1)
    with pytest.warns(PccheckWarning, match="returns only after reading the whole state"):
        kit.client.gate()
    assert first.state is CheckpointState.FAILED
    kit.fails(kit.model.last, "model.last", step=2)
    kit.client.close()


def test_changes_of_loose_frozen_parameters_fail_each_checkpoint(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first failure on they are copied before the call returns, while others are not."""
    kit = Kit(daemon, monkeypatch)
    kit.model.last.requires_grad_(False)
    kit.step(kit.optimizer())
    kit.changing = kit.model.last
    first = kit.client.checkpoint(step=1)
    with pytest.warns(PccheckWarning, match="only after reading the frozen parameters of model"):
        kit.client.gate()
    assert first.state is CheckpointState.FAILED
    kit.fails(kit.model.last, "model.last", step=2)
    kit.client.close()


@pytest.mark.parametrize("gate", ["auto", "manual"])
def test_a_buffer_that_changes_while_it_is_copied_fails(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, gate: Any
) -> None:
    kit = Kit(daemon, monkeypatch, gate=gate)
    kit.step(kit.optimizer())
    kit.fails(kit.model.count, "model.count")
    kit.client.close()


def test_a_given_state_that_another_thread_changes_fails(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(daemon, monkeypatch)
    state = {"table": torch.zeros(SIZE)}
    kit.changing = state["table"]
    torn = kit.client.checkpoint(state)
    assert torn.state is CheckpointState.FAILED and "table was changed" in torn.reason
    with pytest.warns(PccheckWarning, match="up to step 1: abandoned: table"):
        kit.client.close()


def test_a_change_while_a_call_waits_is_raised_by_that_call_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(daemon, monkeypatch, on_error="raise")
    kit.client.attach(model=kit.model)
    kit.changing = kit.model.last
    with pytest.raises(CheckpointFailedError, match=r"last was changed.*Call checkpoint"):
        kit.client.checkpoint(step=1)
    kit.client.checkpoint(step=2).wait_durable(30)
    kit.client.close()


def test_inference_tensors_are_saved_by_a_call_that_waits(daemon: Daemon) -> None:
    """torch has no counts of their changes."""
    with torch.inference_mode():
        state = {"kept": torch.ones(SIZE)}
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        client.checkpoint(state).wait_durable(30)
        assert torch.equal(client.recover().state["kept"], state["kept"])


@contextmanager
def training(kit: Kit, work: Callable[[], object]) -> Iterator[None]:
    """A thread that has done the work, and runs code of the script until the end."""
    done, ends = threading.Event(), []

    def run() -> None:
        work()
        done.set()
        while not ends:
            pass

    thread = threading.Thread(target=run, name="trainer")
    thread.start()
    done.wait()
    try:
        yield
    finally:
        ends.append(True)
        thread.join()


@pytest.mark.parametrize("gate", ["auto", "manual"])
def test_a_checkpoint_beside_the_thread_that_trains_warns_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, gate: Any
) -> None:
    kit = Kit(daemon, monkeypatch, gate=gate)
    optimizer = kit.optimizer()

    def step() -> None:
        if gate == "manual":
            kit.client.gate()
        kit.step(optimizer)

    with training(kit, step):
        with pytest.warns(PccheckWarning, match=r"in thread 'MainThread', while thread 'trainer'"):
            kit.client.checkpoint(step=1).wait_durable(30)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kit.client.checkpoint(step=2).wait_durable(30)
    kit.client.close()


def test_a_thread_that_trains_and_saves_gets_no_warning(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(daemon, monkeypatch)
    optimizer = kit.optimizer()

    def train() -> None:
        for step in range(1, 4):
            kit.step(optimizer)
            kit.client.checkpoint(step=step).wait_durable(30)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with training(kit, train):
            pass
    assert kit.client.recover().step == 3
    kit.client.close()


@pytest.mark.parametrize("by", ["ended threads", "idle threads", "the main thread, which waits"])
def test_cells_that_run_in_one_thread_after_another_get_none(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    kit = Kit(daemon, monkeypatch)
    optimizer = kit.optimizer()
    with (
        ThreadPoolExecutor(1) as first,
        ThreadPoolExecutor(1) as second,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for step in range(1, 4):
            save = lambda step=step: kit.client.checkpoint(step=step).wait_durable(30)  # noqa: E731
            if by == "ended threads":
                elsewhere(lambda: kit.step(optimizer))
                elsewhere(save)
            elif by == "idle threads":
                first.submit(kit.step, optimizer).result()
                second.submit(save).result()
            else:
                kit.step(optimizer)
                elsewhere(save)
    assert kit.client.recover().step == 3
    kit.client.close()


def write(tensors: list[torch.Tensor], lock: Any, ends: Any) -> None:
    """Another process: the same new number in all tensors, under the lock."""
    while not ends.is_set():
        with lock:
            for tensor in tensors:
                tensor.add_(1)


def test_shared_memory_is_warned_of_and_whole_under_the_lock(daemon: Daemon) -> None:
    model, lock, ends = Net().requires_grad_(False).share_memory(), CONTEXT.Lock(), CONTEXT.Event()
    tensors = [model.first.detach(), model.last.detach(), model.count]
    writers = [CONTEXT.Process(target=write, args=(tensors, lock, ends)) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        with PCcheckClient(job="job", socket=daemon.socket) as client:
            with pytest.warns(PccheckWarning, match=r"memory of model\.first is shared") as told:
                client.attach(model=model)
                client.attach(model=model)
            assert len(told) == 1 and "until handle.wait_copied() returns" in str(told[0].message)
            for step in range(1, 6):
                with lock:
                    handle = client.checkpoint(step=step)
                    handle.wait_copied(30)
                handle.wait_durable(30)
                saved = client.recover().state["model"].values()
                assert len({float(value) for one in saved for value in one.unique()}) == 1
    finally:
        ends.set()
        for writer in writers:
            writer.join()
