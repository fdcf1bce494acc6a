"""What a rank reads of a checkpoint that lies on other nodes."""

from __future__ import annotations

from typing import Any

import pytest

from pccheck_native.nodes.homes import Home, Homes
from pccheck_native.nodes.offers import PeerServer
from pccheck_wire.errors import DamagedError, NoCheckpointError
from pccheck_wire.messages import Opened
from pccheckd.nodes.travel.away import Away
from tests.unit.pccheck_native.nodes.cluster import A, full, host, node

SERVER = PeerServer(("10.0.0.1:7",), bytes(32), bytes(32))


def away(*parts: list[int], size: int, replicated: bool = False) -> Away:
    """Node i has parts[i]; this one is node 0."""
    homes = [
        Home(node(at), host(at), SERVER, tuple((rank, bytes(16)) for rank in own))
        for at, own in enumerate(parts)
    ]
    return Away(Homes(full(A, 5), size, replicated, tuple(homes)), 9, node(0))


def opened(one: Away, rank: int, size: int, **options: Any) -> Opened:
    return one.opened(rank, size, [], [], **{"any_world_size": False, **options})


def test_a_rank_gets_its_own_part() -> None:
    found = opened(away([], [0, 1], [2], size=3), 2, 3)
    assert (found.rank, found.sequence, found.step, found.copies) == (2, 9, 5, [])
    assert [(one.rank, one.nodes) for one in found.far] == [(0, [1]), (1, [1]), (2, [2])]


def test_a_part_that_is_nowhere_is_no_other_ranks_part() -> None:
    with pytest.raises(DamagedError, match="cannot be restored on rank 1"):
        opened(away([], [0, 2], size=3), 1, 3)
    with pytest.raises(DamagedError):
        opened(away([], [0, 2], size=3), 1, 2, any_world_size=True)


def test_a_rank_that_did_not_exist_takes_another_ranks_state() -> None:
    assert opened(away([], [0, 1], size=2), 2, 3, any_world_size=True).rank == 0


def test_another_number_of_ranks_is_refused_unless_asked_for() -> None:
    with pytest.raises(NoCheckpointError, match="2 ranks, and this start has 3 ranks"):
        opened(away([], [0, 1], size=2), 2, 3)


def test_other_copies_of_replicated_state_are_those_of_other_nodes() -> None:
    """The copy of this node has proved damaged: nobody reads it again."""
    found = opened(away([0, 1], [2, 3], [4, 5], size=6, replicated=True), 0, 6)
    assert (found.rank, found.copies) == (2, [[2, 3], [4, 5]])
    assert [one.rank for one in found.far] == [2, 3, 4, 5]
