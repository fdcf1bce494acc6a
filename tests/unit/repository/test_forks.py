"""A fork that a test makes is no second worker, whatever the fork raises."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = """
import os

def test_forks():
    child = os.fork()
    if child == 0:
        raise OSError("no room")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 70

def test_after_it():
    open("ran", "a").write("once")
"""


def test_a_fork_that_raises_ends_and_runs_no_test(tmp_path: Path) -> None:
    (tmp_path / "test_forks.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_makereport\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-s"]
    ran = subprocess.run(
        [*command, "--rootdir", tmp_path, "test_forks.py"], cwd=tmp_path, text=True,
        capture_output=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout
    assert (tmp_path / "ran").read_text() == "once"
    assert "test_forks has ended" in ran.stdout + ran.stderr
    assert "no room" in ran.stdout + ran.stderr
