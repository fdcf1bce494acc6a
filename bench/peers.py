"""What a rank reads from another node: verified ranges, beside plain TLS streams of the same bytes.

    python -m bench.peers [--size 1GiB] [--rounds 5] [--directory /dev/shm]

The peer server is a process of its own, as on a node; the plain streams come from a process that
sends from its memory, with the same TLS. Everything is on this machine and shares its CPUs. The
directory is in memory by default, so that no disk is measured.
Writes bench/results/peers-DATE.{json,md}.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import torch

from bench import common
from bench.common import GIB, MIB, Spread
from bench.ours import Daemon
from pccheck import PCcheckClient
from pccheck_native import _core
from pccheck_native.nodes import peer
from pccheck_store.reading.peers import STREAMS, PeerPayloads
from pccheck_wire.messages import FarNode, FarPart, Opened
from pccheckd.peer import program
from pccheckd.peer.grant import ReadGrant
from pccheckd.peer.identity import NodeIdentity
from pccheckd.peer.server import Peers

PIECE = peer.PIECE_BYTES
START = bytes(16)


def stored(directory: Path, size: int) -> Path:
    """A volume with one checkpoint."""
    flags = (
        "--chunk",
        "16MiB",
        "--dram",
        "256MiB",
        "--slots",
        "2",
        "--keep",
        "1",
        "--allow-any-filesystem",
    )
    (directory / "storage").mkdir()
    daemon = Daemon(*flags, storage=directory / "storage").start()
    try:
        client = PCcheckClient(job="bench", socket=daemon.socket)
        handle = client.checkpoint({"state": torch.rand(size // 4)}, step=1)
        handle.wait_durable(600)
        client.close()
    finally:
        daemon.stop()
    (path,) = (directory / "storage").glob("*/bench/*.pcc")
    return path


class Plain:
    """Sends bytes of its memory to whoever connects, over TLS 1.3, from a process of its own."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.place = listener.getsockname()
        context = program._context(NodeIdentity(b"plain").key(0).pem)
        self.pid = os.fork()
        if self.pid == 0:
            data = memoryview(os.urandom(PIECE))
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._send, args=(context, connection, data)).start()
        listener.close()

    @staticmethod
    def _send(context: ssl.SSLContext, connection: socket.socket, data: memoryview) -> None:
        with context.wrap_socket(connection, server_side=True) as stream:
            (left,) = struct.unpack("<Q", stream.recv(8))
            while left:
                stream.sendall(data[: min(left, len(data))])
                left -= min(left, len(data))

    def read(self, nbytes: int, streams: int, into: bytearray) -> float:
        """Seconds."""
        began_s = time.perf_counter()
        share = nbytes // streams
        threads = [
            threading.Thread(target=self._read, args=(share, memoryview(into)[at * share :]))
            for at in range(streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began_s

    def _read(self, nbytes: int, into: memoryview) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(socket.create_connection(self.place)) as stream:
            stream.sendall(struct.pack("<Q", nbytes))
            at = 0
            while at < nbytes:
                at += stream.recv_into(into[at : min(at + PIECE, nbytes)])


def from_peer(node: FarNode, digest: bytes, nbytes: int, into: bytearray) -> float:
    """Seconds."""
    part = FarPart(0, [0], [digest])
    opened = Opened(
        0, 1, 1, 0, 1, START, bytes(16), 0, 0, 0, nodes=[node], far=[part], name=[0, 0, 1, 0]
    )
    payloads = PeerPayloads("bench", opened, print)
    address = ctypes.addressof(ctypes.c_char.from_buffer(into))
    began_s = time.perf_counter()
    payloads.read_into(0, 0, nbytes, struct.pack("<QQQ", address, 0, nbytes))
    took_s = time.perf_counter() - began_s
    payloads.close()
    return took_s


class Volume:
    """What the daemon of the other node shares: the one checkpoint of a volume."""

    def __init__(self, path: Path) -> None:
        volume = _core.Volume(path, writable=False, allow_buffered=True)
        self.path, self.entry = path, next(one for one in volume.table() if one.sequence)
        volume.close()

    async def allow(self, uid: int, ask: peer.Ask) -> ReadGrant:
        return ReadGrant(str(self.path), self.entry.sequence, 1, os.open(self.path, os.O_RDONLY))

    async def held(self, uid: int, job: str) -> bytes:
        raise AssertionError("nobody asks for it")

    async def reached(self, uid: int, job: str) -> bytes:
        raise AssertionError("nobody asks for it")

    async def damaged(self, uid: int, ask: peer.Ask, sequence: int) -> None:
        raise AssertionError("it is damaged")


async def measured(path: Path, size: int, rounds: int) -> dict[str, list[float]]:
    plain, volume = Plain(), Volume(path)
    peers = Peers("127.0.0.1", path.parent, volume)
    server = await peers.server(os.getuid(), "bench")
    assert server is not None
    node = FarNode("b", list(server.addresses), server.fingerprint, server.token)
    into = bytearray(size)
    ways = {
        "one plain TLS stream": lambda: plain.read(size, 1, into),
        f"{STREAMS} plain TLS streams": lambda: plain.read(size, STREAMS, into),
        "verified, from a peer": lambda: from_peer(node, volume.entry.digest, size, into),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(rounds + 1):  # the first one warms up
            for name, way in ways.items():
                took_s = await asyncio.to_thread(way)
                if number:
                    found[name].append(took_s)
    finally:
        os.kill(plain.pid, 9)
        os.waitpid(plain.pid, 0)
        await peers.close()
    return found


def main() -> None:
    parser = common.arguments(__doc__, rounds=5)
    parser.add_argument("--size", type=common.parse_sizes, default=[GIB])
    parser.set_defaults(directory=Path("/dev/shm"))
    options = parser.parse_args()
    (size,) = options.size
    facts = common.facts_of(options.directory)
    with common.scratch(options.directory) as directory:
        found = asyncio.run(measured(stored(directory, size), size, options.rounds))
    lines = common.heading("Bytes from another node", facts)
    lines += [
        f"{size // MIB} MiB, {options.rounds} rounds, interleaved; sender and reader share this "
        "machine.", "",
        "| way | GiB/s | of one plain stream |", "|---|---|---|",
    ]  # fmt: skip
    rates = {name: [size / GIB / one for one in times] for name, times in found.items()}
    first = next(iter(rates.values()))
    for name, each in rates.items():
        share = Spread.of([one / other for one, other in zip(each, first, strict=True)])
        lines.append(f"| {name} | {Spread.of(each).text(2)} | {share.text(2)} |")
    common.write_results("peers", facts | {"seconds": found}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
