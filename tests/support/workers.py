"""Workers of pytest-xdist, for each worker the server of multiprocessing that starts trainers, and
for all workers the process that has imported the frameworks: forked from one process that has
imported torch, which takes three seconds of CPU time.

    python -m tests.support.workers        that process; it ends with its standard input
    python tests/support/workers.py PLACE  what xdist starts as Python: passes its pipes to a fork
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: What the tests import, apart from pytest and its plugins, which rewrite their assertions.
IMPORTED = [f"tests.support.{name}" for name in ("trainer", "gputrainer", "frozen")]
PLACE = "PCC_TEST_WORKERS"  #: the variable with the socket of that process, in what it forks


@contextlib.contextmanager
def begun(place: Path) -> Iterator[str]:
    """The command that xdist takes for Python; `place` is an empty directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place / "workers"))
        listener.listen()
        command = [sys.executable, "-m", "tests.support.workers", str(place / "workers")]
        server = subprocess.Popen(
            [*command, str(listener.fileno())], cwd=ROOT, stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )  # fmt: skip
    try:
        yield f"{sys.executable} {__file__} {place / 'workers'}"
    finally:
        server.communicate()


def ask_for_frameworks(place: str, request: bytes, given: list[int]) -> None:
    """See `serve` in tests/frameworks/forked.py."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(place)
        socket.send_fds(link, [request], given)


def _ask(place: str) -> None:
    """In the place of a worker: ends with that worker."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(place)
        socket.send_fds(link, [b"worker"], [0, 1, 2])
        link.recv(1)


def main(place: str, number: str) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    found: Any = forkserver._forkserver  # type: ignore[attr-defined]
    found.ensure_running = functools.partial(_ask_for_trainers, found, place)
    os.environ[PLACE] = place
    made: list[int] = []
    frameworks = None
    with socket.socket(fileno=int(number)) as listener:
        while 0 not in select.select([0, listener], [], [])[0]:
            link, _ = listener.accept()
            wanted, given, _, _ = socket.recv_fds(link, 1 << 17, 3)
            if wanted not in (b"worker", b"trainers"):
                frameworks = frameworks or _begin_frameworks([listener, link], given, made)
                socket.send_fds(frameworks, [wanted], given)
            elif (child := os.fork()) == 0:
                listener.close()
                try:
                    (_work if wanted == b"worker" else _serve_trainers)(given, link)
                finally:
                    os._exit(0)
            else:
                made.append(child)
            link.close()
            for each in given:
                os.close(each)
    for child in made:  # of those that xdist has given up
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _begin_frameworks(
    links: list[socket.socket], given: list[int], made: list[int]
) -> socket.socket:
    """The process is forked for the first test that needs it, and keeps nothing of that test."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (child := os.fork()) == 0:
        for each in (*links, ours):
            each.close()
        for number in given:
            os.close(number)
        try:
            importlib.import_module("tests.frameworks.forked").serve(theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    made.append(child)
    theirs.close()
    return ours


def _ask_for_trainers(found: Any, place: str) -> None:
    """In a worker: a server of its own, whose output is captured with that of the test."""
    with found._lock:
        if found._forkserver_address:
            return
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.connect(place)
            socket.send_fds(link, [b"trainers"], [1, 2, listener.fileno()])
        found._forkserver_alive_fd = link.detach()
        found._forkserver_address = address


def _serve_trainers(given: list[int], link: socket.socket) -> None:
    """Ends with the worker and its trainers, which have the other end of `link`."""
    stdout, stderr, listener = given
    for number, each in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(each, number)
        os.close(each)
    forkserver.main(listener, link.detach(), [])


def _work(given: list[int], _link: socket.socket) -> None:
    """Acts as `python -c`, which reads its program."""
    for number, each in enumerate(given):
        os.dup2(each, number)
        os.close(each)
    sys.argv = ["-c"]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), program.__dict__)


if __name__ == "__main__":
    if __spec__ is None:
        _ask(sys.argv[1])
    else:
        main(*sys.argv[1:])
