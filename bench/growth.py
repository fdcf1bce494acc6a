"""How do the costs of a checkpoint grow: with its tensors, its bytes, N in flight, and sessions?

    python -m bench.growth [--rounds 5] [--only NAME ...] [--directory DIR]

Real daemons; this process is the trainer of one job or, for sessions, of many. Each question
doubles one quantity from point to point. A round measures every point, every second round in the
opposite order; a point's cost is the median of the rounds. The exponent is the slope of log(cost)
over log(quantity), fitted to the upper half of the points. A cost a + b x has an exponent of at
most 1; an exponent that exceeds 1 by more than the scatter means that the cost grows faster than
the quantity. Writes bench/results/growth-DATE.{json,md}.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from bench import common
from bench.common import MIB, Spread, cpu_seconds, exit_code
from bench.ours import DURABLE_LIMIT_S, Daemon
from pccheck import PCcheckClient

#: Cost -> its value at one point.
Costs = dict[str, float]
WARM = 3  # checkpoints that do not count: they make volume, plan and memory
COUNTED = 5  # checkpoints of a run
STATE_BYTES = 16 * MIB
DRAM_BYTES = 256 * MIB
IN_FLIGHT_BYTES = 8 * MIB
SLOW_DISK = "200MiB"  # so that N checkpoints are in flight at a time


class Attached:
    """A module and an SGD optimizer without state: its parameters are the whole checkpoint."""

    def __init__(self, tensors: int, state_bytes: int) -> None:
        each = max(1, state_bytes // 4 // tensors)
        parameters = [torch.nn.Parameter(torch.ones(each)) for _ in range(tensors)]
        self.model = torch.nn.ParameterList(parameters)
        self.optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def step(self) -> None:
        for parameter in self.model:
            parameter.grad = parameter.detach()
        self.optimizer.step()


@contextmanager
def daemon_on(directory: Path, *flags: str) -> Iterator[Daemon]:
    with (
        tempfile.TemporaryDirectory(dir=directory) as scratch,
        Daemon(*flags, storage=Path(scratch) / "volumes") as daemon,
    ):
        daemon.start()
        yield daemon


@contextmanager
def client_of(daemon: Daemon, attached: Attached, job: str = "growth") -> Iterator[PCcheckClient]:
    with PCcheckClient(job, 0, 1, socket=daemon.socket, on_error="raise") as client:
        client.attach(model=attached.model, optimizer=attached.optimizer)
        client.restore()
        attached.step()
        yield client


def one_save(client: PCcheckClient, attached: Attached, daemon: Daemon, step: int) -> Costs:
    cpu_s, daemon_s = time.process_time(), cpu_seconds(daemon.pid)
    began = time.perf_counter()
    handle = client.checkpoint(step=step)
    called = time.perf_counter()
    handle.wait_durable(DURABLE_LIMIT_S)
    durable = time.perf_counter()
    costs = {
        "checkpoint(), ms": 1e3 * (called - began),
        "to durable, ms": 1e3 * (durable - began),
        "CPU of client and daemon, ms": 1e3
        * (time.process_time() - cpu_s + cpu_seconds(daemon.pid) - daemon_s),
    }
    attached.step()
    return costs


def saves(directory: Path, tensors: int, state_bytes: int) -> Costs:
    """Medians of checkpoints that are taken one at a time, and one restore of the last."""
    attached = Attached(tensors, state_bytes)
    with daemon_on(directory, "--dram", f"{DRAM_BYTES // MIB}MiB") as daemon:
        with client_of(daemon, attached) as client:
            made = [one_save(client, attached, daemon, n) for n in range(WARM + COUNTED)]
        again = Attached(tensors, state_bytes)
        with PCcheckClient("growth", 0, 1, socket=daemon.socket) as client:
            client.attach(model=again.model, optimizer=again.optimizer)
            began = time.perf_counter()
            client.restore()
            restored_ms = 1e3 * (time.perf_counter() - began)
    counted = made[WARM:]
    medians = {key: statistics.median(one[key] for one in counted) for key in counted[0]}
    return medians | {"restore(), ms": restored_ms}


def with_in_flight(directory: Path, in_flight: int) -> Costs:
    """As many checkpoints at a time as the daemon has slots for, on a slow disk."""
    attached = Attached(64, IN_FLIGHT_BYTES)
    flags = ("--slots", str(in_flight + 1), "--keep", "1", "--max-bandwidth", SLOW_DISK)
    count = in_flight * COUNTED
    dram = f"{max(64, 2 * (in_flight + 1) * IN_FLIGHT_BYTES // MIB)}MiB"
    with (
        daemon_on(directory, *flags, "--dram", dram, "--chunk", "4MiB") as daemon,
        client_of(daemon, attached) as client,
    ):
        for step in range(WARM):
            one_save(client, attached, daemon, step)
        daemon_s = cpu_seconds(daemon.pid)
        for step in range(WARM, WARM + count):
            last = client.checkpoint(step=step)
            attached.step()
        last.wait_durable(DURABLE_LIMIT_S)
        spent_s = cpu_seconds(daemon.pid) - daemon_s
    return {"CPU of the daemon per checkpoint, ms": 1e3 * spent_s / count}


def with_sessions(directory: Path, sessions: int) -> Costs:
    """The sessions save in turn."""
    states = [Attached(16, MIB) for _ in range(sessions)]
    with ExitStack() as stack:
        flags = ("--dram", f"{4 * sessions + 16}MiB", "--chunk", "1MiB")
        daemon = stack.enter_context(daemon_on(directory, *flags))
        clients = [
            stack.enter_context(client_of(daemon, state, f"growth-{number}"))
            for number, state in enumerate(states)
        ]
        took: list[Costs] = []
        daemon_s = 0.0
        for step in range(WARM + COUNTED):
            if step == WARM:
                daemon_s = cpu_seconds(daemon.pid)
            for client, state in zip(clients, states, strict=True):
                took.append(one_save(client, state, daemon, step))
        spent_s = cpu_seconds(daemon.pid) - daemon_s
    counted = [one["to durable, ms"] for one in took[WARM * sessions :]]
    return {
        "to durable, ms": statistics.median(counted),
        "CPU of the daemon per checkpoint, ms": 1e3 * spent_s / len(counted),
    }


#: What grows, its measurement and its points.
QUESTIONS: dict[str, tuple[str, Callable[[Path, int], Costs], list[int]]] = {
    "tensors": (
        "tensors of 16 MiB in all", lambda directory, count: saves(directory, count, STATE_BYTES),
        [250 << n for n in range(7)],
    ),
    "bytes": (
        "MiB", lambda directory, size: saves(directory, 64, size * MIB), [1 << n for n in range(11)]
    ),
    "in-flight": ("checkpoints in flight (N)", with_in_flight, [1, 2, 4, 8, 16]),
    "sessions": ("sessions", with_sessions, [1, 2, 4, 8, 16, 32]),
}  # fmt: skip


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of log(cost) over log(quantity) through the upper half of the points."""
    points = sorted(points)[(len(points) - 1) // 2 :]
    xs, ys = ([math.log(one[axis]) for one in points] for axis in (0, 1))
    return statistics.linear_regression(xs, ys).slope


def measure(name: str, rounds: int, most: int, directory: Path) -> dict[int, list[Costs]]:
    _, work, points = QUESTIONS[name]
    points = points[:most]
    found: dict[int, list[Costs]] = defaultdict(list)
    for turn in range(rounds):
        for point in points if turn % 2 == 0 else reversed(points):
            found[point].append(work(directory, point))
            print(f"  {name} {point}, round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return dict(sorted(found.items()))


def table(name: str, found: dict[int, list[Costs]]) -> list[str]:
    kinds = list(next(iter(found.values()))[0])
    lines = [f"## {QUESTIONS[name][0]}", "", f"| {name} | " + " | ".join(kinds) + " |"]
    lines.append("|---" * (1 + len(kinds)) + "|")
    spreads = {
        point: [Spread.of([run[kind] for run in runs]) for kind in kinds]
        for point, runs in found.items()
    }
    for point, cells in spreads.items():
        lines.append(f"| {point} | " + " | ".join(cell.text(2) for cell in cells) + " |")
    fitted = (
        exponent([(point, max(cells[at].median, 1e-6)) for point, cells in spreads.items()])
        for at in range(len(kinds))
    )
    return [*lines, "| **exponent** | " + " | ".join(f"**{one:.2f}**" for one in fitted) + " |", ""]


def main() -> int:
    parser = common.arguments(__doc__, rounds=5)
    parser.add_argument("--points", type=int, default=16, help="at most so many points a question")
    parser.add_argument("--only", choices=QUESTIONS, nargs="*", default=list(QUESTIONS))
    options = parser.parse_args()
    facts = common.facts_of(options.directory)
    common.require_room(options.directory, 8 * MIB * QUESTIONS["bytes"][2][: options.points][-1])
    document: dict[str, object] = {"facts": facts, "rounds": options.rounds}
    lines = common.heading("How the costs of a checkpoint grow", facts)
    lines += ["Median [min-max] of the rounds.", ""]
    with common.scratch(options.directory) as scratch:
        for name in options.only:
            found = measure(name, options.rounds, options.points, scratch)
            document[name] = found
            lines += table(name, found)
    common.write_results("growth", document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
