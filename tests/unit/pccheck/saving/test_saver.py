"""What a checkpoint with GPU tensors tells native and daemon, in which order; and graphs."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import (
    Checkpoint,
    CheckpointState,
    PCcheckClient,
    PccheckError,
    PccheckWarning,
)
from pccheck.saving.gate import Gate
from pccheck.state.plan import AttachedPlan, Snapshot
from pccheck_native import LEVEL_DISK, LEVEL_MEMORY
from pccheck_wire.ends import Cause
from pccheck_wire.errors import (
    CheckpointFailedError,
    DeviceError,
    RefusedError,
    UsageError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Expose, Pin
from tests.support.fakelink import FakeConnection, FakeSession
from tests.support.payload import FakeDevices

CLIENTS: list[PCcheckClient] = []  # of a test


class Kit:
    """A client whose daemon is a fake, with a model that is said to be on GPU 0."""

    def __init__(self, path: Path, fakes: FakeDevices, **options: Any) -> None:
        self.step = 0
        self.connection = FakeConnection()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pccheck.client.Session", lambda *_, **__: FakeSession(self.connection))
            self.client = PCcheckClient("job", socket=path / "none", **options)
        CLIENTS.append(self.client)
        self.native = self.connection.native
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            fakes.put(tensor)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def attach(self) -> None:
        self.client.attach(model=self.model, optimizer=self.optimizer)
        self.optimizer.step()  # from then on its hook is trusted
        self.native.calls.clear()  # memory was exposed ahead, as snapshots without staging need it
        self.connection.sent.clear()
        self.native.requests.clear()

    def checkpoint(self) -> Checkpoint:
        self.step += 1
        return self.client.checkpoint(step=self.step)

    def returns_when_copied(self) -> bool:
        """Whether checkpoint() waits until the daemon has a copy."""
        copied: list[int] = []

        def wait_copied(number: int, _deadline_ns: int) -> bool:
            copied.append(number)
            self.native.copied(number)
            return True

        self.native.wait_copied = wait_copied  # type: ignore[method-assign]
        state = self.checkpoint().state
        assert (state is CheckpointState.COPIED) == bool(copied)
        return bool(copied)

    def begun(self) -> list[Any]:
        return self.native.requests

    def submitted(self) -> tuple[Any, ...]:
        return self.native.named("submit")[-1]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevices]:
    yield FakeDevices().install(monkeypatch)
    while CLIENTS:  # else the collector closes them, with warnings, in the middle of another test
        CLIENTS.pop()._closed = True


@pytest.fixture
def kit(tmp_path: Path, fakes: FakeDevices) -> Kit:
    made = Kit(tmp_path, fakes)
    made.attach()
    return made


def test_the_order_of_a_pulled_checkpoint(kit: Kit) -> None:
    kit.checkpoint()
    names = [call[0] for call in kit.native.calls]
    assert names == ["staging", "expose", "request", "sample", "stage", "mark", "submit"]
    kinds = [type(body) for body in kit.connection.sent]
    assert kinds == [Expose, tuple]  # exposed before memory is made
    assert kit.begun()[0].map == 2
    _, number, _, _, device_ranges, pulled, mask = kit.submitted()
    assert (number, device_ranges, pulled, mask) == (1, b"", 4096, 1)
    assert kit.native.named("mark") == [("mark", 1, 0, 100, True, False)]


def test_the_order_of_a_pushed_checkpoint(kit: Kit) -> None:
    kit.connection.refusal = RefusedError("another uid")
    kit.checkpoint()
    assert kit.begun()[0].map == 0
    _, _, _, _, device_ranges, pulled, mask = kit.submitted()
    found = list(struct.iter_unpack("<QQQII", device_ranges))
    assert (pulled, mask) == (0, 0) and {item[3] for item in found} == {0}
    assert kit.model[0].weight.data_ptr() in {item[0] for item in found}
    assert kit.native.named("mark") == [("mark", 1, 0, 100, False, False)]


def test_the_step_of_the_optimizer_makes_its_stream_wait(kit: Kit) -> None:
    kit.checkpoint()
    for p in kit.model.parameters():
        p.grad = torch.ones_like(p)
    kit.optimizer.step()
    assert kit.native.named("hold", "wait_read") == [("hold", 1, 0, 100)]


def test_an_unchanged_state_is_not_exposed_again(kit: Kit) -> None:
    kit.checkpoint()
    kit.client.gate()
    kit.checkpoint()
    assert [begin.map for begin in kit.begun()] == [2, 2]
    assert len(kit.native.named("expose")) == 1
    assert not kit.native.named("wait_read")  # the stream's order is enough for staging, too


def test_device_snapshots_stage_all_beside_training(tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes, snapshot="device")
    kit.attach()
    kit.checkpoint()
    assert [(c[2], c[4]) for c in kit.native.named("stage")] == [(100, False), (100, True)]
    assert kit.native.named("mark") == [("mark", 1, 0, 100, True, True)]
    kit.client.gate()
    kit.native.read.add(1)
    kit.checkpoint()


def test_busy_staging_is_skipped_when_so_asked(tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes, snapshot="device", on_busy="skip")
    kit.attach()
    kit.checkpoint()
    kit.client.gate()
    made = kit.checkpoint()
    assert made.state is CheckpointState.SKIPPED and "staging" in made.reason
    assert len(kit.begun()) == 1


def test_blocking_returns_when_the_source_was_read(tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes, snapshot="blocking")
    kit.attach()
    kit.native.read.add(1)
    made = kit.checkpoint()
    assert set(kit.native.named("wait_read")) == {("wait_read", 1, False)}
    assert (
        not kit.native.named("stage", "staging", "hold") and made.state is CheckpointState.COPYING
    )
    kit.client.gate()
    assert not kit.native.named("hold")


def test_without_room_for_staging_checkpoints_wait(kit: Kit) -> None:
    kit.native.no_staging = True
    kit.native.read.update((1, 2))
    with pytest.warns(PccheckWarning, match="checkpoint\\(\\) now returns only when"):
        kit.checkpoint()
    assert set(kit.native.named("wait_read")) == {("wait_read", 1, False)}
    assert kit.begun()[0].map == 1 and not kit.native.named("stage")
    kit.checkpoint()
    assert len(kit.native.named("staging")) == 2  # once more when torch had given back; not later


def test_without_a_gate_it_returns_when_copied(tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes)
    kit.client.attach(model=kit.model)
    assert kit.returns_when_copied()
    assert not kit.native.named("stage") and kit.native.named("mark")


def test_forced_pull_fails_with_the_reason(tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes, transfer="pull")
    kit.attach()
    kit.connection.refusal = RefusedError("another uid")
    with pytest.warns(PccheckWarning, match="another uid"):
        made = kit.checkpoint()
    assert made.state is CheckpointState.FAILED and "another uid" in made.reason
    assert not kit.begun()


def test_forced_pull_raises_when_so_asked(tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes, transfer="pull", on_error="raise")
    kit.attach()
    kit.connection.refusal = RefusedError("another uid")
    with pytest.raises(DeviceError, match="another uid"):
        kit.checkpoint()


def test_with_all_entries_in_use_it_says_so(
    tmp_path: Path, fakes: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that has ended may still be read by a GPU that is late."""
    kit = Kit(tmp_path, fakes, on_error="raise")
    kit.attach()

    def busy(_number: int) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(kit.native, "request", busy)
    with pytest.raises(CheckpointFailedError, match="64 checkpoints are in flight"):
        kit.checkpoint()


@pytest.mark.parametrize("call", ["request", "submit"])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_daemon_that_ends_during_the_call_is_named(
    tmp_path: Path, fakes: FakeDevices, monkeypatch: pytest.MonkeyPatch, call: str, on_error: str
) -> None:
    """The native notices the end before anything else does."""
    kit = Kit(tmp_path, fakes, on_error=on_error)
    kit.attach()

    def gone(*_: object, **__: object) -> None:
        kit.connection.lives = False
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(kit.native, call, gone)
    if on_error == "raise":
        with pytest.raises(PccheckError, match="the daemon has ended"):
            kit.checkpoint()
    else:
        assert kit.checkpoint().reason == "the daemon has ended"


def test_a_broken_copy_has_the_next_one_exposed_anew(kit: Kit) -> None:
    for number in range(1, 6):
        kit.checkpoint()
        assert kit.submitted()[1] == number
        kit.native.refuse(number)
    kit.checkpoint()
    assert [begin.map for begin in kit.begun()] == [2, 3, 4, 5, 6, 7]
    kit.native.copied(6)


def test_what_the_link_gave_up_trips_the_breaker(kit: Kit) -> None:
    first = kit.checkpoint()
    kit.client.gate()
    kit.native.let_go(1)
    with pytest.warns(PccheckWarning, match="stall_limit_s"):
        made = kit.checkpoint()
    assert first.state is CheckpointState.FAILED and made.state is CheckpointState.SKIPPED


def test_a_failing_stage_abandons_the_snapshot(kit: Kit) -> None:
    kit.native.interrupt = "mark"
    with pytest.raises(KeyboardInterrupt):
        kit.checkpoint()
    assert kit.native.named("abandon") == [("abandon", 1)] and not kit.native.named("submit")


# -- CUDA graphs -------------------------------------------------------------------------------


def test_a_checkpoint_that_the_daemon_was_not_told_of_counts_once(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **_named: object) -> None:
        raise WaitTimeoutError("the daemon accepts no more requests")

    with monkeypatch.context() as patch, pytest.warns(PccheckWarning, match="no more requests"):
        patch.setattr(kit.native, "submit", full)
        assert kit.checkpoint().state is CheckpointState.FAILED
    assert kit.native.calls[-1] == ("abandon", 1)
    kit.client.flush(0)  # notes how earlier ones ended
    kit.connection.lives = False
    with pytest.warns(PccheckWarning, match="1 checkpoint failed, up to step 1"):
        kit.client.close()


def test_no_checkpoint_while_a_graph_is_recorded(kit: Kit, fakes: FakeDevices) -> None:
    fakes.captures = True
    with pytest.raises(UsageError, match=r"recorded.*before or after"):
        kit.checkpoint()
    fakes.captures = False
    kit.checkpoint()
    kit.native.captures = True
    with pytest.raises(UsageError, match="recorded"):
        kit.checkpoint()


def test_a_recorded_step_is_not_trusted_any_more(kit: Kit, fakes: FakeDevices) -> None:
    kit.checkpoint()
    fakes.captures = True
    kit.native.read.add(1)
    with pytest.warns(PccheckWarning, match='gate="manual"') as told:
        kit.optimizer.step()
        kit.optimizer.step()
    assert len(told) == 1
    assert not kit.native.named("hold")  # nothing gets into the graph
    assert kit.native.named("wait_read") == [("wait_read", 1, False)]  # but it is waited for
    fakes.captures = False
    assert kit.returns_when_copied()


def test_an_optimizer_on_a_gpu_must_first_be_seen_to_step(kit: Kit) -> None:
    kit.client.attach(model=kit.model, optimizer=kit.optimizer)
    assert kit.returns_when_copied()  # its graph may be older than our hook
    kit.optimizer.step()
    assert not kit.returns_when_copied()


def test_a_recorded_step_is_noticed_without_a_daemon(kit: Kit, fakes: FakeDevices) -> None:
    kit.connection.lives = False
    fakes.captures = True
    with pytest.warns(PccheckWarning, match="CUDA graph"):
        kit.optimizer.step()
    kit.connection.lives, fakes.captures = True, False
    assert kit.returns_when_copied()


def test_with_a_manual_gate_graphs_are_the_users_affair(tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes, gate="manual")
    kit.attach()
    kit.checkpoint()
    kit.client.gate()  # before replay()
    assert kit.native.named("hold") == [("hold", 1, 0, 100)]
    fakes.captures = True
    kit.native.read.add(1)
    with pytest.warns(PccheckWarning, match="before every replay"):
        kit.client.gate()
    fakes.captures = False
    assert not kit.returns_when_copied()


@pytest.mark.parametrize("where", ["request", "submit", "mark"])
@pytest.mark.parametrize("gate", ["auto", "none"])
def test_interrupted_anywhere_nothing_is_vouched_for(
    tmp_path: Path, fakes: FakeDevices, where: str, gate: str
) -> None:
    """Ctrl-C in a notebook: the cell ends, and the next one trains on. No gate holds it back."""
    kit = Kit(tmp_path, fakes)
    if gate == "auto":
        kit.attach()
    else:
        kit.client.attach(model=kit.model)
    kit.native.interrupt = where
    with pytest.raises(KeyboardInterrupt):
        kit.checkpoint()
    kit.native.interrupt = ""
    (snapshot,) = [call[1] for call in kit.native.named("request")]
    assert kit.native.named("abandon") == [("abandon", snapshot)]


def test_interrupted_after_it_was_handed_over_nothing_is_vouched_for(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Gate, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kit.checkpoint()
    assert kit.native.named("abandon") == [("abandon", 1)]
    kit.client.gate()
    assert not kit.native.named("hold", "wait_read")


@pytest.mark.parametrize("call", ["flush", "pin", "close"])
def test_what_is_parked_is_wanted_by(call: str, tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes, durable_every=2)
    kit.attach()
    for step in (1, 2, 3):
        kit.checkpoint()
        kit.native.copied(step)
    assert [one.level for one in kit.native.requests] == [LEVEL_MEMORY, LEVEL_DISK, LEVEL_MEMORY]
    assert kit.native.named("write") == []
    if call == "flush":
        kit.client.flush(0)
        assert kit.native.named("write")[0] == ("write", 3)
    elif call == "pin":
        kit.client.pin(1)
        kit.client.pin(2)
        assert kit.native.named("write") == [("write", 1)]
        assert kit.connection.sent[-2:] == [Pin(1), Pin(2)]
    kit.client.close()
    assert {number for _, number in kit.native.named("write")} == {1, 3}


def test_a_memory_only_checkpoint_refers_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccheck.state.plan.FROZEN_MIN", 1)
    kit = Kit(tmp_path, FakeDevices(), durable_every=2)
    kit.model = nn.Sequential(nn.Linear(99, 99).requires_grad_(False), nn.Linear(3, 3))
    kit.optimizer = torch.optim.SGD(kit.model[1].parameters(), lr=0.1)
    kit.attach()
    for step in (1, 2):
        kit.checkpoint()
        kit.native.copied(step)
    in_memory, on_disk = kit.native.requests
    assert (in_memory.frozen_bytes, kit.native.offered[1]) == (0, 0)
    assert on_disk.frozen_bytes > 0 and kit.native.offered[2] > 0


def test_a_memory_that_is_full_warns_and_never_raises(tmp_path: Path, fakes: FakeDevices) -> None:
    kit = Kit(tmp_path, fakes, durable_every="auto", on_error="raise")
    kit.attach()
    kit.checkpoint()
    kit.native.refuse(1)
    kit.native.outcomes[1] = CheckpointState.SKIPPED
    kit.native.causes[1] = Cause.MEMORY_BUSY
    with pytest.warns(PccheckWarning, match=r"step 1 was skipped: the DRAM of rank 0.*--dram"):
        kit.checkpoint()
    kit.native.copied(2)
    kit.checkpoint()
    assert kit.client._saver.failures.count == 0, "close() would say that it failed"


def test_a_plan_that_was_interrupted_is_made_anew(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[AttachedPlan] = []

    class Plan(AttachedPlan):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

        def snapshot(self, *arguments: Any) -> Snapshot:
            if kit.step == 2:
                raise KeyboardInterrupt
            return super().snapshot(*arguments)

    monkeypatch.setattr("pccheck.saving.planner.AttachedPlan", Plan)
    kit.attach()
    kit.checkpoint()
    before = len(made)
    with pytest.raises(KeyboardInterrupt):
        kit.checkpoint()
    assert len(made) == before
    kit.checkpoint()
    assert len(made) == before + 1
