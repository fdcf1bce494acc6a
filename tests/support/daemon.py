"""A real pccheckd for tests, with storage, socket and notify socket of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from pccheck_store.observer import Observer
from tests.support import forked
from tests.support.waiting import PATIENCE, suspend, until

READY_LIMIT_S = 240.0 * PATIENCE
STOP_LIMIT_S = 240.0 * PATIENCE
LOOPCHECK = "tests.support.loopcheck"
_HERE = Path(__file__).parent


def build(name: str) -> Path:
    """Compiles a library for LD_PRELOAD, once per checkout; returns its path."""
    source = _HERE / f"{name}.c"
    target = _HERE / "build" / f"{name}.so"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        target.parent.mkdir(exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}.so")
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(fresh), str(source), "-ldl"], check=True
        )
        fresh.rename(target)
    return target


class Daemon:
    """Starts, kills, stops and restarts one daemon on one storage directory.

    The root lies directly under the temporary directory: AF_UNIX paths end at 107 bytes.
    """

    module = LOOPCHECK
    all: ClassVar[set[Daemon]] = set()  #: of this process, until their cleanup

    def __init__(self, *flags: str, shim: str = "", storage: Path | None = None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pcc-"))
        self.storage = storage or self.root / "storage"
        self.storage.mkdir(exist_ok=True)
        self.socket = self.root / "run" / "attach.sock"
        self.flags = flags
        self.shim = shim
        self.log = self.root / "pccheckd.log"
        self.stderr: int | None = None  #: a descriptor that is used instead of the log file
        self.process: subprocess.Popen[bytes] | forked.Forked | None = None
        self.all.add(self)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def open_to_everybody(self) -> None:
        """Lets every user connect, as --group does in the directory of a service."""
        self.root.chmod(0o755)
        self.socket.parent.chmod(0o711)
        self.socket.chmod(0o666)

    @property
    def blocking(self) -> Path:
        """The log of blocking calls on the event loop; see loopcheck.py."""
        return self.root / "blocking"

    @property
    def armed(self) -> Path:
        """The shim acts once this file exists."""
        return self.root / "armed"

    def command(self, *flags: str) -> list[str]:
        return [
            sys.executable, "-m", self.module, "--storage", str(self.storage),
            "--socket", str(self.socket), *self.flags, *flags,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith("PCCHECK_")}
        keep["PCCHECK_CONFIG"] = os.devnull  # not this machine's own
        keep["PCC_LOOP_CHECK"] = str(self.blocking)
        if self.shim:
            keep |= {"LD_PRELOAD": str(build("faultshim")), "PCC_SHIM": self.shim}
            keep["PCC_SHIM_ARM"] = str(self.armed)
        return keep

    def spawn(self, environment: dict[str, str], log: int, *flags: str) -> None:
        """Starts the process: forked from a server, unless another program starts the daemon."""
        python, _, module, *arguments = command = self.command(*flags)
        outputs: dict[str, Any] = {"stdout": log, "stderr": self.stderr or log, "env": environment}
        if (python, module) == (sys.executable, LOOPCHECK):
            self.process = forked.daemon(arguments, **outputs)
        else:
            self.process = subprocess.Popen(command, **outputs)

    def start(self, *flags: str) -> Self:
        """Waits for READY; raises with the log when the daemon ends before."""
        notify = self.root / "notify"
        notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears, self.log.open("ab") as log:
            ears.bind(str(notify))
            ears.settimeout(0.2)
            self.spawn(self.environment() | {"NOTIFY_SOCKET": str(notify)}, log.fileno(), *flags)
            for _ in range(int(READY_LIMIT_S / 0.2)):
                try:
                    if b"READY=1" in ears.recv(4096):
                        return self
                except TimeoutError:
                    if self.process.poll() is not None:
                        break
        raise AssertionError(f"pccheckd did not get ready:\n{self.log.read_text()}")

    def logs(self, text: str) -> None:
        """Waits until the log has the text: a thread writes the log, later than the page of the
        session and the answers."""
        until(lambda: text in self.log.read_text(), self.log.read_text)

    def status(self) -> dict[str, Any]:
        """The document of `pccheckctl status --json`."""
        with Observer(str(self.socket)) as observer:
            return observer.status()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal. After SIGKILL the process has ended on return, and after SIGSTOP it has
        stopped."""
        assert self.process is not None
        if number == signal.SIGSTOP:
            suspend(self.process.pid)
            return
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def wait_end(self, timeout: float = STOP_LIMIT_S) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pccheckd did not end:\n{self.log.read_text()}") from None

    def stop(self) -> int:
        """Sends SIGTERM and waits; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"pccheckd did not stop:\n{self.log.read_text()}") from None

    def cleanup(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        blocking = self.blocking.read_text() if self.blocking.exists() else ""
        shutil.rmtree(self.root, ignore_errors=True)
        self.all.discard(self)
        assert not blocking, blocking

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.cleanup()


Start = Callable[..., Daemon]  #: the fixture `start_daemon`
