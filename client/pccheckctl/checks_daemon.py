"""Checks of the daemon: can it be reached by this user, is it the same version, does it pull."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import platform
import pwd
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from pccheck_wire.basics import socket_name
from pccheck_wire.errors import DaemonUnreachableError, PccheckError

from . import VERSION, config, render
from .findings import Finding, ok, problem, warning
from .online import Observer
from .output import Document, number, part, rows, text, texts, whole

DEVICES = Path("/dev")


class Answer:
    """What the daemon said, or why it said nothing."""

    def __init__(self, socket: str | None) -> None:
        self.path = Path(socket_name(socket))
        self.status: Document = {}
        self.warnings: list[str] = []  # of its environment
        self.error: PccheckError | None = None
        try:
            with Observer(socket) as observer:
                self.status = observer.status()
                with contextlib.suppress(PccheckError):
                    self.warnings = texts(observer.config(), "warnings")
        except PccheckError as error:
            self.error = error

    @property
    def uid(self) -> int | None:
        """The daemon's user, by its socket."""
        try:
            return self.path.stat().st_uid if self.status else None
        except OSError:
            return None

    @property
    def storage(self) -> str:
        return text(part(self.status, "storage"), "path")


def reachable(answer: Answer) -> Iterator[Finding]:
    daemon = part(answer.status, "daemon")
    if answer.error is not None:
        gone = isinstance(answer.error, DaemonUnreachableError)
        yield problem(
            "daemon", answer.error.message,
            costs="checkpoints fail until it is there; training goes on without them"
            if gone else "this user's checkpoints fail; training goes on without them",
            mend=answer.error.hint or "see its log",
        )  # fmt: skip
        return
    theirs = text(daemon, "version")
    up = render.duration(number(daemon, "uptime_s") or 0)
    told = f"pccheckd {theirs}, pid {text(daemon, 'pid')}, up {up}, at {answer.path}"
    if theirs != VERSION:
        yield warning(
            "daemon", f"{told}; this is pccheckctl {VERSION}",
            costs="what one of them does not know is refused by name; nothing is misread",
            mend="install the same version for both, and restart the older",
        )  # fmt: skip
    else:
        yield ok("daemon", told)
    for line in texts(answer.status, "warnings"):
        yield warning(
            "daemon", line, costs="the daemon is degraded: see pccheckctl status",
            mend="the daemon's log has the cause", promise="as its text says",
        )  # fmt: skip
    keep = whole(daemon, "keep")
    if keep == 1:
        yield warning(
            "daemon", "it keeps one durable checkpoint (--keep 1)",
            costs="if a sector of that one rots, there is none before it to fall back to",
            mend="--keep 2 and one more of --slots", promise="newest wins",
        )  # fmt: skip


def socket_access(answer: Answer) -> Iterator[Finding]:
    """Owner, group and mode of the socket and its directory, as this user meets them."""
    directory = answer.path.parent
    try:
        place = directory.stat()
    except PermissionError:
        yield _closed(directory, None)
        return
    except OSError:
        yield warning(
            "socket", f"there is no directory {directory}",
            costs="no pccheckd has ever listened there",
            mend="start it, or name its socket: --socket PATH or PCCHECK_SOCKET",
        )  # fmt: skip
        return
    told = f"{directory} is {_who(place)}, {stat.filemode(place.st_mode)}"
    if not os.access(directory, os.X_OK):
        yield _closed(directory, place)
        return
    if place.st_mode & stat.S_IWOTH and not place.st_mode & stat.S_ISVTX:
        yield warning(
            "socket", f"{told}: everybody may write there",
            costs="any user can put a socket of his own in the daemon's place",
            mend=f"chmod 0750 {directory}", promise="apart",
        )  # fmt: skip
        return
    if answer.path.exists() and not os.access(answer.path, os.R_OK | os.W_OK):
        yield _closed(answer.path, answer.path.stat())
        return
    yield ok("socket", f"{told}; uid {os.geteuid()} may connect")


def _closed(place: Path, found: os.stat_result | None) -> Finding:
    owner = _who(found) if found else "not ours to see"
    group = _group(found.st_gid) if found else "pccheck"
    user = _user(os.geteuid())
    return problem(
        "socket", f"{user} may not use {place}: it is {owner}, and {user} is in {_mine()}",
        costs="this user cannot connect: no checkpoints",
        mend=f"usermod -aG {group} {user}, then log in again; or start a pccheckd of your own",
    )  # fmt: skip


def _who(found: os.stat_result) -> str:
    return f"{_user(found.st_uid)}'s, group {_group(found.st_gid)}"


def _mine() -> str:
    groups = sorted({os.getegid(), *os.getgroups()})
    return "group " + ", ".join(_group(number) for number in groups[:6])


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return f"gid {number}"


def environment(answer: Answer) -> Iterator[Finding]:
    """Variables of ours that nobody reads, here and where the daemon was started."""
    names = ", ".join(sorted(name for name in os.environ if name.startswith("PCCHECK_")))
    here = texts(config.check([]), "warnings")
    costs = "what it was to set stays as it is"
    for line in here:
        yield warning("environment", line, costs=costs, mend="correct its name, or unset it")
    for line in answer.warnings:
        yield warning(
            "environment", f"of the daemon: {line}", costs=costs,
            mend="correct it in the unit or script that starts pccheckd, and restart it",
        )  # fmt: skip
    if not here and not answer.warnings:
        yield ok("environment", f"set here: {names or 'no PCCHECK_* variable'}")


def pool(answer: Answer) -> Iterator[Finding]:
    found = part(answer.status, "pool")
    if found:
        budget, used = whole(found, "budget_bytes"), whole(found, "used_bytes")
        yield ok("pool", f"{render.size(used)} used of {render.size(budget)}")


def cuda(answer: Answer) -> Iterator[Finding]:
    """Whether GPUs can be pulled from, and why not. The driver is loaded, not begun: nothing is
    made on a GPU."""
    devices = sorted(path.name for path in DEVICES.glob("nvidia[0-9]*"))
    if not _has_driver():
        if not devices:
            yield ok("cuda", "no driver here (libcuda.so.1) and no GPU: tensors are the CPU's")
        else:
            yield warning(
                "cuda", f"{', '.join(devices)} without a driver (libcuda.so.1)",
                costs="neither training nor pccheckd can use them",
                mend="install the driver; in a container, pass its libraries (nvidia runtime)",
            )  # fmt: skip
        return
    yield from _pinning(platform.release())
    daemon = part(answer.status, "daemon")
    transfer, reason = text(daemon, "transfer"), text(daemon, "transfer_reason")
    if not daemon:
        yield ok("cuda", f"driver found, {render.plural(len(devices), 'GPU')}; no daemon to ask")
        return
    owner, user = answer.uid, os.geteuid()
    if transfer != "pull":
        yield warning(
            "cuda", f"the daemon does not pull: {reason or 'it does not say why'}",
            costs="GPU tensors are pushed by the training process, which takes its CPU time",
            mend="let pccheckd see driver and GPUs (/dev/nvidia*); it tries again by itself",
        )  # fmt: skip
        yield from _device_files()
    elif owner not in (None, 0, user):
        yield warning(
            "cuda", f"the daemon runs as {_user(owner or 0)}, this user is {_user(user)}",
            costs="the driver may refuse to open another user's GPU memory; then tensors are "
            "pushed by the training process",
            mend="run pccheckd as the training user, or as root (the unit's CUDA drop-in)",
        )  # fmt: skip
    else:
        yield ok("cuda", f"the daemon pulls: {reason}")
    for session in rows(answer.status, "sessions"):
        why = text(session, "transfer_reason")
        if text(session, "transfer") == "push" and why not in ("", "CPU tensors", "a reader"):
            yield warning(
                "cuda", f"job {text(session, 'job')} rank {text(session, 'rank')} pushes: {why}",
                costs="its copies take the training process's CPU time", mend="see the reason",
            )  # fmt: skip


def _pinning(release: str) -> Iterator[Finding]:
    version = re.match(r"(\d+)\.(\d+)", release)
    if version and (6, 11) <= (int(version[1]), int(version[2])) <= (6, 13):
        yield warning(
            "cuda", f"Linux {release}: kernels from 6.11 to 6.13 are reported to leak or refuse "
            "memory that is pinned for GPUs for long",
            costs="the pool may not be pinned; GPU tensors are pushed then, slowly",
            mend="run 6.10 or older, or 6.14 or newer",
        )  # fmt: skip


def _device_files() -> Iterator[Finding]:
    """What CUDA opens, as this process sees it."""
    lacking = [name for name in ("nvidiactl", "nvidia-uvm") if not (DEVICES / name).exists()]
    if lacking:
        yield warning(
            "cuda", f"{' and '.join(f'{DEVICES}/{name}' for name in lacking)} not there",
            costs="no CUDA program works before they are", mend="nvidia-modprobe -c 0 -u, as root",
        )  # fmt: skip


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
