"""The reader of the daemon's log stops reading: only lines of the log are lost."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from pccheck_wire.messages import Status
from tests.conftest import SMALL
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of

SIZE = 100_000
CHECKPOINTS = 700
#: Lines of one checkpoint, times that many, are more than a pipe of one page and the queue hold.
LOUD = ("--log-level", "debug")
_UNDER_JOURNAL = (
    "import sys; from pccheckd.base import journal; from tests.support import loopcheck; "
    "journal.SOCKET = sys.argv.pop(1); sys.exit(loopcheck.main(sys.argv[1:]))"
)


class Unread(Daemon):
    """A daemon whose stderr is the descriptor `stderr`, which no process reads. With `journal`, the
    path of a datagram socket, the daemon treats stderr as the journal."""

    def __init__(self, *flags: str, stderr: int, journal: Path | None = None) -> None:
        super().__init__(*SMALL, *flags)
        self.stderr = stderr
        self.journal = journal

    def command(self, *flags: str) -> list[str]:
        python, _, _, *rest = super().command(*flags)
        if self.journal is None:
            return super().command(*flags)
        return [python, "-c", _UNDER_JOURNAL, str(self.journal), *rest]

    def environment(self) -> dict[str, str]:
        assert self.stderr is not None
        found = os.fstat(self.stderr)
        more = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"} if self.journal else {}
        return super().environment() | more


def small_pipe(stack: ExitStack) -> tuple[int, int]:
    """The two ends of a pipe that holds one page."""
    reads, writes = os.pipe()
    stack.callback(os.close, reads)
    stack.callback(os.close, writes)
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    return reads, writes


def fill(daemon: Daemon) -> None:
    """Saves hundreds of checkpoints, each with lines in the log."""
    data = payload_of(1, SIZE)
    with Rank(daemon.socket, job="saving") as rank:
        rank.register(SIZE)
        for step in range(CHECKPOINTS):
            rank.save(step, data)


def another_is_served(daemon: Daemon) -> None:
    with Rank(daemon.socket, job="another") as rank:
        assert rank.ask(Status())
        rank.register(SIZE)
        rank.save(1, payload_of(2, SIZE))


def read_until(source: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        seen += os.read(source, 1 << 20)
    return seen


@pytest.mark.timeout(1800)
def test_a_pipe_that_nobody_reads_costs_log_lines_and_no_checkpoint(stack: ExitStack) -> None:
    reads, writes = small_pipe(stack)
    daemon = stack.enter_context(Unread(*LOUD, stderr=writes)).start()
    fill(daemon)
    another_is_served(daemon)
    dropped = read_until(reads, b"log lines dropped")
    assert b"ready: " in dropped  # what came before is still there, and in its place
    assert re.search(rb"WARNING (\d+) log lines dropped", dropped)
    another_is_served(daemon)
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 1 << 20)  # the rest of what is queued
    assert daemon.stop() == 0


@pytest.mark.timeout(1800)
def test_a_stop_does_not_wait_for_a_pipe_that_nobody_reads(stack: ExitStack) -> None:
    _, writes = small_pipe(stack)
    daemon = stack.enter_context(Unread(*LOUD, stderr=writes)).start()
    fill(daemon)
    assert daemon.stop() == 0


@pytest.mark.timeout(1800)
def test_a_journal_that_nobody_reads_costs_log_lines_and_no_checkpoint(stack: ExitStack) -> None:
    _, writes = small_pipe(stack)
    daemon = stack.enter_context(Unread(*LOUD, stderr=writes))
    daemon.journal = daemon.root / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears:
        ears.bind(str(daemon.journal))
        daemon.start()
        fill(daemon)
        another_is_served(daemon)
        ears.settimeout(60)
        while True:
            entry = ears.recv(1 << 20)
            if b"log lines dropped" in entry:
                break
        assert b"PRIORITY=4" in entry
        another_is_served(daemon)
    assert daemon.stop() == 0
