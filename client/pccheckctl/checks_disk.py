"""Checks of a storage directory, by using it. What lies there is read; what is written goes."""

from __future__ import annotations

import errno
import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

from pccheck_native import catalog, layout, mounts
from pccheck_wire.errors import PccheckError

from . import disk, render
from .findings import Finding, ok, problem, read, warning

PROBE_BYTES = 4 << 20
FLUSHES, FLUSH_LIMIT_S = 32, 2.0
SLOW_FLUSH_S = 0.05
_NO_BARRIERS = ("nobarrier", "barrier=0")


def file_system(place: Path) -> Iterator[Finding]:
    """Its kind, its options, and the device below."""
    mount = mounts.mount_of(place.resolve(), mounts.MOUNTINFO.read_text())
    why = mounts.unfit(mount.kind)
    where = f"{place} lies on {mount.kind or 'an unknown file system'}"
    if why:
        yield problem(
            "file system", f"{where}, which {why}",
            costs="pccheckd refuses it, since durable would not mean durable",
            mend="use a directory on a local ext4 or xfs disk",
        )  # fmt: skip
        return
    if "ro" in mount.options:
        yield problem(
            "file system", f"{where}, mounted read-only", costs="nothing can be saved",
            mend=f"mount -o remount,rw {mount.place}; the kernel does this by itself after errors: "
            "see dmesg",
        )  # fmt: skip
    bad = [option for option in mount.options if option in _NO_BARRIERS]
    if bad:
        yield warning(
            "file system", f"{where}, mounted with {bad[0]}",
            costs="flushes do not reach the disk: a power loss may take durable checkpoints",
            mend=f"mount -o remount,barrier=1 {mount.place}", promise="durable",
        )  # fmt: skip
    if not bad and "ro" not in mount.options:
        yield ok("file system", f"{where} ({_device(mount.device)})")


def _device(number: str) -> str:
    """What the kernel says of the block device, or the disk that it is a part of."""
    place = Path("/sys/dev/block") / number
    queue = place / "queue"
    if not queue.exists():
        queue = place.resolve().parent / "queue"
    cache = {
        "write back": "which has a volatile cache and is flushed",
        "write through": "which says that it needs no flush",
    }.get(read(str(queue / "write_cache")), "whose cache is not known")
    return f"device {place.resolve().name}, {cache}"


def access(place: Path, daemon_uid: int | None) -> Iterator[Finding]:
    """Whether the directory is one, and who may use it."""
    if not place.is_dir():
        yield problem(
            "storage", f"there is no directory {place}", costs="pccheckd does not start",
            mend=f"make it, owned by the user that runs pccheckd: mkdir -p {place}",
        )  # fmt: skip
        return
    found = place.stat()
    owner = os.geteuid() if daemon_uid is None else daemon_uid
    if owner not in (0, found.st_uid) and not found.st_mode & 0o022:
        yield problem(
            "storage", f"{place} belongs to uid {found.st_uid}, pccheckd runs as uid {owner}",
            costs="no volume can be made", mend=f"chown {owner} {place}",
        )  # fmt: skip
    elif found.st_mode & 0o007 and not found.st_mode & 0o1000 and found.st_mode & 0o002:
        yield warning(
            "storage", f"{place} may be written to by everybody",
            costs="any user can put another directory in the place of a job's",
            mend=f"chmod o-w {place}", promise="apart",
        )  # fmt: skip
    else:
        yield ok("storage", f"{place}, owned by uid {found.st_uid}")


def direct_io(place: Path) -> Iterator[Finding]:
    """Writes, flushes, reads back; how long a flush takes."""
    try:
        scratch = disk.Scratch(place)
    except PccheckError as error:
        yield warning(
            "disk", error.message, costs="the disk was not tried",
            mend=error.hint or "run this as the user of pccheckd",
        )  # fmt: skip
        return
    with scratch:
        scratch.reserve(PROBE_BYTES)
        if not scratch.direct:
            yield problem(
                "disk", "O_DIRECT is refused",
                costs="pccheckd refuses the directory: through the page cache it could not tell "
                "when data is on the disk, and would push everything else out of memory",
                mend="use ext4 or xfs on a local disk",
            )  # fmt: skip
            return
        align = disk.dio_alignment(scratch.fd)
        try:
            same = disk.reads_back(scratch.fd, PROBE_BYTES)
            taken = disk.flushes(scratch.fd, count=FLUSHES, limit_s=FLUSH_LIMIT_S)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "an error")
            yield problem(
                "disk", f"writing, flushing or reading fails: {name} ({error.strerror})",
                costs="every checkpoint fails", mend="see dmesg; replace the disk, or free room",
            )  # fmt: skip
            return
    yield from _judged(same, taken, align)


def _judged(same: bool, taken: list[float], align: disk.Alignment | None) -> Iterator[Finding]:
    if not same:
        yield problem(
            "disk", "what was read is not what was written",
            costs="checkpoints are damaged as they are written",
            mend="do not use this disk; see dmesg",
        )  # fmt: skip
        return
    median = statistics.median(taken)
    told = (
        f"write, flush and read back agree; a flush takes {render.brief(median)} "
        f"(slowest of {len(taken)}: {render.brief(taken[-1])})"
    )
    if align is not None:
        told += f"; direct I/O aligned to {align.offset} bytes on disk, {align.memory} in memory"
    if median > SLOW_FLUSH_S:
        yield warning(
            "disk", told, costs="each checkpoint waits for two flushes before it is durable",
            mend="use an SSD with power-loss protection; see pccheckctl bench",
        )  # fmt: skip
    else:
        yield ok("disk", told)


def room(place: Path, slots: int) -> Iterator[Finding]:
    """Free room against the volumes that are there: one that is outgrown is there twice."""
    usage = shutil.disk_usage(place)
    told = f"{render.size(usage.free)} free of {render.size(usage.total)}"
    try:
        found = catalog.scan(place)
    except OSError as error:
        yield ok("room", f"{told}; what the volumes take is not ours to see ({error.strerror})")
        return
    largest = max((info.volume_bytes for info in found.volumes.values()), default=0)
    if largest > usage.free:
        yield warning(
            "room", f"{told}; the largest volume takes {render.size(largest)}",
            costs="a job of that size cannot start beside it, nor can it move to a larger volume "
            "when its state grows: its checkpoints would fail",
            mend="pccheckctl drop JOB for jobs that are over, a larger disk, or fewer --slots",
            promise="durable",
        )  # fmt: skip
    else:
        volumes = render.plural(len(found.volumes), "volume")
        each = f"; a new volume takes {slots} times its checkpoint" if slots else ""
        yield ok("room", f"{told}, {volumes}{each}")
    for item in found.unreadable:
        yield problem(
            "room", f"{item.file.path} cannot be read: {item.reason}",
            costs="its job does not start, so that nothing is overwritten by accident",
            mend="pccheckctl verify; start the job with fresh=True, or pccheckctl drop it",
        )  # fmt: skip
    left = layout.list_temporary(place)
    if left:
        named = render.plural(len(left), "file")
        yield ok("room", f"{named} of interrupted work are removed when pccheckd starts next")
