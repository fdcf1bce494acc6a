"""`pccheckctl bench`: what a disk does with checkpoints, measured on a file of its own."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path
from typing import NamedTuple

from pccheck_native import NativeError, measure_engine
from pccheck_wire.errors import StorageFullError, UsageError
from pccheck_wire.units import GIB, MIB

from . import disk, render
from .output import Document, part, print_json, say, text
from .progress import Bar

SIZE_DEFAULT, SIZE_MIN = 2 * GIB, 64 * MIB
CHUNK_DEFAULT = 16 * MIB
WRITERS = (1, 2, 4)
#: Bounds of the parts, together below half a minute.
FIRST_LIMIT_S, PASS_LIMIT_S, READ_LIMIT_S, FLUSH_LIMIT_S = 8.0, 3.5, 3.5, 2.0
#: The storage engines of pccheckd, in turn: rounds, and how long one of them should take.
ENGINES, ENGINE_ROUNDS, ENGINE_S, ENGINE_WRITERS = ("pwrite", "mmap", "pmem"), 3, 0.7, 2
FLUSHES = 64
LEFT_FREE = 0.1  # of the file system: a full one hurts whoever else is on it
GOOD_ENOUGH = 0.95
EXAMPLES = (1 * GIB, 10 * GIB, 100 * GIB)


class Figures(NamedTuple):
    """Of one disk; also what `tune` reckons with."""

    place: str
    size: int
    chunk: int
    direct: bool
    first_bytes_per_s: float
    write_bytes_per_s: dict[int, float]  # by writers
    read_bytes_per_s: float
    flush_s: float
    slowest_flush_s: float
    engine_bytes_per_s: dict[str, float]  # with the flush; without the engines not possible here

    @property
    def writers(self) -> int:
        """The fewest that are as good as the best."""
        best = max(self.write_bytes_per_s.values())
        return next(p for p, rate in sorted(self.write_bytes_per_s.items())
                    if rate >= GOOD_ENOUGH * best)  # fmt: skip

    @property
    def best_bytes_per_s(self) -> float:
        return max(self.write_bytes_per_s.values())

    def checkpoint_s(self, nbytes: int, writers: int | None = None) -> float:
        """From the first byte to durable: written, flushed, its record written and flushed."""
        return nbytes / self.write_bytes_per_s[writers or self.writers] + 2 * self.flush_s


def run(arguments: argparse.Namespace) -> int:
    figures = measure(
        place(arguments), size=arguments.size, chunk=arguments.chunk or CHUNK_DEFAULT,
        writers=WRITERS if arguments.writers is None else (arguments.writers,),
        quiet=arguments.json,
    )  # fmt: skip
    if arguments.json:
        print_json(document(figures))
    else:
        say(as_text(figures))
    return 0


def place(arguments: argparse.Namespace) -> Path:
    """The directory given, the running daemon's, or PCCHECK_STORAGE's."""
    if arguments.storage:
        return Path(arguments.storage).absolute()
    from .source import choose

    with choose(arguments) as chosen:
        return Path(text(part(chosen.status(), "storage"), "path"))


def measure(
    where: Path, *, size: int | None, chunk: int, writers: tuple[int, ...] = WRITERS,
    quiet: bool = True,
) -> Figures:  # fmt: skip
    """Raises StorageFullError, before anything is written, when the file would fill the disk."""
    if chunk % disk.ALIGN:
        raise UsageError(f"--chunk: {chunk} is not a multiple of 4KiB")
    with disk.Scratch(where) as scratch:
        size = _fitting(where, size, chunk)
        scratch.reserve(size)
        parts = len(writers) + 4
        with Bar("bench", parts, show=not quiet, unit="part") as bar:
            sizes = {"size": size, "chunk": chunk}
            first = disk.sequential(
                scratch.fd, **sizes, threads=2, write=True, limit_s=FIRST_LIMIT_S
            )
            written = first.bytes // chunk * chunk  # only what is there can be overwritten
            sizes["size"] = max(chunk, written)
            bar.advance(1)
            rates = {}
            for threads in writers:
                rates[threads] = disk.sequential(
                    scratch.fd, **sizes, threads=threads, write=True, limit_s=PASS_LIMIT_S
                ).bytes_per_s
                bar.advance(1)
            if not scratch.direct:  # or the page cache would be measured
                os.posix_fadvise(scratch.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read = disk.sequential(
                scratch.fd, **sizes, threads=2, write=False, limit_s=READ_LIMIT_S
            )
            bar.advance(1)
            flushes = disk.flushes(scratch.fd, count=FLUSHES, limit_s=FLUSH_LIMIT_S)
            bar.advance(1)
            seconds_worth = int(ENGINE_S * max(rates.values())) // chunk * chunk
            engines = _engines(scratch.fd, max(chunk, min(sizes["size"], seconds_worth)), chunk)
        return Figures(
            str(where), size, chunk, scratch.direct, first.bytes_per_s, rates, read.bytes_per_s,
            statistics.median(flushes), flushes[-1], engines,
        )  # fmt: skip


def _engines(fd: int, size: int, chunk: int) -> dict[str, float]:
    """Bytes per second of each engine that is possible here, the medians of rounds in turn."""
    seconds: dict[str, list[float]] = {}
    possible = list(ENGINES)
    for _ in range(ENGINE_ROUNDS):
        for engine in tuple(possible):
            try:
                took = measure_engine(fd, engine, size, chunk, ENGINE_WRITERS)
            except NativeError:
                possible.remove(engine)
            else:
                seconds.setdefault(engine, []).append(took)
    return {engine: size / statistics.median(took) for engine, took in seconds.items()}


def _fitting(where: Path, wanted: int | None, chunk: int) -> int:
    """The size of the file: what is asked for, or what does not fill the disk."""
    usage = shutil.disk_usage(where)
    room = int(usage.free - LEFT_FREE * usage.total)
    size = min(SIZE_DEFAULT, room) if wanted is None else wanted
    size = max(size, chunk) // chunk * chunk
    if size > room or room < min(SIZE_MIN, size):
        raise StorageFullError(
            f"{where} has {render.size(usage.free)} free of {render.size(usage.total)}: a file of "
            f"{render.size(max(size, SIZE_MIN))} would leave less than a tenth",
            hint="use a smaller --size, or free some room: pccheckctl drop JOB",
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
        "engine_bytes_per_s": {e: round(r) for e, r in figures.engine_bytes_per_s.items()},
        "writers": figures.writers,
        "checkpoint_s": {str(m): round(figures.checkpoint_s(m), 4) for m in EXAMPLES},
        "recover_s": {str(m): round(m / figures.read_bytes_per_s, 4) for m in EXAMPLES},
    }


def as_text(figures: Figures) -> str:
    lines = [
        f"{figures.place}: {'direct' if figures.direct else 'buffered'} I/O, a file of "
        f"{render.size(figures.size)}, chunks of {render.size(figures.chunk)}"
    ]
    if not figures.direct:
        lines.append("warning: O_DIRECT is refused here, so that pccheckd would be, too")
    cells: list[tuple[str, str]] = [
        ("first write, 2 writers", render.rate(figures.first_bytes_per_s))
    ]
    cells += [
        (f"write, {render.plural(p, 'writer')}", render.rate(rate))
        for p, rate in figures.write_bytes_per_s.items()
    ]
    cells += [
        ("read, 2 threads", render.rate(figures.read_bytes_per_s)),
        ("flush of 4 KiB, median", render.brief(figures.flush_s)),
        ("flush of 4 KiB, slowest", render.brief(figures.slowest_flush_s)),
    ]
    cells += [
        (f"--engine {engine}, {ENGINE_WRITERS} writers and a flush", render.rate(rate))
        for engine, rate in figures.engine_bytes_per_s.items()
    ]
    lines += ["", render.table(("what", "measured"), cells), ""]
    times = [
        (render.size(m), render.brief(figures.checkpoint_s(m)),
         render.brief(m / figures.read_bytes_per_s))
        for m in EXAMPLES
    ]  # fmt: skip
    lines += [
        f"with {render.plural(figures.writers, 'writer')} (--writers {figures.writers}), at these "
        "rates:",
        "",
        render.table(("checkpoint", "written and durable in", "read in"), times),
        "",
        "How often to save, and with how many slots: pccheckctl tune",
    ]
    return "\n".join(lines)
