"""How long does `pccheckctl` take to start and answer? Medians of interleaved runs, beside bare
Python on the same machine.

    python -m bench.startup [--runs 20]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.daemon import Daemon


def timed(command: list[str]) -> float:
    """Milliseconds until it has ended."""
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--runs", type=int, default=20)
    runs = flags.parse_args().runs
    entry = shutil.which("pccheckctl", path=str(Path(sys.executable).parent))
    tool = [entry] if entry else [sys.executable, "-m", "pccheckctl"]
    with (
        tempfile.TemporaryDirectory() as place,
        Daemon("--allow-any-filesystem", storage=Path(place)).start("--dram", "64MiB") as daemon,
    ):
        commands = {
            "bare python": [sys.executable, "-c", "pass"],
            "status --json": [*tool, "--socket", str(daemon.socket), "status", "--json"],
            "list --json": [*tool, "--socket", str(daemon.socket), "list", "--json"],
            "status, no daemon": [*tool, "--storage", place, "status", "--json"],
        }
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                found[name].append(timed(command))
    for name, times in found.items():
        print(f"{name:20} median {statistics.median(times):6.1f} ms, fastest {min(times):6.1f} ms")


if __name__ == "__main__":
    main()
