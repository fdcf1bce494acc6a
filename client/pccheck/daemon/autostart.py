"""A private daemon where the node has none: one per storage directory, shared by the local ranks.

It runs in the trainer's container or job step and ends with it: what is copied and not yet durable
is then lost. It outlives the trainer process, so that a restarted trainer recovers from memory, and
ends when its last client is closed.
"""

from __future__ import annotations

import contextlib
import errno
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
from pccheck_wire.basics import TEMPORARY
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
#: With the name of a socket for requests behind it, a path of at most 107 bytes.
_ROOT_BYTES_MAX = 40
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
#: Held while a process is started, and across fork(): a worker of a DataLoader that is forked in
#: the middle would keep the pipe open by which Popen waits for exec, and Popen would never return.
_STARTS = threading.RLock()
os.register_at_fork(
    before=_STARTS.acquire, after_in_parent=_STARTS.release, after_in_child=_STARTS.release
)


class PrivateDaemon:
    """The daemon of one storage directory, which listens at `socket`. A note in the directory names
    that socket, which depends on XDG_RUNTIME_DIR at the daemon's start. Names do not tell which
    directory a daemon serves: directories are moved, and copied with the note, and a path is
    another directory in another container. So the daemon is asked."""

    def __init__(self, storage: str | os.PathLike[str]) -> None:
        self.storage = Path(storage).absolute()
        self._socket: Path | None = None
        self._starting: threading.Thread | None = None
        self._again_s = 0.0  # time.monotonic() of the next try
        _OF_THIS_PROCESS.add(self)

    @property
    def socket(self) -> Path:
        """Where it listens. Raises PccheckError when there is no place for that."""
        return self._socket or self._place()

    def ensure(self) -> None:
        """Starts it unless it runs. Raises PccheckError, with the last line of its log."""
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
            if isinstance(error, FileExistsError):
                fix = f"{self.storage} is not a directory:"
            elif isinstance(error, NotADirectoryError):
                fix = f"{self.storage.parent} is not a directory:"
            else:
                fix = f"make {self.storage.parent} first, or mount its disk; or"
            raise NoStoreError(
                f"cannot make the storage directory {self.storage}: {error.strerror}",
                hint=f"{fix} choose a directory on a local disk with storage=",
            ) from error
        with self._locked():
            number = layout.number(self.storage)
            noted = layout.noted_socket(self.storage)
            mine = self._place(), self._place(number)  # XDG_RUNTIME_DIR may have gone meanwhile
            serves = {socket: _serves(socket) for socket in (*([noted] if noted else []), *mine)}
            for socket, served in serves.items():
                if served == number:
                    self._socket = socket
                    return
            self._end_unusable()
            # At the first place another directory's daemon may listen.
            self._socket = mine[0] if serves[mine[0]] is None else mine[1]
            self._start()

    def _place(self, number: str = "") -> Path:
        """Where to listen: a place for the directory's name, or for the name and the directory."""
        name = os.fsencode(self.storage) + number.encode()
        digest = hashlib.sha256(name).hexdigest()[:12]
        return _runtime_root() / digest / "attach.sock"

    def ensure_later(self) -> None:
        """The same in a thread, after the daemon was killed, for the next checkpoints."""
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
        """Lets one process find, start or end the daemon. Raises NoStoreError, WaitTimeoutError."""
        path = self.storage / ".pccheckd.starting"
        deadline = time.monotonic() + _LOCK_LIMIT_S
        lock = _open_own(path)
        try:
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
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile has it open, too
        finally:
            os.close(lock)

    def _end_unusable(self) -> None:
        """Ends a private daemon that has the directory locked and is of no use: its socket was
        removed (XDG_RUNTIME_DIR, at a logout), or the directory was moved. It drains first, and
        stays while a trainer is connected. Raises PccheckError then."""
        pid = self._holder()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it ends by itself
            os.kill(pid, signal.SIGTERM)
        if not _await_end(pid, _END_LIMIT_S):
            raise PccheckError(
                f"a private pccheckd (pid {pid}) has {self.storage} for another training process, "
                "or is still writing, and this process cannot connect to it",
                hint="start both with the same XDG_RUNTIME_DIR and the same /tmp, or choose "
                "another directory with storage=",
            )

    def _holder(self) -> int | None:
        """The private daemon that has the directory locked, if this process can see it."""
        if not layout.socket_note(self.storage).exists():
            return None
        with contextlib.suppress(OSError, ValueError):
            lock = Path(layout.lock_path(self.storage))
            pid, there = int(lock.read_text()), lock.stat()
            process = Path(f"/proc/{pid}")
            if process.stat().st_uid != os.geteuid():
                return None
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    if os.path.samestat(descriptor.stat(), there):
                        return pid
        return None

    def _start(self) -> None:
        self.socket.parent.mkdir(mode=0o700, exist_ok=True)
        log = self.socket.with_name("pccheckd.log")
        with log.open("ab") as out, _STARTS:
            process = subprocess.Popen(
                [sys.executable, "-m", "pccheckd", "--storage", str(self.storage),
                 "--socket", str(self.socket)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the trainer; it drains first
            )  # fmt: skip
        try:
            if self._listens(process):
                LOG.warning(
                    "PCcheck: started a private pccheckd (pid %d, socket %s, log %s). It ends "
                    "after its last trainer. If this container or job step ends before, what is "
                    "not on the disk yet is lost",
                    process.pid, self.socket, log,
                )  # fmt: skip
                # It outlives this process: without a return code Popen warns at exit.
                process.returncode = 0
                return
        except BaseException:  # Ctrl-C: release() finds no daemon that does not listen yet
            process.terminate()
            raise
        if process.poll() is None:
            process.terminate()
        lines = log.read_text(errors="replace").strip().splitlines()
        raise PccheckError(
            f"the private pccheckd did not start: {lines[-1] if lines else 'its log is empty'}",
            hint=f"see its log: {log}",
        )

    def _listens(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the daemon listens before START_LIMIT_S have passed, and before it ends."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if _serves(self.socket, deadline - time.monotonic()) is not None:
                return True
            time.sleep(0.02)
        return False

    def release(self) -> None:
        """Ends the daemon, which drains first, unless another client is connected."""
        _OF_THIS_PROCESS.discard(self)
        if any(other.storage == self.storage for other in _OF_THIS_PROCESS):
            return
        with contextlib.suppress(PccheckError, OSError), contextlib.ExitStack() as held:
            # When the directory was removed, no process looks for its daemon.
            if self.storage.is_dir():  # raises where another user's directory is in the way
                held.enter_context(self._locked())
            # Under the lock: a client that starts now waits, and then starts another daemon.
            try:
                with attach.observe(self.socket, version=VERSION, timeout_s=_PROBE_LIMIT_S) as seen:
                    pid = seen.daemon_pid
                    ends = pid and _is_unused(seen)
            except DaemonUnreachableError:
                if self._socket is not None:  # it was reached there: that socket was removed
                    self._end_unusable()
                return
            if ends:
                os.kill(pid, signal.SIGTERM)
                _await_end(pid, _END_LIMIT_S)


def _open_own(path: Path) -> int:
    """A file that only this user can open, and so lock. Raises NoStoreError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
        try:
            if os.fstat(file).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            os.fchmod(file, 0o600)
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        raise NoStoreError(
            f"cannot open {path}: {error.strerror}",
            hint="choose a directory of your own with storage=",
        ) from error
    return file


def _serves(socket: Path, limit_s: float = START_LIMIT_S) -> str | None:
    """layout.number of the directory that the daemon there serves, "" when that is missing; None
    when none listens. One that starts listens before it has read the records, and answers later."""
    try:
        with attach.observe(socket, version=VERSION, timeout_s=limit_s, storage="?") as seen:
            return seen.welcome.storage
    except DaemonUnreachableError:
        return None


def _is_unused(seen: attach.Attachment) -> bool:
    """Whether no client is connected. The session that this process has just closed may still be
    listed, and is waited for: another process that closes next would count it."""
    deadline = time.monotonic() + _HANG_UP_LIMIT_S
    while True:
        report = seen.request(Status(), timeout_s=_PROBE_LIMIT_S)
        sessions = report.document.get("sessions") if isinstance(report, Report) else None
        if not isinstance(sessions, list):
            return False
        settled = all(isinstance(one, dict) and _is_other(one.get("pid")) for one in sessions)
        if settled or time.monotonic() >= deadline:
            return not sessions
        time.sleep(0.01)


def _await_end(pid: int, limit_s: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        arrivals = select.poll()  # select() takes no descriptor above 1023
        arrivals.register(process, select.POLLIN)
        return bool(arrivals.poll(1000 * limit_s))
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
    """A directory that only this uid can use; short, because socket paths end at 107 bytes. It is
    absolute: the daemon has another working directory."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    root = Path(given) / "pccheck"
    # After `su` or `sudo -E` it is the directory of another user.
    if not _fits(root) or not os.access(f"{given}/.", os.W_OK | os.X_OK):
        given = ""
        root = Path(TEMPORARY) / f"pccheck-{os.getuid()}"
        with contextlib.suppress(OSError):  # no usable one: the error comes below
            chosen = Path(tempfile.gettempdir()) / root.name
            root = chosen if _fits(chosen) else root  # a batch system's may be long
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


def _fits(root: Path) -> bool:
    return root.is_absolute() and len(os.fsencode(root)) <= _ROOT_BYTES_MAX
