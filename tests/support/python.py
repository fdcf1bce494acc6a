"""`python [-m] WHAT WORDS`, for Program: what it runs is `__main__`, and may be run again by what
multiprocessing spawns."""

import importlib
import os
import runpy
import sys

from pccheck.job import origin
from tests.support import warm


def main() -> None:
    _run(sys.argv[1:])


def _run(words: list[str]) -> None:
    warm.begin(_run)
    sys.argv = words
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in places if place and place not in sys.path]
    what = words[0]
    importlib.reload(origin)  # it notes when it is imported how the process was started
    if what.endswith(".py"):
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)
