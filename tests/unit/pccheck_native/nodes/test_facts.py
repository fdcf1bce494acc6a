"""What is global and given up, and what a node keeps, case by case."""

from __future__ import annotations

from pccheck_native.nodes.facts import (
    Have,
    Promises,
    RankHas,
    Said,
    Space,
    begin,
    give_up,
    hear,
    offer,
    publish,
    recyclable,
    room,
    say,
    stays,
)
from tests.unit.pccheck_native.nodes.cluster import A, B, full, name

ONE, TWO, THREE, FOUR = map(name, (1, 2, 3, 4))


def test_global_is_what_every_member_offers() -> None:
    here = Have((ONE, TWO), (ONE, TWO), TWO)
    assert say([here, here]).globals == (TWO, ONE)
    assert say([here, Have((ONE,), (ONE,), ONE)]) == Said((ONE,))
    assert say([here, None]) == Said()
    assert say([]) == Said()


def test_silence_gives_nothing_up() -> None:
    assert say([Have((ONE,), (ONE,), ONE), None, Have()]) == Said()


def test_what_a_member_passed_and_has_not_is_given_up() -> None:
    failed = Have((), (TWO,), TWO)
    assert say([Have((ONE, TWO), (ONE, TWO), TWO), failed, None]).given_up == (ONE,)
    assert say([Have((ONE, TWO), (ONE, TWO), TWO), Have()]).given_up == ()


def test_what_was_recycled_under_a_newer_global_is_not_given_up() -> None:
    slow = Have((ONE, TWO), (ONE, TWO), TWO)
    fast = Have((), (), TWO, (TWO,))
    assert say([slow, fast]) == Said((TWO,))


def test_a_node_offers_what_all_its_ranks_have() -> None:
    mine = Promises(A, offered=frozenset((ONE, TWO)))
    ranks = [RankHas((ONE, TWO), (), TWO), RankHas((ONE,), (TWO,), TWO)]
    assert publish(mine, ranks) == Have((ONE,), (ONE, TWO), TWO)
    failed = [RankHas((ONE, TWO), (), TWO), RankHas((ONE,), (), TWO)]
    assert publish(mine, failed) == Have((ONE,), (ONE,), TWO)
    late = [RankHas((ONE, TWO), (), TWO), RankHas((), (), None)]
    assert publish(mine, late) == Have((), (ONE, TWO), TWO)


def test_one_slot_stays_without_a_promise() -> None:
    assert room(5, 2, 2) == Space(4, spare=True)
    assert room(4, 2, 2) == Space(4, spare=False)
    mine = begin(A, None, (), keep=1)
    held = [full(A, step) for step in (1, 2, 3)]
    assert offer(mine, held, Space(2, spare=True)).offered == {ONE, TWO}
    known = hear(mine, Said((ONE,)), keep=1)
    assert offer(known, held, Space(2, spare=True)).offered == {TWO}


def test_what_was_offered_stays_until_a_fact_frees_it() -> None:
    mine = Promises(A, offered=frozenset((ONE, TWO, THREE)))
    held = [full(A, step) for step in (4, 3, 2, 1)]
    assert recyclable(mine, held) == [full(A, 4)]
    heard = hear(mine, Said((TWO,), (THREE,)), keep=1)
    assert heard.known == (full(A, 2),) and heard.offered == frozenset()
    assert recyclable(heard, held) == [full(A, 1), full(A, 3), full(A, 4)]
    assert hear(heard, Said((ONE,)), keep=1) == heard


def test_what_was_restored_counts_as_a_known_global() -> None:
    before = (full(B, 9), full(B, 8), full(B, 7))
    mine = begin(A, full(B, 8), before, keep=2)
    assert mine.known == (full(B, 8), full(B, 9)) and mine.newest is None
    one = hear(mine, Said((ONE,)), keep=2)
    assert one.known == (full(A, 1), full(B, 8)) and one.newest == ONE
    two = hear(one, Said((TWO, ONE)), keep=2)
    assert recyclable(two, [*before, full(A, 1)]) == [full(B, 7), full(B, 8), full(B, 9)]


def test_a_start_without_a_checkpoint_keeps_the_older_globals_at_first() -> None:
    mine = begin(A, None, (full(B, 2), full(B, 1)), keep=1)
    assert stays(mine) == {full(B, 2)}
    assert stays(hear(mine, Said((ONE,)), keep=1)) == {full(A, 1)}


def test_a_later_round_is_like_a_start() -> None:
    mine = hear(begin(A, None, (), keep=1), Said((FOUR,)), keep=1)
    again = begin(A, full(A, 2), mine.known, 1, 1)
    assert stays(again) == {full(A, 2)} and again.newest is None
    assert hear(again, Said((name(9),)), keep=1) == again
    held = [full(A, 2), full(A, 3), full(A, 3, base=1)]
    offered = offer(again, held, Space(2, spare=True))
    assert offered.offered == {name(3, base=1)}
    newer = hear(offered, Said((name(3, base=1),)), keep=1)
    assert recyclable(newer, held) == [full(A, 2), full(A, 3)]
    ranks = [RankHas([one.name for one in held], (), name(3, base=1))]
    assert publish(offered, ranks) == Have(
        (name(3, base=1),), (name(3, base=1),), name(3, base=1), (name(2),)
    )


def test_what_one_rank_of_the_node_failed_is_promised_no_more() -> None:
    """No other node need have heard of it, so no fact would ever say so."""
    mine = begin(A, None, (), keep=1)
    mine = offer(mine, [full(A, 1)], Space(1, spare=True))
    ranks = [RankHas((ONE,), (), ONE), RankHas((), (ONE,), ONE)]
    assert give_up(mine, ranks) == mine
    failed = [RankHas((ONE, TWO), (), TWO), RankHas((TWO,), (), TWO)]
    assert say([publish(mine, failed), Have()]) == Said()
    after = give_up(mine, failed)
    assert after.offered == frozenset()
    assert offer(after, [full(A, 2)], Space(1, spare=True)).offered == {TWO}
