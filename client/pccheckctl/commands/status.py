"""`pccheckctl status`: what the daemon does, or, without one, what the volumes say."""

from __future__ import annotations

import argparse
import time

from pccheckctl.commands.listing import age_s
from pccheckctl.output import render
from pccheckctl.output.documents import (
    Document,
    number,
    part,
    print_json,
    rows,
    say,
    text,
    texts,
    whole,
)
from pccheckctl.source.choice import choose

DEGRADED = 3
ENDED_SHOWN = 8
#: States of a checkpoint that is on its way; the others have ended.
MOVING = ("requested", "copying", "copied", "writing")


def run(arguments: argparse.Namespace) -> int:
    """0 when all is well, 3 when something needs to be looked at."""
    if arguments.watch:
        from pccheckctl.output import watch

        return watch.run(arguments, fetch, lambda document: as_text(document, every=arguments.all))
    document = fetch(arguments)
    if arguments.json:
        print_json(document)
    else:
        say(as_text(document, every=arguments.all))
    return DEGRADED if degraded(document) else 0


def fetch(arguments: argparse.Namespace) -> Document:
    if arguments.storage and (document := _served(arguments)) is not None:
        return document
    with choose(arguments) as chosen:
        return chosen.status(uid=arguments.uid)


def _served(arguments: argparse.Namespace) -> Document | None:
    """The document of the daemon of --storage; None when there is none that we may ask."""
    from pathlib import Path

    from pccheck_native import layout
    from pccheck_wire.errors import PccheckError
    from pccheckctl.source.observer import Observer

    socket = layout.noted_socket(Path(arguments.storage))
    if socket is None:
        return None
    try:
        with Observer(str(socket)) as seen:
            return seen.status(uid=arguments.uid)
    except PccheckError:  # it was killed, or is another version: the files can be read
        return None


def degraded(document: Document) -> bool:
    state = text(part(document, "daemon"), "state")
    return state != "ok" if state else bool(texts(document, "warnings"))


def as_text(document: Document, *, now_s: float | None = None, every: bool = False) -> str:
    """The same for people; `now_s` is wall time. Of the ranks that nobody is connected to, only the
    newest few, unless `every`."""
    now_s = time.time() if now_s is None else now_s
    blocks = ["\n".join(_head(document, now_s))]
    if warnings := texts(document, "warnings"):
        blocks.append("\n".join(f"warning: {warning}" for warning in warnings))
    ranks, groups = rows(document, "ranks"), rows(document, "groups")
    if groups:
        blocks.append(_groups(groups, now_s))
    if ranks:
        served = bool(part(document, "daemon"))
        shown = _shown(ranks, every=every or not served)
        blocks.append(_ranks(shown, now_s, served=served))
        if len(shown) < len(ranks):
            hidden = render.plural(len(ranks) - len(shown), "rank")
            blocks[-1] += f"\n{hidden} more that nobody is connected to: pccheckctl status --all"
    else:
        blocks.append("no jobs")
    transfers = [one for one in rows(document, "sessions") if _worth_a_line(one)]
    if transfers:
        blocks.append(_transfers(transfers))
    moving = [(rank, one) for rank in ranks for one in rows(rank, "checkpoints")
              if text(one, "state") in MOVING]  # fmt: skip
    if moving:
        blocks.append(_in_flight(moving))
    if notices := texts(document, "notices"):
        blocks.append("\n".join(f"note: {notice}" for notice in notices))
    return "\n\n".join(blocks)


def _head(document: Document, now_s: float) -> list[str]:
    daemon, pool, storage = (part(document, key) for key in ("daemon", "pool", "storage"))
    place = f"storage  {text(storage, 'path')}"
    if number(storage, "total_bytes") is not None:
        free, total = (whole(storage, f"{key}_bytes") for key in ("free", "total"))
        place += f", {render.size(free)} free of {render.size(total)}"
    if not daemon:
        return ["daemon   not running, or not asked; read from the volumes", place]
    return [
        f"daemon   {text(daemon, 'state')}: pccheckd {text(daemon, 'version')}, "
        f"pid {text(daemon, 'pid')}, up {render.duration(number(daemon, 'uptime_s') or 0)}",
        place,
        f"pool     {render.size(whole(pool, 'used_bytes'))} used of "
        f"{render.size(whole(pool, 'budget_bytes'))}{_pinned(pool)}",
        f"slots    {text(daemon, 'slots')} per volume: {text(daemon, 'in_flight')} in flight, "
        f"{text(daemon, 'keep')} kept; {text(daemon, 'writers')} writers each, "
        f"chunks of {render.size(whole(daemon, 'chunk_bytes'))}",
        f"engine   {text(daemon, 'engine')}{_engine_reason(daemon)}",
        *_kept(document),
        *(_gpu(gpu) for gpu in rows(document, "gpus")),
        *_scrub(part(document, "scrub"), now_s),
    ]


def _kept(document: Document) -> list[str]:
    """What would survive the daemon's own end; nothing to say without a descriptor store."""
    kept = document.get("kept")
    if not isinstance(kept, dict) or not whole(kept, "limit"):
        return []
    taken = whole(kept, "adopted_checkpoints")
    more = f"; took over {render.plural(taken, 'checkpoint')} from the one before" if taken else ""
    return [f"restart  {whole(kept, 'stored')} of {whole(kept, 'limit')} descriptors stored{more}"]


def _scrub(scrub: Document, now_s: float) -> list[str]:
    """The background check: what it does, and when it last came to its end."""
    state = text(scrub, "state")
    if not state:
        return []
    ended = number(scrub, "last_ended_wall_ns")
    bad = whole(scrub, "damaged")
    last = (
        f"last done {render.age(now_s - ended / 1e9)}, "
        f"{render.plural(whole(scrub, 'checked'), 'checkpoint')} read"
        if ended
        else "not done yet"
    )
    found = f", {bad} DAMAGED" if bad else ""
    found += f", {lost} UNREADABLE" if (lost := whole(scrub, "unreadable")) else ""
    if state == "off":
        doing = "off: nothing looks for rot (see --scrub-rate, --scrub-interval)"
    elif state == "waiting":
        next_s = number(scrub, "next_s") or 0
        doing = f"all that is kept is read again in {render.duration(next_s)}"
    else:
        doing = f"{100 * (number(scrub, 'progress') or 0):.0f} % of what is kept read"
        doing += ", waits for saves" if state == "paused" else ""
    return [f"check    {doing}; {last}{found}"]


def _pinned(pool: Document) -> str:
    pinned = whole(pool, "pinned_bytes")
    return f", {render.size(pinned)} pinned for GPUs" if pinned else ""


def _engine_reason(daemon: Document) -> str:
    reason = text(daemon, "engine_reason")
    return f" ({reason})" if reason else ""


def _gpu(gpu: Document) -> str:
    """One that trainers share memory of."""
    node, failures = number(gpu, "numa_node"), whole(gpu, "failures")
    place = "" if node is None else f" (NUMA node {int(node)})"
    failed = f", {render.plural(failures, 'failure')}" if failures else ""
    lost = ", LOST: its tensors are pushed" if gpu.get("lost") is True else ""
    return (
        f"gpu      {text(gpu, 'name')}{place}: "
        f"{render.size(whole(gpu, 'copied_bytes'))} pulled{failed}{lost}"
    )


def _groups(groups: list[Document], now_s: float) -> str:
    """One line per job of several ranks: what all of them have, and who holds the next one back."""
    uids = {one.get("uid") for one in groups}
    headings = ("job", "ranks", "last step of all ranks", "age", "newer one waits", "slowest rank")
    lines = []
    for one in groups:
        shared, behind, absent = part(one, "global"), part(one, "behind"), one.get("absent")
        slowest, waits_s = one.get("slowest_rank"), number(one, "waits_s") or 0
        by = f"{slowest}, behind by {behind.get(str(slowest))}" if slowest is not None else ""
        lines.append((
            text(one, "job") if len(uids) == 1 else f"{one.get('uid')}/{one.get('job')}",
            one.get("world_size"),
            shared.get("step") if shared else "none",
            render.age(age_s(shared, now_s)),
            render.duration(waits_s) if waits_s else "",
            f"{slowest}, not connected" if absent else by,
        ))  # fmt: skip
    return render.table(headings, lines)


def _shown(ranks: list[Document], *, every: bool) -> list[Document]:
    """Those with a trainer, or with checkpoints on their way, then the others, newest first."""
    live = [one for one in ranks if one.get("connected") or whole(one, "in_flight")]
    ended = [one for one in ranks if one not in live]
    if every:
        return [*live, *ended]
    ended.sort(key=lambda one: -(number(part(one, "newest"), "wall_ns") or 0))
    return [*live, *ended[:ENDED_SHOWN]]


def _ranks(ranks: list[Document], now_s: float, *, served: bool) -> str:
    """One line per rank; what only a daemon knows is left out without one, and NUMA nodes where
    nothing is placed."""
    uids = {rank.get("uid") for rank in ranks}
    headings = ("job", "rank", "trouble", "pid", "run", "last durable step", "age", "in flight",
                "DRAM", "durable", "superseded", "skipped", "failed", "node")  # fmt: skip
    lines = []
    for rank in ranks:
        newest, counters = part(rank, "newest"), part(rank, "counters")
        lines.append((
            text(rank, "job") if len(uids) == 1 else f"{rank.get('uid')}/{rank.get('job')}",
            rank.get("rank"),
            _trouble(rank),
            rank.get("pid"),
            rank.get("incarnation"),
            newest.get("step"),
            render.age(age_s(newest, now_s)),
            rank.get("in_flight"),
            _dram(part(rank, "dram")),
            *(counters.get(name) for name in headings[9:13]),
            rank.get("numa_node"),
        ))  # fmt: skip
    placed = any(rank.get("numa_node") is not None for rank in ranks)
    troubled = any(_trouble(rank) for rank in ranks)
    left = {2: not troubled, 13: not placed}
    shown = [at for at in range(len(headings)) if not left.get(at)] if served else [0, 1, 4, 5, 6]
    return render.table(
        [headings[at] for at in shown], [[line[at] for at in shown] for line in lines]
    )


def _trouble(rank: Document) -> str:
    """Of a trainer that gets no checkpoints, in one word or two."""
    if not rank.get("connected"):
        return ""
    if rank.get("refused"):
        return "REFUSED"
    return f"failing: {count}" if (count := whole(rank, "failing")) else ""


def _dram(dram: Document) -> str:
    """What a rank has, and what it would have if there were room for all."""
    has, wanted = whole(dram, "bytes"), whole(dram, "wanted_bytes")
    return f"{render.size(has)} of {render.size(wanted)}" if has < wanted else render.size(has)


def _worth_a_line(session: Document) -> bool:
    """Trainers with GPU tensors: how these get here, and why not faster."""
    reason = text(session, "transfer_reason")
    return text(session, "role") == "trainer" and reason not in ("", "CPU tensors")


def _transfers(sessions: list[Document]) -> str:
    lines = [
        (
            text(session, "job"),
            session.get("rank"),
            text(session, "transfer"),
            render.size(whole(session, "exposed_bytes")),
            text(session, "transfer_reason"),
        )
        for session in sessions
    ]
    return render.table(("job", "rank", "GPU tensors", "shared", "why"), lines)


def _in_flight(moving: list[tuple[Document, Document]]) -> str:
    lines = [
        (
            text(rank, "job"),
            rank.get("rank"),
            one.get("step"),
            text(one, "state"),
            render.size(whole(one, "payload_bytes")),
            render.age(number(one, "requested_s")),
        )
        for rank, one in moving
    ]
    return render.table(("job", "rank", "step", "state", "size", "requested"), lines)
