"""Who may have how much of the DRAM budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pccheckd.shares import Wish, fair

CHUNK = 4


def wish(uid: int, wanted: int, least: int = 2) -> Wish:
    return Wish(uid, least * CHUNK, wanted * CHUNK, CHUNK)


def shares(room: int, *wishes: Wish, limit: int = 0) -> list[int]:
    found = fair(room * CHUNK, wishes, limit * CHUNK)
    assert all(share % CHUNK == 0 for share in found)
    return [share // CHUNK for share in found]


def test_what_one_does_not_want_is_the_others() -> None:
    assert shares(100, wish(1, 10), wish(1, 20)) == [10, 20]
    assert shares(30, wish(1, 100), wish(1, 6)) == [24, 6]
    assert shares(30, wish(1, 100), wish(1, 100), wish(1, 4)) == [13, 13, 4]


def test_users_come_before_their_jobs() -> None:
    assert shares(60, *[wish(1, 50)] * 9, wish(2, 50)) == [4, 4, 4, *[3] * 6, 30]
    assert shares(60, *[wish(1, 50)] * 3, wish(2, 12)) == [16, 16, 16, 12]


def test_the_least_comes_before_fairness() -> None:
    assert shares(20, *[wish(1, 50)] * 7, wish(2, 50)) == [*[2] * 7, 6]
    assert shares(7, wish(1, 50), wish(2, 50), wish(3, 50), wish(4, 50)) == [3, 2, 2, 0]


def test_a_limit_of_users() -> None:
    assert shares(100, wish(1, 90), wish(2, 90), limit=30) == [30, 30]
    assert shares(100, wish(1, 90), wish(1, 90), wish(1, 90), limit=5) == [3, 2, 0]
    assert shares(40, wish(1, 90), wish(2, 90), limit=30) == [20, 20]


WISHES = st.lists(
    st.builds(
        lambda uid, least, more, chunk: Wish(uid, least * chunk, (least + more) * chunk, chunk),
        st.integers(0, 3), st.just(2), st.integers(0, 40), st.sampled_from([1, 4, 6]),
    ),
    max_size=12,
)  # fmt: skip


@given(st.integers(0, 400), WISHES, st.integers(0, 200))
def test_rules(room: int, wishes: list[Wish], limit: int) -> None:
    found = fair(room, wishes, limit)
    assert sum(found) <= room
    for one, share in zip(wishes, found, strict=True):
        assert share == 0 or one.least <= share <= one.wanted
        assert share % one.chunk == 0
        mine = [s for s, w in zip(found, wishes, strict=True) if w.uid == one.uid]
        assert not limit or sum(mine) <= limit
    if sum(w.least for w in wishes) <= room and not limit:
        assert all(found)
        if sum(w.wanted for w in wishes) <= room:
            assert found == [w.wanted for w in wishes]
        else:  # less than a chunk of anybody who wants more is left over
            lacking = [w.chunk for w, s in zip(wishes, found, strict=True) if s < w.wanted]
            assert room - sum(found) < max(lacking)
