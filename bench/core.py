"""Persist, pool to durable: the C core alone against the limit, with nothing else on the machine.

    python -m bench.core [--sizes 1GiB,4GiB] [--rounds 7] [--engine pwrite,mmap]
                         [--directory DIR]

`bench.persist` measures whole checkpoints, whose copy shares the cores with the writes. Here the
chunks are full before the clock starts (bench/savecore.c). In every round the core saves once with
each engine and each setting of the limit overwrites its file once.

The limit writes the same small buffers again and again. A checkpoint is as large as its file. So
`kept` is the plain program with memory of that size: the same threads, the same buffers, but each
is another part of memory that was filled before the first round, as the core's chunks were. No
checkpoint is written faster than that program writes. Writes bench/results/core-DATE.{json,md}.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

from bench import common
from bench.common import GIB, MIB, BenchError, Spread
from bench.fio import Limit, Setting, require_fio

_ROOT = Path(__file__).parent.parent
_BUILD = _ROOT / "native" / "build"
ENGINES = ("pwrite", "mmap")
LIMITS = (
    Setting("rawwrite", 16 * MIB, 2),
    Setting("rawwrite", 4 * MIB, 2),
    Setting("rawwrite", 16 * MIB, 1),
    Setting("psync", 16 * MIB, 2),
    Setting("io_uring", 4 * MIB, 4),
    Setting("io_uring", 1 * MIB, 16),
)
KEPT = Setting("rawwrite", 4 * MIB, 2, "kept")


def build(directory: Path, name: str) -> Path:
    """A program of this folder, with the C core in it."""
    program = directory / name
    compile_to(program, _ROOT / "bench" / f"{name}.c", core_object(), "-lpthread")
    return program


def compile_to(target: Path, *words: object) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run(
        [compiler, "-O3", "-std=c17", "-D_GNU_SOURCE", f"-I{_ROOT / 'native' / 'src'}",
         f"-I{_BUILD}", "-o", str(target), *map(str, words)],
        check=True,
    )  # fmt: skip


def core_object() -> Path:
    """The C core, compiled when its sources are newer."""
    subprocess.run([str(_ROOT / "native" / "xxhash.sh")], check=True)
    core, fresh = _BUILD / "core.o", _BUILD / "core.new.o"
    sources = sorted((_ROOT / "native" / "src").glob("*/*.[ch]"))
    _BUILD.mkdir(exist_ok=True)
    with (_BUILD / "core.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest_s = max(source.stat().st_mtime for source in sources)
        if not core.exists() or core.stat().st_mtime < newest_s:
            compile_to(fresh, "-r", *(source for source in sources if source.suffix == ".c"))
            fresh.rename(core)
    return core


def copy_seconds(program: Path, size_bytes: int) -> tuple[float, float]:
    """Of `checkedcopy`: copy and checksum in one pass by all CPUs; memcpy and then a checksum pass
    by one."""
    words = [str(program), str(size_bytes)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    together, apart = map(float, done.stdout.split())
    return together, apart


def plain_save(program: Path, file: Path) -> tuple[float, float]:
    """Of `plainsave`: seconds of one pass, and CPU seconds. One that does not count comes first."""
    words = [str(program), str(file), str(file.stat().st_size)]
    done = subprocess.run(words, input="..", stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu_s = map(float, done.stdout.splitlines()[-1].split())
    return seconds, cpu_s


class Writer:
    """A program that keeps its memory, and writes all of it on command: the C core on a volume of
    its own, with one engine, or the plain program."""

    def __init__(self, name: str, *words: object):
        self.name = name
        self._process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()  # "ready": memory is full, and every slot was written once

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the program ended early ({self.name})")
        return line

    def seconds(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def plain_kept(program: Path, file: Path) -> Writer:
    """The plain program with memory as large as the file, which it overwrites on command."""
    words = ("write", file, file.stat().st_size, KEPT.depth, KEPT.block_bytes, KEPT.memory)
    return Writer(KEPT.name, program, *words)


def measure(
    size_bytes: int, rounds: int, engines: list[str], directory: Path
) -> dict[str, list[float]]:
    """Seconds by contender: "core, ENGINE", the plain program with kept memory, and the settings of
    the limit."""
    file = directory / "limit.bin"
    common.lay_out(file, size_bytes)
    plain = common.build_rawwrite(directory)
    limit = Limit(file, size_bytes, plain)
    core = build(directory, "savecore")
    writers = [
        Writer(f"core, {engine}", core, directory, size_bytes, rounds, engine) for engine in engines
    ]
    writers.append(plain_kept(plain, file))
    runs: dict[str, list[float]] = {}
    for _ in range(rounds):
        for writer in writers:
            common.settle()
            runs.setdefault(writer.name, []).append(writer.seconds())
        for setting in LIMITS:
            common.settle()
            runs.setdefault(setting.name, []).append(limit.seconds(setting, write=True))
    for writer in writers:
        writer.close()
    file.unlink()
    return runs


def table(size_bytes: int, runs: dict[str, list[float]]) -> list[str]:
    spreads = {name: Spread.of(seconds) for name, seconds in runs.items()}
    cores = {name: s for name, s in spreads.items() if name.startswith("core")}
    best = min((spreads[setting.name].median, setting.name) for setting in LIMITS)
    kept = spreads[KEPT.name].median
    rounds = max(s.runs for s in spreads.values())
    lines = [f"## {size_bytes / GIB:.2f} GiB, {rounds} rounds", ""]
    lines += ["| | s, median [min-max] | GiB/s | best direct write / it | kept / it |"]
    lines += ["|---|---|---|---|---|"]
    for name, spread in sorted(spreads.items(), key=lambda item: item[1].median):
        ratios = f"**{best[0] / spread.median:.2f}** | {kept / spread.median:.2f}"
        speed = size_bytes / GIB / spread.median
        row = f"| {name} | {spread.text()} | {speed:.2f} |"
        lines.append(f"{row} {ratios if name in cores else ' | '} |")
    return [*lines, "", f"- The best direct write: {best[1]}.", ""]


def main() -> int:
    parser = common.arguments(__doc__, sizes=[1 * GIB, 4 * GIB], rounds=7)
    parser.add_argument("--engine", default=",".join(ENGINES), help="those to compare")
    options = parser.parse_args()
    engines = options.engine.split(",")
    require_fio()
    facts = common.facts_of(options.directory)
    lines = common.heading("The C core alone: pool to durable", facts)
    document: dict[str, object] = dict(facts)
    for size_bytes in options.sizes:
        common.require_room(options.directory, size_bytes * (2 + 3 * len(engines)))
        with common.scratch(options.directory) as scratch:
            runs = measure(size_bytes, options.rounds, engines, scratch)
        document[f"{size_bytes // MIB} MiB"] = runs
        lines += table(size_bytes, runs)
    common.write_results("core", document, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
