"""Persist, pool to durable: the C core alone against the limit, with nothing else on the machine.

    python -m bench.core [--sizes 1GiB,4GiB] [--rounds 7] [--directory DIR]

`bench.persist` measures whole checkpoints, whose copy shares the cores with the writes. Here the
chunks are full before the clock starts (bench/savecore.c). In every round the core saves once and
each setting of the limit overwrites its file once. Writes bench/results/core-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from bench import common
from bench.common import GIB, MIB, BenchError, Spread
from bench.fio import Limit, Setting, require_fio

_ROOT = Path(__file__).parent.parent
LIMITS = (
    Setting("rawwrite", 16 * MIB, 2),
    Setting("rawwrite", 4 * MIB, 2),
    Setting("rawwrite", 16 * MIB, 1),
    Setting("psync", 16 * MIB, 2),
    Setting("io_uring", 4 * MIB, 4),
    Setting("io_uring", 1 * MIB, 16),
)


def build_savecore(directory: Path) -> Path:
    program = directory / "savecore"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    sources = sorted(map(str, (_ROOT / "native" / "src").glob("*.c")))
    subprocess.run(
        [compiler, "-O3", "-std=c17", "-D_GNU_SOURCE", f"-I{_ROOT / 'native' / 'src'}",
         "-o", str(program), str(_ROOT / "bench" / "savecore.c"), *sources, "-lpthread"],
        check=True,
    )  # fmt: skip
    return program


def measure(size_bytes: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds by contender: "core" and the settings of the limit."""
    file = directory / "limit.bin"
    common.lay_out(file, size_bytes)
    limit = Limit(file, size_bytes, common.build_rawwrite(directory))
    core = subprocess.Popen(
        [str(build_savecore(directory)), str(directory), str(size_bytes), str(rounds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert core.stdin is not None and core.stdout is not None
    core.stdin.write("\n" * 3)  # the first writes of the slots, not reported
    core.stdin.flush()
    runs: dict[str, list[float]] = {"core": []}
    for _ in range(rounds):
        line = core.stdout.readline()
        if not line:
            raise BenchError("savecore ended early")
        runs["core"].append(float(line))
        for setting in LIMITS:
            common.settle()
            runs.setdefault(setting.name, []).append(limit.seconds(setting, write=True))
        common.settle()
        core.stdin.write("\n")
        core.stdin.flush()
    core.stdin.close()
    core.wait(60)
    file.unlink()
    return runs


def table(size_bytes: int, runs: dict[str, list[float]]) -> list[str]:
    spreads = {name: Spread.of(seconds) for name, seconds in runs.items()}
    best = min((s.median, n) for n, s in spreads.items() if n != "core")
    lines = [f"## {size_bytes / GIB:.2f} GiB, {len(runs['core'])} rounds", ""]
    lines += ["| | s, median [min-max] | GiB/s |", "|---|---|---|"]
    for name, spread in sorted(spreads.items(), key=lambda item: item[1].median):
        lines.append(f"| {name} | {spread.text()} | {size_bytes / GIB / spread.median:.2f} |")
    ratio = best[0] / spreads["core"].median
    return [*lines, "", f"- pool to durable / best direct write ({best[1]}): **{ratio:.2f}**", ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=common.parse_sizes, default=[1 * GIB, 4 * GIB])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    options = parser.parse_args()
    require_fio()
    facts = common.facts_of(options.directory)
    lines = common.heading("The C core alone: pool to durable", facts)
    document: dict[str, object] = dict(facts)
    for size_bytes in options.sizes:
        common.require_room(options.directory, size_bytes * 5)
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.directory) as scratch:
            runs = measure(size_bytes, options.rounds, Path(scratch))
        document[f"{size_bytes // MIB} MiB"] = runs
        lines += table(size_bytes, runs)
    common.write_results("core", document, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
