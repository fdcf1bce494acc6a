"""CRIU, the program that freezes a process and makes it again: found, started and read. Its pipes
are cut first, and it is killed only if it still runs 10 s later."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pccheck_wire.basics import Closing, arrives
from pccheck_wire.errors import CheckpointFailedError, PccheckError, RefusedError

VARIABLE = "PCCHECK_CRIU"
#: Older ones refuse every process with an inet socket on kernels from 6.16.
LEAST = (4, 2)
#: CAP_SETPCAP and CAP_CHECKPOINT_RESTORE, as bits.
CAPABILITIES = 1 << 8 | 1 << 40
INSTALL_HINT = (
    "install criu 4.2 or newer (Debian: apt install -t sid criu), or name it in " + VARIABLE
)
_PLACES = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin")
#: After its pipes are cut CRIU lets its target go on by itself; only then is it killed.
CUT_LIMIT_S = 10.0
#: A target whose pipes bring nothing for so long is let go, and a receiver that gives no sign of
#: life for so long is ended. The variable is for tests.
STALL_LIMIT_S = float(os.environ.get("PCC_SNAPSHOT_STALL_S", "30"))
_LOOK_S = 0.02
_LOG = "criu.log"
_LOG_TAIL_BYTES = 1 << 16
_DUMPED, _DURABLE = "pccheck: dumped", b"durable\n"
#: Runs when CRIU has written everything, before it kills or resumes its target: says so, and waits
#: for the answer. CRIU closes every other descriptor of a hook, and gives it its log, which is a
#: socket here. The end of the process at the other end is a no.
_HOOK = f"""#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
echo "{_DUMPED}"
read answer <&1
[ "$answer" = durable ]
"""


def find() -> Path:
    """The program. Raises RefusedError when there is none that is new enough."""
    given = os.environ.get(VARIABLE)
    found = given or shutil.which(
        "criu", path=os.pathsep.join([os.environ.get("PATH", ""), *_PLACES])
    )
    if not found:
        raise RefusedError("criu is not installed", hint=INSTALL_HINT)
    try:
        said = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"{found} cannot be run: {error}", hint=INSTALL_HINT) from error
    version = re.search(r"Version: (\d+)\.(\d+)(\S*)", said)
    if version is None:
        raise RefusedError(f"{found} is not criu", hint=INSTALL_HINT)
    if (int(version[1]), int(version[2])) < LEAST:
        text = f"{version[1]}.{version[2]}{version[3]}"
        raise RefusedError(f"{found} is criu {text}, which is too old", hint=INSTALL_HINT)
    return Path(found)


def require_capabilities(program: Path) -> None:
    """An ordinary user needs them on the program, or hands them down. Raises RefusedError."""
    if os.geteuid() == 0:
        return
    with contextlib.suppress(OSError):
        if os.getxattr(program, "security.capability"):
            return
    status = Path("/proc/self/status").read_text()
    ambient = int(re.findall(r"^CapAmb:\s*(\S+)", status, re.MULTILINE)[0], 16)
    if ambient & CAPABILITIES == CAPABILITIES:
        return
    raise RefusedError(
        f"{program} may not save processes of ordinary users",
        hint=f"as root: setcap cap_checkpoint_restore,cap_setpcap+ep {program}",
    )


class CriuError(CheckpointFailedError):
    """CRIU did not do what it was asked for; its target goes on."""


class PrivatePlace(Closing):
    """A private directory for CRIU's sockets, hook and log. No image is ever in it. A process
    beside this one removes it, also when this one is killed."""

    def __init__(self) -> None:
        """Raises RefusedError."""
        self.path = _private_directory()
        reading, self._life = os.pipe()
        self._remover = os.fork()
        if self._remover == 0:
            os.setsid()
            _remove_after(reading, self.path)
        os.close(reading)

    def hook(self) -> Path:
        path = self.path / "hook"
        path.write_text(_HOOK)
        path.chmod(0o700)
        return path

    @property
    def log(self) -> Path:
        return self.path / _LOG

    def close(self) -> None:
        os.close(self._life)
        os.waitpid(self._remover, 0)


def _private_directory() -> Path:
    roots = [tempfile.gettempdir(), "/var/tmp", str(Path.home())]
    for root in roots:
        with contextlib.suppress(OSError):
            if not os.statvfs(root).f_flag & os.ST_NOEXEC:  # the hook is a script
                return Path(tempfile.mkdtemp(prefix="pccheck-criu-", dir=root))
    raise RefusedError(
        f"programs may not be run in any of {', '.join(roots)}",
        hint="set TMPDIR to a directory on a file system without noexec",
    )


def _remove_after(life: int, path: Path) -> None:
    """In the child; never returns. CRIU may write into the directory until it has ended."""
    try:
        _close_all_but(life)
        os.read(life, 1)
        deadline_s = time.monotonic() + CUT_LIMIT_S
        while path.exists() and time.monotonic() < deadline_s:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    for descriptor in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in kept:  # pipes of CRIU above all
            with contextlib.suppress(OSError):
                os.close(descriptor)


def command(program: Path, verb: str, place: PrivatePlace, options: Sequence[str]) -> list[str]:
    line = [str(program), verb, "--stream", "-D", str(place.path), "-v2", *options]
    return line if os.geteuid() == 0 else [*line, "--unprivileged"]


def environment() -> dict[str, str]:
    """Of CRIU and its hook: nothing of the caller's secrets."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}


def reason_in(log: str) -> str:
    """The first error in a log of CRIU; "" if it has none."""
    errors = [line.partition("Error ")[2] for line in log.splitlines() if "Error (" in line]
    # What CRIU says of a limit that it cannot raise is no failure.
    told = [text for text in errors if "RLIMIT_NOFILE" not in text]
    return re.sub(r"^\(\S+\): *", "", told[0]).strip() if told else ""


class Dump:
    """`criu dump`, which waits at its hook until it is told that the image is durable."""

    def __init__(
        self, program: Path, place: PrivatePlace, pid: int, options: Sequence[str]
    ) -> None:
        """Raises RefusedError."""
        self._socket, theirs = socket.socketpair()
        self._log = b""
        hook = ["--action-script", str(place.hook())]
        line = command(program, "dump", place, ["-t", str(pid), *hook, *options])
        try:
            self._process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs.fileno(),
                start_new_session=True, env=environment(),
            )  # fmt: skip
        except OSError as error:
            self._socket.close()
            raise RefusedError(f"{program} cannot be run: {error}") from error
        finally:
            theirs.close()

    @property
    def dumped(self) -> bool:
        """CRIU has written everything, and waits."""
        return _DUMPED.encode() in self._log.splitlines()

    def poll(self, limit_s: float) -> bool:
        """Waits for news. True when CRIU has dumped everything, or has ended."""
        if not arrives(self._socket, limit_s):
            return False
        try:
            data = self._socket.recv(_LOG_TAIL_BYTES)
        except ConnectionResetError:
            data = b""
        self._log = (self._log + data)[-_LOG_TAIL_BYTES:]
        return not data or self.dumped

    def go_on(self) -> None:
        """The image is durable: CRIU ends its target, or lets it go on with --leave-running."""
        with contextlib.suppress(OSError):  # CRIU has ended: its exit status says so
            self._socket.sendall(_DURABLE)

    def finish(self, limit_s: float) -> int:
        """CRIU's exit status. Without `go_on` the target goes on. After the limit CRIU is killed,
        which may end its target: so it is the last thing that is tried."""
        deadline_s = time.monotonic() + limit_s
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        while self._process.poll() is None:
            if time.monotonic() > deadline_s:
                self._process.kill()
            self.poll(_LOOK_S)
        self._socket.close()
        return int(self._process.returncode)

    def error(self, what: str) -> PccheckError:
        reason = reason_in(self._log.decode(errors="replace"))
        return CriuError(f"{what}: {reason}" if reason else what)


class Watchdog(Closing):
    """A process beside this one, which kills it when it stops to give signs of life: a receiver
    that is stopped freezes CRIU's target for ever, one that is dead does not."""

    def __init__(self) -> None:
        reading, self._life = os.pipe()
        os.set_blocking(self._life, False)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._life)
            os.setsid()
            _watch(os.getppid(), reading, STALL_LIMIT_S)
        os.close(reading)

    def lives(self) -> None:
        """Raises CheckpointFailedError when nobody would notice the end of this process."""
        try:
            os.write(self._life, b".")
        except BlockingIOError:
            pass  # it has not read the last signs yet
        except BrokenPipeError as error:
            raise CheckpointFailedError("the watchdog of the snapshot has ended") from error

    def close(self) -> None:
        os.close(self._life)
        os.waitpid(self._pid, 0)


def _watch(pid: int, life: int, limit_s: float) -> None:
    """In the child; never returns."""
    try:
        watched = os.pidfd_open(pid)
        _close_all_but(life, watched)
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if arrives(life, 1.0):
                if not os.read(life, 4096):
                    os._exit(0)
                deadline_s = time.monotonic() + limit_s
        signal.pidfd_send_signal(watched, signal.SIGKILL)
    finally:
        os._exit(1)
