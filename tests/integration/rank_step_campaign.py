"""Deaths of one of two ranks that share their state, whose last step is on their GPUs only.

    python -m tests.integration.rank_step_campaign --rounds 200 --seed 1 [--json FILE]

A round: two ranks with replicated=True train in step with each other on the stand-in. They leave
each step on the GPUs, or copy it to memory. Then one of them is killed, or sees a CUDA error and
ends in order; the GPUs may be behind then, and an update of either rank may be next. The other rank
has its step written, or is killed at some moment. The driver keeps the memory of a dead process, or
not. Both ranks start again.

Checked after every round:

- Both ranks get the same step, and the bytes of that step.
- The step is not older than the newest copied one.
- The step is the last one if the GPUs of both ranks had come to it, no update was next, and one
  rank at least had its memory until both parts were copied.
- No memory of the dead trainers stays mapped.
"""

from __future__ import annotations

import itertools
import random
import sys
import time

from tests.support.gpunode import Node
from tests.support.gpuranks import after_an_error, handed_over, launched, ranks, restored, save
from tests.support.gputrainer import GpuTrainer

from .gpu_campaign import GEOMETRY, SOON_S, Tally
from .last_step_campaign import SHARED, Keep, command

ROUNDS_PER_NODE = 8
_COPIED = frozenset({"copied", "writing", "durable", "global", "superseded"})


class Campaign:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.numbers = itertools.count()

    def play(self, rounds: int, keep: Keep) -> Tally:
        """Calls `keep` after each round."""
        while rounds > 0:
            count = min(rounds, ROUNDS_PER_NODE)
            rounds -= count
            dead = self.rng.choice(["keep", "scramble"])
            try:
                with Node(*GEOMETRY, "--dram", "64MiB", devices=2, dead=dead) as node:
                    node.start()
                    for number in itertools.islice(self.numbers, count):
                        with self.tally.round(node, number):
                            self._play(node, f"job-{number}", keeps=dead == "keep")
                        keep(self.tally)
            except AssertionError as error:
                self.tally.violations.append(f"the end of a node: {error}")
        return self.tally

    def _play(self, node: Node, job: str, *, keeps: bool) -> None:
        rng = self.rng
        group = ranks([node], SHARED, job=job, replicated=True, **launched(0))
        copied, last, handles = self._train(node, group)
        victim, other = rng.sample([0, 1], 2)
        at_rest = copied < last and rng.random() < 0.8
        for trainer in group if at_rest else ():
            trainer.synchronize()
            trainer.evaluate(handed_over)
        ahead = rng.choice([None, None, None, None, victim, other])
        if ahead is not None:
            group[ahead].step()
        errs, waits, writes = (rng.random() < 0.6 for _ in range(3))
        if errs:
            group[victim].faults.set(lose_context=700)
            group[victim].post("evaluate", after_an_error)
        else:
            group[victim].kill()
        if waits:
            node.wait_for(lambda: len(node.status()["sessions"]) == 1)
        else:
            time.sleep(rng.random() * 0.05)  # not synchronisation: the moment is the test
        if writes:
            group[other].ended(handles[other])  # has it written, if that is possible
        for trainer in group:
            trainer.kill()
        node.faults.wait_for(lambda f: f.open_mappings == 0, SOON_S)
        has_memory = (keeps and not errs) or (waits and (keeps or writes))
        exact = at_rest and ahead is None and has_memory
        found = restored(ranks([node], SHARED, job=job, replicated=True, **launched(1)))
        self._judge(found, copied, last, exact)

    def _train(self, node: Node, group: list[GpuTrainer]) -> tuple[int, int, list[int]]:
        """The newest copied step, the last one, and its handles."""
        copied, handles = 0, []
        steps = self.rng.randint(2, 5)
        for step in range(1, steps + 1):
            level = "memory" if step == 1 or self.rng.random() < 0.3 else "device"
            handles = save(group, to=level)
            if level == "memory":
                for trainer, handle in zip(group, handles, strict=True):
                    node.wait_for(lambda t=trainer, h=handle: t.state(h) in _COPIED)  # type: ignore[misc]
                copied = step
        return copied, steps, handles

    def _judge(self, found: list[tuple[int, str]], copied: int, last: int, exact: bool) -> None:
        (step, wrong), (same, more) = found
        where = f"step {step}, copied {copied}, last {last}"
        assert step == same, f"{where}: the other rank has {same}"
        assert not (wrong or more), f"{where}: {wrong or more}"
        assert copied <= step <= last, where
        assert step == last or not exact, f"{where}: not the last step"
        name = "the last step" if step == last else "the newest copied one"
        self.tally.outcomes[f"recovered: {name}{', as demanded' if exact else ''}"] += 1


def run(rounds: int, seed: int, keep: Keep = lambda _: None) -> Tally:
    """Calls `keep` after each round."""
    return Campaign(seed).play(rounds, keep)


def main() -> int:
    return command(__doc__, run)


if __name__ == "__main__":
    sys.exit(main())
