"""Parses sizes and durations, in the same way for daemon and command line."""

from __future__ import annotations

import re

from .errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
DURATION_S_MAX = 1e9
SIZE_BYTES_MAX = 2**63

_SIZES = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_SECONDS = {
    "": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
    "w": 604800.0,
}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes from "8GiB", "512M", "4096": KiB, MiB, GiB, TiB with or without "iB" are powers of
    1024; "KB", "MB", "GB", "TB" are too ambiguous and refused. Raises UsageError."""
    if (decimal := re.fullmatch(r"\s*([\d.]+)\s*([kmgt])b\s*", text, re.IGNORECASE)) is not None:
        number, unit = decimal[1], decimal[2].upper()
        raise UsageError(
            f"{text!r} is not a size: {unit}B often means powers of 1000, and sizes have powers of "
            "1024",
            hint=f"write {number}{unit}iB, or the number of bytes",
        )
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:ib)?\s*", text, re.IGNORECASE)
    if found is None:
        raise UsageError(f"{text!r} is not a size", hint="write it like 8GiB, 512MiB or 4096")
    size_bytes = float(found[1]) * _SIZES[found[2].lower()]
    if size_bytes >= SIZE_BYTES_MAX:
        raise UsageError(f"{text!r} is more than a file can have")
    return int(size_bytes)


def parse_duration(text: str) -> float:
    """Seconds from "7d", "12h", "30min", "1.5s", "250ms", "200us"; a bare number is seconds, and
    units may follow one another: "1h30min". Raises UsageError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(us|ms|min|[smhdw]|)\s*", text.strip(), re.IGNORECASE)
    whole = "".join(f"{value}{unit}" for value, unit in parts)
    known = whole.lower() == re.sub(r"\s", "", text).lower() and bool(parts)
    if not known or (len(parts) > 1 and not all(unit for _, unit in parts)):
        raise UsageError(
            f"{text!r} is not a duration", hint="write it like 7d, 12h, 30min, 90s or 350ms"
        )
    seconds = sum(float(value) * _SECONDS[unit.lower()] for value, unit in parts)
    if seconds >= DURATION_S_MAX:
        raise UsageError(f"{text!r} is longer than 30 years")
    return seconds
