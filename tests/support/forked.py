"""Daemons and their fronts, forked from processes that have imported what they import. A start then
takes a sixth of the CPU time, and the tests start more than a thousand of each.

    python -m tests.support.forked daemon
    python -m tests.support.forked front

are these processes; each ends when its stdin, a socket, is closed. What they fork has a parent
process of its own, which waits for its child and reports how it ended."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import warm

ROOT = Path(__file__).parents[2]
_NUMBER = struct.Struct("i")
#: What the linker reads when a process starts, so that a fork would come too late.
LINKER = ("LD_PRELOAD", "LD_LIBRARY_PATH")
PROGRAM = "pccheckd.front.program"


#: Whether fronts are forked, too. They then have another command line, and more address space.
fronts = True


class Forked:
    """A process with the names of subprocess.Popen."""

    def __init__(
        self, server: socket.socket, arguments: list[str], given: list[int], env: dict[str, str]
    ) -> None:
        self._told, theirs = os.pipe()
        request = json.dumps([arguments, env, os.getcwd()]).encode()  # noqa: PTH109
        socket.send_fds(server, [request], [theirs, *given])
        os.close(theirs)
        self.returncode: int | None = None
        self.pid = self._number()

    def _number(self) -> int:
        (number,) = _NUMBER.unpack(os.read(self._told, _NUMBER.size))
        return int(number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            arrivals = select.poll()  # select() takes no descriptor above 1023
            arrivals.register(self._told, select.POLLIN)
            if not arrivals.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
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


def daemon(arguments: list[str], *, stdout: int, stderr: int, env: dict[str, str]) -> Forked:
    """`python -m tests.support.loopcheck ARGUMENTS`."""
    server, _ = _server("daemon", *map(env.get, LINKER))
    given = [stdout, stderr]
    if fronts:
        given.append(_server("front", None, None)[0].fileno())
    return Forked(server, arguments, given, env)


class Front(Forked):
    """`python -P -m pccheckd.front.program ARGUMENTS`; reads the end of the socket of its daemon,
    which is not its parent."""

    def __init__(self, server: socket.socket, command: list[str], **options: Any) -> None:
        error, theirs = os.pipe()
        self.stderr = open(error, "rb")  # noqa: SIM115, PTH123
        self.stdin = None
        arguments = command[command.index(PROGRAM) + 1 :]
        super().__init__(server, arguments, [theirs, *options["pass_fds"]], options["env"])
        os.close(theirs)


@functools.cache
def _server(kind: str, *linker: str | None) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """One for each value of the variables in LINKER: the driver's stand-in and the fault shim."""
    command = [sys.executable, "-m", "tests.support.forked", kind]
    given = {name: value for name, value in zip(LINKER, linker, strict=True) if value is not None}
    environment = {k: v for k, v in os.environ.items() if k not in LINKER} | given
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return ours, subprocess.Popen(command, cwd=ROOT, stdin=theirs, env=environment)


def _run_daemon(arguments: list[str], given: list[int]) -> int:
    from tests.support import loopcheck

    stdout, stderr, *server = given
    _move({1: stdout, 2: stderr})
    if server:
        started, link = subprocess.Popen, socket.socket(fileno=server[0])

        def start(command: list[str], **options: Any) -> Any:
            return (
                Front(link, command, **options)
                if PROGRAM in command
                else started(command, **options)
            )

        subprocess.Popen = start  # type: ignore[assignment, misc]
    return loopcheck.main(arguments)


def _run_front(arguments: list[str], given: list[int]) -> None:
    from pccheckd.front import program

    stderr, listener, link = given
    version, uid, gid, _, _, hand, limit = arguments
    nothing = os.open(os.devnull, os.O_WRONLY)
    _move({1: nothing, 2: stderr})
    os.setsid()
    os.chdir("/")
    program.main([version, uid, gid, str(listener), str(link), hand, limit])


def _move(places: dict[int, int]) -> None:
    for number, given in places.items():
        os.dup2(given, number)
        os.close(given)


RUN: dict[str, Callable[[list[str], list[int]], int | None]] = {
    "daemon": _run_daemon,
    "front": _run_front,
}
#: pccheckd.cli imports its module late. A daemon has no libzmq.
IMPORTED = {"daemon": ("pccheckd.lifecycle", "tests.support.loopcheck"), "front": (PROGRAM,)}


def main() -> int:
    (kind,) = sys.argv[1:]
    for name in (*IMPORTED[kind], "tests.support.frozen"):
        importlib.import_module(name)
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the waiting processes automatically
    while True:
        request, given, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not request:
            return 0
        if os.fork() == 0:
            break
        for each in given:
            os.close(each)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tell, *given = given
    child = os.fork()
    if child == 0:
        os.close(tell)
        os._exit(_called(kind, request, given))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the child
    for each in (0, *given):
        os.close(each)
    os.write(tell, _NUMBER.pack(child))
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its process id is not reused yet
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(BrokenPipeError):  # who started it may have ended before
        os.write(tell, _NUMBER.pack(code))
    os._exit(0)


def _called(kind: str, request: bytes, given: list[int]) -> int:
    """The exit code. The interpreter is not taken down: that would copy all that was imported."""
    arguments, environment, directory = json.loads(request)
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    return warm.called(RUN[kind], arguments, given)


if __name__ == "__main__":
    sys.exit(main())
