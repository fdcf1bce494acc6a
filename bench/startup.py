"""How long does it take until the daemon is ready and until pccheckctl has answered, and how much
memory has a daemon that does nothing?

    python -m bench.startup [--runs 20] [--sessions 64] [--directory DIR]

Interleaved runs, beside bare Python on the same machine. Memory is the daemon's resident set
without shared memory, which is its pool: before the first session, and with sessions that each have
saved one checkpoint of 1 MiB. Writes bench/results/startup-DATE.{json,md}.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch

from bench import common
from bench.common import MIB, Spread
from bench.ours import Daemon
from pccheck import PCcheckClient

DURABLE_LIMIT_S = 60.0


def timed_ms(command: list[str]) -> float:
    """Until the command has ended."""
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - began) * 1e3


def ready_ms(storage: Path) -> float:
    with Daemon("--dram", "64MiB", storage=storage) as daemon:
        began = time.perf_counter()
        daemon.start()
        took = time.perf_counter() - began
        daemon.stop()
    return took * 1e3


def starts(runs: int, storage: Path) -> dict[str, Spread]:
    entry = shutil.which("pccheckctl", path=str(Path(sys.executable).parent))
    tool = [entry] if entry else [sys.executable, "-m", "pccheckctl"]
    with Daemon(storage=storage / "answers").start("--dram", "64MiB") as daemon:
        ask, offline = [*tool, "--socket", str(daemon.socket)], daemon.storage
        commands = {
            "bare Python": [sys.executable, "-c", "pass"],
            "pccheckctl status --json": [*ask, "status", "--json"],
            "pccheckctl list --json": [*ask, "list", "--json"],
            "pccheckctl status, no daemon": [*tool, "--storage", str(offline), "status", "--json"],
        }
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(runs):
            for name, command in commands.items():
                found[name].append(timed_ms(command))
            found["pccheckd until ready"].append(ready_ms(storage / "ready"))
    return {name: Spread.of(times) for name, times in found.items()}


def own_mib(daemon: Daemon) -> float:
    """Its own pages and those of mapped files: libraries, mostly."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    )
    return sum(int(status[kind].split()[0]) for kind in ("RssAnon", "RssFile")) / 1024


def memory(sessions: int, storage: Path) -> dict[str, float]:
    found = {}
    state = {"state": torch.ones(MIB // 4)}
    flags = ("--chunk", "1MiB", "--dram", f"{4 * sessions + 16}MiB")
    with Daemon(*flags, storage=storage).start() as daemon, ExitStack() as stack:
        found["before the first session"] = own_mib(daemon)
        for number in range(sessions):
            client = PCcheckClient(f"session-{number}", 0, 1, socket=daemon.socket)
            stack.enter_context(client)
            client.checkpoint(state, step=1).wait_durable(DURABLE_LIMIT_S)
        found[f"{sessions} sessions"] = own_mib(daemon)
    return found


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=64)
    options = parser.parse_args()
    facts = common.facts_of(options.directory)
    with common.scratch(options.directory) as place:
        for name in ("answers", "ready", "memory"):
            (place / name).mkdir()
        took = starts(options.runs, place)
        used = memory(options.sessions, place / "memory")
    lines = common.heading("Starts, and the memory of a daemon that does nothing", facts)
    lines += [f"{options.runs} runs.", "", "| | ms, median [min-max] |", "|---|---|"]
    lines += [f"| {name} | {spread.text(0)} |" for name, spread in took.items()]
    lines += ["", "| the daemon's memory without its pool | MiB |", "|---|---|"]
    lines += [f"| {name} | {mebibytes:.0f} |" for name, mebibytes in used.items()]
    document = facts | {"ms": took, "mib": used}
    common.write_results("startup", document, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
