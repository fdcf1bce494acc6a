"""How fast do a checkpoint's bytes leave the GPU, become durable, and come back?

    python -m bench.gpu.bandwidth [--rounds 3] [--model gpt2-medium] [--device cpu --tiny]
                                  [--only saves memory volume rivals] [--budget-s 120]
                                  [--directory DIR] [--json FILE]

No training runs meanwhile. In every round each mode connects anew, saves once ("first": it
registers and pins), and once more, in turn with the other modes; beside each of these a pinned copy
of the same size (its rate is the peak). A checkpoint's rate is its bytes over the time from
checkpoint() until it is copied, and from its admission, as the daemon saw it. Beside the times to
durable: what the disk itself writes and reads. Then the parts of a restore, by a client that is new
in its process and by a client that has restored before, from the daemon's memory and from the
volume, against torch.load; and the GPU memory taken beside torch's: by the first mode for the
daemon's context, by "device" for staging. On the CPU PCcheck pushes, and the peak is a plain copy.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import common
from bench.common import BenchError, Spread
from bench.gpu import contender
from bench.gpu.contender import DCP, LIMIT_S, OURS, GpuRivals, Report, recorded

RIVALS = ("torch.save", DCP)
#: What --only chooses: modes of saving, restores from the daemon's memory and from the volume.
PARTS = ("saves", "memory", "volume", "rivals")
RIVAL_ROUNDS = 2
RESTORES = 2
PIECE_BYTES = 1 << 30  # of the pinned buffer: as much as a checkpoint has need not fit twice

Rows = dict[str, list[dict[str, float]]]


class Peak:
    """A plain copy of many bytes between a GPU and pinned memory, nothing else going on."""

    def __init__(self, device: torch.device, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        piece = min(PIECE_BYTES, length_bytes)
        self.is_cuda = is_cuda = device.type == "cuda"
        self.there = torch.ones(piece, dtype=torch.uint8, device=device)
        self.here = torch.zeros(piece, dtype=torch.uint8, pin_memory=is_cuda)
        self.wait: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
        self.rate(to_host=True)

    def rate(self, *, to_host: bool) -> float:
        """GB/s over all of the bytes, a piece at a time."""
        source, target = (self.there, self.here) if to_host else (self.here, self.there)
        self.wait()
        start_s, left = time.perf_counter(), self.length_bytes
        while left > 0:
            part = min(left, source.numel())
            target[:part].copy_(source[:part], non_blocking=True)
            left -= part
        self.wait()
        return self.length_bytes / (time.perf_counter() - start_s) / 1e9


class Bench:
    def __init__(self, options: argparse.Namespace, directory: Path, report: Report) -> None:
        self.training = contender.training_of(options)
        self.training.step(0)  # makes the moments
        self.training.synchronize()
        self.rounds: int = options.rounds
        self.only: list[str] = options.only
        self.directory, self.report = directory, report
        self.payload_bytes = self.training.payload_bytes()
        self.peak = Peak(self.training.device, self.payload_bytes)
        self.node = contender.node_of(self.training, directory)
        self.rivals = GpuRivals(self.training.state, self.training.device)
        self.saves: Rows = {}
        self.loads: Rows = {}
        self.chosen: dict[str, str] = {}
        self.failures: list[str] = []
        self.memory_mib: dict[str, float] = {}
        self.disk: list[tuple[float, float]] = []

    # -- GPU memory ------------------------------------------------------------------------------

    def taken_mib(self) -> float:
        """GPU memory in use by others than this process's allocator: contexts and the daemon."""
        if self.training.device.type != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / common.MIB

    # -- saving ----------------------------------------------------------------------------------

    def save(self) -> dict[str, float]:
        """One checkpoint; GB/s until copied, seconds for the rest."""
        peak = self.peak.rate(to_host=True)
        common.settle()
        self.training.synchronize()
        start_s = time.monotonic()
        checkpoint = self.node.start_save()
        called_s = time.monotonic()
        checkpoint.wait_copied(LIMIT_S)
        copied_s = time.monotonic()
        checkpoint.wait_durable(LIMIT_S)
        durable_s = time.monotonic()
        rate = self.payload_bytes / (copied_s - start_s) / 1e9
        daemon_rate = self.payload_bytes / max(self.node.copy_seconds(), 1e-4) / 1e9
        return {
            "peak_gb_s": peak,
            "copy_gb_s": rate,
            "of_peak": rate / peak,
            "daemon_copy_gb_s": daemon_rate,
            "daemon_of_peak": daemon_rate / peak,
            "call_ms": (called_s - start_s) * 1e3,
            "copied_s": copied_s - start_s,
            "durable_s": durable_s - start_s,
        }

    def measure_mode(self, name: str) -> None:
        """One round of a mode: the first save of a connection, and the next one."""
        before_mib = self.taken_mib()
        self.node.connect(OURS[name] if self.peak.is_cuda else {})
        self.training.step(0)  # from the first step on, checkpoint() need not wait for the copy
        self.saves.setdefault(f"{name}, first", []).append(self.save())
        self.chosen[name] = self.node.chosen()
        self.memory_mib.setdefault(name, round(self.taken_mib() - before_mib, 1))
        self.saves.setdefault(name, []).append(self.save())
        self.keep()

    def measure_rival(self, name: str) -> None:
        rows = self.saves.setdefault(name, [])
        for number in range(RIVAL_ROUNDS + 1):  # the first makes what it keeps
            path = Path(tempfile.mkdtemp(prefix="rival-", dir=self.directory))
            common.settle()
            self.training.synchronize()
            start_s = time.monotonic()
            finish = self.rivals.save[name](path)
            called_s = time.monotonic()
            finish()
            durable_s = time.monotonic()
            if number > 0:
                rows.append({"call_ms": (called_s - start_s) * 1e3,
                             "durable_s": durable_s - start_s})  # fmt: skip
            if name == "torch.save" and number == RIVAL_ROUNDS:
                self.measure_torch_load(path / "state.pt")
            shutil.rmtree(path)
            self.keep()

    # -- loading ---------------------------------------------------------------------------------

    def load(self, name: str, load: Callable[[], object], **before_s: float) -> None:
        peak = self.peak.rate(to_host=False)
        self.training.synchronize()
        start_s = time.monotonic()
        load()
        self.training.synchronize()
        took_s = time.monotonic() - start_s
        rate = self.payload_bytes / took_s / 1e9
        self.loads.setdefault(name, []).append(
            {"peak_gb_s": peak, "load_s": took_s, "load_gb_s": rate} | before_s
        )
        self.keep()

    def restore(self) -> None:
        if not self.node.client.restore():
            raise BenchError("nothing was restored")

    def measure_restore(self) -> None:
        """A restarted trainer connects, attaches, and restores; then restores again, with memory
        that is pinned and tensors that are known."""
        self.node.connect({})
        self.node.save()
        for source in ("memory", "volume"):
            for _ in range(RESTORES if source in self.only else 0):
                start_s = time.monotonic()
                self.node.reconnect(restart_daemon=source != "memory")
                connect_s = time.monotonic() - start_s
                if source == "memory":
                    self.load("restore from memory", self.restore, connect_s=connect_s)
                    self.load("restore again", self.restore)
                else:  # its connect starts the daemon
                    self.load("restore from the volume", self.restore)

    def measure_torch_load(self, path: Path) -> None:
        model, optimizer = self.training.state.model, self.training.state.optimizer

        def load() -> None:
            state = torch.load(path, map_location=self.training.device)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        common.drop_cache(path)  # as after a restart of the node
        self.load("torch.load, cold", load)
        self.load("torch.load, cached", load)

    def keep(self) -> None:
        self.report.keep(
            payload_bytes=self.payload_bytes, chosen=self.chosen, saves=self.saves,
            loads=self.loads, gpu_memory_of_the_daemon_mib=self.memory_mib,
            disk_gb_s=self.disk, failures=self.failures,
        )  # fmt: skip

    def run(self) -> None:
        with self.node, self.rivals:
            names = contender.MODES
            for number in range(self.rounds if "saves" in self.only else 0):
                with recorded(self.failures, "the disk itself"):
                    self.disk.append(common.raw_disk(self.directory, self.payload_bytes))
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    if self.report.has_time():
                        with recorded(self.failures, name):
                            self.measure_mode(name)
            with recorded(self.failures, "restore"):
                self.measure_restore()
            self.node.leave()
            for name in RIVALS if "rivals" in self.only else ():
                if self.report.has_time():
                    with recorded(self.failures, name):
                        self.measure_rival(name)
        self.keep()


def spread(rows: list[dict[str, float]], key: str, digits: int) -> str:
    values = [row[key] for row in rows if key in row]
    return Spread.of(values).text(digits) if values else "-"


def table(bench: Bench) -> list[str]:
    lines = [f"State {bench.payload_bytes / 1e9:.3f} GB. Median [min-max] of n."]
    if bench.disk:
        written, read = (Spread.of(rates).text(2) for rates in zip(*bench.disk, strict=True))
        lines.append(f"The disk itself, GB/s: writes {written}, reads {read}.")
    lines += [
        "",
        "| save | chosen | call ms | copy GB/s | of the peak | from admission | durable s "
        "| durable GB/s | GPU MiB taken |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in bench.saves.items():
        rates = [{"gb_s": bench.payload_bytes / row["durable_s"] / 1e9} for row in rows]
        lines.append(
            f"| {name} | {bench.chosen.get(name, '')} | {spread(rows, 'call_ms', 2)} "
            f"| {spread(rows, 'copy_gb_s', 2)} | {spread(rows, 'of_peak', 3)} "
            f"| {spread(rows, 'daemon_of_peak', 3)} | {spread(rows, 'durable_s', 3)} "
            f"| {spread(rates, 'gb_s', 2)} | {bench.memory_mib.get(name, '-')} |"
        )
    lines += ["", "| load | connect and attach, s | s | GB/s | pinned copy GB/s |",
              "|---|---|---|---|---|"]  # fmt: skip
    for name, rows in bench.loads.items():
        lines.append(
            f"| {name} | {spread(rows, 'connect_s', 3)} | {spread(rows, 'load_s', 3)} "
            f"| {spread(rows, 'load_gb_s', 2)} | {spread(rows, 'peak_gb_s', 2)} |"
        )
    return [*lines, "", *(f"- failed: {text}" for text in bench.failures)]


def main() -> int:
    parser = contender.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = contender.begin(parser)
    report = Report("bandwidth", options)
    with common.scratch(options.directory) as scratch:
        bench = Bench(options, scratch, report)
        bench.run()
    report.finish(table(bench))
    return int(bool(report.document.get("failures")))


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
