"""Where metrics may go, and what is said of what they cannot."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pccheck_wire.errors import UsageError
from pccheckd.config import metrics_place
from pccheckd.config.metrics_place import Place, parse


@pytest.mark.parametrize(
    ("text", "place", "shown"),
    [
        ("9477", Place("127.0.0.1", 9477), "http://127.0.0.1:9477"),
        (":9477", Place("127.0.0.1", 9477), "http://127.0.0.1:9477"),
        ("localhost:1", Place("127.0.0.1", 1), "http://127.0.0.1:1"),
        ("10.0.0.1:80", Place("10.0.0.1", 80), "http://10.0.0.1:80"),
        ("[::1]:9477", Place("::1", 9477), "http://[::1]:9477"),
        ("/var/x.prom", Place(file=Path("/var/x.prom")), "/var/x.prom"),
    ],
)
def test_a_place_is_read_and_shown(text: str, place: Place, shown: str) -> None:
    assert parse(text) == place
    assert str(place) == shown


@pytest.mark.parametrize(
    "text",
    ["", "x", "1.2.3.4", "node:9477", "::1:9477", "65536", "1.2.3.4.5:1", "/var/x.txt", "a:b"],
)
def test_what_is_no_place_is_told_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert "9477" in caught.value.hint


def test_only_loopback_is_local() -> None:
    assert parse("9477").is_local and parse("[::1]:1").is_local and parse("/x.prom").is_local
    assert not parse("0.0.0.0:9477").is_local


def test_without_the_extra_pip_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics_place.require("")  # nothing is wanted
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    metrics_place.require("")
    with pytest.raises(UsageError) as caught:
        metrics_place.require("9477")
    assert caught.value.hint == "pip install 'pccheck[metrics]'"
