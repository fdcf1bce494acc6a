"""Frames between the daemon and a front, however the bytes are cut."""

from __future__ import annotations

import random
import struct

import pytest

from pccheckd.helper import framing

SEED = 20


def test_frames_survive_every_cut() -> None:
    rng = random.Random(SEED)
    for _ in range(200):
        frames = [
            (rng.randbytes(rng.randrange(256)), rng.randbytes(rng.choice((0, 1, 50, 3000))))
            for _ in range(rng.randrange(1, 9))
        ]
        stream = b"".join(framing.pack(*frame) for frame in frames)
        unpacker, found = framing.Unpacker(3000), []
        while stream:
            cut = rng.randrange(1, 2000)
            found += unpacker.feed(stream[:cut])
            stream = stream[cut:]
        assert found == frames


def test_what_is_too_long_is_refused_before_it_is_held() -> None:
    unpacker = framing.Unpacker(1000)
    with pytest.raises(framing.FramingError, match="1001 bytes"):
        list(unpacker.feed(struct.pack("<IB", 1001, 5)))


def test_ready_is_a_frame_of_nobody() -> None:
    assert list(framing.Unpacker(0).feed(framing.READY)) == [(b"", b"")]
    assert framing.pack(b"", b"") == framing.READY
