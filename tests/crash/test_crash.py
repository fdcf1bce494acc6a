"""Rows 1, 2, 3 and 7 of the crash test plan, at their floors, and the mutants: run from C.

Each program prints its counts and its seed; PCC_SEED repeats it, a violation leaves a replay file.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: A volume is opened for each image: what it takes is kept for the next one.
QUICK_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.mxfast=0:glibc.malloc.tcache_max=8192"}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Builds the programs with the core as it is; one process at a time."""
    (HERE / "build").mkdir(exist_ok=True)
    with (HERE / "build/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            ["make", "--no-print-directory", "all"], cwd=HERE, capture_output=True, text=True
        )
    assert made.returncode == 0, made.stdout + made.stderr


def run(*command: str) -> str:
    """Runs one program and gives what it printed; a violation fails with seed and replay file."""
    done = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, env=os.environ | QUICK_MALLOC
    )
    print(done.stdout)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def count(pattern: str, output: str) -> int:
    """The number in front of `pattern`'s words in a summary line."""
    found = re.search(rf"(\d+) {pattern}", output)
    assert found, f"no {pattern!r} in: {output}"
    return int(found[1])


# What the engines promise of their writes: pwrite, mmap, pmem.
MODELS = pytest.mark.parametrize("model", ["direct", "mmap", "pmem"])


@MODELS
@pytest.mark.long
def test_crash_states(model: str) -> None:
    output = run("build/crash_enum", "--model", model)
    assert count("distinct images", output) >= 1_000_000
    assert count("positions", output) >= 5_000
    assert count("repaired", output) >= 10_000
    assert count("saves with a base", output) >= 20
    assert count("chunks that were not copied", output) >= 10
    assert count("saves of open length", output) >= 200
    assert count("violations", output) == 0


def test_crash_and_rot() -> None:
    output = run("build/rot")
    assert count("cases with keep=2", output) >= 10_000
    assert count("violations", output) == 0


@MODELS
def test_fault_at_every_io(model: str) -> None:
    output = run("build/fault_loop", "--model", model)
    assert count("cases", output) >= 2_000
    assert count("violations", output) == 0


def test_bit_flips() -> None:
    output = run("build/bit_flip")
    assert count("flips", output) >= 150_000
    assert count("violations", output) == 0


@pytest.mark.long
def test_mutants_are_killed() -> None:
    output = run("make", "-s", "--no-print-directory", f"PYTHON={sys.executable}", "mutants")
    assert count("mutants killed", output) >= 6
    assert count("survived", output) == 0
