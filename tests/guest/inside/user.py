"""A trainer process of an ordinary user: functions run there, one after the other."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pwd
import signal
import struct
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, Self

from pccheck_wire.messages import Empty, Opened, Restored
from tests.support.rank import Rank, payload_of

SOCKET = Path("/run/pccheck/attach.sock")
LIMIT_S = 400.0
_SPAWN = multiprocessing.get_context("spawn")

_rank: Rank | None = None
_opened: Opened | Empty | None = None
_size = 0


def _become(name: str) -> None:
    account = pwd.getpwnam(name)
    os.initgroups(name, account.pw_gid)
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)


def connect(size: int, job: str = "job", socket: Path = SOCKET) -> None:
    global _rank, _size
    _rank, _size = Rank(socket, job=job), size
    _rank.register(size)


def copy(step: int) -> None:
    """Returns when it is copied."""
    assert _rank is not None
    _rank.wait(_rank.begin(step, payload_of(step, _size)), copied=True)


def save(step: int) -> None:
    assert _rank is not None
    _rank.save(step, payload_of(step, _size))


def join(rank: int, size: int, socket: Path, launch: str) -> int:
    """A rank of two, each on a node of its own. Returns when both of them are there: the step that
    they restore, 0 for none."""
    global _rank, _size, _opened
    _rank, _size = Rank(
        socket, job="wide", rank=rank, world_size=2, local_world_size=1, launch=launch
    ), size  # fmt: skip
    _rank.register(size)
    _opened = _rank.open()
    if isinstance(_opened, Empty):
        return 0
    _rank.ask(Restored(_opened.sequence))
    return _opened.step


def read_elsewhere() -> tuple[list[str], bool]:
    """Reads this rank's part from another node: the addresses there, and whether the bytes are
    those that the rank has saved."""
    from pccheck_store.reading.peers import PeerPayloads

    assert isinstance(_opened, Opened) and _opened.far
    payloads = PeerPayloads("wide", _opened, print)
    found = bytearray(_size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(found))
    payloads.read_into(_opened.rank, 0, _size, struct.pack("<QQQ", address, 0, _size))
    payloads.close()
    places = [place for node in _opened.nodes for place in node.addresses]
    return places, found == payload_of(_opened.step, _size)


def restored() -> tuple[int, bool]:
    """The newest step, and whether its bytes are those that were saved."""
    assert _rank is not None
    opened, data = _rank.restore()
    return opened.step or 0, data == payload_of(opened.step or 0, _size)


class User:
    """`user.run(save, 3)` returns what `save(3)` returns in the user's process."""

    def __init__(self, name: str) -> None:
        self._pool = ProcessPoolExecutor(1, _SPAWN, initializer=_become, initargs=(name,))

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> Any:
        return self.begin(function, *arguments).result(limit_s)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(function, *arguments)

    def kill(self) -> None:
        for pid in list(self._pool._processes or ()):
            os.kill(pid, signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
