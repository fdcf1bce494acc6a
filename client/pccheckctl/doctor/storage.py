"""Checks of a storage directory, by using it. What lies there is only read; what is written for the
check is removed."""

from __future__ import annotations

import errno
import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

from pccheck_native import catalog, mounts
from pccheck_wire.errors import PccheckError
from pccheckctl.measure import disk
from pccheckctl.output import render
from pccheckctl.output.files import reserve

from .finding import Finding, ok, problem, warning

PROBE_BYTES = 4 << 20
FLUSHES, FLUSH_LIMIT_S = 32, 2.0
SLOW_FLUSH_S = 0.05
_NO_BARRIERS = ("nobarrier", "barrier=0")


def file_system(place: Path) -> Iterator[Finding]:
    mount = mounts.mount_of(place.resolve(), mounts.MOUNTINFO.read_bytes())
    where = f"{place} is on {mount.kind or 'an unknown file system'}"
    unsafe = next((option for option in mount.options if option in _NO_BARRIERS), "")
    if why := mounts.unfit(mount.kind):
        yield problem(
            "file system", f"{where}, which {why}",
            effect="pccheckd refuses it: a checkpoint there could be lost after it was durable",
            fix="use a directory on a local ext4 or xfs disk",
        )  # fmt: skip
    elif "ro" in mount.options:
        yield problem(
            "file system", f"{where}, mounted read-only", effect="no checkpoint can be saved",
            fix=f"mount -o remount,rw {mount.place}; the kernel remounts a disk read-only after "
            "errors: see dmesg",
        )  # fmt: skip
    elif unsafe:
        yield warning(
            "file system", f"{where}, mounted with {unsafe}",
            effect="flushes do not reach the disk: a power loss may destroy durable checkpoints",
            fix=f"mount -o remount,barrier=1 {mount.place}", promise="durable",
        )  # fmt: skip
    else:
        yield ok("file system", where)


def seen(place: Path) -> bool:
    """Whether this process sees a directory there."""
    try:
        return place.is_dir()
    except PermissionError:  # for a directory above it
        return False


def access(place: Path, daemon_uid: int | None) -> Iterator[Finding]:
    """Whether the directory exists, and who may use it."""
    try:
        place.lstat()
    except PermissionError:
        yield problem(
            "storage", f"uid {os.geteuid()} may not enter a directory above {place}",
            effect="the disk was not checked", fix="run doctor as the user that runs pccheckd",
        )  # fmt: skip
        return
    except OSError:  # it is not there
        pass
    if place.exists() and not place.is_dir():
        yield problem(
            "storage", f"{place} is not a directory", effect="pccheckd cannot start there",
            fix="name the directory that pccheckd was started with, or will use",
        )  # fmt: skip
        return
    if not place.is_dir():
        missing = f"there is no directory {place}"
        if place.parent.is_dir():
            yield warning(
                "storage", missing, effect="pccheckd creates it, and then finds no checkpoints",
                fix="if there should be some: mount the disk, or name the directory they are in",
            )  # fmt: skip
        else:
            yield problem(
                "storage", missing, effect="pccheckd cannot start there",
                fix=f"create it, owned by the user that runs pccheckd: mkdir -p {place}",
            )  # fmt: skip
        return
    found = place.stat()
    owner = os.geteuid() if daemon_uid is None else daemon_uid
    if owner not in (0, found.st_uid) and not found.st_mode & 0o022:
        yield problem(
            "storage", f"{place} belongs to uid {found.st_uid}, but pccheckd runs as uid {owner}",
            effect="no checkpoint can be saved", fix=f"chown {owner} {place}",
        )  # fmt: skip
    elif found.st_mode & 0o002 and not found.st_mode & 0o1000:
        yield warning(
            "storage", f"every user may write to {place}",
            effect="any user can replace the directory of a job with another one",
            fix=f"chmod o-w {place}", promise="apart",
        )  # fmt: skip
    else:
        yield ok("storage", f"{place}, owned by uid {found.st_uid}")


def direct_io(place: Path) -> Iterator[Finding]:
    """Writes, flushes, reads back; how long a flush takes."""
    try:
        with disk.scratch(place) as (fd, direct):
            if not direct:
                yield problem(
                    "disk", f"{place} refuses direct I/O (O_DIRECT)",
                    effect="pccheckd refuses the directory: through the page cache it cannot tell "
                    "when data is on the disk",
                    fix="use ext4 or xfs on a local disk",
                )  # fmt: skip
                return
            reserve(fd, PROBE_BYTES, place)
            same = disk.reads_back(fd, PROBE_BYTES)
            seconds = disk.flushes(fd, count=FLUSHES, limit_s=FLUSH_LIMIT_S)
    except PccheckError as error:
        yield warning(
            "disk", error.message, effect="the disk was not tested",
            fix=error.hint or "run this as the user of pccheckd",
        )  # fmt: skip
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "an error")
        yield problem(
            "disk", f"the disk fails to write, flush or read: {name} ({error.strerror})",
            effect="every checkpoint fails", fix="see dmesg; replace the disk, or free space",
        )  # fmt: skip
    else:
        yield _judged(same, seconds)


def _judged(same: bool, seconds: list[float]) -> Finding:
    """`seconds` of the flushes, ascending."""
    if not same:
        return problem(
            "disk", "the disk returned data that differs from what was written",
            effect="checkpoints are damaged while they are written",
            fix="do not use this disk; see dmesg",
        )  # fmt: skip
    median = statistics.median(seconds)
    found = (
        f"data is read back as written; a flush takes {render.brief(median)} "
        f"(slowest of {len(seconds)}: {render.brief(seconds[-1])})"
    )
    if median <= SLOW_FLUSH_S:
        return ok("disk", found)
    return warning(
        "disk", found, effect="each checkpoint waits for two flushes before it is durable",
        fix="use an SSD with power-loss protection; see pccheckctl bench",
    )  # fmt: skip


def room(place: Path, slots: int) -> Iterator[Finding]:
    """Compares free space with the volumes: a volume that becomes too small is replaced by a larger
    one, and both exist for a while."""
    usage = shutil.disk_usage(place)
    free = f"{render.size(usage.free)} free of {render.size(usage.total)}"
    try:
        found = catalog.scan(place)
    except OSError as error:
        yield ok("room", f"{free}; the volumes cannot be read by this user ({error.strerror})")
        return
    largest = max((info.volume_bytes for info in found.volumes.values()), default=0)
    if largest > usage.free:
        yield warning(
            "room", f"{free}; the largest volume takes {render.size(largest)}",
            effect="a job of that size cannot start, or grow: its checkpoints would fail",
            fix="pccheckctl drop JOB for jobs no longer needed, a larger disk, or fewer --slots",
            promise="durable",
        )  # fmt: skip
    else:
        new = f"; a new volume takes {slots} times its checkpoint, or {slots + 1} on several nodes"
        count = render.plural(len(found.volumes), "volume")
        yield ok("room", f"{free}, {count}{new if slots else ''}")
    for item in found.unreadable:
        yield problem(
            "room", f"{item.file.path} cannot be read: {item.reason}",
            effect="its job does not start, so that nothing is overwritten by accident",
            fix="pccheckctl verify; start the job with fresh=True, or pccheckctl drop it",
        )  # fmt: skip
