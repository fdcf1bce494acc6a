"""Kills a daemon that pulls GPU tensors and has a descriptor store, and starts it again.

    python -m tests.integration.gpu_restart_campaign --rounds 60 --seed 1

A round: the daemon is killed, with or without its trainer, while checkpoints of state on the
stand-in's GPU are being copied, are copied, or are being written.

Checked: a checkpoint that was seen copied, or a newer one, is recovered with the bytes of one step.
A checkpoint that was copied only in part is dropped. A trainer that was not killed exposes its
memory again, and its next checkpoints become durable.

"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time

from tests.integration.gpu_campaign import GEOMETRY, PARTS, SOON_S, Tally, judge
from tests.support.gpunode import Node
from tests.support.gputrainer import GpuTrainer
from tests.support.trainer import RemoteError

MOMENTS = ("copying", "copied", "writing")
VICTIMS = ("daemon", "both")
SNAPSHOTS = ("overlap", "device")
#: So slow that a copied checkpoint is not durable yet. With little memory most of its bytes are
#: only on the disk by then.
PACES = (
    ("--dram", "16MiB", "--max-bandwidth", "4MiB"),
    ("--dram", "16MiB", "--max-bandwidth", "16MiB"),
    ("--dram", "1MiB", "--max-bandwidth", "8MiB"),
)
COPIED = ("copied", "writing", "durable", "global", "superseded")
NOTHING = -1  # was promised


def _round(tally: Tally, rng: random.Random, number: int) -> None:
    moment, victim = MOMENTS[number % 3], VICTIMS[number // 3 % 2]
    with Node(*GEOMETRY, *rng.choice(PACES), kept=True) as node:
        node.start()
        snapshot = rng.choice(SNAPSHOTS)
        trainer = node.connect(PARTS, transfer="pull", snapshot=snapshot, stall_limit_s=20)
        for _ in range(rng.randint(0, 2)):
            trainer.step()
            trainer.checkpoint()
        promised = _train_to(node, trainer, rng, moment)
        tally.kinds[f"at: {moment}"] += 1
        tally.kinds[f"killed: {victim}"] += 1
        node.daemon.kill()
        node.faults.release_copies()
        if victim == "both":
            trainer.signal(signal.SIGKILL)
        node.start()
        if rng.random() < 0.2:  # while the new daemon writes what it took over
            node.daemon.kill()
            node.start()
        if victim == "daemon":
            promised = max(promised, _go_on(node, trainer))
        trainer.kill()
        newer = tally.outcomes["recovered: newer"]
        judge(tally, node, "job", promised)
        if (moment, victim) == ("copying", "both"):
            more = tally.outcomes["recovered: newer"] - newer
            assert not more, "what was copied in part was recovered"


def _train_to(node: Node, trainer: GpuTrainer, rng: random.Random, moment: str) -> int:
    """Trains until the last checkpoint is in state `moment`; returns the newest copied step."""
    step = trainer.step()
    if moment == "copying":  # no checkpoint before it is in flight, and some bytes are copied
        for handle in range(step - 1):
            trainer.wait_durable(handle, SOON_S)
        node.faults.hold_copies(after=rng.randint(0, 5))  # a checkpoint is six copies
        trainer.checkpoint()
        node.faults.wait_for(lambda f: f.held_copies > 0, SOON_S)
        return step - 1 or NOTHING
    handle = trainer.checkpoint()
    trainer.watch(handle, moment)
    time.sleep(rng.random() * 0.02)  # not synchronisation: the moment of the kill is the test
    return max(n for n, state in enumerate(trainer.states(), 1) if state in COPIED)


def _go_on(node: Node, trainer: GpuTrainer) -> int:
    """The trainer finds the new daemon by itself, and a checkpoint by pull becomes durable."""
    handle = trainer.connects_again()
    step: int = trainer.step(0)
    state = trainer.wait_durable(handle, SOON_S)
    assert state in ("durable", "superseded"), f"{state}: {trainer.reason(handle)}"
    assert node.transfer() == ("pull", "")
    wrong = trainer.check(step)
    assert not wrong, f"the living trainer: {wrong}"
    return step if state == "durable" else 0


def run(rounds: int, seed: int) -> Tally:
    """Moments and victims in turn; pace, kind of snapshot and exact moment at random."""
    rng, tally = random.Random(seed), Tally()
    for number in range(rounds):
        try:
            _round(tally, rng, number)
        except (AssertionError, RemoteError) as error:
            tally.violations.append(f"round {number}: {error}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return run(options.rounds, options.seed).told(options.rounds, options.seed)


if __name__ == "__main__":
    sys.exit(main())
