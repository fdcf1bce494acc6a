"""A stand-in for the service manager: a notify socket that keeps descriptors (sd_notify FDSTORE)
and starts a daemon again with them, as systemd does for FileDescriptorStoreMax=."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import threading
from pathlib import Path
from typing import Self

from .daemon import READY_LIMIT_S, Daemon

STORE_MAX = 512
_FDS_MAX = 64
#: exec keeps the process id of the shell.
_LISTENING = ["/bin/sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh"]


class Manager:
    """The manager's end of one notify socket. A thread answers, because the daemon waits."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.store: dict[str, int] = {}
        self.ready = threading.Event()
        self._lock = threading.Lock()
        self._ears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ears.bind(str(path))
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="manager", daemon=True)
        self._thread.start()

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self.store)

    def put(self, name: str, fd: int) -> None:
        """Keeps a descriptor as if a daemon had stored it; takes ownership."""
        with self._lock:
            old = self.store.pop(name, None)
            if old is not None:
                os.close(old)
            self.store[name] = fd

    def drop(self, name: str) -> None:
        with self._lock:
            fd = self.store.pop(name, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        os.write(self._waker, b"x")
        self._thread.join()
        for name in self.names():
            self.drop(name)
        self._ears.close()
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([self._ears, self._wake], [], [])
            if self._wake in readable:
                return
            text, fds, _, _ = socket.recv_fds(self._ears, 4096, _FDS_MAX)
            self._handle(text.decode(), fds)

    def _handle(self, text: str, fds: list[int]) -> None:
        lines = text.splitlines()
        said = dict(line.split("=", 1) for line in lines if "=" in line)
        name = said.get("FDNAME", "stored")
        if "FDSTORE" in said:
            for fd in fds:
                if len(self.store) < self.limit:
                    self.put(name, fd)
                else:
                    os.close(fd)
            return
        for fd in fds:  # BARRIER=1: its end is what the sender waits for
            os.close(fd)
        if "FDSTOREREMOVE" in said:
            self.drop(name)
        if "READY" in said:
            self.ready.set()


class ServedDaemon(Daemon):
    """A daemon under such a manager: a restarted daemon gets the stored descriptors."""

    def __init__(self, *flags: str, shim: str = "", storage: Path | None = None,
                 store_max: int = STORE_MAX) -> None:  # fmt: skip
        super().__init__(*flags, shim=shim, storage=storage)
        self.manager = Manager(self.root / "manager", store_max)

    def start(self, *flags: str) -> Self:
        manager = self.manager
        manager.ready.clear()
        names = manager.names()
        given = [manager.store[name] for name in names]
        environment = self.environment() | {
            "NOTIFY_SOCKET": str(manager.path), "FDSTORE": str(manager.limit),
        }  # fmt: skip
        if names:
            environment |= {"LISTEN_FDS": str(len(names)), "LISTEN_FDNAMES": ":".join(names)}

        def place() -> None:
            high = [os.dup(fd) for fd in given]  # above the numbers that the daemon expects
            moved = [_above(fd, 3 + len(given)) for fd in high]
            for number, fd in enumerate(moved):
                os.dup2(fd, 3 + number, inheritable=True)
            os.closerange(3 + len(given), 4096)

        with self.log.open("ab") as log:
            if not names:
                self.spawn(environment, log.fileno(), *flags)
            else:
                self.process = subprocess.Popen(
                    [*_LISTENING, *self.command(*flags)], stdout=log, stderr=log, env=environment,
                    close_fds=False, preexec_fn=place,
                )  # fmt: skip
        for _ in range(int(READY_LIMIT_S / 0.1)):
            if manager.ready.wait(0.1):
                return self
            if self.process.poll() is not None:
                break
        raise AssertionError(f"pccheckd did not get ready:\n{self.log.read_text()}")

    def without_store(self) -> Daemon:
        """Starts a daemon on the same storage without the manager, which keeps the descriptors."""
        plain = Daemon(*self.flags, storage=self.storage)
        plain.root, plain.socket, plain.log = self.root, self.socket, self.log
        return plain.start()

    def cleanup(self) -> None:
        super().cleanup()
        with contextlib.suppress(OSError):
            self.manager.close()

    def __exit__(self, *_exception: object) -> None:
        self.cleanup()


def _above(fd: int, floor: int) -> int:
    """A duplicate of the descriptor, numbered `floor` or higher."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD, floor)
