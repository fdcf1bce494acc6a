"""Checks of the daemon: can this user reach it, is it the same version, is it well."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from pccheck_wire.basics import socket_name
from pccheck_wire.errors import DaemonUnreachableError, PccheckError
from pccheckctl import VERSION
from pccheckctl.commands import config
from pccheckctl.output import render
from pccheckctl.output.documents import Document, number, part, text, texts, whole
from pccheckctl.source.observer import Observer

from .finding import Finding, ok, problem, warning


class Answer:
    """The daemon's status, or the error that it, or the lack of it, gave."""

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
    if answer.error is not None:
        gone = isinstance(answer.error, DaemonUnreachableError)
        yield problem(
            "daemon", answer.error.message,
            costs="training goes on without checkpoints"
            + (" until pccheckd runs" if gone else " for this user"),
            mend=answer.error.hint or "read the log of pccheckd",
        )  # fmt: skip
        return
    daemon, pool = part(answer.status, "daemon"), part(answer.status, "pool")
    theirs = text(daemon, "version")
    up = render.duration(number(daemon, "uptime_s") or 0)
    used, budget = (render.size(whole(pool, f"{key}_bytes")) for key in ("used", "budget"))
    found = (
        f"pccheckd {theirs}, pid {text(daemon, 'pid')}, up {up}, at {answer.path}; "
        f"DRAM pool: {used} used of {budget}"
    )
    if theirs == VERSION:
        yield ok("daemon", found)
    else:
        yield warning(
            "daemon", f"{found}; this is pccheckctl {VERSION}",
            costs="requests that only one of the versions knows are refused; nothing is misread",
            mend="install the same version of both, and restart the older one",
        )  # fmt: skip
    for line in texts(answer.status, "warnings"):
        yield warning(
            "daemon", line, costs="pccheckd is degraded: see pccheckctl status",
            mend="the log of pccheckd has the cause", promise="see the warning",
        )  # fmt: skip
    if whole(daemon, "keep") == 1:
        yield warning(
            "daemon", "pccheckd keeps only one durable checkpoint (--keep 1)",
            costs="if a sector of that checkpoint fails, there is no older one to recover",
            mend="--keep 2, and one more in --slots", promise="newest wins",
        )  # fmt: skip


def socket_access(socket: Path) -> Iterator[Finding]:
    """Owner, group and mode of the socket and of its directory, for this user."""
    directory = socket.parent
    try:
        place = directory.stat()
    except PermissionError:
        yield _closed(directory, None)
        return
    except OSError:
        yield warning(
            "socket", f"there is no directory {directory}",
            costs="no pccheckd has ever listened there: training goes on without checkpoints",
            mend="start pccheckd, or name its socket: --socket PATH or PCCHECK_SOCKET",
        )  # fmt: skip
        return
    if not os.access(directory, os.X_OK):
        yield _closed(directory, place)
    elif place.st_mode & stat.S_IWOTH and not place.st_mode & stat.S_ISVTX:
        yield warning(
            "socket", f"everybody may write to {directory}",
            costs="any user can replace the daemon's socket with another one",
            mend=f"chmod 0750 {directory}", promise="apart",
        )  # fmt: skip
    elif socket.exists() and not os.access(socket, os.R_OK | os.W_OK):
        yield _closed(socket, socket.stat())
    else:
        yield ok("socket", f"{directory} ({_owner(place)}): uid {os.geteuid()} may connect")


def _closed(place: Path, found: os.stat_result | None) -> Finding:
    user = _name(os.geteuid(), user=True)
    group = _name(found.st_gid) if found else "pccheck"
    mine = ", ".join(_name(gid) for gid in sorted({os.getegid(), *os.getgroups()})[:6])
    owner = f" ({_owner(found)})" if found else ""
    return problem(
        "socket", f"user {user} (groups: {mine}) may not use {place}{owner}",
        costs="training of this user goes on without checkpoints",
        mend=f"usermod -aG {group} {user}, then log in again; or start a pccheckd of your own",
    )  # fmt: skip


def _owner(found: os.stat_result) -> str:
    user, group = _name(found.st_uid, user=True), _name(found.st_gid)
    return f"owner {user}, group {group}, mode {stat.filemode(found.st_mode)}"


def _name(number: int, *, user: bool = False) -> str:
    """Of a user or a group; its number where it has no name."""
    try:
        return pwd.getpwuid(number).pw_name if user else grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def environment(answer: Answer) -> Iterator[Finding]:
    """PCCHECK_* variables that nothing reads, here and where the daemon was started."""
    here, costs = texts(config.check([]), "warnings"), "the variable has no effect"
    for line in here:
        yield warning("environment", line, costs=costs, mend="correct the name, or unset it")
    for line in answer.warnings:
        mend = "correct the unit or script that starts pccheckd; restart it"
        yield warning("environment", f"of the daemon: {line}", costs=costs, mend=mend)
    if not here and not answer.warnings:
        names = sorted(name for name in os.environ if name.startswith("PCCHECK_"))
        yield ok("environment", f"set here: {', '.join(names) or 'no PCCHECK_* variable'}")
