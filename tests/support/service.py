"""A daemon under a stand-in service manager, which records its notifications and passes sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.support.daemon import READY_LIMIT_S, Daemon
from tests.support.waiting import until

#: Runs the daemon with descriptor 3 and LISTEN_PID as a manager sets them.
_HAND_OVER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); "
    "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1', LISTEN_FDNAMES='attach'); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class Service(Daemon):
    """Like Daemon, with a notify socket that stays open and a configuration file."""

    def __init__(self, *flags: str, watchdog_s: float = 0, **options: str) -> None:
        super().__init__(*flags, **options)  # type: ignore[arg-type]
        self.heard: list[str] = []
        self.file = self.root / "pccheckd.toml"
        self.file.write_text("")
        self._watchdog_s = watchdog_s
        self._ears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ears.bind(str(self.root / "notify"))
        self._ears.settimeout(0.2)

    def environment(self) -> dict[str, str]:
        told = {"NOTIFY_SOCKET": str(self.root / "notify"), "PCCHECK_CONFIG": str(self.file)}
        if self._watchdog_s:
            told["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        return super().environment() | told

    def start(self, *flags: str, listener: socket.socket | None = None) -> Self:
        """Starts the daemon and waits for READY; passes `listener` as pccheckd.socket does."""
        with self.log.open("ab") as log:
            if listener is None:
                self.spawn(self.environment(), log.fileno(), *flags)
            else:
                number = listener.fileno()
                command = [sys.executable, "-c", _HAND_OVER, str(number), *self.command(*flags)]
                self.process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=self.environment(), pass_fds=(number,)
                )
        self.wait_for(lambda said: said == "READY=1")
        return self

    def wait_log(self, wanted: str) -> None:
        """Waits for a line of the log: a thread writes the log, later than the line is made."""
        until(lambda: wanted in self.log.read_text(), self.log.read_text)

    def wait_for(self, wanted: Callable[[str], bool], limit_s: float = READY_LIMIT_S) -> str:
        """Waits for a notification that is `wanted`; keeps earlier notifications in `heard`."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            said = self._listen()
            self.heard += said
            for one in said:
                if wanted(one):
                    return one
            if not said and self.process is not None and self.process.poll() is not None:
                break
        raise AssertionError(f"it did not say so: {self.heard}\n{self.log.read_text()}")

    def drain(self) -> None:
        """Forgets earlier notifications."""
        self._ears.setblocking(False)
        try:
            while self._ears.recv(4096):
                pass
        except BlockingIOError:
            self._ears.settimeout(0.2)
        self.heard.clear()

    def _listen(self) -> list[str]:
        try:
            return self._ears.recv(4096).decode().split("\n")
        except TimeoutError:
            return []

    def cleanup(self) -> None:
        self._ears.close()
        super().cleanup()


def listen_at(path: Path) -> socket.socket:
    """A socket as systemd makes it for pccheckd.socket."""
    path.parent.mkdir(mode=0o750, exist_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(os.fspath(path))
    made.listen(8)
    return made
