"""A private daemon for people who have none: one per storage directory, shared by the local ranks.

It lives in the same container or job step as the trainer and dies with it: what was copied but not
yet durable is then lost. It outlives the trainer process itself, so that a crashed and restarted
trainer recovers from memory, and ends when the last client that asked for it closes orderly.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

from pccheck_wire import attach
from pccheck_wire.errors import DaemonUnreachableError, NoStoreError, PccheckError, UsageError
from pccheck_wire.messages import Report, Status

from .version import VERSION
from .warn import LOG

START_LIMIT_S = 30.0
_PROBE_LIMIT_S = 5.0
_HANG_UP_LIMIT_S = 10.0
#: One for each open client.
_OF_THIS_PROCESS: weakref.WeakSet[PrivateDaemon] = weakref.WeakSet()


class PrivateDaemon:
    """The daemon of one storage directory, at a socket whose place follows from the directory."""

    def __init__(self, storage: str | os.PathLike[str]) -> None:
        self.storage = Path(storage).absolute()
        digest = hashlib.sha256(os.fsencode(self.storage)).hexdigest()[:12]
        self.directory = _runtime_root() / digest
        self.socket = self.directory / "attach.sock"
        _OF_THIS_PROCESS.add(self)

    def ensure(self) -> None:
        """Starts it unless it runs. Raises PccheckError with the end of its log."""
        try:
            self.storage.mkdir(exist_ok=True)  # not its parents: they may be a disk not mounted yet
        except OSError as error:
            raise NoStoreError(
                f"the storage directory {self.storage} cannot be made: {error.strerror}",
                hint="give a directory on a local disk with storage=",
            ) from error
        self.directory.mkdir(mode=0o700, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other local ranks wait here
            if not self._answers():
                self._start()

    def _answers(self) -> bool:
        try:
            attach.observe(self.socket, version=VERSION, timeout_s=_PROBE_LIMIT_S).close()
        except DaemonUnreachableError:
            return False
        return True

    def _start(self) -> None:
        log = self.directory / "pccheckd.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pccheckd", "--storage", str(self.storage),
                 "--socket", str(self.socket)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
                # The file in /etc is the service's, and may not be for us to read.
                env={"PCCHECK_CONFIG": os.devnull, **os.environ},
                start_new_session=True,  # Ctrl-C is for the trainer; it drains first
            )  # fmt: skip
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if self._answers():
                (self.directory / "pid").write_text(str(process.pid))
                LOG.warning(
                    "started a private pccheckd (pid %d, socket %s, log %s); it ends with this "
                    "container or job step, and what is not durable by then is lost",
                    process.pid, self.socket, log,
                )  # fmt: skip
                # Not a child to wait for: it outlives us. Tell Popen so, or it warns at exit.
                process.returncode = 0
                return
            time.sleep(0.02)
        if process.poll() is None:
            process.terminate()
        said = log.read_text(errors="replace").strip().splitlines()
        raise PccheckError(
            f"the private pccheckd did not start: {said[-1] if said else 'it said nothing'}",
            hint=f"its log is {log}",
        )

    def release(self) -> None:
        """Ends the daemon, which drains first, when no other client is connected."""
        _OF_THIS_PROCESS.discard(self)
        if any(other.directory == self.directory for other in _OF_THIS_PROCESS):
            return
        with contextlib.suppress(PccheckError, OSError, ValueError), (
            self.directory / "lock"
        ).open("w") as lock:  # fmt: skip
            fcntl.flock(lock, fcntl.LOCK_EX)
            pid = int((self.directory / "pid").read_text())
            with attach.observe(self.socket, version=VERSION, timeout_s=_PROBE_LIMIT_S) as seen:
                if seen.welcome.pid == pid and _nobody_else(seen):
                    os.kill(pid, signal.SIGTERM)


def _nobody_else(seen: attach.Attachment) -> bool:
    """Whether no client is connected; a session just closed or killed may need a moment."""
    deadline = time.monotonic() + _HANG_UP_LIMIT_S
    while True:
        report = seen.request(Status(), timeout_s=_PROBE_LIMIT_S)
        sessions = report.document.get("sessions") if isinstance(report, Report) else None
        others = not isinstance(sessions, list) or any(
            isinstance(one, dict) and _is_other(one.get("pid")) for one in sessions
        )
        if not sessions or others or time.monotonic() >= deadline:
            return sessions == []
        time.sleep(0.01)


def _is_other(pid: object) -> bool:
    """A living process that is not this one."""
    return pid != os.getpid() and isinstance(pid, int) and Path(f"/proc/{pid}").exists()


def private_daemon(storage: str | os.PathLike[str] | None, socket: object) -> PrivateDaemon:
    """Raises UsageError when something is missing for autostart."""
    chosen = storage or os.environ.get("PCCHECK_STORAGE")
    if not chosen:
        raise UsageError(
            "autostart=True needs a place for the checkpoints",
            hint="give storage=DIR, a directory on a local disk",
        )
    if socket:
        raise UsageError("autostart=True chooses its own socket", hint="leave socket= out")
    return PrivateDaemon(chosen)


def _runtime_root() -> Path:
    """A directory that only this uid can use; short, because socket paths end at 107 bytes."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    root = Path(given) / "pccheck" if given else Path(tempfile.gettempdir())
    if not given or len(str(root)) > 40 or not Path(given).is_dir():
        root = Path(tempfile.gettempdir()) / f"pccheck-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = root.lstat()
    if owner.st_uid != os.getuid() or (owner.st_mode & 0o077 and not given):
        raise PccheckError(
            f"{root} belongs to somebody else or is open to others",
            hint="remove it, or set XDG_RUNTIME_DIR to a directory of mode 0700",
        )
    return root
