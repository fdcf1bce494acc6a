"""Hostile clients: one attack for each name in ATTACKS, run by another user of the daemon:

    python -m tests.support.as_user UID tests.support.hostile ATTACK SOCKET JSON

JSON is what the attacker knows of the attacked job. The attacker ignores the daemon's answers. It
prints "enough" after some steps, continues until its input ends, and prints its number of steps."""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import mmap
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import zmq

from pccheck_native import NativeError
from pccheck_wire import attach, codec
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import PccheckError
from pccheck_wire.messages import (
    Carry,
    Describe,
    Drop,
    Expose,
    Hello,
    ListVolumes,
    Open,
    Pin,
    Read,
    Register,
    Request,
    RequestBody,
    Role,
    Status,
    Trace,
    Verify,
)
from tests.support.handpage import Page, block_of
from tests.support.rank import Rank, payload_of

ENOUGH = 15
LIFE_S = 120  # the attacker ends by itself, also when the test was killed
Step = Iterator[None]


class Attacker:
    def __init__(self, path: str, victim: dict[str, Any]) -> None:
        self.path, self.victim = path, victim
        self.chance = random.Random(1)
        self.numbers = itertools.count(1)

    def hello(self, **fields: Any) -> Hello:
        fields = {"job": "evil", "rank": 0, "world_size": 1, "local_world_size": 1} | fields
        return Hello(PROTOCOL_VERSION, Role.TRAINER, "test", os.getpid(), **fields)

    def attach(self, **fields: Any) -> attach.Attachment:
        return attach.connect(self.hello(**fields), self.path)

    def connection(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(0.5)
        peer.connect(self.path)
        return peer

    def control(self, endpoint: str) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(endpoint)
        return dealer

    def request(self, token: bytes, body: RequestBody) -> bytes:
        return codec.encode(Request(next(self.numbers), token, body))

    # -- the attach socket

    def connection_flood(self) -> Step:
        held: list[socket.socket] = []
        while True:
            with contextlib.suppress(OSError):
                held.append(self.connection())
            if len(held) > 400:
                for peer in held:
                    peer.close()
                held.clear()
            yield

    def fd_flood(self) -> Step:
        files = array.array("i", [os.open("/dev/null", os.O_RDONLY) for _ in range(200)])
        packet = codec.encode(self.hello())
        while True:
            with contextlib.suppress(OSError), self.connection() as peer:
                for data in (packet, b"x", packet):
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
                    peer.sendmsg([data], rights)
            yield

    def half_handshakes(self) -> Step:
        whole = codec.encode(self.hello())
        held: list[socket.socket] = []
        while True:
            with contextlib.suppress(OSError):
                peer = self.connection()
                peer.send(self.chance.choice([whole[: len(whole) // 2], b"\0", b"\xc1", whole]))
                held.append(peer)
            while len(held) > 100:
                held.pop(0).close()
            yield

    def slow_reader(self) -> Step:
        session = self.attach()
        bodies = (Status(), ListVolumes(), Trace(60.0))
        session.socket.setblocking(False)
        while True:
            try:
                body = self.chance.choice(bodies)
                session.socket.send(self.request(session.welcome.token, body))
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # let go
                session.close()
                with contextlib.suppress(PccheckError):
                    session = self.attach()
                    session.socket.setblocking(False)
            yield

    def nonsense(self) -> Step:
        """Oversized, deep, doubled keys, extension types; before and after the handshake."""
        deep: object = 1
        for _ in range(200):
            deep = [deep]
        twice = b"\x82\xa1t\xa5hello\xa1t\xa5hello"
        packets = [
            b"x" * 200_000, msgpack.packb(deep), twice, msgpack.packb(msgpack.ExtType(5, b"x" * 9)),
            msgpack.packb([{}] * 60_000), b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
            msgpack.packb({"t": "hello", "protocol": PROTOCOL_VERSION, "role": [1] * 10_000}),
        ]  # fmt: skip
        while True:
            for packet in packets:
                with contextlib.suppress(OSError), self.connection() as peer:
                    peer.send(packet[: self.chance.choice([len(packet), 60_000])])
                    peer.recv(65536)
                with contextlib.suppress(OSError, PccheckError), self.attach() as session:
                    session.socket.send(packet[:60_000])
                    session.socket.settimeout(0.2)
                    session.socket.recv(65536)
            yield

    def sessions(self) -> Step:
        """As many sessions as possible, each with memory and a volume."""
        held: list[attach.Attachment] = []
        for number in itertools.count():
            try:
                session = self.attach(rank=number % 300, world_size=300, local_world_size=300)
                held.append(session)
                session.request(Register(1 << 20), timeout_s=5)
            except (PccheckError, OSError):
                time.sleep(0.01)
            yield

    def minimal_sessions(self) -> Step:
        """Many sessions that answer nothing, each with the least memory. A session that the daemon
        ends is replaced at once."""
        held: dict[int, attach.Attachment] = {}
        for number in itertools.cycle(range(24)):
            if number in held and self.has_ended(held[number].socket):
                held.pop(number).close()
            with contextlib.suppress(PccheckError, OSError):
                if number not in held:
                    held[number] = self.attach(job=f"small-{number}")
                    held[number].request(Register(100_000), timeout_s=1)
            yield

    def has_ended(self, peer: socket.socket) -> bool:
        try:
            ready = select.select([peer], [], [], 0)[0]
            return bool(ready) and not peer.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    def names(self) -> Step:
        """A new job each time, with the largest possible volume."""
        for number in itertools.count():
            job = f"evil-{number}"
            with contextlib.suppress(PccheckError, OSError), self.attach(job=job) as session:
                session.request(
                    Register(1 << (18 + number % 20), failed=1 << number % 63), timeout_s=5
                )
            yield

    def page_garbage(self) -> Step:
        while True:
            with contextlib.suppress(PccheckError, OSError), self.attach() as session:
                session.request(Register(1 << 20), timeout_s=5)
                own = Page(session.page_fd)  # which reads the page's geometry
                with mmap.mmap(session.page_fd, 0) as page:
                    for _ in range(200):
                        at = self.chance.randrange(min(len(page), 1 << 16))
                        page[at : at + 1] = bytes([self.chance.randrange(256)])
                    for snapshot in range(1, 20):
                        own.request(snapshot, block_of(snapshot, 1 << 20))
                    own.close()
                    for _ in range(50):
                        at = self.chance.randrange(len(page) - 64)
                        page[at : at + 64] = self.chance.randbytes(64)
            yield

    def endless_starts(self) -> Step:
        """Many processes, in worlds of any size. Each saves a little and ends."""
        for number in itertools.count(1):
            world = self.chance.choice([1, 2, 3, 65536])
            fields = {
                "job": f"starts-{number % 3}", "rank": self.chance.randrange(min(world, 5)),
                "world_size": world, "local_world_size": world,
                "process": self.chance.randbytes(self.chance.choice([1, 16, 4000])),
                "incarnation": self.chance.choice([0, 0, 1, 2**62]),
                "restored": self.chance.choice([None, 0, 2**62]),
            }  # fmt: skip
            with contextlib.suppress(PccheckError, OSError), self.attach(**fields) as session:
                session.request(Register(1 << 20), timeout_s=5)
                session.request(Open(any_world_size=True), timeout_s=5)
                for rank in (0, 1, 65535):
                    session.request(Read(1, 1, 0, 8, rank=rank), timeout_s=5)
            yield

    # -- control

    def frame_flood(self) -> Step:
        session = self.attach()
        dealer = self.control(session.welcome.endpoint)
        while True:
            for _ in range(50):
                frames = [self.chance.randbytes(self.chance.choice([0, 1, 60_000]))]
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart(frames * self.chance.randrange(1, 4), zmq.NOBLOCK)
            yield

    def request_flood(self) -> Step:
        """As many requests as the ring holds, of which half are impossible."""
        while True:
            with contextlib.suppress(PccheckError, OSError), self.attach() as session:
                session.request(Register(1 << 20), timeout_s=20)
                page = Page(session.page_fd)
                for snapshot in range(1, 3000):
                    block = block_of(snapshot, 1 << 20)
                    if snapshot % 2:
                        block = block[:8] + self.chance.randbytes(len(block) - 8)
                    while page.is_full and not self.has_ended(session.socket):
                        yield
                    page.request(snapshot, block)
                    if snapshot % 50 == 0:
                        yield
                page.close()
            yield

    def oversized_begins(self) -> Step:
        """Requests checkpoints that are far larger than its volume, each after one that fits."""
        with Rank(Path(self.path), job="evil") as rank:
            rank.register(1 << 20)
            size = rank.native.chunk_bytes << 28
            for step in itertools.count(1, 2):
                rank.save(step, payload_of(step, 1 << 20))
                with contextlib.suppress(PccheckError, OSError), self.attach(job="big") as session:
                    session.request(Register(1 << 20), timeout_s=20)
                    page = Page(session.page_fd)
                    page.request(1, block_of(1, size))
                    page.close()
                yield

    def false_offers(self) -> Step:
        """Some offers have no base, others have changed bytes."""
        counts = (0, 1, 1 << 20, 3 << 20, 4 << 20, 2**62, 2**63, 2**64 - 1)
        for number in itertools.count(1):
            try:
                with Rank(Path(self.path), job="evil") as rank:
                    rank.register(4 << 20)
                    for step in range(8):
                        frozen, offered = self.chance.choice(counts), self.chance.choice(counts)
                        data = payload_of(number, 3 << 20) + payload_of(step, 1 << 20)
                        rank.begin(step, data, frozen=frozen, offered=offered)
                        yield
            except (PccheckError, OSError, NativeError):
                yield  # the session has ended

    def exposures(self) -> Step:
        session = self.attach()
        dealer = self.control(session.welcome.endpoint)
        for number in itertools.count(1):
            data = [self.chance.randbytes(codec.PIECE_BYTES)] * codec.PIECES_MAX
            with contextlib.suppress(zmq.Again):
                body = Expose(1 + number // 50, data, more=True)
                dealer.send(self.request(session.welcome.token, body), zmq.NOBLOCK)
            yield

    def wrong_endpoint(self) -> Step:
        """Requests to the endpoint of another user; a real attacker could not guess its address."""
        while True:
            dealer = self.control(self.victim["endpoint"])
            for _ in range(20):
                with contextlib.suppress(zmq.Again):
                    token = bytes.fromhex(self.victim["token"])
                    dealer.send(self.request(token, Drop(self.victim["job"], uid=0)), zmq.NOBLOCK)
            assert not dealer.poll(20), "the victim's endpoint answers another uid"
            dealer.close()
            yield

    def stolen_token(self) -> Step:
        session = self.attach()
        dealer = self.control(session.welcome.endpoint)
        token = bytes.fromhex(self.victim["token"])
        bodies: list[RequestBody] = [
            Register(1 << 20), Describe(1), Open(), Read(1, 1, 0, 1),
            Open(any_world_size=True), Read(2, 1, 0, 1, rank=0),
            Pin(1), Pin(1, pinned=False),
            Drop(self.victim["job"], uid=0), ListVolumes(self.victim["job"]),
            Verify(self.victim["job"], uid=0), Carry(0), Carry(1, 1, [b"\x90"]),
        ]  # fmt: skip
        while True:
            for body in bodies:
                dealer.send(self.request(token, body))
                assert dealer.poll(20_000), f"no answer to {body}"
                answer = msgpack.unpackb(dealer.recv())
                assert answer["body"]["t"] == "failure", answer
            yield

    def verify_loops(self) -> Step:
        """Verifies its own checkpoints all the time, in several sessions."""
        with Rank(Path(self.path), job="evil") as rank:
            rank.register(8 << 20)
            rank.save(1, payload_of(1, 8 << 20))
        observers = [attach.observe(self.path) for _ in range(4)]
        while True:
            for observer in observers:
                observer.socket.send(self.request(observer.welcome.token, Verify("evil")))
            for observer in observers:
                assert observer.socket.recv(1 << 16)
            yield

    def others_snapshots(self) -> Step:
        """Asks for checkpoints of other ranks and users by their numbers."""
        fields = {"world_size": 2, "local_world_size": 2, "launch": "one"}
        mine, other = self.attach(rank=0, **fields), self.attach(rank=1, **fields)
        mine.request(Register(1 << 20), timeout_s=20)
        while True:
            for session in (mine, other):
                for number in (0, 1, 2, 3, 2**62):
                    for body in (
                        Describe(number), Read(number, number, 0, 8), Open(number), Pin(number),
                        Pin(-number, pinned=False),
                    ):  # fmt: skip
                        with contextlib.suppress(PccheckError):
                            session.request(body, timeout_s=20)
                for uid in (0, -1):
                    with contextlib.suppress(PccheckError):
                        session.request(Drop(self.victim["job"], uid=uid), timeout_s=20)
            yield


ATTACKS: dict[str, Callable[[Attacker], Step]] = {
    name: attack for name, attack in vars(Attacker).items()
    if callable(attack) and attack.__annotations__.get("return") == "Step"
}  # fmt: skip


def main() -> int:
    name, path, victim = sys.argv[1:]
    signal.alarm(LIFE_S)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 4096), limit))
    steps = 0
    for _ in ATTACKS[name](Attacker(path, json.loads(victim))):
        steps += 1
        if steps == ENOUGH:
            print("enough", flush=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    print(steps, flush=True)
    os._exit(0)
