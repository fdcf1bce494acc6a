"""Signal handlers and other threads that call checkpoint() at the worst moments: a durable
checkpoint is of one step, and nothing is raised into the training loop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from pccheck import CheckpointState, PCcheckClient, PccheckWarning, UsageError
from pccheck.daemon.connection import Connection
from pccheck.daemon.session import Session
from pccheck.flight.in_flight import entry_of
from pccheck.saving.saver import Saver
from pccheck_native import SNAPSHOTS, WORD_COPYING, WORD_REQUESTED
from pccheck_wire.attach import Attachment
from tests.support.asking import Asking
from tests.support.daemon import Daemon
from tests.support.trainer import Stamped, expected, mismatch

COUNTS = [300_000, 300_000]


class Halting(torch.optim.Optimizer):
    """Writes `expected(step)`, and calls `between` after half of the values."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.now = 0
        self.between: Callable[[], object] = lambda: None

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.now += 1
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                parameter.copy_(expected(self.now, index, parameter.numel()).view_as(parameter))
                if index == 0:
                    self.between()


class Kit:
    def __init__(self, client: PCcheckClient, **more: Any) -> None:
        self.client = client
        self.model = Stamped(COUNTS)
        self.optimizer = Halting(list(self.model.parts))
        client.attach(model=self.model, optimizer=self.optimizer, **more)

    def recovered(self) -> str:
        """What is wrong with the newest durable checkpoint."""
        found = self.client.recover()
        tensors = [found.state["model"][f"parts.{index}"] for index in range(len(COUNTS))]
        return mismatch(tensors, found.step)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[PCcheckClient]:
    with PCcheckClient(job="job", socket=daemon.socket) as made:
        yield made


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Makes SIGUSR1 call this function."""
    with ExitStack() as stack:

        def put(work: Callable[[], object]) -> None:
            before = signal.signal(signal.SIGUSR1, lambda *_: work())
            stack.callback(signal.signal, signal.SIGUSR1, before)

        yield put


def arrive() -> None:
    signal.raise_signal(signal.SIGUSR1)


def test_a_handler_in_the_middle_of_an_update_gets_no_checkpoint(
    client: PCcheckClient, on_signal: Callable[..., None]
) -> None:
    kit, handles = Kit(client), []
    kit.optimizer.step()
    client.checkpoint(step=1).wait_durable(60)
    on_signal(lambda: handles.append(client.checkpoint(step=2)))
    kit.optimizer.between = arrive
    with pytest.warns(PccheckWarning, match="middle of a step.*set a flag"):
        kit.optimizer.step()
    kit.optimizer.between = lambda: None
    (handle,) = handles
    assert handle.state is CheckpointState.SKIPPED
    assert "middle of a step" in handle.reason
    assert kit.recovered() == ""
    last = client.checkpoint(step=kit.optimizer.now)  # a call between two steps saves again
    last.wait_durable(60)
    assert kit.recovered() == ""


def test_another_thread_in_the_middle_of_an_update_gets_none_either(client: PCcheckClient) -> None:
    kit, handles = Kit(client), []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: handles.append(client.checkpoint(step=3)))
        thread.start()
        thread.join()

    kit.optimizer.between = elsewhere
    kit.optimizer.step()
    (handle,) = handles
    assert handle.state is CheckpointState.SKIPPED
    kit.optimizer.between = lambda: None
    elsewhere()
    handles[1].wait_durable(60)


def test_restore_in_the_middle_of_an_update_is_refused(
    client: PCcheckClient, on_signal: Callable[..., None]
) -> None:
    """The update would go on, and make a state of two steps."""
    kit, errors = Kit(client), []
    kit.optimizer.step()
    client.checkpoint(step=1).wait_durable(60)

    def restore() -> None:
        with pytest.raises(UsageError, match="in the middle of a step") as caught:
            client.restore()
        errors.append(caught.value)

    on_signal(restore)
    kit.optimizer.between = arrive
    kit.optimizer.step()
    kit.optimizer.between = lambda: None
    assert len(errors) == 1
    client.checkpoint(step=2).wait_durable(60)
    assert kit.recovered() == ""
    assert client.restore().step == 2


@pytest.mark.parametrize("by", ["step", "restore"])
def test_a_step_that_an_exception_ended_is_not_saved(client: PCcheckClient, by: str) -> None:
    """A script that saves once more after Ctrl-C: half of the parameters are of the step before.
    The next step saves again, and so does a restore."""
    kit = Kit(client)
    kit.optimizer.step()
    client.checkpoint(step=1).wait_durable(60)

    def interrupt() -> None:
        raise KeyboardInterrupt

    kit.optimizer.between = interrupt
    with pytest.raises(KeyboardInterrupt):
        kit.optimizer.step()
    with pytest.warns(PccheckWarning, match="ended a step.*may be of two steps, and is skipped"):
        torn = client.checkpoint(step=2)
    assert torn.state is CheckpointState.SKIPPED
    assert kit.recovered() == "" and client.recover().step == 1
    client.attach(model=kit.model)
    assert client.checkpoint(step=2).state is CheckpointState.SKIPPED
    kit.optimizer.between = lambda: None
    if by == "restore":
        client.restore()
        kit.optimizer.now = 1
    else:
        kit.optimizer.step()
    client.checkpoint(step=kit.optimizer.now).wait_durable(60)
    assert kit.recovered() == ""


@pytest.mark.parametrize("at", ["__enter__", "__exit__"])
def test_ctrl_c_at_the_edge_of_a_call_costs_not_the_last_checkpoint(
    client: PCcheckClient, at: str
) -> None:
    """Python leaves the with block of the call open as long as the exception is handled."""
    kit = Kit(client)
    kit.optimizer.step()
    codes = {getattr(contextlib._GeneratorContextManager, at).__code__}
    number, interrupted = 0, True
    while interrupted:
        number += 1
        interrupted = False
        sys.settrace(interrupting(codes, number, ("line", "return")))
        try:
            client.gate()
            sys.settrace(None)
        except KeyboardInterrupt:
            sys.settrace(None)
            interrupted = True
            client.checkpoint(step=number).wait_durable(60)
    assert number > 3


def test_a_handler_in_the_middle_of_a_checkpoint_gets_none_of_its_own(
    client: PCcheckClient, on_signal: Callable[..., None]
) -> None:
    loader, handles = Asking(), []
    kit = Kit(client, loader=loader)
    on_signal(lambda: handles.append(client.checkpoint(step=5)))
    loader.asked = arrive
    with pytest.warns(PccheckWarning, match="in the middle of another call"):
        outer = client.checkpoint(step=0)
    assert outer.wait_durable(60).step == 0
    assert [handle.state for handle in handles] == [CheckpointState.SKIPPED]
    assert kit.recovered() == ""


def test_a_handler_in_the_middle_of_restoring_gets_none_either(
    client: PCcheckClient, on_signal: Callable[..., None]
) -> None:
    loader, handles = Asking(), []
    Kit(client, loader=loader)
    client.checkpoint(step=0).wait_durable(60)
    on_signal(lambda: handles.append(client.checkpoint(step=6)))
    loader.asked = arrive
    with pytest.warns(PccheckWarning, match="in the middle of another call"):
        assert client.restore().step == 0
    assert [handle.state for handle in handles] == [CheckpointState.SKIPPED]


def test_a_handler_at_the_end_of_a_gate_gets_none_either(
    client: PCcheckClient, on_signal: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update behind the gate would change the tensors of that checkpoint."""
    handles: list[Any] = []
    Kit(client)
    gate = client._saver.gate
    monkeypatch.setattr(client._saver, "gate", lambda **how: (gate(**how), arrive()))
    on_signal(lambda: handles.append(client.checkpoint(step=7)))
    with pytest.warns(PccheckWarning, match="in the middle of another call"):
        client.gate()
    assert [handle.state for handle in handles] == [CheckpointState.SKIPPED]


def test_a_handler_that_closes_does_so_after_the_call_it_came_in(
    client: PCcheckClient, on_signal: Callable[..., None]
) -> None:
    loader = Asking()
    Kit(client, loader=loader)
    on_signal(client.close)
    loader.asked = arrive
    outer = client.checkpoint(step=8)
    assert outer.state is CheckpointState.DURABLE and client.closed


def test_a_thread_that_saves_beside_training_saves_whole_steps(client: PCcheckClient) -> None:
    """Calls at any moment of a step: every durable checkpoint is of one step."""
    kit, calls, ended = Kit(client), threading.Semaphore(0), threading.Event()

    def save() -> None:
        for _ in range(30):
            calls.release()
            handle = client.checkpoint(step=9)
            if handle.state is not CheckpointState.SKIPPED:
                handle.wait_durable(60)
        ended.set()

    client.checkpoint(step=8).wait_durable(60)
    saver = threading.Thread(target=save)
    saver.start()
    while not ended.is_set():
        kit.optimizer.step()
        calls.acquire(timeout=0.01)  # most calls then come between two steps
    saver.join()
    found = client.recover()
    tensors = [found.state["model"][f"parts.{index}"] for index in range(len(COUNTS))]
    assert mismatch(tensors, int(tensors[0][0].item()) // 3) == ""


def interrupting(
    codes: set[CodeType], at: int, events: tuple[str, ...] = ("line",)
) -> Callable[..., Any]:
    """For sys.settrace: Ctrl-C before line number `at` of those that run in `codes`, or at another
    of these events."""
    left = at

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if frame.f_code not in codes:
            return None
        if event in events:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def test_ctrl_c_in_close_keeps_no_later_client_out(daemon: Daemon) -> None:
    """The cell of a notebook is interrupted and run again. Its session ends wherever Ctrl-C
    arrived, or at the next close(), as the error message says."""
    socket = daemon.socket
    ends = (PCcheckClient._leave, Session.close, Connection.close, Attachment.close)
    codes = {end.__code__ for end in ends}
    at, interrupted = 0, True
    while interrupted:
        at += 1
        client = PCcheckClient(job="job", rank=0, world_size=1, socket=socket, fresh=True)
        kept = client.checkpoint([torch.ones(10)])
        sys.settrace(interrupting(codes, at))
        try:
            client.close()
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        client.close()
        with PCcheckClient(job="job", rank=0, world_size=1, socket=socket) as later:
            assert later.recover().step == kept.step, at
    assert at > len(ends)


def test_ctrl_c_in_checkpoint_leaves_no_entry_of_the_page_in_use(client: PCcheckClient) -> None:
    """An entry that nothing ends would cost one of every 64 later checkpoints."""
    Kit(client)
    codes = {Saver.submit.__code__}
    at, handle = 0, None
    while handle is None:
        at += 1
        sys.settrace(interrupting(codes, at))
        with suppress(KeyboardInterrupt):
            handle = client.checkpoint(step=1)
        sys.settrace(None)
    assert at > len(codes)
    handle.wait_durable(60)
    last = handle._in_flight.snapshot
    connection = client._session.current()
    assert connection is not None
    words = [entry_of(connection, one) for one in range(max(1, last - SNAPSHOTS + 1), last + 1)]
    open_words = [one for one in words if one and one.word in (WORD_REQUESTED, WORD_COPYING)]
    assert not open_words


def test_ctrl_c_in_checkpoint_is_named_as_the_reason(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Saver._keep

    def interrupted(*about: Any) -> None:
        keep(*about)
        raise KeyboardInterrupt

    client = PCcheckClient(job="job", socket=daemon.socket)
    kit = Kit(client)
    kit.optimizer.step()
    client.checkpoint(step=1).wait_durable(60)
    kit.optimizer.step()
    with monkeypatch.context() as context, suppress(KeyboardInterrupt):
        context.setattr(Saver, "_keep", interrupted)
        client.checkpoint(step=2)
    with pytest.warns(PccheckWarning, match="1 checkpoint failed") as told:
        client.close()
    text = str(told[0].message)
    assert "up to step 2: abandoned: this process was interrupted before it was copied. The" in text
    assert text.endswith("step 1: a restart resumes there, and repeats the steps after it")


def test_ctrl_c_at_the_start_of_a_thread_costs_no_later_verdict(
    client: PCcheckClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that makes no call after checkpoint() has it saved, also after an earlier one was
    interrupted where a thread starts."""
    kit = Kit(client)
    kit.optimizer.step()
    with monkeypatch.context() as context, suppress(KeyboardInterrupt):
        context.setattr(threading.Thread, "start", _raise_interrupt)
        client.checkpoint(step=1)
    handle = client.checkpoint(step=2)
    watched = threading.Thread(target=handle.wait_durable, args=(30,))
    watched.start()  # the training thread gives verdicts, and makes no call
    watched.join()
    assert handle.state is CheckpointState.DURABLE


def _raise_interrupt(_thread: threading.Thread) -> None:
    raise KeyboardInterrupt
