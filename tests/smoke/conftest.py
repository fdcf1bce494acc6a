"""Runs a module of the project as its user does, in a process of its own, and keeps its results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import python

ROOT = Path(__file__).parents[2]

#: Answers at once, so that a sweep of fifty settings costs nothing; what it measures is no figure.
FIO = """\
#!/bin/sh
case "$*" in
--version) echo fio-0 ;;
*) echo '{"jobs": [{"read": {"bw_bytes": 1e9}, "write": {"bw_bytes": 1e9}}]}' ;;
esac
"""
#: Draws nothing; for machines without matplotlib, which only pictures need.
MATPLOTLIB = """\
from unittest.mock import MagicMock

close = MagicMock()
figure = MagicMock()
figure.return_value.add_subplot.return_value.get_legend_handles_labels.return_value = ([], [])

def subplots(rows, *_, **options):
    return MagicMock(), [MagicMock(**{"barh.return_value": [MagicMock()]}) for _ in range(rows)]
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What it printed, and the directory where its results are."""

    out: str
    results: Path

    def document(self, name: str) -> Any:
        """The JSON document of a bench, whose table is there, too."""
        (found,) = self.results.glob(f"{name}-20*.json")
        assert found.with_suffix(".md").read_text().startswith("# ")
        return json.loads(found.read_text())


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(module or script, *flags)`; fails with what it printed when it does not end with 0."""
    for name, text in {"bin/fio": FIO, "stand-in/matplotlib/pyplot.py": MATPLOTLIB}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PCC_BENCH_RESULTS": str(tmp_path / "results"),
        "OMP_NUM_THREADS": "1",
    }
    if not any((Path(place) / "matplotlib").is_dir() for place in sys.path):
        environment["PYTHONPATH"] += f":{tmp_path / 'stand-in'}"

    def started(what: str, *flags: object) -> Ran:
        with python(what, *flags, environment=environment, cwd=tmp_path) as program:
            printed = program.finish()
            assert program.returncode == 0, printed[-8000:]
        return Ran(printed, tmp_path / "results")

    return started
