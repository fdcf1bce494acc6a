"""What the nodes of a job would restore that does not run, as each of them says."""

from __future__ import annotations

import contextlib
import random

from pccheck_native.group import Refused
from pccheck_native.nodes.holding import Holding, Restorable, restorable
from pccheck_native.nodes.homes import Homes
from pccheck_native.nodes.offers import HeldPart, Offer, PeerServer, StartAnswer, StartRecord, Word
from tests.unit.pccheck_native.nodes.cluster import A, B, a_list, an_offer, born, full, node

OLD = born(a_list(A))


def held(at: int, *steps: int, record: StartRecord = OLD, rank: int | None = None) -> Holding:
    """A node with the parts of these steps of its rank."""
    parts = [(full(record.start, step), at if rank is None else rank) for step in steps]
    peer = PeerServer((f"10.0.0.{at}:77",), bytes([at]) * 32, b"t" * 32)
    return Holding(an_offer(at, record.who, [record], *parts, peer=peer), "1.0", is_live=False)


def answer(*holdings: Holding, word: Word = Word()) -> StartAnswer | Refused:  # noqa: B008
    found = restorable(holdings, word)
    assert found is not None
    return found.answer


def places(found: Restorable | None) -> dict[bytes, list[int]]:
    assert found is not None and isinstance(found.homes, Homes)
    return {home.node: [part for part, _ in home.parts] for home in found.homes.homes}


def test_the_newest_step_that_all_ranks_have_would_be_restored() -> None:
    found = restorable([held(0, 3, 4, 5), held(1, 3, 4)])
    assert found is not None and isinstance(found.answer, StartAnswer)
    assert (found.answer.restored, found.world_size) == (full(A, 4), 2)
    assert places(found) == {node(0): [0], node(1): [1]}


def test_a_step_may_be_chosen() -> None:
    found = restorable([held(0, 3, 4), held(1, 3, 4)], Word(step=3))
    assert found is not None and found.homes is not None
    assert found.homes.checkpoint == full(A, 3)
    assert isinstance(answer(held(0, 4), held(1, 4), word=Word(step=9)), Refused)


def test_nodes_that_do_not_answer_are_as_nodes_that_are_not_here() -> None:
    refused = answer(held(0, 3))
    assert isinstance(refused, Refused) and "stored the part of rank 1" in refused.reason
    refused = answer(held(1, 3))
    assert isinstance(refused, Refused) and "1 of the 2 nodes" in refused.reason


def test_one_copy_of_replicated_state_is_enough() -> None:
    shared = born(a_list(A, [(0,), (1,), (2,)], replicated=True))
    found = restorable([held(0, 3, record=shared), held(2, 3, record=shared)])
    assert places(found) == {node(0): [0], node(2): [2]}


def test_a_node_without_a_rank_counts_with_what_it_holds() -> None:
    """Its rank has moved, and the new node has not saved."""
    moved = StartRecord(a_list(B, [(0,), (), (1,)], number=2), (A,), ((0, full(A, 3)),))
    first = Holding(
        an_offer(0, moved.who, [OLD, moved], (full(A, 3), 0), peer=held(0).offer.peer), "1", True
    )
    old, new = held(1, 3), held(2, record=moved)
    found = restorable([first, old, new])
    assert places(found) == {node(0): [0], node(1): [1]}


def test_nothing_is_known_without_a_start() -> None:
    assert restorable([]) is None
    assert restorable([Holding(an_offer(0, OLD.who), "1.0", is_live=False)]) is None


def test_a_job_that_has_saved_nothing_would_restore_nothing() -> None:
    found = restorable([held(0), held(1)])
    assert found is not None and isinstance(found.answer, StartAnswer)
    assert found.answer.restored is None and found.homes is None


def test_it_is_read_as_it_was_written() -> None:
    one = held(0, 3, 4)
    brief = one._replace(offer=one.offer._replace(records=(OLD.brief(),)))
    assert Holding.of_packed(one.packed()) == brief


def test_what_a_node_sends_is_checked() -> None:
    packed, chance = held(0, 3, 4).packed(), random.Random(4)
    for _ in range(3000):
        changed = bytearray(packed)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        with contextlib.suppress(ValueError):
            found = Holding.of_packed(bytes(changed)[: chance.randrange(1, 2 * len(changed))])
            assert isinstance(found.offer, Offer) and isinstance(found.version, str)
            assert all(isinstance(one, HeldPart) for one in found.offer.parts)
