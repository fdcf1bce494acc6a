"""The pure parts of bench/figures: scaling, traces, goodput, losses, the cells and their tables."""

from __future__ import annotations

import csv
import io
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.common import MIB, BenchError
from bench.figures import __main__ as program
from bench.figures import disk, measure, paper, report
from bench.figures.goodput import (
    Costs,
    Sample,
    goodput,
    make_trace,
    preemptions,
    read_trace,
    stretches,
)
from bench.figures.measure import Cost
from bench.figures.plan import FULL, QUICK, Plan, sensitivity
from bench.figures.registry import ALL
from bench.figures.results import Cell, Results, csv_text
from bench.figures.rounds import rotated
from bench.figures.service import Knobs
from bench.figures.trainers import Paced


def trace(*gpus: int) -> list[Sample]:
    """A sample every ten seconds."""
    return [Sample(10.0 * number, count) for number, count in enumerate(gpus)]


@pytest.mark.parametrize("name", paper.MODELS)
def test_a_scaled_model_keeps_its_ratio(name: str) -> None:
    model = paper.MODELS[name]
    step_s = model.scaled(16 * MIB, 25e6)
    assert 16 * MIB / 25e6 / step_s == pytest.approx(model.ratio)


def test_scaling_to_the_papers_own_size_and_disk_gives_the_papers_step() -> None:
    model = paper.MODELS["opt-2.7b"]
    assert model.scaled(22_500_000_000, paper.DISK) == pytest.approx(2.458)


def test_models_of_the_same_ratio_are_one_experiment() -> None:
    groups = FULL.model_groups()
    assert sorted(name for group in groups for name in group) == sorted(paper.MODELS)
    assert ("transformerxl", "bloom-7b", "opt-2.7b") in groups
    assert all(len(group) == 1 for group in QUICK.model_groups())


# -- traces and goodput ------------------------------------------------------------------------


def test_a_trace_of_the_papers_format_is_read() -> None:
    lines = ",Time,GPUs\n0,100.5,56\n1,163.5,36\n".splitlines()
    assert read_trace(lines) == [Sample(100.5, 56), Sample(163.5, 36)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0,100.5,56\n1,163.5,36\n",
        ",Time,GPUs\n0,100.5,56\n",
        ",Time,GPUs\n0,100.5,56\n1,100.5,36\n",
        ",Time,GPUs\n0,100.5,many\n1,163.5,36\n",
        ",Time,GPUs\n0,100.5\n1,163.5,36\n",
    ],
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="a trace"):
        read_trace(text.splitlines())


def test_the_same_seed_makes_the_same_trace() -> None:
    first, again = (make_trace(7, 64, 300, 63.0, 8.0, 8.0) for _ in range(2))
    assert first == again
    assert first != make_trace(8, 64, 300, 63.0, 8.0, 8.0)
    assert all(0 <= sample.gpus <= 64 for sample in first)
    # 300 x 63 s are 5.25 hours with 8 preemptions each; chance moves that by a half at most.
    assert 21 <= preemptions(first) <= 63


def test_a_stretch_ends_where_gpus_go_but_not_where_they_come() -> None:
    assert stretches(trace(4, 4, 3, 4, 4, 2)) == [20, 30, 0]
    assert preemptions(trace(4, 4, 3, 4, 4, 2)) == 2


def test_nothing_trains_while_no_gpu_is_there() -> None:
    assert stretches(trace(4, 4, 0, 0, 4, 4)) == [20, 10]
    assert stretches(trace(0, 0, 4, 4, 0, 0)) == [20]


def test_goodput_without_interruptions_is_the_inverse_of_the_slowdown() -> None:
    assert goodput([1000.0], Costs(2.0, 1.25, 99.0, 99.0)) == pytest.approx(0.8)


def test_each_preemption_costs_the_loss_before_and_the_load_after() -> None:
    # 100 s at 1 s a step, twice: 90 steps, as ten are lost; then 95, as the load takes 5 s.
    assert goodput([100.0, 100.0], Costs(1.0, 1.0, 10.0, 5.0)) == pytest.approx(185 / 200)


def test_a_stretch_that_is_too_short_keeps_nothing_and_takes_nothing_away() -> None:
    assert goodput([100.0, 4.0, 100.0], Costs(1.0, 1.0, 10.0, 5.0)) == pytest.approx(185 / 204)


def test_more_loss_and_more_slowdown_are_less_goodput() -> None:
    base = goodput([500.0] * 4, Costs(1.0, 1.1, 10.0, 5.0))
    assert goodput([500.0] * 4, Costs(1.0, 1.1, 20.0, 5.0)) < base
    assert goodput([500.0] * 4, Costs(1.0, 1.2, 10.0, 5.0)) < base
    assert goodput([500.0] * 4, Costs(1.0, 1.1, 10.0, 9.0)) < base


# -- what a crash would lose -------------------------------------------------------------------


def test_the_lag_is_the_steps_since_the_newest_checkpoint_that_is_safe() -> None:
    ends = [float(second) for second in range(1, 11)]  # step 1 ends at 1 s
    # Every second step is saved and safe at once: after a step none or one is at risk.
    landed = [(step, float(step)) for step in range(2, 11, 2)]
    assert measure.lag(ends, 1, landed, 2.0, 10.0) == pytest.approx(0.5, abs=0.02)
    # ... and two seconds later: two steps more.
    later = [(step, when + 2) for step, when in landed]
    assert measure.lag(ends, 1, later, 4.0, 10.0) == pytest.approx(2.5, abs=0.02)


def test_a_step_that_was_safe_before_counts_after_an_older_one_has_landed() -> None:
    ends = [1.0, 2.0, 3.0, 4.0]
    assert measure.lag(ends, 1, [(3, 3.0), (2, 3.5)], 3.9, 4.0) == 0.0


# -- the plan, the cells -----------------------------------------------------------------------


def test_every_point_of_the_sensitivity_figures_is_a_different_one() -> None:
    points = sensitivity(FULL)
    assert len({(point.figure, point.setting) for point in points}) == len(points)
    assert {point.figure for point in points} == {"fig10", "fig12", "fig13", "fig14"}
    assert [p.setting for p in sensitivity(Plan(setting="N=2", figures=("fig12",)))] == ["N=2"]


@pytest.mark.parametrize("point", sensitivity(FULL), ids=lambda point: point.setting)
def test_the_knobs_are_what_the_setting_says(point: object) -> None:
    assert hasattr(point, "knobs")
    flags = point.knobs.flags(FULL.payload_bytes)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    chunk, dram = (int(given[flag].removesuffix("MiB")) for flag in ("--chunk", "--dram"))
    assert dram >= 2 * chunk
    assert int(given["--slots"]) - int(given["--keep"]) == point.knobs.in_flight
    assert dram * MIB == pytest.approx(point.knobs.dram * FULL.payload_bytes, rel=0.01)


def test_memory_for_less_than_two_chunks_becomes_two() -> None:
    flags = Knobs(dram=1.0, chunks=1).flags(16 * MIB)
    assert flags[flags.index("--dram") + 1] == "32MiB"


def test_three_states_in_memory_have_room_for_their_manifests() -> None:
    flags = Knobs(dram=3.0, chunks=16, durable_every="auto").flags(16 * MIB)
    assert flags[flags.index("--dram") + 1] == f"{3 * (16 + 1)}MiB"


def test_the_order_rotates() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip
    assert rotated([], 3) == []


@pytest.mark.parametrize(
    "cell",
    [
        Cell("fig8", "vgg16", ALL[4], 10),
        Cell("fig13", "opt-1.3b", "PCcheck", 10, "N=2 p=1"),
        Cell("fig11", "any", "GPM", setting="4 MiB, limit"),
        Cell("cpu", "gpt-cpu", "torch.save", 5),
    ],
)
def test_the_command_of_a_cell_measures_just_that_cell(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(cell.command())[2:])
    plan = program._plan(program._flags())
    assert plan.figures == (cell.figure,)
    assert plan.contenders == (cell.contender,)
    assert plan.setting == cell.setting
    if cell.figure == "fig8":
        assert plan.models == (cell.workload,)
    if cell.every:
        assert cell.every in (plan.intervals + plan.cpu_intervals + plan.in_flight_intervals)


# -- tables ------------------------------------------------------------------------------------


def results() -> Results:
    made = Results()
    for slowdown in (1.5, 1.1, 1.2):
        made.add(Cell("fig8", "vgg16", "GPM", 10), Cost(0.1, slowdown, 30.0, 0.7, 12.0, 9.0))
    made.add(Cell("fig8", "vgg16", "PCcheck", 25), Cost(0.1, 1.01, 3.0, 0.7, 30.0, 4.0))
    made.seconds[Cell("fig11", "any", "GPM", setting="4 MiB, limit")] = [0.2, 0.4]
    return made


def test_a_csv_file_has_medians_extremes_and_the_papers_value() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(results(), "fig8"))))
    assert [row["contender"] for row in rows] == ["GPM", "PCcheck"]
    assert [rows[0][key] for key in ("slowdown", "slowdown_min", "slowdown_max", "runs")] == [
        "1.2", "1.1", "1.5", "3",
    ]  # fmt: skip
    assert float(rows[0]["printed_slowdown"]) == pytest.approx(15.756 / 6.651, abs=1e-3)
    assert rows[0]["rerun"].startswith("python -m bench.figures --only fig8 --model vgg16")


def test_a_csv_file_of_sizes_has_seconds() -> None:
    (row,) = csv.DictReader(io.StringIO(csv_text(results(), "fig11")))
    assert float(row["safe_s"]) == pytest.approx(0.3)
    assert row["slowdown"] == ""


def test_a_table_has_an_empty_place_for_what_was_not_measured() -> None:
    lines = report.slowdown_table(results(), "fig8", "vgg16")
    assert lines[0].startswith("| | f = 10 | f = 25 |")
    ours, gpm = lines[2:4]
    assert ours.startswith("| PCcheck |  | 1.01 [1.01-1.01] n=1 (paper 1.10) |")
    assert gpm.startswith("| GPM | 1.20 [1.10-1.50] n=3 (paper 2.37) |  |")


def test_a_dead_process_costs_the_steps_that_it_loses() -> None:
    """What was not measured has an empty place; the load of a dead machine is not here."""
    made = results()
    made.process_loads, made.loads = {"GPM": [0.5, 0.7, 0.4]}, {"PCcheck": [3.0]}
    lines = report.process_tables(run_of(made, replace(FULL, models=("vgg16",))))
    assert lines[-5:] == [
        "| **VGG16** | f = 10 | f = 25 | load, s |", "|---|---|---|---|",
        "| PCcheck |  | 4.0, 1.01 |  |",
        "| GPM | 9.0, 1.20 |  | 0.500 [0.400-0.700] n=3 |", "",
    ]  # fmt: skip


def run_of(made: Results, plan: Plan = FULL) -> report.Run:
    plain = disk.Disk(Path(), 25_000_000, 25e6, 25e6)
    return report.Run(plan, made, plain, plain, trace(4, 3, 3), "", 25e6)


def test_goodputs_are_in_the_time_of_the_papers_model() -> None:
    made = results()
    made.loads = {"GPM": [0.5]}
    model = paper.MODELS["vgg16"]
    scale = model.step_s / model.scaled(FULL.payload_bytes, 25e6)
    expected = goodput([10.0, 10.0], Costs(model.step_s, 1.2, 12.0, 0.5 * scale))
    assert report.goodputs(run_of(made)) == {"vgg16": {"GPM": {10: expected}}}


# -- what gives a torn checkpoint away, and the disk -------------------------------------------


def test_a_torn_state_is_noticed() -> None:
    trainer = Paced(MIB, 0.0)
    trainer.step(lambda: None)
    assert trainer.saved_step() == 1
    next(iter(trainer.state.model.parameters())).data[7] = 9
    with pytest.raises(BenchError, match=r"torn: of the steps \[1.0, 9.0\]"):
        trainer.saved_step()


def test_a_disk_with_a_limit_needs_root_and_says_what_else_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(BenchError, match=r"needs root: run as root, or .* --directory DIR"),
        disk.limited(tmp_path, 64 * MIB, 10_000_000),
    ):
        pass


def test_the_limit_is_set_for_reads_and_writes_and_taken_back(tmp_path: Path) -> None:
    files = [tmp_path / f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    with disk._limit_v1(tmp_path, "7:3", 1000):
        assert [file.read_text() for file in files] == ["7:3 1000"] * 2
        assert (tmp_path / "cgroup.procs").read_text() == str(os.getpid())
    assert [file.read_text() for file in files] == ["7:3 0"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_disk_with_a_limit_leaves_nothing_behind(tmp_path: Path) -> None:
    """Where the kernel has no such limit, an error says so, and nothing is left either."""
    try:
        with disk.limited(tmp_path, 192 * MIB, 100_000_000) as made:
            assert made.limit == 100_000_000
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not made.path.exists()
    except BenchError as error:
        assert disk.FIX in str(error)
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
