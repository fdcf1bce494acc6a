"""Random kills and driver faults while GPU tensors are saved; a recovery after each.

    python -m tests.integration.gpu_campaign --rounds 60 --seed 1

A round: a trainer trains on the stand-in and saves every step with the gate on, by pull or push,
with or without a copy on the device first. A fault hits the daemon or the trainer at some moment.
Then the trainer, the daemon, both or none is killed.

Checked after every round:

- A trainer that was not killed continues, and its tensors are undamaged.
- The recovered step is not older than the last acknowledged step.
- The recovered bytes are those of one step (made again and compared).
- No memory of a dead trainer stays mapped.
- The next checkpoint is right.

The memory of dead trainers reads as garbage here, so a byte copied from it is detected.

"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pccheck.state.devices import HOST
from tests.support.gpunode import Node
from tests.support.gputrainer import GpuTrainer, Part
from tests.support.standin import ALWAYS, ON_DEVICE, SAMPLES, TO_HOST, Faults
from tests.support.trainer import RemoteError

PARTS = (
    Part(150_000), Part(40_001, "bfloat16"), Part(9_000, kind="buffer"), Part(3_000, device=HOST),
    Part(5_000, "float16", kind="frozen"),
)  # fmt: skip
#: "auto" pulls until a pull is refused. (transfer="pull" would fail from then on, until the next
#: session.)
MODES = (
    {"transfer": "auto", "snapshot": "overlap"}, {"transfer": "push", "snapshot": "overlap"},
    {"transfer": "auto", "snapshot": "device"}, {"transfer": "push", "snapshot": "device"},
    {"transfer": "auto", "snapshot": "blocking"}, {"transfer": "push", "snapshot": "blocking"},
)  # fmt: skip
VICTIMS = ("trainer", "none", "daemon", "trainer", "both")
GEOMETRY = ("--chunk", "256KiB", "--block-bytes", "64KiB", "--engine", "pwrite")
ROUNDS_PER_NODE = 8
SOON_S = 400.0  # for the next durable checkpoint, also on a slow disk
LOST = 700  # CUDA error that makes a context unusable


@dataclass
class Tally:
    """How often each fault was tried, how the rounds ended, and what was wrong."""

    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def round(self, node: Node, number: int) -> Iterator[None]:
        """Notes what is wrong in this round; its trainers are killed at the end."""
        try:
            yield
        except (AssertionError, RemoteError) as error:
            self.violations.append(f"round {number}: {error}")
        finally:
            for trainer in node.trainers:
                trainer.kill()
            node.trainers.clear()

    def told(self, rounds: int, seed: int) -> int:
        """Prints the counts; returns the exit code."""
        print(f"seed {seed}: {rounds} rounds, {len(self.violations)} violations")
        for name, count in sorted((self.kinds + self.outcomes).items()):
            print(f"  {name:34} {count}")
        for violation in self.violations:
            print("VIOLATION", violation)
        return 1 if self.violations else 0


@dataclass
class Scene:
    """What a fault acts on."""

    node: Node
    trainer: GpuTrainer
    rng: random.Random
    transfer: str

    @property
    def copier(self) -> Faults:
        """The process whose driver makes the copies to the host."""
        return self.trainer.faults if self.transfer == "push" else self.node.faults

    def either(self) -> Faults:
        return self.rng.choice([self.node.faults, self.trainer.faults])


def _copy_refused(scene: Scene) -> None:
    scene.copier.fail_copy(scene.rng.randint(1, 12 + SAMPLES), 1, behind=False)


def _copy_broken(scene: Scene) -> None:
    scene.copier.fail_copy(scene.rng.randint(1, 12 + SAMPLES), 1, behind=True)


def _copy_illegal(scene: Scene) -> None:
    nth, behind = scene.rng.randint(1, 12 + SAMPLES), scene.rng.random() < 0.5
    scene.copier.fail_copy(nth, LOST, behind=behind)


def _copy_aside_refused(scene: Scene) -> None:
    scene.trainer.faults.fail_copy(scene.rng.randint(1, 4), 1, kinds=ON_DEVICE, behind=False)


def _batches_refused(scene: Scene) -> None:
    scene.trainer.faults.set(batch_fail_code=scene.rng.choice([1, 801]))


def _handle_gone(scene: Scene) -> None:
    scene.node.faults.fail_open(scene.rng.choice([1, 201, 400]), times=scene.rng.randint(1, 2))


def _not_exported(scene: Scene) -> None:
    scene.trainer.faults.fail_export(801, times=1)


def _no_memory(scene: Scene) -> None:
    scene.trainer.faults.fail_alloc(times=scene.rng.choice([1, 3, ALWAYS]))


def _not_pinned(scene: Scene) -> None:
    scene.either().fail_register(times=scene.rng.choice([1, ALWAYS]))


def _slow(scene: Scene) -> None:
    kinds = scene.rng.choice([TO_HOST, TO_HOST | ON_DEVICE])
    scene.copier.slow_copies(scene.rng.choice([2_000, 20_000, 100_000]), kinds=kinds)


def _held(scene: Scene) -> None:
    """Sometimes longer than the stall limit."""
    scene.copier.hold_copies(after=scene.rng.randint(0, 5 + SAMPLES))
    time.sleep(scene.rng.choice([0.01, 0.1, 0.8]))  # the length of the hang is part of the fault
    scene.copier.release_copies()


def _stopped(scene: Scene) -> None:
    scene.node.daemon.kill(signal.SIGSTOP)
    time.sleep(scene.rng.choice([0.01, 0.1, 0.8]))  # likewise
    scene.node.daemon.kill(signal.SIGCONT)


def _context_lost(scene: Scene) -> None:
    scene.either().set(lose_context=LOST)


def _nothing(_scene: Scene) -> None:
    pass


FAULTS: dict[str, Callable[[Scene], None]] = {
    "no fault": _nothing, "copy refused": _copy_refused, "copy broken": _copy_broken,
    "copy illegal": _copy_illegal, "copy aside refused": _copy_aside_refused,
    "batches refused": _batches_refused,
    "handle gone": _handle_gone, "not exported": _not_exported, "no memory": _no_memory,
    "not pinned": _not_pinned, "slow": _slow, "held": _held, "stopped": _stopped,
    "context lost": _context_lost,
}  # fmt: skip

NOT_EARLY = ("no memory", "context lost")  #: a trainer needs memory and a context for its model


class Campaign:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.numbers = itertools.count()

    def play(self, rounds: int) -> Tally:
        while rounds > 0:
            count = min(rounds, ROUNDS_PER_NODE)
            rounds -= self._on_one_node(count)
        return self.tally

    def _on_one_node(self, count: int) -> int:
        """Plays up to `count` rounds, until the node is unusable; returns how many were played."""
        dram = self.rng.choice(["1MiB", "2MiB", "16MiB"])
        played = 0
        try:
            with Node(*GEOMETRY, "--dram", dram) as node:
                if self.rng.random() < 0.2:
                    node.faults.set(one_queue=1)
                node.start()
                while played < count:
                    played += 1
                    if not self._round(node):
                        break
        except AssertionError as error:
            self.tally.violations.append(f"the end of a node: {error}")
        return played

    def _round(self, node: Node) -> bool:
        """False when the node cannot be used again."""
        number = next(self.numbers)
        mode = MODES[number % len(MODES)]
        name = list(FAULTS)[number % len(FAULTS)]
        victim = VICTIMS[number % len(VICTIMS)]
        way = " ".join(mode.values())
        try:
            whole = self._play(node, number, mode, name, victim)
        except (AssertionError, RemoteError) as error:
            self.tally.violations.append(f"round {number} ({way}, {name}, {victim}): {error}")
            whole = False
        finally:
            for trainer in node.trainers:
                trainer.kill()
            node.trainers.clear()
        for kind in (f"by: {way}", f"fault: {name}", f"killed: {victim}"):
            self.tally.kinds[kind] += 1
        return whole

    def _play(self, node: Node, number: int, mode: dict[str, str], name: str, victim: str) -> bool:
        job, stop = f"job-{number}", node.directory / f"stop-{number}"
        trainer = node.process()
        if self.rng.random() < 0.2:
            trainer.faults.set(one_queue=1)
        scene = Scene(node, trainer, self.rng, mode["transfer"])
        early = self.rng.random() < 0.15 and name not in NOT_EARLY
        if early:
            FAULTS[name](scene)
        options: dict[str, Any] = {"job": job, "stall_limit_s": 0.5, "own_stream": number % 2 == 0}
        node.open(trainer, PARTS, **options | mode)
        trainer.post(
            "run", 1_000_000, 1, stop=str(stop), seed=number, churn=self.rng.random() < 0.4
        )
        if not early:
            trainer.wait_for_durable(self.rng.randint(1, 6), SOON_S)
            time.sleep(self.rng.random() * 0.02)  # not synchronisation: the moment is the test
            FAULTS[name](scene)
        time.sleep(self.rng.random() * 0.05)  # likewise
        if victim in ("daemon", "both"):
            node.daemon.kill()
        if victim in ("trainer", "both"):
            trainer.kill()
        acknowledged = trainer.drain()
        lost = node.alive() and _has_lost(node.faults)
        _mend(node.faults)
        if not node.alive():
            node.faults.set(lose_context=0, copy_fail_code=0)
            node.start()
        if victim in ("none", "daemon"):
            acknowledged = self._lives_on(scene, acknowledged, stop)
        trainer.kill()
        acknowledged = max(acknowledged, trainer.drain())
        if not lost:
            node.faults.wait_for(lambda f: f.open_mappings == 0, SOON_S)
        judge(self.tally, node, job, acknowledged)
        if lost:
            node.daemon.kill()  # only the end of its process unmaps what a lost context has mapped
        return not lost

    def _lives_on(self, scene: Scene, acknowledged: int, stop: Path) -> int:
        """Checks a trainer that was not killed: its tensors are undamaged, and its next checkpoint
        becomes durable. No checkpoint is expected after the GPU is lost, or after a copy failed
        under way: then the session treats the GPU as broken. Returns the newest durable step."""
        trainer = scene.trainer
        lost = _has_lost(trainer.faults)
        broken = trainer.faults.copy_fail_async != 0 and trainer.faults.copy_fail_at == 0
        _mend(trainer.faults)
        try:
            if not (lost or broken):
                acknowledged = trainer.wait_for_durable(acknowledged + 1, SOON_S)
            stop.touch()
            now, states = trainer.answer(SOON_S)
            wrong = trainer.check(now)
        except (RemoteError, AssertionError) as error:
            if not lost and not _has_lost(trainer.faults):
                raise AssertionError(f"{error}; {trainer.warnings}") from error
            self.tally.outcomes["trainer: its GPU was lost"] += 1
            return max(acknowledged, trainer.drain())
        if wrong:
            raise AssertionError(f"the living trainer: {wrong}")
        self.tally.outcomes.update({f"checkpoint: {k}": v for k, v in states.items()})
        trainer.close()
        return acknowledged


def judge(tally: Tally, node: Node, job: str, acknowledged: int) -> None:
    """A new trainer restores, checks the result, and saves again."""
    trainer = node.connect(PARTS, job=job)
    done = trainer.restore()
    step = done["step"] if done["found"] else -1
    assert step >= acknowledged, f"step {step} recovered, {acknowledged} acknowledged"
    assert not done["skipped"], f"damage found in {done['skipped']}"
    if done["found"]:
        assert not (wrong := trainer.check(step)), f"step {step} of {done['source']}: {wrong}"
    kind = "nothing" if step < 0 else "newer" if step > acknowledged else "the acknowledged"
    tally.outcomes[f"recovered: {kind}"] += 1
    now = trainer.step()
    handle = trainer.checkpoint()
    trainer.step()
    state = trainer.wait_durable(handle, SOON_S)
    assert state == "durable", f"the next checkpoint: {state}, {trainer.reason(handle)}"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (now, ""), f"the next checkpoint: {found}"
    trainer.kill()
    if not _has_lost(node.faults):
        node.faults.wait_for(lambda f: f.open_mappings == 0, SOON_S)


def _has_lost(faults: Faults) -> bool:
    """Whether the process got a fault that cannot be undone."""
    return faults.lose_context != 0 or faults.copy_fail_code == LOST


def _mend(faults: Faults) -> None:
    """Ends all faults; a lost context stays lost."""
    faults.set(copy_fail_at=0, copy_slow_kinds=0, open_fail_count=0, export_fail_count=0)
    faults.set(alloc_fail_count=0, register_fail_count=0)
    faults.release_copies()


def run(rounds: int, seed: int) -> Tally:
    """Plays `rounds` rounds: modes, faults and victims in turn, moments at random."""
    return Campaign(seed).play(rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tally = run(options.rounds, options.seed)
    played = sum(count for kind, count in tally.kinds.items() if kind.startswith("killed"))
    return tally.told(played, options.seed)


if __name__ == "__main__":
    sys.exit(main())
