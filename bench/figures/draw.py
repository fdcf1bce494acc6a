"""The pictures. Every line has its own marker and dashes, so that no colour is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common import Spread, require_pyplot
from bench.figures.paper import MODELS
from bench.figures.registry import (
    ALL,
    CHECKFREQ,
    GEMINI,
    GPM,
    MEMORY,
    OUR_CHECKFREQ,
    OUR_GPM,
    OURS,
)
from bench.figures.results import Cell, Results, contenders_of, slowdown_of
from bench.rivals import KEPT, TORCHSNAPSHOT

#: Colour, marker, dashes, width. The paper's contenders have thick lines, libraries thin grey ones.
#: PCcheck in memory only, and our engine with the policy of another contender, have hollow markers.
LOOKS: dict[str, tuple[str, str, str, float]] = {
    OURS: ("#000000", "o", "-", 2.6),
    MEMORY: ("#000000", "o", "--", 2.6),
    CHECKFREQ: ("#1f6fb4", "s", "--", 1.8),
    GPM: ("#d1661b", "^", "-.", 1.8),
    GEMINI: ("#2e8b57", "D", ":", 1.8),
    OUR_CHECKFREQ: ("#1f6fb4", "s", "-", 0.9),
    OUR_GPM: ("#d1661b", "^", "-", 0.9),
    "torch.save": ("#707070", "x", "-", 0.9),
    "safetensors": ("#707070", "+", "--", 0.9),
    "DCP save": ("#707070", "1", "-.", 0.9),
    KEPT: ("#707070", "v", ":", 0.9),
    TORCHSNAPSHOT: ("#707070", "*", "--", 0.9),
}
HOLLOW = (MEMORY, OUR_CHECKFREQ, OUR_GPM)
#: A picture's highest slowdown: at f = 1 most lines leave it, the tables have all.
HIGHEST = 8.0
SERIES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"))
Point = tuple[float, Spread]


def _line(axis: Any, name: str, points: Sequence[Point]) -> None:
    colour, marker, dashes, width = LOOKS.get(name, ("#707070", ".", "-", 0.9))
    _extremes(axis, points, colour)
    axis.plot(
        [where for where, _ in points], [spread.median for _, spread in points], label=name,
        color=colour, marker=marker, linestyle=dashes, linewidth=width, markersize=6,
        markerfacecolor="white" if name in HOLLOW else colour,
        zorder=3 if name in (OURS, MEMORY) else 2,
    )  # fmt: skip


def _extremes(axis: Any, points: Sequence[Point], colour: str) -> None:
    for where, spread in points:
        axis.plot([where, where], [spread.low, spread.high], color=colour, linewidth=0.7)


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    rows = -(-count // columns)
    figure = require_pyplot().figure(
        figsize=(max(8.5, width * columns), height * rows + 1.1), layout="constrained"
    )
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def _legend(figure: Any, axis: Any, columns: int = 4) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _categories(axis: Any, names: Sequence[object], title: str, across: str, up: str) -> None:
    axis.set_xticks(range(len(names)), [str(name) for name in names])
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(axis="y", linewidth=0.4)
    axis.spines[["top", "right"]].set_visible(False)


def _slowdowns(axis: Any, lowest: float, highest: float) -> None:
    """A logarithmic axis from 1 to the highest slowdown."""
    ticks = [tick for tick in (1, 1.1, 1.2, 1.5, 2, 3, 4, 5, 6, 8) if tick <= highest]
    axis.set_yscale("log")
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(0.97 * min(0.98, lowest), 1.08 * max(1.2, highest))


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    require_pyplot().close(figure)


def intervals(results: Results, figure: str, path: Path) -> None:
    """Slowdown against interval, a panel for each model; one for all models of an experiment."""
    cells = results.of(figure)
    panels: dict[tuple[object, ...], list[str]] = {}
    for model in dict.fromkeys(cell.workload for cell in cells):
        runs = [costs for cell, costs in cells.items() if cell.workload == model]
        shared = tuple(id(cost) for costs in runs for cost in costs)
        panels.setdefault(shared, []).append(model)
    picture, axes = _panels(len(panels), min(2, len(panels)), 5.6, 3.5)
    for axis, models in zip(axes, panels.values(), strict=True):
        mine = [cell for cell in cells if cell.workload == models[0]]
        every = sorted({cell.every for cell in mine})
        for name in contenders_of(mine):
            points = [
                (every.index(cell.every), slowdown_of(cells[cell]))
                for cell in sorted(mine, key=lambda cell: cell.every)
                if cell.contender == name
            ]
            _line(axis, name, points)
        axis.axhline(1, color="black", linewidth=0.6)
        found = [cost.slowdown for cell in mine for cost in cells[cell]]
        _slowdowns(axis, min(found), min(HIGHEST, max(found)))
        ratio = MODELS[models[0]].ratio
        title = ", ".join(MODELS[model].name for model in models)
        title += f": the disk writes a checkpoint in {ratio:.0f} steps"
        floor = [max(1.0, ratio / f) for f in every]
        axis.fill_between(
            range(len(every)), 0.1, floor, color="#e4e4e4", label="faster than the disk"
        )
        _categories(axis, every, title, "checkpoint every f steps", "slowdown")
    _legend(picture, axes[0])
    _save(picture, path)


def rows(results: Results, figure: str, path: Path) -> None:
    """Slowdowns of one workload: a row for each contender, a marker for each interval."""
    cells = results.of(figure)
    names = contenders_of(cells)
    every = sorted({cell.every for cell in cells})
    picture, (axis,) = _panels(1, 1, 8.5, 0.28 * len(names) + 0.6)
    for f, (marker, _) in zip(every, SERIES, strict=False):
        mine = {cell.contender: cell for cell in cells if cell.every == f}
        spreads = [(names.index(n), slowdown_of(cells[cell])) for n, cell in mine.items()]
        for row, spread in spreads:
            axis.plot([spread.low, spread.high], [row, row], color="black", linewidth=0.7)
        axis.plot(
            [spread.median for _, spread in spreads], [row for row, _ in spreads],
            marker=marker, linestyle="", color="black", label=f"f = {f}",
            markerfacecolor="white" if marker in "sD" else "black",
        )  # fmt: skip
    axis.axvline(1, color="black", linewidth=0.6)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("slowdown of training on the CPU")
    axis.grid(linewidth=0.4)
    axis.spines[["top", "right"]].set_visible(False)
    _legend(picture, axis)
    _save(picture, path)


def goodputs(
    table: dict[str, dict[str, dict[int, float]]], ideal: dict[str, float], path: Path
) -> None:
    """`table`: model -> contender -> interval -> share of the ideal."""
    picture, axes = _panels(len(table), min(3, len(table)), 4.4, 3.2)
    for axis, (model, contenders) in zip(axes, table.items(), strict=True):
        every = sorted({f for values in contenders.values() for f in values})
        for name in [name for name in ALL if name in contenders]:
            points = [
                (every.index(f), Spread(value, value, value, 1))
                for f, value in sorted(contenders[name].items())
            ]
            _line(axis, name, points)
        axis.axhline(ideal[model], color="black", linewidth=0.8, linestyle=(0, (1, 3)))
        axis.set_ylim(0, 1)
        _categories(axis, every, MODELS[model].name, "checkpoint every f steps", "goodput")
    _legend(picture, axes[0])
    _save(picture, path)


def sizes(results: Results, path: Path) -> None:
    """Time to durable against size, both logarithmic; a panel for each disk."""
    places: dict[str, dict[str, dict[float, Spread]]] = {}
    for cell, seconds in results.seconds.items():
        size, place = cell.setting.split(" MiB, ")
        points = places.setdefault(place, {}).setdefault(cell.contender, {})
        points[float(size)] = Spread.of(seconds)
    picture, axes = _panels(len(places), 2, 5.6, 3.6)
    for axis, (place, contenders) in zip(axes, places.items(), strict=True):
        for name in [name for name in ALL if name in contenders]:
            _line(axis, name, sorted(contenders[name].items(), key=lambda item: item[0]))
        axis.set_xscale("log")
        axis.set_yscale("log")
        across = sorted({size for values in contenders.values() for size in values})
        axis.set_xticks(across, [f"{size:g}" for size in across])
        axis.minorticks_off()
        axis.set_title(f"disk: {place}", loc="left", fontsize=10)
        axis.set_xlabel("checkpoint, MiB")
        axis.set_ylabel("seconds from the call to durable")
        axis.grid(linewidth=0.4)
        axis.spines[["top", "right"]].set_visible(False)
    _legend(picture, axes[0])
    _save(picture, path)


def series(
    results: Results, figure: str, path: Path, across: str,
    split: Callable[[Cell], tuple[str, str]],
) -> None:  # fmt: skip
    """Slowdown of PCcheck; `split` gives a cell's line and its place on the line."""
    lines: dict[str, dict[str, Spread]] = {}
    for cell, costs in results.of(figure).items():
        line, place = split(cell)
        lines.setdefault(line, {})[place] = slowdown_of(costs)
    places = sorted({place for points in lines.values() for place in points}, key=_number)
    picture, (axis,) = _panels(1, 1, 6.4, 3.2)
    for (line, points), (marker, dashes) in zip(sorted(lines.items()), SERIES, strict=False):
        there = [(at, points[place]) for at, place in enumerate(places) if place in points]
        _extremes(axis, there, "black")
        axis.plot(
            [where for where, _ in there], [spread.median for _, spread in there], label=line,
            marker=marker, linestyle=dashes, color="black", markersize=6,
            markerfacecolor="white" if marker in "sD" else "black",
        )  # fmt: skip
    highest = max(spread.high for points in lines.values() for spread in points.values())
    lowest = min(spread.low for points in lines.values() for spread in points.values())
    axis.set_ylim(min(0.9, lowest - 0.05), 0.1 + 1.05 * highest)
    _categories(axis, places, f"{figure}: {_workload(results, figure)}", across, "slowdown")
    _legend(picture, axis, 5)
    _save(picture, path)


def _workload(results: Results, figure: str) -> str:
    cells = results.of(figure)
    every = sorted({cell.every for cell in cells})
    name = MODELS[next(iter(cells)).workload].name
    return f"{name}, f = {every[0]}" if len(every) == 1 else name


def _number(text: str) -> tuple[float, str]:
    return float("".join(c for c in text if c.isdigit() or c == ".") or 0), text
