"""The reasons of checkpoints' ends: complete, and the same on both sides of the page."""

from __future__ import annotations

import pytest

from pccheck_native import _core
from pccheck_wire.ends import OF_THE_GROUP, Cause, Why, sentence

#: Without words of their own: stage and code have them, the daemon has them, or it is no cause.
WORDLESS = {Cause.CODE, Cause.DESCRIBED}
STAGES = ("begin", "copy", "base", "write", "flush", "publish")


def test_the_core_gives_the_causes_of_the_table() -> None:
    assert _core.CAUSE_REPLACED == Cause.REPLACED
    assert _core.CAUSE_OTHER_RANK == Cause.OTHER_RANK


@pytest.mark.parametrize("cause", [one for one in Cause if one not in WORDLESS])
def test_every_cause_has_a_sentence(cause: Cause) -> None:
    made = sentence(Why(cause, 3 << 32 | 5, code="DEVICE"))
    assert made.reason and "{" not in made.reason + made.hint
    assert str(made).startswith(made.reason)


@pytest.mark.parametrize("code", ["EIO", "ABORTED", "DEVICE_LOST", "REMOVED", "ENOSPC", "UNKNOWN"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_and_code_have_a_sentence(stage: str, code: str) -> None:
    made = sentence(Why(stage=stage, code=code))
    assert made.reason and "{" not in made.reason


def test_a_full_disk_is_named_with_what_was_being_done() -> None:
    assert sentence(Why(stage="write", code="ENOSPC")).reason == "write: the disk is full"
    assert sentence(Why(stage="publish", code="EROFS")).hint == "mount the file system read-write"


def test_the_argument_is_a_rank_a_limit_or_two_ranks() -> None:
    assert "rank 7 ended without" in sentence(Why(Cause.RANK_ENDED, 7)).reason
    assert "not to level 7" in sentence(Why(Cause.BAD_LEVEL, 7)).reason
    assert sentence(Why(Cause.UNLIKE, 3 << 32 | 5)).reason.startswith("ranks 3 and 5 have")


def test_words_of_the_daemon_replace_the_sentence() -> None:
    page = sentence(Why(Cause.RANK_LACKS, 7))
    assert page.asks and page.reason.startswith("rank 7 did not save this checkpoint")
    assert sentence(Why(Cause.RANK_LACKS, 7, words="w", hint="h")) == ("w", "h", False)


@pytest.mark.parametrize("cause", [Cause.DESCRIBED, 999])
def test_a_cause_without_a_sentence_is_asked_for(cause: int) -> None:
    """Also one that a newer daemon has."""
    assert sentence(Why(cause)) == ("", "", True)


def test_causes_of_the_page_have_sixteen_bits() -> None:
    assert all(cause < 1 << 16 for cause in Cause)
    assert all(cause < 1 << 15 for cause in OF_THE_GROUP)
