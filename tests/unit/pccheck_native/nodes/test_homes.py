"""Where the parts are of what all ranks restore, for nodes that lack some of them."""

from __future__ import annotations

from typing import Any

import pytest

from pccheck_native.nodes.beginning import decide
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.homes import Homes, can_travel, homes_of
from pccheck_native.nodes.lists import StartList
from pccheck_native.nodes.offers import (
    HeldPart,
    NodeServer,
    Offer,
    PeerServer,
    StartAnswer,
    StartRecord,
)
from tests.unit.pccheck_native.nodes.cluster import A, D, a_list, an_offer, born, full, node

OLD = born(a_list(A))
SWAPPED = a_list(D, [(1,), (0,)], number=9)
STEP = full(A, 1)


def server(at: int) -> PeerServer:
    return PeerServer((f"10.0.0.{at}:77",), bytes([at]) * 32, b"t" * 32)


def offer(
    at: int, to: StartList, record: StartRecord, *parts: tuple[FullName, int], **more: Any
) -> Offer:
    return an_offer(at, to, [record], *parts, peer=server(at), **more)


def parts(homes: Homes | None) -> dict[bytes, list[int]]:
    assert homes is not None
    return {home.node: [part for part, _ in home.parts] for home in homes.homes}


def test_ranks_that_swap_nodes_find_their_parts() -> None:
    offers = [offer(0, SWAPPED, OLD, (STEP, 0)), offer(1, SWAPPED, OLD, (STEP, 1))]
    assert can_travel(offers)
    answer = decide(offers, SWAPPED, travel=True)
    assert isinstance(answer, StartAnswer) and answer.restored == STEP
    found = homes_of(offers, SWAPPED, STEP)
    assert parts(found) == {node(0): [0], node(1): [1]}
    assert found is not None and (found.world_size, found.replicated) == (2, False)
    assert found.homes[0].peer == server(0)


def test_nodes_that_have_their_parts_need_no_homes() -> None:
    there = a_list(D, number=9)
    offers = [offer(0, there, OLD, (STEP, 0)), offer(1, there, OLD, (STEP, 1))]
    assert homes_of(offers, there, STEP) is None


def test_other_numbers_of_ranks_need_all_parts() -> None:
    three = a_list(D, [(0,), (1,), (2,)], number=9)
    offers = [
        offer(0, three, OLD, (STEP, 0)), offer(1, three, OLD, (STEP, 1)), offer(2, three, OLD)
    ]  # fmt: skip
    assert parts(homes_of(offers, three, STEP)) == {node(0): [0], node(1): [1]}


def test_damaged_parts_and_those_without_a_digest_are_no_homes() -> None:
    offers = [
        offer(0, SWAPPED, OLD, (STEP, 0)),
        offer(1, SWAPPED, OLD)._replace(
            parts=(HeldPart(STEP, 1, bytes(16), intact=False), HeldPart(STEP, 0))
        ),
    ]
    assert parts(homes_of(offers, SWAPPED, STEP)) == {node(0): [0]}


def test_of_replicated_state_only_whole_copies_count() -> None:
    """Each node has a copy, which its two ranks divide; the third node is new."""
    old = born(a_list(A, [(0, 1), (2, 3)], replicated=True))
    new = a_list(D, [(0, 1), (2, 3), (4, 5)], number=9, replicated=True)
    offers = [
        offer(0, new, old, (STEP, 0), (STEP, 1)), offer(1, new, old, (STEP, 2)), offer(2, new, old)
    ]  # fmt: skip
    assert parts(homes_of(offers, new, STEP)) == {node(0): [0, 1]}


def test_one_node_that_nobody_reads_from_keeps_all_at_home() -> None:
    offers = [
        offer(0, SWAPPED, OLD, (STEP, 0)),
        offer(1, SWAPPED, OLD, (STEP, 1))._replace(peer=None),
    ]
    assert not can_travel(offers)
    refused = decide(offers, SWAPPED, travel=can_travel(offers))
    assert not isinstance(refused, StartAnswer)
    assert "start pccheckd with --listen on host b" in refused.hint


def test_homes_and_offers_are_read_as_they_were_written() -> None:
    offers = [offer(0, SWAPPED, OLD, (STEP, 0)), offer(1, SWAPPED, OLD, (STEP, 1))]
    found = homes_of(offers, SWAPPED, STEP)
    assert found is not None and Homes.of_plain(found.to_plain()) == found
    (one, _) = offers
    assert NodeServer.of_plain(one.server.to_plain()) == one.server


@pytest.mark.parametrize(
    "plain",
    [
        [[], b"f" * 32, b"t" * 31],
        [["a"] * 17, b"f" * 32, b"t" * 32],
        [["\n"], bytes(32), bytes(32)],
    ],
)
def test_what_is_no_server_is_refused(plain: object) -> None:
    with pytest.raises(ValueError, match=r"size|list|printable"):
        PeerServer.of_plain(plain)
