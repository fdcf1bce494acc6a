"""`pccheckctl status`: what the daemon does, or, without one, what the volumes hold."""

from __future__ import annotations

import argparse
import time

from pccheckctl.output import render
from pccheckctl.output.documents import (
    Document,
    answer,
    number,
    numbers,
    part,
    rows,
    text,
    texts,
    whole,
)
from pccheckctl.source import choose

from .listing import age_s, job_of

DEGRADED = 3
ENDED_SHOWN = 8
#: A store answers in far less, and one that listens to a bell begins again in between.
SILENT_SHOWN_S = 2.0
#: States of a checkpoint that is under way; the others are ends.
MOVING = ("requested", "copying", "copied", "writing")


def run(arguments: argparse.Namespace) -> int:
    """0 when all is well, 3 when something needs attention."""
    if arguments.cluster:
        from . import cluster

        return cluster.run(arguments)
    if arguments.watch:
        from pccheckctl.output import watch

        return watch.run(arguments, fetch, lambda found: as_text(found, every=arguments.all))
    document = fetch(arguments)
    answer(arguments, document, lambda: as_text(document, every=arguments.all))
    return DEGRADED if degraded(document) else 0


def fetch(arguments: argparse.Namespace) -> Document:
    with choose(arguments, ask=True) as chosen:
        return chosen.status(uid=arguments.uid)


def degraded(document: Document) -> bool:
    state = text(part(document, "daemon"), "state")
    return state != "ok" if state else bool(texts(document, "warnings"))


def as_text(document: Document, *, now_s: float | None = None, every: bool = False) -> str:
    """The same for people; `now_s` is wall time. Of the ranks without a trainer it shows only the
    newest few, unless `every`."""
    now_s = time.time() if now_s is None else now_s
    blocks = ["\n".join(_head(document, now_s))]
    blocks.append("\n".join(f"warning: {warning}" for warning in texts(document, "warnings")))
    ranks, served = rows(document, "ranks"), bool(part(document, "daemon"))
    blocks.append(_groups(rows(document, "groups"), now_s))
    blocks += [_nodes(one) for one in rows(document, "nodes")]
    blocks.append("\n".join(_memory(one) for one in rows(document, "memory")))
    shown = _shown(ranks, every=every or not served)
    blocks.append(_ranks(shown, now_s, served=served) if ranks else "no jobs")
    if len(shown) < len(ranks):
        hidden = render.plural(len(ranks) - len(shown), "more rank")
        blocks[-1] += f"\n{hidden} without a trainer: pccheckctl status --all"
    blocks.append(_transfers(rows(document, "sessions")))
    blocks.append(_in_flight(ranks))
    blocks.append("\n".join(f"note: {notice}" for notice in texts(document, "notices")))
    return "\n\n".join(block for block in blocks if block)


def _head(document: Document, now_s: float) -> list[str]:
    daemon, pool, storage = (part(document, key) for key in ("daemon", "pool", "storage"))
    place = f"storage  {text(storage, 'path')}"
    if number(storage, "total_bytes") is not None:
        place += f", {_size(storage, 'free_bytes')} free of {_size(storage, 'total_bytes')}"
    if not daemon:
        return [
            "daemon   not asked: no private daemon serves this directory; read from its volumes:",
            place,
        ]
    pinned = f", {_size(pool, 'pinned_bytes')} pinned for GPUs" * bool(whole(pool, "pinned_bytes"))
    reason = text(daemon, "engine_reason")
    return [
        f"daemon   {text(daemon, 'state')}: pccheckd {text(daemon, 'version')}, "
        f"pid {text(daemon, 'pid')}, up {render.duration(number(daemon, 'uptime_s') or 0)}",
        place,
        f"pool     {_size(pool, 'used_bytes')} used of {_size(pool, 'budget_bytes')}{pinned}",
        f"slots    {text(daemon, 'slots')} per volume: {text(daemon, 'in_flight')} in flight, "
        f"{text(daemon, 'keep')} kept; {text(daemon, 'writers')} writers each, "
        f"chunks of {_size(daemon, 'chunk_bytes')}",
        f"engine   {text(daemon, 'engine')}{f' ({reason})' if reason else ''}",
        *_kept(part(document, "kept")),
        *(_gpu(gpu) for gpu in rows(document, "gpus")),
        *_scrub(part(document, "scrub"), now_s),
    ]


def _size(document: Document, key: str) -> str:
    return render.size(whole(document, key))


def _kept(kept: Document) -> list[str]:
    """What would survive the end of the daemon; empty without a descriptor store."""
    if not whole(kept, "limit"):
        return []
    taken = whole(kept, "adopted_checkpoints")
    more = f"; {render.plural(taken, 'checkpoint')} taken over from the previous daemon"
    stored = f"{whole(kept, 'stored')} of {whole(kept, 'limit')} descriptors stored"
    return [f"restart  {stored}{more if taken else ''}"]


def _scrub(scrub: Document, now_s: float) -> list[str]:
    """The background check of all checkpoints: what it does, and when it last finished."""
    state, ended = text(scrub, "state"), number(scrub, "last_ended_wall_ns")
    if not state:
        return []
    if state == "off":
        doing = "off: nothing looks for damage (see --scrub-rate, --scrub-interval)"
    elif state == "waiting":
        doing = f"next check of all checkpoints in {render.duration(number(scrub, 'next_s') or 0)}"
    else:
        doing = f"{100 * (number(scrub, 'progress') or 0):.0f} % read"
        doing += ", waiting for saves" if state == "paused" else ""
    last = "none has finished yet"
    if ended:
        checked = render.plural(whole(scrub, "checked"), "checkpoint")
        last = f"last finished {render.age(now_s - ended / 1e9)}, {checked} read"
    bad, lost = whole(scrub, "damaged"), whole(scrub, "unreadable")
    found = f", {bad} DAMAGED" * bool(bad) + f", {lost} UNREADABLE" * bool(lost)
    return [f"scrub    {doing}; {last}{found}"]


def _gpu(gpu: Document) -> str:
    failures = whole(gpu, "failures")
    failed = f", {render.plural(failures, 'failure')}" if failures else ""
    lost = ", LOST: trainers push its tensors" if gpu.get("lost") is True else ""
    pulled = _size(gpu, "copied_bytes")
    return f"gpu      {text(gpu, 'name')}: {pulled} pulled{failed}{lost}"


def _groups(groups: list[Document], now_s: float) -> str:
    """A line per job of several ranks: what all of them have, and which rank delays the next."""
    if not groups:
        return ""
    lines = []
    for one in groups:
        shared, slowest = part(one, "global"), one.get("slowest_rank")
        waits_s, late = number(one, "waits_s") or 0, part(one, "behind").get(str(slowest))
        by = f"{slowest}, behind by {late}" if slowest is not None else ""
        lines.append((
            job_of(one, groups),
            one.get("world_size"),
            shared.get("step") if shared else "none",
            render.age(age_s(shared, now_s)),
            render.duration(waits_s) if waits_s else "",
            f"{slowest}, not connected" if one.get("absent") else by,
        ))  # fmt: skip
    headings = ("job", "ranks", "last step of all ranks", "age", "next step waits", "slowest rank")
    return render.table(headings, lines)


def _nodes(job: Document) -> str:
    """A job on several nodes: how they stand with each other, and a line for each."""
    phase, cost = text(job, "phase"), number(job, "operations_per_global")
    facts = [phase]
    if waits_for := text(job, "waits_for"):
        facts.append(waits_for)
    if (silent_s := number(job, "silent_s") or 0) >= SILENT_SHOWN_S:
        facts.append(f"the store is silent for {render.duration(silent_s)}")
    if cost is not None:
        facts.append(f"{cost:g} store operations per global checkpoint")
    table = render.table(NODE_HEADINGS, map(node_cells, rows(job, "nodes")))
    return f"nodes    {text(job, 'job')}: {'; '.join(facts)}\n{table}"


NODE_HEADINGS = ("host", "node", "ranks", "news", "newest step", "known global", "waited for")


def node_cells(node: Document) -> tuple[object, ...]:
    """The row of a node, also in a report."""
    here = node.get("here") is True
    return (
        f"{text(node, 'host')}, this node" if here else text(node, "host"),
        text(node, "node"),
        render.spans(numbers(node, "ranks")),
        "" if here else render.age(number(node, "heard_s")),
        node.get("offered_step"),
        node.get("global_step"),
        _waited(node),
    )


def _waited(node: Document) -> str:
    if node.get("waited_step") is None:
        return ""
    return f"step {node.get('waited_step')}, {render.duration(number(node, 'waited_s') or 0)}"


def _memory(one: Document) -> str:
    """What a death would cost a job that keeps checkpoints in memory."""
    copied, durable = part(one, "process"), part(one, "node")
    places = [
        f"step {found.get('step')} {where}"
        for found, where in ((copied, "in memory"), (durable, "on disk"))
        if found.get("step") is not None
    ]
    costs = f"a dead process costs {_cost(copied)}, a dead node {_cost(durable)}"
    return f"memory   {text(one, 'job')}: {', '.join(places)}; {costs}"


def _cost(found: Document) -> str:
    took = f" ({render.duration(number(found, 'lost_s') or 0)})"
    if found.get("lost_steps") is None:
        return f"all steps{took}"
    return f"{render.plural(whole(found, 'lost_steps'), 'step')}{took}"


def _shown(ranks: list[Document], *, every: bool) -> list[Document]:
    """Ranks with a trainer, with checkpoints under way, or whose last trainer saved nothing, then
    the others, newest first."""
    first = [r for r in ranks if r.get("connected") or whole(r, "in_flight") or _trouble(r)]
    ended = [one for one in ranks if one not in first]
    if every:
        return [*first, *ended]
    ended.sort(key=lambda one: -(number(part(one, "newest"), "wall_ns") or 0))
    return [*first, *ended[:ENDED_SHOWN]]


def _ranks(ranks: list[Document], now_s: float, *, served: bool) -> str:
    """A line per rank. Columns that only a daemon knows are left out without one."""
    columns: dict[str, list[object]] = {"job": [job_of(rank, ranks) for rank in ranks]}
    columns["rank"] = [rank.get("rank") for rank in ranks]
    if served:
        if any(troubles := [_trouble(rank) for rank in ranks]):
            columns["trouble"] = [*troubles]
        columns["pid"] = [rank.get("pid") for rank in ranks]
    columns["run"] = [rank.get("incarnation") for rank in ranks]
    newest = [part(rank, "newest") for rank in ranks]
    columns["last durable step"] = [
        f"{one.get('step')}, stale" if rank.get("stale") is True else one.get("step")
        for rank, one in zip(ranks, newest, strict=True)
    ]
    columns["age"] = [render.age(age_s(one, now_s)) for one in newest]
    if served:
        columns["in flight"] = [rank.get("in_flight") for rank in ranks]
        columns["DRAM"] = [_dram(part(rank, "dram")) for rank in ranks]
        for name in ("durable", "superseded", "skipped", "failed"):
            columns[name] = [part(rank, "counters").get(name) for rank in ranks]
    return render.table(list(columns), zip(*columns.values(), strict=True))


def _trouble(rank: Document) -> str:
    """In a word or two, why the trainer, or the last one, gets no checkpoints."""
    if rank.get("refused"):
        return "REFUSED"
    if not rank.get("connected") and not whole(rank, "in_flight") and not part(rank, "newest"):
        return "NO CHECKPOINT"
    return f"failing: {count}" if (count := whole(rank, "failing")) else ""


def _dram(dram: Document) -> str:
    """What a rank has, and what it would get if there were enough for all."""
    has, wanted = whole(dram, "bytes"), whole(dram, "wanted_bytes")
    return f"{render.size(has)} of {render.size(wanted)}" if has < wanted else render.size(has)


def _transfers(sessions: list[Document]) -> str:
    """Trainers with GPU tensors: how the tensors are copied, and why not faster."""
    lines = [
        (text(one, "job"), one.get("rank"), text(one, "transfer"), _size(one, "exposed_bytes"),
         text(one, "transfer_reason"))
        for one in sessions
        if text(one, "role") == "trainer"
        and text(one, "transfer_reason") not in ("", "CPU tensors")
    ]  # fmt: skip
    return render.table(("job", "rank", "GPU tensors", "shared", "why"), lines) if lines else ""


def _state(one: Document) -> str:
    if one.get("on_device") is True:
        return "on the GPU"
    return "in memory" if one.get("in_memory") is True else text(one, "state")


def _in_flight(ranks: list[Document]) -> str:
    lines = [
        (text(rank, "job"), rank.get("rank"), one.get("step"), _state(one),
         _size(one, "payload_bytes"), render.age(number(one, "requested_s")))
        for rank in ranks
        for one in rows(rank, "checkpoints")
        if text(one, "state") in MOVING
    ]  # fmt: skip
    headings = ("job", "rank", "step", "state", "size", "requested")
    return render.table(headings, lines) if lines else ""
