"""What a start restores, case by case. Every state that a small job can reach: test_states.py."""

from __future__ import annotations

import random

import pytest

from pccheck_native.group import Refused
from pccheck_native.nodes.beginning import absent, decide
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.lists import StartList
from pccheck_native.nodes.offers import HeldPart, Offer, StartAnswer, StartRecord, Word
from tests.unit.pccheck_native.nodes.cluster import A, B, C, D, a_list, an_offer, born, full

NEW = a_list(D, number=9)
OLD = born(a_list(A))


def refused(found: StartAnswer | Refused, *words: str) -> None:
    """It is refused, and the sentences have these words."""
    assert isinstance(found, Refused), found
    text = f"{found.reason} -> {found.hint}"
    assert [word for word in words if word not in text] == [], text


def restored(found: StartAnswer | Refused) -> FullName | None:
    assert isinstance(found, StartAnswer), found
    return found.restored


# -- which checkpoint ---------------------------------------------------------------------------


def test_nodes_without_anything_begin_empty() -> None:
    found = decide([an_offer(0, NEW), an_offer(1, NEW)], NEW)
    assert found == StartAnswer(D, 0, None, ())


def test_a_member_that_has_not_offered_is_named() -> None:
    late = absent([an_offer(1, NEW)], NEW, 30)
    assert late and "host a (rank 0) offered nothing for 30 s" in late.reason
    with pytest.raises(ValueError, match="all members"):
        decide([an_offer(1, NEW)], NEW)
    stale = an_offer(0, NEW)._replace(promise=NEW.promise._replace(number=3))
    assert absent([stale, an_offer(1, NEW)], NEW, 30) == late


def test_the_newest_that_all_parts_have() -> None:
    offers = [
        an_offer(0, NEW, [OLD], (full(A, 1), 0), (full(A, 2), 0), (full(A, 3), 0)),
        an_offer(1, NEW, [OLD], (full(A, 1), 1), (full(A, 2), 1)),
    ]
    found = decide(offers, NEW)
    assert restored(found) == full(A, 2)
    assert isinstance(found, StartAnswer) and found.seen == (A,)


def test_what_one_node_has_of_the_first_checkpoint_is_not_passed_over() -> None:
    offers = [an_offer(0, NEW, [OLD], (full(A, 1), 0)), an_offer(1, NEW, [OLD])]
    refused(decide(offers, NEW), "step 1", "none can be restored",
            "host b stored the part of rank 1", "fresh=True")  # fmt: skip
    assert restored(decide([one._replace(word=Word(fresh=True)) for one in offers], NEW)) is None


def test_a_known_global_that_is_gone_is_refused() -> None:
    offers = [
        an_offer(0, NEW, [OLD], (full(A, 1), 0)),
        an_offer(1, NEW, [OLD], (full(A, 1), 1), (full(A, 2), 1), known=(full(A, 2),)),
    ]
    lacks = "host a stored the part of rank 0 and no longer has it"
    refused(decide(offers, NEW), "step 2 is global", lacks, "restore(step=1)")
    word = [one._replace(word=Word(step=1)) for one in offers]
    assert restored(decide(word, NEW)) == full(A, 1)


def test_a_damaged_global_is_passed_over_with_a_warning() -> None:
    damaged = HeldPart(full(A, 2), 0, intact=False)
    first = an_offer(0, NEW, [OLD], (full(A, 1), 0), known=(full(A, 2),))
    offers = [
        first._replace(parts=(*first.parts, damaged)),
        an_offer(1, NEW, [OLD], (full(A, 1), 1), (full(A, 2), 1)),
    ]
    found = decide(offers, NEW)
    assert restored(found) == full(A, 1)
    assert isinstance(found, StartAnswer)
    assert "step 2 is global" in found.warnings[0] and "damaged on host a" in found.warnings[0]


def test_what_the_top_restored_is_restored_again() -> None:
    records = [OLD, born(a_list(B, number=2), full(A, 2), [A])]
    offers = [
        an_offer(at, NEW, records, (full(A, 1), at), (full(A, 2), at), (full(A, 3), at))
        for at in (0, 1)
    ]
    assert restored(decide(offers, NEW)) == full(A, 2)
    lost = [offers[0], offers[1]._replace(parts=offers[1].parts[:1])]
    refused(decide(lost, NEW), "continued from step 2", "host b stored the part of rank 1")


def test_equal_steps_of_two_starts_are_two_checkpoints() -> None:
    records = [OLD, born(a_list(B, number=2), None, [A])]
    offers = [
        an_offer(0, NEW, records, (full(B, 5), 0), (full(A, 5), 0)),
        an_offer(1, NEW, records, (full(A, 5), 1)),
    ]
    refused(decide(offers, NEW), "step 5", "host b stored the part of rank 1")


def test_a_start_that_was_promised_and_never_answered_hides_nothing() -> None:
    begun = born(a_list(B, number=2))._replace(restored=())
    offers = [an_offer(at, NEW, [OLD, begun], (full(A, 1), at)) for at in (0, 1)]
    found = decide(offers, NEW)
    assert restored(found) == full(A, 1)
    assert isinstance(found, StartAnswer) and set(found.seen) == {A, B}


# -- where its parts are ------------------------------------------------------------------------


def test_ranks_that_changed_their_nodes_are_told_where_to_start() -> None:
    swapped = a_list(D, [(1,), (0,)], number=9)
    offers = [an_offer(at, swapped, [OLD], (full(A, 1), at)) for at in (0, 1)]
    refused(decide(offers, swapped), "the part of rank 0 is on host a, and is needed on host b",
            "start rank 0 on host a")  # fmt: skip
    assert restored(decide(offers, swapped, travel=True)) == full(A, 1)


def test_another_world_size_is_refused_with_both_numbers() -> None:
    alone = a_list(D, [(0,)], number=9)
    two = [an_offer(0, alone, [OLD], (full(A, 1), 0), (full(A, 1), 1))]
    assert restored(decide([two[0]], alone)) == full(A, 1)
    three = a_list(D, [(0,), (1,), (2,)], number=9)
    offers = [an_offer(at, three, [OLD], (full(A, 1), at)) for at in (0, 1)]
    refused(decide([*offers, an_offer(2, three)], three), "saved by 2 ranks", "3 ranks",
            "start the job with 2 ranks")  # fmt: skip


def test_of_replicated_state_one_copy_on_each_node_is_enough() -> None:
    saved = born(a_list(A, [(0, 1), (2, 3)], replicated=True))
    new = a_list(D, [(0,), (1,)], number=9)
    one = [(full(A, 1), 0), (full(A, 1), 1)]
    other = [(full(A, 1), 2), (full(A, 1), 3)]
    newer = [(full(A, 2), 2), (full(A, 2), 3)]
    offers = [an_offer(0, new, [saved], *one), an_offer(1, new, [saved], *other, *newer)]
    assert restored(decide(offers, new)) == full(A, 1)
    assert restored(decide(offers, new, travel=True)) == full(A, 2)
    half = [offers[0], an_offer(1, new, [saved], *other[:1])]
    refused(decide(half, new), "host b has no copy of it", "start the job on host a only")
    assert restored(decide(half, new, travel=True)) == full(A, 1)


# -- who is here --------------------------------------------------------------------------------


def test_the_half_with_the_first_member_goes_on() -> None:
    saved = born(a_list(A, replicated=True))
    first = a_list(D, [(0,)], number=9)
    assert restored(decide([an_offer(0, first, [saved], (full(A, 1), 0))], first)) == full(A, 1)
    second = a_list(D, [(), (0,)], number=9)
    offer = an_offer(1, second, [saved], (full(A, 1), 1))
    refused(decide([offer], second), "1 of the 2 nodes", "host a is not", "restore(without='a')")
    said = offer._replace(word=Word(without=("a",)))
    assert restored(decide([said], second)) == full(A, 1)
    refused(decide([offer._replace(word=Word(without=("x",)))], second), "restore(without='a')")
    refused(decide([offer._replace(word=Word(without=("b",)))], second), "a node that is here")


def test_a_member_without_its_disk_does_not_count() -> None:
    saved = born(a_list(A, [(0,), (1,), (2,)], replicated=True))
    new = a_list(D, [(0,), (1,), (2,)], number=9)
    offers = [an_offer(0, new, [saved], (full(A, 1), 0)), an_offer(1, new), an_offer(2, new)]
    refused(
        decide(offers, new, travel=True), "host b and host c ran this job last", "not there any"
    )
    word = Word(without=("b", "c"))
    going = [one._replace(word=word) for one in offers]
    answer = decide(going, new, travel=True)
    assert isinstance(answer, StartAnswer) and answer.restored == full(A, 1)
    assert isinstance(
        decide([one._replace(word=Word(without=("a",))) for one in offers], new), Refused
    )


def test_a_node_that_only_gave_its_shards_to_a_start_cannot_know_how_it_went() -> None:
    """Nodes b and c continued with what node a offered, and node a alone is half of the members."""
    before = born(a_list(A, replicated=True))
    other = a_list(B, [(), (0,), (1,)], 2, replicated=True)
    given = before, StartRecord(other)
    alone = a_list(D, [(0,)], number=9)
    offer = an_offer(0, alone, given, (full(A, 1), 0))
    refused(
        decide([offer], alone),
        "began on host b and host c",
        "host a",
        "restore(without=['b', 'c'])",
    )
    said = offer._replace(word=Word(without=("b", "c")))
    assert restored(decide([said], alone)) == full(A, 1)
    both = a_list(D, [(0,), (1,)], number=9)
    member = an_offer(1, both, given, (full(A, 1), 1))
    assert restored(decide([an_offer(0, both, given, (full(A, 1), 0)), member], both)) == full(A, 1)


def test_half_of_a_start_that_began_on_some_nodes_only_is_not_enough() -> None:
    """Nodes b and c may have begun another start, which displaced this one on node b."""
    before = born(a_list(A, [(0,), (1,), (2,)], replicated=True))
    half_begun = born(a_list(B, number=2, replicated=True), full(A, 1), [A])
    alone = a_list(D, [(0,)], number=9)
    offer = an_offer(0, alone, [before, half_begun], (full(A, 1), 0))
    refused(decide([offer], alone), "1 of the 3 nodes", "host b and host c are not")
    began = offer._replace(known=(full(B, 2),), parts=(HeldPart(full(B, 2), 0),))
    assert restored(decide([began], alone)) == full(B, 2)


def test_a_host_with_another_storage_directory_is_another_node() -> None:
    def before(size: int, **more: bool) -> StartRecord:
        who = a_list(A, [(at,) for at in range(size)], **more)
        members = [one._replace(node=bytes([100 + at]) * 16) for at, one in enumerate(who.members)]
        return born(who._replace(members=(who.members[0], *members[1:])))

    offers = [an_offer(0, NEW, [before(2)], (full(A, 1), 0)), an_offer(1, NEW)]
    why = "host b stored the part of rank 1 in another storage directory than it has now"
    refused(decide(offers, NEW), why, "pccheckd on host b with the earlier storage directory")
    new = a_list(D, [(0,), (1,), (2,)], number=9, replicated=True)
    offers = [an_offer(0, new, [before(3, replicated=True)], (full(A, 1), 0))]
    offers += [an_offer(at, new) for at in (1, 2)]
    refused(decide(offers, new), "1 of the 3 nodes that ran this job last are here",
            "(another storage directory makes host b and host c another node)")  # fmt: skip


def test_without_a_node_its_parts_are_given_up() -> None:
    saved = born(a_list(A, [(0,), (1,), (2,)]))
    new = a_list(D, [(0,), (1,)], number=9)
    parts = [[(full(A, 2), at), (full(A, 1), at)] for at in (0, 1)]
    offers = [an_offer(at, new, [saved], *parts[at]) for at in (0, 1)]
    away = "host c stored the part of rank 2 and is not here"
    refused(decide(offers, new), "step 2 may be global", away, "start the job on host c too")


# -- starts that ran apart ----------------------------------------------------------------------


def test_two_branches_are_never_mixed() -> None:
    records = [OLD, born(a_list(B, [(0,)], 2), full(A, 1), [A]),
               born(a_list(C, [(), (0,)], 3), full(A, 1), [A])]  # fmt: skip
    offers = [
        an_offer(0, NEW, records[:2], (full(A, 1), 0), (full(B, 2), 0)),
        an_offer(1, NEW, [records[0], records[2]], (full(A, 1), 1), (full(C, 7), 0)),
    ]
    refused(decide(offers, NEW), "ran apart", "host a: step 2", "host b: step 7",
            f"restore(start='{C.hex()[:12]}')")  # fmt: skip
    one = decide([one._replace(word=Word(start="newest")) for one in offers], NEW, travel=True)
    assert restored(one) == full(C, 7)
    assert isinstance(one, StartAnswer) and "ran apart" in one.warnings[0]
    said = [one._replace(word=Word(start=B.hex()[:8])) for one in offers]
    assert restored(decide(said, NEW, travel=True)) == full(B, 2)
    unknown = [one._replace(word=Word(start="ff")) for one in offers]
    refused(decide(unknown, NEW), "start='ff' names no start", C.hex()[:12])


def test_a_branch_that_some_nodes_lack_is_refused_with_ways_out() -> None:
    every = a_list(A, replicated=True), a_list(B, [(0,)], 2, replicated=True)
    records = [born(every[0]), born(every[1], full(A, 1), [A])]
    offers = [
        an_offer(0, NEW, records, (full(A, 1), 0), (full(B, 2), 0), known=(full(B, 2),)),
        an_offer(1, NEW, records, (full(A, 1), 1)),
    ]
    lacks = "step 2 is global", "host b has no copy of it"
    refused(decide(offers, NEW), *lacks, "on host a only", "restore(step=1) goes back")
    said = [one._replace(word=Word(start=B.hex()[:8])) for one in offers]
    refused(decide(said, NEW), *lacks, f"restore(step=1, start={B.hex()[:8]!r}) goes back")
    back = [one._replace(word=Word(1, B.hex()[:8])) for one in offers]
    assert restored(decide(back, NEW)) == full(A, 1)


def test_a_word_that_a_start_has_followed_goes_on_from_that_start() -> None:
    """torchrun begins the job again with the arguments that it has."""
    word = Word(start=B.hex()[:8], without=("node-of-old",))
    records = [OLD, born(a_list(B, number=2), full(A, 1), [A]),
               born(a_list(C, number=3), full(B, 2), [A, B], word=word)]  # fmt: skip
    parts = [[(full(B, 2), at), (full(C, 3), at)] for at in (0, 1)]
    again = [an_offer(at, NEW, records, *parts[at], word=word) for at in (0, 1)]
    found = decide(again, NEW)
    assert restored(found) == full(C, 3)
    assert isinstance(found, StartAnswer) and "'node-of-old' names no node" in found.warnings[0]
    other = [one._replace(word=Word(start=B.hex()[:12])) for one in again]
    assert restored(decide(other, NEW)) == full(B, 2)


def test_a_new_disk_under_the_old_host_name_is_not_left_out() -> None:
    old = a_list(A, replicated=True)
    moved = old.members[1]._replace(node=bytes([99]) * 16)
    saved = born(old._replace(members=(old.members[0], moved)))
    offers = [an_offer(at, NEW, [saved] if not at else (), (full(A, 1), 0)) for at in (0, 1)]
    newer = born(a_list(B, number=2, replicated=True), full(A, 1), [A])
    said = [one._replace(records=(saved, newer), word=Word(without=("b",))) for one in offers]
    assert restored(decide(said, NEW)) == full(A, 1)


def test_a_branch_that_saved_nothing_gives_way() -> None:
    records = [OLD, born(a_list(B, number=5), full(A, 1), [A]),
               born(a_list(C, number=3), full(A, 2), [A])]  # fmt: skip
    parts = [[(full(A, 1), at), (full(A, 2), at)] for at in (0, 1)]
    offers = [an_offer(at, NEW, records, *parts[at]) for at in (0, 1)]
    assert restored(decide(offers, NEW)) == full(A, 2)
    own = [an_offer(at, NEW, records, *parts[at], (full(B, 1), at)) for at in (0, 1)]
    assert restored(decide(own, NEW)) == full(B, 1)


def test_records_without_a_start_that_counts_are_refused() -> None:
    offers = [an_offer(0, NEW, [], (full(A, 1), 0)), an_offer(1, NEW)]
    refused(decide(offers, NEW), "step 1", "record of a start")


# -- words --------------------------------------------------------------------------------------


def test_wanted_steps_that_differ_are_refused() -> None:
    offers = [an_offer(0, NEW, word=Word(step=3)), an_offer(1, NEW, word=Word(step=4))]
    refused(decide(offers, NEW), "host a wants restore(step=3)", "host b wants restore(step=4)",
            "same arguments", "the same fresh=")  # fmt: skip


def test_a_step_that_nobody_has() -> None:
    offers = [an_offer(at, NEW, [OLD], (full(A, 1), at), word=Word(step=7)) for at in (0, 1)]
    refused(
        decide(offers, NEW), "step 7 cannot be restored on all nodes", "the nodes here hold step 1"
    )


def test_a_step_of_an_older_start() -> None:
    records = [OLD, born(a_list(B, number=2), full(A, 2), [A])]
    parts = [[(full(A, 1), at), (full(A, 2), at), (full(B, 2), at)] for at in (0, 1)]
    offers = [an_offer(at, NEW, records, *parts[at], word=Word(step=1)) for at in (0, 1)]
    assert restored(decide(offers, NEW)) == full(A, 1)
    same = [one._replace(word=Word(step=2)) for one in offers]
    assert restored(decide(same, NEW)) == full(B, 2)


# -- once, and again ----------------------------------------------------------------------------


def test_an_answer_that_an_offer_repeats_is_the_answer() -> None:
    given = StartAnswer(D, 0, full(A, 1), (A,))
    parts = [[(full(A, 1), at), (full(A, 2), at)] for at in (0, 1)]
    offers = [an_offer(at, NEW, [OLD], *parts[at]) for at in (0, 1)]
    assert restored(decide(offers, NEW)) == full(A, 2)
    offers[1] = offers[1]._replace(answers=(given,))
    assert decide(offers, NEW) == given
    offers[0] = offers[0]._replace(answers=(given._replace(restored=None),))
    refused(decide(offers, NEW), "remember 2 answers")


def test_a_later_round_restores_the_newest_that_all_have() -> None:
    mine = born(NEW, full(A, 1), [A])
    parts = [
        [(full(A, 1), 0), (full(D, 2), 0), (full(D, 3), 0)],
        [(full(A, 1), 1), (full(D, 2), 1)],
    ]
    offers = [an_offer(at, NEW, [OLD, mine], *parts[at], round=1) for at in (0, 1)]
    found = decide(offers, NEW, 1)
    assert found == StartAnswer(D, 1, full(D, 2), (A,))
    nothing = [one._replace(parts=one.parts[:1]) for one in offers]
    assert restored(decide(nothing, NEW, 1)) == full(A, 1)
    older = [one._replace(word=Word(step=1)) for one in offers]
    assert restored(decide(older, NEW, 1)) == full(A, 1)
    no_record = [an_offer(at, NEW, [OLD], round=1) for at in (0, 1)]
    with pytest.raises(ValueError, match="follows the first answer"):
        decide(no_record, NEW, 1)
    late = absent([offers[0], offers[1]._replace(round=0)], NEW, 5, 1)
    assert late and "rank 1" in late.reason


def test_what_a_later_round_restored_is_newer_than_what_was_saved_before() -> None:
    mine = born(a_list(A)).with_answer(StartAnswer(A, 1, full(A, 1), ()))
    parts = [[(full(A, 1), at), (full(A, 2), at)] for at in (0, 1)]
    offers = [an_offer(at, NEW, [mine], *parts[at], known=(full(A, 2),)) for at in (0, 1)]
    assert restored(decide(offers, NEW)) == full(A, 1)
    saved = [an_offer(at, NEW, [mine], *parts[at], (full(A, 2, base=1), at)) for at in (0, 1)]
    assert restored(decide(saved, NEW)) == full(A, 2, base=1)


def test_a_fresh_start_that_saved_nothing_hides_nothing() -> None:
    begun = born(a_list(B, number=2), None, [A], word=Word(fresh=True))
    offers = [an_offer(at, NEW, [OLD, begun], (full(A, 1), at)) for at in (0, 1)]
    found = decide(offers, NEW)
    assert restored(found) == full(A, 1)
    assert isinstance(found, StartAnswer) and "fresh=True" in found.warnings[0]
    half = [an_offer(0, NEW, [OLD, begun], (full(B, 1), 0)), an_offer(1, NEW, [OLD, begun])]
    refused(decide(half, NEW), "step 1", "none can be restored")
    saved = [an_offer(at, NEW, [OLD, begun], (full(A, 2), at), (full(B, 1), at)) for at in (0, 1)]
    assert restored(decide(saved, NEW)) == full(B, 1)


def test_whatever_is_offered_there_is_an_answer_or_a_sentence() -> None:
    """Anybody who reaches the store may write there."""
    starts, refusals = (A, B, C), 0
    for seed in range(800):
        rng = random.Random(seed)
        layouts = [[(0,), (1,)], [(0, 1), (2,)], [(), (0,), (1,)], [(1,), (), (0,)], [(0,)]]
        lists = {one: a_list(one, rng.choice(layouts), rng.randint(1, 9),
                             replicated=rng.random() < 0.4) for one in starts}  # fmt: skip
        new = a_list(D, [(0,), (1,), (2,)], number=9)
        offers = [_any_offer(rng, at, new, lists) for at in range(rng.randint(3, 4))]
        found = decide(offers, new, travel=rng.random() < 0.5)
        if isinstance(found, StartAnswer):
            assert StartAnswer.of_plain(found.to_plain()) == found
        else:
            refusals += 1
            assert found.reason.isprintable() and found.hint.isprintable()
            assert len(found.reason) < 1500 and len(found.hint) < 1500
    assert 200 < refusals < 800


def _any_offer(rng: random.Random, at: int, new: StartList, lists: dict[bytes, StartList]) -> Offer:
    def point() -> FullName:
        return full(rng.choice([*lists]), rng.randint(1, 4), rng.randint(0, 1))

    records = [
        StartRecord(
            who,
            tuple(one for one in lists if one != start and rng.random() < 0.4),
            tuple((r, point() if rng.random() < 0.5 else None) for r in range(rng.randint(0, 2))),
        )
        for start, who in lists.items()
        if rng.random() < 0.8
    ]
    parts = tuple(
        HeldPart(point(), rng.randint(0, 3), intact=rng.random() < 0.9)
        for _ in range(rng.randint(0, 20))
    )
    known = tuple(point() for _ in range(rng.randint(0, 2)))
    step = rng.choice([None, 1, 2])
    words = [Word(), Word(), Word(step=step), Word(start=rng.choice(["newest", "41", "99"])),
             Word(without=(rng.choice("abcd"),))]  # fmt: skip
    word = rng.choice(words) if at == 0 or rng.random() < 0.1 else Word()
    return an_offer(at, new, records, known=known, parts=parts, word=word)
