"""Calls of a client in the middle of its other calls, by a tracer at some instructions of each, by
seed; `make handler-campaign` takes all of them. And what a script sees of such calls."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from pccheck import CheckpointState, PCcheckClient, UsageError
from tests.integration.handler_campaign import CALLS, OUTERS, run
from tests.support.asking import Asking
from tests.support.daemon import Daemon

SEED = int(os.environ.get("PCC_SEED", "1"))


@pytest.mark.parametrize("outer", OUTERS)
def test_every_call_is_safe_in_the_middle_of_every_other(daemon: Daemon, outer: str) -> None:
    pick = random.Random(f"{SEED} {outer}")
    tally = run(daemon, [outer], list(CALLS), lambda count: [pick.randint(1, count)])
    assert not tally.violations, (SEED, tally.violations[:5], len(tally.violations))
    assert sum(tally.cases.values()) == len(CALLS)


@pytest.mark.parametrize("outer", ["attach", "pin", "unpin"])
def test_close_at_the_start_of_a_call_ends_the_connection(daemon: Daemon, outer: str) -> None:
    """The call has looked whether the client is open: it must not connect again."""
    tally = run(daemon, [outer], ["close"], lambda _: list(range(1, 101)))
    assert not tally.violations, tally.violations[0]


class Kit:
    def __init__(self, client: PCcheckClient) -> None:
        self.client, self.loader = client, Asking()
        self.model = torch.nn.Linear(300, 300)
        self.optimizer = torch.optim.SGD(self.model.parameters())
        client.attach(model=self.model, optimizer=self.optimizer, loader=self.loader)
        self.optimizer.step()
        client.checkpoint(step=1).wait_durable(30)

    def inside(self, work: Callable[[], Any]) -> list[Any]:
        """What the work returns in a signal handler in the middle of the checkpoint of step 2. That
        checkpoint is durable."""
        found: list[Any] = []
        before = signal.signal(signal.SIGUSR1, lambda *_: found.append(work()))
        try:
            self.loader.asked = lambda: signal.raise_signal(signal.SIGUSR1)
            handle = self.client.checkpoint(step=2)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert handle.wait_durable(30).step == 2
        return found


@pytest.fixture
def kit(daemon: Daemon) -> Iterator[Kit]:
    client = PCcheckClient(job="job", socket=daemon.socket, stall_limit_s=600)
    with ExitStack() as stack:
        stack.callback(client.close)
        yield Kit(client)


def test_flush_in_a_handler_returns_what_is_known(kit: Kit) -> None:
    (known,) = kit.inside(lambda: kit.client.flush(600))
    assert known.step == 1
    assert kit.client.flush(30).step == 2  # type: ignore[union-attr]


def test_gate_and_an_update_in_a_handler_return_at_once(kit: Kit) -> None:
    assert kit.inside(kit.client.gate) == [None]


def test_questions_in_a_handler_are_answered_at_once(kit: Kit) -> None:
    kit.client.stop_on(signal.SIGUSR2)
    assert kit.inside(lambda: kit.client.should_checkpoint(2)) == [False]
    assert kit.inside(lambda: kit.client.should_stop()) == [False]


@pytest.mark.parametrize("call", ["steps", "restore", "recover", "adopt", "attach"])
def test_what_needs_the_whole_client_names_the_way_out(kit: Kit, call: str) -> None:
    def refused() -> str:
        with pytest.raises(UsageError, match="set a flag") as raised:
            getattr(kit.client, call)()
        return str(raised.value)

    (text,) = kit.inside(refused)
    assert text.startswith(f"{call}() was called in the middle of another call of the client")


def test_close_in_a_handler_follows_the_call_and_loses_nothing(kit: Kit) -> None:
    assert kit.inside(lambda: (kit.client.close(), kit.client.close(done=True))) == [(None, None)]
    assert kit.client.closed


def test_an_object_that_is_deleted_in_a_call_may_call_the_client(kit: Kit) -> None:
    class Flushing:
        def __del__(self) -> None:
            kit.client.flush(600)
            handles.append(kit.client.checkpoint(step=9))

    handles: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kit.inside(lambda: (Flushing(), None)[1])
    assert [handle.state for handle in handles] == [CheckpointState.SKIPPED]


def test_a_pin_in_a_handler_works_as_in_any_thread(kit: Kit) -> None:
    assert kit.inside(lambda: kit.client.pin(1)) == [None]
    assert [saved.step for saved in kit.client.steps() if saved.pinned] == [1]


def test_another_threads_call_waits_and_is_not_refused(kit: Kit) -> None:
    """The rule is about one thread: another one comes after the call."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(kit.client.flush(30)))
    kit.inside(thread.start)
    thread.join()
    assert found[0].step in (1, 2)
