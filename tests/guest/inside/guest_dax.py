"""The engine `pmem` on a file system with DAX, here on memory that the kernel treats as persistent
(memmap=). There is no power cut, because an emulator has no processor cache to lose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pccheck_native import catalog
from tests.guest.inside.shell import mounted, sh
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of

DEVICE = "/dev/pmem0"
SIZE = 3_000_000
SMALL = ("--chunk", "1MiB", "--block-bytes", "64KiB", "--dram", "64MiB")
MAKE = {"ext4": "mkfs.ext4 -q -F -b 4096", "xfs": "mkfs.xfs -q -f -m reflink=0"}


@pytest.fixture(params=["ext4", "xfs"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    sh(f"{MAKE[request.param]} {DEVICE}")
    with mounted(DEVICE, Path("/mnt/pmem"), "dax=always") as place:
        yield place


def status_of(daemon: Daemon) -> dict[str, Any]:
    return dict(json.loads(sh(f"pccheckctl --socket {daemon.socket} status --json")))


def flags_of_mapping(pid: int, name: str) -> set[str]:
    """VmFlags of the mapping of that file; "sf" is MAP_SYNC."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    (found,) = re.findall(rf"{re.escape(name)}\n(?:\w.*:.*\n)*?VmFlags: (.*)", text)
    return set(found.split())


def test_the_volume_is_mapped_with_map_sync(place: Path) -> None:
    with Daemon(*SMALL, "--engine", "pmem", storage=place / "storage") as daemon:
        daemon.start()
        with Rank(daemon.socket) as rank:
            rank.register(SIZE)
            rank.save(1, payload_of(1, SIZE))
            (volume,) = daemon.storage.glob("*/*/*.pcc")
            flags = flags_of_mapping(daemon.pid, str(volume))
            assert "sf" in flags, flags
            document = status_of(daemon)
        assert document["daemon"]["engine"] == "pmem"
        assert [one["volume"]["engine"] for one in document["ranks"]] == ["pmem"]
        print(f"VmFlags of the volume's mapping: {' '.join(sorted(flags))}")


def test_it_survives_the_daemon(place: Path) -> None:
    """Every slot is written more than once, and the newest is there after each kill."""
    with Daemon(*SMALL, "--engine", "pmem", storage=place / "storage") as daemon:
        for step in range(1, 7):
            daemon.start()
            with Rank(daemon.socket) as rank:
                rank.register(SIZE)
                if step > 1:
                    opened, data = rank.restore()
                    assert (opened.step, data) == (step - 1, payload_of(step - 1, SIZE))
                rank.save(step, payload_of(step, SIZE))
                daemon.kill()
        found = catalog.scan(daemon.storage)
        assert {one.id.step for one in found.checkpoints} >= {5, 6} and not found.unreadable


def test_it_is_on_the_device_once_it_is_durable(place: Path) -> None:
    """No flush and no orderly end in between: the daemon is killed at once, its file system stays
    mounted, and what the device holds is searched."""
    marker = b"pccheck on persistent memory    "
    data = (marker * (SIZE // len(marker) + 1))[:SIZE]
    with Daemon(*SMALL, "--engine", "pmem", storage=place / "storage") as daemon:
        daemon.start()
        with Rank(daemon.socket) as rank:
            rank.register(SIZE)
            rank.save(1, data)
        daemon.kill()
        count = f"grep -aoF '{marker.decode()}' | wc -l"
        found = int(sh(f"dd if={DEVICE} bs=1M iflag=direct status=none | {count}"))
        assert found >= SIZE // len(marker) * 0.99  # a file in several pieces cuts some


def test_the_engines_c_tests(place: Path) -> None:
    """They work in /tmp; nothing may be executed in /run, where the project is."""
    sh("install tests/native/build/plain/test_io_engines /usr/local/bin")
    scratch = place / "tmp"
    scratch.mkdir()
    sh(f"mount --bind {scratch} /tmp")
    try:
        told = sh("test_io_engines 2>&1")
    finally:
        sh("umount /tmp")
    assert "not to be had" not in told, told
    print(told)
