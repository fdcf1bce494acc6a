"""The paper's pipeline-parallel models: a stage on each of 2 and 6 machines, in lockstep.

    python -m bench.stages [--quick | --smallest] [--rounds 2] [--image DIR | --directory DIR]

Each machine is a process with a disk of its own: a file behind a loop device, which the kernel
limits, as in bench/figures. With PCcheck it has a daemon of its own; the daemons agree through a
torch store. Every stage ends its step when all stages have ended theirs, as a pipeline's flush
does: so the slowest stage holds up all. Steps and checkpoints are scaled as in bench/figures: a
disk needs as many steps for a checkpoint as in the paper. Gemini sends to the memory of another
machine, over a link that is as much faster than the disk as the paper's.

In the end the machine of one stage is lost with its memory, and comes back with its disk; of Gemini
its neighbour has the checkpoint. All stages restore; the time of the slowest one counts.
Writes bench/results/stages-DATE.{json,md}.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import common
from bench.common import MIB, BenchError, Spread
from bench.figures import measure
from bench.figures.contender import Contender
from bench.figures.disk import Disk, limited, unlimited
from bench.figures.measure import DISK_BOUND, NOT_DISK_BOUND
from bench.figures.paper import DISK, LINK, MODELS, PRINTED
from bench.figures.registry import CHECKFREQ, GEMINI, OURS, maker
from bench.figures.rounds import rotated
from bench.figures.service import Service
from bench.figures.trainers import Gate, Paced
from tests.support.torchstore import TorchStore

CONTENDERS = (OURS, CHECKFREQ, GEMINI)
LOST = 1  # the stage whose machine is lost
BARE_STEPS = 20
STAGES_MAX = 8
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Size:
    models: tuple[str, ...] = ("opt-2.7b", "bloom-7b")
    intervals: tuple[int, ...] = (10, 25, 50, 100)
    payload_bytes: int = 16 * MIB
    bandwidth: int = 25_000_000


QUICK = Size(intervals=(10, 50))
SMALLEST = Size(("opt-2.7b",), (2,), 2 * MIB, 50_000_000)


class Together:
    """The stages, each with a counter that the others see."""

    def __init__(self, board: memoryview, stage: int, stages: int) -> None:
        self._board, self.stage, self._stages = board, stage, stages

    def wait(self) -> None:
        """Until all stages have come here as often."""
        self._board[self.stage] += 1
        mine, began_s = self._board[self.stage], time.monotonic()
        while min(self._board[: self._stages]) < mine:
            if time.monotonic() - began_s > LIMIT_S:
                raise BenchError("another stage has ended")
            time.sleep(0.0002)


class Stage(Paced):
    """A stage's part of the model; its step ends with the pipeline's flush."""

    def __init__(self, payload_bytes: int, step_s: float, together: Together) -> None:
        super().__init__(payload_bytes, step_s)
        self._together = together

    def overwrite(self, number: int) -> None:
        self.optimizer.number = number
        self.optimizer.step()

    def step(self, gate: Gate) -> None:
        super().step(gate)
        self._together.wait()
        self._ended = time.monotonic()  # what the other stages needed is not lost time of this one


def run_stage(
    together: Together, name: str, model: str, size: Size, disk: Disk
) -> dict[str, Any]:  # fmt: skip
    """Of each interval the seconds of a step, and when each checkpoint was asked for and safe."""
    torch.set_num_threads(1)
    bandwidth = disk.limit or disk.direct
    step_s = MODELS[model].scaled(size.payload_bytes, bandwidth)
    trainer = Stage(size.payload_bytes, step_s, together)
    bare_s = measure.bare_step(trainer, BARE_STEPS)
    rivals: Any = None  # libraries, which are not tried here
    make = maker(name, rivals, bandwidth * LINK / DISK)
    found: dict[str, Any] = {"bare_s": bare_s, "intervals": {}}
    with measure.running(make, trainer, disk.path) as contender:
        called: dict[int, float] = {}
        save = contender.save

        def timed(step: int) -> None:
            called[step] = time.monotonic()
            save(step)

        contender.save = timed  # type: ignore[method-assign]
        for every in size.intervals:
            is_bound = every * step_s < 1.2 * size.payload_bytes / bandwidth
            counts = DISK_BOUND if is_bound else NOT_DISK_BOUND
            together.wait()
            cost = measure.run(trainer, contender, every, counts, bare_s)
            safe = {step: when for step, when in contender.landed() if step in called}
            found["intervals"][every] = {
                "step_s": cost.step_s, "held_ms": cost.held_ms,
                "called": dict(called), "safe": safe,
            }  # fmt: skip
            called.clear()
        found["restore_s"] = _restore(trainer, contender, together)
    return found


def _restore(trainer: Stage, contender: Contender, together: Together) -> float:
    """After the loss of one machine, in new processes. Raises BenchError unless all bytes are
    there."""
    measure.persist(trainer, contender, 1)
    saved = trainer.steps_done
    together.wait()
    if isinstance(contender, Service):
        assert contender.ours is not None
        contender.ours.client.close()
        if together.stage == LOST:
            contender.ours.daemon.stop()
            contender.ours.daemon.start()
    elif together.stage == LOST:
        contender.restart()
    ours, theirs = os.pipe()
    if os.fork() == 0:
        _child(theirs, lambda: {"s": _loaded(trainer, contender, together, saved)})
    os.close(theirs)
    text = os.fdopen(ours, "rb").read()
    os.wait()
    if not text:
        raise BenchError("a stage could not restore")
    together.wait()
    return float(json.loads(text)["s"])


def _loaded(trainer: Stage, contender: Contender, together: Together, saved: int) -> float:
    if isinstance(contender, Service):
        assert contender.ours is not None
        contender.ours._connect()
    trainer.overwrite(0)
    together.wait()
    began_s = time.monotonic()
    contender.load()
    took_s = time.monotonic() - began_s
    if (found := trainer.saved_step()) != saved:
        raise BenchError(f"stage {together.stage} restored step {found}, and {saved} was safe")
    return took_s


def launch(
    stages: int, place: Callable[[], AbstractContextManager[Disk]],
    work: Callable[[Together, Disk], dict[str, Any]],
) -> list[dict[str, Any]]:  # fmt: skip
    """What each stage returns. Raises BenchError if one fails."""
    board = memoryview(mmap.mmap(-1, 8 * STAGES_MAX)).cast("q")
    pipes = []
    with TorchStore() as store:
        for stage in range(stages):
            ours, theirs = os.pipe()
            if os.fork() == 0:
                os.environ |= store.environment("stages", 1, 0)
                os.environ |= {"RANK": str(stage), "WORLD_SIZE": str(stages)}
                _child(theirs, lambda: _placed(place, Together(board, stage, stages), work))  # noqa: B023
            os.close(theirs)
            pipes.append(ours)
        texts = [os.fdopen(pipe, "rb").read() for pipe in pipes]
        for _ in range(stages):
            os.wait()
    if not all(texts):
        raise BenchError("a stage has failed; what it printed is above")
    return [json.loads(text) for text in texts]


def _placed(
    place: Callable[[], AbstractContextManager[Disk]], together: Together,
    work: Callable[[Together, Disk], dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    for turn in range(STAGES_MAX):  # loop devices are made one after the other
        if turn == together.stage:
            disk = place()
            made = disk.__enter__()
        together.wait()
    try:
        return work(together, made)
    finally:
        disk.__exit__(None, None, None)


def _child(pipe: int, work: Callable[[], dict[str, Any]]) -> None:
    try:
        text = json.dumps(work()).encode()
        while text:
            text = text[os.write(pipe, text) :]
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def safe_s(stages: list[dict[str, Any]], every: int) -> list[float]:
    """Of each checkpoint, from the first stage's call until all stages could get it."""
    runs = [one["intervals"][str(every)] for one in stages]
    steps = set.intersection(*(set(one["safe"]) for one in runs))
    return [
        max(one["safe"][step] for one in runs) - min(one["called"][step] for one in runs)
        for step in steps
    ]


def main() -> None:
    parser = common.arguments(__doc__, rounds=2)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="two intervals")
    sizes.add_argument("--smallest", action="store_true", help="for tests")
    parser.add_argument("--image", type=Path, help="where the limited disks are made, as root")
    options = parser.parse_args()
    size = QUICK if options.quick else SMALLEST if options.smallest else Size()
    image_bytes = 256 * MIB + 8 * size.payload_bytes
    image = options.image

    def place() -> AbstractContextManager[Disk]:
        if image is None:
            return unlimited(options.directory)
        return limited(image, image_bytes, size.bandwidth)

    facts = common.facts_of(image or options.directory)
    found: dict[str, dict[str, list[list[dict[str, Any]]]]] = {}
    for turn in range(options.rounds):
        for model in size.models:
            for name in rotated(CONTENDERS, turn):
                began_s = time.monotonic()
                stages = launch(
                    MODELS[model].machines, place,
                    lambda together, disk: run_stage(together, name, model, size, disk),  # noqa: B023
                )  # fmt: skip
                found.setdefault(model, {}).setdefault(name, []).append(stages)
                print(f"{model} {name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    lines = common.heading(
        "The paper's pipeline-parallel models, with a stage on each machine", facts
    )
    disk = f"limited to {size.bandwidth // 1_000_000} MB/s" if image else "as it is"
    lines += [
        f"{options.rounds} rounds, {size.payload_bytes // MIB} MiB for each stage, each stage's "
        f"disk {disk}. All machines are processes here. *Slowdown*: the time of a step against "
        "steps without checkpoints, in lockstep. *Safe*: from the first stage's call until every "
        "stage could get the checkpoint. *Restore*: after the loss of one machine, which comes "
        "back with its disk (of Gemini without, from its neighbour's memory), the slowest stage.",
        "",
    ]  # fmt: skip
    for model, by_name in found.items():
        lines += _table(model, by_name, size)
    common.write_results("stages", {"facts": facts, "found": found}, "\n".join(lines) + "\n")


def _table(
    model: str, by_name: dict[str, list[list[dict[str, Any]]]], size: Size
) -> list[str]:  # fmt: skip
    machines = MODELS[model].machines
    heads = "".join(f" slowdown, f = {f} | safe, s | the paper |" for f in size.intervals)
    lines = [f"## {MODELS[model].name}, {machines} machines", "", f"| |{heads} restore, s |",
             "|---|" + "---|---|---|" * len(size.intervals) + "---|"]  # fmt: skip
    for name in CONTENDERS:
        rounds = by_name[name]
        cells = [name]
        for every in size.intervals:
            slow = [
                run["intervals"][str(every)]["step_s"] / run["bare_s"]
                for stages in rounds
                for run in stages[:1]
            ]
            safe = [one for stages in rounds for one in safe_s(stages, every)]
            printed = PRINTED.get((model, name, every))
            cells += [
                Spread.of(slow).text(2), Spread.of(safe).text(2) if safe else "-",
                f"{printed[0]:.2f}" if printed else "-",
            ]  # fmt: skip
        restores = [max(run["restore_s"] for run in stages) for stages in rounds]
        lines.append(f"| {' | '.join([*cells, Spread.of(restores).text(2)])} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
