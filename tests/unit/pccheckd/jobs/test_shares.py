"""Who may have how much of the DRAM budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pccheckd.jobs.shares import Demand, fair

CHUNK = 4


def demand(uid: int, wanted: int, least: int = 2) -> Demand:
    return Demand(uid, least * CHUNK, wanted * CHUNK, CHUNK)


def shares(room: int, *demands: Demand, limit: int = 0) -> list[int]:
    found = fair(room * CHUNK, demands, limit * CHUNK)
    assert all(share % CHUNK == 0 for share in found)
    return [share // CHUNK for share in found]


def test_what_one_does_not_want_is_the_others() -> None:
    assert shares(100, demand(1, 10), demand(1, 20)) == [10, 20]
    assert shares(30, demand(1, 100), demand(1, 6)) == [24, 6]
    assert shares(30, demand(1, 100), demand(1, 100), demand(1, 4)) == [13, 13, 4]


def test_users_come_before_their_jobs() -> None:
    assert shares(60, *[demand(1, 50)] * 9, demand(2, 50)) == [4, 4, 4, *[3] * 6, 30]
    assert shares(60, *[demand(1, 50)] * 3, demand(2, 12)) == [16, 16, 16, 12]


def test_the_least_comes_before_fairness() -> None:
    assert shares(20, *[demand(1, 50)] * 7, demand(2, 50)) == [*[2] * 7, 6]
    assert shares(7, demand(1, 50), demand(2, 50), demand(3, 50), demand(4, 50)) == [3, 2, 2, 0]


def test_the_sessions_of_one_user_do_not_take_the_least_of_others() -> None:
    assert shares(8, *[demand(1, 2)] * 9, demand(2, 50)) == [2, 2, 2, *[0] * 6, 2]
    assert shares(8, *[demand(1, 2)] * 9, *[demand(2, 2)] * 9) == [2, 2, *[0] * 7, 2, 2, *[0] * 7]
    assert shares(9, *[demand(1, 2)] * 4, demand(2, 3), demand(3, 2)) == [2, 2, 0, 0, 3, 2]


def test_who_of_a_user_gets_its_least() -> None:
    one = [replace(demand(1, 2), turn=turn) for turn in (2, 1, 0, 1)]
    assert shares(4, *one) == [0, 2, 2, 0]
    assert shares(4, *one, demand(2, 2)) == [0, 0, 2, 0, 2]
    assert shares(10, *one) == [2, 2, 2, 2]


def test_a_limit_of_users() -> None:
    assert shares(100, demand(1, 90), demand(2, 90), limit=30) == [30, 30]
    assert shares(100, demand(1, 90), demand(1, 90), demand(1, 90), limit=5) == [3, 2, 0]
    assert shares(40, demand(1, 90), demand(2, 90), limit=30) == [20, 20]


DEMANDS = st.lists(
    st.builds(
        lambda uid, more, chunk, turn: Demand(uid, 2 * chunk, (2 + more) * chunk, chunk, turn),
        st.integers(0, 3), st.integers(0, 40), st.sampled_from([1, 4, 6]), st.integers(0, 2),
    ),
    max_size=12,
)  # fmt: skip


@given(st.integers(0, 400), DEMANDS, st.integers(0, 200))
def test_rules(room: int, demands: list[Demand], limit: int) -> None:
    found = fair(room, demands, limit)
    assert sum(found) <= room
    for one, share in zip(demands, found, strict=True):
        assert share == 0 or one.least <= share <= one.wanted
        assert share % one.chunk == 0
        mine = [s for s, w in zip(found, demands, strict=True) if w.uid == one.uid]
        assert not limit or sum(mine) <= limit
    if sum(w.least for w in demands) <= room and not limit:
        assert all(found)
        if sum(w.wanted for w in demands) <= room:
            assert found == [w.wanted for w in demands]
        else:  # less than a chunk is left over when a session asks for more
            lacking = [w.chunk for w, s in zip(demands, found, strict=True) if s < w.wanted]
            assert room - sum(found) < max(lacking)


@given(st.integers(0, 100), DEMANDS, st.integers(0, 50))
def test_no_user_has_two_leasts_more_than_one_who_lacks_some(
    room: int, demands: list[Demand], limit: int
) -> None:
    same = [replace(one, least=8, wanted=8 + one.wanted // 4 * 4, chunk=4) for one in demands]
    found = fair(room, same, limit)
    served = Counter(one.uid for one, share in zip(same, found, strict=True) if share)
    for one, share in zip(same, found, strict=True):
        if not share:
            assert 8 * (served[one.uid] + 1) > limit > 0 or room < 8 * (served.total() + 1)
            assert limit or max(served.values(), default=0) <= served[one.uid] + 1
        earlier = [
            other for other, has in zip(same, found, strict=True)
            if has and other.uid == one.uid and other.turn > one.turn
        ]  # fmt: skip
        assert share or not earlier


@given(st.integers(0, 400), DEMANDS, st.integers(0, 3))
def test_the_turns_do_not_matter_while_there_is_the_least_for_all(
    more: int, demands: list[Demand], turn: int
) -> None:
    room = sum(one.least for one in demands) + more
    assert fair(room, demands) == fair(room, [replace(one, turn=turn) for one in demands])


@given(st.integers(0, 400), DEMANDS, st.integers(1, 30))
def test_sessions_of_another_user_leave_a_user_as_much_as_one_would(
    room: int, demands: list[Demand], many: int
) -> None:
    """Apart from the least of each, and from a chunk that rounding gives or takes."""
    stranger = Demand(9, 8, 400, 4)
    with_one = fair(room, [*demands, stranger])
    with_many = fair(room, [*demands, *[stranger] * many])
    if room >= sum(one.least for one in demands) + 8 * many and with_one[-1] >= 8 * many:
        assert sum(with_many[len(demands) :]) <= sum(with_one[len(demands) :]) + 8
