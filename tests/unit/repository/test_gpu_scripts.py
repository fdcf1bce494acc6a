"""The scripts for a machine with a GPU, as far as the stand-in and this machine let them go: the
first session with a real one must not find them broken."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import check
from tests.support import fakegpu
from tests.support.programs import Program, python

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="of the machine without one")
PROBE = [sys.executable, "bench/gpu/probe.py", "--small"]


def probe(*flags: str, environment: dict[str, str]) -> dict[str, Any]:
    ran = subprocess.run(
        [*PROBE, *flags], cwd=check.ROOT, env=os.environ | environment, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


@pytest.mark.timeout(300)
def test_every_step_of_the_probe_runs_on_the_stand_in(tmp_path: Path) -> None:
    document = probe("--limit-s", "200", environment=fakegpu.environment(tmp_path))
    assert document["driver"] == "found"
    steps = document["steps"]
    assert {step for step, _ in check.TELLING} <= steps.keys()
    assert {name: step["ended"] for name, step in steps.items()} == dict.fromkeys(steps, "ok")
    said = {step: [key for key in keys if key in steps[step]] for step, keys in check.TELLING}
    small = {"registration", "uids"}  # with --small of other sizes; not asked without root
    assert all(said[step] for step in said.keys() - small), said


def test_without_a_driver_the_probe_says_so() -> None:
    if check.has_no_gpu():  # else this machine has one
        assert probe("--only", "facts", environment={})["driver"] == "none"


# -- what check.py runs ------------------------------------------------------------------------


Commands = Callable[[str], dict[str, list[str]]]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    def recorded(half: str) -> dict[str, list[str]]:
        """Every command of every part of a half, by name; --dry only adds to them."""
        made: dict[str, list[str]] = {}

        def run(self: check.Check, name: str, command: list[str], limit_s: float) -> check.Ended:
            made[name] = command
            return self.record(name, check.Ended("exit code 1", 0.0, ""))

        monkeypatch.setattr(check.Check, "run", run)
        (tmp_path / "pccheck-1-py3-none-any.whl").touch()
        options = argparse.Namespace(
            dry=True,
            limit_s=470,
            output=tmp_path,
            wheels=tmp_path,
            directory=tmp_path,
            half=half,
            logs=None,
        )  # fmt: skip
        one = check.Check(options, tmp_path)
        for _, part in one.parts():
            part()
        text = one.stem.with_suffix(".md").read_text()
        assert all(f"| {name} | exit code 1 |" in text for name in made)
        return made

    return recorded


def test_every_bench_takes_what_check_gives_it(commands: Commands) -> None:
    made = commands("benches")
    benches = {name: command for name, command in made.items() if "bench.gpu." in " ".join(command)}
    assert benches.keys() == {"bandwidth", "resume", "train_in_memory", "train"}
    ended = subprocess.run(
        [*commands("checks")["probe"], "--no-such-flag"], cwd=check.ROOT, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    said = {"probe": ended.stderr}
    for name, (_, _, module, *words) in benches.items():
        with Program(module, *words, "--no-such-flag") as bench:
            said[name] = bench.finish()
    for name, text in said.items():
        last = text.strip().splitlines()[-1]
        assert last.endswith("error: unrecognized arguments: --no-such-flag"), (name, text)
    assert made["carried wheel"][-1].endswith(".whl")
    assert made["build"][-1] == str(check.ROOT)


def test_the_tests_that_check_runs_are_there(
    commands: Commands,
) -> None:
    first, others = (collected(commands("checks")[name]) for name in ("first_tests", "tests"))
    assert first >= len(check.FIRST) and others > 100


def collected(command: list[str]) -> int:
    _, _, module, *words = (word for word in command if "junitxml" not in word)
    with python(module, *words, "--collect-only", "-q") as ran:
        said = ran.finish()
    assert ran.returncode == 0, said
    found = re.findall(r"^tests/integration/test_gpu_\w+\.py: (\d+)$", said, re.MULTILINE)
    return sum(map(int, found))


def test_the_parts_fit_into_the_time() -> None:
    for half, budgets_s in check.BUDGETS_S.items():
        assert sum(budgets_s.values()) <= check.LIMIT_S, half


def test_what_is_needed_and_nowhere_is_named_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "version_of", lambda name: "" if name == "pyzmq" else "99")
    assert check.unavailable(tmp_path) == ["pyzmq"]
    (tmp_path / "pyzmq-27.0-cp312-abi3-manylinux_2_28_x86_64.whl").touch()
    assert check.unavailable(tmp_path) == []


def test_what_the_machine_may_lack_is_named() -> None:
    """Distributions that PCcheck and its tests need, in the list and in the command that fetches
    them."""
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    wanted |= {"setuptools", "pytest", "pytest-timeout", "hypothesis"}
    assert wanted <= check.NEEDED.keys()
    assert check.__doc__ is not None
    assert set(check.NEEDED) <= set(check.__doc__.split())
