"""`pccheckctl report`: from the daemon, or from a file that `pccheckctl trace` wrote."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pccheck_wire.errors import NoCheckpointError, PccheckError, UsageError
from pccheck_wire.units import MIB
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, part, rows, text
from pccheckctl.output.files import write_text
from pccheckctl.source import daemon, require_known

from .page import page
from .saves import saves_of

#: A trace is far smaller. Devices and pipes may never end.
TRACE_BYTES_MAX = 256 * MIB


def run(arguments: argparse.Namespace) -> int:
    """0, also for a page without a checkpoint; 13 for a job that does not exist."""
    document = (_from_file if arguments.trace else _from_daemon)(arguments)
    saves = saves_of(document, job=arguments.job, uid=arguments.uid)
    write_text(arguments.output, page(saves), force=arguments.force)
    path, count = arguments.output, len(saves.items)
    answer(
        arguments,
        {"schema": 1, "path": path, "checkpoints": count},
        lambda: f"{path}: {render.plural(count, 'checkpoint')}; open it in a browser",
    )
    return 0


def _from_daemon(arguments: argparse.Namespace) -> Document:
    with daemon(arguments) as observer:
        document = observer.trace(arguments.last)
        if arguments.job and not _has(document, arguments.job):
            require_known(observer, arguments.job)
        return document


def _has(document: Document, job: str) -> bool:
    return any(text(one, "job") == job for one in rows(document, "checkpoints"))


def _from_file(arguments: argparse.Namespace) -> Document:
    path, job = Path(arguments.trace), arguments.job
    try:
        with path.open("rb") as file:
            content = file.read(TRACE_BYTES_MAX + 1)
        found = json.loads(content) if len(content) <= TRACE_BYTES_MAX else None
    except OSError as error:
        raise PccheckError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        found = None
    kept = part(found, "otherData") if isinstance(found, dict) else {}
    if "checkpoints" not in kept:
        raise UsageError(
            f"{path} is not a trace of pccheckctl",
            hint="make one: pccheckctl trace --last 5min --output trace.json",
        )
    if job and not _has(kept, job):
        raise NoCheckpointError(
            f"{path} has no checkpoint of job {job!r}",
            hint="make a trace of a longer time: pccheckctl trace --last 1h --output trace.json",
        )
    return kept
