"""What the compiled module refuses before any GPU is asked, and what it says without one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck_native import DEVICES, Gpus, NativeError, cuda_driver, cuda_missing
from tests.support.coreloop import CHUNK_BYTES, Loop, deadline, pack


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    with Loop(tmp_path / "v.pcc") as made:
        yield made


def pack_device(*ranges: tuple[int, int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<QQQII", *one) for one in ranges)


@pytest.mark.parametrize(
    "packed",
    [
        pack([(4096, 0, 64)]),
        pack_device((0, 0, 64, 0, 0)),
        pack_device((4096, 64, 64, 0, 0), (8192, 0, 64, 0, 0)),
        pack_device((4096, 0, 65, 0, 0), (8192, 64, 64, 0, 0)),
        pack_device((2**64 - 1, 0, 2, 0, 0)),
        pack_device((4096, 2**64 - 1, 2, 0, 0)),
        pack_device((4096, 0, 64, DEVICES, 0)),
        pack_device((4096, 0, 64, 0, 1)),
        memoryview(bytes(40))[4:36],
    ],
)
def test_device_ranges_are_checked(loop: Loop, packed: bytes) -> None:
    loop.client.request(1)
    with pytest.raises(ValueError, match="ranges"):
        loop.client.submit(1, b"", b"", b"tree", 64, packed)
    with pytest.raises(ValueError, match="ranges"):
        loop.client.load_start(1, b"", packed)
    with pytest.raises(ValueError, match="ranges"):
        loop.client.expose(packed, CHUNK_BYTES)


@pytest.mark.parametrize(
    "packed", [b"1", pack([(0, 0, 1)]), pack([(4096, 64, 5), (4096, 0, 5)]), bytes(32)]
)
def test_copies_into_staging_are_checked(loop: Loop, packed: bytes) -> None:
    with pytest.raises(ValueError, match="ranges"):
        loop.client.stage(0, 0, packed)


def test_devices_are_checked(loop: Loop) -> None:
    for call in (
        lambda: loop.client.device_open(DEVICES),
        lambda: loop.client.staging(DEVICES, 1),
        lambda: loop.client.stage(DEVICES, 0, b""),
        lambda: loop.client.mark(1, DEVICES, 0, pull=True),
        lambda: loop.client.hold(1, DEVICES, 0, 0),
        lambda: loop.client.capturing(DEVICES, 0),
    ):
        with pytest.raises(ValueError, match=f"GPU {DEVICES}"):
            call()
    with pytest.raises(OverflowError):
        loop.client.device_open(-1)
    with pytest.raises(OverflowError):
        loop.client.device_open(2**32)
    with pytest.raises(TypeError, match="pull"):
        loop.client.mark(1, 0, 0)  # type: ignore[call-arg]


def test_a_closed_link_has_no_gpus(loop: Loop) -> None:
    loop.client.close()
    for call in (
        lambda: loop.client.device_open(0),
        lambda: loop.client.staging_trim(),
        lambda: loop.client.stage(0, 0, b""),
        lambda: loop.client.mark(1, 0, 0, pull=True),
        lambda: loop.client.hold(1, 0, 0, deadline()),
        lambda: loop.client.expose(b"", 0),
        lambda: loop.client.exposure_holds(),
    ):
        with pytest.raises(ValueError, match="this Client is closed"):
            call()


def test_a_channel_without_gpus_exposes_nothing(loop: Loop) -> None:
    assert loop.tenant.expose(1, b"nonsense")
    with pytest.raises(ValueError, match="map 0"):
        loop.tenant.expose(0, b"nonsense")
    with pytest.raises(OverflowError):
        loop.tenant.attach(loop.far.fileno(), 2, 2**31)
    usage = loop.tenant.usage()
    assert (usage.pinned_bytes, usage.exposed_bytes, usage.mappings) == (0, 0, 0)


def test_either_there_is_a_driver_or_why_not() -> None:
    missing = cuda_missing()
    assert missing == cuda_missing()
    if not missing:
        version, gpus = cuda_driver()
        assert version >= 11000 and gpus > 0
        return
    with pytest.raises(NativeError) as caught:
        cuda_driver()
    assert caught.value.code_name == "NO_DRIVER"


def test_gpus_need_no_driver_before_one_is_used() -> None:
    gpus = Gpus()
    assert gpus.info() == []
    gpus.close()
