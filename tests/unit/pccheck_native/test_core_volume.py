"""The binding's Volume: made, opened, read, flagged; what it refuses and how it says so."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheck_native import (
    FORMAT_VERSION,
    SLOT_DAMAGED,
    SLOT_GLOBAL,
    SLOT_HEALTHY,
    SLOT_IMAGE,
    SLOT_NOT_FINITE,
    SLOT_OFFERED,
    SLOT_PROTECTED,
    NativeError,
    Volume,
    create_volume,
    volume_bytes_for,
)
from tests.support.coreloop import STRIDE_BYTES, Loop, address, make_volume, pack, plan

VERSION_OFFSET = 8
FLAGS_OFFSET = 504 + 4
CRC_OFFSET = 4092


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def record_offsets(path: Path) -> list[int]:
    size = path.stat().st_size
    return [0, STRIDE_BYTES, size - 2 * STRIDE_BYTES, size - STRIDE_BYTES]


def scribble(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_at(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def refused(code_name: str, call: Callable[[], object]) -> NativeError:
    with pytest.raises(NativeError) as caught:
        call()
    assert caught.value.code_name == code_name
    assert caught.value.code < 0
    return caught.value


def test_a_new_volume_says_what_it_was_made_from(tmp_path: Path) -> None:
    path = tmp_path / "v.pcc"
    create_volume(
        path, uid=7, job="gpt", rank=3, world_size=4, slots=5, keep=2, payload_capacity=300_000,
        next_sequence=41, incarnation=6, block_bytes=4096, record_stride=4096,
    )  # fmt: skip
    assert path.stat().st_size == volume_bytes_for(300_000, 5, 4096, 4096)
    assert [p.name for p in tmp_path.iterdir()] == ["v.pcc"]
    volume = Volume(str(path), writable=False)
    info = volume.info()
    assert (info.uid, info.job, info.rank, info.world_size) == (7, "gpt", 3, 4)
    assert (info.slots, info.keep, info.block_bytes) == (5, 2, 4096)
    assert info.payload_capacity >= 300_000
    assert info.payload_capacity < info.slot_bytes
    assert (info.next_sequence, info.incarnation) == (41, 6)
    assert (info.done, info.stopped, info.free_slots) == (False, False, 5)
    assert info.volume_bytes == path.stat().st_size
    assert len(info.uuid) == 16
    table = volume.table()
    assert [entry.slot for entry in table] == [0, 1, 2, 3, 4]
    assert {entry.sequence for entry in table} == {0}
    volume.close()


def test_results_are_named_tuples(tmp_path: Path) -> None:
    volume = Volume(make_volume(tmp_path / "v"), writable=False)
    entry = volume.table()[1]._replace(step=-5)
    assert entry._asdict()["step"] == -5
    assert type(entry).__module__ == "pccheck_native._core"
    volume.close()


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "v"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"'.*v'"):
        make_volume(path)
    assert path.read_bytes() == b"precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [{"slots": 0}, {"slots": 33}, {"block_bytes": 100}, {"payload_capacity": 2**63}],
)
def test_numbers_that_cannot_be(tmp_path: Path, change: dict[str, int]) -> None:
    with pytest.raises(OSError, match="Invalid argument") as caught:
        make_volume(tmp_path / "v", **change)
    assert caught.value.errno == errno.EINVAL
    assert not list(tmp_path.iterdir())


def test_arguments_are_checked_before_anything_is_done(tmp_path: Path) -> None:
    path = make_volume(tmp_path / "v")
    with pytest.raises(TypeError, match="writable"):
        Volume(path)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="job"):
        create_volume(path, uid=1)  # type: ignore[call-arg]
    with pytest.raises(OverflowError):
        make_volume(tmp_path / "w", uid=2**32)
    with pytest.raises(OverflowError):
        make_volume(tmp_path / "w", uid=-1)
    with pytest.raises(ValueError, match="null byte"):
        Volume("a\0b", writable=False)
    assert not (tmp_path / "w").exists()


def test_one_writer_and_readers_beside_it(tmp_path: Path) -> None:
    path = make_volume(tmp_path / "v")
    writer = Volume(path, writable=True)
    refused("LOCKED", lambda: Volume(path, writable=True))
    reader = Volume(path, writable=False)
    assert reader.info().uuid == writer.info().uuid
    with pytest.raises((OSError, NativeError)):
        reader.begin_incarnation(2, 1)
    reader.close()
    writer.close()
    Volume(path, writable=True).close()


def test_close_is_final_and_may_be_repeated(tmp_path: Path) -> None:
    volume = Volume(make_volume(tmp_path / "v"), writable=True)
    volume.close()
    volume.close()
    for call in (volume.info, volume.table, lambda: volume.verify(1), lambda: volume.finish(1)):
        with pytest.raises(ValueError, match="this Volume is closed"):
            call()


def test_a_dropped_volume_gives_its_lock_back(tmp_path: Path) -> None:
    path = make_volume(tmp_path / "v")
    volume = Volume(path, writable=True)
    del volume
    Volume(path, writable=True).close()


def _use_in_child(volume: Volume, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        volume.info()
    except ValueError as error:
        answers.put(str(error))
    volume.close()


def test_a_forked_child_may_not_use_it(tmp_path: Path) -> None:
    volume = Volume(make_volume(tmp_path / "v"), writable=True)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_use_in_child, args=(volume, answers))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert "forked child" in answers.get()
    volume.begin_incarnation(3, 1)
    volume.close()


def test_incarnation_flags_and_finish_are_on_the_media(tmp_path: Path) -> None:
    path = tmp_path / "v"
    with Loop(path) as loop:
        loop.volume.begin_incarnation(9, 1)
        first, second = (loop.save(i, [bytearray(b"x" * 5000)], step=i) for i in (1, 2))
        loop.volume.flag(first, set=SLOT_PROTECTED | SLOT_DAMAGED, now=True)
        loop.volume.flag(first, clear=SLOT_DAMAGED)
        loop.volume.flag(second, set=SLOT_DAMAGED, now=True)
        with pytest.raises(FileNotFoundError):
            loop.volume.flag(12345, set=SLOT_PROTECTED)
        with pytest.raises(OSError) as caught:
            loop.volume.flag(first, set=SLOT_IMAGE)  # a checkpoint's kind never changes
        assert caught.value.errno == errno.EINVAL
        loop.volume.flag(second, clear=SLOT_DAMAGED, now=True)
    volume = Volume(path, writable=True)
    assert volume.info().incarnation == 9
    assert {e.sequence: e.flags for e in volume.table() if e.sequence} == {
        first: SLOT_PROTECTED, second: 0,
    }  # fmt: skip
    volume.flag(first, clear=SLOT_PROTECTED)
    volume.finish(1)
    volume.close()
    volume = Volume(path, writable=False)
    assert volume.info().done
    assert [e.sequence for e in volume.table() if e.sequence] == [second]
    volume.close()


# -- damage ------------------------------------------------------------------------------------


def test_errors_carry_the_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Volume(tmp_path / "missing", writable=False)
    assert caught.value.filename == str(tmp_path / "missing")
    path = tmp_path / "zeros"
    path.write_bytes(bytes(1 << 20))
    error = refused("NOT_A_VOLUME", lambda: Volume(path, writable=False))
    assert str(path) in str(error)


def test_one_bad_replica_is_read_past_and_repaired(tmp_path: Path) -> None:
    path = make_volume(tmp_path / "v")
    head = next(o for o in record_offsets(path) if read_at(path, o, 8) == b"PCCPREC1")
    scribble(path, head + 100, b"rot")
    reader = Volume(path, writable=False)
    info = reader.info()
    assert (info.valid_replicas, info.repaired_replicas, info.damaged_records) == (1, 0, 1)
    reader.close()
    writer = Volume(path, writable=True)
    assert writer.info().record_number > info.record_number
    writer.close()
    reader = Volume(path, writable=False)
    assert reader.info().valid_replicas == 2
    reader.close()


def test_all_records_bad_is_damage_not_emptiness(tmp_path: Path) -> None:
    path = make_volume(tmp_path / "v")
    for offset in record_offsets(path):
        scribble(path, offset + 200, b"rot")
    for writable in (False, True):
        with pytest.raises(NativeError) as caught:
            Volume(path, writable=writable)
        assert caught.value.code_name in ("DAMAGED", "NOT_A_VOLUME")


def with_number(path: Path, offset: int, number: int) -> None:
    """Puts 4 bytes into each record, and makes its checksum fit."""
    for at in record_offsets(path):
        record = bytearray(read_at(path, at, 4096))
        if record[:8] == b"PCCPREC1":
            struct.pack_into("<I", record, offset, number)
            struct.pack_into("<I", record, CRC_OFFSET, crc32c(bytes(record[:CRC_OFFSET])))
            scribble(path, at, bytes(record))


@pytest.mark.parametrize(
    ("offset", "number", "name"),
    [
        (VERSION_OFFSET, FORMAT_VERSION + 1, "NEWER_FORMAT"),
        (VERSION_OFFSET, 2, "OLDER_FORMAT"),
        (VERSION_OFFSET, 1, "OLDER_FORMAT"),
        (FLAGS_OFFSET, 1 << 15, "UNKNOWN_FLAG"),
    ],
)
def test_another_format_is_refused_by_name(
    offset: int, number: int, name: str, tmp_path: Path
) -> None:
    path = make_volume(tmp_path / "v")
    with_number(path, offset, number)
    before = path.read_bytes()
    for writable in (False, True):
        refused(name, lambda w=writable: Volume(path, writable=w))  # type: ignore[misc]
    assert path.read_bytes() == before


def test_start_marks_digest_and_promise_are_on_the_media(tmp_path: Path) -> None:
    path, start, other = tmp_path / "v", bytes(range(16)), b"\1" * 16
    with Loop(path) as loop:
        before = loop.save(1, [bytearray(b"x" * 5000)], step=1)
        loop.volume.begin_incarnation(1, 1, start)
        after = loop.save(2, [bytearray(b"y" * 5000)], step=2)
        loop.volume.promise(7, start, other)
        loop.volume.flag(after, set=SLOT_HEALTHY | SLOT_NOT_FINITE | SLOT_OFFERED)
        loop.volume.flag(after, clear=SLOT_NOT_FINITE, now=True)
        for number, id_ in (7, start), (7, bytes(16)), (6, other), (0, other):
            with pytest.raises(OSError, match="Invalid"):
                loop.volume.promise(number, id_, other)
        loop.volume.promise(7, other, other)
    volume = Volume(path, writable=False)
    table = {entry.sequence: entry for entry in volume.table() if entry.sequence}
    assert {key: entry.start for key, entry in table.items()} == {before: bytes(16), after: start}
    assert table[after].flags == SLOT_HEALTHY | SLOT_OFFERED
    assert len({entry.digest for entry in table.values()}) == 2
    assert volume.info().start == start
    assert volume.info().promise == (7, other, other)
    with pytest.raises(ValueError, match="16 bytes"):
        volume.begin_incarnation(2, 1, b"short")
    volume.close()


def test_marks_reach_the_media_with_the_next_record_or_at_once(tmp_path: Path) -> None:
    """Nothing is written only to say that a checkpoint is global; an offer is on the media before
    another node reads of it."""
    path = tmp_path / "v"
    with Loop(path) as loop:
        first, second = (loop.save(n, [bytearray(b"x" * 5000)], step=n) for n in (1, 2))
        before = loop.volume.info().record_number
        loop.volume.flag(first, set=SLOT_GLOBAL)
        assert loop.volume.info().record_number == before
        assert marks_of(path) == {first: 0, second: 0}
        loop.volume.flag(second, set=SLOT_OFFERED, now=True)
        assert loop.volume.info().record_number == before + 1
        assert marks_of(path) == {first: SLOT_GLOBAL, second: SLOT_OFFERED}
        loop.volume.flag(second, set=SLOT_GLOBAL)
        third = loop.save(3, [bytearray(b"y" * 5000)], step=3)
        assert marks_of(path) == {second: SLOT_GLOBAL | SLOT_OFFERED, third: 0}


def marks_of(path: Path) -> dict[int, int]:
    """On the media, by sequence."""
    with contextlib.closing(Volume(path, writable=False)) as volume:
        return {entry.sequence: entry.flags for entry in volume.table() if entry.sequence}


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = make_volume(tmp_path / "v")
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    refused("TRUNCATED", lambda: Volume(path, writable=True))


def test_damaged_data_is_never_given_out(tmp_path: Path) -> None:
    path = tmp_path / "v"
    data = bytearray(os.urandom(200_000))
    with Loop(path) as loop:
        good = loop.save(1, [data], b"the tree", step=1)
        bad = loop.save(2, [data], b"the tree", step=2)
    volume = Volume(path, writable=False)
    entry = next(e for e in volume.table() if e.sequence == bad)
    volume.verify(bad)
    volume.close()
    start = 2 * STRIDE_BYTES + entry.slot * Volume(path, writable=False).info().slot_bytes
    scribble(path, start + 100_000, b"\xff\x00\xff\x00")
    volume = Volume(path, writable=False)
    volume.verify(good)
    refused("DAMAGED", lambda: volume.verify(bad))
    into = bytearray(len(data))
    refused("DAMAGED", lambda: volume.read_into(bad, pack([(address(into), 0, len(into))])))
    assert volume.read(bad, entry.tree_offset, entry.tree_bytes) == b"the tree"
    volume.close()


# -- reading -----------------------------------------------------------------------------------


def test_read_and_read_into_take_any_part(tmp_path: Path) -> None:
    extents = [bytearray(os.urandom(size)) for size in (1, 70_000, 4096, 33, 150_001)]
    layout = plan([len(extent) for extent in extents], 4)
    with Loop(tmp_path / "v") as loop:
        sequence = loop.save(1, extents)
        volume = loop.volume
        for extent, offset in zip(extents, layout.offsets, strict=True):
            assert volume.read(sequence, offset, len(extent)) == extent
        assert volume.read(sequence, layout.offsets[1] + 7, 12_345) == extents[1][7:12_352]
        assert volume.read(sequence, layout.payload_bytes, 0) == b""
        for threads in (0, 1, 3):
            into = [bytearray(len(extent)) for extent in extents]
            ranges = pack(
                [(address(m), o, len(m)) for m, o in zip(into, layout.offsets, strict=True)]
            )
            volume.read_into(sequence, memoryview(ranges), threads=threads, chunk_bytes=8192)
            assert into == extents


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    memory = bytearray(64)
    with Loop(tmp_path / "v") as loop:
        sequence = loop.save(1, [bytearray(5000)])
        volume = loop.volume
        with pytest.raises(FileNotFoundError):
            volume.verify(sequence + 1)
        with pytest.raises(ValueError, match="outside of the payload"):
            volume.read(sequence, 0, 2**60)
        with pytest.raises(ValueError, match="outside of the payload"):
            volume.read_into(sequence, pack([(address(memory), 2**40, 64)]))
        with pytest.raises(ValueError, match="multiple of 24"):
            volume.read_into(sequence, b"x" * 23)
        with pytest.raises(ValueError, match="ascend"):
            volume.read_into(sequence, pack([(address(memory), 64, 8), (address(memory), 71, 8)]))
        with pytest.raises(ValueError, match="overflow"):
            volume.read_into(sequence, pack([(address(memory), 2**64 - 1, 8)]))
        with pytest.raises(ValueError, match="address 0"):
            volume.read_into(sequence, pack([(0, 0, 8)]))
        with pytest.raises(ValueError, match="threads"):
            volume.read_into(sequence, b"", threads=1000)
        with pytest.raises(TypeError):
            volume.read_into(sequence, "text")  # type: ignore[arg-type]
        volume.read_into(sequence, b"")


def test_close_during_a_call_lets_it_finish(tmp_path: Path) -> None:
    path = tmp_path / "v"
    with Loop(path) as loop:
        sequence = loop.save(1, [bytearray(os.urandom(900_000))])
    for _ in range(20):
        volume = Volume(path, writable=True)
        started = threading.Event()
        ended: list[str] = []

        def verify(
            volume: Volume = volume, started: threading.Event = started, ended: list[str] = ended
        ) -> None:
            started.set()
            try:
                volume.verify(sequence)
                ended.append("verified")
            except ValueError as error:
                ended.append(str(error))

        reader = threading.Thread(target=verify)
        reader.start()
        started.wait()
        volume.close()
        reader.join()
        assert ended in (["verified"], ["this Volume is closed"])
        with pytest.raises(ValueError, match="closed"):
            volume.info()
