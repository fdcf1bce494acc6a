"""The storage directory: unfit file systems, locks, leftovers."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from pccheck_native import mounts
from pccheck_wire.errors import NoStoreError, StoreLockedError
from pccheckd.config.options import Config
from pccheckd.storage import lock as storage

TABLE = b"""\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
23 22 0:5 / /dev/shm rw,nosuid shared:3 - tmpfs tmpfs rw
24 22 8:2 / /mnt/a\\040b rw - xfs /dev/sdb rw
25 22 0:9 / /mnt/nfs rw master:1 shared:2 - nfs4 host:/x rw
26 22 0:10 / /mnt/nfs/over rw - overlay overlay rw
27 22 8:3 / /mnt/twice rw - btrfs /dev/sdc rw
28 22 8:4 / /mnt/twice rw - ext4 /dev/sdd rw
29 22 0:44 / /mnt/fs rw - fuse.sshfs x rw
30 22 0:45 / /mnt/gr\xc3\xb6\xc3\x9fe rw - tmpfs x rw
31 22 0:46 / /mnt/\xff rw - tmpfs x rw
32 22 0:47 / /mnt/\r\xe2\x80\xa8\xc2\x85 rw - tmpfs x rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"), ("/srv/x", "ext4"), ("/dev/shm/x", "tmpfs"), ("/mnt/a b/x", "xfs"),
        ("/mnt/nfs", "nfs4"), ("/mnt/nfsx", "ext4"), ("/mnt/nfs/over/y", "overlay"),
        ("/mnt/twice", "ext4"), ("/mnt/fs/z", "fuse.sshfs"), ("/mnt/größe/x", "tmpfs"),
        ("/mnt/\udcff", "tmpfs"), ("/mnt/\r\u2028\x85/x", "tmpfs"),
    ],
)  # fmt: skip
def test_the_file_system_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    assert mounts.mount_of(Path(path), TABLE).kind == kind


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("tmpfs", "in memory"), ("nfs4", "network"), ("btrfs", "copies on write"),
        ("overlay", "layer"), ("fuse.sshfs", "layer"),
    ],
)  # fmt: skip
def test_unfit_file_systems_are_refused_with_the_override_named(
    kind: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = mounts.Mount("8:1", "/", kind)
    monkeypatch.setattr(mounts, "mount_of", lambda path, table: found)
    with pytest.raises(NoStoreError, match=rf"{kind}.*{told}.*--allow-any-filesystem"):
        storage.check(Config(tmp_path, tmp_path / "a.sock"))
    storage.check(Config(tmp_path, tmp_path / "a.sock", allow_any_filesystem=True))


def test_a_missing_directory_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(NoStoreError, match=r"mkdir -p .*gone"):
        storage.check(Config(tmp_path / "gone", tmp_path / "a.sock"))


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EIO, "check the disk: dmesg"), (errno.ENOENT, "mkdir -p"),
        (errno.EACCES, "enter the directories above it"), (errno.ENOTDIR, "a file is in its path"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_directory_decides_the_fix(
    number: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "stat", fails)
    with pytest.raises(NoStoreError, match=os.strerror(number)) as told:
        storage.check(Config(tmp_path, tmp_path / "a.sock"))
    monkeypatch.undo()
    assert fix in told.value.hint


def test_a_directory_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage.layout, "list_temporary", fails)
    with pytest.raises(NoStoreError, match=r"cannot be listed: Input/output error.*dmesg"):
        storage.sweep(tmp_path)


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"")
    with pytest.raises(NoStoreError, match="not a directory"):
        storage.check(Config(place, tmp_path / "a.sock"))


def test_the_lock_names_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = storage.lock(path, "serves here")
    with pytest.raises(StoreLockedError, match=rf"pid {os.getpid()}\) serves here"):
        storage.lock(path, "serves here")
    os.close(held)
    os.close(storage.lock(path, "serves here"))


def test_a_file_system_without_locks_is_no_other_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))  # NFS without lockd, say

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(NoStoreError, match="cannot be locked: No locks available") as told:
        storage.lock(tmp_path / "lock", "serves here")
    assert told.value.hint == "choose a directory on a local disk"


def test_a_directory_that_takes_no_files_is_told_as_such() -> None:
    with pytest.raises(NoStoreError) as told:
        storage.lock(Path("/proc/.pccheckd.lock"), "serves here")
    assert told.value.hint.startswith("choose a directory on a local disk")


def test_leftovers_of_an_interrupted_creation_go(tmp_path: Path) -> None:
    place = tmp_path / "1000" / "job"
    place.mkdir(parents=True)
    left, kept = place / "rank-0.1.pcc.x.tmp", place / "rank-0.0.pcc"
    left.write_bytes(b"")
    kept.write_bytes(b"")
    assert storage.sweep(tmp_path) == 1
    assert kept.exists() and not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_a_directory_of_a_stranger_is_refused(tmp_path: Path) -> None:
    config = Config(tmp_path, tmp_path / "a.sock", allow_any_filesystem=True)
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(NoStoreError, match=r"belongs to uid 12345, .*chown 0 "):
        storage.check(config)


def test_a_directory_that_every_user_may_write_to_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(tmp_path, tmp_path / "a.sock", allow_any_filesystem=True)
    storage.check(config)
    assert "every user may write" not in caplog.text
    tmp_path.chmod(0o1777)
    storage.check(config)
    assert "every user may write" in caplog.text


def test_a_lock_of_a_stranger_says_nothing_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("1; rm -rf \x1b[2J")
    held = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(StoreLockedError, match=r"another pccheckd .pid unknown."):
        storage.lock(tmp_path / "lock", "has it")
    os.close(held)
