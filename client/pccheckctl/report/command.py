"""`pccheckctl report`: from the daemon, or from a file that `pccheckctl trace` wrote."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pccheck_wire.errors import PccheckError, UsageError
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, part
from pccheckctl.output.files import write_text
from pccheckctl.source import daemon

from .page import page
from .saves import saves_of


def run(arguments: argparse.Namespace) -> int:
    """0, also for a page without a checkpoint."""
    document = _from_file(Path(arguments.trace)) if arguments.trace else _from_daemon(arguments)
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
        return observer.trace(arguments.last)


def _from_file(path: Path) -> Document:
    try:
        found = json.loads(path.read_bytes())
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
    return kept
