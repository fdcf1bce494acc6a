"""sd_notify(3): states for the service manager, if there is one."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

STATUS_CHARACTERS_MAX = 400


class Notifier:
    """Sends states to $NOTIFY_SOCKET; does nothing without one. Never raises, and never waits: the
    event loop calls it. A manager that does not read misses states until it reads again."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        #: Abstract names are written with "@".
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._status = ""
        self._late: tuple[str, ...] = ()
        #: The manager's watchdog limit in seconds; 0: no watchdog.
        self.watchdog_s = _watchdog_s(environ) if self._address else 0.0

    def send(self, *states: str) -> None:
        """States that cannot be sent now are sent with the next ones, unless those replace them."""
        late = {state.partition("=")[0]: state for state in (*self._late, *states)}
        if not self._address or not late:
            return
        self._late = ()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.connect(self._address)
                channel.send("\n".join(late.values()).encode())
        except BlockingIOError:
            self._late = tuple(late.values())
        except OSError:
            pass  # it has gone

    def status(self, text: str, *states: str) -> None:
        """The line that `systemctl status` shows, sent when it has changed; `states` always are."""
        line = " ".join(text.split())[:STATUS_CHARACTERS_MAX]
        if line != self._status:
            self._status = line
            states = (f"STATUS={line}", *states)
        self.send(*states)

    def reloading(self) -> None:
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def extend(self, by_s: float) -> None:
        """Starting or stopping continues, and may take this long from now on."""
        self.send(f"EXTEND_TIMEOUT_USEC={int(by_s * 1e6)}")


def _watchdog_s(environ: Mapping[str, str]) -> float:
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    with contextlib.suppress(ValueError):
        return max(int(environ.get("WATCHDOG_USEC", "0")), 0) / 1e6
    return 0.0
