"""The files that run PCcheck on a cluster. `make slurm-check` runs those of Slurm on a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[3] / "deploy/slurm"


def run(script: str, folder: Path, code: int) -> tuple[int, str]:
    """A script of Slurm's, on a node where pccheckctl ends with this code."""
    program = folder / "pccheckctl"
    program.write_text(f'#!/bin/sh\necho "$@" >>"{folder}/asked"\nexit {code}\n')
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_UID": "1000", "SLURM_JOB_ID": "12"}
    done = subprocess.run([SLURM / script], env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (3, 0), (12, 12)])
def test_no_job_begins_where_pccheckd_does_not_answer(tmp_path: Path, code: int, ends: int) -> None:
    assert run("prolog.sh", tmp_path, code) == (ends, "")
    assert (tmp_path / "asked").read_text() == "status\n"


def test_the_end_of_a_job_waits_for_its_checkpoints_and_drains_no_node(tmp_path: Path) -> None:
    assert run("epilog.sh", tmp_path, 0) == (0, "")
    code, told = run("epilog.sh", tmp_path, 1)
    assert code == 0 and "job 12: checkpoints of uid 1000 may not be on the disk" in told
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["--uid 1000 wait --ended --timeout 2min"] * 2


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.s*")), ids=lambda path: path.name)
def test_scripts_are_valid(path: Path) -> None:
    subprocess.run(["sh", "-n", path], check=True)
