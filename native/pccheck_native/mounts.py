"""Which file system holds a path, and what that one cannot promise."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(rb"\\([0-7]{3})")  # bytes of a path that would end a field or a line

_IN_MEMORY = "keeps its files in memory, and a power loss erases them"
_NETWORK = "is a network file system: a flush there does not prove that data is on a disk"
_COPY_ON_WRITE = "copies on write: an overwrite may find no space"
_LAYERED = "is a layer over another, unknown file system"
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


class Mount(NamedTuple):
    device: str  # "8:1"
    place: str
    kind: str
    options: tuple[str, ...] = ()  # of the mount and of the file system


def mounts(table: bytes) -> Iterator[Mount]:
    """The lines of /proc/self/mountinfo. Every user may mount something, at a path of any bytes."""
    for line in table.split(b"\n")[:-1]:
        unescaped = (
            _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), field)
            for field in line.split(b" ")
        )
        fields = [os.fsdecode(field) for field in unescaped]
        tail = fields[fields.index("-") + 1 :]
        options = [*fields[5].split(","), *(tail[2].split(",") if len(tail) > 2 else [])]
        yield Mount(fields[2], fields[4], tail[0], tuple(dict.fromkeys(options)))


def mount_of(path: Path, table: bytes) -> Mount:
    """The mount that holds `path`; its `kind` is "" when no mount does."""
    found = Mount("", "", "")
    for mount in mounts(table):
        inside = path == Path(mount.place) or Path(mount.place) in path.parents
        if inside and len(mount.place) >= len(found.place):  # the later mount covers the earlier
            found = mount
    return found


def unfit(kind: str) -> str:
    """Why checkpoints are not safe on this kind of file system; "" when they are."""
    return _UNFIT.get(kind) or (_LAYERED if kind.startswith("fuse") else "")
