"""Passes packets between two network devices, late, not at all or twice: what netem does where the
kernel has it. `python -m tests.support.slowlink A B LOW_MS HIGH_MS LOSS TWICE SEED`"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys

_SOL_PACKET = 263
_ADD_MEMBERSHIP, _VNET_HDR, _IGNORE_OUTGOING = 1, 15, 23
_ETH_P_ALL = 3
#: The header of virtio, which says what checksums and segments are left to a device; and a packet
#: of many segments.
PACKET_MAX = 10 + 14 + (1 << 16)


def opened(device: str) -> socket.socket:
    """All packets that arrive at the device, and a way out of it."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    index = socket.if_nametoindex(device)
    promiscuous = index.to_bytes(4, sys.byteorder) + (1).to_bytes(2, sys.byteorder) + bytes(10)
    made.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, promiscuous)
    made.bind((device, _ETH_P_ALL))
    made.setblocking(False)
    return made


def join(
    one: socket.socket, other: socket.socket, late_s: tuple[float, float], loss: float,
    twice: float, chance: random.Random,
) -> None:  # fmt: skip
    loop = asyncio.get_running_loop()

    def send(to: socket.socket, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its queue is full, or the device is down: lost
            to.send(packet)

    def take(come: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while packet := come.recv(PACKET_MAX):
                if chance.random() < loss:
                    continue
                for _ in range(1 + (chance.random() < twice)):
                    loop.call_later(chance.uniform(*late_s), send, to, packet)

    loop.add_reader(one, take, one, other)
    loop.add_reader(other, take, other, one)


async def main() -> None:
    one, other = map(opened, sys.argv[1:3])
    low_ms, high_ms, loss, twice = map(float, sys.argv[3:7])
    join(one, other, (low_ms / 1e3, high_ms / 1e3), loss, twice, random.Random(sys.argv[7]))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
