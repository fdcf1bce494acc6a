"""What does a snapshot of a process that knows nothing of it cost, and how fast is it restored?

    python -m bench.transparent [--sizes 2GiB] [--rounds 5] [--directory DIR]

As root, with criu 4.2 (`python -m tests.support.criu` makes it). In every round, in an order that
rotates, one process is snapshotted, and goes on: by `pccheckctl snapshot` with a pool that holds
the image and with a small one, by CRIU into a directory (and an fsync of every file) and into a
tmpfs; its memory is read by process_vm_readv while the process is stopped; and PCcheckClient saves
as many bytes of tensors. Then the process is killed and restored by `pccheckctl restore-process`
and by CRIU. The best direct write and read of the same file system run in the same rounds. How long
the process stands still is what its own loop sees. Writes bench/results/transparent-DATE.{json,md}.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy
import torch

from bench import common
from bench.common import GIB, MIB, BenchError, Spread
from bench.gaps import Target
from bench.ours import Daemon
from pccheck import PCcheckClient
from tests.support import criu as debian

POOL, SMALL = "PCcheck, pool >= image", "PCcheck, pool of 256 MiB"
DIRECTORY, TMPFS = "criu, directory and fsync", "criu, tmpfs"
LIBRARY = "PCcheckClient, as many bytes"
READV, READV_2 = "process_vm_readv, 1 thread", "process_vm_readv, 2 threads"
RESTORE, RESTORE_CRIU = "restore: PCcheck", "restore: criu, from the directory"
RESTORE_WARM = "restore: criu, from memory"
RAW = tuple((side, threads) for side in ("write", "read") for threads in (2, 4))
SLOTS = 3
NAMES = {"loop": "a large heap", "torch": "a small torch loop"}
WINDOW_S = 1.5
_PIECE_BYTES, _PAGE = 4 * MIB, 4096
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

Runs = dict[str, list[dict[str, float]]]


def raw_name(side: str, threads: int) -> str:
    return f"direct {side}, {threads} threads"


# -- the yardstick of the pause ----------------------------------------------------------------


def present(pid: int) -> list[tuple[int, int]]:
    """Where the private pages of a process are: what CRIU puts into an image. Address, bytes."""
    found: list[tuple[int, int]] = []
    mapping = (0, 0)
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            word, _, rest = line.partition(" ")
            if "-" in word:
                begin, end = (int(part, 16) for part in word.split("-"))
                mapping = begin, end
            elif word == "Anonymous:" and int(rest.split()[0]):
                found += _runs(pagemap.fileno(), *mapping)
    return found


def _runs(pagemap: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    count = (end - begin) // _PAGE
    entries = numpy.frombuffer(os.pread(pagemap, 8 * count, begin // _PAGE * 8), dtype="<u8")
    is_private = ((entries >> 63) & 1 & ~(entries >> 61)).astype(numpy.int8)
    edges = numpy.flatnonzero(numpy.diff(is_private, prepend=0, append=0))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield begin + first * _PAGE, (last - first) * _PAGE


class Reader:
    """Reads the memory of a stopped process with some threads, into buffers of 4 MiB that are used
    again and again."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._buffers = [torch.zeros(_PIECE_BYTES, dtype=torch.uint8) for _ in range(threads)]

    def read(self, target: Target) -> dict[str, float]:
        groups = list(_groups(present(target.pid)))
        start_ns = time.monotonic_ns()
        os.kill(target.pid, signal.SIGSTOP)
        try:
            while Path(f"/proc/{target.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.0002)
            begin_s = time.monotonic()
            count = self._all(target.pid, groups)
            seconds = time.monotonic() - begin_s
        finally:
            os.kill(target.pid, signal.SIGCONT)
        target.seconds_until_it_runs(target.rounds)
        return {"bytes": count, "read_s": seconds, "pause_s": target.longest_gap(start_ns)}

    def _all(self, pid: int, groups: list[list[tuple[int, int]]]) -> int:
        with ThreadPoolExecutor(self._threads) as threads:
            return sum(threads.map(lambda n: self._some(pid, groups, n), range(self._threads)))

    def _some(self, pid: int, groups: list[list[tuple[int, int]]], number: int) -> int:
        count = 0
        for index in range(number, len(groups), self._threads):
            group = groups[index]
            room = sum(length for _, length in group)
            address = self._buffers[number].data_ptr()
            local = (ctypes.c_size_t * 2)(address, room)
            remote = (ctypes.c_size_t * (2 * len(group)))(*(x for pair in group for x in pair))
            moved = _LIBC.process_vm_readv(pid, local, 1, remote, ctypes.c_ulong(len(group)), 0)
            if moved != room:
                raise BenchError(f"process_vm_readv: {os.strerror(ctypes.get_errno())}")
            count += room
        return count


def _groups(runs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Of 4 MiB at most, and as many parts as one call takes at most."""
    group: list[tuple[int, int]] = []
    room = _PIECE_BYTES
    for begin, length in runs:
        at = 0
        while at < length:
            count = min(room, length - at)
            group.append((begin + at, count))
            at, room = at + count, room - count
            if not room or len(group) == 1000:
                yield group
                group, room = [], _PIECE_BYTES
    if group:
        yield group


# -- ways to take and to restore ---------------------------------------------------------------


@dataclass
class Place:
    """Everything that a run needs: a daemon for each pool, and directories."""

    directory: Path
    criu: Path
    daemons: dict[str, Daemon]
    library: Library
    rawwrite: Path
    raw_file: Path
    raw_bytes: int

    def command(self, way: str, *words: str) -> list[str]:
        socket = str(self.daemons[way].socket)
        return [sys.executable, "-m", "pccheckctl", "--socket", socket, *words]

    @property
    def images(self) -> Path:
        return self.directory / "images"

    @property
    def shared(self) -> Path:
        return Path("/dev/shm") / f"{self.directory.name}-images"

    def direct(self, side: str, threads: int) -> dict[str, float]:
        """One pass of the plain C program (bench/rawwrite.c)."""
        words = [side, self.raw_file, self.raw_bytes, threads, 4 * MIB, "buffers"]
        seconds = float(_said([str(self.rawwrite), *map(str, words)]))
        return {"bytes": self.raw_bytes, "seconds": seconds, "rate": self.raw_bytes / seconds}


class Library:
    """The same amount of bytes as tensors of a program that uses PCcheckClient: this one."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon, self._step = daemon, 0
        self._client: PCcheckClient | None = None
        self._bytes = 0

    def attach(self, count_bytes: int) -> None:
        """Tensors of 64 MiB."""
        self.close()
        state = torch.nn.ParameterList(
            torch.randn(16 * MIB) for _ in range(max(1, count_bytes // (64 * MIB)))
        )
        self._bytes = common.total_bytes(state)
        self._client = PCcheckClient(
            f"library-{self._bytes}", 0, 1, socket=self._daemon.socket, on_error="raise", fresh=True
        )
        self._client.attach(model=state)

    def save(self) -> dict[str, float]:
        assert self._client is not None
        self._step += 1
        start_s = time.monotonic()
        saved = self._client.checkpoint(step=self._step)
        self._client.gate()
        gated_s = time.monotonic()
        saved.wait_durable(120)
        return {
            "bytes": self._bytes, "pause_s": gated_s - start_s,
            "durable_s": time.monotonic() - start_s,
        }  # fmt: skip

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _said(command: list[str], **more: str) -> str:
    environment = os.environ | more
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-1000:]
        raise BenchError(f"{' '.join(command[:8])}: {done.returncode}: {said}")
    return done.stdout


@contextmanager
def _running(command: list[str], **more: str) -> Iterator[None]:
    """The command beside the block; it must end well."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | more,
    )  # fmt: skip
    yield
    if process.wait() != 0:
        raise BenchError(f"{' '.join(command[:8])}: exit code {process.returncode}")


def by_pccheck(place: Place, way: str, target: Target) -> dict[str, float]:
    words = ("snapshot", str(target.pid), "--leave-running", "--name", _job(target), "--json")
    start_ns = time.monotonic_ns()
    said = json.loads(_said(place.command(way, *words), PCCHECK_CRIU=str(place.criu)))
    ended_ns = time.monotonic_ns()
    return {
        "bytes": said["bytes"], "command_s": (ended_ns - start_ns) / 1e9,
        "durable_s": said["durable_s"], "pause_s": target.longest_gap(start_ns),
        "said_pause_s": said["pause_s"],
    }  # fmt: skip


def by_criu(place: Place, way: str, target: Target) -> dict[str, float]:
    folder = place.images if way == DIRECTORY else place.shared
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    options = ["-D", str(folder), "-o", "dump.log", "-v2", "--manage-cgroups=ignore"]
    start_ns = time.monotonic_ns()
    _said([str(place.criu), "dump", "-t", str(target.pid), "--leave-running", *options])
    if way == DIRECTORY:
        for path in folder.iterdir():
            common.sync_path(path)
        common.sync_path(folder)
    durable_s = (time.monotonic_ns() - start_ns) / 1e9
    count = sum(path.stat().st_size for path in folder.glob("*.img"))
    return {"bytes": count, "durable_s": durable_s, "pause_s": target.longest_gap(start_ns)}


def restored_by_pccheck(place: Place, target: Target) -> dict[str, float]:
    target.end()
    rounds, start_s = target.rounds, time.monotonic()
    command = place.command(POOL, "restore-process", _job(target), "--detach", "--force")
    # This bench itself has written to the board since the snapshot.
    with _running(command, PCCHECK_CRIU=str(place.criu)):
        target.seconds_until_it_runs(rounds)
        seconds = time.monotonic() - start_s
    return {"seconds": seconds}


def restored_by_criu(place: Place, target: Target, folder: Path) -> dict[str, float]:
    """From a cold disk, or from a tmpfs: then nothing but CRIU's own work is left."""
    target.end()
    common.drop_cache(folder)
    options = ["-D", str(folder), "-o", "restore.log", "-v2", "--manage-cgroups=ignore"]
    rounds, start_s = target.rounds, time.monotonic()
    with _running([str(place.criu), "restore", "--restore-detached", *options]):
        target.seconds_until_it_runs(rounds)
        seconds = time.monotonic() - start_s
    return {"seconds": seconds}


def _job(target: Target) -> str:
    return f"bench-{target.kind}"


# -- rounds ------------------------------------------------------------------------------------


def measure(place: Place, kind: str, heap_bytes: int, rounds: int) -> Runs:
    """Of a new target in each round, since restored ones live in a time namespace. Round 0 is
    thrown away: pools and slots are new then."""
    runs: Runs = defaultdict(list)
    for number in range(rounds + 1):
        target = Target(place.directory, kind, heap_bytes)
        try:
            if number == 0:
                image_bytes = sum(length for _, length in present(target.pid))
                place.library.attach(image_bytes)
            for name, run in turns(place, target, number):
                common.settle()
                found = run()
                text = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
                print(f"  {kind} round {number} {name:48} {text}", flush=True)
                runs[name if number > 0 else f"first: {name}"].append(found)
        finally:
            target.end()
    place.library.close()
    return runs


Turn = tuple[str, Callable[[], dict[str, float]]]


def turns(place: Place, target: Target, number: int) -> list[Turn]:
    ways: list[Turn] = [
        (POOL, lambda: by_pccheck(place, POOL, target)),
        (SMALL, lambda: by_pccheck(place, SMALL, target)),
        (DIRECTORY, lambda: by_criu(place, DIRECTORY, target)),
        (TMPFS, lambda: by_criu(place, TMPFS, target)),
        (LIBRARY, place.library.save),
        (READV, lambda: Reader(1).read(target)),
        (READV_2, lambda: Reader(2).read(target)),
    ]
    if target.kind == "loop":  # the disk is the same for both
        ways += [(raw_name(*one), partial(place.direct, *one)) for one in RAW]
    if number == 0:  # each slot is written once
        return [*ways[:2], ways[4]] * SLOTS
    restores: list[Turn] = [
        (RESTORE, lambda: restored_by_pccheck(place, target)),
        (RESTORE_CRIU, lambda: restored_by_criu(place, target, place.images)),
        (RESTORE_WARM, lambda: restored_by_criu(place, target, place.shared)),
    ]
    turn = number * 5 % len(ways)
    return ways[turn:] + ways[:turn] + restores[:: 1 if number % 2 else -1]


def beside_daemon(directory: Path, pairs: int) -> list[tuple[float, float, float]]:
    """Steps of the torch loop in a second of its CPU time, without and with a daemon that takes no
    snapshot, and the daemon's CPU seconds in a second."""
    found = []
    target = Target(directory, "torch", 0)
    try:
        for _ in range(pairs):
            alone = _rate(target)
            with Daemon("--dram", "256MiB") as daemon:
                daemon.start()
                time.sleep(0.3)
                before_s, start_s = common.cpu_seconds(daemon.pid), time.monotonic()
                beside = _rate(target)
                used_s = common.cpu_seconds(daemon.pid) - before_s
                found.append((alone, beside, used_s / (time.monotonic() - start_s)))
                daemon.stop()
    finally:
        target.end()
    return found


def _rate(target: Target) -> float:
    rounds, used_s = target.rounds, common.cpu_seconds(target.pid)
    time.sleep(WINDOW_S)
    return (target.rounds - rounds) / (common.cpu_seconds(target.pid) - used_s)


# -- tables ------------------------------------------------------------------------------------


def spread(runs: Runs, name: str, key: str) -> Spread:
    return Spread.of([run[key] for run in runs[name]])


def best(runs: Runs, side: str) -> float:
    """Bytes a second, of the better number of threads."""
    return max(spread(runs, raw_name(*one), "rate").median for one in RAW if one[0] == side)


def verdict(runs: Runs) -> dict[str, tuple[float, str]]:
    """Ratio and target."""
    count = spread(runs, POOL, "bytes").median
    write_s, read_s = count / best(runs, "write"), count / best(runs, "read")
    pause = spread(runs, POOL, "pause_s").median
    readv = spread(runs, READV, "pause_s").median
    durable = spread(runs, POOL, "durable_s").median
    small = spread(runs, SMALL, "durable_s").median
    directory = spread(runs, DIRECTORY, "durable_s").median
    return {
        "freeze to durable, of the best direct write": (write_s / durable, ">= 0.8"),
        "the same with the small pool": (write_s / small, ">= 0.8"),
        "the whole command, of the best direct write": (
            write_s / spread(runs, POOL, "command_s").median, ""
        ),
        "durable, times faster than a directory with fsync": (directory / durable, ">= 3"),
        "the same with the small pool ": (directory / small, ">= 3"),
        "pause / (1.3 x process_vm_readv + 0.15 s)": (pause / (1.3 * readv + 0.15), "<= 1"),
        "restore, of the best direct read": (
            read_s / spread(runs, RESTORE, "seconds").median, ">= 0.8"
        ),
        "restore, of criu from memory": (
            spread(runs, RESTORE_WARM, "seconds").median
            / spread(runs, RESTORE, "seconds").median, ""
        ),
        "restore, times faster than criu from the directory": (
            spread(runs, RESTORE_CRIU, "seconds").median
            / spread(runs, RESTORE, "seconds").median, ""
        ),
    }  # fmt: skip


def table(kind: str, runs: Runs) -> list[str]:
    count = spread(runs, POOL, "bytes").median
    lines = [
        f"## {count / 1e9:.2f} GB ({NAMES[kind]}), {len(runs[POOL])} rounds", "",
        "Seconds, median [min-max]. The pause is the longest gap of the target's own loop.", "",
        "| | GB | pause | freeze to durable | whole command |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name in (POOL, SMALL, DIRECTORY, TMPFS, LIBRARY, READV, READV_2):
        cells = [f"{spread(runs, name, 'bytes').median / 1e9:.2f}"]
        for key in ("pause_s", "durable_s", "command_s"):
            cells.append(spread(runs, name, key).text() if key in runs[name][0] else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| | seconds until the loop runs, or GB/s |", "|---|---|"]
    for name in (RESTORE, RESTORE_CRIU, RESTORE_WARM):
        lines.append(f"| {name} | {spread(runs, name, 'seconds').text()} s |")
    for one in RAW:
        rates = Spread.of([run["rate"] / 1e9 for run in runs[raw_name(*one)]])
        lines.append(f"| {raw_name(*one)} | {rates.text(2)} GB/s |")
    first = runs[f"first: {POOL}"][0]
    lines += ["", f"The first snapshot of the job: durable {first['durable_s']:.2f} s.", ""]
    for what, (ratio, wanted) in verdict(runs).items():
        lines.append(f"- {what.strip()}: **{ratio:.2f}**{f' (target {wanted})' if wanted else ''}")
    return [*lines, ""]


def main() -> int:
    parser = common.arguments(__doc__, sizes=[2 * GIB], rounds=5)
    parser.add_argument("--pairs", type=int, default=8, help="of windows with and without a daemon")
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise BenchError("this bench stops and restores processes: run it as root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    largest = max(options.sizes) + GIB // 2
    common.require_room(options.directory, 11 * largest)
    facts = common.facts_of(options.directory)
    document: dict[str, object] = {"facts": facts, "rounds": options.rounds}
    lines = common.heading("Transparent snapshots: PCcheck, CRIU and the limits", facts)
    loads = " ".join(f"{one:.1f}" for one in os.getloadavg())
    lines += [f"Load before the run {loads}, nice {os.getpriority(os.PRIO_PROCESS, 0)}.", ""]
    with common.scratch(options.directory) as directory, place_in(directory, largest) as place:
        # As installed programs, commands have compiled modules.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(directory / "modules")
        facts["criu"] = ".".join(map(str, debian.version(place.criu)))
        kinds = [("loop", size) for size in options.sizes] + [("torch", 0)]
        disk: Runs = {}
        for kind, size in kinds:
            runs = measure(place, kind, size, options.rounds)
            disk |= {raw_name(*one): runs[raw_name(*one)] for one in RAW if raw_name(*one) in runs}
            runs |= disk
            lines += table(kind, runs)
            document[f"{kind} {size // MIB} MiB"] = {"runs": runs, "verdict": verdict(runs)}
        pairs = beside_daemon(directory, options.pairs)
    ratios = Spread.of([beside / alone for alone, beside, _ in pairs])
    lines += [
        f"Steps of the torch loop beside an idle daemon, against none: {ratios.text(3)} (a CPU "
        f"second, pairs of windows of {WINDOW_S:g} s). CPU of the daemon meanwhile: "
        f"{Spread.of([pair[2] for pair in pairs]).text(4)} s a second.", "",
    ]  # fmt: skip
    document["beside"] = pairs
    common.write_results("transparent", document, "\n".join(lines))
    return 0


@contextmanager
def place_in(directory: Path, largest: int) -> Iterator[Place]:
    rawwrite, raw_file = common.build_rawwrite(directory), directory / "raw"
    raw_bytes = largest // (32 * MIB) * 32 * MIB
    common.lay_out(raw_file, raw_bytes)
    with ExitStack() as stack:
        dram = f"{(largest + GIB // 2) // MIB}MiB"
        pools = {POOL: dram, SMALL: "256MiB", LIBRARY: dram}
        daemons = {}
        for number, (name, pool) in enumerate(pools.items()):
            storage = directory / f"storage-{number}"
            flags = ("--dram", pool, "--slots", str(SLOTS), "--allow-any-filesystem")
            storage.mkdir()
            daemons[name] = stack.enter_context(Daemon(*flags, storage=storage))
            daemons[name].start()
        library = Library(daemons[LIBRARY])
        place = Place(directory, debian.program(), daemons, library, rawwrite, raw_file, raw_bytes)
        stack.callback(shutil.rmtree, place.shared, ignore_errors=True)
        yield place
        for daemon in daemons.values():
            daemon.stop()


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
