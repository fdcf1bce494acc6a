"""`pccheckctl doctor`: does this machine let PCcheck keep its promises, and how fast."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from . import checks_daemon, checks_disk, checks_kernel, checks_memory, render
from .findings import OK, PROBLEM, WARNING, Finding, guarded
from .output import Document, part, print_json, say, whole

ERROR, DEGRADED = 1, 3


def run(arguments: argparse.Namespace) -> int:
    """0 when all is well, 3 when a warning costs a promise, 1 when something does not work."""
    storage, found = examine(arguments.socket, arguments.storage)
    if arguments.json:
        print_json(document(storage, found))
    else:
        say(as_text(storage, found))
    return exit_code(found)


def examine(socket: str | None, given: str | None) -> tuple[Path | None, list[Finding]]:
    """All findings, and which directory was looked at: the one given, the daemon's, or
    PCCHECK_STORAGE's."""
    answer = checks_daemon.Answer(socket)
    status = answer.status
    named = given or answer.storage or os.environ.get("PCCHECK_STORAGE", "")
    storage = Path(named).absolute() if named else None
    pool, slots = part(status, "pool"), whole(part(status, "daemon"), "slots")
    pid = whole(part(status, "daemon"), "pid")
    unused = whole(pool, "budget_bytes") - whole(pool, "used_bytes")
    found = [
        *guarded("kernel", checks_kernel.kernel),
        *guarded("limits", lambda: checks_kernel.limits(pid)),
        *guarded("shared memory", lambda: checks_memory.shared_memory(unused)),
        *guarded("huge pages", checks_memory.huge_pages),
        *guarded("numa", checks_memory.numa),
        *guarded("clock", checks_kernel.clocks),
    ]
    if storage is not None:
        found += guarded("storage", lambda: checks_disk.access(storage, answer.uid))
        if storage.is_dir():
            found += guarded("file system", lambda: checks_disk.file_system(storage))
            found += guarded("disk", lambda: checks_disk.direct_io(storage))
            found += guarded("room", lambda: checks_disk.room(storage, slots))
    found += guarded("environment", lambda: checks_daemon.environment(answer))
    found += guarded("daemon", lambda: _daemon(answer, asked_for=not given))
    found += guarded("cuda", lambda: checks_daemon.cuda(answer))
    return storage, found


def _daemon(answer: checks_daemon.Answer, *, asked_for: bool) -> list[Finding]:
    """With --storage the question is the disk: a daemon that is not there is no problem then."""
    if answer.error is not None and not asked_for:
        return [Finding("daemon", OK, f"none looked at: {answer.error.message}")]
    return [
        *checks_daemon.socket_access(answer),
        *checks_daemon.reachable(answer),
        *checks_daemon.pool(answer),
    ]


def exit_code(found: list[Finding]) -> int:
    if any(one.level == PROBLEM for one in found):
        return ERROR
    return DEGRADED if any(one.promise for one in found) else 0


def document(storage: Path | None, found: list[Finding]) -> Document:
    """What `doctor --json` prints."""
    return {
        "schema": 1,
        "storage": None if storage is None else str(storage),
        "findings": [one.document() for one in found],
        "counts": {level: _count(found, level) for level in (OK, WARNING, PROBLEM)},
    }


def _count(found: list[Finding], level: str) -> int:
    return sum(one.level == level for one in found)


def as_text(storage: Path | None, found: list[Finding]) -> str:
    width = max((len(one.check) for one in found), default=0)
    lines = []
    for one in found:
        lines.append(f"{one.level:7}  {one.check:{width}}  {one.found}")
        for label, text in (("costs", one.costs), ("mend", one.mend)):
            if text:
                lines.append(f"{'':9}{'':{width}}    {label}: {text}")
    if storage is None:
        lines.append("\nno disk was looked at: name one with --storage DIR")
    problems, warnings = _count(found, PROBLEM), _count(found, WARNING)
    ending = (
        "all is well"
        if not problems + warnings
        else f"{render.plural(problems, 'problem')}, {render.plural(warnings, 'warning')}"
    )
    costly = sorted({one.promise for one in found if one.promise})
    if costly:
        ending += f"; weakened: {', '.join(costly)}"
    return "\n".join([*lines, "", ending])
