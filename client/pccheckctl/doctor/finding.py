"""What a check found, its effect, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
    check: str
    level: str  # OK; WARNING: slower, or less is promised; PROBLEM: it does not work
    found: str
    effect: str = ""
    fix: str = ""
    promise: str = ""  # the promise that a warning weakens, in a word; "": speed or comfort only


def ok(check: str, found: str) -> Finding:
    return Finding(check, OK, found)


def warning(check: str, found: str, *, effect: str, fix: str, promise: str = "") -> Finding:
    return Finding(check, WARNING, found, effect, fix, promise)


def problem(check: str, found: str, *, effect: str, fix: str) -> Finding:
    return Finding(check, PROBLEM, found, effect, fix)


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one check. A check that raises is reported, and the others still run."""
    try:
        return list(check())
    except Exception as error:
        why = f"the check failed ({type(error).__name__}: {error})"
        effect = "doctor did not complete this check"
        return [warning(name, why, effect=effect, fix="check it by hand, and report this error")]
