"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest

from pccheck_wire.errors import UsageError
from pccheck_wire.units import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("90s", 90), ("1.5s", 1.5), ("250ms", 0.25), ("200us", 2e-4), ("2m", 120),
        ("30min", 1800),
        ("12h", 43200), ("7d", 604800), ("2w", 1209600), ("1h30min", 5400), (" 1 d 2 h ", 93600),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "d", "7 days", "1 2", "-3s", "7dd", "1h30", "1e3", "nan", "4000w"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_duration(text)
    assert "350ms" in refused.value.hint or "longer than" in refused.value.message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0", 0),
        ("1.5GiB", 3 << 29),
        ("8g", 8 << 30),
        ("2kib", 2048),
        ("2 TiB", 2 << 40),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "x", "GiB", "1GB", "8 GiB GiB", "-1", "1 2", "1e9", "0x10", "8388608TiB", "9" * 400],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "fix"), [("6GB", "6GiB"), ("20mb", "20MiB"), ("1.5 TB", "1.5TiB")]
)
def test_powers_of_1000_are_named(text: str, fix: str) -> None:
    with pytest.raises(UsageError, match="often means powers of 1000") as refused:
        parse_size(text)
    assert refused.value.hint == f"write {fix}, or the number of bytes"
