"""Runs the checks, and prints what they found."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, part, whole

from . import daemon, exposed, gpu, machine, nodes, storage
from .finding import OK, PROBLEM, WARNING, Finding, guarded, ok

ERROR, DEGRADED = 1, 3


def run(arguments: argparse.Namespace) -> int:
    """0 when all is well, 3 when a warning weakens a promise, 1 when something does not work."""
    place, found = examine(
        arguments.socket, arguments.storage, pairs=arguments.peers, shares=arguments.gpu
    )
    answer(arguments, document(place, found), lambda: as_text(place, found))
    return exit_code(found)


def examine(
    socket: str | None, given: str | None, *, pairs: bool = False, shares: bool = False
) -> tuple[Path | None, list[Finding]]:
    """The directory that was checked (the one given, the daemon's, or PCCHECK_STORAGE's), and all
    findings. `pairs`: every node of a job tries every other one. `shares`: GPU memory is shared
    with the daemon."""
    asked = daemon.Answer(socket, given)
    named = given or asked.storage or os.environ.get("PCCHECK_STORAGE", "")
    place = Path(named).absolute() if named else None
    pool, server = part(asked.status, "pool"), part(asked.status, "daemon")
    unused = whole(pool, "budget_bytes") - whole(pool, "used_bytes")
    found = [
        *guarded("open files", lambda: machine.open_files(whole(server, "pid"))),
        *guarded("shared memory", lambda: machine.memory(unused)),
    ]
    if place is not None:
        seen = storage.seen(place)
        if seen or given or not asked.storage:
            found += guarded("storage", lambda: storage.access(place, asked.uid))
        else:
            why = "cannot be seen from here (no permission, or a container): it was not checked"
            found.append(ok("storage", f"{place} of the daemon {why}"))
        if seen:
            found += guarded("file system", lambda: storage.file_system(place))
            found += guarded("disk", lambda: storage.direct_io(place))
            found += guarded("room", lambda: storage.room(place, whole(server, "slots")))
    found += guarded("environment", lambda: daemon.environment(asked))
    if asked.error is not None and given:  # the question was the disk
        found.append(ok("daemon", f"not checked: {asked.error.message}"))
    else:
        found += guarded("socket", lambda: daemon.socket_access(asked.path))
        found += guarded("daemon", lambda: daemon.reachable(asked))
    found += guarded("nodes", lambda: nodes.agreement(asked.status))
    found += guarded("nodes", lambda: nodes.spare_slot(asked.status))
    found += guarded("nodes", lambda: (nodes.pairs if pairs else nodes.servers)(asked.servers))
    found += guarded("cuda", lambda: gpu.cuda(asked.status))
    if shares and asked.status:
        found += guarded("gpu pull", lambda: exposed.gpus(socket))
    elif shares:
        found.append(ok("gpu pull", "not checked: no daemon answers"))
    found += guarded("gpu snapshots", gpu.held)
    return place, found


def exit_code(found: list[Finding]) -> int:
    if any(one.level == PROBLEM for one in found):
        return ERROR
    return DEGRADED if any(one.promise for one in found) else 0


def document(place: Path | None, found: list[Finding]) -> Document:
    """What `doctor --json` prints."""
    return {
        "schema": 1,
        "storage": None if place is None else str(place),
        "findings": [one._asdict() for one in found],
        "counts": dict.fromkeys((OK, WARNING, PROBLEM), 0) | Counter(one.level for one in found),
    }


def as_text(place: Path | None, found: list[Finding]) -> str:
    width = max((len(one.check) for one in found), default=0)
    lines = []
    for one in found:
        lines.append(f"{one.level:7}  {one.check:{width}}  {one.found}")
        for label, text in (("effect", one.effect), ("fix", one.fix)):
            if text:
                lines.append(f"{'':9}{'':{width}}    {label}: {text}")
    if place is None:
        lines.append("\nno disk was checked: give its directory with --storage DIR")
    levels = Counter(one.level for one in found)
    problems, warnings = levels[PROBLEM], levels[WARNING]
    ending = f"{render.plural(problems, 'problem')}, {render.plural(warnings, 'warning')}"
    if weakened := sorted({one.promise for one in found if one.promise}):
        ending += f"; weakened promises: {', '.join(weakened)}"
    return "\n".join([*lines, "", ending if problems + warnings else "everything is fine"])
