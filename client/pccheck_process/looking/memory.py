"""The memory of a process: what its image holds, and mappings that CRIU cannot bring back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from pccheck_process.procs.descriptors import REMOVED
from pccheck_process.procs.members import TreeProcess
from pccheck_process.procs.procfs import Proc, parse_fields, shown, whole

from .condition import refuse_unreadable
from .files import DAEMON_MEMORY, IO_URING_FIX, is_gpu, keep_removed
from .found import Findings, OpenFile

_MEMORY_DEVICES = ("/dev/shm/", "/dev/zero", "/dev/hugepages/")
_SHARED_NAMES = ("/dev/zero", "/memfd:", "[anon_shmem:")
_HUGE_NAMES = ("/anon_hugepage", "/dev/hugepages/")


@dataclass(frozen=True, slots=True)
class Map:
    start: int
    end: int
    permissions: str
    offset: int
    device: int
    inode: int
    path: str
    removed: bool

    @property
    def size_bytes(self) -> int:
        return max(0, self.end - self.start)

    @property
    def shared(self) -> bool:
        return self.permissions[3:4] == "s"

    @property
    def key(self) -> tuple[int, int]:
        return self.device, self.inode

    @property
    def is_file(self) -> bool:
        """Of a file system that holds files beyond the process."""
        return bool(self.inode) and self.path.startswith("/") and not self.removed


def maps(table: str) -> Iterator[Map]:
    """The lines of /proc/PID/maps that can be read. The kernel writes a line feed as \\012."""
    for line in table.split("\n"):
        fields = line.split(maxsplit=5)
        if len(fields) < 5:
            continue
        try:
            start, end = (int(one, 16) for one in fields[0].split("-"))
            major, minor = (int(one, 16) for one in fields[3].split(":"))
            device = os.makedev(major, minor)
            offset, inode = int(fields[2], 16), int(fields[4])
        except (ValueError, OverflowError):
            continue
        path = fields[5].replace("\\012", "\n") if len(fields) > 5 else ""
        removed = path.endswith(REMOVED)
        yield Map(start, end, fields[1], offset, device, inode, path.removesuffix(REMOVED), removed)


def look_at_memory(found: Findings, proc: Proc, member: TreeProcess) -> int:
    """The bytes of private memory in the image; shared memory goes to `found.shared`."""
    written: set[tuple[int, int]] = set()
    extents: dict[tuple[int, int], int] = {}
    table = proc.read(member.pid, "maps")
    if table is None:
        refuse_unreadable(found, member)
    elif not table:  # the kernel frees memory before a process becomes a zombie
        found.refuse(f"{member} is ending", "name a running process")
    for one in maps(os.fsdecode(table or b"")):
        if _is_kept(found, member, one):
            if one.path.startswith(_SHARED_NAMES):
                extents[one.key] = extents.get(one.key, 0) + one.size_bytes
            elif one.removed and one.path.startswith("/") and one.key not in found.ghosts:
                _look_at_removed(found, proc, member, one)
            elif one.is_file and one.shared and "w" in one.permissions and one.key not in written:
                written.add(one.key)
                _add_written(found, proc, member, one)
    return _bytes(found, proc, member, extents)


def _is_kept(found: Findings, member: TreeProcess, one: Map) -> bool:
    """False for a mapping that is refused, or left to the driver of a GPU."""
    path, who = one.path, str(member)
    if is_gpu(path):
        found.gpu = True
    elif path.startswith("anon_inode:[io_uring]"):
        found.refuse(f"{who} has memory of io_uring mapped", IO_URING_FIX)
    elif path.startswith("/SYSV"):
        found.refuse(
            f"{who} has System V shared memory mapped, which CRIU snapshots only with an own IPC "
            "namespace",
            "use POSIX shared memory (shm_open) instead",
        )
    elif path.startswith(("anon_inode:", "/secretmem", "/dmabuf")) or (
        path.startswith("/dev/") and not path.startswith(_MEMORY_DEVICES)
    ):
        found.refuse(
            f"{who} has {shown(path)} mapped, which CRIU cannot snapshot",
            "close the device or library that maps it first",
        )
    elif path.startswith(_HUGE_NAMES):
        found.note(f"{who} uses huge pages (hugetlbfs), which must be free again at restore")
        return False
    else:
        return not path.startswith(("/[aio]", DAEMON_MEMORY))
    return False


def _look_at_removed(found: Findings, proc: Proc, member: TreeProcess, one: Map) -> None:
    """Only some users may look at the file behind a mapping; others get its mapped size."""
    file = proc.stat(member.pid, "map_files", f"{one.start:x}-{one.end:x}")
    if file is not None and file.st_ino == one.inode:
        keep_removed(found, str(member), one.path, file)
        found.ghosts.setdefault(one.key, file.st_size)
    else:
        extent = one.offset + one.size_bytes
        found.ghosts[one.key] = extent
        found.shared.setdefault(one.key, extent)


def _add_written(found: Findings, proc: Proc, member: TreeProcess, one: Map) -> None:
    file = proc.stat(member.pid, "map_files", f"{one.start:x}-{one.end:x}")
    if file is None:
        try:
            file = os.stat(one.path)  # noqa: PTH116
        except (OSError, ValueError):
            return
    opened = OpenFile(
        member.pid, -1, one.path, file.st_size, 0, os.O_RDWR, file.st_dev, file.st_ino
    )
    found.files.append(opened)


def _bytes(
    found: Findings, proc: Proc, member: TreeProcess, extents: dict[tuple[int, int], int]
) -> int:
    """Shared memory without a descriptor: at most what is mapped, and at most what is in RAM."""
    status = member.status
    resident = whole(status.get("RssShmem")) << 10
    for key, extent in extents.items():
        if key not in found.shared:
            found.shared[key] = min(extent, resident)
    usage = parse_fields(proc.text(member.pid, "smaps_rollup"))
    if "Anonymous" not in usage:  # of an older kernel
        return whole(status.get("RssAnon")) + whole(status.get("VmSwap")) << 10
    names = ("Anonymous", "Swap", "Private_Hugetlb", "Shared_Hugetlb")
    return sum(whole(usage.get(name)) for name in names) << 10
