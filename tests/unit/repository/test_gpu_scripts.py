"""The scripts for a machine with a GPU, as far as the stand-in and this machine let them go: the
first session with a real one must not find them broken."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import check, contender, probe, targets
from tests.support import fakegpu, standin
from tests.support.as_user import everybody_enters
from tests.support.programs import python

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="of the machine without one")
SMALL = check.Part("small", 20, "-c pass")


def command_of(part: check.Part) -> list[str]:
    return shlex.split(part.command.format(out="out", budget=5, directory="."))


@pytest.mark.timeout(900)
def test_parts_of_the_probe_on_the_stand_in_end_ok(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = stack.enter_context(standin.device_memory())
    for name, value in fakegpu.environment(gpus, dead="keep").items():
        monkeypatch.setenv(name, value)
    ran = subprocess.run(
        [sys.executable, "bench/gpu/probe.py", "--small"], cwd=check.ROOT, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    steps: dict[str, Any] = check.json.loads(ran.stdout)["steps"]
    assert ran.returncode == 0 and steps.keys() == probe.PARTS.keys(), ran.stdout
    lacking = {name for name, step in steps.items() if step["ended"] != "ok"}
    assert lacking <= {"mps", "power"}, lacking
    refused = {name: fact for name, fact in steps["vmm"].items() if "refused" in str(fact)}
    assert not refused
    right = {key: fact for key, fact in steps["death"].items() if isinstance(fact, dict)}
    assert all(fact.get("right") is not False for fact in right.values()), right
    if not everybody_enters(check.ROOT):
        pytest.skip("another user cannot load the stand-in from here")
    vmm = steps["vmm"]
    assert vmm.get("mapped_right") == vmm.get("plain_right") == [3, 3], vmm


def test_a_probe_without_a_driver_reports_not_here() -> None:
    if check.asked_gpu():
        pytest.skip("this machine has one")
    found: dict[str, Any] = {}
    probe.run("facts", True, found.update)
    assert found["ended"].startswith("not here: ")


def test_a_check_leaves_an_archive_and_names_what_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (
        SMALL,
        check.Part("failing", 20, "-c raise(SystemExit(3))"),
        check.Part("long", 3600, "-c pass"),
    )
    monkeypatch.setitem(check.HALVES, "check", (parts, 440))
    monkeypatch.setattr(
        sys, "argv", ["check.py", "check", "--dry", "--no-install", "--output", str(tmp_path)]
    )
    assert check.main() == 1
    (archive,) = tmp_path.glob("gpu-*-check.tar.gz")
    (document,) = tmp_path.glob("gpu-*-check.json")
    ended = check.json.loads(document.read_text())["ended"]
    assert ended["small"]["how"] == "ok"
    assert ended["failing"]["how"] == "failed: exit code 3"
    assert re.fullmatch(r"skipped: \d+ s were left", ended["long"]["how"])
    with tarfile.open(archive) as packed:
        assert {Path(name).suffix for name in packed.getnames()} == {".json", ".md", ".log"}


#: Parts that have the figure of a sentence.
DECISIVE = sorted({target.part for target in targets.TARGETS})


def test_each_sentence_has_a_part_of_one_half() -> None:
    halves = [{part.name for part in parts} for parts, _ in check.HALVES.values()]
    assert halves[0].isdisjoint(halves[1])
    assert set(DECISIVE) <= halves[0] | halves[1]
    assert len({target.sentence for target in targets.TARGETS}) == len(targets.TARGETS)


@pytest.mark.parametrize(("half", "behind"), [("check", 1), ("bench", 0)])
def test_there_is_time_for_what_decides(half: str, behind: int) -> None:
    """The parts with a sentence come first, `behind` so many others, with limits that fit."""
    parts, limit_s = check.HALVES[half]
    decisive = [n for n, part in enumerate(parts) if part.name in DECISIVE]
    assert decisive == list(range(behind, behind + len(decisive)))
    latest = parts[decisive[-1]]
    # Limits are generous: what comes last needs no more than most of what the others leave.
    before_s = sum(part.seconds for part in parts[: decisive[-1]])
    assert 0.85 * before_s + latest.seconds <= limit_s


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DECISIVE)
def test_the_dry_run_of_a_part_has_its_figures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = next(h for h, (parts, _) in check.HALVES.items() if name in [p.name for p in parts])
    monkeypatch.setattr(
        sys, "argv", ["check.py", half, "--dry", "--no-install", "--output", str(tmp_path),
                      "--directory", str(tmp_path), "--limit-s", "800", "--only", name],
    )  # fmt: skip
    assert check.main() == 0
    (document,) = tmp_path.glob("gpu-*.json")
    judged = check.json.loads(document.read_text())["targets"]
    sentences = {target.sentence for target in targets.TARGETS if target.part == name}
    assert {one["sentence"] for one in judged if one["verdict"] == targets.DRY} == sentences


@pytest.mark.parametrize(
    ("values", "how", "dry", "verdict"),
    [
        ([1.0, 1.03, 9.0], "ok", False, targets.HOLDS),
        ([1.0, 1.04, 1.04], "ok", False, targets.MISSED),
        ([1.0, 1.0], "failed: exit code 1", False, targets.TOO_FEW),
        ([1.0, 1.04], "ok", True, targets.DRY),
        ([], "ok", False, targets.NO_FIGURE),
        ([], "ok", True, targets.NO_FIGURE),
        ([], "failed: it took more than 3 s", False, targets.NOT_MEASURED),
    ],
)
def test_a_verdict(values: list[float], how: str, dry: bool, verdict: str) -> None:
    target = targets.Target("", "a", lambda part: part["values"], most=1.03, runs=3)
    document = {"dry": dry, "ended": {"a": {"how": how}}, "parts": {"a": {"values": values}}}
    assert target.judge(document)[0] == verdict
    assert target.judge({"dry": dry, "ended": {}, "parts": {}})[0] == targets.NOT_MEASURED


def test_a_part_without_its_figure_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check.HALVES, "check", ((check.Part("ways", 20, "-c pass"),), 440))
    monkeypatch.setattr(
        sys, "argv", ["check.py", "check", "--dry", "--no-install", "--output", str(tmp_path)]
    )
    assert check.main() == 1


def test_every_part_takes_the_command_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        """Ends a bench when its options are parsed."""

    def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
        raise ParsedError(parser.parse_args())

    monkeypatch.setattr(contender, "begin", begin)
    for part in (*check.PARTS, *check.BENCHES):
        for dry in ("", part.dry):
            words = [*command_of(part), *dry.split()]
            if words[0] == "-m" and "--budget-s" in words:
                monkeypatch.setattr(sys, "argv", words[1:])
                with pytest.raises(ParsedError):
                    importlib.import_module(words[1]).main()
            elif words[0].endswith("probe.py"):
                assert words[1] in probe.PARTS and part.seconds >= probe.PARTS[words[1]][0], part


def test_the_tests_that_a_check_runs_are_there() -> None:
    first, others = (
        collected(command_of(part)) for part in check.PARTS if part.name.endswith("tests")
    )
    assert first >= len(check.FIRST) and others > 100


def collected(command: list[str]) -> int:
    _, module, *words = (word for word in command if "junitxml" not in word)
    with python(module, *words, "--collect-only", "-q") as ran:
        said = ran.finish()
    assert ran.returncode == 0, said
    found = re.findall(r"^tests/integration/test_gpu_\w+\.py: (\d+)$", said, re.MULTILINE)
    return sum(map(int, found))


POOL = """
import ctypes, sys
from tests.standin.behaviours import Driver, export, ipc_capable, range_of
cuda, pool = Driver(), ctypes.CDLL(sys.argv[1])
pool.pool_alloc.restype = ctypes.c_void_p
with cuda.on(0):
    memory = pool.pool_alloc(ctypes.c_ssize_t(3 << 20), 0, None)
    assert range_of(cuda, memory)[0] == memory and ipc_capable(cuda, memory)
    export(cuda, memory)
    pool.pool_free(ctypes.c_void_p(memory), ctypes.c_size_t(3 << 20), 0, None)
    assert cuda.code("cuMemFree_v2", memory) != 0
"""


def test_the_pool_of_the_page_has_memory_that_can_be_shared(
    tmp_path: Path, stack: ExitStack
) -> None:
    page = (check.ROOT / "docs" / "gpu.md").read_text()
    (source,) = re.findall(r"```c\n(.*?)```", page, re.DOTALL)
    (tmp_path / "pool.c").write_text(source)
    line = source.partition(" */")[0].removeprefix("/* ").split()
    library = f"-L{standin.build().parent}"
    subprocess.run([*line, library, "-Wall", "-Werror"], cwd=tmp_path, check=True)
    gpus = fakegpu.environment(stack.enter_context(standin.device_memory()))
    subprocess.run(
        [sys.executable, "-c", POOL, str(tmp_path / "pool.so")], cwd=check.ROOT, check=True,
        env=os.environ | gpus,
    )  # fmt: skip


def test_what_must_be_carried_is_named() -> None:
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    assert wanted | {"setuptools", "pytest", "pytest-timeout", "hypothesis"} <= check.CARRIED.keys()


def test_only_what_is_missing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "version_of", lambda name: "" if name == "pyzmq" else "99")
    assert check.missing() == ["pyzmq"]


def test_wheels_of_other_sources_are_noticed(tmp_path: Path) -> None:
    assert not check.is_stale(tmp_path)
    (tmp_path / "SOURCES").write_text(check.sources() + "\n")
    assert not check.is_stale(tmp_path)
    (tmp_path / "SOURCES").write_text("of another commit\n")
    assert check.is_stale(tmp_path)
