"""The report: one Markdown file, with a CSV file and a picture for each figure beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import common
from bench.common import BenchError, Spread
from bench.figures import draw
from bench.figures.disk import Disk
from bench.figures.goodput import Costs, Sample, goodput, preemptions, stretches
from bench.figures.measure import Cost
from bench.figures.paper import DISK, GAINS, LINK, MODELS
from bench.figures.plan import CPU, Plan, middle_model
from bench.figures.registry import ALL, OURS
from bench.figures.results import (
    Cell,
    Results,
    contenders_of,
    csv_text,
    printed,
    slowdown_of,
    table_text,
)

Goodputs = dict[str, dict[str, dict[int, float]]]


@dataclass(frozen=True, slots=True)
class Run:
    """What a report is about."""

    plan: Plan
    results: Results
    slow: Disk
    fast: Disk
    trace: Sequence[Sample]
    trace_text: str  # its origin
    bandwidth: float
    notes: Sequence[str] = ()


# -- Figure 9 ----------------------------------------------------------------------------------


def goodputs(run: Run) -> Goodputs:
    """Model -> contender -> interval -> share of a job without checkpoints and preemptions."""
    found: Goodputs = {}
    undisturbed = stretches(run.trace)
    for cell, costs in run.results.of("fig8").items():
        loads = run.results.loads.get(cell.contender)
        if not loads:
            continue
        model = MODELS[cell.workload]
        scale = model.step_s / model.scaled(run.plan.payload_bytes, run.bandwidth)
        value = goodput(
            undisturbed,
            Costs(
                step_s=model.step_s,
                slowdown=slowdown_of(costs).median,
                lag_steps=Spread.of([cost.lag_steps for cost in costs]).median,
                load_s=scale * Spread.of(loads).median,
            ),
        )
        found.setdefault(cell.workload, {}).setdefault(cell.contender, {})[cell.every] = value
    return found


def ideal_goodputs(run: Run, models: Sequence[str]) -> dict[str, float]:
    """Checkpoints that cost nothing, at every step; what is left is loading from the disk."""
    return {
        name: goodput(
            stretches(run.trace),
            Costs(MODELS[name].step_s, 1.0, 0.5, MODELS[name].machine_bytes / DISK),
        )
        for name in models
    }


# -- tables ------------------------------------------------------------------------------------


def slowdown_table(results: Results, figure: str, workload: str) -> list[str]:
    """A row for each contender, a column for each interval; the paper's values in brackets."""
    cells = [cell for cell in results.of(figure) if cell.workload == workload]
    every = sorted({cell.every for cell in cells})
    lines = [
        "| | " + " | ".join(f"f = {f}" for f in every) + " | holds training, ms | safe after, s |",
        "|---" * (len(every) + 3) + "|",
    ]
    for name in contenders_of(cells):
        texts = []
        mine = {cell.every: cell for cell in cells if cell.contender == name}
        for f in every:
            text = slowdown_of(results.costs[mine[f]]).text(2) if f in mine else ""
            paper = printed(mine[f]) if f in mine else None
            texts.append(text + (f" (paper {paper[0]:.2f})" if paper else ""))
        costs = [cost for cell in mine.values() for cost in results.costs[cell]]
        held = Spread.of([cost.held_ms for cost in costs]).median
        safe = Spread.of([cost.safe_s for cost in costs]).median
        lines.append(f"| {name} | " + " | ".join(texts) + f" | {held:.1f} | {safe:.2f} |")
    return [*lines, ""]


def setting_table(results: Results, figure: str) -> list[str]:
    cells = results.of(figure)
    every = sorted({cell.every for cell in cells})
    lines = ["| | " + " | ".join(f"f = {f}" for f in every) + " |", "|---" * (len(every) + 1) + "|"]
    for setting in dict.fromkeys(cell.setting for cell in cells):
        mine = {cell.every: cell for cell in cells if cell.setting == setting}
        texts = [slowdown_of(cells[mine[f]]).text(2) if f in mine else "" for f in every]
        lines.append(f"| {setting} | " + " | ".join(texts) + " |")
    return [*lines, ""]


def size_table(results: Results) -> list[str]:
    settings = list(dict.fromkeys(cell.setting for cell in results.seconds))
    lines = ["| | " + " | ".join(settings) + " |", "|---" * (len(settings) + 1) + "|"]
    for name in contenders_of(results.seconds):
        found = {cell.setting: s for cell, s in results.seconds.items() if cell.contender == name}
        texts = [Spread.of(found[one]).text(3) if one in found else "" for one in settings]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return [*lines, ""]


def goodput_table(run: Run, found: Goodputs) -> list[str]:
    every = run.plan.intervals
    lines = ["| model | | " + " | ".join(f"f = {f}" for f in every) + " |"]
    lines.append("|---" * (len(every) + 2) + "|")
    for model, ideal in ideal_goodputs(run, list(found)).items():
        for name in [name for name in ALL if name in found[model]]:
            values = found[model][name]
            texts = [f"{values[f]:.3f}" if f in values else "" for f in every]
            lines.append(f"| {MODELS[model].name} | {name} | " + " | ".join(texts) + " |")
        lines.append(f"| {MODELS[model].name} | ideal |" + f" {ideal:.3f} |" * len(every))
    return [*lines, ""]


def process_tables(run: Run) -> list[str]:
    """For each group of models: a row for each contender, a column for each interval."""
    lines = [f"## {TITLES['process']}", "", ABOUT["process"], ""]
    for group in run.plan.model_groups():
        model, results = middle_model(group).name, run.results.of("fig8")
        cells = [cell for cell in results if MODELS[cell.workload].name == model]
        every = sorted({cell.every for cell in cells})
        heads = [f"**{model}**", *(f"f = {f}" for f in every), "load, s"]
        lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for name in contenders_of(cells):
            mine = {cell.every: results[cell] for cell in cells if cell.contender == name}
            texts = [_lost(mine[f]) if f in mine else "" for f in every]
            loads = run.results.process_loads.get(name)
            texts.append(Spread.of(loads).text(3) if loads else "")
            lines.append(f"| {name} | " + " | ".join(texts) + " |")
        lines.append("")
    return lines


def _lost(costs: Sequence[Cost]) -> str:
    lost = Spread.of([cost.process_lag_steps for cost in costs]).median
    return f"{lost:.1f}, {slowdown_of(costs).median:.2f}"


def best_gains(found: Goodputs) -> list[str]:
    """PCcheck's goodput over that of the paper's rivals, where the ratio is highest."""
    lines = []
    for name, paper in GAINS.items():
        gains = [
            (contenders[OURS][f] / value, MODELS[model].name, f)
            for model, contenders in found.items()
            for f, value in contenders.get(name, {}).items()
            if f in contenders.get(OURS, {}) and value > 0
        ]
        if gains:
            gain, model, f = max(gains)
            lines.append(f"- to {name}'s: {gain:.2f} ({model}, f = {f}); paper {paper:.2f}")
    return [*lines, ""]


# -- the whole ---------------------------------------------------------------------------------

TITLES = {
    "fig8": "Figure 8: slowdown against the checkpoint interval",
    "cpu": "Figure 8 with real training on the CPU",
    "fig9": "Figure 9: goodput on spot machines",
    "process": "What a dead process costs",
    "fig10": "Figure 10: through a mapping, and persistent memory",
    "fig11": "Figure 11: time to durable against size",
    "fig12": "Figure 12: checkpoints in flight, N",
    "fig13": "Figure 13: writer threads of a checkpoint, p",
    "fig14": "Figure 14: DRAM M and chunk size b",
}
ABOUT = {
    "fig8": """\
The trainer sleeps for a step, then really overwrites its state. Bytes and disk are scaled down; the
steps that a checkpoint takes on the disk, m / (t T_S), are those of the paper's model. Models with
the same ratio are one experiment. The clock starts when as many checkpoints are in flight as there
can be: training does not wait for the first ones. Slowdowns are against steps without checkpoints
just before each contender.

What differs from the paper, and why:

- **CheckFreq does as well as its policy allows.** In the artefact CheckFreq's one writer reaches
  0.46 (VGG16) to 0.81 (OPT-2.7B) of the paper's disk; more writers and more checkpoints in flight
  use the rest. Here one writer reaches the limit. Several in flight still help when one checkpoint
  is late: the next one need not wait for it.
- **Nothing is faster than the disk.** Where f steps are shorter than m / T_S, the slowdown of a
  contender that writes every checkpoint is at least (m / T_S) / (f t). What does not write every
  checkpoint can be faster there: Gemini, whose checkpoints are lost with the two machines; PCcheck
  in memory, whose newest ones are lost with the machine; and torch.save to /dev/shm, which loses
  all of them with the machine.
- **Every step** (f = 1) is not in the paper. A picture ends at a slowdown of 8; the tables do not.
- **GPM waits for the disk.** The artefact's GPM takes 0.87 s for 1.1 GB (VGG16, f = 10), which is
  1.27 GB/s; its disk has about 0.70.
- **Copies are faster here** in relation to a step: DRAM to DRAM, against PCIe in the paper.""",
    "cpu": """\
A small GPT, trained on the CPUs that the contender uses, too. On the disk as it is. Gemini is not
here, because the rate of its link follows from the limit of the disk.""",
    "fig9": """\
Computed, not run: from measured slowdowns, measured losses (steps done and not yet safe, on average
over a run) and measured loads, in the time of the paper's models. After a preemption the job loads
what a restart gets; between preemptions it trains at its slowdown. "Ideal": a checkpoint after
every step at no cost, and loads at the speed of the disk. Replacements do not interrupt the job.
The artefact computes with f/2 or f lost steps, and counts a preemption for every four GPUs that are
lost or replaced. Gemini loads from a peer that has survived. A preemption ends the machine with its
memory: "PCcheck, in memory" loads what the idle disk had taken.""",
    "process": """\
Of a training process that dies alone, while the machine and its daemon go on. In each cell: the
steps that are lost (done and not yet safe, on average over a run), and the slowdown of training.
Safe are: with PCcheck what is copied, with Gemini what is sent, with all others what is in a file
that is complete and synced, or in /dev/shm. "load": what a restart then takes, with the page cache
as it is, for a state of the size above; neither the start of Python nor that of torch is in it.""",
    "fig10": """\
PCcheck alone. The paper has persistent memory here. The engine mmap writes volumes through a
mapping and the page cache, on the disk with the limit: the plumbing of persistent memory without
its speed. The engine pmem needs a DAX file system, and is left out where there is none.""",
    "fig11": "One checkpoint at a time, from the call until a restart could get it.",
    "fig12": """\
PCcheck alone, M = max(2, N) checkpoints. One checkpoint keeps this disk busy, so with every N it
takes m / T_S or longer; with N = 1 the next copy waits for the disk.""",
    "fig13": """\
PCcheck alone, f = 10. The limit of this disk does not depend on the number of writers; the paper's
does.""",
    "fig14": """\
PCcheck alone, f = 15. The daemon needs two chunks at least. Chunks that are written are free for
the next checkpoint, so M = m lets a copy begin before the previous checkpoint is on the disk.""",
}


def _draw(run: Run, figure: str, path: Path, found: Goodputs) -> None:
    results = run.results
    if figure == "fig8":
        draw.intervals(results, figure, path)
    elif figure == "cpu":
        draw.rows(results, figure, path)
    elif figure == "fig9":
        draw.goodputs(found, ideal_goodputs(run, list(found)), path)
    elif figure == "fig11":
        draw.sizes(results, path)
    else:
        draw.series(results, figure, path, *LINES[figure])


def _by_interval(cell: Cell) -> tuple[str, str]:
    return f"f = {cell.every}", cell.setting


def _split(cell: Cell) -> tuple[str, str]:
    first, second = cell.setting.split(" ")
    return first, second


#: What grows along the axis, and a cell's line and place on the line.
LINES: dict[str, tuple[str, Callable[[Cell], tuple[str, str]]]] = {
    "fig10": ("engine", _by_interval),
    "fig12": ("N", _by_interval),
    "fig13": ("writers p", _split),
    "fig14": ("DRAM M", lambda cell: _split(cell)[::-1]),
}


def _section(run: Run, figure: str, found: Goodputs, pictures: bool) -> list[str]:
    results = run.results
    lines = [f"## {TITLES[figure]}", "", ABOUT[figure], ""]
    if pictures:
        path = common.result_path(f"figures-{figure}", ".png")
        _draw(run, figure, path, found)
        lines += [f"![{TITLES[figure]}]({path.name})", ""]
    if figure in ("fig8", "cpu"):
        for group in run.plan.model_groups() if figure == "fig8" else [(CPU,)]:
            tables = _differing(results, figure, group)
            for workload in tables:
                if figure == "fig8":
                    names = ", ".join(MODELS[name].name for name in group)
                    paper = f"; paper: {MODELS[workload].name}" if len(tables) > 1 else ""
                    lines += [f"**{names}{paper}**", ""]
                lines += slowdown_table(results, figure, workload)
    elif figure == "fig9":
        lines += [
            f"Trace: {run.trace_text}; {len(run.trace)} samples, {preemptions(run.trace)} "
            "preemptions. Highest ratios of PCcheck's goodput:", "", *best_gains(found),
            *goodput_table(run, found),
        ]  # fmt: skip
    elif figure == "fig11":
        lines += size_table(results)
    else:
        lines += setting_table(results, figure)
    return lines


def _differing(results: Results, figure: str, group: Sequence[str]) -> list[str]:
    """The workloads of a group with values from the paper; if there are none, one for all."""
    cells = [cell for cell in results.of(figure) if cell.workload in group]
    with_values = [name for name in group if any(printed(c) for c in cells if c.workload == name)]
    return with_values or [group[0]]


def _models(run: Run) -> list[str]:
    lines = ["## The models", ""]
    lines += ["| | checkpoint, GB | machines | t, s | m / (t T_S) | t here, ms | t is from |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for group in run.plan.model_groups():
        here = 1e3 * middle_model(group).scaled(run.plan.payload_bytes, run.bandwidth)
        for name in group:
            model = MODELS[name]
            lines.append(
                f"| {model.name} | {model.checkpoint_bytes / 1e9:g} | {model.machines} | "
                f"{model.step_s:g} | {model.ratio:.1f} | {here:.1f} | {model.step_source} |"
            )
    return [
        *lines, "",
        f"Checkpoint sizes: Table 3 of the paper. T_S, the paper's pd-ssd: {DISK / 1e9:.2f} GB/s "
        f"on each machine, from the artefact's own runs that wait for the disk only. Link between "
        f"machines: {8 * LINK / 1e9:g} Gbit/s, {LINK / DISK:.2f} times T_S; here "
        f"{run.bandwidth * LINK / DISK / 1e6:.0f} MB/s.", "",
    ]  # fmt: skip


def _csv(run: Run, figure: str, found: Goodputs) -> str:
    if figure != "fig9":
        return csv_text(run.results, figure)
    ideal = ideal_goodputs(run, list(found))
    rows = [
        [model, name, f, round(value, 5), round(ideal[model], 5)]
        for model, contenders in found.items()
        for name, values in contenders.items()
        for f, value in sorted(values.items())
    ]
    return table_text(["model", "contender", "every", "goodput", "ideal"], rows)


def write(run: Run, facts: dict[str, object]) -> None:
    """CSV files, pictures, the report, and a JSON document with every run."""
    found = goodputs(run)
    figures = [name for name in TITLES if name in run.results.figures()]
    if found:
        figures.insert(1, "fig9")
    pictures = True
    lines = common.heading("The figures of the paper, on this machine", facts)
    load = facts["load_before"]
    assert isinstance(load, tuple)
    lines += [
        f"Rounds: {run.plan.rounds}, contenders in turn; medians [min-max]. State "
        f"{run.plan.payload_bytes / 1e6:.1f} MB. Load average before: {load[0]:.1f}.", "",
        *(f"- {disk.text()}" for disk in dict.fromkeys((run.slow, run.fast))),
        *(f"- {note}" for note in run.notes), "",
        "The last column of each CSV file has the command that measures its row again, such as "
        f"`{next(iter((*run.results.costs, *run.results.seconds))).command()}`.", "",
    ]  # fmt: skip
    try:
        common.require_pyplot()
    except BenchError as error:
        pictures = False
        lines += [f"No pictures: {error}", ""]
    for figure in figures:
        lines += _section(run, figure, found, pictures)
        common.result_path(f"figures-{figure}", ".csv").write_text(_csv(run, figure, found))
    if run.results.process_loads:
        lines += process_tables(run)
    lines += _models(run)
    document: dict[str, object] = {"facts": facts, "plan": run.plan, "bandwidth": run.bandwidth}
    document |= {"disks": [run.slow.facts(), run.fast.facts()], "results": run.results.document()}
    common.write_results("figures", document, "\n".join(lines))
