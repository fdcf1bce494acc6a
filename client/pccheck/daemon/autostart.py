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
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pccheck.version import VERSION
from pccheck.warn import LOG
from pccheck_native import layout
from pccheck_wire import attach
from pccheck_wire.errors import (
    DaemonUnreachableError,
    NoStoreError,
    PccheckError,
    UsageError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Report, Status

START_LIMIT_S = 30.0
#: For another local rank that may be starting the daemon.
_LOCK_LIMIT_S = START_LIMIT_S + 15.0
_LOCK_STEP_S = 0.02
LOG_BYTES_MAX = 4 << 20
_PROBE_LIMIT_S = 5.0
_HANG_UP_LIMIT_S = 10.0
#: What clients closed is durable already: there is little to drain.
_END_LIMIT_S = 10.0
_AGAIN_S = 10.0
#: What was set for this rank alone. The daemon finds GPUs by their UUID and serves the other ranks,
#: too; which GPUs a container or a job step lets it open is not changed by this.
_OF_THE_RANK = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
#: One for each open client.
_OF_THIS_PROCESS: weakref.WeakSet[PrivateDaemon] = weakref.WeakSet()


class PrivateDaemon:
    """The daemon of one storage directory. A note in that directory names its socket, wherever
    XDG_RUNTIME_DIR pointed when it was started; `socket` leads there."""

    def __init__(self, storage: str | os.PathLike[str]) -> None:
        self.storage = Path(storage).absolute()
        digest = hashlib.sha256(os.fsencode(self.storage)).hexdigest()[:12]
        self.directory = _runtime_root() / digest
        self.socket = self.directory / "attach.sock"
        self._starting: threading.Thread | None = None
        self._again_s = 0.0  # time.monotonic; it is not tried sooner
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
        with self._locked():
            found = layout.noted_socket(self.storage)
            if found is not None and found != self.socket and _answers(found):
                self.socket.unlink(missing_ok=True)
                self.socket.symlink_to(found)
            elif not _answers(self.socket):
                self._end_orphan()
                self._start()

    def ensure_later(self) -> None:
        """The same in a thread of its own, for a trainer whose daemon was killed: the next
        checkpoints find the new one."""
        if self._starting is not None and self._starting.is_alive():
            return
        if time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + _AGAIN_S

        def start() -> None:
            try:
                self.ensure()
            except (PccheckError, OSError) as error:
                LOG.warning("PCcheck: %s", error)
            if self not in _OF_THIS_PROCESS:  # its client was closed meanwhile
                self.release()

        self._starting = threading.Thread(target=start, name="pccheck-autostart", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: at the next checkpoint, perhaps
            self._starting.start()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time looks for the daemon, starts it or ends it. Raises NoStoreError,
        WaitTimeoutError."""
        path = self.storage / ".pccheckd.starting"
        deadline = time.monotonic() + _LOCK_LIMIT_S
        try:
            lock = path.open("a")
        except OSError as error:
            raise NoStoreError(
                f"{path} cannot be opened: {error.strerror}",
                hint="give a directory of your own with storage=",
            ) from error
        with lock:
            while not _taken(lock):
                if time.monotonic() >= deadline:
                    raise WaitTimeoutError(
                        f"another process has held {path} for {_LOCK_LIMIT_S:g} s",
                        hint=f"is it stopped? see: fuser {path}",
                    )
                time.sleep(_LOCK_STEP_S)
            yield

    def _end_orphan(self) -> None:
        """A private daemon whose socket was removed, with XDG_RUNTIME_DIR at a logout, cannot be
        reached any more, and keeps the storage directory locked: it is ended, and drains first."""
        if not layout.socket_note(self.storage).exists() or layout.noted_socket(self.storage):
            return
        with contextlib.suppress(OSError, ValueError):
            pid = int(Path(layout.lock_path(self.storage)).read_text())
            process = Path(f"/proc/{pid}")
            command = (process / "cmdline").read_bytes().split(b"\0")
            ours = process.stat().st_uid == os.geteuid() and b"pccheckd" in command
            if ours and os.fsencode(self.storage) in command:
                os.kill(pid, signal.SIGTERM)
                _await_end(pid, START_LIMIT_S)

    def _start(self) -> None:
        log = self.directory / "pccheckd.log"
        self.socket.unlink(missing_ok=True)  # it may lead to a daemon that has ended
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pccheckd", "--storage", str(self.storage),
                 "--socket", str(self.socket)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the trainer; it drains first
            )  # fmt: skip
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if _answers(self.socket):
                (self.directory / "pid").write_text(str(process.pid))
                LOG.warning(
                    "PCcheck: started a private pccheckd (pid %d, socket %s, log %s); it ends with "
                    "this container or job step, and what is not durable by then is lost",
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
        if any(other.storage == self.storage for other in _OF_THIS_PROCESS):
            return
        # Once the directory was removed, no process looks for its daemon.
        locked = self._locked() if self.storage.is_dir() else contextlib.nullcontext()
        with contextlib.suppress(PccheckError, OSError, ValueError), locked:
            pid = int((self.socket.resolve().parent / "pid").read_text())
            with attach.observe(self.socket, version=VERSION, timeout_s=_PROBE_LIMIT_S) as seen:
                ends = seen.welcome.pid == pid and _nobody_else(seen)
            if ends:
                os.kill(pid, signal.SIGTERM)
                # Under the lock: a client that comes now waits, and then starts another daemon.
                _await_end(pid, _END_LIMIT_S)


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _answers(socket: Path) -> bool:
    try:
        attach.observe(socket, version=VERSION, timeout_s=_PROBE_LIMIT_S).close()
    except DaemonUnreachableError:
        return False
    return True


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


def _await_end(pid: int, limit_s: float) -> None:
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            select.select([process], [], [], limit_s)
        finally:
            os.close(process)


def _is_other(pid: object) -> bool:
    """A living process that is not this one."""
    return pid != os.getpid() and isinstance(pid, int) and Path(f"/proc/{pid}").exists()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_RANK}
    # The file in /etc is the service's, and may not be for us to read.
    return {"PCCHECK_CONFIG": os.devnull, **kept, "PCCHECKD_LOG_BYTES": str(LOG_BYTES_MAX)}


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
