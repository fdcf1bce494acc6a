"""The page: one HTML file with its style, without scripts. Nothing in it depends on colour alone:
kinds of bars have patterns and a legend, and every bar has a title with its numbers."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from statistics import median, quantiles
from typing import NamedTuple

from pccheck_wire.basics import some
from pccheckctl.commands.status import NODE_HEADINGS, node_cells
from pccheckctl.commands.trace import PHASES
from pccheckctl.output import render
from pccheckctl.output.documents import rows, text

from .saves import LOST, Key, Save, TracedSaves, disk_rates, lags, lanes, losses, parked

SHOWN = 36  # checkpoints of a rank in the timeline, and columns of a chart
RANKS_SHOWN = 16
BINS = 60


class Column(NamedTuple):
    """One of a chart: its parts from the bottom up (class, value), and its title."""

    parts: Sequence[tuple[str, float]]
    title: str


def page(saves: TracedSaves) -> str:
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    body = "\n".join(_sections(saves)) if saves.items else "<p>No checkpoint in this time.</p>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Checkpoints</title><style>\n{style}</style></head><body>\n"
        f"<h1>Checkpoints</h1>\n{_head(saves)}\n{body}\n</body></html>\n"
    )


def _head(saves: TracedSaves) -> str:
    since, until = saves.span_ns
    ended = time.localtime((saves.wall_ns - saves.now_ns + until) / 1e9)
    jobs = sorted({one.job for one in saves.items})
    named = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
    return (
        f"<p>{escape(named) or 'no job'}: {render.plural(len(saves.items), 'checkpoint')} in "
        f"{render.duration((until - since) / 1e9)}, until "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', ended)}</p>"
    )


def _sections(saves: TracedSaves) -> Iterable[str]:
    yield _section("Ranks", "", _ranks(saves))
    for job in saves.nodes:
        cells = ([_cell(one) for one in node_cells(node)] for node in rows(job, "nodes"))
        title, words = f"Nodes of {escape(text(job, 'job'))}", "When the trace was made."
        yield _section(title, words, _table(NODE_HEADINGS, cells))
    yield _section(
        "In time",
        "Each row is a lane: the copy above, the write to the disk below. Lanes that overlap are "
        "checkpoints in flight at once. A memory-only checkpoint has a row of its own until it is "
        f"written: the copy above, its time in memory below. The last {SHOWN} of each rank are "
        "shown.",
        _legend(("copy", "copy"), ("write", "write"), ("flush", "flush and publish"),
                ("memory", "in memory only"), ("held", "training is held"),
                ("lost", "failed, skipped or superseded"))
        + _timelines(saves),
    )  # fmt: skip
    yield _section(
        "How long each part takes", "Parts overlap: a write begins beside the copy.",
        _durations(saves.items),
    )  # fmt: skip
    yield _section(
        "What training waited for",
        "How long the gate has held training before each request, until a copy had read its "
        "tensors.",
        _chart(
            [Column([("held", one.held / 1e9)], _held_for(one)) for one in saves.items[-SHOWN:]],
            render.brief, "Training did not wait.",
        ),
    )  # fmt: skip
    yield from (
        _section(
            f"Ranks of {escape(job)}",
            "How long after the first rank the last rank had each checkpoint durable.",
            _chart(
                [
                    Column([("copy", lag.seconds)],
                           f"step {lag.step}: {render.brief(lag.seconds)}, rank {lag.slowest} last")
                    for lag in found[-SHOWN:]
                ], render.brief,
            ),
        )
        for (_, job), found in lags(saves.items).items()
    )  # fmt: skip
    yield _section("What the disk wrote", "", _disk(saves))
    yield _section("What was lost or skipped, and why", "", _losses(saves.items))


def _cell(value: object) -> str:
    return "-" if value in (None, "") else str(value)


def _section(title: str, words: str, inner: str) -> str:
    text = f"<p>{words}</p>" if words else ""
    return f"<section><h2>{title}</h2>{text}\n{inner}</section>"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>\n" for line in lines
    )
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>\n{body}</table></div>'


def _ranks(saves: TracedSaves) -> str:
    headings = ("rank", "durable", "superseded", "skipped", "failed", "in memory", "in flight",
                "every", "request to durable", "training held", "disk")  # fmt: skip
    return _table(headings, (_rank(key, items) for key, items in saves.ranks().items()))


def _rank(key: Key, items: list[Save]) -> list[str]:
    ended = Counter(_word(one) for one in items)
    names = ("durable", "superseded", "skipped", "failed", "in memory")
    counts = [ended.pop(name, 0) for name in names]
    steps = sorted({one.step for one in items})
    apart = [late - early for early, late in itertools.pairwise(steps)]
    total = [took for one in items if (took := one.took_s("requested", "durable")) is not None]
    span_ns = max(1, items[-1].requested - items[0].requested)
    held = sum(one.held for one in items[1:]) / span_ns if len(items) > 1 else 0.0
    wrote = [
        (one.written_bytes, took) for one in items if (took := one.took_s("first_write", "written"))
    ]
    return [
        f"{key[1]} {key[2]}", *map(str, counts), str(sum(ended.values())),
        render.plural(round(median(apart)), "step") if apart else "-",
        render.brief(median(total)) if total else "-",
        f"{100 * held:.1f} % of the time",
        render.rate(median(nbytes / took for nbytes, took in wrote)) if wrote else "-",
    ]  # fmt: skip


def _word(one: Save) -> str:
    if one.state == "copied" and one.in_memory:
        return "in memory"
    return "durable" if one.state == "global" else one.state


# -- in time -----------------------------------------------------------------------------------


def _timelines(saves: TracedSaves) -> str:
    ranks = saves.ranks()
    shown = [items[-SHOWN:] for items in list(ranks.values())[:RANKS_SHOWN]]
    left = len(ranks) - len(shown)
    part = saves._replace(items=[one for items in shown for one in items])
    span = part.span_ns
    drawn = "".join(_timeline(items, span, saves.now_ns) for items in shown)
    more = f"<p>{render.plural(left, 'more rank')} without a timeline here</p>" if left else ""
    begin, end = "0 s", render.brief((span[1] - span[0]) / 1e9)
    return f'{drawn}<div class="axis"><span>{begin}</span><span>{end}</span></div>{more}'


def _timeline(items: list[Save], span: tuple[int, int], now_ns: int) -> str:
    held = "".join(
        _bar("held", span, one.held_at, one.held_at + one.held, _held_for(one))
        for one in items
        if one.held
    )
    made = "".join(
        f'<div class="lane">{"".join(_bars(one, span, now_ns) for one in lane)}</div>'
        for lane in lanes(items, now_ns)
    )
    kept = "".join(
        f'<div class="lane">{"".join(_parked(one, span, now_ns) for one in row)}</div>'
        for row in parked(items, now_ns)
    )
    never = "".join(
        _bar("lost", span, one.requested, one.end(now_ns), _title(one))
        for one in items if not one.begin and one.state in LOST
    )  # fmt: skip
    name = escape(f"{items[0].job} {items[0].rank}")
    thin = "".join(f'<div class="lane thin">{row}</div>' for row in (held, never) if row)
    return f'<div class="rank"><h3>{name}</h3>{thin}{kept}{made}</div>'


def _bars(one: Save, span: tuple[int, int], now_ns: int) -> str:
    end, title = one.end(now_ns), _title(one)
    lost = " lost" if one.state in (*LOST, "superseded") else ""
    read_ns = one.first_write if one.in_memory else one.sealed or end
    made = "" if one.in_memory else _bar("copy" + lost, span, one.begin, read_ns, title)
    made += f'<b style="left:{_at(span, read_ns):.2f}%">{one.step}</b>'
    if one.first_write:
        made += _bar("write" + lost, span, one.first_write, one.written or end, title)
    if one.written:
        made += _bar("flush" + lost, span, one.written, one.durable or end, title)
    return made


def _parked(one: Save, span: tuple[int, int], now_ns: int) -> str:
    end, title = one.parked_end(now_ns), _title(one)
    lost = " lost" if one.state in LOST else ""
    made = _bar("copy" + lost, span, one.begin, one.sealed or end, title)
    made += f'<b style="left:{_at(span, one.sealed or end):.2f}%">{one.step}</b>'
    if one.sealed:
        made += _bar("memory" + lost, span, one.sealed, end, title)
    return made


def _bar(kind: str, span: tuple[int, int], begin: int, end: int, title: str) -> str:
    left, wide = _at(span, begin), max(0.0, _at(span, end) - _at(span, begin))
    style = f"left:{left:.2f}%;width:{wide:.2f}%"
    return f'<i class="{kind}" style="{style}" title="{escape(title)}"></i>'


def _at(span: tuple[int, int], ns: int) -> float:
    """The place of a time, in percent of the width."""
    return 100 * (ns - span[0]) / max(1, span[1] - span[0])


def _title(one: Save) -> str:
    took = [
        f"{name} {render.brief(seconds)}"
        for name, since, until in PHASES
        if (seconds := one.took_s(since, until)) is not None
    ]
    why = f" ({one.reason})" if one.reason else ""
    return f"step {one.step}, {_word(one)}{why}: {', '.join(took) or 'not begun'}"


def _held_for(one: Save) -> str:
    return f"held {render.brief(one.held / 1e9)} before step {one.step} of rank {one.rank}"


def _legend(*kinds: tuple[str, str]) -> str:
    keys = "".join(f'<span><i class="{kind}"></i>{words}</span>' for kind, words in kinds)
    return f'<div class="legend">{keys}</div>'


# -- numbers -----------------------------------------------------------------------------------


def _durations(items: list[Save]) -> str:
    lines = []
    totals = ("request to copied", "requested", "sealed"), (
        "request to durable", "requested", "durable",
    )  # fmt: skip
    for name, since, until in (*PHASES, *totals):
        took = sorted(s for one in items if (s := one.took_s(since, until)) is not None)
        if took:
            late = quantiles(took, n=20)[-1] if len(took) > 1 else took[0]
            numbers = (took[0], median(took), min(late, took[-1]), took[-1])
            lines.append((name, *map(render.brief, numbers)))
    done = [one for one in items if one.durable][-SHOWN:]
    kinds = {"wait": "held", "copy": "copy", "write": "write", "flush": "flush"}
    columns = [
        Column([(kind, one.took_s(a, b) or 0.0) for name, a, b in PHASES
                if (kind := kinds.get(name))], _title(one))
        for one in done
    ]  # fmt: skip
    legend = _legend(("held", "wait"), ("copy", "copy"), ("write", "write"), ("flush", "flush"))
    return (
        _table(("part", "shortest", "median", "95 %", "longest"), lines)
        + legend + _chart(columns, render.brief)
    )  # fmt: skip


def _disk(saves: TracedSaves) -> str:
    span = saves.span_ns
    width_s = (span[1] - span[0]) / BINS / 1e9
    columns = [
        Column([("write", rate)], f"{render.brief(at * width_s)}: {render.rate(rate)}")
        for at, rate in enumerate(disk_rates(saves.items, span, BINS))
    ]
    return _chart(columns, render.rate)


def _losses(items: list[Save]) -> str:
    found = losses(items)
    if not found:
        return "<p>Nothing. A superseded checkpoint is not lost: a newer one took its place.</p>"
    return _table(
        ("how", "times", "steps", "why"),
        (
            (loss.state, str(len(loss.steps)), some(sorted(set(loss.steps))), loss.reason or "-")
            for loss in found
        ),
        "words",
    )


def _chart(columns: Sequence[Column], unit: Callable[[float], str], empty: str = "Nothing.") -> str:
    top = max((sum(value for _, value in column.parts) for column in columns), default=0.0)
    if top <= 0:
        return f"<p>{empty}</p>"
    drawn = "".join(
        f'<div title="{escape(column.title)}">'
        + "".join(
            f'<i class="{kind}" style="height:{100 * value / top:.2f}%"></i>'
            for kind, value in column.parts
        )
        + "</div>"
        for column in columns
    )
    return (
        f'<div class="chart"><span class="top">{unit(top)}</span><span class="half">{unit(top / 2)}'
        f'</span><div class="columns">{drawn}</div></div>'
    )
