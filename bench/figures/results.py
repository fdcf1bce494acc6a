"""What was measured, by cell, and the rows of the CSV files."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from bench.common import Spread
from bench.figures.measure import Cost
from bench.figures.paper import PRINTED
from bench.figures.registry import ALL, OTHERS

HEADER = (
    "figure", "workload", "contender", "setting", "every", "runs",
    "slowdown", "slowdown_min", "slowdown_max", "held_ms", "safe_s", "safe_s_min", "safe_s_max",
    "lag_steps", "process_lag_steps", "printed_slowdown", "printed_in", "rerun",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A point of a figure, which one command measures again. `setting` is empty, or has the knobs
    or the size."""

    figure: str
    workload: str
    contender: str
    every: int = 0
    setting: str = ""

    def command(self) -> str:
        words = ["--only", self.figure, "--model", self.workload, "--contender", self.contender]
        if self.every:
            words += ["--every", str(self.every)]
        if self.setting:
            words += ["--setting", self.setting]
        return shlex.join(["python", "-m", "bench.figures", *words])


@dataclass(slots=True)
class Results:
    costs: dict[Cell, list[Cost]] = field(default_factory=dict)
    #: Of the figure about time and size: seconds to durable.
    seconds: dict[Cell, list[float]] = field(default_factory=dict)
    #: Contender -> seconds to load, one for each round.
    loads: dict[str, list[float]] = field(default_factory=dict)
    #: The same where only the training process has died.
    process_loads: dict[str, list[float]] = field(default_factory=dict)

    def add(self, cell: Cell, cost: Cost) -> None:
        self.costs.setdefault(cell, []).append(cost)

    def of(self, figure: str) -> dict[Cell, list[Cost]]:
        return {cell: costs for cell, costs in self.costs.items() if cell.figure == figure}

    def figures(self) -> list[str]:
        return list(dict.fromkeys(cell.figure for cell in (*self.costs, *self.seconds)))

    def document(self) -> dict[str, object]:
        """For JSON: every run."""
        return {
            "costs": [asdict(cell) | {"runs": runs} for cell, runs in self.costs.items()],
            "seconds": [asdict(cell) | {"runs": runs} for cell, runs in self.seconds.items()],
            "loads": self.loads,
            "process_loads": self.process_loads,
        }


def slowdown_of(costs: Sequence[Cost]) -> Spread:
    return Spread.of([cost.slowdown for cost in costs])


def contenders_of(cells: Iterable[Cell]) -> list[str]:
    there = {cell.contender for cell in cells}
    return [name for name in (*ALL, *OTHERS) if name in there]


def printed(cell: Cell) -> tuple[float, str] | None:
    """The paper's slowdown for this cell, and where it stands."""
    return PRINTED.get((cell.workload, cell.contender, cell.every))


def cost_row(cell: Cell, costs: Sequence[Cost]) -> list[object]:
    slowdown = slowdown_of(costs)
    safe = Spread.of([cost.safe_s for cost in costs])
    paper = printed(cell) or ("", "")
    return [
        cell.figure, cell.workload, cell.contender, cell.setting, cell.every, slowdown.runs,
        *(round(value, 4) for value in (slowdown.median, slowdown.low, slowdown.high)),
        round(Spread.of([cost.held_ms for cost in costs]).median, 2),
        *(round(value, 4) for value in (safe.median, safe.low, safe.high)),
        round(Spread.of([cost.lag_steps for cost in costs]).median, 1),
        round(Spread.of([cost.process_lag_steps for cost in costs]).median, 1),
        paper[0] and round(float(paper[0]), 3), paper[1], cell.command(),
    ]  # fmt: skip


def seconds_row(cell: Cell, seconds: Sequence[float]) -> list[object]:
    safe = Spread.of(seconds)
    return [
        cell.figure, cell.workload, cell.contender, cell.setting, "", safe.runs, "", "", "", "",
        *(round(value, 5) for value in (safe.median, safe.low, safe.high)), "", "", "", "",
        cell.command(),
    ]  # fmt: skip


def csv_text(results: Results, figure: str) -> str:
    rows: list[Iterable[object]] = [cost_row(*item) for item in results.of(figure).items()]
    rows += [seconds_row(*item) for item in results.seconds.items() if item[0].figure == figure]
    return table_text(HEADER, rows)


def table_text(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
