"""How a start comes about in a store with leftovers, in every state of a small job.

Two ranks on two nodes. The processes p0 and p1 are those of an earlier launch with the same id; q0
and q1 come when both are dead. A store keeps every hello, list and promise. What must hold: no
start has a process that was dead before another of its processes began, and none is in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pccheck_native.nodes.lists import (
    NodeHello,
    Promise,
    StartList,
    make_list,
    may_promise,
    member_of,
)
from tests.unit.pccheck_native.nodes.cluster import host, node

RANKS = (0, 1)
LISTS_MAX = 3


class Store(NamedTuple):
    alive: frozenset[str] = frozenset(("p0", "p1"))
    began: frozenset[str] = frozenset(("p0", "p1"))
    hellos: tuple[str, ...] = ()
    lists: tuple[StartList, ...] = ()
    promised: frozenset[tuple[int, int]] = frozenset()  # list and node
    promises: tuple[Promise, Promise] = (Promise(), Promise())


def hello(process: str) -> NodeHello:
    rank = int(process[1])
    return NodeHello(node(rank), host(rank), "launch", 2, {rank: process.encode() * 8})


def processes(found: StartList) -> set[str]:
    return {nonce[:2].decode() for member in found.members for nonce in member.nonces}


Begins = Callable[[Store, int], bool]


def all_promised(store: Store, at: int) -> bool:
    return all((at, rank) in store.promised for rank in RANKS)


def moves(store: Store) -> Iterator[tuple[str, Store]]:
    for process in sorted(store.alive):
        if process not in store.hellos:
            said = store._replace(hellos=(*store.hellos, process))
            yield f"{process} says hello", said
        yield f"{process} dies", store._replace(alive=store.alive - {process})
        rank = int(process[1])
        for at, found in enumerate(store.lists):
            living = {rank: process.encode() * 8}
            mine = member_of(found, node(rank), living) is not None
            if (
                mine
                and (at, rank) not in store.promised
                and not may_promise(found, store.promises[rank])
            ):
                promises = [*store.promises]
                promises[rank] = found.promise
                yield (
                    f"{process} promises to list {at}",
                    store._replace(
                        promised=store.promised | {(at, rank)},
                        promises=(promises[0], promises[1]),
                    ),
                )
    if not store.alive & {"p0", "p1"}:
        for process in {"q0", "q1"} - store.began:
            yield (
                f"{process} begins",
                store._replace(alive=store.alive | {process}, began=store.began | {process}),
            )
    hellos = [
        hello(process)._replace(promise=store.promises[int(process[1])]) for process in store.hellos
    ]
    for process in sorted(store.alive & set(store.hellos)):
        made = make_list(hellos, bytes([len(store.lists) + 1]) * 16, hello(process))
        if not isinstance(made, StartList) or len(store.lists) == LISTS_MAX:
            continue
        if all(made.members != other.members for other in store.lists):
            yield f"{process} makes a list", store._replace(lists=(*store.lists, made))


def mistake(begins: Begins) -> tuple[int, str]:
    """States, and the first start that must not be; it begins as `begins` says."""
    first = Store()
    seen, frontier = {first}, [first]
    while frontier:
        following = []
        for store in frontier:
            for _, made in moves(store):
                if made in seen:
                    continue
                seen.add(made)
                following.append(made)
                started = [processes(f) for at, f in enumerate(made.lists) if begins(made, at)]
                for one in started:
                    if {process[0] for process in one} == {"p", "q"}:
                        return len(seen), f"a start of {sorted(one)}"
                if sum(map(len, started)) > len(set().union(*started)):
                    return len(seen), "a process is in two starts"
        frontier = following
    return len(seen), ""


def test_a_start_has_processes_that_lived_at_one_time() -> None:
    states, wrong = mistake(all_promised)
    assert not wrong and states > 300


def test_a_list_alone_is_no_start() -> None:
    """The newest hello of a rank may be that of a dead process."""
    assert "p" in mistake(lambda _store, _at: True)[1]


def test_the_promise_of_one_member_is_not_enough() -> None:
    _, wrong = mistake(lambda store, at: any((at, rank) in store.promised for rank in RANKS))
    assert "a start of" in wrong
