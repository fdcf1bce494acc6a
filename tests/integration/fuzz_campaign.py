"""Row 8 of the fault plan, without the stateful part: mutated messages for the decoder, and mutated
packets for the attach socket of a real daemon, before and after the handshake.

    python -m tests.integration.fuzz_campaign [--decoded 3000000] [--packets 100000] [--seed 1]

The bytes of a finding are kept in build/fuzz-*.bin; its seed and number are printed.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pccheck_wire import attach, codec
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import PccheckError, ProtocolError
from pccheck_wire.messages import (
    Carry,
    Describe,
    Drop,
    Expose,
    Goodbye,
    Hello,
    ListServers,
    ListVolumes,
    Open,
    Pin,
    Read,
    Register,
    Request,
    RequestBody,
    Restored,
    Role,
    Status,
    Trace,
    Verify,
)
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of

SIZE = 300_000
BODIES: tuple[RequestBody, ...] = (
    Register(SIZE), Describe(1), Open(), Open(3, 4), Read(1, 1, 0, SIZE),
    Restored(1), Pin(1), Pin(1, False), Status(), ListServers(), ListVolumes("job"),
    Verify("job", 0, 1),
    Trace(1.0), Goodbye(), Expose(1, [b"x" * 100], True), Drop("job", 0, -1, True),
    Carry(1, 1, [b"\x91\xc0"], 5, True),
)  # fmt: skip
ALIVE_EVERY = 200


def hello() -> bytes:
    return codec.encode(Hello(PROTOCOL_VERSION, Role.TRAINER, "test", os.getpid(), job="job"))


def mutate(data: bytes, chance: random.Random) -> bytes:
    """A copy in which some bytes, or runs of bytes, are changed, doubled, moved or cut."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, end = sorted((chance.randrange(len(out) + 1), chance.randrange(len(out) + 1)))
        what = chance.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif what == 1 and at < len(out):
            out[at] = chance.choice((0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xCF, 0xDD, 0xDF, 0xFF))
        elif what == 2:
            out[at:at] = out[at:end][:64]
        elif what == 3:
            del out[at : min(end, at + 8)]
        elif what == 4:
            out[at:at] = chance.randbytes(chance.randrange(9))
        else:
            del out[at:]
    return bytes(out)


def found(data: bytes, seed: int, number: int) -> None:
    path = Path("build") / f"fuzz-{seed}-{number}.bin"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    print(f"fuzz_campaign: seed {seed}, number {number}: {path}", flush=True)


def decode(count: int, seed: int) -> Counter[str]:
    """Bytes decode to a message or raise ProtocolError; the message survives a round trip."""
    chance, seen = random.Random(seed), Counter[str]()
    seeds = [codec.encode(Request(n, b"0" * 16, body)) for n, body in enumerate(BODIES, 1)]
    for number in range(count):
        data = mutate(chance.choice(seeds), chance)
        try:
            message = codec.decode(data, Request)
            assert codec.decode(codec.encode(message), Request) == message
            seen["decoded"] += 1
        except ProtocolError:
            seen["refused"] += 1
        except BaseException:
            found(data, seed, number)
            raise
    return seen


class Attached:
    """A connection that is opened again whenever the daemon has closed it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session: attach.Attachment | None = None

    def first(self, data: bytes) -> None:
        """Sends the bytes in place of the hello."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(10)
            peer.connect(str(self.path))
            peer.send(data)
            if data:
                peer.recv(1 << 16)

    def later(self, make: Callable[[bytes], bytes]) -> None:
        try:
            if self.session is None:
                message = codec.decode(hello(), Hello)
                self.session = attach.connect(message, self.path)
                self.session.socket.setblocking(False)
            self.session.socket.send(make(self.session.welcome.token))
            while self.session.socket.recv(1 << 17):
                pass
            self.close()
        except BlockingIOError:
            pass
        except (OSError, PccheckError):  # the daemon has not ended the last session yet
            self.close()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        self.session = None


def packets(count: int, seed: int) -> Counter[str]:
    """The daemon does not end, logs no internal error, and serves an innocent trainer."""
    chance, seen = random.Random(seed), Counter[str]()
    flags = ("--chunk", "64KiB", "--block-bytes", "4KiB", "--dram", "4MiB")
    with Daemon(*flags, "--max-storage", "200MiB", "--engine", "pwrite") as daemon:
        daemon.start()
        peer = Attached(daemon.socket)
        with Rank(daemon.socket, job="innocent") as rank:
            rank.register(SIZE)
            for number in range(count):
                data = b""
                body = chance.choice(BODIES)
                try:
                    if chance.randrange(4) == 0:
                        data = mutate(hello(), chance)
                        peer.first(data)
                        seen["hellos"] += 1
                    else:
                        kept = chance.getrandbits(64)

                        def make(token: bytes, kept: int = kept, body: RequestBody = body) -> bytes:
                            whole = codec.encode(Request(1, token, body))
                            return mutate(whole, random.Random(kept)) or b"\0"

                        data = make(b"0" * 16)
                        peer.later(make)
                        seen["requests"] += 1
                except (OSError, TimeoutError):
                    seen["closed"] += 1
                if number % ALIVE_EVERY == ALIVE_EVERY - 1:
                    try:
                        rank.save(number, payload_of(number, SIZE))
                        assert "Traceback" not in daemon.log.read_text(), "the daemon was surprised"
                    except BaseException:
                        found(data, seed, number)
                        print(daemon.log.read_text()[-4000:])
                        raise
                    seen["saved"] += 1
            peer.close()
        assert daemon.stop() == 0
    return seen


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decoded", type=int, default=3_000_000)
    parser.add_argument("--packets", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    began_s = time.monotonic()
    seen = decode(flags.decoded, flags.seed) + packets(flags.packets, flags.seed)
    told = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    took_s = time.monotonic() - began_s
    print(f"fuzz_campaign: {told} in {took_s:.0f} s; 0 violations, seed {flags.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
