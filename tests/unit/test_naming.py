"""A job without a name takes its script's, where there is a script."""

from __future__ import annotations

import sys

import pytest

from pccheck.job.naming import identify
from pccheck_wire.errors import UsageError


@pytest.mark.parametrize(
    ("script", "name"),
    [("/a/train.py", "train"), ("run me.py", "run-me"), ("/a/pkg/__main__.py", "pkg")],
)
def test_the_script_names_the_job(script: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    made = identify(None, None, None, {})
    assert (made.job, made.guessed) == (name, True)
    assert identify(None, None, None, {"PCCHECK_JOB": "x"}).guessed is False


@pytest.mark.parametrize(
    "script",
    ["", "-c", "-", "/x/ipykernel_launcher.py", "/x/ray/_private/workers/default_worker.py"],
)
def test_without_a_script_the_job_must_be_named(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(UsageError, match="PCCHECK_JOB"):
        identify(None, None, None, {})
    assert identify("run7", None, None, {}).job == "run7"


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(UsageError, match='job=""'):
        identify("", None, None, {"PCCHECK_JOB": "x"})


@pytest.mark.parametrize(("rank", "world_size"), [("0", 1), (0, "1"), (0.0, 1), (0, None)])
def test_a_rank_that_is_no_int_is_refused(rank: object, world_size: object) -> None:
    world = {"WORLD_SIZE": "x"} if world_size is None else {}
    with pytest.raises(UsageError, match="is not a"):
        identify("x", rank, world_size, world)  # type: ignore[arg-type]
