"""The scripts for a machine with a GPU, as far as the stand-in and this machine let them go: the
first session with a real one must not find them broken."""

from __future__ import annotations

import argparse
import importlib
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

from bench.gpu import check, contender, probe
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


def test_every_part_takes_the_command_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        """Ends a bench when its options are parsed."""

    def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
        raise ParsedError(parser.parse_args())

    monkeypatch.setattr(contender, "begin", begin)
    for part in (*check.PARTS, *check.BENCHES):
        for dry in ("", part.dry):
            words = [*command_of(part), *dry.split()]
            if words[0] == "-m" and words[1].startswith("bench."):
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
