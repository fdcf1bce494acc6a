"""Descriptors from a service manager: whose they are, and which of them is the attach socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pccheck_wire.errors import UsageError
from pccheckd.service import activation


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as made:
        made.bind(f"{tmp_path}/attach.sock")
        made.listen(1)
        yield made


def test_they_are_for_the_process_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, bool]] = []
    monkeypatch.setattr(os, "set_inheritable", lambda *given: made.append(given))
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", "LISTEN_FDNAMES": "attach:slot"}
    assert activation.take(environ) == [("attach", 3), ("slot", 4), ("", 5)]
    assert made == [(3, False), (4, False), (5, False)]
    assert not environ, "a child must not believe that they are its own"
    for other in ({"LISTEN_PID": "1", "LISTEN_FDS": "1"}, {"LISTEN_FDS": "1"}, {}):
        assert activation.take(dict(other)) == []


def test_the_attach_socket_is_found_by_name(listener: socket.socket, tmp_path: Path) -> None:
    given = [("slot", 99), ("attach", os.dup(listener.fileno()))]
    found = activation.attach_socket(given, tmp_path / "attach.sock")
    assert found is not None and not found.getblocking()
    found.close()
    assert given == [("slot", 99)]
    assert activation.attach_socket(given, tmp_path / "attach.sock") is None


def test_a_socket_of_another_place_is_refused(listener: socket.socket, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"listens at .*attach.sock, but the configuration names"):
        activation.attach_socket([("attach", listener.fileno())], tmp_path / "other.sock")


def test_a_stream_socket_is_refused(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as made:
        made.bind(f"{tmp_path}/attach.sock")
        made.listen(1)
        with pytest.raises(UsageError, match="ListenSequentialPacket="):
            activation.attach_socket([("attach", made.fileno())], tmp_path / "attach.sock")
