"""How fast does a killed job restore its newest checkpoint?

    python -m bench.recover [--sizes 1GiB] [--rounds 5] [--directory DIR]

In every round, one after the other: restore() from the volume with a daemon that has just started,
against the best direct read, without and with a copy of the bytes; restore() from the memory of the
daemon that outlived its trainer, against memcpy and against copies with checksums on all CPUs; and
the loads of the usual formats from a cold page cache.
Writes bench/results/recover-DATE.{json,md}.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench import common
from bench.common import GIB, MIB, BenchError, Spread
from bench.core import build, copy_seconds
from bench.fio import Limit, require_fio
from bench.ours import Ours
from bench.rivals import State

VOLUME, DRAM = "PCcheck, from the volume", "PCcheck, from the daemon's memory"
READ, MEMCPY = "limit: direct read", "limit: memcpy"
CHECKED, READ_COPIED = "limit: copy and checksum", "limit: direct read and copy"


def _memcpy_seconds(size_bytes: int) -> float:
    """Between touched buffers: the median of three copies with one thread or with all of them,
    whichever is faster."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    medians = []
    threads = torch.get_num_threads()
    for count in (1, threads):
        torch.set_num_threads(count)
        medians.append(statistics.median(_timed(lambda: target.copy_(source)) for _ in range(3)))
    torch.set_num_threads(threads)
    return min(medians)


def _timed(work: object) -> float:
    assert callable(work)
    start = time.monotonic()
    work()
    return time.monotonic() - start


class Loads:
    """The usual formats: files made once, loaded from a cold cache in every round."""

    def __init__(self, state: State, directory: Path) -> None:
        self.torch_file = directory / "state.pt"
        self.safetensors_file = directory / "state.safetensors"
        torch.save(state.nested(), self.torch_file)
        save_file(common.tensors_of(state.model, state.optimizer), self.safetensors_file)
        os.sync()

    def measure(self) -> dict[str, float]:
        common.drop_cache(self.torch_file)
        common.drop_cache(self.safetensors_file)
        return {
            "torch.load, cold": _timed(lambda: torch.load(self.torch_file)),
            "safetensors, cold": _timed(
                lambda: [t.clone() for t in load_file(self.safetensors_file).values()]
            ),
        }


def _restore(ours: Ours, source: str) -> float:
    start = time.monotonic()
    done = ours.client.restore()
    seconds = time.monotonic() - start
    if not done or done.source != source:
        raise BenchError(f"restore() came from {done.source or 'nowhere'}, not from {source}")
    return seconds


def measure(
    size_bytes: int, rounds: int, directory: Path, rawwrite: Path
) -> tuple[int, dict[str, list[float]], object]:
    """Payload bytes; name -> bytes a second, one per round; the sweep for the read limit."""
    state = State(*common.make_training_state(size_bytes))
    payload_bytes = common.total_bytes(common.tensors_of(state.model, state.optimizer).values())
    limit_bytes = -(-payload_bytes // (32 * MIB)) * 32 * MIB
    file = directory / "limit.bin"
    common.lay_out(file, limit_bytes)
    limit = Limit(file, limit_bytes, rawwrite)
    settings, sweep = limit.finalists(write=False)
    loads = Loads(state, directory)
    program = build(directory, "checkedcopy")
    speeds: dict[str, list[float]] = defaultdict(list)
    with Ours(state, directory / "storage", payload_bytes) as ours:
        for _ in range(rounds):
            ours.save_into_memory()
            ours.reconnect()
            speeds[DRAM].append(payload_bytes / _restore(ours, "dram"))
            speeds[MEMCPY].append(payload_bytes / _memcpy_seconds(payload_bytes))
            speeds[CHECKED].append(payload_bytes / copy_seconds(program, payload_bytes)[0])
            ours.reconnect(restart_daemon=True)
            speeds[VOLUME].append(payload_bytes / _restore(ours, "volume"))
            speeds[READ].append(
                max(limit_bytes / limit.seconds(setting, write=False) for setting in settings)
            )
            speeds[READ_COPIED].append(limit_bytes / limit.copied_seconds())
            for name, seconds in loads.measure().items():
                speeds[name].append(payload_bytes / seconds)
    return payload_bytes, dict(speeds), sweep


def table(payload_bytes: int, speeds: dict[str, list[float]]) -> list[str]:
    spreads = {name: Spread.of(values) for name, values in speeds.items()}
    lines = [f"## {payload_bytes / GIB:.2f} GiB, {len(speeds[DRAM])} rounds", ""]
    lines += ["| | GiB/s, median [min-max] | seconds |", "|---|---|---|"]
    for name, spread in spreads.items():
        speed = Spread.of([value / GIB for value in speeds[name]]).text(2)
        lines.append(f"| {name} | {speed} | {payload_bytes / spread.median:.2f} |")
    return [
        *lines,
        "",
        f"- from the volume / best direct read: "
        f"**{spreads[VOLUME].median / spreads[READ].median:.2f}**",
        f"- from the volume / best direct read and copy: "
        f"**{spreads[VOLUME].median / spreads[READ_COPIED].median:.2f}**",
        f"- from memory / memcpy: **{spreads[DRAM].median / spreads[MEMCPY].median:.2f}**",
        f"- from memory / copy and checksum: "
        f"**{spreads[DRAM].median / spreads[CHECKED].median:.2f}**",
        "",
    ]


def main() -> int:
    options = common.arguments(__doc__, sizes=[1 * GIB], rounds=5).parse_args()
    fio = require_fio()
    common.require_room(options.directory, 9 * max(options.sizes))
    facts = common.facts_of(options.directory) | {"fio": fio}
    document: dict[str, object] = {"facts": facts, "rounds": options.rounds}
    lines = common.heading("Recover: PCcheck, the usual formats and the limits", facts)
    for size_bytes in options.sizes:
        with common.scratch(options.directory) as directory:
            rawwrite = common.build_rawwrite(directory)
            payload_bytes, speeds, sweep = measure(size_bytes, options.rounds, directory, rawwrite)
        lines += table(payload_bytes, speeds)
        document[f"{size_bytes // MIB} MiB"] = {
            "payload_bytes": payload_bytes,
            "bytes_per_s": speeds,
            "limit_sweep": sweep,
        }
    common.write_results("recover", document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
