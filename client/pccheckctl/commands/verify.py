"""`pccheckctl verify`: reads and checks every byte of the checkpoints, or a part of each."""

from __future__ import annotations

import argparse
import secrets

from pccheck_native import catalog, subset
from pccheck_store import directory
from pccheck_store.reading.errors import RecycledError, problem_of
from pccheck_store.reading.source import Source
from pccheck_wire.errors import DamagedError, NoCheckpointError, UnreadableError, UsageError
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, whole
from pccheckctl.output.progress import Bar, bytes_read
from pccheckctl.source import files

BAD = ("damaged", "unreadable")
_Part = subset.Subset | None
_Unreadable = list[catalog.Unreadable]


def run(arguments: argparse.Namespace) -> int:
    """0 when everything is valid, 14 when something is damaged or cannot be read, 13 when there is
    no checkpoint."""
    storage = files(arguments)
    step, sequence = arguments.step, arguments.sequence
    wanted: list[catalog.StoredCheckpoint] = []
    unreadable: _Unreadable = []
    for job in arguments.job or [""]:
        stored = storage.held(uid=arguments.uid, job=job, rank=arguments.rank)
        mine = directory.matching(stored.checkpoints, step=step, sequence=sequence)
        if not mine and not stored.unreadable and not stored.incomplete:
            asked = {"of job": repr(job) if job else None, "of rank": arguments.rank,
                     "of step": step, "with sequence": sequence}  # fmt: skip
            which = "".join(
                f" {word} {value}" for word, value in asked.items() if value is not None
            )
            raise NoCheckpointError(
                f"there is no checkpoint{which} in {storage.path}", hint="see: pccheckctl list"
            )
        wanted += mine
        unreadable += stored.unreadable
        unreadable += (
            catalog.Unreadable(file, "RECORD_LOST", catalog.RECORD_LOST)
            for file in stored.incomplete
        )
    part = chosen(arguments)
    results = []
    payload = sum(one.payload_bytes for one in wanted)
    with Bar("verify", payload, show=not arguments.json, read=bytes_read) as bar:
        for one in wanted:
            results.append(check(storage, one, part))
            bar.advance(one.payload_bytes)
    found = results, unreadable, part
    answer(arguments, document(*found), lambda: as_text(*found))
    bad = unreadable or any(one["result"] in BAD for one in results)
    return DamagedError.exit_code if bad else 0


def chosen(arguments: argparse.Namespace) -> _Part:
    """What --read-data-subset and --seed ask for. Raises UsageError."""
    if arguments.subset is None:
        return None
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    if not 0 <= seed <= subset.SEED_MAX:
        raise UsageError(f"--seed must be from 0 to {subset.SEED_MAX} (got {seed})")
    try:
        return subset.parse(arguments.subset, seed)
    except ValueError as error:
        raise UsageError(f"--read-data-subset: {error}") from error


def check(storage: Source, one: catalog.StoredCheckpoint, part: _Part) -> Document:
    def result(name: str, reason: str = "", read_bytes: int = 0) -> Document:
        made = {"result": name, "reason": reason, "read_bytes": read_bytes}
        about = catalog.checkpoint_document(one) | made
        del about["damaged"]  # what an earlier read found; `result` is what this one found
        return about

    try:
        read_bytes, cleared = storage.verify(one, part)
    except RecycledError as error:
        return result("recycled", error.message)
    except UnreadableError as error:
        return result("unreadable", error.message)
    except DamagedError as error:
        return result("damaged", problem_of(error))
    if not one.is_damaged:
        return result("ok", read_bytes=read_bytes)
    if cleared:
        reason = "an earlier read found damage; the data is valid, and the flag was removed"
        return result("ok", reason, read_bytes)
    reason = "an earlier read found damage; the data is valid now, but the flag stays: "
    reason += (
        "see the log of pccheckd"
        if storage.served and part is None
        else "only a full verify through pccheckd removes it"
    )
    return result("damaged", reason, read_bytes)


def document(results: list[Document], unreadable: _Unreadable, part: _Part) -> Document:
    """What `verify --json` prints."""
    return {
        "schema": 1,
        "subset": {"text": part.text, "seed": part.seed} if part else None,
        "read_bytes": _sum(results, "read_bytes"),
        "checkpoints": results,
        "unreadable": [
            {"path": str(item.file.path), "reason": directory.reason_of(item)}
            for item in unreadable
        ],
    }


def _sum(results: list[Document], key: str) -> int:
    return sum(whole(one, key) for one in results)


def as_text(results: list[Document], unreadable: _Unreadable, part: _Part) -> str:
    lines: list[tuple[object, ...]] = [
        (one["job"], one["rank"], one["sequence"], one["step"],
         render.size(whole(one, "payload_bytes")), one["result"], one["reason"])
        for one in results
    ]  # fmt: skip
    lines += [
        (item.file.job, item.file.rank, "", "", "", _result_of(item), directory.reason_of(item))
        for item in unreadable
    ]
    table = render.table(("job", "rank", "sequence", "step", "size", "result", "reason"), lines)
    found = [*(r["result"] for r in results), *map(_result_of, unreadable)]
    valid, damaged, lost = (found.count(name) for name in ("ok", *BAD))
    ending = f"{valid} ok, {damaged} damaged"
    ending += f", {lost} unreadable" if lost else ""
    if part:
        total = render.size(_sum(results, "payload_bytes"))
        read = render.size(_sum(results, "read_bytes"))
        again = f"; --seed {part.seed} reads the same again" if not part.parts else ""
        ending += f"\nread {read} of {total} ({part.text}{again})"
    return f"{table}\n\n{ending}"


def _result_of(item: catalog.Unreadable) -> str:
    """The result for a volume. A read error is no damage: the volume may be readable later."""
    return "damaged" if item.code_name in directory.DAMAGED_CODES else "unreadable"
