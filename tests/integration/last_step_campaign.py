"""Deaths of a trainer whose last step is on its GPU only: what is recovered.

    python -m tests.integration.last_step_campaign --rounds 200 --seed 1 [--json FILE]

A round: a trainer trains on the stand-in, or on a GPU with PCCHECK_TEST_GPU=real. It calls
checkpoint(to="device") after every step and lets every few of them be copied to memory, and is
killed at some moment. The stand-in keeps the memory of a dead process, as the measured driver does,
and only what its streams had done by then counts.

Checked after every round:

- The recovered step is the last one that the stream had completed, or the newest copied one if
  death fell into an update. It is never older than what was copied.
- The recovered bytes are those of one step.
- No memory of the dead trainer stays mapped, and the GPU has it back. On a real GPU that is looked
  at from the second round on, because the first one makes the daemon's context.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pccheck.state.devices import HOST
from tests.support import fakegpu
from tests.support.gpunode import Node
from tests.support.gputrainer import READY, GpuTrainer, Log, Part
from tests.support.waiting import until

from .gpu_campaign import GEOMETRY, SOON_S, Tally

#: A copy from a real GPU shall take some milliseconds, too.
TIMES = 200 if fakegpu.is_real() else 1
PARTS = (
    Part(150_000 * TIMES), Part(40_001 * TIMES, "bfloat16"), Part(9_000, kind="buffer"),
    Part(3_000, device=HOST),
)  # fmt: skip
#: Nothing on the GPU that only one rank has.
SHARED = tuple(one for one in PARTS if one.kind != "buffer")
FLAGS = ("--dram", "2GiB") if fakegpu.is_real() else (*GEOMETRY, "--dram", "32MiB")
ROUNDS_PER_NODE = 10
Keep = Callable[[Tally], object]
#: For the copy, and then two seconds.
BACK_S = 2.5 if fakegpu.is_real() else SOON_S
#: Of memory that other work of the driver may take.
FEW_BYTES = 1 << 20


class Campaign:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.numbers = itertools.count()
        self.witness: GpuTrainer  # trains nothing
        self.free_bytes = 0  # the most that the GPU had without a trainer

    def play(self, rounds: int, keep: Keep) -> Tally:
        """Calls `keep` after each round."""
        while rounds > 0:
            count = min(rounds, ROUNDS_PER_NODE)
            rounds -= count
            try:
                with Node(*FLAGS, dead="keep") as node:
                    node.start()
                    self.witness = node.process()
                    node.trainers.clear()
                    # The daemon's context, made by the first trainer, takes memory of a real GPU.
                    self.free_bytes = 0 if fakegpu.is_real() else self.witness.free_bytes()
                    try:
                        for _ in range(count):
                            self._round(node)
                            keep(self.tally)
                    finally:
                        self.witness.kill()
            except AssertionError as error:
                self.tally.violations.append(f"the end of a node: {error}")
        return self.tally

    def _round(self, node: Node) -> None:
        number = next(self.numbers)
        with self.tally.round(node, number):
            self._play(node, number)
        self.free_bytes = max(self.free_bytes, self.witness.free_bytes())

    def _await_memory(self, node: Node) -> None:
        """Of the trainer that has just died."""
        if not fakegpu.is_real():
            node.faults.wait_for(lambda f: f.open_mappings == 0, BACK_S)
        least = self.free_bytes - FEW_BYTES
        node.wait_for(lambda: self.witness.free_bytes() >= least, BACK_S)

    def _play(self, node: Node, number: int) -> None:
        every = self.rng.choice([3, 5, 1000])
        trainer = node.connect(PARTS, job=f"job-{number}", own_stream=number % 2 == 0)
        path = node.directory / f"log-{number}"
        log = Log(path)
        trainer.post("run_on_device", str(path), every, seed=number)
        first = self.rng.randint(2, 12)
        until(lambda: log.all()[READY] >= first, lambda: trainer.warnings)
        time.sleep(self.rng.random() * 0.03)  # not synchronisation: the moment is the test
        trainer.kill()
        self._await_memory(node)
        near, ready, whole, copied = log.all()
        found = self._recovered(node, number)
        step = found["step"] if found["found"] else 0
        where = f"step {step} recovered at {near}, {ready}, {whole}, {copied}"
        assert not found.get("wrong"), f"{where}: {found['wrong']}"
        assert copied <= step <= near, where
        still = near == ready == whole  # no update was near, and the daemon had the rest
        assert step == ready or not still, where
        last = "last completed step" if step >= ready else "newest copied one"
        self.tally.outcomes[f"recovered: the {last}{', at rest' if still else ''}"] += 1
        self.tally.kinds[f"copied every {every}"] += 1

    def _recovered(self, node: Node, number: int) -> dict[str, Any]:
        trainer = node.connect(PARTS, job=f"job-{number}")
        return trainer.recover()


def run(rounds: int, seed: int, keep: Keep = lambda _: None) -> Tally:
    """Calls `keep` after each round."""
    return Campaign(seed).play(rounds, keep)


def command(about: str | None, play: Callable[[int, int, Keep], Tally]) -> int:
    """The command line of a campaign that is played by rounds and seed."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the counts there, after each round")
    options = parser.parse_args()

    def keep(tally: Tally) -> None:
        found = {"rounds": options.rounds, "outcomes": tally.outcomes,
                 "violations": tally.violations}  # fmt: skip
        lines = [f"- {name}: {count}" for name, count in sorted(tally.outcomes.items())]
        lines += [f"- violation: {text}" for text in tally.violations]
        if options.json:
            options.json.write_text(json.dumps(found | {"table": lines}, indent=1) + "\n")

    tally = play(options.rounds, options.seed, keep)
    keep(tally)
    return tally.told(options.rounds, options.seed)


def main() -> int:
    return command(__doc__, run)


if __name__ == "__main__":
    sys.exit(main())
