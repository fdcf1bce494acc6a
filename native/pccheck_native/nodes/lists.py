"""How the nodes of a job find each other: hellos in a store that may hold those of earlier starts,
and the list of a start that follows from them. Pure: no I/O, no clock.

A node says hello with the processes of its ranks. A list has the newest process of each rank, and
nothing else proves that these processes live: the start exists when every node of the list has
found its own living processes in it, and has promised. So no leftover hello begins a start, and a
part of a launch displaces nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pccheck_native.group import Refused, count_ranks
from pccheck_native.nodes import plain

PROTOCOL = 1  # of what nodes write for each other; one release back works
FIELDS_MAX = 64  # of a hello: a later protocol may have more
NAMED_MAX = 8  # in a sentence


class Promise(NamedTuple):
    """The newest start that a node takes part in: no list that is not above it gets a promise.
    (number, start) is ordered. On the disk before the node offers."""

    number: int = 0
    start: bytes = bytes(plain.ID)

    def to_plain(self) -> list[object]:
        return list(self)

    @classmethod
    def of_plain(cls, value: object) -> Promise:
        """Raises ValueError."""
        number, start = plain.items(value, "a promise", count=2)
        return cls(plain.number(number, "the number of a start"), plain.raw(start, "a start"))


class NodeHello(NamedTuple):
    """What a node says when processes of its ranks have come."""

    node: bytes  # random, in the storage directory; never a host name or an address
    host: str  # for people only
    launch: str  # equal on all nodes of a launch; never contains a restart count
    world_size: int
    nonces: Mapping[int, bytes]  # local rank's number in the job -> random id of its process
    promise: Promise = Promise()
    replicated: bool = False  # the state is the same on all ranks: one copy on each node
    protocol: int = PROTOCOL
    version: str = ""  # of the software, for people

    @property
    def kind(self) -> tuple[str, int]:
        """Only nodes that are equal in this can be of one start."""
        return self.launch, self.world_size

    def to_plain(self) -> list[object]:
        """A later protocol may add fields at the end."""
        nonces = _nonces_to_plain(self.nonces)
        changed = {"nonces": nonces, "promise": self.promise.to_plain()}
        return list({**self._asdict(), **changed}.values())

    @classmethod
    def of_plain(cls, value: object) -> NodeHello:
        """Raises ValueError."""
        fields = plain.items(value, "a hello", FIELDS_MAX)
        if len(fields) < len(cls._fields):
            raise ValueError(f"a hello has {len(fields)} fields, and needs {len(cls._fields)}")
        found = cls(*fields[: len(cls._fields)])  # type: ignore[arg-type]
        size = plain.number(found.world_size, "a world size", 1, plain.RANKS_MAX)
        nonces = dict(_nonces_of_plain(found.nonces))
        if max(nonces, default=0) >= size:
            raise ValueError(f"a hello has rank {max(nonces)} of {size}")
        return cls(
            plain.raw(found.node, "a node"),
            plain.text(found.host, "a host name"),
            plain.text(found.launch, "a launch id"),
            size,
            nonces,
            Promise.of_plain(found.promise),
            plain.flag(found.replicated, "replicated"),
            plain.number(found.protocol, "a protocol", 1),
            plain.text(found.version, "a version"),
        )


class ListMember(NamedTuple):
    """A node's part of a start."""

    node: bytes
    host: str
    ranks: tuple[int, ...]  # in order; the parts of the checkpoints that this node stores
    nonces: tuple[bytes, ...]  # of the processes of these ranks; b"" in an offer

    @property
    def processes(self) -> dict[int, bytes]:
        return dict(zip(self.ranks, self.nonces, strict=True))

    def to_plain(self) -> list[object]:
        return [self.node, self.host, _nonces_to_plain(self.processes)]

    @classmethod
    def of_plain(cls, value: object) -> ListMember:
        """Raises ValueError."""
        node, host, nonces = plain.items(value, "a member", count=3)
        found = _nonces_of_plain(nonces)
        return cls(
            plain.raw(node, "a node"),
            plain.text(host, "a host name"),
            tuple(rank for rank, _ in found),
            tuple(nonce for _, nonce in found),
        )


class StartList(NamedTuple):
    """Who takes part in a start: all its ranks, each on one node."""

    start: bytes
    number: int  # 1 + the highest promise of the hellos; never changes
    launch: str
    world_size: int
    replicated: bool
    protocol: int  # that all members understand
    members: tuple[ListMember, ...]  # by their lowest rank: the first has rank 0

    @property
    def kind(self) -> tuple[str, int]:
        """Equal to `NodeHello.kind` of all its members."""
        return self.launch, self.world_size

    def to_plain(self) -> list[object]:
        return [*self[:-1], [member.to_plain() for member in self.members]]

    @classmethod
    def of_plain(cls, value: object) -> StartList:
        """Raises ValueError, also if a rank has no node, or two."""
        found = cls(*plain.items(value, "a list", count=len(cls._fields)))  # type: ignore[arg-type]
        members = plain.items(found.members, "members", plain.NODES_MAX)
        made = cls(
            plain.raw(found.start, "a start"),
            plain.number(found.number, "the number of a start", 1),
            plain.text(found.launch, "a launch id"),
            plain.number(found.world_size, "a world size", 1, plain.RANKS_MAX),
            plain.flag(found.replicated, "replicated"),
            plain.number(found.protocol, "a protocol", 1),
            tuple(map(ListMember.of_plain, members)),
        )
        ranks = sorted(rank for member in made.members for rank in member.ranks)
        lowest = [member.ranks[0] for member in made.members]
        nodes = {member.node for member in made.members}
        if ranks != list(range(made.world_size)) or lowest != sorted(lowest):
            raise ValueError(
                f"the ranks of a list are {ranks!r:.60}, not {made.world_size} in order"
            )
        if len(nodes) != len(made.members):
            raise ValueError("a node is in a list twice")
        return made

    @property
    def promise(self) -> Promise:
        return Promise(self.number, self.start)

    def brief(self) -> StartList:
        """Without the processes of its ranks, which matter to nobody once the start has begun."""
        members = (one._replace(nonces=(b"",) * len(one.ranks)) for one in self.members)
        return self._replace(members=tuple(members))

    @property
    def digest(self) -> bytes:
        """Of what is brief, so that it is the same on all nodes: an offer names the list by it."""
        brief = ascii(self.brief().to_plain())
        return hashlib.blake2b(brief.encode(), digest_size=plain.ID).digest()

    def ranks_of(self, node: bytes) -> frozenset[int]:
        mine = (member.ranks for member in self.members if member.node == node)
        return frozenset(rank for ranks in mine for rank in ranks)

    def name(self, member: ListMember) -> str:
        """For a sentence."""
        same = sum(other.host == member.host for other in self.members) > 1
        which = f" (node {member.node.hex()[:8]})" if same else ""
        return f"host {member.host}{which}"


def cloned(later: Iterable[NodeHello | None], mine: NodeHello) -> Refused | None:
    """Why there are two nodes with one id: `later` came after `mine`, whose daemon lives and has
    said no other one. An earlier hello with its id proves nothing: it may be of this node before it
    restarted, also under another host name."""
    for one in later:
        if one and one.node == mine.node and one.nonces != mine.nonces:
            here, there = (f"host {x.host} ({listed(list(x.nonces))})" for x in (mine, one))
            return Refused(
                f"the storage of {here} and of {there} has one id ({mine.node.hex()[:8]}): one is "
                "a copy of the other, or both use one shared directory",
                "give each node a --storage directory of its own; on the copy, stop pccheckd, "
                "remove .pccheckd.node, .pccheckd.secret and the directories of the jobs, and "
                "start pccheckd again",
            )
    return None


class Missing(NamedTuple):
    """Who is waited for, and what to do when the time is up."""

    reason: str
    hint: str


def make_list(
    hellos: Sequence[NodeHello | None], start: bytes, mine: NodeHello
) -> StartList | Missing | Refused:
    """The list of the launch to which `mine` belongs, with the id `start`. `hellos`: all that the
    store holds, in order of their arrival (None: it is not there yet, or it is malformed)."""
    newest: dict[bytes, tuple[int, NodeHello]] = {}
    for at, hello in enumerate(hellos):
        if hello and hello.kind == mine.kind:
            newest[hello.node] = (at, hello)
    whose: dict[int, NodeHello] = {}
    for _, hello in sorted(newest.values(), key=lambda one: one[0]):
        whose |= dict.fromkeys(hello.nonces, hello)
    lacking = tuple(rank for rank in range(mine.world_size) if rank not in whose)
    if lacking:
        return _missing(lacking, newest, hellos, mine)
    used = {hello.node: hello for hello in whose.values()}
    if refused := _apart(list(used.values())):
        return refused
    ranks: dict[bytes, list[int]] = {}
    for rank in range(mine.world_size):
        ranks.setdefault(whose[rank].node, []).append(rank)
    members = [
        ListMember(node, used[node].host, tuple(own), tuple(used[node].nonces[r] for r in own))
        for node, own in ranks.items()
    ]
    return StartList(
        start,
        1 + max(hello.promise.number for hello in used.values()),
        mine.launch,
        mine.world_size,
        mine.replicated,
        min(hello.protocol for hello in used.values()),
        tuple(sorted(members, key=lambda member: member.ranks)),
    )


def member_of(found: StartList, node: bytes, living: Mapping[int, bytes]) -> int | None:
    """Which member the node is, if the list has its living processes and no others of this node."""
    for at, member in enumerate(found.members):
        if member.node == node and member.processes == dict(living):
            return at
    return None


def may_promise(
    found: StartList, promise: Promise, lives: StartList | None = None
) -> Refused | None:
    """Why a node, whose newest promise is `promise`, may not promise to this list; None: it may, or
    has already. `lives`: the list of another start of the job of which a process lives here."""
    if found.promise == promise:
        return None
    if lives and lives.kind != found.kind:
        return Refused(
            f"a process of the launch {lives.launch!r} with {count_ranks(lives.world_size)} lives "
            f"here, and this is the launch {found.launch!r} with {count_ranks(found.world_size)}",
            "end that launch first, with what started it",
        )
    if found.promise < promise:
        return Refused(
            f"a newer start of the job has begun (number {promise.number}, this start has number "
            f"{found.number})",
            "start the job again: what displaced this start knows more",
        )
    return None


def displaced(found: StartList, member: ListMember, refused: Refused) -> Refused:
    """What the other members say of the refusal of one."""
    return Refused(f"{found.name(member)} refused this start: {refused.reason}", refused.hint)


def listed(ranks: Sequence[int]) -> str:
    """Ranks in a sentence: rank 3; ranks 0 to 3 and 8."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    named = [" to ".join(map(str, run)) for run in runs[:NAMED_MAX]]
    if len(runs) > NAMED_MAX:
        named.append("others")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {joined(named)}"


def joined(names: Sequence[str]) -> str:
    """a; a and b; a, b and c. Of many the first ones, and how many more."""
    if len(names) > NAMED_MAX + 1:
        names = [*names[:NAMED_MAX], f"{len(names) - NAMED_MAX} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1] if names else "")))


def _missing(
    lacking: tuple[int, ...],
    newest: Mapping[bytes, tuple[int, NodeHello]],
    hellos: Sequence[NodeHello | None],
    mine: NodeHello,
) -> Missing:
    here = joined([f"host {one.host} ({listed(list(one.nonces))})" for _, one in newest.values()])
    have = "has" if len(lacking) == 1 else "have"
    reason = (
        f"{listed(lacking)} of {mine.world_size} {have} not connected; connected so far: "
        f"{here or 'none'}"
    )
    others = [hello for hello in hellos if hello and hello.kind != mine.kind]
    if others:
        other = others[-1]
        reason += (
            f"; host {other.host} belongs to the launch {other.launch!r} with "
            f"{count_ranks(other.world_size)}, and this is {mine.launch!r} with "
            f"{count_ranks(mine.world_size)}"
        )
    return Missing(
        reason,
        "check that the job runs on all its nodes, each with a daemon, and with one launch id",
    )


def _apart(hellos: Sequence[NodeHello]) -> Refused | None:
    """Members that do not fit together."""
    by_protocol = sorted(hellos, key=lambda one: one.protocol)
    old, new = by_protocol[0], by_protocol[-1]
    if new.protocol > old.protocol + 1:
        return Refused(
            f"host {old.host} has PCcheck {old.version or '?'} (protocol {old.protocol}), and host "
            f"{new.host} has {new.version or '?'} (protocol {new.protocol})",
            "one release apart works: update the older one",
        )
    for one, other in pairwise(sorted(hellos, key=lambda one: one.replicated)):
        if one.replicated != other.replicated:
            return Refused(
                f"host {other.host} saves with replicated=True, and host {one.host} without",
                "make all clients of the job with the same replicated=",
            )
    return None


def _nonces_to_plain(nonces: Mapping[int, bytes]) -> list[list[object]]:
    return [[rank, nonces[rank]] for rank in sorted(nonces)]


def _nonces_of_plain(value: object) -> list[tuple[int, bytes]]:
    """Sorted by rank; at least one."""
    found = {}
    for pair in plain.items(value, "ranks", plain.RANKS_MAX):
        rank, nonce = plain.items(pair, "a rank", count=2)
        number = plain.number(rank, "a rank", most=plain.RANKS_MAX - 1)
        found[number] = plain.raw(nonce, "a process", may_lack=True)
    if not found:
        raise ValueError("a node has no rank")
    return sorted(found.items())
