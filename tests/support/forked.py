"""Daemons forked from a process that has imported what they import. A start then takes a sixth of
the CPU time, and the tests start more than a thousand daemons.

    python -m tests.support.forked

is that process; it ends when its stdin, a socket, is closed. Each
daemon has a parent process of its own, which waits for the daemon and reports how it ended."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from tests.support import loopcheck

ROOT = Path(__file__).parents[2]
_NUMBER = struct.Struct("i")
#: What the linker reads when a process starts, so that a fork would come too late.
LINKER = ("LD_PRELOAD", "LD_LIBRARY_PATH")


class Forked:
    """`python -m tests.support.loopcheck ARGUMENTS`, with the names of subprocess.Popen."""

    def __init__(
        self, arguments: list[str], *, stdout: int, stderr: int, env: dict[str, str]
    ) -> None:
        self._told, theirs = os.pipe()
        request = json.dumps([arguments, env, str(Path.cwd())]).encode()
        server, _ = _server(*map(env.get, LINKER))
        socket.send_fds(server, [request], [stdout, stderr, theirs])
        os.close(theirs)
        self.returncode: int | None = None
        self.pid = self._number()

    def _number(self) -> int:
        (number,) = _NUMBER.unpack(os.read(self._told, _NUMBER.size))
        return int(number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("pccheckd", timeout or 0)
            self.returncode = self._number()
            os.close(self._told)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server(*linker: str | None) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """One for each value of the variables in LINKER: the driver's stand-in and the fault shim."""
    command = [sys.executable, "-m", "tests.support.forked"]
    given = {name: value for name, value in zip(LINKER, linker, strict=True) if value is not None}
    environment = {k: v for k, v in os.environ.items() if k not in LINKER} | given
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return ours, subprocess.Popen(command, cwd=ROOT, stdin=theirs, env=environment)


def _daemon(request: bytes, stdout: int, stderr: int) -> int:
    arguments, environment, directory = json.loads(request)
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    for number, given in ((1, stdout), (2, stderr)):
        os.dup2(given, number)
        os.close(given)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    return loopcheck.main(arguments)


def main() -> int:
    importlib.import_module("pccheckd.lifecycle")  # pccheckd.cli does so late
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the waiting processes automatically
    while True:
        request, given, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not request:
            return 0
        if os.fork() == 0:
            break
        for each in given:
            os.close(each)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdout, stderr, tell = given
    child = os.fork()
    if child == 0:
        os.close(tell)
        return _daemon(request, stdout, stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon
    for each in (0, stdout, stderr):
        os.close(each)
    os.write(tell, _NUMBER.pack(child))
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its process id is not reused yet
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    os.write(tell, _NUMBER.pack(code))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
