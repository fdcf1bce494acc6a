"""What the nodes of a job keep of its starts, and tell each other when a start begins. Pure: no
I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from pccheck_native.nodes import plain
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.lists import Promise, StartList
from pccheck_native.nodes.peer import FINGERPRINT_BYTES, TOKEN_BYTES

SEEN_MAX = 256  # starts that an answer names as older; a disk that was away for more is a fork
ROUNDS_MAX = 1024  # of a start, that a record holds: the newest
RECORDS_MAX = 256
WARNINGS_MAX = 8
ADDRESSES_MAX = 16  # of a server
WARNING_MAX = 1000  # letters
NEWEST = "newest"  # start=: at a fork, the branch with the highest number


class Word(NamedTuple):
    """What the user said to restore(): how a start goes on that would be refused."""

    step: int | None = None  # this step, although a newer one is there
    start: str = ""  # the start whose branch goes on: the beginning of its id in hex, or "newest"
    without: tuple[str, ...] = ()  # nodes that will not come back: host names, or ids in hex
    fresh: bool = False  # begin without a checkpoint

    def to_plain(self) -> list[object]:
        return [self.step, self.start, list(self.without), self.fresh]

    @classmethod
    def of_plain(cls, value: object) -> Word:
        """Raises ValueError."""
        step, start, without, fresh = plain.items(value, "a word", count=4)
        return cls(
            None if step is None else plain.number(step, "a step"),
            plain.text(start, "a start"),
            tuple(plain.text(one, "a node") for one in plain.items(without, "nodes")),
            plain.flag(fresh, "fresh"),
        )


class StartAnswer(NamedTuple):
    """What all ranks of a start restore in a round. One for each start and round."""

    start: bytes
    round: int  # 0: at the beginning. It is the `base` of what is saved then
    restored: FullName | None  # None: begin without a checkpoint
    seen: tuple[bytes, ...]  # all starts that are older than this one
    word: Word = Word()  # that the user gave for it
    warnings: tuple[str, ...] = ()  # to be said once on each node

    def to_plain(self) -> list[object]:
        restored = _point_to_plain(self.restored)
        word = self.word.to_plain()
        return [self.start, self.round, restored, list(self.seen), word, list(self.warnings)]

    @classmethod
    def of_plain(cls, value: object) -> StartAnswer:
        """Raises ValueError."""
        start, round_, restored, seen, word, warnings = plain.items(value, "an answer", count=6)
        return cls(
            plain.raw(start, "a start"),
            plain.number(round_, "a round"),
            _point_of_plain(restored),
            _starts_of_plain(seen),
            Word.of_plain(word),
            tuple(
                plain.text(one, "a warning", WARNING_MAX)
                for one in plain.items(warnings, "warnings", WARNINGS_MAX)
            ),
        )


class StartRecord(NamedTuple):
    """What a node keeps on its disk of a start to which it promised. The start is *born* here with
    its first answer; both records are on the disk before anything follows from them."""

    who: StartList
    seen: tuple[bytes, ...] = ()
    #: The newest rounds whose answers are recorded here, oldest first, with what they restored.
    restored: tuple[tuple[int, FullName | None], ...] = ()
    word: Word = Word()  # of the newest round
    #: The newest round that this node offered to: it offers nothing more of an earlier one.
    round: int = 0

    @property
    def start(self) -> bytes:
        return self.who.start

    @property
    def promise(self) -> Promise:
        return self.who.promise

    @property
    def born(self) -> bool:
        return bool(self.restored)

    def with_answer(self, answer: StartAnswer) -> StartRecord:
        """The record, once the answer is recorded too."""
        rounds = {**dict(self.restored), answer.round: answer.restored}
        restored = tuple(sorted(rounds.items(), key=lambda one: one[0]))[-ROUNDS_MAX:]
        return self._replace(seen=answer.seen, restored=restored, word=answer.word)

    def brief(self) -> StartRecord:
        return self._replace(who=self.who.brief())

    def to_plain(self, who: object = None) -> list[object]:
        """`who`: the digest that an offer has in place of the list."""
        restored = [[round_, _point_to_plain(one)] for round_, one in self.restored]
        word = self.word.to_plain()
        return [who or self.who.to_plain(), list(self.seen), restored, word, self.round]

    @classmethod
    def of_plain(
        cls, value: object, who: Callable[[object], StartList] = StartList.of_plain
    ) -> StartRecord:
        """`who` makes the list of what stands for it. Raises ValueError."""
        found, seen, restored, word, last = plain.items(value, "a record of a start", count=5)
        rounds = {}
        for pair in plain.items(restored, "rounds", ROUNDS_MAX):
            round_, one = plain.items(pair, "a round", count=2)
            rounds[plain.number(round_, "a round")] = _point_of_plain(one)
        return cls(
            who(found),
            _starts_of_plain(seen),
            tuple(sorted(rounds.items(), key=lambda one: one[0])),
            Word.of_plain(word),
            plain.number(last, "a round"),
        )


class HeldPart(NamedTuple):
    """A shard on the disk of a node: one rank's part of a checkpoint."""

    checkpoint: FullName
    part: int  # the rank that stored it, in the start that saved it
    digest: bytes = b""  # of its manifest, 16 bytes; b"": not known
    intact: bool = True  # verified; or it is damaged, and does not count

    def to_plain(self) -> list[object]:
        return [self.checkpoint.to_plain(), self.part, self.digest, self.intact]

    @classmethod
    def of_plain(cls, value: object) -> HeldPart:
        """Raises ValueError."""
        checkpoint, part, digest, intact = plain.items(value, "a shard", count=4)
        return cls(
            FullName.of_plain(checkpoint),
            plain.number(part, "a rank"),
            plain.raw(digest, "a digest", may_lack=True),
            plain.flag(intact, "intact"),
        )


class PeerServer(NamedTuple):
    """How other nodes read what a node holds."""

    addresses: tuple[str, ...]  # HOST:PORT
    fingerprint: bytes  # of the certificate, 32 bytes
    token: bytes  # for the parts of this job there, 32 bytes

    def to_plain(self) -> list[object]:
        return [list(self.addresses), self.fingerprint, self.token]

    @classmethod
    def of_plain(cls, value: object) -> PeerServer:
        """Raises ValueError."""
        addresses, fingerprint, token = plain.items(value, "a peer", count=3)
        sizes = (fingerprint, FINGERPRINT_BYTES), (token, TOKEN_BYTES)
        if not all(isinstance(one, bytes) and len(one) == size for one, size in sizes):
            raise ValueError("a fingerprint or token has another size")
        found = plain.items(addresses, "addresses", ADDRESSES_MAX)
        return cls(tuple(plain.text(one, "an address") for one in found), fingerprint, token)  # type: ignore[arg-type]


class NodeServer(NamedTuple):
    """Where the others read from a node, also after the job."""

    node: bytes
    host: str
    peer: PeerServer | None  # None: nowhere

    def to_plain(self) -> list[object]:
        return [self.node, self.host, self.peer and self.peer.to_plain()]

    @classmethod
    def of_plain(cls, value: object) -> NodeServer:
        """Raises ValueError."""
        node, host, peer = plain.items(value, "a server", count=3)
        found = None if peer is None else PeerServer.of_plain(peer)
        return cls(plain.raw(node, "a node"), plain.text(host, "a host name"), found)


def servers_of_plain(value: object) -> tuple[NodeServer, ...]:
    """Raises ValueError."""
    return tuple(map(NodeServer.of_plain, plain.items(value, "servers", plain.NODES_MAX)))


class Offer(NamedTuple):
    """What a node tells a start to which it has promised. A node that is no member of the start,
    and holds shards of the job, may offer after the same promise."""

    node: bytes
    host: str
    promise: Promise
    records: tuple[StartRecord, ...] = ()  # of this start too, for rounds above 0
    known: tuple[FullName, ...] = ()  # the newest globals that it knows
    parts: tuple[HeldPart, ...] = ()
    #: Those of this start that a rank has got here, or that are recorded here.
    answers: tuple[StartAnswer, ...] = ()
    word: Word = Word()  # for this round
    round: int = 0
    peer: PeerServer | None = None  # None: nobody reads from this node

    @property
    def server(self) -> NodeServer:
        return NodeServer(self.node, self.host, self.peer)

    @property
    def lists(self) -> dict[bytes, StartList]:
        """Those of its records, brief, by digest."""
        return {one.who.digest: one.who.brief() for one in self.records}

    def to_plain(self) -> list[object]:
        """All nodes have the same lists, which are long, so their digests stand for them."""
        records = [one.to_plain(one.who.digest) for one in self.records]
        lists = (self.known, self.parts, self.answers)
        made = [[one.to_plain() for one in some] for some in lists]
        word = self.word.to_plain()
        peer = self.peer and self.peer.to_plain()
        who = [self.node, self.host, self.promise.to_plain()]
        return [*who, records, *made, word, self.round, peer]

    @staticmethod
    def named(value: object) -> frozenset[bytes]:
        """The digests of the lists in a plain offer. Raises ValueError."""
        records = plain.items(value, "an offer", count=len(Offer._fields))[3]
        some = plain.items(records, "records", RECORDS_MAX)
        return frozenset(
            plain.raw(plain.items(one, "a record of a start", count=5)[0], "a list") for one in some
        )

    @classmethod
    def of_plain(cls, value: object, lists: Mapping[bytes, StartList]) -> Offer:
        """`lists`: all that are `named`. Raises ValueError."""
        found = cls(*plain.items(value, "an offer", count=len(cls._fields)))  # type: ignore[arg-type]
        records = plain.items(found.records, "records", RECORDS_MAX)

        def who(digest: object) -> StartList:
            one = lists.get(plain.raw(digest, "a list"))
            if one is None:
                raise ValueError("an offer names a list that is not known")
            return one

        return cls(
            plain.raw(found.node, "a node"),
            plain.text(found.host, "a host name"),
            Promise.of_plain(found.promise),
            tuple(StartRecord.of_plain(one, who) for one in records),
            tuple(map(FullName.of_plain, plain.items(found.known, "known globals"))),
            tuple(map(HeldPart.of_plain, plain.items(found.parts, "shards"))),
            tuple(map(StartAnswer.of_plain, plain.items(found.answers, "answers", ROUNDS_MAX))),
            Word.of_plain(found.word),
            plain.number(found.round, "a round"),
            None if found.peer is None else PeerServer.of_plain(found.peer),
        )


def newest(records: Iterable[StartRecord]) -> tuple[StartRecord, ...]:
    """As many as an offer takes: first those of starts that have begun. One that has not makes a
    start refuse at most."""
    by_age = sorted(records, key=lambda one: (one.born, one.promise), reverse=True)
    return tuple(by_age[:RECORDS_MAX])


def unneeded(
    records: Collection[StartRecord], needed: Collection[bytes], promise: Promise
) -> set[bytes]:
    """The starts whose records a node may remove: an answer that is recorded here names them as
    older, and nothing of them is held or known here (`needed`)."""
    older = {start for record in records if record.born for start in record.seen}
    return {record.start for record in records} & older - {*needed, promise.start}


def _point_to_plain(restored: FullName | None) -> list[object] | None:
    return restored and restored.to_plain()


def _point_of_plain(value: object) -> FullName | None:
    return None if value is None else FullName.of_plain(value)


def _starts_of_plain(value: object) -> tuple[bytes, ...]:
    return tuple(plain.raw(one, "a start") for one in plain.items(value, "starts", SEEN_MAX))
