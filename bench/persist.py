"""How fast is a checkpoint durable, how long does the caller stall, and what does it cost?

    python -m bench.persist [--sizes 1GiB,4GiB] [--rounds 5] [--directory DIR]

In every round each contender saves the same state once, in an order that rotates. In the same
rounds run the limit, the best direct overwrite that fio or a plain C program reaches, and a plain C
program that does the least of a checkpoint (bench/plainsave.c). Everything lies on one file system.
Memory is touched just before each run: what is free by writing to it, what a contender keeps from
save to save (PCcheck's pool, a kept stager's copy) by a save not measured.
Writes bench/results/persist-DATE.{json,md}.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from bench import common
from bench.common import GIB, MIB, Spread
from bench.core import build, copy_seconds, plain_save
from bench.fio import Limit, require_fio
from bench.ours import Ours
from bench.rivals import KEPT, Finish, Rivals, State

OURS = "PCcheck"


class Runs:
    """Every run of one size: contender -> its runs, limit setting -> its seconds."""

    def __init__(self, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.contenders: dict[str, list[dict[str, float]]] = defaultdict(list)
        self.limit: dict[str, list[float]] = defaultdict(list)
        self.limit_bytes = 0
        self.copy_s: list[float] = []  # memcpy and a checksum pass, by one CPU
        self.plain: list[tuple[float, float]] = []  # seconds and CPU of bench/plainsave.c

    def spread(self, name: str, key: str) -> Spread:
        return Spread.of([run[key] for run in self.contenders[name]])

    def limit_speed(self, *, memfd: bool = False) -> tuple[str, float]:
        """The best setting by its median, and its bytes a second."""
        medians = {
            name: self.limit_bytes / Spread.of(seconds).median
            for name, seconds in self.limit.items()
            if not memfd or "memfd" in name
        }
        best = max(medians, key=medians.__getitem__)
        return best, medians[best]


def _rival_run(
    save: Callable[[Path], Finish], directory: Path, payload_bytes: int
) -> dict[str, float]:
    target = Path(tempfile.mkdtemp(prefix="rival-", dir=directory))
    try:
        common.settle()
        common.warm_memory(payload_bytes * 11 // 5)
        cpu, start = time.process_time(), time.monotonic()
        finish = save(target)
        stalled = time.monotonic()
        finish()
        return {
            "durable_s": time.monotonic() - start,
            "stall_s": stalled - start,
            "cpu_s": time.process_time() - cpu,
        }
    finally:
        shutil.rmtree(target)


def _our_run(ours: Ours, payload_bytes: int) -> dict[str, float]:
    common.warm_memory(payload_bytes * 11 // 5)
    ours.save()
    common.settle()
    saved = ours.save()
    return asdict(saved) | {
        "stall_s": saved.call_s,
        "cpu_s": saved.cpu_client_s + saved.cpu_daemon_s,
    }


def measure(size_bytes: int, rounds: int, directory: Path, rawwrite: Path) -> tuple[Runs, object]:
    """All rounds at one size; the first one is thrown away."""
    state = State(*common.make_training_state(size_bytes))
    payload_bytes = common.total_bytes(common.tensors_of(state.model, state.optimizer).values())
    runs = Runs(payload_bytes)
    runs.limit_bytes = -(-payload_bytes // (32 * MIB)) * 32 * MIB
    print(f"{payload_bytes / GIB:.2f} GiB: sweep for the limit", flush=True)
    file = directory / "limit.bin"
    common.lay_out(file, runs.limit_bytes)
    limit = Limit(file, runs.limit_bytes, rawwrite)
    settings, sweep = limit.finalists(write=True)
    copies, plain = build(directory, "checkedcopy"), build(directory, "plainsave")
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(state, directory / "storage", payload_bytes))
        for _ in range(2):  # its memory has grown, and each of four slots was written once
            ours.save_into_memory()
        rivals = stack.enter_context(Rivals(state))
        names = [OURS, *rivals.save]
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name == OURS:
                    run = _our_run(ours, payload_bytes)
                else:
                    if name == KEPT:
                        _rival_run(rivals.save[name], directory, payload_bytes)
                    run = _rival_run(rivals.save[name], directory, payload_bytes)
                print(f"  round {number} {name:28} {run['durable_s']:.3f} s", flush=True)
                if number:
                    runs.contenders[name].append(run)
            for setting in settings:
                common.settle()
                seconds = limit.seconds(setting, write=True)
                if number:
                    runs.limit[setting.name].append(seconds)
            common.settle()
            saved = plain_save(plain, file)
            if number:
                runs.plain.append(saved)
                runs.copy_s.append(copy_seconds(copies, payload_bytes)[1])
    file.unlink()
    shutil.rmtree(directory / "storage")
    return runs, {"sweep": sweep, "unavailable": limit.unavailable}


def verdict(runs: Runs) -> dict[str, object]:
    """The ratios that count."""
    _, limit = runs.limit_speed()
    _, memfd = runs.limit_speed(memfd=True)
    ours = runs.spread(OURS, "durable_s").median
    rivals = {n: runs.spread(n, "durable_s").median for n in runs.contenders if n != OURS}
    fastest = min(rivals, key=rivals.__getitem__)
    persist = runs.payload_bytes / runs.spread(OURS, "persist_s").median
    copy = Spread.of(runs.copy_s).median
    plain, plain_cpu = (Spread.of(list(column)).median for column in zip(*runs.plain, strict=True))
    plain_speed = runs.limit_bytes / plain
    return {
        "persist / best direct write": persist / limit,
        "persist / best direct write from 4 KiB pages": persist / memfd,
        "request to durable / best direct write": runs.payload_bytes / ours / limit,
        "request to durable / best direct write from 4 KiB pages": runs.payload_bytes
        / ours
        / memfd,
        f"times faster than the fastest rival ({fastest})": rivals[fastest] / ours,
        "the plain program that copies, checksums and writes / best direct write": plain_speed
        / limit,
        "request to durable / that program": runs.payload_bytes / ours / plain_speed,
        "CPU / memcpy and a checksum pass": runs.spread(OURS, "cpu_s").median / copy,
        "CPU of that program / memcpy and a checksum pass": plain_cpu / copy,
    }


def table(runs: Runs) -> list[str]:
    best, limit = runs.limit_speed()
    lines = [
        f"## {runs.payload_bytes / GIB:.2f} GiB, {len(runs.contenders[OURS])} rounds",
        "",
        "Median [min-max].",
        "",
        "| | to durable, s | GiB/s | of the limit | caller's stall, s | CPU s/GiB |",
        "|---|---|---|---|---|---|",
    ]
    gib = runs.payload_bytes / GIB
    for name in sorted(runs.contenders, key=lambda n: runs.spread(n, "durable_s").median):
        durable = runs.spread(name, "durable_s")
        lines.append(
            f"| {name} | {durable.text()} | {gib / durable.median:.2f} | "
            f"{runs.payload_bytes / durable.median / limit:.2f} | "
            f"{runs.spread(name, 'stall_s').text(4)} | "
            f"{runs.spread(name, 'cpu_s').median / gib:.2f} |"
        )
    lines += [
        "",
        f"PCcheck: gate open after {runs.spread(OURS, 'gate_s').text()} s (forward and backward "
        f"hide it); pool to durable {runs.spread(OURS, 'persist_s').text()} s; CPU "
        f"{runs.spread(OURS, 'cpu_client_s').median / gib:.2f} s/GiB in the trainer and "
        f"{runs.spread(OURS, 'cpu_daemon_s').median / gib:.2f} in the daemon.",
        "",
        f"Limit: {best}. All of the limit's settings, GiB/s: "
        + "; ".join(
            f"{name} {runs.limit_bytes / GIB / Spread.of(seconds).median:.2f}"
            for name, seconds in runs.limit.items()
        )
        + ".",
        "",
        *(f"- {what}: **{value:.2f}**" for what, value in verdict(runs).items()),
        "",
    ]
    return lines


def main() -> int:
    options = common.arguments(__doc__, sizes=[1 * GIB, 4 * GIB], rounds=5).parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    fio = require_fio()
    # Our slots, two rivals' files at a time at most, and the limit's file.
    common.require_room(options.directory, 8 * max(options.sizes))
    facts = common.facts_of(options.directory) | {"fio": fio}
    document: dict[str, object] = {"facts": facts, "rounds": options.rounds}
    lines = common.heading("Persist: PCcheck, its rivals and the limit", facts)
    with common.scratch(options.directory) as scratch:
        rawwrite = common.build_rawwrite(scratch)
        for size_bytes in options.sizes:
            runs, sweep = measure(size_bytes, options.rounds, scratch, rawwrite)
            lines += table(runs)
            document[f"{size_bytes // MIB} MiB"] = {
                "payload_bytes": runs.payload_bytes,
                "contenders": runs.contenders,
                "limit_seconds": runs.limit,
                "limit_bytes": runs.limit_bytes,
                "verdict": verdict(runs),
                "limit_sweep": sweep,
            }
    common.write_results("persist", document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
