"""Which part of a checkpoint a partial check reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_native import subset
from pccheck_native.subset import MIB, Subset

PAYLOADS = st.integers(1, 40_000 * MIB)


@pytest.mark.parametrize("text", ["5%", "0.5%", "100%", "12.345678%", "1/1", "2/20"])
def test_what_was_parsed_is_shown_as_it_was(text: str) -> None:
    assert subset.parse(text).text == text
    assert subset.parse(subset.parse(text, 3).text, 3) == subset.parse(text, 3)


@pytest.mark.parametrize(
    "text", ["", "5", "%", "0%", "101%", "-1%", "0/4", "5/4", "1/0", "1/", "nan%"]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="like 5%"):
        subset.parse(text)


@given(PAYLOADS, st.integers(1, 1000), st.integers(1, 40))
def test_all_parts_together_are_everything_once(payload: int, sequence: int, parts: int) -> None:
    ranges = sorted(
        one
        for part in range(1, parts + 1)
        for one in Subset(part=part, parts=parts).ranges(sequence, payload)
    )
    assert ranges == list(Subset().ranges(sequence, payload))
    ends = [0]
    for offset, length in ranges:
        assert offset == ends[-1] and length > 0
        ends.append(offset + length)
    assert ends[-1] == payload


@given(PAYLOADS, st.integers(1, 1000), st.integers(0, subset.SEED_MAX))
def test_a_seed_says_which_pieces(payload: int, sequence: int, seed: int) -> None:
    part = subset.parse("30%", seed)
    assert list(part.ranges(sequence, payload)) == list(part.ranges(sequence, payload))


def test_chance_is_the_share_and_seeds_differ() -> None:
    drawn = [
        [piece for piece in range(20_000) if subset.parse("5%", seed).takes(7, piece)]
        for seed in (1, 2)
    ]
    assert drawn[0] != drawn[1]
    for pieces in drawn:
        assert 800 < len(pieces) < 1200  # 1000 +- 6 standard deviations


@given(PAYLOADS)
def test_pieces_are_neither_many_nor_large(payload: int) -> None:
    step = subset.piece_bytes(payload)
    assert step % MIB == 0 and MIB <= step <= subset.PIECE_BYTES_MAX
    assert payload // step <= 700
