"""What a check of this machine found, what that costs, and how to mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from .output import Document

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
    check: str
    level: str  # OK, WARNING: something is slower or promised less; PROBLEM: it does not work
    found: str
    costs: str = ""
    mend: str = ""
    promise: str = ""  # which promise a warning costs, in a word; "": speed or comfort only

    def document(self) -> Document:
        return dict(self._asdict())


def ok(check: str, found: str) -> Finding:
    return Finding(check, OK, found)


def warning(check: str, found: str, *, costs: str, mend: str, promise: str = "") -> Finding:
    return Finding(check, WARNING, found, costs, mend, promise)


def problem(check: str, found: str, *, costs: str, mend: str) -> Finding:
    return Finding(check, PROBLEM, found, costs, mend)


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one check; a check that fails says so and stops no other."""
    try:
        return list(check())
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        costs = "nothing is known about it"
        return [warning(name, f"could not be checked ({why})", costs=costs, mend="look yourself")]


def read(path: str) -> str:
    """A small file of the kernel's, stripped; "" when it is not there or not ours to read."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
