"""Kills a daemon that has a descriptor store, its trainer, or both, and starts it again.

    python -m tests.integration.restart_campaign --rounds 200 --seed 1

Checked like the kill campaign, with a stronger promise: a checkpoint that was seen copied before
the daemon was killed, or a newer one, is recovered after the restart. A trainer that was not killed
continues by itself.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from dataclasses import dataclass

from tests.integration import kill_campaign
from tests.integration.kill_campaign import COUNTS, FROZEN
from tests.support.manager import ServedDaemon
from tests.support.trainer import RemoteError, Trainer

ROTATION = ("both", "daemon", "both", "trainer, then daemon", "daemon", "inside")
#: Where the shim kills the daemon: its checkpoints are copied then, or may be.
POINTS = ("data:1", "data:3", "data:6", "flush:1", "flush:2", "record-a:1", "record-b:1")
FLAGS = ("--chunk", "256KiB", "--block-bytes", "64KiB")
#: So slow that a copied checkpoint is not durable yet. With little memory most of its bytes are
#: only on the disk by then.
PACES = (
    ("--dram", "16MiB", "--max-bandwidth", "4MiB"),
    ("--dram", "16MiB", "--max-bandwidth", "32MiB"),
    ("--dram", "1MiB", "--max-bandwidth", "16MiB"),
)


@dataclass
class Tally(kill_campaign.Tally):
    """Also counts rounds in which a checkpoint was copied, but not durable, at the kill."""

    copied: int = 0


def _copied(states: list[str]) -> int:
    """The newest copied step; step n has handle n - 1."""
    seen = ("copied", "writing", "durable", "global")
    return max((n for n, state in enumerate(states, 1) if state in seen), default=0)


def _round(tally: Tally, rng: random.Random, victim: str) -> None:
    label = f"{victim} ({sum(tally.kills.values())})"
    point = rng.choice(POINTS)
    shim = f"kill:{point}" if victim == "inside" else ""
    with ServedDaemon(*FLAGS, *rng.choice(PACES), shim=shim) as daemon, Trainer() as trainer:
        daemon.start()
        trainer.open(
            COUNTS, frozen=tally.frozen, socket=str(daemon.socket), job="job", stall_limit_s=20
        )
        for _ in range(rng.randint(1, 4)):
            trainer.step()
            handle = trainer.checkpoint()
            if rng.random() < 0.7:
                trainer.watch(handle, rng.choice(["copying", "copied", "writing"]))
        if victim == "inside":
            promised, states = _train_into(daemon, trainer)
        else:
            states = trainer.states()
            promised = _copied(states)
        tally.copied += "copied" in states or "writing" in states
        if victim == "trainer, then daemon":
            trainer.kill()
        time.sleep(rng.random() * 0.05)  # not synchronisation: the moment of the kill is the test
        if victim != "inside":
            daemon.kill()
        daemon.shim = ""
        if victim == "both":
            trainer.signal(signal.SIGKILL)
        daemon.start()
        if rng.random() < 0.2:  # while the new daemon writes what it took over
            daemon.kill()
            daemon.start()
        if victim in ("daemon", "inside"):
            promised = max(promised, _go_on(tally, label, trainer))
        trainer.kill()
        kill_campaign.judge(tally, label, promised, daemon)
    tally.kills[victim] += 1


def _train_into(daemon: ServedDaemon, trainer: Trainer) -> tuple[int, list[str]]:
    """Saves until the shim has killed the daemon; returns the newest copied step."""
    daemon.armed.touch()
    promised, states = 0, list[str]()
    for _ in range(400):
        promised, states = max(promised, _copied(trainer.states())), trainer.states()
        assert daemon.process is not None
        if daemon.process.poll() is not None:
            return promised, states
        trainer.step()
        trainer.checkpoint()
    raise AssertionError("the daemon was not killed")


def _go_on(tally: Tally, label: str, trainer: Trainer) -> int:
    """The trainer finds the new daemon by itself, and a new step becomes durable."""
    try:
        handle = trainer.connects_again()
    except AssertionError as error:
        tally.violations.append(f"{label}: the trainer did not come back: {error}")
        return 0
    step, state = trainer.step(0), trainer.wait_durable(handle)
    if state not in ("durable", "global", "superseded"):
        tally.violations.append(f"{label}: the trainer went on to {state}")
    return int(step) if state != "superseded" else 0


def run(rounds: int, seed: int, frozen: int = 0) -> Tally:
    """Plays `rounds` kills in the order of `ROTATION`."""
    rng = random.Random(seed)
    tally = Tally(frozen=frozen)
    for number in range(rounds):
        victim = ROTATION[number % len(ROTATION)]
        try:
            _round(tally, rng, victim)
        except (AssertionError, RemoteError) as error:
            tally.violations.append(f"round {number} ({victim}): {error}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frozen", action="store_true", help="most of the model is frozen")
    options = parser.parse_args()
    tally = run(options.rounds, options.seed, FROZEN if options.frozen else 0)
    print(f"seed {options.seed}: {options.rounds} rounds, {tally.copied} with something copied and "
          f"not durable, {tally.recovered} recovered, {tally.empty} empty, "
          f"{len(tally.violations)} violations")  # fmt: skip
    for name, count in sorted(tally.kills.items()):
        print(f"  {name:24} {count}")
    for violation in tally.violations:
        print("VIOLATION", violation)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
