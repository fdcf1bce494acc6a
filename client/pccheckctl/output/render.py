"""Text for people: aligned tables, sizes, ages. Pure functions, no colours, no dependencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pccheck_wire.basics import plural
from pccheck_wire.basics import size_text as size

__all__ = ["age", "brief", "duration", "plural", "rate", "safe", "shape", "size", "table"]

#: Columns of numbers are aligned to the right.
_NUMERIC = frozenset("0123456789")


def safe(text: str) -> str:
    """One line for a terminal. Characters that move its cursor, reverse text or cannot be printed
    (control characters, newlines, bidi marks, surrogates) are escaped, like "\\x1b": names that
    other users gave reach a terminal only through this."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def duration(seconds: float) -> str:
    """The two largest units: "0.4 s", "42 s", "3 min 5 s", "2 h 7 min", "9 d 3 h"."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def brief(seconds: float) -> str:
    """A short time with three significant digits: "85.2 us", "1.20 ms", "3.45 s"."""
    if seconds <= 0:
        return "0 s"
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s" if seconds < 99.95 else duration(seconds)


def rate(bytes_per_s: float) -> str:
    return f"{size(round(bytes_per_s))}/s"


def _digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def age(seconds: float | None) -> str:
    """How long ago; "-" when not known. A clock that was set back must not print nonsense."""
    if seconds is None:
        return "-"
    return f"{duration(max(0.0, seconds))} ago"


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers in order, neighbours together: "0-7, 9"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in found)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, two spaces apart, numbers to the right."""
    cells = [
        ["-" if cell is None or cell == "" else safe(str(cell)) for cell in row] for row in rows
    ]
    lines = [list(headings), *cells]
    widths = [max(len(line[at]) for line in lines) for at in range(len(headings))]
    right = [
        bool(cells) and all(row[at] == "-" or row[at][:1] in _NUMERIC for row in cells)
        for at in range(len(headings))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def shape(dims: Sequence[int]) -> str:
    return "x".join(str(dim) for dim in dims) if dims else "scalar"
