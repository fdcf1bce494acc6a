"""Which way does the daemon take for whose memory, and how fast is it?

    python -m tests.integration.gpu_ways [--rounds 3] [--mib 2048] [--pieces 2000]
                                          [--budget-s 60] [--directory DIR] [--json FILE]

A daemon that runs as root, and one that runs in a PID namespace of its own. For each of WAYS a
trainer process begins, saves once, and then once a round, beside a pinned copy of as many bytes.
The document has what `status` says of it, and the rate from the checkpoint's admission against that
of the pinned copy. Last, a trainer shares a state of many pieces of expandable segments: the
daemon's log has the seconds until these are mapped.

With the variables of the stand-in driver (tests/support/standin.py) this runs without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import common
from bench.common import MIB, BenchError, Spread
from bench.gpu import contender
from bench.gpu.bandwidth import Peak
from bench.gpu.contender import LIMIT_S, Report, recorded
from bench.ours import Daemon
from pccheck import PCcheckClient
from tests.support import fakegpu
from tests.support.gputrainer import GpuCommands, Part
from tests.support.trainer import Trainer
from tests.support.waiting import until

USER = 64001  # that nobody has
LARGE_PIECE, SMALL_PIECE = 20 * MIB, 2 * MIB  # of torch, and of the stand-in
PARTS = 4  # tensors; with their moments twice as many
_MAPPED = re.compile(r"'pieces' .* GPU memory \((.*)\) are mapped, after ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Way:
    """Whose memory is shared, and with whom."""

    name: str
    expands: bool = False
    uid: int | None = None
    apart: bool = False  # the daemon is in another PID namespace


WAYS = (
    Way("expandable segments", expands=True),
    Way("another user", uid=USER),
    Way("another PID namespace", apart=True),
    Way("all three", expands=True, uid=USER, apart=True),
    Way("neither"),
)


class WayDaemon(Daemon):
    """With the driver that this process has; `apart`: in a PID namespace of its own."""

    apart = False

    def command(self, *flags: str) -> list[str]:
        inside = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        return [*(inside if self.apart else ()), *super().command(*flags)]

    def environment(self) -> dict[str, str]:
        driver = {k: v for k, v in os.environ.items() if k.startswith("PCCHECK_STANDIN")}
        return super().environment() | driver


class WayCommands(GpuCommands):
    """Of the trainer's process."""

    def measure(self) -> tuple[int, float]:
        """Trains a step and saves it. The step, and the rate of a pinned copy in GB/s."""
        peak = self.peak.rate(to_host=True)
        now = self.step()
        self.gpu.synchronize()
        self.handles.append(self.client.checkpoint(step=now))
        self.handles[-1].wait_durable(LIMIT_S)
        return now, peak

    def make_peak(self, nbytes: int) -> None:
        self.peak = Peak(torch.device("cuda" if self.gpu.real else "cpu"), nbytes)

    def share(self, pieces: int, socket: str) -> None:
        """Attaches a state of so many pieces of expandable segments, and saves nothing."""
        self.gpu = fakegpu.choose()
        self.gpu.expand()
        length = pieces * (LARGE_PIECE if self.gpu.real else SMALL_PIECE)
        state = torch.nn.ParameterList([self.gpu.tensor((length // 4,))])
        self.client = PCcheckClient(job="pieces", socket=socket, fresh=True)
        self.client.attach(model=state, optimizer=torch.optim.SGD(state))


class WayTrainer(Trainer):
    commands = WayCommands


class WaysBench:
    def __init__(self, options: argparse.Namespace, directory: Path, report: Report) -> None:
        self.options, self.report, self.directory = options, report, directory
        self.part_bytes = options.mib * MIB // (2 * PARTS)
        self.rows: list[dict[str, Any]] = []
        self.mapped: dict[str, Any] = {}
        self.failures: list[str] = []

    @contextmanager
    def daemon(self, *, apart: bool) -> Iterator[Daemon]:
        storage = Path(tempfile.mkdtemp(prefix="node-", dir=self.directory)) / "storage"
        flags = ["--dram", f"{max(32, 2 * self.options.mib + 64)}MiB"]
        if common.file_system(self.directory) == "tmpfs":
            flags.append("--allow-any-filesystem")
        storage.mkdir()
        daemon = WayDaemon(*flags, storage=storage)
        daemon.apart = apart
        try:
            daemon.start()
            daemon.open_to_everybody()
            yield daemon
        finally:
            daemon.cleanup()
            shutil.rmtree(storage.parent)

    def measure(self, way: Way, daemon: Daemon) -> None:
        parts = [Part(self.part_bytes // 4) for _ in range(PARTS)]
        nbytes, job = 2 * PARTS * self.part_bytes, way.name.replace(" ", "-")
        with WayTrainer() as trainer:
            trainer.open(parts, job=job, socket=str(daemon.socket), expands=way.expands,
                         uid=way.uid, fresh=True)  # fmt: skip
            trainer.make_peak(nbytes)
            trainer.save()
            row: dict[str, Any] = {"way": way.name, "of_peak": [], "gb_s": []}
            for _ in range(self.options.rounds):
                step, peak_gb_s = trainer.measure()
                seconds = max(contender.copy_seconds(daemon.status(), job, step), 1e-4)
                row["gb_s"].append(nbytes / seconds / 1e9)
                row["of_peak"].append(row["gb_s"][-1] / peak_gb_s)
            row["transfer"], row["reason"] = chosen(daemon)
            self.rows.append(row)
        self.keep()

    def share(self, daemon: Daemon) -> None:
        """What the log says of many pieces; the trainers before have made the daemon's context."""
        with WayTrainer() as trainer:
            trainer.share(self.options.pieces, str(daemon.socket))
            until(lambda: _MAPPED.search(daemon.log.read_text()) or chosen(daemon)[0] == "push")
            if (found := _MAPPED.search(daemon.log.read_text())) is None:
                raise BenchError(f"they are not pulled: {chosen(daemon)[1]}")
            size, seconds = found.groups()
            self.mapped = {"pieces": self.options.pieces, "size": size, "seconds": float(seconds)}
        self.keep()

    def keep(self) -> None:
        self.report.keep(rows=self.rows, mapped=self.mapped, failures=self.failures)

    def run(self) -> None:
        for apart in (False, True):
            with self.daemon(apart=apart) as daemon:
                for way in WAYS:
                    if way.apart == apart and self.report.has_time():
                        with recorded(self.failures, way.name):
                            self.measure(way, daemon)
                if not apart and self.report.has_time():
                    with recorded(self.failures, "pieces"):
                        self.share(daemon)
        self.keep()


def chosen(daemon: Daemon) -> tuple[str, str]:
    """Of the session that is connected: sessions of trainers before may not have ended yet."""
    newest = max(daemon.status()["sessions"], key=lambda session: int(session["session"]))
    return newest["transfer"], newest["transfer_reason"]


def table(bench: WaysBench) -> list[str]:
    lines = [
        f"A state of {bench.options.mib} MiB, a daemon that runs as root. Median [min-max] of n.",
        "",
        "| the trainer | status says | copy GB/s, from admission | of a pinned copy |",
        "|---|---|---|---|",
    ]
    for row in bench.rows:
        says = f"{row['transfer']}: {row['reason']}".removesuffix(": ")
        rates = (Spread.of(row["gb_s"]).text(2), Spread.of(row["of_peak"]).text(3))
        lines.append(f"| {row['way']} | {says} | {' | '.join(rates)} |")
    if bench.mapped:
        lines += [
            "",
            "{pieces} pieces, {size}, are mapped after {seconds} s.".format(**bench.mapped),
        ]
    return [*lines, "", *(f"- failed: {text}" for text in bench.failures)]


def main() -> int:
    parser = contender.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=2048, help="of the state")
    parser.add_argument("--pieces", type=int, default=2000)
    options = contender.begin(parser)
    if options.device == "cuda":
        os.environ["PCCHECK_TEST_GPU"] = "real"
    report = Report("ways", options)
    with common.scratch(options.directory) as scratch:
        bench = WaysBench(options, scratch, report)
        bench.run()
    report.finish(table(bench))
    return int(bool(bench.failures))


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
