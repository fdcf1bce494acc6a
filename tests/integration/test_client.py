"""The client against a real daemon, in one process: what scripts see."""

from __future__ import annotations

import copy
import faulthandler
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pccheck import (
    Checkpoint,
    CheckpointFailedError,
    CheckpointState,
    DaemonUnreachableError,
    PCcheckClient,
    PccheckWarning,
    StateMismatchError,
    UsageError,
    WaitTimeoutError,
)
from pccheck import client as client_module
from pccheck.daemon import session
from pccheck.flight.phases import Durable
from pccheck.restoring import reading as restore
from pccheck.state import plan
from pccheck_wire.attach import Attachment, Attempt
from tests.support import stall
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Trainer
from tests.support.waiting import until
from tests.unit.pccheck.restoring.test_inplace import make, states
from tests.unit.pccheck.state.test_flatten import same

Connect = Callable[..., PCcheckClient]
SLOW = ("--max-bandwidth", "8MiB", "--dram", "4MiB")


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[PCcheckClient] = []

    def start(daemon: Daemon, **options: Any) -> PCcheckClient:
        options.setdefault("job", "job")
        made.append(PCcheckClient(socket=daemon.socket, **options))
        return made[-1]

    yield start
    for client in made:
        client.close()


def update(kit: dict[str, Any]) -> None:
    for p in kit["model"].parameters():
        p.grad = torch.randn_like(p)
    kit["optimizer"].step()
    kit["scheduler"].step()
    kit["model"].norm(torch.randn(3, 4))


def test_a_whole_training_state(daemon: Daemon, connect: Connect) -> None:
    client, kit = connect(daemon), make(1)
    client.attach(**kit, rng=True)
    assert not client.restore()
    for step in range(1, 5):
        update(kit)
        handle = client.checkpoint(step=step, metadata={"loss": 0.5, "tags": ["a", None]})
    expected, drawn = states(kit), torch.rand(3)
    assert (handle.step, handle.wait_durable(60).step, handle.sequence) == (4, 4, 4)
    client.close()

    again, other = connect(daemon), make(2)
    again.attach(**other, rng=True)
    done = again.restore()
    assert (bool(done), done.step, done.metadata) == (True, 4, {"loss": 0.5, "tags": ["a", None]})
    assert same(expected, states(other)) and torch.equal(torch.rand(3), drawn)
    update(other)
    assert again.checkpoint(step=5).step == 5
    found = again.recover()
    assert found.step in (4, 5) and list(found.state) == ["model", "optimizer", "scheduler", "rng"]


@pytest.mark.parametrize(
    "state", [torch.arange(5), [], {}, None, [1, {"x": torch.ones(3)}], {"a": torch.zeros(0)}]
)
def test_a_given_state(daemon: Daemon, connect: Connect, state: Any) -> None:
    client = connect(daemon)
    if state is None:
        with pytest.raises(UsageError, match="attach"):
            client.checkpoint()
        return
    handle = client.checkpoint(state)
    assert handle.state >= CheckpointState.COPIED
    assert handle.wait_durable(60).step == 1
    assert same(client.recover(step=1).state, state)
    with pytest.raises(UsageError):
        client.checkpoint(state, step=-1)


def test_the_garbage_collector_does_not_run_during_restore(
    daemon: Daemon, connect: Connect
) -> None:
    """The collector would visit every object of the process, and free nothing."""
    model = torch.nn.ParameterList(torch.ones(4) for _ in range(3000))
    client = connect(daemon)
    client.attach(model=model)
    client.checkpoint(step=1).wait_durable(60)
    runs: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        runs.extend([info["generation"]] if phase == "start" else [])

    gc.callbacks.append(note)
    try:
        restored = client.restore()
    finally:
        gc.callbacks.remove(note)
    assert restored.step == 1 and gc.isenabled()
    assert len(runs) <= 1  # at its end


def test_without_a_gate_it_is_copied_on_return(daemon: Daemon, connect: Connect) -> None:
    client, tensor = connect(daemon), torch.ones(500_000)
    for step in range(1, 8):
        tensor.fill_(step)
        client.checkpoint({"t": tensor})
        tensor.fill_(-1)
    client.checkpoint({"t": tensor}).wait_durable(60)
    assert float(client.recover().state["t"].sum()) == -500_000


def test_many_handles_stay_right_when_entries_are_used_again(
    daemon: Daemon, connect: Connect
) -> None:
    client = connect(daemon)
    handles = [client.checkpoint([torch.full((10,), i)], step=i) for i in range(200)]
    assert handles[-1].wait_durable(60).sequence == 200
    ends = {CheckpointState.DURABLE, CheckpointState.SUPERSEDED}
    until(lambda: {h.state for h in handles} <= ends)
    assert [h.step for h in handles] == list(range(200))
    assert [h.sequence for h in handles if h.state is CheckpointState.DURABLE] == [
        i + 1 for i, h in enumerate(handles) if h.state is CheckpointState.DURABLE
    ]


def test_buffers_are_as_they_were_at_the_call(start_daemon: Start, connect: Connect) -> None:
    client, kit = connect(start_daemon(*SLOW)), make(1)
    kit["model"].big = torch.nn.Parameter(torch.zeros(1_500_000))
    kit["optimizer"].add_param_group({"params": [kit["model"].big]})
    client.attach(**kit)
    update(kit)  # its hook is trusted
    client.checkpoint(step=1).wait_durable(60)
    before = kit["model"].norm.running_mean.clone()
    handle = client.checkpoint(step=2)
    kit["model"].norm(torch.randn(3, 4))  # a forward pass changes buffers while the copy goes on
    assert handle.state < CheckpointState.COPIED
    handle.wait_durable(60)
    found = client.recover().state["model"]["norm.running_mean"]
    assert torch.equal(found, before) and not torch.equal(kit["model"].norm.running_mean, before)


def test_frozen_parameters_are_as_they_were_at_the_call(
    start_daemon: Start, connect: Connect
) -> None:
    """An average of the weights is updated after the step, and no gate holds the update back."""
    client = connect(start_daemon(*SLOW))
    model = torch.nn.ParameterList([torch.ones(1_000_000)])
    average = copy.deepcopy(model).requires_grad_(False)
    client.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), ema=average)
    for step in (1, 2):
        average[0].fill_(step)
        handle = client.checkpoint(step=step)
        average[0].fill_(-1)
        handle.wait_durable(60)
        assert bool((client.recover().state["ema"]["0"] == step).all())


def saves_again(client: PCcheckClient) -> None:
    """Within a short stall limit, and so maybe not at the first try."""
    lost = (CheckpointState.FAILED, CheckpointState.SKIPPED)
    handles: list[Checkpoint] = []

    def tried() -> bool:
        handles.append(client.checkpoint([torch.ones(1000)]))
        return handles[-1].state not in lost

    until(tried)
    assert handles[-1].wait_durable(60).step == handles[-1].step


def test_a_stopped_daemon_costs_one_stall_and_then_nothing(
    daemon: Daemon, connect: Connect
) -> None:
    client = connect(daemon)
    tensor = torch.ones(1000)
    client.checkpoint([tensor]).wait_durable(60)
    stall.shorten(client, 0.3)
    daemon.kill(signal.SIGSTOP)
    try:
        with pytest.warns(UserWarning, match="stall_limit_s") as told:
            states = [client.checkpoint([tensor]).state for _ in range(20)]
    finally:
        daemon.kill(signal.SIGCONT)
    assert len(told) == 1
    assert states[0] is CheckpointState.FAILED
    assert set(states[1:]) == {CheckpointState.SKIPPED}
    saves_again(client)


def test_a_daemon_that_answers_late_is_connected_then(
    daemon: Daemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon opens volumes on a slow disk, or starts while systemd holds its socket."""
    monkeypatch.setattr(session, "BACKOFF_SLOW_S", 3600.0)
    client = connect(daemon)
    client.checkpoint([1]).wait_durable(60)
    stall.shorten(client, 0.3)
    daemon.kill()
    daemon.start().kill(signal.SIGSTOP)
    try:
        with pytest.warns(UserWarning, match="did not answer within 0.3 s"):
            assert client.checkpoint([2]).state is CheckpointState.FAILED
        assert client.checkpoint([3]).state is CheckpointState.FAILED
    finally:
        daemon.kill(signal.SIGCONT)
    saves_again(client)


def finished_late(client: PCcheckClient) -> bool:
    client.close()
    client.close(done=True)
    return client.closed


def test_a_restore_waits_for_a_daemon_that_answers_late(
    daemon: Daemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as for the checkpoint itself: the daemon opens the volumes of all ranks first."""
    client = connect(daemon)
    client.attach(values={"step": 1})
    client.checkpoint(step=1).wait_durable(30)
    client.close()
    finish = Attempt.finish

    def waits(attempt: Attempt, *, timeout_s: float) -> Attachment:
        if timeout_s > session.CONNECT_LIMIT_S:
            daemon.kill(signal.SIGCONT)
        return finish(attempt, timeout_s=timeout_s if timeout_s > session.CONNECT_LIMIT_S else 0.1)

    monkeypatch.setattr(Attempt, "finish", waits)
    for call in (PCcheckClient.restore, PCcheckClient.steps, finished_late):
        daemon.kill(signal.SIGSTOP)
        try:
            with pytest.warns(UserWarning, match="did not answer within"):
                client = connect(daemon)
            client.attach(values={"step": 0})
            assert call(client)
        finally:
            daemon.kill(signal.SIGCONT)
        client.close()


def test_on_error_raise(daemon: Daemon, connect: Connect) -> None:
    client = connect(daemon, on_error="raise")
    client.checkpoint([1]).wait_durable(60)
    daemon.kill()
    with pytest.raises(DaemonUnreachableError, match="pccheckd --storage"):
        client.checkpoint([1])
    with pytest.raises(DaemonUnreachableError):
        client.recover()
    daemon.start()
    assert client.recover().step == 1
    assert client.checkpoint([2]).wait_durable(60).step == 2


def test_a_handle_of_a_dead_daemon(start_daemon: Start, connect: Connect) -> None:
    daemon = start_daemon("--max-bandwidth", "1MiB")
    client = connect(daemon)
    client.checkpoint([1]).wait_durable(60)
    handle = client.checkpoint([torch.ones(700_000)])
    daemon.kill()
    with pytest.raises(CheckpointFailedError, match="ended"):
        handle.wait_durable(60)
    assert handle.state is CheckpointState.FAILED
    with pytest.warns(UserWarning, match="pccheckd"):
        client.checkpoint([1])


def test_waits_have_deadlines(start_daemon: Start, connect: Connect) -> None:
    client = connect(start_daemon(*SLOW))
    client.checkpoint([1]).wait_durable(60)
    handle = client.checkpoint([torch.ones(700_000)])
    with pytest.raises(WaitTimeoutError):
        handle.wait_durable(0.01)
    handle.wait_durable(60)


def _use_in_child(client: PCcheckClient, answers: Any) -> None:
    faulthandler.dump_traceback_later(200, exit=True)  # says where a child hangs
    with pytest.warns(PccheckWarning, match="saves nothing in a forked one: make a PCcheckClient"):
        handle = client.checkpoint([1])
    client.gate()
    client.close()
    try:
        client.recover()
    except UsageError as error:
        answers.put((handle.state.name, client.connected, str(error)))


def test_inert_in_a_forked_child(daemon: Daemon, connect: Connect) -> None:
    client = connect(daemon)
    client.checkpoint([1]).wait_durable(60)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_use_in_child, args=(client, answers))
    child.start()
    name, connected, said = answers.get(timeout=250)
    child.join()
    assert (name, connected) == ("SKIPPED", False) and "parent" in said
    assert client.checkpoint([2]).wait_durable(60).step == 2


def test_a_forked_child_does_not_report_the_end_of_the_daemon(
    start_daemon: Start, connect: Connect
) -> None:
    client = connect(start_daemon("--max-bandwidth", "1MiB"))
    client.checkpoint([1]).wait_durable(60)
    handle = client.checkpoint([torch.ones(1_000_000)])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=lambda: answers.put(handle.reason))
    child.start()
    assert answers.get(timeout=250).startswith("only the parent of a forked process learns")
    child.join()
    assert handle.wait_durable(60).step == 2


def test_inert_in_a_child_that_was_forked_in_the_middle_of_a_call(
    daemon: Daemon, connect: Connect
) -> None:
    """Another thread is in a call; the child does not have that thread, so the call would never
    end."""
    client, inside, end = connect(daemon), threading.Event(), threading.Event()

    def call() -> None:
        with client._calling("gate()"):
            inside.set()
            end.wait()

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_use_in_child, args=(client, answers))
    child.start()
    try:
        assert "parent" in answers.get(timeout=250)[2]
    finally:
        child.kill()
        end.set()
        thread.join()


def test_a_forked_child_leaves_each_client_by_itself(
    daemon: Daemon, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    clients = [connect(daemon, job=f"fold-{number}") for number in range(3)]
    for client in clients:
        monkeypatch.setattr(client._session, "forget_in_child", lambda: os.close(-1))
    monkeypatch.setattr(client_module, "_CLIENTS", clients)
    locks = [client._lock for client in clients]
    client_module._forget_all()
    assert not any(client._lock is lock for client, lock in zip(clients, locks, strict=True))
    assert caplog.text.count("could not be left") == 3


def test_restoring_what_does_not_fit_changes_nothing(daemon: Daemon, connect: Connect) -> None:
    client, kit = connect(daemon), make(1, steps=2)
    client.attach(**kit)
    client.checkpoint(step=1).wait_durable(60)
    client.attach(model=make(2, width=6)["model"])
    with pytest.raises(StateMismatchError, match=r"model\.embed\.weight"):
        client.restore()
    client.attach(model=kit["model"])
    assert client.restore().step == 1


def test_a_finished_job(daemon: Daemon, connect: Connect) -> None:
    client = connect(daemon)
    for _ in range(4):
        client.checkpoint([torch.ones(100)]).wait_durable(60)
    client.close(done=True)
    client.close()
    assert client.checkpoint is not None
    with pytest.raises(UsageError, match="closed"):
        client.attach(late={"value": 1})
    with pytest.raises(UsageError, match="closed"):
        client.checkpoint([1])
    assert connect(daemon).recover().step == 4


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "no"}, {"on_busy": "x"}, {"on_error": "x"}, {"transfer": "x"}, {"snapshot": "x"},
        {"job": "../x"}, {"rank": 2, "world_size": 2}, {"stall_limit_s": 0}, {"autostart": True},
    ],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        PCcheckClient(**{"job": "job", **options})


def test_steps_and_metadata_are_taken_by_value(daemon: Daemon, connect: Connect) -> None:
    client = connect(daemon)
    assert client.checkpoint([1], step=torch.tensor(7)).step == 7
    assert client.checkpoint([1]).step == 8
    with pytest.raises(UsageError):
        client.checkpoint([1], step=1.5)  # type: ignore[arg-type]


class Lazy(dict[str, float]):
    """A dict that loads its items on access, and no longer can."""

    def items(self) -> Any:
        raise RuntimeError("the tracker is gone")


def test_a_value_that_raises_fails_its_checkpoint_and_not_training(
    daemon: Daemon, connect: Connect
) -> None:
    client, kit, extra = connect(daemon), make(1), dict[str, Any]()
    client.attach(**kit, extra=extra)
    client.checkpoint(step=1).wait_durable(60)
    with pytest.warns(PccheckWarning, match=r"step 2 failed: metadata\.log: .*tracker is gone"):
        failed = client.checkpoint(step=2, metadata={"log": Lazy()})
    extra["lazy"] = Lazy()
    ends = [failed, client.checkpoint(step=3)]
    assert [one.state for one in ends] == [CheckpointState.FAILED] * 2
    assert "extra.lazy" in ends[1].reason
    del extra["lazy"]
    client.checkpoint(step=4).wait_durable(60)


def test_an_error_that_nobody_has_thought_of_stays_out_of_the_loop(
    daemon: Daemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, kit = connect(daemon), make(1)
    client.attach(**kit)
    client.checkpoint(step=1).wait_durable(60)

    def breaks(*_: object) -> None:
        raise TypeError("not a dict")

    monkeypatch.setattr(plan.AttachedPlan, "snapshot", breaks)
    with pytest.warns(PccheckWarning, match=r"step 2 failed: .* described: TypeError: not a dict"):
        assert client.checkpoint(step=2).state is CheckpointState.FAILED


def test_a_superseded_handle_names_the_newer_checkpoint_whenever_it_is_asked(
    start_daemon: Start, connect: Connect
) -> None:
    client = connect(start_daemon("--slots", "6", "--max-bandwidth", "8MiB"))
    client.checkpoint({"x": torch.zeros(5_000_000)}).wait_durable(60)
    large = client.checkpoint({"x": torch.zeros(4_000_000)})
    unasked = client.checkpoint({"x": torch.zeros(2_000_000)})
    small = client.checkpoint({"x": torch.zeros(10)})
    expected = small.wait_durable(60)
    assert expected.step == 4
    for _ in range(2):
        assert large.wait_durable(60) == large.wait_global(60) == expected
    assert (large.state, large.step) == (CheckpointState.SUPERSEDED, 2)
    client.close()
    assert unasked.wait_durable(0) == expected


def superseded(client: PCcheckClient) -> tuple[Checkpoint, Durable]:
    """A handle that has asked no daemon yet, and the newer checkpoint."""
    client.checkpoint({"x": torch.zeros(5_000_000)}).wait_durable(60)
    large = client.checkpoint({"x": torch.zeros(4_000_000)})
    small = client.checkpoint({"x": torch.zeros(10)})
    expected = small.wait_durable(60)
    large.exception(60)
    return large, expected


def test_a_superseded_handle_names_the_newer_one_after_a_kill(
    start_daemon: Start, connect: Connect
) -> None:
    daemon = start_daemon("--slots", "6", "--max-bandwidth", "8MiB")
    large, expected = superseded(connect(daemon))
    daemon.kill()
    assert large.state is CheckpointState.SUPERSEDED
    for _ in range(2):
        assert large.result(0) == large.wait_global(0) == expected
    assert 1 < large.sequence < expected.sequence
    assert "a newer checkpoint became durable first" in large.reason


def test_a_superseded_handle_names_the_newer_one_after_a_stop(
    start_daemon: Start, connect: Connect
) -> None:
    daemon = start_daemon("--slots", "6", "--max-bandwidth", "8MiB")
    large, expected = superseded(connect(daemon))
    daemon.kill(signal.SIGSTOP)
    try:
        assert large.wait_durable(0) == expected
    finally:
        daemon.kill(signal.SIGCONT)


def _killed_with_copied(daemon: Daemon, start_trainer: Callable[..., Trainer]) -> None:
    trainer = start_trainer(daemon, [3_000_000])
    for _ in range(5):
        trainer.step()
    assert trainer.wait_copied(trainer.checkpoint())
    trainer.kill()


def test_restore_waits_for_what_is_still_being_written_and_says_how_far_it_is(
    start_daemon: Start,
    start_trainer: Callable[..., Trainer],
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = start_daemon("--max-bandwidth", "1MiB")
    _killed_with_copied(daemon, start_trainer)
    monkeypatch.setattr(restore, "STUCK_LIMIT_S", 20.0)
    found = connect(daemon).recover()
    assert found.step == 5
    lines = [one.getMessage() for one in caplog.records if "still writing" in one.getMessage()]
    assert lines and all(
        "step 5: " in line and " of 11 MiB of 1 checkpoints" in line for line in lines
    )


def test_restore_names_the_disk_when_what_is_being_written_stands_still(
    start_daemon: Start,
    start_trainer: Callable[..., Trainer],
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = start_daemon("--max-bandwidth", "64KiB")
    _killed_with_copied(daemon, start_trainer)
    monkeypatch.setattr(restore, "STUCK_LIMIT_S", 0.0)
    with pytest.raises(WaitTimeoutError, match=r"still writing step 5: \d+ of 11 MiB") as caught:
        connect(daemon).recover()
    assert "nothing was written" in caught.value.message and "disk" in caught.value.hint
    daemon.kill()


def test_a_restore_says_where_its_bytes_came_from(start_daemon: Start) -> None:
    daemon = start_daemon("--dram", "8MiB", "--chunk", "1MiB", "--writers", "1")
    sources = []
    for elements in (1 << 18, 1 << 21, None):
        with PCcheckClient(job=f"job-{elements or 1 << 21}", socket=daemon.socket) as client:
            if elements is not None:
                client.checkpoint({"at": torch.arange(elements)}, step=1).wait_durable(60)
            else:
                assert daemon.stop() == 0
                daemon.start()
            found = client.recover()
            sources.append(found.source)
            assert torch.equal(found.state["at"], torch.arange(elements or 1 << 21))
    # Under load the first one was "both" in 3 of 40 runs; the reason is not known.
    assert sources in (["dram", "both", "volume"], ["both", "both", "volume"])
