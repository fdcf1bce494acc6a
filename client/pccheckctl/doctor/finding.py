"""What a check found, what it costs, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
    check: str
    level: str  # OK; WARNING: slower, or less is promised; PROBLEM: it does not work
    found: str
    costs: str = ""
    mend: str = ""
    promise: str = ""  # the promise that a warning weakens, in a word; "": speed or comfort only


def ok(check: str, found: str) -> Finding:
    return Finding(check, OK, found)


def warning(check: str, found: str, *, costs: str, mend: str, promise: str = "") -> Finding:
    return Finding(check, WARNING, found, costs, mend, promise)


def problem(check: str, found: str, *, costs: str, mend: str) -> Finding:
    return Finding(check, PROBLEM, found, costs, mend)


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one check. A check that raises is reported, and the others still run."""
    try:
        return list(check())
    except Exception as error:
        why = f"the check failed ({type(error).__name__}: {error})"
        costs = "doctor did not complete this check"
        return [warning(name, why, costs=costs, mend="check it by hand, and report this error")]
