"""How clients end: out of scope, interrupted, or with a stopped daemon."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck import (
    CheckpointFailedError,
    CheckpointState,
    PCcheckClient,
    PccheckWarning,
    UsageError,
)
from pccheck_native import layout
from tests.support import programs, stall
from tests.support.daemon import Daemon, Start

SLOW = ("--max-bandwidth", "8MiB", "--dram", "4MiB")

CHILD = """
import multiprocessing, os, sys

def train(socket):
    global client  # the end of the process is the only one that it has
    import torch  # here: the other processes of multiprocessing need none
    from pccheck import PCcheckClient
    model = torch.nn.Linear(2000, 1000).requires_grad_(False)
    client = PCcheckClient(job="child", socket=socket, gate="manual")
    client.attach(model=model)  # torch takes seconds to make an optimizer
    print(client.restore().step, flush=True)
    for step in (1, 2):
        client.gate()
        model.weight.add_(1)
        client.checkpoint(step=step)
    if not os.fork():  # this process has only inherited the client
        sys.exit()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    child = context.Process(target=train, args=(sys.argv[1],))
    child.start()
    child.join()
"""

DROPPED = """
import gc, sys
from pccheck import PCcheckClient
for _ in range(3):
    client = PCcheckClient(job="dropped", socket=sys.argv[1], fresh=True)
    client.myself = client  # garbage as a cycle, as an exception's frames make one
    client.checkpoint([1]).wait_durable(60)
    del client
    gc.collect()
print("done")
"""


def test_a_client_that_goes_out_of_scope_saves_its_last_checkpoint(
    start_daemon: Start,
) -> None:
    """As in a script whose main() returns without close()."""
    daemon = start_daemon(*SLOW)
    model = torch.nn.Linear(2000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        client = PCcheckClient(job="job", socket=daemon.socket)
        client.attach(model=model, optimizer=optimizer)
        for step in (1, 2):
            model(torch.ones(1, 2000)).sum().backward()
            optimizer.step()
            handle = client.checkpoint(step=step)
        assert handle.state < CheckpointState.COPIED  # more than the daemon's memory

    train()
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as again:
        assert again.recover().step == 2


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_end_of_a_process_of_multiprocessing_saves_its_last_checkpoint(
    start_daemon: Start, tmp_path: Path, method: str
) -> None:
    """atexit does not run there."""
    script = tmp_path / "train.py"
    script.write_text(CHILD)
    daemon = start_daemon(*SLOW)
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(daemon.socket), method],
        capture_output=True, text=True, check=True, timeout=800,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("0\n", "")
    with PCcheckClient(job="child", socket=daemon.socket, on_error="raise") as again:
        assert again.recover().step == 2


def test_a_client_that_started_its_daemon_is_closed_when_it_goes_out_of_scope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, not when Python collects cycles: failed attempts to connect keep no frame of the
    caller."""
    with Daemon() as place:  # never started: its directories are used
        runtime = place.root / "r"
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))

        def train() -> int:
            client = PCcheckClient(job="job", autostart=True, storage=place.storage)
            client.checkpoint([1])
            pid_file = layout.lock_path(place.storage)
            return os.pidfd_open(int(pid_file.read_text()))

        gc.disable()
        try:
            daemon = train()
            try:
                assert select.select([daemon], [], [], 60)[0], "the client is not closed"
            finally:
                os.close(daemon)
        finally:
            gc.enable()
            gc.collect()


def test_a_client_that_is_garbage_does_not_hang(daemon: Daemon) -> None:
    with programs.script(DROPPED, daemon.socket) as program:
        printed = program.finish()
    assert program.returncode == 0 and printed.endswith("done\n"), printed


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C comes 0.2 s later, unless the block has ended by then."""
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_an_interrupted_close_ends_the_session(start_daemon: Start) -> None:
    daemon = start_daemon(*SLOW)
    client = PCcheckClient(job="job", socket=daemon.socket)
    client.checkpoint([torch.ones(5_000_000)])
    with pytest.raises(KeyboardInterrupt), interrupted():
        client.close()
    assert not client.connected
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as again:
        assert again.recover().step == 1  # it was copied; no duplicate stands in the way


@pytest.mark.parametrize("where", ["wait", "gate"])
def test_waits_can_be_interrupted(start_daemon: Start, where: str) -> None:
    daemon = start_daemon(*SLOW)
    parameter = torch.nn.Parameter(torch.ones(3_000_000))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        client.attach(model=torch.nn.ParameterList([parameter]), optimizer=optimizer)
        optimizer.step()  # from then on its hook is trusted
        client.checkpoint(step=1)
        handle = client.checkpoint(step=2)
        with pytest.raises(KeyboardInterrupt), interrupted():
            _ = handle.wait_durable() if where == "wait" else optimizer.step()
        if where == "gate":  # no gate waits any more before the tensors change
            assert handle.state is CheckpointState.FAILED
            with pytest.raises(CheckpointFailedError, match="interrupted"):
                handle.wait_durable(60)


def test_any_number_of_seconds_is_a_timeout(daemon: Daemon) -> None:
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        handle = client.checkpoint([1])
        assert handle.wait_durable(float("inf")).step == 1
        handle.wait_copied(-1.0)


def test_closing_before_a_stopped_daemon_is_bounded(daemon: Daemon) -> None:
    client = PCcheckClient(job="job", socket=daemon.socket)
    client.checkpoint([1]).wait_durable(60)
    stall.shorten(client, 0.2)
    daemon.kill(signal.SIGSTOP)
    before = time.monotonic()
    client.close()
    daemon.kill(signal.SIGCONT)
    assert time.monotonic() - before < 20  # the request that ends the session has the same limit


def test_an_exception_in_the_loop_comes_through(daemon: Daemon) -> None:
    socket: Any = daemon.socket
    with (
        pytest.raises(ZeroDivisionError),
        PCcheckClient(job="job", socket=socket) as client,
    ):
        handle = client.checkpoint([torch.ones(100_000)])
        _ = 1 / 0
    assert handle.state is CheckpointState.DURABLE


def test_a_private_daemon_ends_with_the_last_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time, also if the daemon is slow to notice the end of the session."""
    with Daemon() as place:  # never started: its directories are used
        runtime = place.root / "r"
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        for step in range(4):
            client = PCcheckClient(job="job", autostart=True, storage=place.storage)
            assert client.recover().step == step
            client.checkpoint([step], step=step + 1).wait_durable(60)
            PCcheckClient(job="other", autostart=True, storage=place.storage).close()
            assert client.connected
            pid_file = layout.lock_path(place.storage)
            daemon = os.pidfd_open(int(pid_file.read_text()))
            client.close()
            try:
                assert select.select([daemon], [], [], 60)[0], "the private daemon lives on"
            finally:
                os.close(daemon)


FORKED = """
import os, sys
from pccheck import PCcheckClient
client = PCcheckClient(job="parent", autostart=True, storage=sys.argv[1])
(came, come), (went, go) = os.pipe(), os.pipe()
if child := os.fork():
    os.close(come), os.close(went)
    assert os.read(came, 1) == b"x"
    client.close()  # the child's client is still open
    os.close(go)
    assert os.waitpid(child, 0)[1] == 0
else:
    os.close(go)
    with PCcheckClient(job="child", autostart=True, storage=sys.argv[1], on_error="raise"):
        os.write(come, b"x")
        os.read(went, 1)
    os._exit(0)
"""


def test_a_private_daemon_ends_with_the_last_client_of_a_forked_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child has a copy of its parent's client, which does not count as a client of the
    child."""
    with Daemon() as place:  # never started: its directories are used
        runtime = place.root / "r"
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        with programs.script(FORKED, place.storage) as program:
            printed = program.finish()
            assert program.returncode == 0, printed
        pid_file = layout.lock_path(place.storage)
        with contextlib.suppress(ProcessLookupError):
            daemon = os.pidfd_open(int(pid_file.read_text()))
            try:
                assert select.select([daemon], [], [], 60)[0], "the private daemon lives on"
            finally:
                signal.pidfd_send_signal(daemon, signal.SIGKILL)
                os.close(daemon)


def test_a_durable_checkpoint_of_a_closed_client_has_no_reason(
    daemon: Daemon,
) -> None:
    """Another rank might have made it global: nobody asks for that any more."""
    client = PCcheckClient(job="job", socket=daemon.socket, rank=0, world_size=2)
    with pytest.warns(PccheckWarning, match="not connected: 1"):
        handle = client.checkpoint([torch.ones(3)], step=1)
    handle.wait_durable(60)
    client.close()
    assert (handle.state, handle.reason) == (CheckpointState.DURABLE, "")


def test_a_closed_client_says_only_that_it_is_closed(daemon: Daemon) -> None:
    client = PCcheckClient(job="job", socket=daemon.socket)
    client.checkpoint([torch.ones(3)], step=7)
    client.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UsageError, match="this client is closed"):
            client.checkpoint([torch.ones(3)], step=3)
