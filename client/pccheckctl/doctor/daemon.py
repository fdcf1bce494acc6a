"""Checks of the daemon: can this user reach it, is it the same version, is it well."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from pccheck_store.observer import private_daemon
from pccheck_wire.basics import socket_name
from pccheck_wire.errors import DaemonUnreachableError, PccheckError
from pccheckctl import VERSION
from pccheckctl.commands import config
from pccheckctl.output import render
from pccheckctl.output.documents import Document, number, part, text, texts, whole
from pccheckctl.source import observe

from .finding import Finding, ok, problem, warning


class Answer:
    """The daemon's status, or the error that it, or the lack of it, gave."""

    def __init__(self, socket: str | None, storage: str | None) -> None:
        self.path = Path(socket_name(socket))
        self.status: Document = {}
        self.warnings: list[str] = []  # of its environment
        self.servers: Document = {}
        self.error: PccheckError | None = None
        try:
            private = private_daemon(Path(storage).absolute()) if storage and not socket else None
            with private or observe(socket) as observer:
                self.path = Path(observer.path)
                self.status = observer.status()
                with contextlib.suppress(PccheckError):
                    self.warnings = texts(observer.config(), "warnings")
                    self.servers = observer.servers()
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
            effect="training continues without checkpoints"
            + (" until pccheckd runs" if gone else " for this user"),
            fix=answer.error.hint or "read the log of pccheckd",
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
            effect="requests that only one of the versions knows are refused; nothing is misread",
            fix="install the same version of both, and restart the older one",
        )  # fmt: skip
    status = f"pccheckctl --socket {quote(str(answer.path))} status"
    for line in texts(answer.status, "warnings"):
        yield warning(
            "daemon", line, effect=f"pccheckd is degraded: see {status}",
            fix="the log of pccheckd has the cause", promise="see the warning",
        )  # fmt: skip
    if whole(daemon, "keep") == 1:
        yield warning(
            "daemon", "pccheckd keeps only one durable checkpoint (--keep 1)",
            effect="if a sector of that checkpoint fails, there is no older one to recover",
            fix="--keep 2, and one more in --slots", promise="newest wins",
        )  # fmt: skip


def socket_access(socket: Path) -> Iterator[Finding]:
    """Whether other users could listen in the daemon's place. Whether this user may connect, and
    what to do when not, is what `reachable` says."""
    directory = socket.parent
    try:
        mode = directory.stat().st_mode
    except OSError:
        return
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield warning(
            "socket", f"every user may write to {directory}",
            effect="any user can replace the daemon's socket with another one",
            fix=f"chmod 0750 {directory}", promise="apart",
        )  # fmt: skip
    else:
        yield ok("socket", f"not every user can replace the socket in {directory}")


def environment(answer: Answer) -> Iterator[Finding]:
    """PCCHECK_* variables that nothing reads, here and where the daemon was started."""
    here, effect = texts(config.check([]), "warnings"), "the variable has no effect"
    for line in here:
        yield warning("environment", line, effect=effect, fix="correct the name, or unset it")
    for line in answer.warnings:
        fix = "correct the unit or script that starts pccheckd; restart it"
        yield warning("environment", f"of the daemon: {line}", effect=effect, fix=fix)
    if not here and not answer.warnings:
        names = sorted(name for name in os.environ if name.startswith("PCCHECK_"))
        yield ok("environment", f"set here: {', '.join(names) or 'no PCCHECK_* variable'}")
