"""Documents: how they are printed, and how values are taken from one that a daemon sent."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable

from pccheck_store.documents import (
    Document,
    as_json,
    number,
    numbers,
    part,
    rows,
    text,
    texts,
    whole,
)
from pccheck_wire.basics import with_options
from pccheck_wire.errors import PccheckError

from .render import safe

__all__ = [
    "Document", "answer", "as_json", "note", "number", "numbers", "part", "pasteable", "print_json",
    "rows", "say", "text", "texts", "whole", "write",
]  # fmt: skip


def answer(arguments: Namespace, document: Document, as_text: Callable[[], str]) -> None:
    """Prints a result: the document with --json, else its text."""
    if arguments.json:
        print_json(document)
    else:
        say(pasteable(as_text(), arguments))


def pasteable(text: str, arguments: Namespace) -> str:
    """The text, whose commands ask whom this command asked."""
    given: list[str] = []
    for name in ("socket", "storage", "uid"):
        if (value := getattr(arguments, name, None)) is not None:
            given += [f"--{name}", str(value)]
    return with_options(text, given)


def print_json(document: Document) -> None:
    import json  # most answers are text

    write(json.dumps(document, indent=2))


def say(text: str) -> None:
    """A result for people. Line breaks in names of other users were escaped before."""
    write("\n".join(map(safe, text.split("\n"))))


def write(text: str) -> None:
    """Prints to stdout. Raises PccheckError where that takes no more: not the storage is full."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise PccheckError(f"cannot write the output: {error.strerror}") from error


def note(text: str) -> None:
    """A remark for people, on stderr; stdout is for results."""
    print(f"pccheckctl: {safe(text)}", file=sys.stderr)
