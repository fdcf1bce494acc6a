"""`pccheckctl verify`: reads every byte of the checkpoints and checks it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pccheck_native import catalog
from pccheck_wire.errors import DamagedError, NoCheckpointError, PccheckError

from . import offline, render
from .output import Document, print_json
from .reading import RecycledError, Store, read_tree
from .source import files


@dataclass(frozen=True, slots=True)
class Result:
    checkpoint: catalog.Checkpoint
    result: str  # "ok", "damaged", "recycled"
    reason: str = ""


def run(arguments: argparse.Namespace) -> int:
    """0 when everything is whole, 14 when something is damaged, 13 when there is nothing."""
    storage = files(arguments)
    found = storage.scan(uid=arguments.uid, job=arguments.job, rank=arguments.rank)
    wanted = offline.matching(found.checkpoints, step=arguments.step, sequence=arguments.sequence)
    denied = [item for item in found.unreadable if item.code_name in ("EACCES", "EPERM")]
    if denied:
        raise offline.error_of(denied[0])
    if not wanted and not found.unreadable:
        what = f"job {arguments.job!r}" if arguments.job else "any job"
        raise NoCheckpointError(
            f"{storage.path} holds no such checkpoint of {what}", hint="see: pccheckctl list"
        )
    results = [check(storage, one) for one in wanted]
    bad = bool(found.unreadable) or any(one.result == "damaged" for one in results)
    if arguments.json:
        print_json(document(results, found.unreadable))
    else:
        print(as_text(results, found.unreadable))
    return DamagedError.exit_code if bad else 0


def check(storage: Store, one: catalog.Checkpoint) -> Result:
    try:
        with storage.reader(one) as reader:
            reader.verify()
            read_tree(reader)
    except RecycledError as error:
        return Result(one, "recycled", error.message)
    except PccheckError as error:
        return Result(one, "damaged", error.message)
    if one.is_damaged:
        return Result(one, "damaged", "a reader found it damaged before; it reads well now")
    return Result(one, "ok")


def document(results: list[Result], unreadable: list[catalog.Unreadable]) -> Document:
    """What `verify --json` prints."""
    return {
        "schema": 1,
        "checkpoints": [
            {
                **catalog.checkpoint_document(one.checkpoint),
                "result": one.result,
                "reason": one.reason,
            }
            for one in results
        ],
        "unreadable": [
            {"path": str(item.file.path), "reason": offline.reason_of(item)} for item in unreadable
        ],
    }


def as_text(results: list[Result], unreadable: list[catalog.Unreadable]) -> str:
    lines: list[tuple[object, ...]] = [
        (r.checkpoint.job, r.checkpoint.rank, r.checkpoint.sequence, r.checkpoint.step,
         render.size(r.checkpoint.payload_bytes), r.result, r.reason)
        for r in results
    ]  # fmt: skip
    lines += [
        (item.file.job, item.file.rank, "", "", "", "unreadable", offline.reason_of(item))
        for item in unreadable
    ]
    headings = ("job", "rank", "sequence", "step", "size", "result", "reason")
    counts = {name: sum(r.result == name for r in results) for name in ("ok", "damaged")}
    return (
        render.table(headings, lines)
        + f"\n\n{counts['ok']} ok, {counts['damaged'] + len(unreadable)} damaged"
    )
