"""Values that travel through a store, which anybody may have written."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from pccheck_native.nodes.facts import FullName, Have, Said, SaveName
from pccheck_native.nodes.lists import NodeHello, Promise, StartList
from pccheck_native.nodes.offers import (
    RECORDS_MAX,
    HeldPart,
    Offer,
    StartAnswer,
    StartRecord,
    Word,
    newest,
)
from tests.unit.pccheck_native.nodes.cluster import A, B, a_list, born, full, host, name, node

ANSWER = StartAnswer(B, 1, full(A, 3), (A,), Word(step=3), ("step 4 is damaged",))
RECORD = born(a_list(B, [(0, 2), (1,)], 7), full(A, 2), [A]).with_answer(ANSWER)
VALUES = [
    name(3),
    full(A, 3),
    Have((name(1),), (name(1), name(2)), name(2), (name(0),)),
    Have(),
    Said((name(2), name(1)), (name(3),)),
    Promise(3, A),
    NodeHello(node(0), host(0), "l", 3, {0: A, 2: B}, Promise(3, A), replicated=True, version="1"),
    a_list(A, [(0, 2), (1,)], 3),
    Word(4, "ab", ("host-1",), fresh=True),
    ANSWER,
    RECORD,
    HeldPart(full(A, 1), 2, B),
    Offer(node(1), host(1), Promise(3, A), (RECORD.brief(),), (full(A, 1),),
          (HeldPart(full(A, 1), 0),), (ANSWER,), Word(1), 2),
]  # fmt: skip
LISTS: dict[type[Any], Any] = {type(value): value for value in VALUES}


def test_a_hello_has_ranks_of_its_world_only() -> None:
    hello = NodeHello(node(0), host(0), "l", 3, {0: A, 2: B})
    assert NodeHello.of_plain(hello.to_plain()) == hello
    with pytest.raises(ValueError, match="rank 2 of 2"):
        NodeHello.of_plain(hello._replace(world_size=2).to_plain())


@pytest.mark.parametrize("size", [1 << 32, 1 << 62])
def test_a_huge_world_takes_no_memory(size: int) -> None:
    found = a_list(A, [(0, 2), (1,)], 3).to_plain()
    found[3] = size
    with pytest.raises(ValueError, match="a world size"):
        StartList.of_plain(found)


def test_an_offer_takes_the_records_of_starts_that_have_begun() -> None:
    never = [StartRecord(a_list(bytes([n]) * 16, number=n + 1)) for n in range(1, 200)]
    older = [born(a_list(bytes([n]) * 16, number=n), None) for n in range(200, 255)]
    many = [*never, *never, *older]
    found = newest(many)
    assert len(found) == RECORDS_MAX and set(older) <= set(found)
    offer = Offer(A, "a", Promise(1, A), found)
    assert Offer.of_plain(offer.to_plain(), offer.lists)


def read(kind: type[Any], value: object) -> Any:
    if kind is Offer:
        Offer.named(value)
        return Offer.of_plain(value, {RECORD.brief().who.digest: RECORD.brief().who})
    return kind.of_plain(value)


def test_an_offer_is_short_and_names_its_lists() -> None:
    who = a_list(B, [(0, *range(3, 250)), (1,), (2,)], 7)
    offer = Offer(A, "a", Promise(1, A), (born(who, None),))
    value = offer.to_plain()
    assert len(msgpack.packb(value)) < 200 < 2000 < len(msgpack.packb(who.to_plain()))
    assert Offer.named(value) == {who.brief().digest} == offer.lists.keys()
    assert Offer.of_plain(value, offer.lists).records[0].who == who.brief()
    with pytest.raises(ValueError, match="a list that is not known"):
        Offer.of_plain(value, {})


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_the_same_after_its_way(value: Any) -> None:
    assert read(type(value), msgpack.unpackb(msgpack.packb(value.to_plain()))) == value


@pytest.mark.parametrize("kind", LISTS, ids=lambda kind: kind.__name__)
def test_a_malformed_value_is_a_value_error(kind: type[Any]) -> None:
    rng, refused = random.Random(kind.__name__), 0
    for _ in range(2000):
        broken = _mutate(rng, LISTS[kind].to_plain())
        try:
            found = read(kind, broken)
        except ValueError:
            refused += 1
        else:
            assert read(kind, found.to_plain()) == found
    assert refused > 300


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (SaveName, [0, 0, -1, 0]),
        (SaveName, [0, 0, True, 0]),
        (SaveName, [0, 0, 1 << 63, 0]),
        (FullName, [bytes(15), 0, 0, 1, 0]),
        (StartList, [*a_list(A).to_plain()[:3], 3, *a_list(A).to_plain()[4:]]),
        (NodeHello, [node(0), "a\nb", "l", 1, [[0, A]], [0, A], False, 1, ""]),
        (NodeHello, [node(0), "a", "l", 1, [], [0, A], False, 1, ""]),
    ],
)
def test_numbers_texts_and_ranks_have_limits(kind: Any, value: object) -> None:
    with pytest.raises(ValueError, match=r"must be|ranks of a list|no rank"):
        kind.of_plain(value)


def _mutate(rng: random.Random, value: Any) -> Any:
    """One place of it is another value."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _mutate(rng, value[at]), *value[at + 1 :]]
    others = [None, -1, 0, 1 << 64, True, "", "x" * 300, b"", bytes(16), [], [[]], {}, 1.5, [0] * 4]
    return rng.choice(others)
