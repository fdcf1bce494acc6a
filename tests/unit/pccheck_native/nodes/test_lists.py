"""How nodes find each other in a store with leftovers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from pccheck_native.group import Refused
from pccheck_native.nodes.lists import (
    Missing,
    NodeHello,
    Promise,
    StartList,
    cloned,
    displaced,
    listed,
    make_list,
    may_promise,
    member_of,
)
from tests.unit.pccheck_native.nodes.cluster import A, B, C, a_list, host, node


def hello(at: int, ranks: Sequence[int], run: int = 0, **more: Any) -> NodeHello:
    """Of node `at`; the processes of another `run` are other ones."""
    nonces = {rank: bytes([rank, run]) * 8 for rank in ranks}
    return NodeHello(node(at), host(at), "launch", 4, nonces)._replace(**more)


FIRST, SECOND = hello(0, (0, 1)), hello(1, (2, 3))


def test_a_list_has_the_newest_hello_of_each_rank() -> None:
    old = [hello(0, (0, 1), run=7), hello(1, (2, 3), run=7, promise=Promise(40, B))]
    for hellos in permutations([None, FIRST, SECOND]):
        found = make_list([*old, *hellos], A, FIRST)
        assert isinstance(found, StartList)
        assert (found.start, found.number, found.world_size) == (A, 1, 4)
        assert [member.ranks for member in found.members] == [(0, 1), (2, 3)]
        assert member_of(found, node(1), SECOND.nonces) == 1
        assert StartList.of_plain(found.to_plain()) == found


def test_its_number_follows_the_highest_promise() -> None:
    found = make_list([FIRST, SECOND._replace(promise=Promise(6, B))], A, FIRST)
    assert isinstance(found, StartList) and found.promise == Promise(7, A)


def test_ranks_that_did_not_come_are_named() -> None:
    found = make_list([FIRST], A, FIRST)
    assert isinstance(found, Missing)
    assert (
        "ranks 2 to 3 of 4 have not connected; connected so far: host a (ranks 0 to 1)"
        in found.reason
    )
    other = SECOND._replace(launch="other", world_size=8)
    found = make_list([FIRST, other], A, FIRST)
    assert isinstance(found, Missing)
    assert "host b belongs to the launch 'other' with 8 ranks" in found.reason


def test_a_node_whose_processes_are_not_all_of_its_list_takes_no_part() -> None:
    found = make_list([FIRST, SECOND], A, FIRST)
    assert isinstance(found, StartList)
    assert member_of(found, node(0), hello(0, (0, 1), run=1).nonces) is None
    assert member_of(found, node(0), hello(0, (0,)).nonces) is None
    assert member_of(found, node(0), {}) is None
    assert member_of(found, node(2), FIRST.nonces) is None


def test_a_rank_that_moved_leaves_a_list_that_its_old_node_refuses() -> None:
    moved = hello(1, (1, 2, 3))
    found = make_list([FIRST, SECOND, moved], A, moved)
    assert isinstance(found, StartList)
    assert member_of(found, node(0), FIRST.nonces) is None
    assert member_of(found, node(0), hello(0, (0,)).nonces) == 0


def test_one_id_of_two_living_nodes_is_refused_by_name() -> None:
    clone = SECOND._replace(node=node(0))
    found = cloned([None, FIRST, clone], FIRST)
    assert found and "host a (ranks 0 to 1) and of host b (ranks 2 to 3) has one id" in found.reason
    assert cloned([FIRST, clone._replace(host="a")], FIRST)  # two machines of one image
    assert cloned([FIRST, SECOND, None], FIRST) is None


def test_peers_of_other_versions() -> None:
    one_back = SECOND._replace(protocol=2, version="2.0")
    found = make_list([FIRST, one_back], A, FIRST)
    assert isinstance(found, StartList) and found.protocol == 1
    far = NodeHello.of_plain([*SECOND._replace(protocol=3, version="3.0").to_plain(), "new field"])
    found = make_list([FIRST._replace(version="1.0"), far], A, FIRST)
    assert isinstance(found, Refused)
    assert "1.0 (protocol 1)" in found.reason and "3.0 (protocol 3)" in found.reason


def test_replicated_on_some_nodes_only_is_refused() -> None:
    found = make_list([FIRST, SECOND._replace(replicated=True)], A, FIRST)
    assert isinstance(found, Refused) and "host b saves with replicated=True" in found.reason


def test_a_promise_is_only_made_to_what_is_above_it() -> None:
    found = a_list(B, number=3)
    assert may_promise(found, Promise(2, C)) is None
    assert may_promise(found, Promise(3, B)) is None  # it has, and may offer again
    assert may_promise(found, Promise(3, A)) is None
    for newer in (Promise(3, C), Promise(4, A)):
        refused = may_promise(found, newer)
        assert refused and "a newer start of the job has begun" in refused.reason
        said = displaced(found, found.members[1], refused)
        assert said.reason.startswith("host b refused this start: a newer start")


def test_a_living_process_of_another_launch_wins() -> None:
    found, lives = a_list(B, number=3), a_list(A, launch="other")
    refused = may_promise(found, Promise(1, A), lives)
    assert refused and "the launch 'other'" in refused.reason and "end that" in refused.hint
    assert may_promise(found, Promise(1, A), a_list(A)) is None
    larger = may_promise(found, Promise(1, A), a_list(A, [(0,), (1,), (2,)]))
    assert larger and "3 ranks" in larger.reason and "2 ranks" in larger.reason


def test_ranks_in_a_sentence() -> None:
    assert listed([3]) == "rank 3"
    assert listed([8, 0, 1, 2, 3]) == "ranks 0 to 3 and 8"
    assert listed(range(0, 40, 2)).endswith("14 and others")
