"""`pccheckctl config show`: the values that the daemon uses, and where each comes from. Without a
daemon, what a daemon started from this shell would use."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from pccheck_wire.basics import STORAGE_MISSING
from pccheck_wire.errors import DaemonUnreachableError, PccheckError, UsageError
from pccheckctl.output import render
from pccheckctl.output.documents import Document, note, part, print_json, rows, say, text, texts
from pccheckctl.source import observe

LIMIT_S = 30.0


def run(arguments: argparse.Namespace) -> int:
    document = _ask(arguments)
    if arguments.json:
        print_json(document)
    else:
        say(as_text(document, origins=arguments.origin))
        for warning in texts(document, "warnings"):
            note(f"warning: {warning}")
    return 0


def _ask(arguments: argparse.Namespace) -> Document:
    if arguments.storage:
        return _from_files(arguments)
    try:
        with observe(arguments.socket) as observer:
            return observer.config()
    except DaemonUnreachableError as error:
        unreachable = error
    try:
        document = _from_files(arguments)
    except UsageError as error:
        if error.message != STORAGE_MISSING:
            raise  # a mistake in the file is one with or without a daemon
        raise DaemonUnreachableError(
            f"{unreachable.message}, and a pccheckd started from this shell would fail: "
            f"{error.message}",
            hint=unreachable.hint,
        ) from error
    note(f"{unreachable.message}: showing what a pccheckd started from this shell would use")
    return document


def _from_files(arguments: argparse.Namespace) -> Document:
    flags: list[str] = []
    for flag in ("storage", "socket"):
        if getattr(arguments, flag):
            flags += [f"--{flag}", getattr(arguments, flag)]
    document = check(flags)
    wrong = part(document, "error")
    if wrong:
        raise UsageError(text(wrong, "message"), hint=text(wrong, "hint"))
    return document


def check(flags: list[str]) -> Document:
    """What pccheckd would make of these flags, the file and this environment. It has the table of
    options; it starts and opens nothing."""
    command = [sys.executable, "-m", "pccheckd", "--check-config", "--json", *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        document = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise PccheckError(
            "cannot run pccheckd --check-config", hint="run it by hand to see its error"
        ) from error
    return document if isinstance(document, dict) else {}


def as_text(document: Document, *, origins: bool) -> str:
    """The same for people. Options for tests are shown only when they are set."""
    shown = [
        row
        for row in rows(document, "options")
        if row.get("hidden") is not True or text(row, "origin_kind") != "default"
    ]
    columns = {"option": "name", "value": "text"}
    columns |= {"from": "origin"} if origins else {}
    if any(text(row, "after_restart") for row in shown):
        columns["after a restart"] = "after_restart"
    table = render.table(list(columns), [[text(r, key) for key in columns.values()] for r in shown])
    daemon, file = part(document, "daemon"), text(document, "file") or "none"
    version = f"pccheckd {text(daemon, 'version')}, pid {text(daemon, 'pid')}"
    return f"daemon   {version if daemon else 'not asked'}\nfile     {file}\n\n{table}"
