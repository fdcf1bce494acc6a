"""Peer servers in processes of their own, with readers and with those who pretend to be."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pccheck_native import _core, tls
from pccheck_native.nodes import peer
from pccheck_native.nodes.facts import FullName, SaveName
from pccheck_native.nodes.holding import Holding
from pccheck_native.nodes.lists import Promise
from pccheck_native.nodes.offers import Offer, PeerServer
from pccheck_store.reading import peers, streams
from pccheck_store.reading.peers import PeerPayloads
from pccheck_wire.errors import DaemonUnreachableError, NoCheckpointError
from pccheck_wire.messages import FarNode, FarPart, Opened
from pccheckd.peer import program
from pccheckd.peer.grant import ReadGrant
from pccheckd.peer.identity import NodeIdentity
from pccheckd.peer.server import Peers
from tests.support.coreloop import BLOCK_BYTES, CHUNK_BYTES, Loop, address, pack

UID, JOB = os.getuid(), "job"
TOKEN, START, NAME = b"t" * peer.TOKEN_BYTES, b"s" * 16, (0, 0, 7, 0)
DATA = bytearray(random.Random(3).randbytes(40 * BLOCK_BYTES + 11))
LIMIT_S = 60.0
#: What the other node holds of the job.
HOLDING = Holding(
    Offer(b"n" * 16, "b", Promise(3, START), known=(FullName(START, SaveName(*NAME)),)),
    "1.0", is_live=False,
)  # fmt: skip


class Node:
    """What the daemon of another node answers, with one checkpoint of rank 0."""

    def __init__(self, path: Path) -> None:
        with Loop(path, chunks=2 * len(DATA) // CHUNK_BYTES) as loop:
            self.sequence = loop.save(1, [DATA], b"the tree")
            self.entry = next(e for e in loop.volume.table() if e.sequence == self.sequence)
        self.path = path
        self.damages: list[int] = []
        self.server = PeerServer((), b"", b"")

    async def allow(self, uid: int, ask: peer.Ask) -> ReadGrant:
        assert uid == UID
        if (ask.job, ask.start, ask.name, ask.part) != (JOB, START, NAME, 0):
            raise NoCheckpointError("there is no such part")
        return ReadGrant(str(self.path), self.sequence, 99, os.open(self.path, os.O_RDONLY))

    async def held(self, uid: int, job: str) -> bytes:
        assert (uid, job) == (UID, JOB)
        return HOLDING.packed()

    async def reached(self, uid: int, job: str) -> bytes:
        return peer.packed_reach([(b"n" * 16, "no route")])

    async def damaged(self, uid: int, ask: peer.Ask, sequence: int) -> None:
        self.damages.append(sequence)

    def far(self, **changes: object) -> FarNode:
        known = {
            "host": "b", "addresses": list(self.server.addresses),
            "fingerprint": self.server.fingerprint, "token": self.server.token,
        }  # fmt: skip
        return FarNode(**{**known, **changes})  # type: ignore[arg-type]

    def payloads(
        self, *nodes: FarNode, job: str = JOB, start: bytes = START, digest: bytes = b"",
        said: list[str] | None = None,
    ) -> PeerPayloads:  # fmt: skip
        entry, every = self.entry, list(nodes or [self.far()])
        part = FarPart(0, [*range(len(every))], [digest or entry.digest] * len(every))
        opened = Opened(
            0, 5, entry.step, 0, 1, start, bytes(16), 0, 0, 0, nodes=every, far=[part],
            name=list(NAME),
        )  # fmt: skip
        return PeerPayloads(job, opened, (said if said is not None else []).append)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path / "v")
    served = Peers("127.0.0.1", tmp_path, made)
    server = await served.server(UID, JOB)
    assert server is not None
    made.server = server
    yield made
    await served.close()


def read(payloads: PeerPayloads) -> bytearray:
    """All of DATA."""
    memory = bytearray(len(DATA))
    with contextlib.closing(payloads):
        payloads.read_into(0, 0, len(DATA), pack([(address(memory), 0, len(memory))]))
    return memory


def connected(node: Node) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    (where,) = node.server.addresses
    plain = socket.create_connection(peer.split(where), LIMIT_S)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = context.wrap_socket(plain, suppress_ragged_eofs=False)
    assert hashlib.sha256(stream.getpeercert(True) or b"").digest() == node.server.fingerprint
    return stream


def ended(stream: socket.socket) -> bytes:
    """What comes before the other end closes the connection."""
    stream.settimeout(LIMIT_S)
    found = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := stream.recv(1 << 16):
            found += data
    stream.close()
    return found


async def test_a_part_is_read_and_checked(node: Node) -> None:
    payloads = node.payloads()
    assert await asyncio.to_thread(read, payloads) == DATA
    assert payloads.wall_ns == 99 and payloads.read_bytes == len(DATA)


async def test_ranges_are_read_as_they_are_wanted(node: Node) -> None:
    chance = random.Random(8)
    payloads = node.payloads()
    for _ in range(20):
        marks = sorted(chance.sample(range(len(DATA)), 4))
        memory = [bytearray(marks[1] - marks[0]), bytearray(marks[3] - marks[2])]
        ranges = pack([(address(memory[0]), marks[0], len(memory[0])),
                       (address(memory[1]), marks[2], len(memory[1]))])  # fmt: skip
        length = marks[3] - marks[0]
        await asyncio.to_thread(payloads.read_into, 0, marks[0], length, ranges)
        assert memory == [DATA[marks[0] : marks[1]], DATA[marks[2] : marks[3]]]
    payloads.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token": b"x" * 32}, "the token is not the token of this job"),
        ({"fingerprint": b"x" * 32}, "another node, or another daemon, answers there"),
        ({"addresses": []}, "it has no address"),
        ({"addresses": ["127.0.0.1:1"]}, "Connection refused"),
        ({"addresses": ["nonsense"]}, "invalid literal"),
    ],
)
async def test_a_reader_says_why_nothing_was_read(
    node: Node, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(DaemonUnreachableError, match=words) as caught:
        await asyncio.to_thread(read, node.payloads(node.far(**changes)))
    assert "rank 0 of step 0" in str(caught.value) and "host b" in str(caught.value)


async def test_what_the_daemon_does_not_know_is_refused(node: Node) -> None:
    with pytest.raises(DaemonUnreachableError, match="there is no such part"):
        await asyncio.to_thread(read, node.payloads(start=b"o" * 16))
    with pytest.raises(DaemonUnreachableError, match="the token is not the token of this job"):
        await asyncio.to_thread(read, node.payloads(job="another"))


async def test_another_manifest_than_the_agreed_one_is_left(node: Node) -> None:
    with pytest.raises(DaemonUnreachableError, match="not the one that it offered"):
        await asyncio.to_thread(read, node.payloads(digest=b"x" * 16))


async def test_what_a_node_holds_is_told_to_who_has_the_token(node: Node) -> None:
    assert await asyncio.to_thread(streams.holding, node.far(), JOB) == HOLDING
    with pytest.raises(tls.LeftError, match="the token is not the token of this job"):
        await asyncio.to_thread(streams.holding, node.far(token=b"x" * 32), JOB)


async def test_whom_a_node_cannot_reach_is_told_to_who_has_the_token(node: Node) -> None:
    assert await asyncio.to_thread(streams.reach, node.far(), JOB) == [(b"n" * 16, "no route")]
    with pytest.raises(tls.LeftError, match="the token is not the token of this job"):
        await asyncio.to_thread(streams.reach, node.far(token=b"x" * 32), JOB)


async def test_a_restarted_daemon_is_known_by_what_was_kept(node: Node, tmp_path: Path) -> None:
    """Its key, token and port."""
    again = Peers("127.0.0.1", tmp_path, node)
    second = await again.server(UID, JOB)
    assert second is not None and second.addresses != node.server.addresses  # the port is taken
    assert second[1:] == node.server[1:]
    assert await again.server(UID, "another") != second
    await again.close()


async def test_a_second_address_is_tried(node: Node) -> None:
    addresses = ["127.0.0.1:1", *node.server.addresses]
    assert await asyncio.to_thread(read, node.payloads(node.far(addresses=addresses))) == DATA


async def test_another_copy_is_read_when_the_first_cannot_be(node: Node) -> None:
    said: list[str] = []
    dead = node.far(host="a", addresses=["127.0.0.1:1"])
    assert await asyncio.to_thread(read, node.payloads(dead, node.far(), said=said)) == DATA
    (words,) = said
    assert words.startswith("the part of rank 0 of step 0 is read from host b, and no longer from")
    assert "host a: 127.0.0.1:1: Connection refused" in words


async def test_damage_on_the_disk_is_reported_and_reaches_nobody(node: Node) -> None:
    slot = 2 * 4096 + node.entry.slot * _core.Volume(node.path, writable=False).info().slot_bytes
    with node.path.open("r+b") as file:
        file.seek(slot + 20 * BLOCK_BYTES)
        file.write(bytes(range(64)))
    with pytest.raises(DaemonUnreachableError, match="damaged"):
        await asyncio.to_thread(read, node.payloads())
    assert set(node.damages) == {node.sequence}


async def test_what_is_no_question_ends_its_connection_only(node: Node) -> None:
    """Before and after the handshake; PCC_FUZZ_ROUNDS of them. `make fuzz` makes 10,000."""
    chance = random.Random(11)
    good = peer.Ask(node.server.token, JOB, START, NAME, 0).packed()

    def one(kind: int) -> bytes:
        if kind == 0:  # no TLS at all
            (where,) = node.server.addresses
            plain = socket.create_connection(peer.split(where), LIMIT_S)
            plain.sendall(chance.randbytes(chance.randrange(1, 600)))
            plain.shutdown(socket.SHUT_WR)
            ended(plain)  # an alert may come
            return b""
        stream = connected(node)
        if kind == 1:  # any bytes
            body = chance.randbytes(chance.randrange(0, 300))
            stream.sendall(peer.ASK.pack(len(body)) + body)
        elif kind == 2:  # too long
            stream.sendall(peer.ASK.pack(chance.randrange(peer.ASK_BYTES_MAX + 1, 1 << 32)))
        elif kind == 3:  # a question with changed bytes
            changed = bytearray(good)
            for _ in range(chance.randrange(1, 4)):
                changed[chance.randrange(peer.ASK.size, len(good))] ^= 1 << chance.randrange(8)
            stream.sendall(changed)
        else:  # cut short
            stream.sendall(good[: chance.randrange(len(good))])
            stream.unwrap() if chance.random() < 0.5 else None
            stream.close()
            return b""
        return ended(stream)

    rounds = int(os.environ.get("PCC_FUZZ_ROUNDS", "300"))
    for number in range(rounds):
        with contextlib.suppress(OSError):
            found = await asyncio.to_thread(one, chance.randrange(5))
            assert not found or peer.ANSWER.unpack_from(found)[0] == peer.REFUSED
        if number % 100 == 0:
            assert await asyncio.to_thread(read, node.payloads()) == DATA


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 0), (0, 1 << 40), (1 << 62, 4096), (0, program.peer.PIECE_BYTES + BLOCK_BYTES)],
)
async def test_requests_for_what_is_not_there_are_refused(
    node: Node, offset: int, length: int
) -> None:
    def ask() -> bytes:
        stream = connected(node)
        stream.sendall(peer.Ask(node.server.token, JOB, START, NAME, 0).packed())
        said, nbytes = peer.ANSWER.unpack(_exactly(stream, peer.ANSWER.size))
        assert said == peer.OK
        _exactly(stream, nbytes)
        stream.sendall(peer.REQUEST.pack(offset, length))
        return ended(stream)

    found = await asyncio.to_thread(ask)
    assert peer.ANSWER.unpack_from(found)[0] == peer.REFUSED and b"no such blocks" in found


def _exactly(stream: ssl.SSLSocket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        data = stream.recv(nbytes - len(found))
        if not data:
            raise ConnectionResetError
        found += data
    return found


async def test_those_who_say_nothing_keep_no_reader_out(node: Node) -> None:
    (where,) = node.server.addresses
    silent = [
        socket.create_connection(peer.split(where), LIMIT_S)
        for _ in range(3 * program.STRANGERS_MAX)
    ]
    assert await asyncio.to_thread(read, node.payloads()) == DATA
    gone = await asyncio.to_thread(ended, silent[0])  # the oldest gave way
    assert gone == b""
    for one in silent:
        one.close()


# -- lying nodes -------------------------------------------------------------------------------


class Liar:
    """A server with the key that the reader expects; it sends wrong bytes."""

    def __init__(self, node: Node, lie: str) -> None:
        self._node, self._lie = node, lie
        self._waits = threading.Event()
        key = NodeIdentity(b"liar").key(UID)
        self._context = program._context(key.pem)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.far = node.far(
            host="liar", addresses=[peer.address(*self._listener.getsockname())],
            fingerprint=key.fingerprint,
        )  # fmt: skip

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._lie_to, args=(plain,), daemon=True).start()

    def _lie_to(self, plain: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, ValueError),
            self._context.wrap_socket(plain, server_side=True) as stream,
        ):
            self._answer(stream)

    def close(self) -> None:
        self._waits.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self, stream: ssl.SSLSocket) -> None:
        (nbytes,) = peer.ASK.unpack(_exactly(stream, peer.ASK.size))
        _exactly(stream, nbytes)
        volume = _core.Volume(self._node.path, writable=False)
        first = peer.WALL.pack(1) + volume.manifest(self._node.sequence)
        if self._lie == "huge manifest":
            stream.sendall(peer.ANSWER.pack(peer.OK, 0xFFFFFFFF))
        elif self._lie == "no manifest":
            stream.sendall(peer.ANSWER.pack(peer.OK, 3) + b"abc")
        else:
            stream.sendall(peer.ANSWER.pack(peer.OK, len(first)) + first)
        while True:
            offset, length = peer.REQUEST.unpack(_exactly(stream, peer.REQUEST.size))
            blocks = bytearray(volume.read(self._node.sequence, offset, length))
            if self._lie == "one bit":
                blocks[length // 2] ^= 1
            elif self._lie == "another block":
                blocks = bytearray(volume.read(self._node.sequence, BLOCK_BYTES, BLOCK_BYTES))
                blocks = (blocks * (length // BLOCK_BYTES + 1))[:length]
            elif self._lie == "fewer bytes":
                blocks = blocks[:-1]
            elif self._lie == "cut":
                stream.sendall(peer.ANSWER.pack(peer.OK, length) + blocks[: length // 2])
                return
            elif self._lie in ("slow", "silent"):
                self._waits.wait(0.05 if self._lie == "slow" else LIMIT_S)
            stream.sendall(peer.ANSWER.pack(peer.OK, len(blocks)) + blocks)


@pytest.fixture
def lie(node: Node, request: pytest.FixtureRequest) -> Iterator[Liar]:
    liar = Liar(node, request.param)
    thread = threading.Thread(target=liar.serve)
    thread.start()
    yield liar
    liar.close()
    thread.join(LIMIT_S)


@pytest.mark.parametrize(
    "lie",
    ["one bit", "another block", "fewer bytes", "cut", "huge manifest", "no manifest"],
    indirect=True,
)
async def test_no_lie_reaches_the_state(node: Node, lie: Liar) -> None:
    said: list[str] = []
    assert await asyncio.to_thread(read, node.payloads(lie.far, node.far(), said=said)) == DATA
    assert len(said) == 1 and "no longer from host liar" in said[0]
    with pytest.raises(DaemonUnreachableError, match="host liar"):
        await asyncio.to_thread(read, node.payloads(lie.far))


@pytest.mark.parametrize(
    ("lie", "words"), [("slow", "it sends only"), ("silent", "no answer in time")], indirect=["lie"]
)
async def test_a_slow_copy_is_left_for_another_one(
    node: Node, lie: Liar, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "PIECE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(peers, "SLOW_AFTER_S", 0.1)
    monkeypatch.setattr(tls, "SILENT_LIMIT_S", 0.5)
    said: list[str] = []
    assert await asyncio.to_thread(read, node.payloads(lie.far, node.far(), said=said)) == DATA
    (left,) = said
    assert f"no longer from host liar: {words}" in left


@pytest.mark.parametrize("lie", ["slow"], indirect=True)
async def test_a_slow_copy_is_read_when_there_is_no_other(
    node: Node, lie: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "PIECE_BYTES", 8 * BLOCK_BYTES)
    monkeypatch.setattr(peers, "SLOW_AFTER_S", 0.1)
    assert await asyncio.to_thread(read, node.payloads(lie.far)) == DATA


def test_a_question_is_what_was_packed() -> None:
    ask = peer.Ask(TOKEN, "jöb", START, NAME, 3)
    packed = ask.packed()
    for one in (ask, peer.Ask(TOKEN, "job"), peer.Ask(TOKEN, "job", reach=True)):
        assert peer.Ask.of_packed(one.packed()[peer.ASK.size :]) == one
    chance = random.Random(1)
    for _ in range(2000):
        changed = bytearray(packed[peer.ASK.size :])
        changed[chance.randrange(len(changed))] = chance.randrange(256)
        with contextlib.suppress(ValueError):
            assert isinstance(peer.Ask.of_packed(bytes(changed)), peer.Ask)


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (5, 1 << 20), (1 << 20, 7 << 20)])
def test_pieces_are_whole_blocks_and_cover_the_range(offset: int, length: int) -> None:
    payload, block = (8 << 20) + 5, 1 << 16
    found = peer.pieces(offset, length, payload, block)
    assert found[0][0] <= offset and sum(found[-1]) >= min(offset + length, payload)
    for (at, nbytes), (following, _) in zip(found, [*found[1:], (sum(found[-1]), 0)], strict=True):
        assert at % block == 0 and at + nbytes == following and 0 < nbytes <= peer.PIECE_BYTES


async def test_more_readers_than_connections_all_get_their_part(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All begin at once, and keep their connections for a moment; the others wait for them."""
    monkeypatch.setattr(peers, "BUSY_PAUSE_S", 0.2)
    held = await asyncio.to_thread(held_by, node, program.READERS_MAX)
    late = [asyncio.create_task(asyncio.to_thread(read, node.payloads())) for _ in range(4)]
    said = await asyncio.to_thread(refused_as_busy, node)
    assert b"as many connections" in said
    for stream in held:
        stream.close()
    assert [await one for one in late] == [DATA] * len(late)


def held_by(node: Node, count: int) -> list[ssl.SSLSocket]:
    """Connections of readers that ask for nothing."""
    held = [connected(node) for _ in range(count)]
    for stream in held:
        stream.sendall(peer.Ask(node.server.token, JOB, START, NAME, 0).packed())
    for stream in held:
        said, nbytes = peer.ANSWER.unpack(_exactly(stream, peer.ANSWER.size))
        assert said == peer.OK, _exactly(stream, nbytes)
    return held


def refused_as_busy(node: Node) -> bytes:
    stream = connected(node)
    stream.sendall(peer.Ask(node.server.token, JOB, START, NAME, 0).packed())
    found = ended(stream)
    assert peer.ANSWER.unpack_from(found)[0] == peer.BUSY
    return found
