"""Which processes are held in the driver, on disk before the first is locked: when who holds them
is killed, the next command of this user lets them go on, as a guard does at once.

A file belongs to who has it locked. What a reboot leaves of it means nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pccheck_process.procs.members import member_of
from pccheck_process.procs.procfs import Proc
from pccheck_wire.errors import RefusedError

from .devices import UsedGpus

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = "pccheck-gpu"
_FILES = Proc(Path("/proc"))


@dataclass(frozen=True)
class HeldProcess:
    """By its identity: a pid alone may be used again."""

    pid: int
    start_time: int
    used: UsedGpus
    pairs: tuple[tuple[str, str], ...]  #: old and new UUIDs; none for a driver that takes no map

    @property
    def nbytes(self) -> int:
        return sum(self.used.nbytes.values())

    @property
    def is_there(self) -> bool:
        return is_there(self.pid, self.start_time)


def is_there(pid: int, start_time: int) -> bool:
    """The process has not ended, and its pid is not another's."""
    member = member_of(_FILES, pid)
    return member is not None and member.stat.start_time == start_time and member.runs


@dataclass
class HoldJournal:
    """One file. `close(done=True)` removes it; otherwise it stays for others."""

    path: Path
    descriptor: int
    processes: tuple[HeldProcess, ...]

    def close(self, *, done: bool) -> None:
        if done:
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def places() -> list[Path]:
    """Where this user's files may be, the best first: another login may have had another place."""
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    roots = [Path(runtime)] if runtime else []
    roots += [Path("/run")] if uid == 0 else [Path(f"/run/user/{uid}")]
    found = [root / _NAME for root in roots if _is_ours(root)]
    return [*dict.fromkeys(found), Path(f"/tmp/{_NAME}-{uid}")]


def _is_ours(place: Path) -> bool:
    """A directory that nobody else may have prepared."""
    try:
        about = place.lstat()
    except OSError:
        return False
    closed = not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and closed


def write(processes: Sequence[HeldProcess]) -> HoldJournal:
    """Raises RefusedError where no file can be written."""
    document = {"schema": 1, "boot": _boot(), "processes": [asdict(one) for one in processes]}
    tried = []
    for place in places():
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(place):
                return _written(place / f"{os.getpid()}-{processes[0].pid}", document, processes)
        except OSError as error:
            tried.append(str(error))
    raise RefusedError(
        f"nothing can be noted below {', '.join(map(str, places()))}: {'; '.join(tried)}",
        hint="set XDG_RUNTIME_DIR to a directory of yours",
    )


def _written(
    path: Path, document: Mapping[str, Any], processes: Sequence[HeldProcess]
) -> HoldJournal:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(document).encode())
    except OSError:
        os.close(descriptor)
        raise
    return HoldJournal(path, descriptor, tuple(processes))


def left() -> Iterator[HoldJournal]:
    """Those of dead holders, locked by this process now; who gets one closes it."""
    for path in _paths():
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if _locked(descriptor):
                yield HoldJournal(path, descriptor, _read(descriptor))
            else:
                os.close(descriptor)


def busy() -> list[HeldProcess]:
    """What living commands of this user hold, or their guards."""
    found: list[HeldProcess] = []
    for path in _paths():
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            found += [] if _locked(descriptor) else _read(descriptor)
            os.close(descriptor)
    return found


def _paths() -> list[Path]:
    return [path for place in places() if _is_ours(place) for path in sorted(place.iterdir())]


def _locked(descriptor: int) -> bool:
    """Whether nobody else has it; then this process has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def opened(path: Path, descriptor: int) -> HoldJournal:
    """For a guard, which has inherited the descriptor and the lock."""
    return HoldJournal(path, descriptor, _read(descriptor))


def _read(descriptor: int) -> tuple[HeldProcess, ...]:
    """Those that are still there. Empty for what a crash of the machine left."""
    try:
        document = json.loads(os.pread(descriptor, 1 << 20, 0))
        if document["boot"] != _boot():
            return ()
        found = [_process(one) for one in document["processes"]]
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(one for one in found if one.is_there)


def _process(plain: Mapping[str, Any]) -> HeldProcess:
    used = UsedGpus(tuple(plain["used"]["seen"]), dict(plain["used"]["nbytes"]))
    pairs = tuple((str(old), str(new)) for old, new in plain["pairs"])
    return HeldProcess(int(plain["pid"]), int(plain["start_time"]), used, pairs)


def _boot() -> str:
    return _BOOT.read_text().strip()
