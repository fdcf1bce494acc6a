"""A private daemon where the node has none: one per storage directory, shared by the local ranks.

It runs in the trainer's container or job step and ends with it: what is copied and not yet durable
is then lost. It outlives the trainer process, so that a restarted trainer recovers from memory, and
ends when its last client is closed.
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
#: Another local rank may be starting the daemon.
_LOCK_LIMIT_S = START_LIMIT_S + 15.0
_LOCK_STEP_S = 0.02
LOG_BYTES_MAX = 4 << 20
_PROBE_LIMIT_S = 5.0
_HANG_UP_LIMIT_S = 10.0
#: Checkpoints of closed clients are durable already: there is little to drain.
_END_LIMIT_S = 10.0
_AGAIN_S = 10.0
#: Variables of this rank alone. The daemon finds GPUs by their UUID and serves all ranks; this does
#: not change which GPUs a container or a job step allows.
_OF_THE_RANK = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
#: One for each open client.
_OF_THIS_PROCESS: weakref.WeakSet[PrivateDaemon] = weakref.WeakSet()
#: A forked child has none of them: they would keep it from ending the daemon with its own last one.
os.register_at_fork(after_in_child=lambda: _OF_THIS_PROCESS.clear())


class PrivateDaemon:
    """The daemon of one storage directory. A note in that directory names its socket, which depends
    on XDG_RUNTIME_DIR at its start; `socket` leads there."""

    def __init__(self, storage: str | os.PathLike[str]) -> None:
        self.storage = Path(storage).absolute()
        digest = hashlib.sha256(os.fsencode(self.storage)).hexdigest()[:12]
        self.directory = _runtime_root() / digest
        self.socket = self.directory / "attach.sock"
        self._starting: threading.Thread | None = None
        self._again_s = 0.0  # time.monotonic() of the next try
        _OF_THIS_PROCESS.add(self)

    def ensure(self) -> None:
        """Starts it unless it runs. Raises PccheckError with the last line of its log, or why it
        cannot be started here."""
        try:
            self._ensure()
        except PccheckError:  # one of them is a TimeoutError
            raise
        except OSError as error:  # no space for its log, no process, a path of another user
            raise PccheckError(
                f"cannot start a private pccheckd: {error}",
                hint="free disk space, memory or processes, or choose other directories with "
                "storage= and XDG_RUNTIME_DIR",
            ) from error

    def _ensure(self) -> None:
        try:
            self.storage.mkdir(exist_ok=True)  # not its parents: they may be a disk not mounted yet
        except OSError as error:
            raise NoStoreError(
                f"cannot make the storage directory {self.storage}: {error.strerror}",
                hint="choose a directory on a local disk with storage=",
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
        """The same in a thread of its own, after the daemon was killed: the next checkpoints use
        the new one."""
        if self._starting is not None and self._starting.is_alive():
            return
        if time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + _AGAIN_S

        def start() -> None:
            try:
                self.ensure()
            except (PccheckError, OSError) as error:
                LOG.warning("PCcheck: cannot restart the private pccheckd: %s", error)
            if self not in _OF_THIS_PROCESS:  # its client was closed meanwhile
                self.release()

        self._starting = threading.Thread(target=start, name="pccheck-autostart", daemon=True)
        with contextlib.suppress(RuntimeError):  # thread limit: tried again at a later checkpoint
            self._starting.start()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one process at a time find, start or end the daemon. Raises NoStoreError,
        WaitTimeoutError."""
        path = self.storage / ".pccheckd.starting"
        deadline = time.monotonic() + _LOCK_LIMIT_S
        try:
            lock = path.open("a")
        except OSError as error:
            raise NoStoreError(
                f"cannot open {path}: {error.strerror}",
                hint="choose a directory of your own with storage=",
            ) from error
        with lock:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() >= deadline:
                    raise WaitTimeoutError(
                        f"another process has held {path} for {_LOCK_LIMIT_S:g} s",
                        hint=f"see which process: fuser {path}",
                    )
                time.sleep(_LOCK_STEP_S)
            yield

    def _end_orphan(self) -> None:
        """Ends a private daemon whose socket was removed (XDG_RUNTIME_DIR, at a logout): it keeps
        the storage directory locked, and nothing can connect to it. It drains first."""
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
        # Before the wait: when this process is killed meanwhile, a later one still finds the
        # private daemon, and ends it.
        (self.directory / "pid").write_text(str(process.pid))
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if _answers(self.socket):
                LOG.warning(
                    "PCcheck: started a private pccheckd (pid %d, socket %s, log %s). It ends "
                    "after its last trainer. If this container or job step ends before, what is "
                    "not on the disk yet is lost",
                    process.pid, self.socket, log,
                )  # fmt: skip
                # It outlives this process: without a return code Popen warns at exit.
                process.returncode = 0
                return
            time.sleep(0.02)
        if process.poll() is None:
            process.terminate()
        lines = log.read_text(errors="replace").strip().splitlines()
        raise PccheckError(
            f"the private pccheckd did not start: {lines[-1] if lines else 'its log is empty'}",
            hint=f"see its log: {log}",
        )

    def release(self) -> None:
        """Ends the daemon, which drains first, unless another client is connected."""
        _OF_THIS_PROCESS.discard(self)
        if any(other.storage == self.storage for other in _OF_THIS_PROCESS):
            return
        with contextlib.suppress(PccheckError, OSError, ValueError), contextlib.ExitStack() as held:
            # When the directory was removed, no process looks for its daemon.
            if self.storage.is_dir():  # raises where another user's directory is in the way
                held.enter_context(self._locked())
            pid = int((self.socket.resolve().parent / "pid").read_text())
            with attach.observe(self.socket, version=VERSION, timeout_s=_PROBE_LIMIT_S) as seen:
                ends = seen.welcome.pid == pid and _is_unused(seen)
            if ends:
                os.kill(pid, signal.SIGTERM)
                # Under the lock: a client that starts now waits, and then starts another daemon.
                _await_end(pid, _END_LIMIT_S)


def _answers(socket: Path) -> bool:
    try:
        attach.observe(socket, version=VERSION, timeout_s=_PROBE_LIMIT_S).close()
    except DaemonUnreachableError:
        return False
    return True


def _is_unused(seen: attach.Attachment) -> bool:
    """Whether no client is connected; a session that was just closed may still be listed."""
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
    # The file in /etc belongs to the service, and may be unreadable here.
    return {"PCCHECK_CONFIG": os.devnull, **kept, "PCCHECKD_LOG_BYTES": str(LOG_BYTES_MAX)}


def private_daemon(storage: Path | None, socket: Path | None) -> PrivateDaemon:
    """Raises UsageError when something is missing for autostart."""
    chosen = storage or os.environ.get("PCCHECK_STORAGE")
    if not chosen:
        raise UsageError(
            "autostart=True needs a directory for the checkpoints",
            hint="add storage=DIR, a directory on a local disk, or set PCCHECK_STORAGE",
        )
    if socket:
        raise UsageError(
            "autostart=True chooses its own socket, and socket= was given",
            hint="leave socket= out; or leave autostart=True out to use the daemon there",
        )
    return PrivateDaemon(chosen)


def _runtime_root() -> Path:
    """A directory that only this uid can use; short, because socket paths end at 107 bytes."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    root = Path(given) / "pccheck" if given else Path(tempfile.gettempdir())
    # After `su` or `sudo -E` it is the directory of another user.
    if not given or len(str(root)) > 40 or not os.access(f"{given}/.", os.W_OK | os.X_OK):
        root = Path(tempfile.gettempdir()) / f"pccheck-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PccheckError(
            f"cannot make the directory {root}: {error.strerror}",
            hint="set XDG_RUNTIME_DIR to your own directory with mode 0700",
        ) from error
    owner = root.lstat()
    if owner.st_uid != os.getuid() or (owner.st_mode & 0o077 and not given):
        raise PccheckError(
            f"{root} belongs to another user, or other users can read it",
            hint="remove it, or set XDG_RUNTIME_DIR to a directory with mode 0700",
        )
    return root
