"""Start records and promises, on real volumes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from pccheck_native import Volume, VolumeInfo, layout
from pccheck_native.nodes.facts import FullName, SaveName
from pccheck_native.nodes.lists import ListMember, Promise, StartList
from pccheck_native.nodes.offers import StartAnswer, StartRecord, Word
from pccheck_wire.errors import DamagedError, RefusedError
from pccheckd.nodes.records import RECORD_BYTES_MAX, Records
from tests.support.coreloop import Loop, make_volume

ROOT = Path(__file__).parents[4]
UID, JOB = 7, "job"
STARTS = [bytes([number]) * 16 for number in range(1, 9)]
A, B, C = STARTS[:3]


def record_of(number: int, start: bytes, *, launch: str = "run-1") -> StartRecord:
    members = [
        ListMember(bytes([65 + rank]) * 16, f"host-{rank}", (rank,), (bytes([rank]) * 16,))
        for rank in range(2)
    ]
    return StartRecord(StartList(start, number, launch, 2, False, 1, tuple(members)))


def born(record: StartRecord, *seen: bytes, base: int = 0) -> StartRecord:
    """With an answer."""
    restored = FullName(seen[0], SaveName(0, 1, 20, 0)) if seen else None
    return record.with_answer(
        StartAnswer(record.start, base, restored, seen, Word(step=20, without=("host-3",)))
    )


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path, UID, JOB)


def volume_at(storage: Path, rank: int) -> Path:
    path = layout.volume_path(storage, UID, JOB, rank)
    layout.make_directories(path)
    return make_volume(path, rank=rank)


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[list[Volume]]:
    """Of ranks 0 and 1, open for writing."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(Volume(volume_at(tmp_path, rank), writable=True)))
            for rank in (0, 1)
        ]


def on_the_media(storage: Path) -> list[VolumeInfo]:
    found = []
    for file in layout.list_volumes(storage):
        with closing(Volume(file.path, writable=False)) as volume:
            found.append(volume.info())
    return found


def promises(storage: Path) -> list[tuple[int, bytes]]:
    """By rank, as the volumes have them."""
    return [info.promise[:2] for info in on_the_media(storage)]


def file_of(storage: Path, start: bytes) -> Path:
    return storage / str(UID) / JOB / f"start-{start.hex()}.json"


def test_a_record_comes_back_as_it_was_given(tmp_path: Path, records: Records) -> None:
    record = born(record_of(3, A), B, C)
    records.promise(record, [])
    assert records.read(A) == record
    assert records.all() == [record]
    path = file_of(tmp_path, A)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_a_promise_is_on_every_volume_and_in_the_record(
    tmp_path: Path, records: Records, volumes: list[Volume]
) -> None:
    assert records.promised(one.info() for one in volumes) == Promise()
    records.promise(record_of(3, A), volumes)
    infos = on_the_media(tmp_path)
    assert promises(tmp_path) == [(3, A)] * 2
    assert len({info.promise for info in infos}) == 1
    assert records.promised(infos) == records.promised([]) == (3, A)
    records.promise(record_of(3, A), volumes)  # nothing is written again
    assert on_the_media(tmp_path) == infos
    records.promise(record_of(5, B), volumes)
    assert promises(tmp_path) == [(5, B)] * 2
    assert records.all() == [record_of(5, B), record_of(3, A)]


def test_a_job_without_a_volume_has_its_promise_in_the_record(
    tmp_path: Path, records: Records
) -> None:
    records.promise(record_of(3, A), [])
    records.promise(record_of(4, B), [])
    assert records.promised([]) == (4, B)
    with closing(Volume(volume_at(tmp_path, 0), writable=True)) as late:
        assert records.promised([late.info()]) == (4, B)
        records.promise(records.read(B), [late])
    assert promises(tmp_path) == [(4, B)]


def test_the_highest_promise_counts_wherever_it_is(
    tmp_path: Path, records: Records, volumes: list[Volume]
) -> None:
    records.promise(record_of(3, C), [])
    volumes[1].promise(6, B, bytes(16))  # its record is lost
    assert records.promised(one.info() for one in volumes) == (6, B)
    for number, start in (5, C), (6, A):
        with pytest.raises(RefusedError, match=f"{start.hex()} has number {number}, .* number 6"):
            records.promise(record_of(number, start), volumes)
        assert not file_of(tmp_path, start).exists() or start == C
    assert promises(tmp_path) == [(0, bytes(16)), (6, B)]
    assert records.read(C) == record_of(3, C)


def test_of_equal_numbers_the_id_decides(
    tmp_path: Path, records: Records, volumes: list[Volume]
) -> None:
    """Two lists that were made at the same time (may_promise in pccheck_native/nodes/lists.py)."""
    records.promise(record_of(3, A), volumes)
    records.promise(record_of(3, B), volumes)
    assert promises(tmp_path) == [(3, B)] * 2
    with pytest.raises(RefusedError):
        records.promise(record_of(3, A), volumes)


def test_what_cannot_be_written_hinders_no_other_volume(
    tmp_path: Path, records: Records, volumes: list[Volume]
) -> None:
    with closing(Volume(layout.volume_path(tmp_path, UID, JOB, 0), writable=False)) as reader:
        records.promise(record_of(3, A), [reader, volumes[1]])
    assert promises(tmp_path) == [(0, bytes(16)), (3, A)]
    volumes[0].close()
    with pytest.raises(ValueError, match="closed"):
        records.promise(record_of(4, B), volumes)
    assert promises(tmp_path) == [(0, bytes(16)), (4, B)]


def test_the_list_of_a_start_never_changes(
    tmp_path: Path, records: Records, volumes: list[Volume]
) -> None:
    records.promise(record_of(3, A), volumes)
    more = born(born(record_of(3, A), B), base=1)
    records.update(more)
    assert records.read(A) == more
    assert records.promised(on_the_media(tmp_path)) == (3, A)
    for call in records.update, lambda record: records.promise(record, volumes):
        with pytest.raises(ValueError, match="another list"):
            call(record_of(4, A))
    assert records.read(A) == more
    with pytest.raises(FileNotFoundError):
        records.update(record_of(4, B))


def test_a_list_that_was_not_promised_is_named(
    tmp_path: Path, records: Records, volumes: list[Volume]
) -> None:
    records.promise(record_of(3, A), volumes)
    file_of(tmp_path, A).unlink()
    records.promise(record_of(3, A, launch="run-2"), [])
    with pytest.raises(DamagedError, match=f"{file_of(tmp_path, A)}.*another list"):
        records.promised(one.info() for one in volumes)


def test_a_changed_byte_is_named(tmp_path: Path, records: Records) -> None:
    records.promise(born(record_of(3, A), B), [])
    path = file_of(tmp_path, A)
    content = path.read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        for call in (records.all, lambda: records.read(A), lambda: records.promised([])):
            with pytest.raises(DamagedError, match=str(path)):
                call()
        path.write_bytes(content[:at])
        with pytest.raises(DamagedError, match=str(path)):
            records.read(A)


@pytest.mark.parametrize("content", [b"", b"\n\n\n", b"{}", b"[" * 100_000])
def test_what_is_no_record_is_named(tmp_path: Path, records: Records, content: bytes) -> None:
    path = file_of(tmp_path, A)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=str(path)):
        records.all()
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedError, match=f"{path}.*no regular file"):
        records.all()


def test_a_huge_file_is_not_read(tmp_path: Path, records: Records) -> None:
    path = file_of(tmp_path, A)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(RECORD_BYTES_MAX + 1)
    with pytest.raises(DamagedError, match=f"{path}.*larger"):
        records.all()


def test_a_record_of_another_start_is_named(tmp_path: Path, records: Records) -> None:
    records.promise(record_of(3, A), [])
    file_of(tmp_path, A).rename(file_of(tmp_path, B))
    with pytest.raises(DamagedError, match="another start"):
        records.read(B)


def test_another_version_is_refused_by_name(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("pccheckd.nodes.records.SCHEMA", 2)
        records.promise(record_of(3, A), [])
    with pytest.raises(RefusedError, match=f"{file_of(tmp_path, A)}.*schema 2"):
        records.all()


def test_what_is_needed_no_more_is_removed(tmp_path: Path, records: Records) -> None:
    """The first and the third start have a checkpoint here; the others have saved nothing."""
    path = layout.volume_path(tmp_path, UID, JOB, 0)
    layout.make_directories(path)
    last = STARTS[-1]
    with Loop(path) as loop:
        for number, start in enumerate(STARTS, 1):
            records.promise(record_of(number, start), [loop.volume])
            if start in (A, C):
                loop.volume.begin_incarnation(number, 1, start)
                loop.incarnation = number
                loop.save(number, [bytearray(b"x" * 100)], step=number)
    assert records.forget() == []  # the last start may end before it is born
    records.update(born(record_of(len(STARTS), last), *reversed(STARTS[:-1])))
    broken = layout.volume_path(tmp_path, UID, JOB, 1)
    broken.write_bytes(bytes(1 << 16))
    assert records.forget() == []
    broken.unlink()
    gone = [start for start in STARTS[:-1] if start not in (A, C)]
    assert records.forget() == [file_of(tmp_path, start) for start in gone]
    assert [record.start for record in records.all()] == [last, C, A]
    assert records.forget() == []


def test_what_only_the_record_promises_stays(tmp_path: Path, records: Records) -> None:
    with closing(Volume(volume_at(tmp_path, 0), writable=True)) as volume:
        records.promise(record_of(1, A), [volume])
    records.promise(record_of(2, B), [])
    records.promise(born(record_of(3, C), B, A), [])
    assert records.forget() == [file_of(tmp_path, B)]  # the volume names A
    assert records.promised(on_the_media(tmp_path)) == (3, C)


WRITER = """
import sys
from pathlib import Path
from tests.unit.pccheckd.nodes.test_records import A, STARTS, born, record_of
from pccheckd.nodes.records import Records
records, record = Records(Path(sys.argv[1]), 7, "job"), record_of(3, A)
records.promise(record, [])
for base in range(1, 100_000):
    records.update(born(record, *STARTS * 30, base=base))
    print(base, flush=True)
"""


def test_a_kill_leaves_a_whole_record(tmp_path: Path, records: Records) -> None:
    chance = random.Random(1)
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
            assert writer.stdout is not None
            told = [int(writer.stdout.readline()) for _ in range(chance.randint(1, 40))]
            writer.send_signal(signal.SIGKILL)
        (found,) = records.all()
        ((base, _),) = found.restored
        assert base >= told[-1]
