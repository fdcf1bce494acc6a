"""Does a job in memory only delay the checkpoints of another job on the same slow disk?

    python -m bench.beside [--size 8MiB] [--saves 10] [--rounds 4] [--directory DIR]

As root: the disk is a file behind a loop device that the kernel limits to 25 MB/s. One job saves to
the disk every two seconds. In every second turn another job saves after each of its steps of 50 ms,
in memory only: its checkpoints go to the disk when that is idle. Times are from checkpoint() to
durable, of the first job. Writes bench/results/beside-DATE.{json,md}.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from bench import common
from bench.common import GIB, MIB, Spread
from bench.figures.disk import limited, unlimited
from bench.ours import Daemon
from pccheck import PCcheckClient

LIMIT = 25_000_000  # bytes a second
STEP_S = 0.05


def client_of(job: str, socket: Path, size: int, **options: str) -> PCcheckClient:
    torch.set_num_threads(1)
    client = PCcheckClient(job, 0, 1, socket=socket, **options)  # type: ignore[arg-type]
    client.attach(model=torch.nn.Linear(size // 4, 1, bias=False))
    client.restore()
    return client


def beside(socket: Path, size: int, ends: Event, runs: Event) -> None:
    """The job in memory only."""
    client, step = client_of("beside", socket, size, durable_every="auto"), 0
    while not ends.wait(STEP_S):
        step += 1
        client.checkpoint(step=step)
        runs.set()
    client.close()


def main() -> None:
    parser = common.arguments(__doc__, rounds=4)
    parser.add_argument("--size", type=common.parse_sizes, default=[8 * MIB])
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two saves")
    parser.add_argument("--unlimited", action="store_true", help="the disk as it is; not as root")
    options = parser.parse_args()
    (size,), step = options.size, 0
    alone: list[float] = []
    together: list[float] = []
    context = multiprocessing.get_context("spawn")
    made = unlimited(options.directory) if options.unlimited else None
    with made or limited(options.directory, GIB, LIMIT) as disk:
        flags = ("--chunk", "1MiB", "--dram", "256MiB")
        with Daemon(*flags, storage=disk.path / "storage") as daemon:
            daemon.start()
            client = client_of("durable", daemon.socket, size)
            for turn in range(2 * options.rounds):
                ends, runs = context.Event(), context.Event()
                other = context.Process(target=beside, args=(daemon.socket, size, ends, runs))
                if turn % 2:
                    other.start()
                    runs.wait()
                for number in range(options.saves + 1):
                    time.sleep(options.every)
                    step += 1
                    began_s = time.monotonic()
                    client.checkpoint(step=step).wait_durable(60)
                    if number:  # the first one of a turn is for the daemon to know the interval
                        (together if turn % 2 else alone).append(time.monotonic() - began_s)
                ends.set()
                if turn % 2:
                    other.join()
            client.close()
    ratio = statistics.median(together) / statistics.median(alone)
    facts = common.facts_of(options.directory)
    lines = common.heading("A job in memory only beside one that saves to the disk", facts)
    lines += [
        f"{size // MIB} MiB each; {disk.text()}. {options.rounds} rounds of {options.saves} "
        "checkpoints, in turn.", "",
        "| the other job | to durable, s |", "|---|---|",
        f"| none | {Spread.of(alone).text(4)} |",
        f"| in memory only, after every step | {Spread.of(together).text(4)} |", "",
        f"Median with / median without: {ratio:.3f}",
    ]  # fmt: skip
    document = {"alone_s": alone, "together_s": together, "ratio": ratio, "disk": disk.facts()}
    common.write_results("beside", facts | document, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
