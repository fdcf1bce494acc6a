"""`pccheckctl drop`: shows the volumes of a job that has ended, then removes them."""

from __future__ import annotations

import argparse
import sys
import time

from pccheck_wire.errors import UsageError
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, number, rows, say, text, whole
from pccheckctl.source import choose


def run(arguments: argparse.Namespace) -> int:
    """0 when the volumes were removed, or only shown (--dry-run); 1 when the user said no."""
    with choose(arguments, ask=True) as chosen:
        wanted = {"rank": arguments.rank, "uid": arguments.uid}
        document = chosen.drop(arguments.job, **wanted, dry_run=True)
        if not arguments.dry_run:
            if not arguments.yes and not _agreed(arguments, document):
                say("nothing was dropped")
                return 1
            document = chosen.drop(arguments.job, **wanted, dry_run=False)
    answer(arguments, document, lambda: as_text(document))
    return 0


def _agreed(arguments: argparse.Namespace, document: Document) -> bool:
    """Asks at a terminal; elsewhere --yes is required."""
    if arguments.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            f"drop asks at a terminal only: to remove job {arguments.job!r}, add --yes",
            hint="see what would be removed: --dry-run",
        )
    say(as_text(document))
    return input("remove these files permanently? [y/N] ").strip().lower() in ("y", "yes")


def as_text(document: Document, *, now_s: float | None = None) -> str:
    """`now_s` is wall time."""
    now_s = time.time() if now_s is None else now_s
    files = rows(document, "files")
    lines = [
        (text(one, "path"), render.size(whole(one, "bytes")), one.get("checkpoints"),
         one.get("newest_step"), render.age(now_s - (number(one, "last_write_s") or now_s)),
         text(one, "problem").removeprefix(f"{text(one, 'path')}: ")
         or ("finished" if one.get("done") is True else ""))
        for one in files
    ]  # fmt: skip
    verb = "dropped" if document.get("dropped") is True else "would be dropped"
    total = f"{render.plural(len(files), 'file')}, {render.size(whole(document, 'bytes'))}"
    headings = ("file", "size", "checkpoints", "newest step", "last write", "state")
    table = f"{render.table(headings, lines)}\n\n" if lines else ""  # none: they were removed
    return f"{table}{total}: {verb}"
