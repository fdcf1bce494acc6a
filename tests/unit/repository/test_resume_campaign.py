"""How the campaign compares a killed training with a whole one, and what it lets pass."""

from __future__ import annotations

import pytest

from tests.integration.resume_campaign import Outcome, Shape, Start, difference, excuse

WHOLE = ["FROM 0", "STEP 1 = 0x1p0", "STEP 2 = 0x1p1", "STEP 2 validation = 0x1p2", "END ab"]
KNOWN = Shape(
    "own", "known", page="docs/frameworks.md", phrase="continues from step N", warning="epoch"
)


def made(*lines: str) -> Start:
    start = Start()
    start.read([list(lines)])
    return start


@pytest.mark.parametrize(
    ("killed", "resumed", "found"),
    [
        (WHOLE[:2], WHOLE[2:], ""),
        (WHOLE[:3], WHOLE[2:], ""),  # a step that is made twice
        (["STEP 1 = 0x1p3"], WHOLE[1:], "step 1 (other), 1 steps"),  # before the kill
        (WHOLE[:2], ["STEP 2 = 0x1p3", *WHOLE[3:]], "step 2 (other), 1 steps"),
        (WHOLE[:2], [WHOLE[2], WHOLE[4]], "step 2 (missing), 1 steps"),
        (WHOLE[:2], [*WHOLE[2:], "STEP 3 = 0x1p0"], "step 3 (not in it), 1 steps"),
        (WHOLE[:2], [*WHOLE[2:4], "END cd"], "the last parameters"),
        (WHOLE[:2], WHOLE[2:4], "the last parameters"),
    ],
)
def test_a_number_that_differs_is_found(killed: list[str], resumed: list[str], found: str) -> None:
    assert difference(made(*WHOLE), [made(*killed), made(*resumed)]) == found


def test_a_rank_that_differs_is_found() -> None:
    whole, killed = Start(), Start()
    whole.read([WHOLE, WHOLE])
    killed.read([WHOLE, [*WHOLE[:2], "STEP 2 = 0x1p3", *WHOLE[3:]]])
    assert difference(whole, [killed]) == "step 2 (other), 1 steps"


def test_a_difference_that_is_told_passes() -> None:
    ours, own = Outcome(first="step 7", said=["the epoch begins again"]), Outcome(first="step 8")
    assert excuse(KNOWN, ours, own) == ""
    assert "is equal" in excuse(KNOWN, ours, Outcome())
    assert "not judged" in excuse(KNOWN, ours, Outcome(broken="it failed"))
    assert "no warning said 'epoch'" in excuse(KNOWN, Outcome(first="step 7"), own)
    assert "no page" in excuse(Shape("own", "other"), ours, own)
    unsaid = Shape("own", "unsaid", page="docs/frameworks.md", phrase="no page has this")
    assert "does not say" in excuse(unsaid, ours, own)
