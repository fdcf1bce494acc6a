"""Takes snapshots of unmodified programs, ends them, restores them, and compares every loss with a
run that was never stopped; `make transparent-check`, as root.

python -m tests.transparent                       # all, with Debian's CRIU, unpacked into .criu
python -m tests.transparent --mode goes-on loop-1 heap
python -m tests.transparent --way criu            # CRIU alone, into a directory: to compare with
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from tests.support import criu
from tests.support.daemon import Daemon
from tests.transparent.cases import CASES, Case
from tests.transparent.runs import Outcome, snapshotted, whole
from tests.transparent.ways import WAYS
from tests.transparent.who import Who

MODES = ("ends", "goes-on")
FLAGS = ("--dram", "4GiB", "--slots", "3", "--keep", "1")
#: No snapshot before the first or after the last of these parts of the steps.
FIRST, LAST = 0.1, 0.6
HEAD = ("target", "mode", "step", "MB", "pause ms", "durable s", "restore s", "twice", "result")


def main() -> int:
    options = _options()
    if os.geteuid() != 0:
        print("needs root")
        return 2
    if reason := "" if options.criu else criu.missing():
        print(reason)
        return 2
    program = (options.criu or criu.program()).resolve()
    print(f"criu {'.'.join(map(str, criu.version(program)))}: {program}, seed {options.seed}")
    rows: list[tuple[str, ...]] = [HEAD]
    failed = 0
    for case in CASES:
        if case.name in (options.name or [one.name for one in CASES]):
            for mode, outcome in _tried(case, program, options):
                failed += isinstance(outcome, str)
                rows.append(_row(case.name, mode, outcome))
                print(_table(rows[-1:], rows), flush=True)
    print(f"\n{_table(rows, rows)}\ntransparent: {len(rows) - 1 - failed} passed, {failed} failed")
    return 1 if failed or len(rows) == 1 else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.transparent", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    names = [case.name for case in CASES]
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names)}; all without any")
    parser.add_argument("--criu", type=Path, help="this program instead of Debian's")
    parser.add_argument("--way", choices=WAYS, default="pccheckctl")
    parser.add_argument("--mode", choices=MODES, action="append", help="both without any")
    parser.add_argument("--seed", type=int, default=1, help="of the steps at which snapshots are")
    parser.add_argument("--uid", type=int, default=0, help="of the targets, which root may choose")
    parser.add_argument("--keep", action="store_true", help="leave the folders of failed runs")
    options = parser.parse_args()
    if unknown := set(options.name) - set(names):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    return options


def _tried(
    case: Case, program: Path, options: argparse.Namespace
) -> list[tuple[str, Outcome | str]]:
    """Each mode with its outcome, or what went wrong."""
    results: list[tuple[str, Outcome | str]] = []
    who = Who(options.uid)
    with Daemon(*FLAGS).start() as daemon:
        daemon.open_to_everybody()
        wanted: list[str] = []
        for mode in options.mode or MODES:
            drawn = random.Random(f"{options.seed} {case.name} {mode}")
            step = drawn.randint(int(FIRST * case.steps), int(LAST * case.steps))
            folder = who.own(Path(tempfile.mkdtemp(prefix=f"transparent-{case.name}-")))
            try:
                if not wanted:
                    who.own(folder / "whole")
                    wanted = whole(case, folder / "whole", daemon, who)
                way = WAYS[options.way](case, daemon, program, folder, who)
                goes_on = mode == "goes-on"
                outcome = snapshotted(case, folder, daemon, who, way, wanted, step, goes_on=goes_on)
                results.append((mode, outcome))
            except Exception as error:
                traceback.print_exc()
                results.append((mode, _first(f"{type(error).__name__}: {error}")))
                if options.keep:
                    print(f"left: {folder}")
                    continue
            _remove(folder)
    return results


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _first(text: str) -> str:
    return text.splitlines()[0][:120]


def _row(name: str, mode: str, outcome: Outcome | str) -> tuple[str, ...]:
    if isinstance(outcome, str):
        return (name, mode, "", "", "", "", "", "", f"FAILED {outcome}")
    if outcome.taken is None:
        return (
            name,
            mode,
            str(outcome.step),
            *[""] * 5,
            f"refused, goes on: {_first(outcome.refused)}",
        )
    taken = outcome.taken
    return (
        name, mode, str(outcome.step), f"{taken.bytes / 1e6:.0f}", f"{taken.pause_s * 1e3:.0f}",
        f"{taken.durable_s:.2f}", f"{outcome.restore_s:.2f}", str(outcome.repeated), "equal",
    )  # fmt: skip


def _table(shown: list[tuple[str, ...]], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    return "\n".join(
        "  ".join(
            [*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]
        )
        for row in shown
    )


if __name__ == "__main__":
    sys.exit(main())
