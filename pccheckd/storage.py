"""The storage directory: is it one that can keep promises, and is it ours alone."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pccheck_native import layout
from pccheck_wire.errors import NoStoreError, StoreLockedError

from .config import Config
from .logs import LOG

#: Why each family of file systems is refused without --allow-any-filesystem.
_IN_MEMORY = "keeps files in memory, which a power loss erases"
_NETWORK = "is a network file system, whose flushes we cannot vouch for"
_COPY_ON_WRITE = "copies on write, so that an overwrite may find no room"
_LAYERED = "is a layer over another file system, which we cannot see"
_UNFIT = {
    **dict.fromkeys(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"), _IN_MEMORY),
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "lustre", "glusterfs",
         "afs", "gpfs", "beegfs", "ocfs2", "gfs2", "vboxsf"),
        _NETWORK,
    ),
    **dict.fromkeys(("btrfs", "zfs", "bcachefs", "nilfs2"), _COPY_ON_WRITE),
    **dict.fromkeys(("overlay", "aufs", "ecryptfs", "fuse", "squashfs", "iso9660"), _LAYERED),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mount:
    device: str
    place: str
    kind: str


def mounts(table: str) -> Iterator[Mount]:
    """The lines of /proc/self/mountinfo."""
    for line in table.splitlines():
        fields = line.split(" ")
        tail = fields[fields.index("-") + 1 :]
        place = fields[4].encode().decode("unicode_escape")
        yield Mount(fields[2], place, tail[0])


def filesystem_of(path: Path, table: str) -> str:
    """The type of the file system that holds `path`, "" when it cannot be told."""
    found = Mount("", "", "")
    for mount in mounts(table):
        inside = path == Path(mount.place) or Path(mount.place) in path.parents
        if inside and len(mount.place) >= len(found.place):  # the later mount covers the earlier
            found = mount
    return found.kind


def check(config: Config) -> None:
    """Raises NoStoreError that names the fix when `config.storage` cannot hold volumes."""
    place = config.storage
    try:
        mode = place.stat().st_mode
    except OSError as error:
        raise NoStoreError(
            f"the storage directory {place} cannot be used: {error.strerror}",
            hint=f"make it: mkdir -p {place}",
        ) from error
    if not stat.S_ISDIR(mode):
        raise NoStoreError(f"{place} is not a directory", hint="--storage takes a directory")
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK) or _read_only(place):
        raise NoStoreError(
            f"the storage directory {place} is not writable for uid {os.geteuid()} "
            f"(owner {place.stat().st_uid})",
            hint=f"mount it read-write and give it to that user: chown {os.geteuid()} {place}",
        )
    kind = filesystem_of(place.resolve(), Path("/proc/self/mountinfo").read_text())
    why = _UNFIT.get(kind) or (_LAYERED if kind.startswith("fuse") else "")
    if why and not config.allow_any_filesystem:
        raise NoStoreError(
            f"{place} lies on {kind}, which {why}",
            hint="use a directory on a local ext4 or xfs disk; "
            "--allow-any-filesystem overrides this for tests",
        )
    if why:
        LOG.warning("%s lies on %s, which %s: durable means less here", place, kind, why)


def _read_only(place: Path) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def lock(path: Path, purpose: str) -> int:
    """Takes the flock at `path` and writes our pid into it; the descriptor is the lock.

    Raises StoreLockedError that names the pid of who has it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NoStoreError(
            f"{path} cannot be opened: {error.strerror}",
            hint="give the directory to the user that runs pccheckd",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLockedError(
            f"another pccheckd (pid {holder}) {purpose}",
            hint=f"use that one, or stop it first: kill {holder}",
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def sweep(place: Path) -> int:
    """Removes what an interrupted creation left; how many files. Needs the lock."""
    left = layout.list_temporary(place)
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)
