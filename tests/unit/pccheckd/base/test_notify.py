"""sd_notify: addresses, what is sent, and the watchdog's terms."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pccheckd.base.notify import STATUS_CHARACTERS_MAX, Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ears:
        path = f"{tmp_path}/notify"
        name = path if request.param == "path" else f"@{path}"
        ears.bind(path if request.param == "path" else f"\0{path}")
        ears.setblocking(False)
        yield name, ears


def test_states_arrive(manager: tuple[str, socket.socket]) -> None:
    name, ears = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.send("READY=1", "STATUS=well")
    assert ears.recv(4096) == b"READY=1\nSTATUS=well"
    notifier.reloading()
    assert ears.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    notifier.extend(1.5)
    assert ears.recv(4096) == b"EXTEND_TIMEOUT_USEC=1500000"


def test_a_status_is_one_line_and_said_once(manager: tuple[str, socket.socket]) -> None:
    name, ears = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.status("two\nlines " + "x" * 1000)
    said = ears.recv(4096).decode()
    assert said.startswith("STATUS=two lines xxx") and "\n" not in said
    assert len(said) == len("STATUS=") + STATUS_CHARACTERS_MAX
    notifier.status("two\nlines " + "x" * 1000)
    with pytest.raises(BlockingIOError):
        ears.recv(4096)
    notifier.status("new", "WATCHDOG=1")
    assert ears.recv(4096) == b"STATUS=new\nWATCHDOG=1"
    notifier.status("new", "WATCHDOG=1")
    assert ears.recv(4096) == b"WATCHDOG=1"


def test_a_manager_that_takes_nothing_costs_no_time_and_no_state(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ears:
        ears.bind(f"{tmp_path}/notify")
        notifier = Notifier({"NOTIFY_SOCKET": f"{tmp_path}/notify"})
        for number in range(2000):  # more than a socket's queue: a call that waits would never end
            notifier.status(f"{number}", "WATCHDOG=1")
        notifier.send("READY=1")
        ears.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                assert b"READY=1" not in ears.recv(4096)
        notifier.send("WATCHDOG=1")
        assert ears.recv(4096) == b"STATUS=1999\nWATCHDOG=1\nREADY=1"


def test_no_manager_and_a_dead_one_are_no_trouble(tmp_path: Path) -> None:
    Notifier({}).send("READY=1")
    Notifier({"NOTIFY_SOCKET": f"{tmp_path}/absent"}).send("READY=1")


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),  # meant for our parent
        ({"WATCHDOG_USEC": "often"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_watchdogs_terms(environ: dict[str, str], seconds: float) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/x", **environ}).watchdog_s == seconds
