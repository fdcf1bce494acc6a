"""`pccheckctl bench`: how fast a disk writes, reads and flushes checkpoints, measured on a file
that is removed afterwards."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path
from typing import NamedTuple

from pccheck_wire.errors import StorageFullError, UsageError
from pccheck_wire.units import GIB, MIB
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, part, text
from pccheckctl.output.files import reserve
from pccheckctl.output.progress import Bar
from pccheckctl.source import choose

from . import disk

SIZE_DEFAULT, SIZE_MIN = 2 * GIB, 64 * MIB
CHUNK_DEFAULT = 16 * MIB
PROBE_BYTES = 64 * MIB  # written first, to see how much the passes can write in their time
WRITERS = (1, 2, 4)
#: Limits of the passes, together below half a minute.
FIRST_LIMIT_S, PASS_LIMIT_S, READ_LIMIT_S, FLUSH_LIMIT_S = 8.0, 3.5, 3.5, 2.0
FLUSHES = 64
LEFT_FREE = 0.1  # of the file system: other users of a full one would fail
GOOD_ENOUGH = 0.95
EXAMPLES = (1 * GIB, 10 * GIB, 100 * GIB)


class Figures(NamedTuple):
    """What one disk does; `tune` computes with it, too."""

    place: str
    size: int
    chunk: int
    direct: bool
    first_bytes_per_s: float
    write_bytes_per_s: dict[int, float]  # by writers
    read_bytes_per_s: float
    flush_s: float
    slowest_flush_s: float

    @property
    def best_bytes_per_s(self) -> float:
        return max(self.write_bytes_per_s.values())

    @property
    def writers(self) -> int:
        """The fewest that are as good as the best."""
        enough = GOOD_ENOUGH * self.best_bytes_per_s
        return min(p for p, rate in self.write_bytes_per_s.items() if rate >= enough)

    def checkpoint_s(self, nbytes: int) -> float:
        """From the first byte to durable: written, flushed, its record written and flushed."""
        return nbytes / self.write_bytes_per_s[self.writers] + 2 * self.flush_s

    def recover_s(self, nbytes: int) -> float:
        return nbytes / self.read_bytes_per_s


def run(arguments: argparse.Namespace) -> int:
    if arguments.storage:
        place = Path(arguments.storage).absolute()
    else:  # the directory of the running daemon, or PCCHECK_STORAGE
        with choose(arguments) as chosen:
            place = Path(text(part(chosen.status(), "storage"), "path"))
    figures = measure(
        place, size=arguments.size, chunk=arguments.chunk or CHUNK_DEFAULT,
        writers=WRITERS if arguments.writers is None else (arguments.writers,),
        quiet=arguments.json,
    )  # fmt: skip
    answer(arguments, document(figures), lambda: as_text(figures))
    return 0


def measure(
    place: Path, *, size: int | None, chunk: int, writers: tuple[int, ...] = WRITERS,
    quiet: bool = True,
) -> Figures:  # fmt: skip
    """Raises StorageFullError, before it writes anything, when the file would fill the disk."""
    if chunk % disk.ALIGN:
        raise UsageError(f"--chunk must be a multiple of 4KiB (got {chunk} bytes)")
    with (
        disk.scratch(place) as (fd, direct),
        Bar("bench", len(writers) + 4, show=not quiet, unit="part") as bar,
    ):
        size = _fitting(place, size, chunk)
        reserve(fd, size, place)

        def writes(threads: int, nbytes: int) -> float:
            bar.advance(1)
            return disk.writes(fd, size=nbytes, chunk=chunk, threads=threads)

        def within(rate: float, limit_s: float, most: int) -> int:
            """Bytes, in whole chunks, that take about `limit_s`."""
            return max(chunk, min(int(rate * limit_s), most) // chunk * chunk)

        probed = writes(2, within(PROBE_BYTES, 1, size))
        written = within(probed, FIRST_LIMIT_S, size)  # only that can be overwritten
        first = writes(2, written)
        passed = within(first, PASS_LIMIT_S, written)
        rates = {p: writes(p, passed) for p in writers}
        if not direct:  # else it would measure the page cache
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read = disk.reads(fd, size=written, chunk=chunk, threads=2, limit_s=READ_LIMIT_S)
        bar.advance(1)
        flushes = disk.flushes(fd, count=FLUSHES, limit_s=FLUSH_LIMIT_S)
        bar.advance(1)
        return Figures(
            str(place), size, chunk, direct, first, rates, read,
            statistics.median(flushes), flushes[-1],
        )  # fmt: skip


def _fitting(place: Path, wanted: int | None, chunk: int) -> int:
    """The size of the file: what is asked for, or what does not fill the disk."""
    usage = shutil.disk_usage(place)
    room = int(usage.free - LEFT_FREE * usage.total)
    size = min(SIZE_DEFAULT, room) if wanted is None else wanted
    size = max(size, chunk) // chunk * chunk
    if size > room or room < min(SIZE_MIN, size):
        raise StorageFullError(
            f"{place} has {render.size(usage.free)} free of {render.size(usage.total)}: a file of "
            f"{render.size(max(size, SIZE_MIN))} would leave less than a tenth",
            hint="use a smaller --size, or free space: pccheckctl drop JOB",
        )
    return size


def document(figures: Figures) -> Document:
    """What `bench --json` prints."""
    return {
        "schema": 1,
        "storage": figures.place,
        "file_bytes": figures.size,
        "chunk_bytes": figures.chunk,
        "direct": figures.direct,
        "first_write_bytes_per_s": round(figures.first_bytes_per_s),
        "write_bytes_per_s": {str(p): round(r) for p, r in figures.write_bytes_per_s.items()},
        "read_bytes_per_s": round(figures.read_bytes_per_s),
        "flush_s": round(figures.flush_s, 7),
        "slowest_flush_s": round(figures.slowest_flush_s, 7),
        "writers": figures.writers,
        "checkpoint_s": {str(m): round(figures.checkpoint_s(m), 4) for m in EXAMPLES},
        "recover_s": {str(m): round(figures.recover_s(m), 4) for m in EXAMPLES},
    }


def as_text(figures: Figures) -> str:
    brief, writers = render.brief, figures.writers
    cells = [
        ("first write, 2 writers", render.rate(figures.first_bytes_per_s)),
        *(
            (f"write, {render.plural(p, 'writer')}", render.rate(rate))
            for p, rate in figures.write_bytes_per_s.items()
        ),
        ("read, 2 threads", render.rate(figures.read_bytes_per_s)),
        ("flush of 4 KiB, median", brief(figures.flush_s)),
        ("flush of 4 KiB, slowest", brief(figures.slowest_flush_s)),
    ]
    times = [
        (render.size(m), brief(figures.checkpoint_s(m)), brief(figures.recover_s(m)))
        for m in EXAMPLES
    ]
    refused = "" if figures.direct else "\nwarning: direct I/O is refused here: pccheckd refuses it"
    return f"""\
{figures.place}: {"direct" if figures.direct else "buffered"} I/O, a file of \
{render.size(figures.size)}, chunks of {render.size(figures.chunk)}{refused}

{render.table(("measurement", "result"), cells)}

With {render.plural(writers, "writer")} (--writers {writers}), at these rates:

{render.table(("checkpoint", "durable after", "read in"), times)}

How often to save, and with how many slots: pccheckctl tune"""
