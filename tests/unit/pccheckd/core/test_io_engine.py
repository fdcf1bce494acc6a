"""What the daemon says of its storage engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccheckd.config.options import Config
from pccheckd.core.io_engine import IoEngine


def config(**changes: object) -> Config:
    return Config(storage=Path("/s"), socket=Path("/r"), **changes)  # type: ignore[arg-type]


def test_without_a_word_it_is_pwrite() -> None:
    made = IoEngine(config())
    assert (made.running, made.reason) == ("pwrite", "")


def test_status_says_what_volumes_really_got(caplog: pytest.LogCaptureFixture) -> None:
    made = IoEngine(config(engine="pmem"))
    made.opened("pwrite")
    made.opened("pwrite")
    assert made.document() == {
        "engine": "pwrite",
        "engine_wanted": "pmem",
        "engine_reason": "pmem: no persistent memory with a DAX file system here",
    }
    assert [one.getMessage() for one in caplog.records] == [
        "engine pwrite instead of pmem: no persistent memory with a DAX file system here"
    ]
    made.opened("pmem")
    assert (made.running, made.reason) == ("pmem", "")
