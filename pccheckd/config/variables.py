"""Environment variables that look like ours and that nobody reads: most are misspelt."""

from __future__ import annotations

from collections.abc import Iterable

from pccheck_wire.basics import VARIABLES

from .options import OPTIONS

_PREFIX = "PCCHECK_"


def unknown(environ: Iterable[str]) -> list[str]:
    """A sentence for each, with what was probably meant. Values are not told."""
    known = {*VARIABLES, *(option.variable for option in OPTIONS)}
    wrong = sorted(name for name in environ if name.startswith(_PREFIX) and name not in known)
    return [f"{name} is set, and nothing reads it{_meant(name)}" for name in wrong]


def _meant(name: str) -> str:
    import difflib  # for people who mistyped only

    shown = [*VARIABLES, *(option.variable for option in OPTIONS if not option.hidden)]
    rests = [variable.removeprefix(_PREFIX) for variable in shown]
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), rests, n=1, cutoff=0.6)
    return f": did you mean {_PREFIX}{near[0]}?" if near else ""
