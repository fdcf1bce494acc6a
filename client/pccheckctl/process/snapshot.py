"""`pccheckctl snapshot`: saves a process that knows nothing of it, once or again and again."""

from __future__ import annotations

import argparse
import dataclasses
import time

from pccheck_process import taking
from pccheck_process.looking import Looked
from pccheck_process.taken import ProcessSnapshot
from pccheck_process.taking import SnapshotWanted
from pccheck_store.observer import Observer
from pccheck_wire.basics import size_text
from pccheck_wire.errors import PccheckError, RefusedError, UsageError
from pccheckctl.output.documents import Document, answer, note, part, whole

#: What CRIU copies in a second, on a machine of today; the disk counts if the pool is smaller.
_COPY_BYTES_PER_S = 3e9
_FIXED_S = 0.2


def run(arguments: argparse.Namespace) -> int:
    """0 when the snapshot is durable, or could be taken (--dry-run)."""
    if arguments.storage is not None:
        raise UsageError("a snapshot is taken by a daemon", hint="name it with --socket")
    wanted = SnapshotWanted(
        job=arguments.name or "", tree=arguments.tree, socket=arguments.socket,
        leave_running=arguments.leave_running or arguments.every is not None,
    )  # fmt: skip
    if arguments.dry_run:
        return _dry_run(arguments, wanted)
    if arguments.every is not None:
        return _repeat(arguments, wanted)
    _print(arguments, taking.snapshot(arguments.pid, wanted))
    return 0


def _print(arguments: argparse.Namespace, taken: ProcessSnapshot) -> None:
    answer(arguments, document(taken), lambda: as_text(taken))


def document(taken: ProcessSnapshot) -> Document:
    found = {"schema": 1, **dataclasses.asdict(taken)}
    found["bytes"] = found.pop("nbytes")
    return found


def as_text(taken: ProcessSnapshot) -> str:
    then = "goes on" if taken.running else "has ended"
    lines = [
        f"job {taken.job}, step {taken.step}: {size_text(taken.nbytes)}, durable after "
        f"{taken.durable_s:.2f} s",
        f"process {taken.pid} stood still for {taken.pause_s:.2f} s, and {then}",
        *taken.notes,
        f"to restore it: pccheckctl restore-process {taken.job}",
    ]
    return "\n".join(lines)


def _repeat(arguments: argparse.Namespace, wanted: SnapshotWanted) -> int:
    """Until the process ends. A snapshot that fails is reported, and the next one is tried."""
    pid, failed = arguments.pid, 0
    with taking.Watched(pid) as watched:
        while watched.lives():
            began_s = time.monotonic()
            try:
                _print(arguments, taking.snapshot(pid, wanted))
            except RefusedError:
                raise
            except PccheckError as error:
                if not watched.lives():
                    break
                failed += 1
                note(f"{error}; the next try comes {arguments.every:g} s after this one began")
            watched.wait(began_s + arguments.every - time.monotonic())
    note(f"process {pid} has ended")
    return 1 if failed else 0


def _dry_run(arguments: argparse.Namespace, wanted: SnapshotWanted) -> int:
    looked = taking.look_at(arguments.pid, wanted)
    with Observer(arguments.socket) as observer:
        status = observer.status()
    free_bytes = whole(part(status, "storage"), "free_bytes")
    found = _expected(looked, free_bytes, whole(part(status, "daemon"), "slots"))
    answer(arguments, found, lambda: _expected_text(looked, found))
    return 1 if looked.refusals else 0


def _expected(looked: Looked, free_bytes: int, slots: int) -> Document:
    return {
        "schema": 1,
        "pid": looked.pid,
        "processes": len(looked.tree),
        "image_bytes": looked.image_bytes,
        "pause_s": _FIXED_S + looked.image_bytes / _COPY_BYTES_PER_S,
        "volume_bytes": taking.bound(looked) * slots,
        "free_bytes": free_bytes,
        "refusals": [dataclasses.asdict(one) for one in looked.refusals],
        "notes": [*looked.notes],
    }


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _expected_text(looked: Looked, found: Document) -> str:
    lines = [
        f"process {looked.pid} ({looked.comm}), {_count(len(looked.tree))}: about "
        f"{size_text(looked.image_bytes)}",
        f"expected pause: about {found['pause_s']:.1f} s, longer if the daemon's --dram is smaller "
        "than the image",
        f"volume: {size_text(whole(found, 'volume_bytes'))}, of "
        f"{size_text(whole(found, 'free_bytes'))} free",
        *(f"note: {text}" for text in looked.notes),
        *(f"refused: {one.what}\n  way out: {one.fix}" for one in looked.refusals),
    ]
    if not looked.refusals:
        lines.append("no reason to refuse")
    return "\n".join(lines)
