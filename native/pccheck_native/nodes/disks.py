"""What the offers of a start hold together, and what a checkpoint lacks. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pccheck_native.group import count_ranks
from pccheck_native.nodes.facts import FullName, SaveName
from pccheck_native.nodes.lists import ListMember, StartList, joined, listed
from pccheck_native.nodes.offers import Offer, StartRecord

PARTS_MAX = 4  # groups of what lacks, in a sentence


class Lack(NamedTuple):
    """Why a start cannot restore a checkpoint: what one part lacks."""

    part: int  # -1: the whole checkpoint
    kind: str  # a key of `_WHY`
    host: str = ""  # with the part, or that stored it; all with a copy
    node: bytes = b""  # that stored it
    needed: str = ""  # the host on which the part is needed


_WHY = {
    "away": "{host} stored {parts} and is not here",
    "other storage": "{host} stored {parts} in another storage directory than it has now",
    "gone": "{host} stored {parts} and no longer has it",
    "damaged": "{parts} is damaged on {host}",
    "moved": "{parts} is on {host}, and is needed on {needed}",
    "no copy": "{needed} has no copy of it",
    "size": "it was saved by {host}, and this start has {needed}",
    "split": "no node here has a whole copy",
    "unknown": "no node here has the record of its start",
}


class _Places(NamedTuple):
    """Of a list: where its ranks are, and how many nodes have a host name."""

    by_rank: dict[int, ListMember]
    named: Counter[str]


class Disks:
    """The offers of a start, by checkpoint."""

    def __init__(self, offers: Sequence[Offer], found: StartList, *, travel: bool) -> None:
        self._found, self._travel = found, travel
        self.hosts = {offer.node: f"host {offer.host}" for offer in offers}
        #: Nodes from which nobody can read.
        self.silent = sorted({f"host {offer.host}" for offer in offers if offer.peer is None})
        self._named = Counter(offer.host for offer in offers)
        self._places: dict[bytes, _Places] = {}
        self.records: dict[bytes, StartRecord] = {}
        self._promised: dict[bytes, set[bytes]] = defaultdict(set)
        self._remembering = {o.node for o in offers if any(r.born for r in o.records)}
        self._parts: dict[FullName, dict[int, set[bytes]]] = {}
        self._damaged: dict[FullName, dict[int, set[bytes]]] = {}
        self.known = {one for offer in offers for one in offer.known}
        for offer in offers:
            for record in offer.records:
                # Records of what a start here has seen may have been removed.
                self._promised[offer.node] |= {record.start, *(record.seen if record.born else ())}
                other = self.records.setdefault(record.start, record)
                if _rounds(record) > _rounds(other):
                    self.records[record.start] = record
            for part in offer.parts:
                which = self._parts if part.intact else self._damaged
                nodes = which.setdefault(part.checkpoint, defaultdict(set))
                nodes[part.part].add(offer.node)

    @property
    def checkpoints(self) -> set[FullName]:
        """Every checkpoint of which a node here has a part, or knows that it was global."""
        return {*self._parts, *self._damaged, *self.known}

    @property
    def holds_any(self) -> bool:
        return bool(self._parts or self._damaged)

    def names(self, start: bytes) -> list[SaveName]:
        """All of a start, newest first."""
        return sorted((one.name for one in self.checkpoints if one.start == start), reverse=True)

    def here(self, record: StartRecord) -> list[ListMember]:
        """The members of that start that are here, with the promise that they made to it."""
        members = record.who.members
        return [one for one in members if record.start in self._promised.get(one.node, ())]

    def has_other_storage(self, member: ListMember, saved: StartList) -> bool:
        """The node is not here, and its host is, with another storage directory. People see that
        only where each node has a host name of its own."""
        names = self._of_list(saved).named
        unique = self._named[member.host] == names[member.host] == 1
        return unique and member.node not in self.hosts

    def remembers(self, node: bytes) -> bool:
        """The node is here, and has the record of a start of the job that has begun."""
        return node in self._remembering

    def promised_to(self, start: bytes) -> list[str]:
        """The nodes here that have promised to the start."""
        return [self.hosts[node] for node, starts in self._promised.items() if start in starts]

    def has_own(self, one: FullName, member: ListMember) -> bool:
        """The member's own parts are on its disk, intact or not."""
        return all(
            member.node in self._of(self._parts, one, rank)
            or member.node in self._of(self._damaged, one, rank)
            for rank in member.ranks
        )

    def lacks(self, one: FullName, *, travel: bool | None = None) -> list[Lack]:
        """What keeps this start from restoring it; []: nothing does. `travel`: bytes may come from
        other nodes; else each node must hold what its ranks read."""
        record = self.records.get(one.start)
        if record is None:
            return [Lack(-1, "unknown")]
        travel = self._travel if travel is None else travel
        if record.who.replicated:
            return self._copies_lack(one, record.who, travel)
        found = [
            self._gone(one, record.who, rank)
            for rank in range(record.who.world_size)
            if not self._of(self._parts, one, rank)
        ]
        return found or ([] if travel else self._far(one, record.who))

    def why(self, lacks: Iterable[Lack]) -> str:
        """As a sentence."""
        groups: dict[Lack, list[int]] = defaultdict(list)
        for lack in lacks:
            groups[lack._replace(part=0)].append(lack.part)
        texts = [
            _WHY[lack.kind].format(
                parts=f"the part of {listed(ranks)}", host=lack.host, needed=lack.needed
            )
            for lack, ranks in list(groups.items())[:PARTS_MAX]
        ]
        more = [f"and {len(groups) - PARTS_MAX} more"] if len(groups) > PARTS_MAX else []
        return "; ".join(texts + more)

    def _of_list(self, saved: StartList) -> _Places:
        if saved.start not in self._places:  # an offer may have many ranks, and many checkpoints
            by_rank = {rank: member for member in saved.members for rank in member.ranks}
            self._places[saved.start] = _Places(by_rank, Counter(m.host for m in saved.members))
        return self._places[saved.start]

    def _of(
        self, which: dict[FullName, dict[int, set[bytes]]], one: FullName, rank: int
    ) -> Collection[bytes]:
        return which.get(one, {}).get(rank, ())

    def _gone(self, one: FullName, saved: StartList, rank: int) -> Lack:
        """Why nobody here has the part."""
        if damaged := self._of(self._damaged, one, rank):
            return Lack(rank, "damaged", self.hosts[min(damaged)], min(damaged))
        member = self._of_list(saved).by_rank[rank]
        kind = "gone" if member.node in self.hosts else "away"
        kind = "other storage" if self.has_other_storage(member, saved) else kind
        return Lack(rank, kind, saved.name(member), member.node)

    def _far(self, one: FullName, saved: StartList) -> list[Lack]:
        """Parts that are not on the node whose ranks read them."""
        same = saved.world_size == self._found.world_size
        found = []
        for member in self._found.members:
            for rank in member.ranks if same else range(saved.world_size):
                homes = self._of(self._parts, one, rank)
                if member.node in homes:
                    continue
                if not same:
                    sizes = count_ranks(saved.world_size), count_ranks(self._found.world_size)
                    return [Lack(-1, "size", sizes[0], b"", sizes[1])]
                needed = self._found.name(member)
                if member.node in self._of(self._damaged, one, rank):
                    found.append(Lack(rank, "damaged", needed, member.node))
                else:
                    found.append(Lack(rank, "moved", self.hosts[min(homes)], min(homes), needed))
        return found

    def _copies_lack(self, one: FullName, saved: StartList, travel: bool) -> list[Lack]:
        """A copy is the parts of one member's ranks, on one node."""
        copies = {
            node
            for member in saved.members
            for node in self._of(self._parts, one, member.ranks[0])
            if all(node in self._of(self._parts, one, rank) for rank in member.ranks)
        }
        if travel and copies:
            return []
        if not copies:
            return [
                self._gone(one, saved, rank)
                for member in saved.members
                for rank in member.ranks
                if not self._of(self._parts, one, rank)
            ] or [Lack(-1, "split")]
        with_copy = joined(sorted(self.hosts[node] for node in copies))
        found = []
        for member in self._found.members:
            if member.node in copies:
                continue
            needed = self._found.name(member)
            broken = [
                rank
                for rank in range(saved.world_size)
                if member.node in self._of(self._damaged, one, rank)
            ]
            found += [Lack(rank, "damaged", needed, member.node) for rank in broken] or [
                Lack(-1, "no copy", with_copy, member.node, needed)
            ]
        return found


def _rounds(record: StartRecord) -> int:
    return record.restored[-1][0] if record.restored else -1
