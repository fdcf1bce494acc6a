"""The descriptor store as the daemon sees it: names, environment, what is of use."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck_native import _core
from pccheckd.jobs import inherited
from pccheckd.jobs.inherited import Descriptor, Left, StoredState
from pccheckd.tenancy.volumes import Key

KEY = Key(1000, "job.1", 3)


def test_a_label_is_short_and_names_nobody() -> None:
    label = KEY.label
    assert label == Key(1000, "job.1", 3).label and "job" not in label
    assert len({Key(1000, "job.1", rank).label for rank in range(100)}) == 100
    item = Descriptor(5, f"{label}-segment-00000000000000ff")
    assert item.parts == (label, "segment", 255)


@pytest.mark.parametrize(
    "name", ["", "stored", "pccheck-0-segment-1", "pccheck-0123456789abcdef-page-00000000000000ff"]
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert Descriptor(5, name).parts == ("", "", 0)


def test_what_others_have_left_is_taken() -> None:
    given = [("a", 5), ("", 6)]
    assert inherited.take(given) == [Descriptor(5, "a"), Descriptor(6, "")] and not given


def test_the_store_is_as_large_as_it_says() -> None:
    found = [Descriptor(3, "a"), Descriptor(4, "b")]
    assert inherited.store_of({}, found) == ("", 0)
    assert inherited.store_of({"NOTIFY_SOCKET": "/n"}, []) == ("", 0)
    assert inherited.store_of({"NOTIFY_SOCKET": "/n", "FDSTORE": "7"}, []) == ("/n", 7)
    assert inherited.store_of({"NOTIFY_SOCKET": "/n", "FDSTORE": "x"}, found) == ("/n", 2)


def test_the_newest_checkpoint_comes_first() -> None:
    def state(*copied: tuple[int, set[int]]) -> StoredState:
        says = _core.KeptState(b"", 0, "j", 0, 4096, 4096, 2, list(copied))
        return StoredState(Descriptor(3, ""), 1, says)

    segments = {number: Descriptor(number, "") for number in (1, 2, 3, 4, 5)}
    left = Left([state((7, {4, 9})), state((8, {2, 1}), (3, {5}))], segments)
    assert left.segments_by_need() == [1, 2, 4, 5]  # 9 did not come back, 3 holds nothing


def test_what_is_of_no_use_is_sorted_out() -> None:
    label = KEY.label
    noise = os.memfd_create("noise", os.MFD_ALLOW_SEALING)
    os.write(noise, b"PCCKEPT1" + bytes(100_000))
    fcntl.fcntl(noise, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK |
                fcntl.F_SEAL_GROW)  # fmt: skip
    found = [
        Descriptor(noise, f"{label}-state-0000000000000001"),
        Descriptor(noise, f"{label}-segment-0000000000000002"),
        Descriptor(noise, f"{label}-segment-0000000000000002"),
        Descriptor(noise, "else"),
    ]
    left, useless = inherited.sort(found)
    assert not left and len(useless) == 4
    os.close(noise)


@pytest.fixture
def ears(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        yield bound


def test_a_pool_speaks_to_the_manager(ears: socket.socket) -> None:
    """Stored before use, removed at the end, and refused when there is no room."""
    heard = []

    def answer() -> None:
        while True:
            text, fds, _, _ = socket.recv_fds(ears, 4096, 4)
            heard.append((text.decode(), len(fds)))
            for fd in fds:
                os.close(fd)
            if text == b"END":
                return

    thread = threading.Thread(target=answer)
    thread.start()
    pool = _core.Pool(1 << 20, store=ears.getsockname(), store_limit=1)
    events = _core.Events()
    label = KEY.label
    channel = _core.Tenant(pool, events, id=1, chunk_bytes=1 << 16, block_bytes=4096,
                            chunk_capacity=16, lanes=1, writers=1, label=label)  # fmt: skip
    assert channel.grow(1 << 16) == 1 << 16
    assert pool.stored() == (1, 1, 0)
    assert channel.grow(1 << 17) == 1 << 17  # memory is memory, stored or not
    assert pool.stored() == (1, 1, 1)
    channel.close()
    assert pool.stored() == (0, 1, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as voice:
        voice.sendto(b"END", ears.getsockname())
    thread.join()
    name = heard[0][0].split("\n")[1].removeprefix("FDNAME=")
    assert Descriptor(0, name).parts[:2] == (label, "segment") and ":" not in name
    assert heard == [
        (f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", 1), ("BARRIER=1", 1),
        (f"FDSTOREREMOVE=1\nFDNAME={name}", 0), ("END", 0),
    ]  # fmt: skip
    events.close()
    pool.close()


def test_without_a_store_nothing_is_said() -> None:
    pool = _core.Pool(1 << 20)
    assert pool.stored() == (0, 0, 0)
    pool.unstore("anything")
    pool.close()
    with pytest.raises(OSError):
        _core.Pool(1 << 20, store="relative", store_limit=3)
