"""One round: a target is snapshotted at some step, ends, is restored, and says what the same
target says that was never stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.daemon import Daemon
from tests.support.waiting import until
from tests.transparent.cases import Case
from tests.transparent.ways import LIMIT_S, RefusedError, Taken, Way
from tests.transparent.who import Who

#: A target that goes on is killed when it has written so many more lines.
MORE = 8


@dataclass(frozen=True)
class Outcome:
    """A line of the table."""

    step: int
    taken: Taken | None = None
    restore_s: float = 0.0  #: from the command to the first line of the restored process
    repeated: int = 0  #: lines that are in the log twice: the process went on after the snapshot
    refused: str = ""


class DiffersError(AssertionError):
    """A target did not do what the same target did that was never stopped."""


def whole(case: Case, folder: Path, daemon: Daemon, who: Who) -> list[str]:
    """The lines of a run from beginning to end."""
    with _started(case, folder, daemon, who, "whole") as process:
        _ended(process, folder, 0)
    return _lines(folder / "log")


def snapshotted(
    case: Case, folder: Path, daemon: Daemon, who: Who, way: Way, wanted: list[str], step: int, *,
    goes_on: bool,
) -> Outcome:  # fmt: skip
    """Raises where the lines differ, or anything else went wrong."""
    log, again = folder / "log", folder / "again.out"
    with _started(case, folder, daemon, who, "restored") as process:
        until(lambda: len(_lines(log)) >= step or process.poll() is not None)
        tree = _tree(process.pid)
        try:
            taken = way.take(process.pid, case.name, goes_on=goes_on)
        except RefusedError as error:
            if not case.may_refuse:
                raise
            _ended(process, folder, 0)
            _same(wanted, _lines(log), 0)
            return Outcome(step, refused=str(error))
        if goes_on:
            so_far = len(_lines(log))
            until(lambda: len(_lines(log)) >= so_far + MORE or process.poll() is not None)
            tree += _kill(process.pid)
        _ended(process, folder, -signal.SIGKILL)
        _gone(process.pid, tree)
    so_far, begin = 0 if way.redirects else log.stat().st_size, time.monotonic()
    with _closing(way.restore(case.name, again)) as parent:
        moved = again if way.redirects else log  # a log that grew may be cut before
        until(lambda: _grown(moved, so_far) or parent.poll() is not None, every_s=0.002)
        restore_s = time.monotonic() - begin
        _ended(parent, folder, 0)
    repeated = _same(wanted, _lines(log), MORE * 100 if goes_on else 0)
    outputs = [folder / "out", *([again] if way.redirects else [])]
    said = [line for path in outputs for line in _lines(path)]
    _same(wanted, [line for line in said if line in wanted], len(wanted))
    return Outcome(step, taken, restore_s, repeated)


@contextlib.contextmanager
def _started(
    case: Case, folder: Path, daemon: Daemon, who: Who, job: str
) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own, without a terminal, as under a service manager."""
    environment = who.environment | {
        "PCCHECK_SOCKET": str(daemon.socket), "HOME": str(folder),
        "PCCHECK_JOB": f"{folder.parent.name}-{folder.name}-{job}",
        "OMP_NUM_THREADS": "2" if not case.ranks else "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    for name in ("out", "err"):
        (folder / name).touch()
        os.chown(folder / name, who.uid, who.uid)
    with (folder / "out").open("ab") as output, (folder / "err").open("ab") as errors:
        process = subprocess.Popen(
            case.command(who.python, folder / "log"), cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True,
            **who.process,
        )  # fmt: skip
    with _closing(process):
        yield process


@contextlib.contextmanager
def _closing(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process.pid)
            process.wait()


def _tree(pid: int) -> list[psutil.Process]:
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def _kill(pid: int) -> list[psutil.Process]:
    """Returns whom it has killed."""
    tree = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = _tree(pid)
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return tree


def _gone(session: int, tree: Sequence[psutil.Process]) -> None:
    """Waits until every pid is free, and not only its process dead. The number of a session is
    taken as long as any of its processes is there, and some may be younger than the tree."""

    def left() -> list[object]:
        found: list[object] = [one for one in tree if one.is_running()]
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == session:
                    found.append(pid)
        return found

    until(lambda: not left(), left)


def _ended(process: subprocess.Popen[bytes], folder: Path, wanted: int) -> None:
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = 1000
    if code != wanted:
        said = "\n".join(
            f"--- {name}:\n{path.read_text(errors='replace')[-2000:]}"
            for name in ("err", "restore.err", "images/restore.log")
            if (path := folder / name).exists()
        )
        what = "is still there" if code == 1000 else f"ended with {code}, not {wanted}"
        raise DiffersError(f"{process.args!r} {what}\n{said}")


def _lines(path: Path) -> list[str]:
    """The whole ones."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _grown(path: Path, so_far: int) -> bool:
    return path.exists() and path.stat().st_size > so_far


def _same(wanted: list[str], found: list[str], may_repeat: int) -> int:
    """Returns how many lines are there twice, because the process once went back."""
    at = repeated = 0
    for number, line in enumerate(found):
        if at < len(wanted) and line == wanted[at]:
            at += 1
            continue
        back = at - wanted.index(line) if line in wanted[:at] else 0
        if repeated or not 0 < back <= may_repeat:
            expected = wanted[at] if at < len(wanted) else "the end"
            raise DiffersError(f"line {number + 1} is {line!r} instead of {expected!r}")
        repeated, at = back, at - back + 1
    if at < len(wanted):
        raise DiffersError(f"the lines end before {wanted[at]!r}")
    return repeated
