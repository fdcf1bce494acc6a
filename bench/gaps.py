"""A program that is snapshotted, and that notes by itself how long it stood still.

    python -m bench.gaps BOARD loop|torch HEAP_BYTES

`loop` has a heap of random bytes, changes all parts of it and looks at the clock all the time;
`torch` trains a small model.
BOARD is a file of whole numbers: how many gaps there were, how many rounds the loop has made, and a
ring with the begin and the end of each gap (CLOCK_MONOTONIC, nanoseconds). The file is mapped, so
its bytes do not go back with the memory of the program.
"""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GAPS, ROUNDS, RING = 0, 1, 2  # places on the board
_RING_GAPS = 128
BOARD_BYTES = 4096
#: A longer time between two rounds is a gap; a step of the torch loop takes less.
_GAP_NS = 10_000_000
_PAUSE_S = 0.0005
#: All of 2 GiB change within half a second.
_STRIDE_BYTES, _PLACES = 512 << 10, 16
_READY_LIMIT_S = 120.0


class Target:
    """The program, started as a service would start it; it is a child of this process."""

    def __init__(self, directory: Path, kind: str, heap_bytes: int) -> None:
        path = directory / f"board-{kind}"
        path.write_bytes(bytes(BOARD_BYTES))
        with path.open("r+b") as file:
            self._board = memoryview(mmap.mmap(file.fileno(), BOARD_BYTES)).cast("q")
        with (directory / f"target-{kind}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.gaps", str(path), kind, str(heap_bytes)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.pid, self.kind = self._process.pid, kind
        self.seconds_until_it_runs(0)

    @property
    def rounds(self) -> int:
        """Of its loop, so far."""
        return self._board[ROUNDS]

    def seconds_until_it_runs(self, rounds: int) -> float:
        """Until the loop has made more rounds than these. By the clock of this process: the clocks
        of a restored one stand where they stood when it was snapshotted."""
        start_s = time.monotonic()
        while self.rounds <= rounds:
            if time.monotonic() - start_s > _READY_LIMIT_S:
                raise TimeoutError(f"process {self.pid} does not run")
            time.sleep(0.0005)
        return time.monotonic() - start_s

    def longest_gap(self, since_ns: int) -> float:
        """In seconds, of the gaps that ended later; also of one that ends just now."""
        self.seconds_until_it_runs(self.rounds)
        return max((end - begin for begin, end in self._gaps() if end > since_ns), default=0) / 1e9

    def end(self) -> None:
        """Also after a restore: what is made again with this pid is a child of this process."""
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        self._process.returncode = -9

    def _gaps(self) -> list[tuple[int, int]]:
        ring = self._board[RING : RING + 2 * _RING_GAPS].tolist()
        return list(zip(ring[::2], ring[1::2], strict=True))


def _train() -> Callable[[], None]:
    """A step of a small model on one CPU."""
    import torch  # the other kind imports torch for its size only

    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        inputs = torch.randn(64, 64)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _heap(count_bytes: int) -> mmap.mmap:
    """Random bytes: no storage layer gets zeroes to leave out."""
    piece = os.urandom(8 << 20)
    heap = mmap.mmap(-1, max(count_bytes, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, count_bytes - len(piece) + 1, len(piece)):
        heap[at : at + len(piece)] = piece
    return heap


def _changing(heap: mmap.mmap) -> Callable[[], None]:
    """A short sleep that leaves no block of a checkpoint as it was for long."""
    places = itertools.cycle(range(0, len(heap), _STRIDE_BYTES))

    def step() -> None:
        for at in itertools.islice(places, _PLACES):
            heap[at] ^= 1
        time.sleep(_PAUSE_S)

    return step


def main() -> None:
    path, kind, heap_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(path, "r+b") as file:  # noqa: PTH123
        board = memoryview(mmap.mmap(file.fileno(), BOARD_BYTES)).cast("q")
    kept = _heap(heap_bytes)
    step = _train()
    for _ in range(20):
        step()
    if kind == "loop":
        step = _changing(kept)
    before_ns = time.monotonic_ns()
    while kept:
        step()
        now_ns = time.monotonic_ns()
        if now_ns - before_ns > _GAP_NS:
            at = RING + 2 * (board[GAPS] % _RING_GAPS)
            board[at], board[at + 1] = before_ns, now_ns
            board[GAPS] += 1
        before_ns = now_ns
        board[ROUNDS] += 1


if __name__ == "__main__":
    main()
