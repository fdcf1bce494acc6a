"""How a snapshot is taken and restored: by pccheckctl, or by CRIU alone, into a directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.support.daemon import Daemon
from tests.transparent.cases import Case
from tests.transparent.who import Who

LIMIT_S = 180.0
CAPABILITIES = "cap_checkpoint_restore,cap_setpcap+ep"


class RefusedError(Exception):
    """No snapshot was taken; the text says why."""


@dataclass(frozen=True)
class Taken:
    """Of a snapshot that is durable."""

    bytes: int
    pause_s: float
    durable_s: float


class Way(Protocol):
    """Both."""

    #: Whether the output of a restored process goes to a file that the caller names.
    redirects: bool

    def take(self, pid: int, name: str, *, goes_on: bool) -> Taken: ...
    def restore(self, name: str, output: Path) -> subprocess.Popen[bytes]:
        """Stays until the restored process has ended, and returns its exit code."""


class Ctl:
    """`pccheckctl snapshot` and `pccheckctl restore-process`."""

    redirects = True

    def __init__(self, case: Case, daemon: Daemon, criu: Path, folder: Path, who: Who) -> None:
        self._socket, self._who = str(daemon.socket), who
        self._environment = who.environment | {"PCCHECK_CRIU": str(criu)}
        self._errors = folder / "restore.err"

    def take(self, pid: int, name: str, *, goes_on: bool) -> Taken:
        words = ["--leave-running"] if goes_on else []
        done = subprocess.run(
            self._command("snapshot", str(pid), "--tree", "--name", name, "--json", *words),
            env=self._environment, capture_output=True, text=True, timeout=LIMIT_S,
            **self._who.process,
        )  # fmt: skip
        if done.returncode:
            raise RefusedError(
                f"exit code {done.returncode}: {_sentence(done.stdout, done.stderr)}"
            )
        told = json.loads(done.stdout)
        return Taken(told["bytes"], told["pause_s"], told["durable_s"])

    def restore(self, name: str, output: Path) -> subprocess.Popen[bytes]:
        with self._errors.open("wb") as errors:
            return subprocess.Popen(
                self._command("restore-process", name, "--stdout", str(output)),
                env=self._environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                **self._who.process,
            )  # fmt: skip

    def _command(self, *words: str) -> list[str]:
        return [self._who.python, "-m", "pccheckctl", "--socket", self._socket, *words]


class Alone:
    """CRIU into a directory, and a sync: what a user without PCcheck has. Where the user is not
    root, the program gets two capabilities by its file."""

    redirects = False

    def __init__(self, case: Case, daemon: Daemon, criu: Path, folder: Path, who: Who) -> None:
        self._criu, self._options, self._who = criu, case.criu, who
        self._folder = who.own(folder / "images")
        if who.uid:
            self._options += ("--unprivileged",)
            self._criu = Path(shutil.copy(criu, folder / "criu"))
            subprocess.run(["setcap", CAPABILITIES, self._criu], check=True)
        self._errors = folder / "restore.err"

    def take(self, pid: int, name: str, *, goes_on: bool) -> Taken:
        place = self._who.own(self._folder / name)
        words = ["--leave-running"] if goes_on else []
        begin = time.monotonic()
        done = subprocess.run(
            [str(self._criu), "dump", "-t", str(pid), *words, *self._where(place, "dump.log")],
            capture_output=True, text=True, timeout=LIMIT_S, **self._who.process,
        )  # fmt: skip
        if done.returncode:
            raise RefusedError(_errors(self._folder / "dump.log") or done.stderr[-2000:])
        pause_s = _frozen_s(place)
        for path in place.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        durable_s = time.monotonic() - begin
        return Taken(sum(path.stat().st_size for path in place.iterdir()), pause_s, durable_s)

    def restore(self, name: str, output: Path) -> subprocess.Popen[bytes]:
        place = self._folder / name
        with self._errors.open("wb") as errors:
            return subprocess.Popen(
                [str(self._criu), "restore", *self._where(place, "restore.log")],
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, **self._who.process,
            )  # fmt: skip

    def _where(self, place: Path, log: str) -> list[str]:
        return ["-D", str(place), "-o", str(self._folder / log), "-v2", *self._options]


WAYS: dict[str, type[Ctl] | type[Alone]] = {"pccheckctl": Ctl, "criu": Alone}


def _sentence(output: str, errors: str) -> str:
    """Of the JSON document that says why; else all that was printed."""
    for text in (output, errors):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(text)["error"]
            return f"{told['message']}\n{told['hint']}"
    return (errors or output).strip()[-2000:]


def _errors(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(
        line for line in lines if "Error" in line and "RLIMIT_NOFILE for self" not in line
    )


def _frozen_s(place: Path) -> float:
    """CRIU's own measure: frozen_time of stats-dump (field 2, a varint, in us)."""
    data = (place / "stats-dump").read_bytes()[12:]  # two magic numbers and a length
    at = data.index(b"\x10") + 1
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        if not data[at] & 0x80:
            return value / 1e6
        at, shift = at + 1, shift + 7
