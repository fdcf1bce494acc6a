"""Programs that know nothing of PCcheck, and the commands that take and restore them. Each counts
in a file, a line for each number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import criu
from tests.support.daemon import Daemon
from tests.support.waiting import until

#: Counts as fast as it can sleep, and fills some memory, so that pages differ.
COUNTER = """
import os, sys, time
memory = bytearray(os.urandom(1 << 20)) * {mib}
number, path = 0, sys.argv[1]
with open(path, {mode!r}, buffering=1) as log:
    {setup}
    while number < {last}:
        number += 1
        log.write(f"{{number}}\\n")
        time.sleep(0.005)
sys.exit({code})
"""


class Counter:
    """A counting process, the leader of a session of its own, with its descriptors closed."""

    def __init__(
        self, root: Path, *, mib: int = 4, mode: str = "a", setup: str = "pass", code: int = 0,
        last: int = 1 << 60, prefix: tuple[str, ...] = (), python: str = sys.executable,
    ) -> None:  # fmt: skip
        self.log = root / "log"
        self.output = root / "output"
        text = COUNTER.format(mib=mib, mode=mode, setup=setup, code=code, last=last)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*prefix, python, "-c", text, str(self.log)], stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True, cwd=root,
            )  # fmt: skip
        self.pid = self.process.pid
        self.moves()

    @property
    def numbers(self) -> list[int]:
        if not self.log.exists():
            return []
        lines = self.log.read_text().split("\n")[:-1]
        return [int(line) for line in lines]

    def moves(self, by: int = 3) -> None:
        """Waits until it has counted on."""
        before = len(self.numbers)
        until(lambda: len(self.numbers) >= before + by, lambda: self.output.read_text())

    def ended(self) -> int:
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Commands:
    """`pccheckctl` against a daemon, as a user types it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.errors = daemon.root / "errors"  #: what the command that was started last says
        try:
            program = criu.program()
        except (OSError, AssertionError) as error:  # the mirror does not answer
            pytest.skip(f"CRIU cannot be fetched: {error}")
        self.environment = os.environ | {"PCCHECK_CRIU": str(program)}

    def line(self, *words: object) -> list[str]:
        command = [sys.executable, "-m", "pccheckctl", "--socket", str(self.daemon.socket)]
        return [*command, *map(str, words)]

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.line(*words), env=self.environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=200, check=False,
        )  # fmt: skip

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        with self.errors.open("wb") as errors:
            return subprocess.Popen(
                self.line(*words), env=self.environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip

    def snapshot(self, pid: int, *words: object) -> Any:
        """The document of one that is durable."""
        done = self.run("snapshot", pid, "--name", "job", "--json", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def restored(self, log: Counter, *words: object) -> subprocess.Popen[bytes]:
        """restore-process, once its process counts on; the caller ends it."""
        command = self.start("restore-process", "job", *words)
        before = len(log.numbers)
        until(lambda: len(log.numbers) > before or command.poll() is not None)
        if command.poll() is not None and len(log.numbers) == before:
            raise AssertionError(self.errors.read_text())
        return command


def end(command: subprocess.Popen[bytes]) -> int:
    """Passes a signal on to the restored process; the exit code that comes back."""
    command.send_signal(signal.SIGTERM)
    return command.wait(60)


def state_of(pid: int) -> str:
    """Of the process: "R", "S", "T", "t"; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
