"""How much slower is a job's first checkpoint than later ones, and how much of that is the machine?

    python -m bench.first [--sizes 256MiB,1GiB] [--rounds 5] [--directory DIR]

In every round a daemon that has just started saves the first checkpoint of a new job, and then
others: the later ones are those after each slot was written once. A plain program of two threads
does the same work in the same round: it takes new memory and a new file, copies and writes 4 MiB at
a time past the page cache, and flushes; later it uses the same memory and the same file again.
Writes bench/results/first-DATE.{json,md}.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.common import GIB, MIB, Spread
from bench.ours import Ours
from bench.rivals import State

BLOCK = 4 * MIB
THREADS = 2
SLOTS = 4
LATER = 3  # measured in each round
OURS, PLAIN = "PCcheck", "plain program"


class Plain:
    """Copies and writes as many bytes, and no more than has to be done."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._source = np.ones(size_bytes, np.uint8)
        self._offsets = range(0, size_bytes, BLOCK)
        self._threads = ThreadPoolExecutor(THREADS)
        self._memory: Any = None  # of the first save

    def save(self) -> float:
        """Seconds until it is durable. The first time it takes the memory and makes the file."""
        start = time.monotonic()
        first = self._memory is None
        if first:
            size_bytes = len(self._source)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            os.posix_fallocate(self._file, 0, size_bytes)
            self._memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        list(self._threads.map(self._one, self._offsets))
        os.fdatasync(self._file)
        if first:
            common.sync_path(self._path.parent)
        return time.monotonic() - start

    def _one(self, offset: int) -> None:
        block = slice(offset, offset + BLOCK)
        np.copyto(self._memory[block], self._source[block])
        os.pwrite(self._file, self._memory[block], offset)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)
        self._path.unlink()


def _ready(payload_bytes: int) -> None:
    common.settle()
    common.warm_memory(3 * payload_bytes)


def one_round(state: State, payload_bytes: int, directory: Path) -> dict[tuple[str, str], Any]:
    """Seconds, by contender and "first" or "later"."""
    found: dict[tuple[str, str], Any] = defaultdict(list)
    storage = directory / "storage"
    with Ours(state, storage, payload_bytes, "--slots", str(SLOTS)) as ours:
        _ready(payload_bytes)
        found[OURS, "first"].append(ours.save().durable_s)
        for _ in range(SLOTS):
            ours.save()
        for _ in range(LATER):
            common.settle()
            found[OURS, "later"].append(ours.save().durable_s)
    shutil.rmtree(storage)
    plain = Plain(directory / "plain", -(-payload_bytes // BLOCK) * BLOCK)
    try:
        _ready(payload_bytes)
        found[PLAIN, "first"].append(plain.save())
        for _ in range(LATER):
            common.settle()
            found[PLAIN, "later"].append(plain.save())
    finally:
        plain.close()
    return found


def measure(size_bytes: int, rounds: int, directory: Path) -> dict[str, Any]:
    """All rounds at one size; the first one is thrown away."""
    state = State(*common.make_training_state(size_bytes))
    payload_bytes = common.total_bytes(common.tensors_of(state.model, state.optimizer).values())
    found: dict[tuple[str, str], Any] = defaultdict(list)
    for number in range(rounds + 1):
        for key, seconds in one_round(state, payload_bytes, directory).items():
            print(f"  round {number} {' '.join(key):20} {min(seconds):.3f} s", flush=True)
            if number:
                found[key] += seconds
    spreads = {key: Spread.of(seconds) for key, seconds in found.items()}
    return {
        "payload_bytes": payload_bytes,
        "seconds": {" ".join(key): spread for key, spread in spreads.items()},
        "ratios": {
            who: spreads[who, "first"].median / spreads[who, "later"].median
            for who in (OURS, PLAIN)
        },
    }


def table(found: dict[str, Any]) -> list[str]:
    lines = [
        f"## {found['payload_bytes'] / GIB:.2f} GiB", "",
        "| | first, s | later, s | ratio |", "|---|---|---|---|",
    ]  # fmt: skip
    for who, ratio in found["ratios"].items():
        first, later = (found["seconds"][f"{who} {which}"].text() for which in ("first", "later"))
        lines.append(f"| {who} | {first} | {later} | {ratio:.2f} |")
    return [*lines, ""]


def main() -> int:
    options = common.arguments(__doc__, sizes=[256 * MIB, GIB], rounds=5).parse_args()
    common.require_room(options.directory, (SLOTS + 3) * max(options.sizes))
    facts = common.facts_of(options.directory)
    lines = common.heading("The first checkpoint of a job, and later ones", facts)
    lines += [f"{options.rounds} rounds; seconds from request to durable, median [min-max].", ""]
    document: dict[str, Any] = {"facts": facts, "rounds": options.rounds}
    with common.scratch(options.directory) as scratch:
        for size_bytes in options.sizes:
            found = measure(size_bytes, options.rounds, scratch)
            lines += table(found)
            document[f"{size_bytes // MIB} MiB"] = found
    common.write_results("first", document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
