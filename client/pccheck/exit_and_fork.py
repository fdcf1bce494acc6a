"""What happens to clients at the end of the process and in forked children."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from .warn import LOG


class _Client(Protocol):
    place: tuple[str, int, str]  # job, rank and daemon: one client at a time

    def close(self) -> None: ...
    def forget_in_child(self) -> None: ...


_CLIENTS: weakref.WeakSet[_Client] = weakref.WeakSet()


def watch(client: _Client) -> None:
    """It is closed at exit, unless it is gone by then, and made inert in forked children. One
    that was made before it for the same place is closed now: a notebook's cell is run again."""
    for other in list(_CLIENTS):
        if other.place == client.place:
            other.close()
    _CLIENTS.add(client)


def _close_all() -> None:
    for client in list(_CLIENTS):
        try:
            client.close()
        except Exception:
            LOG.exception("closing at exit")


def _after_fork() -> None:
    for client in list(_CLIENTS):
        client.forget_in_child()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
