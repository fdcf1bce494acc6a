"""`pccheckctl trace`: when the last checkpoints did what, as a Chrome trace.

The document opens in https://ui.perfetto.dev and chrome://tracing. A process is a rank; its tracks:

    gate        the trainer waited until a copy had read its tensors
    admission   a request waited for a lane and a slot
    in memory   a memory-only checkpoint: the copy, and how long it stayed in the daemon's memory
    lane N      the copy to the daemon's memory; below it write, flush and publish, which overlap

There are as many lanes as checkpoints were in flight at once: no two overlap on a lane. A
memory-only checkpoint takes one when it is written.
Times are microseconds of CLOCK_MONOTONIC."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, rows, text, whole, write
from pccheckctl.output.files import write_text
from pccheckctl.source import daemon

_GATE, _ADMISSION, _LANES, _MEMORY = 1, 100, 200, 300
#: The parts of a checkpoint, in order: name, from and to. They may overlap.
PHASES = (
    ("wait", "requested", "begin"),
    ("copy", "begin", "sealed"),
    ("write", "first_write", "written"),
    ("flush", "written", "flushed"),
    ("publish", "flushed", "durable"),
)
#: Colours that both viewers know.
_COLOURS = {"failed": "terrible", "superseded": "grey", "skipped": "grey"}


def run(arguments: argparse.Namespace) -> int:
    """0, also without any checkpoint."""
    with daemon(arguments) as observer:
        document = observer.trace(arguments.last)
    if arguments.uid is not None:
        items = rows(document, "checkpoints")
        document["checkpoints"] = [one for one in items if one.get("uid") == arguments.uid]
    made = json.dumps(chrome(document))
    if arguments.output in (None, "-"):
        write(made)
        return 0
    write_text(arguments.output, made, force=arguments.force)
    path, count = arguments.output, len(rows(document, "checkpoints"))
    answer(
        arguments,
        {"schema": 1, "path": path, "checkpoints": count},
        lambda: (
            f"{path}: {render.plural(count, 'checkpoint')}; open it in "
            "https://ui.perfetto.dev (which uploads nothing) or chrome://tracing"
        ),
    )
    return 0


def chrome(document: Document) -> Document:
    """The trace of the daemon's document."""
    now_ns = whole(document, "now_ns")
    ranks: dict[tuple[int, str, int], list[Document]] = {}
    for item in sorted(rows(document, "checkpoints"), key=lambda one: whole(one, "requested")):
        key = whole(item, "uid"), text(item, "job"), whole(item, "rank")
        ranks.setdefault(key, []).append(item)
    events: list[Document] = []
    for process, (key, mine) in enumerate(sorted(ranks.items()), start=1):
        name = f"job {key[1]!r} rank {key[2]} (uid {key[0]})"
        events.append(_meta(process, 0, "process_name", name=name))
        events.append(_meta(process, 0, "process_sort_index", sort_index=process))
        events += _rank(process, mine, now_ns)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schema": 1,
            "clock": "CLOCK_MONOTONIC",
            "wall_ns_at_zero": whole(document, "wall_ns") - now_ns,
            **document,  # for `pccheckctl report --trace`
        },
    }


def free_lane(ends_ns: list[int], begin_ns: int, end_ns: int) -> int:
    """The lowest lane that is free at `begin_ns`; `ends_ns` has the last end of each."""
    for lane, last_ns in enumerate(ends_ns):
        if last_ns <= begin_ns:
            ends_ns[lane] = end_ns
            return lane
    ends_ns.append(end_ns)
    return len(ends_ns) - 1


def lane_begin(item: Document) -> int:
    """When it took a lane, in ns; 0: never."""
    return whole(item, "first_write" if item.get("in_memory") is True else "begin")


def _rank(process: int, items: list[Document], now_ns: int) -> Iterator[Document]:
    """Slices of one rank, and the names of the tracks that they need."""
    waits: list[int] = []
    lanes: list[int] = []
    memory: list[int] = []
    held_any = False
    begun = []
    for item in items:
        asked, begin = whole(item, "requested"), whole(item, "begin")
        held_at, held = whole(item, "held_at"), whole(item, "held")
        if held:
            held_any = True
            yield _slice(process, _GATE, "held by the gate", held_at, held_at + held, {})
        until = begin or whole(item, "ended") or now_ns
        track = _ADMISSION + free_lane(waits, asked, until)
        yield _slice(process, track, f"wait {whole(item, 'step')}", asked, until, _facts(item))
        if begin:
            begun.append(item)
    for item in sorted(begun, key=lambda one: whole(one, "begin")):
        if item.get("in_memory") is True:
            yield from _parked(process, memory, item, now_ns)
    written = [item for item in begun if lane_begin(item)]
    for item in sorted(written, key=lane_begin):
        end_ns = whole(item, "ended") or now_ns
        lane = free_lane(lanes, lane_begin(item), end_ns)
        yield from _saved(process, _LANES + 2 * lane, item, end_ns)
    yield from _in_flight(process, written)
    if held_any:
        yield from _track(process, _GATE, "gate: the trainer is held")
    for lane in range(len(waits)):
        yield from _track(process, _ADMISSION + lane, "admission")
    for lane in range(len(memory)):
        yield from _track(process, _MEMORY + lane, "in memory only")
    for lane in range(len(lanes)):
        yield from _track(process, _LANES + 2 * lane, f"lane {lane}: copy")
        yield from _track(process, _LANES + 2 * lane + 1, f"lane {lane}: write, flush, publish")


def _parked(process: int, lanes: list[int], item: Document, now_ns: int) -> Iterator[Document]:
    """Until it was written, or a newer one replaced it."""
    begin, end_ns = whole(item, "begin"), lane_begin(item) or whole(item, "ended") or now_ns
    track, facts = _MEMORY + free_lane(lanes, begin, end_ns), _facts(item)
    step, sealed = whole(item, "step"), whole(item, "sealed")
    yield _slice(process, track, f"copy {step}", begin, sealed or end_ns, facts)
    if sealed:
        yield _slice(process, track, f"in memory {step}", sealed, end_ns, facts)


def _saved(process: int, track: int, item: Document, end_ns: int) -> Iterator[Document]:
    """Copy on one track, the disk on the next."""
    step, facts, state = whole(item, "step"), _facts(item), text(item, "state")
    for name, since, until in PHASES[2 if item.get("in_memory") is True else 1 :]:
        if began := whole(item, since):
            place, ended = track + (name != "copy"), whole(item, until) or end_ns
            yield _slice(process, place, f"{name} {step}", began, ended, facts, state)
    if first_write := whole(item, "first_write"):
        yield {
            "ph": "i", "s": "t", "cat": "pccheck", "pid": process, "tid": track + 1,
            "ts": first_write / 1000, "name": f"first write {step}",
        }  # fmt: skip


def _slice(
    process: int, track: int, name: str, begin_ns: int, end_ns: int, facts: Document,
    state: str = "",
) -> Document:  # fmt: skip
    made: Document = {
        "ph": "X", "cat": "pccheck", "pid": process, "tid": track, "name": name,
        "ts": begin_ns / 1000, "dur": max(end_ns - begin_ns, 0) / 1000, "args": facts,
    }  # fmt: skip
    if state in _COLOURS:
        made["cname"] = _COLOURS[state]
    return made


def _track(process: int, track: int, name: str) -> Iterator[Document]:
    yield _meta(process, track, "thread_name", name=name)
    yield _meta(process, track, "thread_sort_index", sort_index=track)


def _meta(process: int, track: int, kind: str, **arguments: object) -> Document:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": arguments}


def _facts(item: Document) -> Document:
    names = ("step", "sequence", "slot", "state", "payload_bytes", "session", "rehomed", "reason")
    facts = {name: item[name] for name in names if item.get(name) not in (None, "")}
    facts["transfer"] = "pull" if item.get("pulled") is True else "push"
    took_ns = whole(item, "written") - whole(item, "first_write")
    if whole(item, "written") and took_ns > 0:
        speed = whole(item, "payload_bytes") * 1_000_000_000 // took_ns
        facts["write_speed"] = render.rate(speed)
    return facts


def _in_flight(process: int, items: list[Document]) -> Iterator[Document]:
    """How many checkpoints had a lane, over time."""
    moves = [(lane_begin(item), 1) for item in items]
    moves += [(whole(item, "ended"), -1) for item in items if whole(item, "ended")]
    count = 0
    for at_ns, change in sorted(moves):
        count += change
        yield {
            "ph": "C", "pid": process, "tid": 0, "ts": at_ns / 1000, "name": "in flight",
            "args": {"checkpoints": count},
        }  # fmt: skip
