"""`pccheckctl list`: the checkpoints of each job and rank, newest first."""

from __future__ import annotations

import argparse
import time

from pccheck_wire.errors import DamagedError, PccheckError
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, note, number, rows, text, whole
from pccheckctl.source import choose

HEADINGS = ("job", "rank", "sequence", "step", "age", "size", "written", "base", "run", "flags")


def run(arguments: argparse.Namespace) -> int:
    """0; 14 when a volume cannot be read, so that checkpoints may be missing from the list, as
    `verify` does; 13 when the job that is asked for has no checkpoint, as `show` does."""
    if arguments.watch:
        from pccheckctl.output import watch

        return watch.run(arguments, fetch, as_text)
    every = _listing(arguments)
    document = filtered(every, arguments.rank)
    hidden = rows(document, "unreadable") + rows(document, "incomplete")
    found = (rows(document, key) for key in ("checkpoints", "in_memory", "unreadable"))
    if arguments.job and not any(found):
        raise _nothing(arguments, every)
    code = DamagedError.exit_code if hidden else 0
    answer(arguments, document, lambda: as_text(document))
    if not arguments.json:
        for item in rows(document, "unreadable"):
            note(f"{text(item, 'path')} cannot be read: {text(item, 'reason')}")
        for item in rows(document, "incomplete"):
            note(f"{text(item, 'path')}: {text(item, 'reason')}")
    return code


def fetch(arguments: argparse.Namespace) -> Document:
    return filtered(_listing(arguments), arguments.rank)


def _listing(arguments: argparse.Namespace) -> Document:
    with choose(arguments) as chosen:
        return chosen.listing(arguments.job or "", uid=arguments.uid)


def _nothing(arguments: argparse.Namespace, every: Document) -> PccheckError:
    from pccheck_store import directory  # what an answer does not need is imported late

    if rows(every, "checkpoints") or rows(every, "unreadable"):  # of another rank
        return directory.missing(arguments.job, arguments.rank)
    return directory.none_of(arguments.job, text(every, "storage"))


def filtered(document: Document, rank: int | None) -> Document:
    wanted = (rank, None)  # None: a directory that may hold volumes of each rank
    return document | {
        key: [item for item in rows(document, key) if rank is None or item.get("rank") in wanted]
        for key in ("volumes", "checkpoints", "unreadable", "incomplete", "in_memory")
    }


def as_text(document: Document, *, now_s: float | None = None) -> str:
    """The table; `now_s` is wall time."""
    now_s = time.time() if now_s is None else now_s
    checkpoints = rows(document, "checkpoints") + rows(document, "in_memory")
    if not checkpoints:
        return "no checkpoint can be read" if rows(document, "unreadable") else "no checkpoints"
    checkpoints.sort(key=lambda one: (whole(one, "uid"), text(one, "job"), whole(one, "rank"),
                                      -whole(one, "sequence")))  # fmt: skip
    volumes = rows(document, "volumes")
    finished = {text(volume, "path") for volume in volumes if volume.get("done") is True}
    lines = [
        (
            job_of(one, checkpoints),
            one.get("rank"),
            one.get("sequence"),
            one.get("step"),
            render.age(age_s(one, now_s)),
            render.size(whole(one, "payload_bytes")),
            None if one.get("own_bytes") is None else render.size(whole(one, "own_bytes")),
            one.get("base_step"),
            one.get("incarnation"),
            flags(one | {"finished": text(one, "volume") in finished}),
        )
        for one in checkpoints
    ]
    if any(one.get("base_step") is not None for one in checkpoints):
        return render.table(HEADINGS, lines)
    shown = [heading for heading in HEADINGS if heading not in ("written", "base")]
    return render.table(shown, [(*line[:6], *line[8:]) for line in lines])


def age_s(one: Document, now_s: float) -> float | None:
    """Seconds since it became durable, or was copied to memory; None when that is not known."""
    wall_ns = number(one, "wall_ns")
    return None if wall_ns is None else now_s - wall_ns / 1e9


def job_of(one: Document, among: list[Document]) -> str:
    """The name of its job, with the user where there are several."""
    uids = {other.get("uid") for other in among}
    return text(one, "job") if len(uids) == 1 else f"{one.get('uid')}/{one.get('job')}"


def flags(one: Document) -> str:
    shown = ("in_memory", "global", "pinned", "protected", "damaged", "stale", "finished")
    kind = ["process"] if one.get("kind") == "image" else []
    return ", ".join([*kind, *(n.replace("_", " ") for n in shown if one.get(n) is True)])
