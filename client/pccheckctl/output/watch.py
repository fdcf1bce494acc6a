"""`--watch`: asks for a document again and again, until Ctrl-C. A terminal is redrawn in place;
elsewhere the texts follow one another; with --json each is one line."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable

from pccheck_wire.errors import DaemonUnreachableError, WaitTimeoutError
from pccheckctl.output.documents import Document, note, pasteable, say
from pccheckctl.output.render import safe

_HOME, _LINE_END, _REST = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR = "\x1b[2J"


def run(
    arguments: argparse.Namespace,
    fetch: Callable[[argparse.Namespace], Document],
    as_text: Callable[[Document], str],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Ends by KeyboardInterrupt only: a daemon that does not answer is waited for."""
    live = sys.stdout.isatty() and not arguments.json
    if live:
        sys.stdout.write(_CLEAR)
    first = True
    while True:
        try:
            document = fetch(arguments)
        except (DaemonUnreachableError, WaitTimeoutError) as error:
            if live:
                _redraw(f"{error.message}\n(waiting for the daemon)", arguments.watch)
            else:
                note(error.message)
        else:
            text = "" if arguments.json else pasteable(as_text(document), arguments)
            if arguments.json:
                print(json.dumps(document), flush=True)
            elif live:
                _redraw(text, arguments.watch)
            else:
                say(("" if first else "\n") + f"{_now()}\n{text}")
            first = False
        sleep(arguments.watch)


def _redraw(text: str, period_s: float) -> None:
    """As much as fits on the terminal: sentences are folded, and the rows of tables are cut. Each
    line clears its end, so that nothing flickers."""
    size = shutil.get_terminal_size()
    lines = [f"{_now()}, every {period_s:g} s; Ctrl-C to end", ""]
    for line in map(safe, text.split("\n")):
        is_row = "  " in line  # only tables have two spaces
        width = max(1, size.columns - 1)
        lines += [line] if is_row else textwrap.wrap(line, width, break_on_hyphens=False) or [""]
    if len(lines) >= size.lines:
        hidden = len(lines) - size.lines + 2
        lines = [*lines[: size.lines - 2], f"... {hidden} more lines"]
    cut = (line[: size.columns - 1] for line in lines)  # a full line would wrap, or lose its end
    sys.stdout.write(_HOME + "".join(f"{line}{_LINE_END}\n" for line in cut) + _REST)
    sys.stdout.flush()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
