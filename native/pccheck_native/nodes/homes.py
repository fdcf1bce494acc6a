"""Where the parts of a checkpoint are that all ranks restore, for nodes that lack some of them.
Pure: no I/O, no clock.

The member that decides writes this list before the answer. Otherwise every node would have to read
all offers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pccheck_native.nodes import plain
from pccheck_native.nodes.disks import Disks
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.lists import StartList
from pccheck_native.nodes.offers import Offer, PeerServer


class Home(NamedTuple):
    """What one node has of the checkpoint."""

    node: bytes
    host: str
    peer: PeerServer
    parts: tuple[tuple[int, bytes], ...]  # the ranks that stored them, and the manifests' digests

    def to_plain(self) -> list[object]:
        parts = [[part, digest] for part, digest in self.parts]
        return [self.node, self.host, self.peer.to_plain(), parts]

    @classmethod
    def of_plain(cls, value: object) -> Home:
        """Raises ValueError."""
        node, host, peer, parts = plain.items(value, "a home", count=4)
        found = []
        for pair in plain.items(parts, "parts", plain.RANKS_MAX):
            part, digest = plain.items(pair, "a part", count=2)
            found.append((plain.number(part, "a rank"), plain.raw(digest, "a digest")))
        return cls(
            plain.raw(node, "a node"), plain.text(host, "a host name"), PeerServer.of_plain(peer),
            tuple(found),
        )  # fmt: skip


class Homes(NamedTuple):
    checkpoint: FullName
    world_size: int  # that saved it
    replicated: bool
    homes: tuple[Home, ...]

    def copies(self) -> dict[int, list[tuple[int, bytes]]]:
        """By part: each place in `homes` that has a copy, and the digest of its manifest."""
        found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for at, home in enumerate(self.homes):
            for part, digest in home.parts:
                found[part].append((at, digest))
        return dict(sorted(found.items()))

    def to_plain(self) -> list[object]:
        homes = [one.to_plain() for one in self.homes]
        return [self.checkpoint.to_plain(), self.world_size, self.replicated, homes]

    @classmethod
    def of_plain(cls, value: object) -> Homes:
        """Raises ValueError."""
        checkpoint, size, replicated, homes = plain.items(value, "homes", count=4)
        return cls(
            FullName.of_plain(checkpoint),
            plain.number(size, "a world size", 1, plain.RANKS_MAX),
            plain.flag(replicated, "replicated"),
            tuple(map(Home.of_plain, plain.items(homes, "homes", plain.NODES_MAX))),
        )


def can_travel(offers: Sequence[Offer]) -> bool:
    """Whether each node lets the others read what it has. A node without a server may hold a part
    that another node needs. Which parts are needed is known only after the checkpoint is chosen."""
    return all(offer.peer is not None for offer in offers)


def homes_of(
    offers: Sequence[Offer], found: StartList, one: FullName, *, every: bool = False
) -> Homes | None:
    """None: every node has what its ranks read (unless all are wanted: `every`), or nobody can read
    from another one. Of replicated state only whole copies count: the ranks of a node store one
    together. These copies are named also when every node has one, which may prove damaged when it
    is read."""
    disks = Disks(offers, found, travel=False)
    record = disks.records.get(one.start)
    if record is None or not (every or record.who.replicated or disks.lacks(one)):
        return None
    homes = []
    for offer in offers:
        parts = {
            held.part: held.digest
            for held in offer.parts
            if held.checkpoint == one and held.intact and held.digest
        }
        if record.who.replicated:
            whole = [m.ranks for m in record.who.members if all(r in parts for r in m.ranks)]
            kept = {rank for ranks in whole for rank in ranks}
            parts = {rank: digest for rank, digest in parts.items() if rank in kept}
        if parts and offer.peer is not None:
            homes.append(Home(offer.node, offer.host, offer.peer, tuple(sorted(parts.items()))))
    if not homes:
        return None
    return Homes(one, record.who.world_size, record.who.replicated, tuple(homes))
