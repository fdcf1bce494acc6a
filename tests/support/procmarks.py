"""What can be seen of a snapshot from outside: whose processes are there, how far CRIU is, and who
holds the target. Everything is read in /proc; nobody is stopped for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.counting import state_of
from tests.support.waiting import PATIENCE

#: What has not happened by then is wrong; much less than any test's own limit.
SOON_S = 60.0 * PATIENCE
#: In the environment of everything that a round starts, and of what that starts.
MARK = "PCC_ROUND_MARK"
#: Of x86-64: in these CRIU waits for the reader of its pages, and its target is in no system call
#: of CRIU's: only here may CRIU be killed. The second number is the argument that is a pipe.
_PAGES = {275: 3, 1: 1}  # splice, write
_LOOK_S = 0.001


def soon(holds: Callable[[], object], what: Callable[[], object], limit_s: float = SOON_S) -> None:
    """Raises AssertionError with `what` when it does not hold within the limit."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, what()
        time.sleep(_LOOK_S * 5)


def marked(mark: str) -> set[int]:
    """Every process that has the mark and lives."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for place in Path("/proc").iterdir():
        if place.name.isdecimal() and wanted in _bytes(place / "environ").split(b"\0"):
            found.add(int(place.name))
    return {pid for pid in found if state_of(pid) not in ("", "Z", "X")}


def described(pids: set[int]) -> str:
    return "; ".join(f"{pid} {state_of(pid)} {' '.join(words_of(pid))[:160]!r}" for pid in pids)


def words_of(pid: int) -> list[str]:
    """Its command line; none when it has ended."""
    return _bytes(Path(f"/proc/{pid}/cmdline")).decode(errors="replace").split("\0")[:-1]


def children(pid: int) -> list[int]:
    return [*map(int, _bytes(Path(f"/proc/{pid}/task/{pid}/children")).split())]


def criu_of(command: int) -> int:
    """The CRIU that a command has started; 0 without one."""
    return next(filter(is_criu, children(command)), 0)


def is_criu(pid: int) -> bool:
    return Path((words_of(pid) or [""])[0]).name == "criu"


def at_hook(command: int) -> bool:
    """Whether CRIU has written everything, and waits for the record."""
    criu = criu_of(command)
    return bool(criu) and any("/hook" in " ".join(words_of(pid)) for pid in children(criu))


def tracer_of(pid: int) -> int:
    """Who holds the process, as CRIU holds its target; 0 for nobody."""
    for line in _bytes(Path(f"/proc/{pid}/status")).decode(errors="replace").splitlines():
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    return 0


def kill_in_pages(criu: int) -> bool:
    """Kills CRIU if it waits for the reader of its pages; looked at while it is stopped."""
    try:
        os.kill(criu, signal.SIGSTOP)
        while state_of(criu) not in ("T", "Z", ""):
            time.sleep(_LOOK_S / 10)
        if safe := _in_pages(criu):
            os.kill(criu, signal.SIGKILL)
        os.kill(criu, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return safe


def _in_pages(pid: int) -> bool:
    told = _bytes(Path(f"/proc/{pid}/syscall")).split()
    if len(told) < 7 or not told[0].isdigit() or int(told[0]) not in _PAGES:
        return False
    descriptor = int(told[_PAGES[int(told[0])]], 16)
    try:
        return str(Path(f"/proc/{pid}/fd/{descriptor}").readlink()).startswith("pipe:")
    except OSError:
        return False


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
