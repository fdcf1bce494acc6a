"""Clients do not talk to another user's process in the daemon's place. They do talk to a daemon of
another user in a directory that root has made."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from pccheck_wire import attach
from pccheck_wire.errors import RefusedError
from tests.conftest import SMALL
from tests.support.daemon import Daemon
from tests.support.rank import Rank
from tests.support.trainer import Connect, RemoteError

from .test_refusals import as_user, refused

STRANGER = 12345
OTHER = 4322

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a daemon of a stranger")


class Strangers(Daemon):
    """A daemon of another user."""

    def command(self, *flags: str) -> list[str]:
        return as_user(STRANGER, "pccheckd.cli", *super().command(*flags)[3:])

    def start(self, *flags: str) -> Self:
        before = os.umask(0)  # it may write to the socket that we listen on for READY
        try:
            return super().start(*flags)
        finally:
            os.umask(before)


@pytest.fixture
def impostor(stack: ExitStack) -> Daemon:
    """A process that made its directory in a public place, and accepts every user."""
    daemon = stack.enter_context(Strangers(*SMALL))
    daemon.root.chmod(0o711)
    for directory in (daemon.storage, daemon.socket.parent):
        directory.mkdir(exist_ok=True)
        os.chown(directory, STRANGER, STRANGER)
    os.chown(daemon.root, STRANGER, STRANGER)
    daemon.start()
    daemon.open_to_everybody()
    return daemon


@pytest.fixture
def given(stack: ExitStack) -> Iterator[Daemon]:
    """As a service without a socket unit: root made the directory and gave it to the daemon."""
    with tempfile.TemporaryDirectory(dir="/run", prefix="pcc-") as name:
        daemon = stack.enter_context(Strangers(*SMALL))
        daemon.root.chmod(0o711)
        Path(name).chmod(0o755)
        for directory in (daemon.storage, Path(name)):
            os.chown(directory, STRANGER, STRANGER)
        daemon.socket = Path(name) / "attach.sock"
        daemon.start()
        daemon.socket.chmod(0o666)
        yield daemon


def ask(daemon: Daemon, user: int, **variables: str) -> subprocess.CompletedProcess[str]:
    command = as_user(user, "pccheckctl.cli", "--socket", str(daemon.socket), "status")
    return subprocess.run(
        command, capture_output=True, text=True, env=daemon.environment() | variables, check=False
    )


def test_a_client_does_not_speak_to_a_strangers_daemon(
    impostor: Daemon, start_trainer: Connect
) -> None:
    with pytest.raises(RefusedError, match=f"runs as uid {STRANGER}, .*neither yours .0. nor root"):
        Rank(impostor.socket)
    with pytest.raises(RemoteError, match=f"set PCCHECK_DAEMON_UID={STRANGER}"):
        start_trainer(impostor).restore()
    for user in (0, OTHER):
        ran = ask(impostor, user)
        assert ran.returncode == 1 and f"runs as uid {STRANGER}" in ran.stderr, ran
        assert ask(impostor, user, PCCHECK_DAEMON_UID=str(STRANGER)).returncode == 0
    assert ask(impostor, STRANGER).returncode == 0
    assert not list(impostor.storage.glob("0/*"))


def test_a_service_with_a_user_of_its_own_needs_no_more(given: Daemon) -> None:
    for user in (0, OTHER, STRANGER):
        ran = ask(given, user)
        assert ran.returncode == 0, ran.stderr
    attach.observe(given.socket).close()


def test_the_daemon_takes_no_directory_of_a_stranger(stack: ExitStack) -> None:
    daemon = stack.enter_context(Daemon(*SMALL))
    daemon.socket.parent.mkdir()
    os.chown(daemon.socket.parent, STRANGER, STRANGER)
    code, said = refused(daemon)
    assert code == 10 and f"belongs to uid {STRANGER}" in said, said
    os.chown(daemon.socket.parent, 0, 0)
    daemon.socket.parent.chmod(0o777)
    code, said = refused(daemon)
    assert code == 10 and "lets other users write" in said and "chmod go-w" in said, said
    daemon.socket.parent.chmod(0o1777)
    daemon.start()
    assert daemon.socket.stat().st_mode & 0o777 == 0o660
