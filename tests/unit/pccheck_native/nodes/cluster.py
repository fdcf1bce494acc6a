"""Nodes, lists and offers for the tests of the rules, in few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pccheck_native.nodes.facts import FullName, SaveName
from pccheck_native.nodes.lists import ListMember, StartList
from pccheck_native.nodes.offers import HeldPart, Offer, StartRecord

A, B, C, D = (bytes([letter]) * 16 for letter in b"ABCD")


def name(step: int, base: int = 0) -> SaveName:
    return SaveName(base, 0, step, 0)


def full(start: bytes, step: int, base: int = 0) -> FullName:
    return FullName(start, name(step, base))


def node(at: int) -> bytes:
    return bytes([at + 1]) * 16


def host(at: int) -> str:
    return "abcdefgh"[at]


def a_list(
    start: bytes, ranks: Sequence[Sequence[int]] | None = None, number: int = 1, **more: Any
) -> StartList:
    """Node i has ranks[i]; a node with () is no member. The default: two nodes with a rank each."""
    places = [(0,), (1,)] if ranks is None else ranks
    members = [
        ListMember(node(at), host(at), tuple(own), tuple(bytes([rank]) * 16 for rank in own))
        for at, own in enumerate(places)
        if own
    ]
    members.sort(key=lambda member: member.ranks)
    size = sum(map(len, places))
    made = StartList(start, number, "launch", size, False, 1, tuple(members))
    return made._replace(**more)


def born(
    who: StartList, restored: FullName | None = None, seen: Sequence[bytes] = (), **more: Any
) -> StartRecord:
    return StartRecord(who, tuple(seen), ((0, restored),))._replace(**more)


def an_offer(
    at: int, to: StartList, records: Sequence[StartRecord] = (), *parts: tuple[FullName, int],
    **more: Any,
) -> Offer:  # fmt: skip
    """`parts`: checkpoint and rank of each intact shard."""
    held = tuple(HeldPart(one, rank, bytes(16)) for one, rank in parts)
    return Offer(node(at), host(at), to.promise, tuple(records), (), held)._replace(**more)
