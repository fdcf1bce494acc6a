"""Open files, devices and other descriptors: which of them CRIU can bring back."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable

from pccheck_process.procs.descriptors import OpenDescriptor
from pccheck_process.procs.procfs import Proc, shown, whole

from .found import Findings, OpenFile
from .terminals import is_terminal

GHOST_LIMIT_BYTES = 1 << 30
DAEMON_MEMORY = "/memfd:pccheck-"  # of a PCcheckClient, which lets go of it before a snapshot
IO_URING_FIX = (
    "sysctl kernel.io_uring_disabled=2 before the start, or for torchrun use PCcheckClient"
)

_NAMESPACE = re.compile(r"[a-z_]+:\[\d+\]")
_KEPT_ANONYMOUS = {
    "[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "[pidfd]", "inotify",
}  # fmt: skip
_KEPT_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}  # null zero full random urandom


def look_at_files(
    found: Findings,
    proc: Proc,
    opened: Iterable[OpenDescriptor],
    tree: Collection[int],
    *,
    root: bool,
) -> None:
    """`root`: CRIU may open every file at restore, not only those of the target's user."""
    for one in opened:
        if "lock" in one.info:
            found.file_locks = True
        if one.target.startswith("anon_inode:"):
            _look_at_anonymous(found, one, tree, root=root)
        elif one.target.startswith("/memfd:"):
            if not one.target.startswith(DAEMON_MEMORY):
                keep_contents(found, one.stat)
        elif one.target.startswith("/"):
            _look_at_path(found, one, root=root)
        elif not one.target.startswith(("pipe:[", "socket:[")):
            _look_at_namespace(found, proc, one)


def keep_contents(found: Findings, file: os.stat_result | None) -> None:
    """The image holds the contents of this file."""
    if file is not None:
        found.shared[file.st_dev, file.st_ino] = file.st_blocks * 512


def keep_removed(found: Findings, who: str, path: str, file: os.stat_result) -> None:
    """CRIU puts files that have no name any more into the image, up to a limit."""
    size_bytes = max(file.st_size, file.st_blocks * 512)
    if file.st_nlink:
        found.refuse(
            f"{who} uses {shown(path)}, which was removed or replaced while the file has another "
            "hard link",
            "start the process again, so that it opens the new file",
        )
    elif not stat.S_ISDIR(file.st_mode):
        keep_contents(found, file)
        found.ghosts[file.st_dev, file.st_ino] = size_bytes
    if size_bytes > GHOST_LIMIT_BYTES:
        found.refuse(
            f"{who} uses {shown(path)}, which was removed and has {size_bytes} bytes, more than "
            f"the limit of {GHOST_LIMIT_BYTES}",
            "close that file, or do not remove the file while it is open",
        )


def open_file(one: OpenDescriptor, file: os.stat_result) -> OpenFile:
    return OpenFile(
        one.member.pid, one.fd, one.path, file.st_size, one.position, one.flags, file.st_dev,
        file.st_ino,
    )  # fmt: skip


def is_gpu(path: str) -> bool:
    return path.startswith("/dev/nvidia")


def _look_at_path(found: Findings, one: OpenDescriptor, *, root: bool) -> None:
    file = one.stat
    if is_gpu(one.target):
        found.gpu = True
    elif one.target.startswith("/secretmem"):
        _refuse(found, one, "secret memory")
    elif file is None:
        return
    elif stat.S_ISCHR(file.st_mode) or stat.S_ISBLK(file.st_mode):
        _look_at_device(found, one, file)
    elif one.is_removed:
        keep_removed(found, str(one.member), one.path, file)
    elif stat.S_ISREG(file.st_mode) and not one.target.startswith(("/proc/", "/sys/")):
        if not one.flags & os.O_PATH:
            found.files.append(open_file(one, file))
        _look_at_name(found, one, file)
        if not root and not _may_open(one, file):
            found.refuse(
                f"{one.member} has {shown(one.path)} open, which its user may not open again",
                "give the user that file",
            )


def _look_at_device(found: Findings, one: OpenDescriptor, file: os.stat_result) -> None:
    number = os.major(file.st_rdev), os.minor(file.st_rdev)
    if stat.S_ISCHR(file.st_mode) and (number in _KEPT_DEVICES or is_terminal(one)):
        return
    found.refuse(
        f"{one.member} has the device {shown(one.path)} open as descriptor {one.fd}",
        "close the device first",
    )


def _look_at_name(found: Findings, one: OpenDescriptor, file: os.stat_result) -> None:
    """CRIU opens the path again, which must lead to the same file."""
    try:
        now = os.stat(one.target)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        now = None
    except (OSError, ValueError):
        return  # this user may not know
    if now is None or not os.path.samestat(now, file):
        found.refuse(
            f"{one.member} has {shown(one.path)} open, and that path does not lead to the open "
            "file now",
            "unmount what covers the path, or start the process again",
        )


def _may_open(one: OpenDescriptor, file: os.stat_result) -> bool:
    """Root may have opened a log for a service, or for a command of `sudo`."""
    uid = next(iter(one.member.ids("Uid")), 0)
    wanted = (os.R_OK if one.reads else 0) | (os.W_OK if one.writes else 0)
    if uid == 0 or one.flags & os.O_PATH:
        return True
    if uid == os.geteuid():
        return os.access(one.target, wanted)
    groups = {*one.member.ids("Gid"), *map(whole, one.member.status.get("Groups", "").split())}
    shift = 6 if uid == file.st_uid else 3 if file.st_gid in groups else 0
    return file.st_mode >> shift & wanted == wanted


def _look_at_anonymous(
    found: Findings, one: OpenDescriptor, tree: Collection[int], *, root: bool
) -> None:
    name = one.target.removeprefix("anon_inode:")
    if name == "[io_uring]":
        found.refuse(f"{one.member} uses io_uring (descriptor {one.fd})", IO_URING_FIX)
    elif name == "inotify" and not root:
        found.refuse(
            f"{one.member} watches files with inotify (descriptor {one.fd}), which only root can "
            "snapshot",
            "ask as root",
        )
    elif name not in _KEPT_ANONYMOUS:
        _refuse(found, one, shown(name.strip("[]")))
    elif name == "[pidfd]":
        pid = whole(one.info.get("Pid"))
        if pid > 0 and pid not in tree:
            found.refuse(
                f"{one.member} has a pidfd of process {pid} open, which is outside the tree",
                "close that descriptor first",
            )


def _look_at_namespace(found: Findings, proc: Proc, one: OpenDescriptor) -> None:
    """CRIU opens a namespace again when that is the one in which everything runs."""
    if not _NAMESPACE.fullmatch(one.target):
        _refuse(found, one, shown(one.target))
    elif proc.link("self", "ns", one.target.partition(":")[0]) != one.target:
        _refuse(found, one, f"another namespace ({one.target})")


def _refuse(found: Findings, one: OpenDescriptor, what: str) -> None:
    found.refuse(
        f"{one.member} has {what} open as descriptor {one.fd}, which CRIU cannot snapshot",
        "close that descriptor first",
    )
