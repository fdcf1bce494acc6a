"""Every bench from end to end, as small as possible: the figures mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import ours
from tests.smoke.conftest import ROOT, Run

SMALL = ("--rounds", "1")
BENCHES = {
    "persist": ("--sizes", "8MiB", *SMALL),
    "core": ("--sizes", "32MiB", "--engine", "pwrite", *SMALL),
    "call_overhead": ("--calls", "2", "--warm", "2"),
    "growth": ("--points", "2", *SMALL),
    "kills": ("--kills", "1", "--mib", "8", "--settings", "2,5 2,1,auto"),
    "first": ("--sizes", "8MiB", *SMALL),
    "recover": ("--sizes", "32MiB", *SMALL),
    "memory": ("--steps", "4", "--sizes", "8MiB", "--trainers", "paced", *SMALL),
    "nodes": ("--nodes", "2", "--steps", "2", *SMALL),
    "peers": ("--size", "8MiB", *SMALL),
    "scale": ("--ranks", "16", "--checkpoints", "2"),
    "beside": ("--unlimited", "--size", "1MiB", "--saves", "1", "--every", "0.1", *SMALL),
    "observability": ("--size", "8MiB", "--pairs", "1"),
    "ranks": ("--size", "1MiB", "--steps", "1", "--cases", "2 ranks, replicated", *SMALL),
    "resume_check": ("--small",),
    "sessions": ("--sessions", "2", "--size", "8MiB", "--seconds", "0.1", *SMALL),
    "startup": ("--runs", "1", "--sessions", "2"),
    "figures": ("--smallest", "--directory", "."),
    "stages": ("--smallest", *SMALL),
    "tune": ("--smallest", "--model", "opt-2.7b", *SMALL, "--directory", "."),
}
#: They leave no document in results/.
OTHERS = {"timeline": ("-o", "timeline.png")}
#: Parts of each half of gpu-check; other tests run the probe's.
GPU = {"check": ("facts", "bandwidth"), "bench": ("gate",)}
#: What others are made of.
PARTS = {"__init__", "common", "fio", "gaps", "ours", "rivals", "simulated"}
#: Needs root, CRIU and minutes: run by hand.
BY_HAND = {"transparent"}


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHES)
def test_it_ends_well_and_leaves_its_figures(name: str, run: Run) -> None:
    document = run(f"bench.{name}", *BENCHES[name]).document(name)
    assert document


@pytest.mark.parametrize("name", OTHERS)
def test_it_ends_well(name: str, run: Run) -> None:
    assert run(f"bench.{name}", *OTHERS[name]).out


@pytest.mark.parametrize("half", GPU)
def test_gpu_check_without_a_gpu_ends_well(half: str, run: Run, tmp_path: Path) -> None:
    run(
        str(ROOT / "bench/gpu/check.py"), half, "--dry", "--no-install", "--only", *GPU[half],
        "--output", tmp_path, "--directory", tmp_path,
    )  # fmt: skip
    (found,) = tmp_path.glob(f"gpu-*-{half}.json")
    document = json.loads(found.read_text())
    assert document["parts"].keys() == document["ended"].keys() == set(GPU[half])


def test_kinds_of_scripts_that_are_killed_have_the_same_losses(run: Run, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    run("bench.gpu.kinds", "--device", "cpu", "--lanes", 1, "--only", "push", "--json", kept)
    (row,) = json.loads(kept.read_text())["rows"]
    assert row["equal"] and row["first_steps"][0] == 1 < row["first_steps"][1]


def test_no_bench_is_left_out() -> None:
    made = {path.stem for path in (ROOT / "bench").glob("*.py")}
    made |= {path.parent.name for path in (ROOT / "bench").glob("*/__main__.py")}
    assert made - PARTS - BY_HAND == BENCHES.keys() | OTHERS.keys()


def test_benches_start_the_daemon_that_users_start(tmp_path: Path) -> None:
    """That of the tests is forked from a warm process, and is ready six times sooner."""
    theirs = [
        p.name for p in (ROOT / "bench").rglob("*.py") if "tests.support.daemon" in p.read_text()
    ]
    assert theirs == []
    with ours.Daemon(storage=tmp_path) as daemon:
        assert daemon.command()[1:3] == ["-m", "pccheckd"]
