"""`pccheckctl verify`: reads every byte of the checkpoints, or a part of each, and checks it."""

from __future__ import annotations

import argparse
import secrets
from dataclasses import dataclass

from pccheck_native import catalog, subset
from pccheck_wire.errors import (
    DamagedError,
    NoCheckpointError,
    PccheckError,
    UnreadableError,
    UsageError,
)
from pccheckctl.output import render
from pccheckctl.output.documents import Document, print_json, say
from pccheckctl.output.progress import Bar, bytes_read
from pccheckctl.source import directory
from pccheckctl.source.choice import files
from pccheckctl.source.readers import RecycledError, Store, read_tree

BAD = ("damaged", "unreadable")


@dataclass(frozen=True, slots=True)
class Result:
    checkpoint: catalog.Checkpoint
    result: str  # "ok", "damaged", "unreadable", "recycled"
    reason: str = ""
    read_bytes: int = 0


def run(arguments: argparse.Namespace) -> int:
    """0 when everything is whole, 14 when something is damaged or cannot be read, 13 when there is
    nothing."""
    storage = files(arguments)
    wanted: list[catalog.Checkpoint] = []
    unreadable: list[catalog.Unreadable] = []
    for job in arguments.job or [""]:
        found = storage.scan(uid=arguments.uid, job=job, rank=arguments.rank)
        mine = directory.matching(
            found.checkpoints, step=arguments.step, sequence=arguments.sequence
        )
        if not mine and not found.unreadable:
            raise NoCheckpointError(
                f"there is no checkpoint{_asked(arguments, job)} in {storage.path}",
                hint="see: pccheckctl list",
            )
        wanted += mine
        unreadable += found.unreadable
    denied = [item for item in unreadable if item.code_name in ("EACCES", "EPERM")]
    if denied:
        raise directory.error_of(denied[0])
    part = chosen(arguments)
    payload = sum(one.payload_bytes for one in wanted)
    results = []
    with Bar("verify", payload, show=not arguments.json, read=bytes_read) as bar:
        for one in wanted:
            results.append(check(storage, one, part))
            bar.advance(one.payload_bytes)
    bad = bool(unreadable) or any(one.result in BAD for one in results)
    if arguments.json:
        print_json(document(results, unreadable, part))
    else:
        say(as_text(results, unreadable, part))
    return DamagedError.exit_code if bad else 0


def _asked(arguments: argparse.Namespace, job: str) -> str:
    words = {
        "of job": repr(job) if job else None, "of rank": arguments.rank,
        "of step": arguments.step, "with sequence": arguments.sequence,
    }  # fmt: skip
    return "".join(f" {word} {value}" for word, value in words.items() if value is not None)


def chosen(arguments: argparse.Namespace) -> subset.Subset | None:
    """What --read-data-subset and --seed ask for. Raises UsageError."""
    if arguments.subset is None:
        return None
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    if not 0 <= seed <= subset.SEED_MAX:
        raise UsageError(f"--seed: {seed} is not within 0..{subset.SEED_MAX}")
    try:
        return subset.parse(arguments.subset, seed)
    except ValueError as error:
        raise UsageError(f"--read-data-subset: {error}") from error


def check(storage: Store, one: catalog.Checkpoint, part: subset.Subset | None) -> Result:
    if one.is_damaged and part is None and storage.served:
        return _flagged(storage, one)
    try:
        with storage.reader(one) as reader:
            read_bytes = reader.verify(part)
            read_tree(reader)
    except RecycledError as error:
        return Result(one, "recycled", error.message)
    except UnreadableError as error:
        return Result(one, "unreadable", error.message)
    except PccheckError as error:
        return Result(one, "damaged", error.message.rpartition(" is damaged: ")[2])
    if one.is_damaged:
        known = "a reader found it damaged before; it reads well now"
        more = "all of it, through pccheckd, takes the flag away"
        return Result(one, "damaged", f"{known}: {more}", read_bytes)
    return Result(one, "ok", "", read_bytes)


def _flagged(storage: Store, one: catalog.Checkpoint) -> Result:
    """Known to be damaged. Only the daemon, which writes the volume, may take that back, and only
    for what it has read itself."""
    from pccheckctl.source.remote import verified

    try:
        read_bytes, cleared = verified(storage.socket, one)
    except NoCheckpointError as error:
        return Result(one, "recycled", error.message)
    except UnreadableError as error:
        return Result(one, "unreadable", error.message)
    except DamagedError as error:
        return Result(one, "damaged", error.message)
    if not cleared:
        return Result(one, "damaged", "it reads well, but the flag stays: see the log", read_bytes)
    told = "a reader had found it damaged; it reads well, and is no longer flagged"
    return Result(one, "ok", told, read_bytes)


def document(
    results: list[Result],
    unreadable: list[catalog.Unreadable],
    part: subset.Subset | None = None,
) -> Document:
    """What `verify --json` prints."""
    return {
        "schema": 1,
        "subset": {"text": part.text, "seed": part.seed} if part else None,
        "read_bytes": sum(one.read_bytes for one in results),
        "checkpoints": [
            {
                **catalog.checkpoint_document(one.checkpoint),
                "result": one.result,
                "reason": one.reason,
                "read_bytes": one.read_bytes,
            }
            for one in results
        ],
        "unreadable": [
            {"path": str(item.file.path), "reason": directory.reason_of(item)}
            for item in unreadable
        ],
    }


def as_text(
    results: list[Result],
    unreadable: list[catalog.Unreadable],
    part: subset.Subset | None = None,
) -> str:
    lines: list[tuple[object, ...]] = [
        (r.checkpoint.job, r.checkpoint.rank, r.checkpoint.sequence, r.checkpoint.step,
         render.size(r.checkpoint.payload_bytes), r.result, r.reason)
        for r in results
    ]  # fmt: skip
    lines += [
        (item.file.job, item.file.rank, "", "", "", "unreadable", directory.reason_of(item))
        for item in unreadable
    ]
    headings = ("job", "rank", "sequence", "step", "size", "result", "reason")
    counts = {name: sum(r.result == name for r in results) for name in ("ok", *BAD)}
    lost = f", {counts['unreadable']} unreadable" if counts["unreadable"] else ""
    return (
        render.table(headings, lines)
        + f"\n\n{counts['ok']} ok, {counts['damaged'] + len(unreadable)} damaged{lost}"
        + (_share(results, part) if part else "")
    )


def _share(results: list[Result], part: subset.Subset) -> str:
    """How much of it was looked at, and how to look at the same again."""
    total = sum(one.checkpoint.payload_bytes for one in results)
    read = sum(one.read_bytes for one in results)
    again = f"; --seed {part.seed} reads the same again" if not part.parts else ""
    return f"\nread {render.size(read)} of {render.size(total)} ({part.text}{again})"
