"""Names and places in a storage directory."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from pccheck_native import JOB_BYTES_MAX, layout
from pccheck_wire import messages


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_paths_and_their_inverse(tmp_path: Path) -> None:
    path = layout.volume_path(tmp_path, 1000, "gpt-2.run_7", 3, 12)
    assert path == tmp_path / "1000" / "gpt-2.run_7" / "rank-3.12.pcc"
    found = layout.parse_volume_path(tmp_path, path)
    assert found == layout.VolumeFile(1000, "gpt-2.run_7", 3, 12, path)
    assert layout.lock_path(tmp_path) == tmp_path / ".pccheckd.lock"


@pytest.mark.parametrize("job", ["a", "A-b.c_d", "0", "_", "x" * 128, "a..b"])
def test_jobs_that_can_be_directories(job: str) -> None:
    assert layout.check_job(job) == job


@pytest.mark.parametrize(
    "job",
    ["", ".", "..", ".hidden", "-rf", "a/b", "../x", "/etc", "a\0b", "a\n", "a b", "ü", "x" * 129],
)
def test_jobs_that_cannot(job: str) -> None:
    with pytest.raises(ValueError, match="job name"):
        layout.volume_path(Path("/nowhere"), 0, job, 0)


def test_the_wire_and_the_core_agree_on_job_names() -> None:
    longest = "a" * JOB_BYTES_MAX
    wire = re.compile(messages.JOB_PATTERN)
    for job in ("a", "", "-a", ".a", longest, longest + "a", "a/b", "a\n", "run.1_x-y"):
        refused = False
        try:
            layout.check_job(job)
        except ValueError:
            refused = True
        assert refused == (wire.fullmatch(job) is None), job
    assert messages.RANKS_MAX == layout.RANK_MAX + 1


@pytest.mark.parametrize(
    ("uid", "rank", "generation"),
    [(-1, 0, 0), (2**32 - 1, 0, 0), (0, -1, 0), (0, 65536, 0), (0, 0, -1), (0, 0, 10**9)],
)
def test_numbers_out_of_range(uid: int, rank: int, generation: int) -> None:
    with pytest.raises(ValueError, match="is not within"):
        layout.volume_path(Path("/nowhere"), uid, "job", rank, generation)


@pytest.mark.parametrize(
    "name",
    [
        "1/job/rank-0.0.pcc.tmp",
        "1/job/rank-00.0.pcc",
        "1/job/rank-0.00.pcc",
        "1/job/rank-0.pcc",
        "1/job/rank--1.0.pcc",
        "1/job/rank-65536.0.pcc",
        "1/job/rank-\u0661.0.pcc",
        "01/job/rank-0.0.pcc",
        "4294967295/job/rank-0.0.pcc",
        "1/.job/rank-0.0.pcc",
        "1/../rank-0.0.pcc",
        "1/job/deeper/rank-0.0.pcc",
        "job/rank-0.0.pcc",
    ],
)
def test_names_that_are_no_volumes(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the path of a volume"):
        layout.parse_volume_path(tmp_path, tmp_path / name)


def test_a_path_elsewhere_is_no_volume(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the path of a volume"):
        layout.parse_volume_path(tmp_path / "storage", tmp_path / "1/job/rank-0.0.pcc")


def test_listing_is_by_number_and_selects(tmp_path: Path) -> None:
    keys = [(1, "a", 2, 0), (1, "a", 10, 0), (1, "a", 2, 11), (1, "a", 2, 9), (1, "b", 0, 0)]
    keys.append((20, "a", 2, 0))
    for key in keys:
        put(layout.volume_path(tmp_path, *key))
    put(tmp_path / "1/a/notes.txt")
    put(tmp_path / "lost+found/a/rank-0.0.pcc")
    put(layout.lock_path(tmp_path))

    def listed(**which: object) -> list[tuple[int, str, int, int]]:
        files = layout.list_volumes(tmp_path, **which)  # type: ignore[arg-type]
        return [(f.uid, f.job, f.rank, f.generation) for f in files]

    assert listed() == sorted(keys)
    assert listed(uid=1, job="a", rank=2) == [(1, "a", 2, g) for g in (0, 9, 11)]
    assert listed(job="b") == [(1, "b", 0, 0)]
    assert listed(uid=3) == []
    assert layout.next_generation(tmp_path, 1, "a", 2) == 12
    assert layout.next_generation(tmp_path, 1, "a", 3) == 0


def test_links_are_not_followed(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    outside = put(tmp_path / "elsewhere" / "rank-0.0.pcc")
    (storage / "1" / "real").mkdir(parents=True)
    (storage / "1" / "linked").symlink_to(outside.parent)
    (storage / "2").symlink_to(tmp_path)
    (storage / "1" / "real" / "rank-0.0.pcc").symlink_to(outside)
    assert layout.list_volumes(storage) == []
    (storage / "1" / "real" / "rank-1.0.pcc").mkdir()
    assert layout.list_volumes(storage) == []


def test_what_hides_volumes_is_named(tmp_path: Path) -> None:
    """A link in place of a job, for example, is an error: the job is not empty, but elsewhere."""
    real = put(layout.volume_path(tmp_path / "disk", 5, "a", 0)).parent.parent
    storage = tmp_path / "storage"
    for path in ("7/a/rank-0.0.pcc", "7/b", "6", "7/c/note", "notes", "7/.d"):
        (storage / path).parent.mkdir(parents=True, exist_ok=True)
        (storage / path).symlink_to(real)
    put(layout.volume_path(storage, 7, "c", 0))
    put(storage / "7" / "d")
    (storage / "7" / "e" / "rank-0.0.pcc").mkdir(parents=True)
    hidden = [one.file.path.relative_to(storage) for one in layout.list_hidden(storage)]
    assert hidden == [*map(Path, ("6", "7/a/rank-0.0.pcc", "7/b", "7/d", "7/e/rank-0.0.pcc"))]
    for uid, job, what in (
        (7, "a", "a symbolic link"), (7, "b", "a symbolic link"), (6, "any", "a symbolic link"),
        (7, "d", "not a directory"), (7, "e", "not a regular file"),
    ):  # fmt: skip
        with pytest.raises(layout.MisplacedError, match=f"is {what}"):
            layout.list_volumes(storage, uid=uid, job=job)
        assert layout.files_in_place(storage, uid=uid, job=job) == []
    assert [file.job for file in layout.list_volumes(storage, uid=7, job="c")] == ["c"]
    assert [file.job for file in layout.list_volumes(storage)] == ["c"]


def test_no_storage_directory_is_an_error_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        layout.list_volumes(tmp_path / "missing")


def test_temporary_files_are_told_from_volumes(tmp_path: Path) -> None:
    volume = put(layout.volume_path(tmp_path, 1, "a", 0))
    left = put(volume.with_name(volume.name + ".tmp"))
    record = put(layout.start_path(tmp_path, 1, "a", bytes(range(16))))
    half = put(record.with_name(record.name + ".tmp"))
    put(volume.with_name("notes.tmp"))
    assert layout.list_temporary(tmp_path) == [left, half]
    assert layout.start_records(volume.parent) == {bytes(range(16)): record}
    assert layout.start_records(tmp_path / "missing") == {}


def test_directories_are_private_and_may_exist(tmp_path: Path) -> None:
    path = layout.volume_path(tmp_path, 5, "a", 0)
    layout.make_directories(path)
    layout.make_directories(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parents[1].stat().st_mode) == 0o700
    other = layout.volume_path(tmp_path, 5, "b", 0)
    other.parent.symlink_to(path.parent)
    with pytest.raises(FileExistsError):
        layout.make_directories(other)
