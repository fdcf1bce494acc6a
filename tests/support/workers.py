"""Workers of pytest-xdist, and the server of multiprocessing that starts trainers for all workers:
forked from one process that has imported torch. Each of them would take three seconds of CPU time.

    python -m tests.support.workers        that process; it ends with its standard input
    python tests/support/workers.py PLACE  what xdist starts as Python: passes its pipes to a fork
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: What the tests import, apart from pytest and its plugins, which rewrite their assertions.
IMPORTED = [f"tests.support.{name}" for name in ("trainer", "gputrainer", "frozen")]


@contextlib.contextmanager
def begun(place: Path) -> Iterator[str]:
    """The command that xdist takes for Python; `place` is an empty directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place / "workers"))
        listener.listen()
        command = [sys.executable, "-m", "tests.support.workers", str(place / "trainers")]
        server = subprocess.Popen(
            [*command, str(listener.fileno())], cwd=ROOT, stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )  # fmt: skip
    try:
        yield f"{sys.executable} {__file__} {place / 'workers'}"
    finally:
        server.communicate()


def _ask(place: str) -> None:
    """In the place of a worker: ends with that worker."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(place)
        socket.send_fds(link, [b"worker"], [0, 1, 2])
        link.recv(1)


def main(trainers: str, number: str) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    made = []
    with socket.socket(fileno=int(number)) as listener:
        _serve_trainers(trainers, listener)
        while 0 not in select.select([0, listener], [], [])[0]:
            link, _ = listener.accept()
            _, given, _, _ = socket.recv_fds(link, 16, 3)
            if (worker := os.fork()) == 0:
                listener.close()
                _work(given)
                os._exit(0)
            made.append(worker)
            link.close()
            for each in given:
                os.close(each)
    for worker in made:  # of those that xdist has given up
        os.kill(worker, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve_trainers(place: str, other: socket.socket) -> None:
    """The server, and where multiprocessing looks for it in this process and its forks."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        if os.fork() == 0:
            other.close()
            try:
                forkserver.main(listener.detach(), os.dup(0), [])  # ends with standard input
            finally:
                os._exit(0)
    found: Any = forkserver._forkserver  # type: ignore[attr-defined]
    found._forkserver_address = place
    found._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    found.ensure_running = lambda: None


def _work(given: list[int]) -> None:
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
