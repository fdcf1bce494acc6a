"""Do sessions that save at the same time share the disk evenly, and all of the disk?

    python -m bench.sessions [--sessions 8] [--size 128MiB] [--seconds 10] [--rounds 5]
                             [--directory DIR]

Each session is a trainer process with a job of its own. The trainer saves as fast as the daemon
lets it, with two checkpoints in flight. In every round all of them run for some seconds. Bytes
count when their checkpoint is durable.

The limit is a direct overwrite by fio or by a plain C program, whichever is faster in the round.
Just before the sessions, the best settings write in turn, together for as many seconds as the
sessions. A setting's rate is that of all its writes: the fastest of many short writes would be a
peak, which nothing keeps up for seconds. The limit is one program that re-uses two small buffers.
So then as many plain programs as there are sessions write at the same time, each from memory as
large as its file (see bench.core): what the kernel and the disk make of so many writers.

Writes bench/results/sessions-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from bench import common
from bench.common import GIB, MIB, BenchError, Spread
from bench.core import Writer, plain_kept
from bench.fio import Limit, Setting, require_fio
from bench.ours import Daemon
from pccheck import PCcheckClient
from pccheck.saving.handle import Checkpoint

DURABLE_LIMIT_S = 60.0
WARM = 4  # checkpoints of each session that do not count: volume, plan and memory
#: Words of the board after the sessions' counts: whether they run, and whether they end.
RUN, END = -2, -1


def train(number: int, size_bytes: int, daemon: Daemon, board: memoryview) -> None:
    """Counts the session's durable checkpoints on the board."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(size_bytes // 4))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    model = torch.nn.ParameterList([parameter])
    flying: deque[Checkpoint] = deque()
    with PCcheckClient(f"session-{number}", 0, 1, socket=daemon.socket) as client:
        client.attach(model=model, optimizer=optimizer)
        step = 0
        while not board[END]:
            if board[number] >= WARM and not board[RUN]:
                time.sleep(0.001)
                continue
            step += 1
            flying.append(client.checkpoint(step=step))
            client.gate()
            parameter.data.view(-1, 1024)[:, 0].add_(1)  # each block of checksums changes
            if len(flying) == 2:
                flying.popleft().wait_durable(DURABLE_LIMIT_S)
                board[number] += 1


@contextmanager
def trainers(sessions: int, size_bytes: int, daemon: Daemon) -> Iterator[memoryview]:
    board = memoryview(mmap.mmap(-1, 4096)).cast("q")
    children = []
    for number in range(sessions):
        child = os.fork()
        if child == 0:
            ended = 1
            try:
                train(number, size_bytes, daemon, board)
                ended = 0
            finally:
                os._exit(ended)
        children.append(child)
    try:
        yield board
    finally:
        board[END] = 1
        codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise BenchError("a trainer failed")


def wait_all(board: memoryview, sessions: int, count: int) -> None:
    deadline = time.monotonic() + DURABLE_LIMIT_S
    while min(board[:sessions]) < count:
        if time.monotonic() > deadline:
            raise BenchError("a session's checkpoints do not become durable")
        time.sleep(0.01)


def one_round(board: memoryview, sessions: int, seconds: float) -> tuple[list[int], float]:
    """Checkpoints of each session that became durable, and the seconds."""
    board[RUN] = 1
    wait_all(board, sessions, min(board[:sessions]) + 1)
    before, began = list(board[:sessions]), time.monotonic()
    time.sleep(seconds)
    after, ended = list(board[:sessions]), time.monotonic()
    board[RUN] = 0
    return [b - a for a, b in zip(before, after, strict=True)], ended - began


def best_rate(limit: Limit, settings: list[Setting], seconds: float) -> float:
    """Bytes a second in these seconds, of the setting that was fastest."""
    took: dict[Setting, list[float]] = {setting: [] for setting in settings}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for setting in settings:
            took[setting].append(limit.seconds(setting, write=True))
    return limit.size_bytes / min(map(statistics.fmean, took.values()))


def plain_round(writers: list[Writer], seconds: float) -> tuple[list[int], float]:
    """Passes that each of the plain programs finished, and the seconds."""
    began = time.monotonic()

    def passes(writer: Writer) -> int:
        count = 0
        while time.monotonic() < began + seconds:
            writer.seconds()
            count += 1
        return count

    with ThreadPoolExecutor(len(writers)) as threads:
        counts = list(threads.map(passes, writers))
    return counts, time.monotonic() - began


def fastest_to_slowest(counts: list[int]) -> float:
    return max(counts) / max(1, min(counts))


def measure(options: argparse.Namespace, size_bytes: int, scratch: Path) -> dict[str, list[float]]:
    """Bytes a second of all sessions, of the limit, and of all plain programs; and the ratio of the
    fastest to the slowest session, and program. One of each per round."""
    sessions = options.sessions
    file = scratch / "limit.bin"
    common.lay_out(file, GIB if size_bytes >= 32 * MIB else 64 * MIB)
    plain = common.build_rawwrite(scratch)
    limit = Limit(file, file.stat().st_size, plain)
    settings, _ = limit.finalists(write=True)
    names = ("together", "limit", "plain", "ratio", "plain ratio")
    found: dict[str, list[float]] = {name: [] for name in names}
    writers = []
    for number in range(sessions):
        own = scratch / f"plain-{number}.bin"
        common.lay_out(own, size_bytes)
        writers.append(plain_kept(plain, own))
    dram = f"{max(256, 2 * sessions * size_bytes * 5 // 4 // MIB)}MiB"
    with (
        Daemon("--dram", dram, "--chunk", "4MiB", storage=scratch / "storage") as daemon,
        trainers(sessions, size_bytes, daemon.start()) as board,
    ):
        wait_all(board, sessions, WARM)
        for number in range(options.rounds):
            common.settle()
            found["limit"].append(best_rate(limit, settings, options.seconds))
            passes, seconds = plain_round(writers, options.seconds)
            found["plain"].append(sum(passes) * size_bytes / seconds)
            found["plain ratio"].append(fastest_to_slowest(passes))
            counts, seconds = one_round(board, sessions, options.seconds)
            found["together"].append(sum(counts) * size_bytes / seconds)
            found["ratio"].append(fastest_to_slowest(counts))
            print(f"  round {number + 1}: {counts}, plain {passes}", file=sys.stderr, flush=True)
    for writer in writers:
        writer.close()
    return found


def main() -> int:
    parser = common.arguments(__doc__, rounds=5)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--size", type=common.parse_sizes, default=[128 * MIB])
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    (size_bytes,) = options.size
    fio = require_fio()
    common.require_room(options.directory, 6 * options.sessions * size_bytes + GIB)
    facts = common.facts_of(options.directory) | {"fio": fio}
    with common.scratch(options.directory) as scratch:
        found = measure(options, size_bytes, scratch)
    together, limit, plain, ratio, plain_ratio = map(Spread.of, found.values())
    lines = common.heading("Sessions that save at the same time", facts)
    lines += [
        f"{options.sessions} sessions of {size_bytes // MIB} MiB, {options.rounds} rounds of "
        f"{options.seconds:g} s; median [min-max].", "",
        f"- durable, all sessions together: {_gib(found['together'])} GiB/s",
        f"- best direct write: {_gib(found['limit'])} GiB/s",
        f"- {options.sessions} plain programs together: {_gib(found['plain'])} GiB/s",
        f"- together / best direct write: **{together.median / limit.median:.2f}**",
        f"- the plain programs together / it: **{plain.median / limit.median:.2f}**",
        f"- fastest session / slowest session: **{ratio.text(2)}**",
        f"- fastest plain program / slowest: **{plain_ratio.text(2)}**",
    ]  # fmt: skip
    common.write_results("sessions", facts | {"rounds": found}, "\n".join(lines) + "\n")
    return 0


def _gib(bytes_per_s: list[float]) -> str:
    return Spread.of([one / GIB for one in bytes_per_s]).text(2)


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
