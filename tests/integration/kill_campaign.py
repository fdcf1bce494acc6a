"""Kills daemon, trainer or both, at random and at named points, and recovers after each.

    python -m tests.integration.kill_campaign --rounds 200 --seed 1 [--engine mmap]

Checked after every round: the recovered step is not older than the last acknowledged step, and the
recovered bytes are those of that step (made again and compared). Prints counts per victim and
state.
"""

from __future__ import annotations

import argparse
import collections
import random
import signal
import sys
import time
from dataclasses import dataclass, field

from tests.support.daemon import Daemon
from tests.support.trainer import RemoteError, Trainer

COUNTS = [200_000, 5, 150_001]
#: Float32 elements that no step changes: whole chunks, and enough that later checkpoints refer to
#: them.
FROZEN = 33 * 65536
#: State of a checkpoint -> points at which a killed daemon is certainly in that state.
DAEMON_POINTS = {
    "copying": ["data:1", "data:2"],
    "copied": ["data:6", "manifest"],
    "writing": ["data:3", "data:4", "flush:1", "flush:3"],
    "publishing": ["record-a:1", "record-a:3", "record-b:1", "record-b:2"],
}
#: What is killed, in turn; the shortest states come twice.
ROTATION = (
    *DAEMON_POINTS, "copied", "publishing", "trainer copying", "trainer copied", "trainer writing",
    "random",
)  # fmt: skip
#: For other engines than `pwrite`: the shim does not see how they write data.
OTHER_ROTATION = (
    "writing", "publishing", "trainer copying", "random", "publishing", "trainer writing", "random",
)  # fmt: skip


@dataclass
class Tally:
    """Counts of kills by victim and state, and what was wrong."""

    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    states: collections.Counter[str] = field(default_factory=collections.Counter)
    recovered: int = 0
    empty: int = 0
    violations: list[str] = field(default_factory=list)
    frozen: int = 0  # elements, of each trainer


def judge(tally: Tally, label: str, acknowledged: int, daemon: Daemon) -> int:
    """A new trainer restores and compares; returns the restored step, 0 for none."""
    with Trainer() as trainer:
        trainer.open(COUNTS, frozen=tally.frozen, socket=str(daemon.socket), job="job")
        done = trainer.restore()
        step = done["step"] if done["found"] else 0
        if step < acknowledged:
            tally.violations.append(f"{label}: step {step} recovered, {acknowledged} acknowledged")
        elif done["found"] and (wrong := trainer.check(step)):
            tally.violations.append(f"{label}: {wrong}")
        if done["skipped"]:
            tally.violations.append(f"{label}: damage found in {done['skipped']}")
        tally.recovered += bool(done["found"])
        tally.empty += not done["found"]
        return int(step)


def _train_until(trainer: Trainer, rng: random.Random) -> int:
    """Waits until a posted run has reported a random step as durable; returns the newest one."""
    return trainer.wait_for_durable(rng.randint(1, 6))


def _points(state: str, engine: str) -> list[str]:
    points = DAEMON_POINTS[state]
    return [p for p in points if engine == "pwrite" or p.startswith(("flush", "record"))]


def _kill_daemon_at_point(tally: Tally, state: str, point: str, flags: tuple[str, ...]) -> None:
    """The shim kills the daemon at `point`; the trainer survives, and is killed later."""
    label = f"daemon/{state}/{point}"
    spec = f"kill:{'data:7' if point == 'manifest' else point}"
    with Daemon(*flags, shim=spec) as daemon, Trainer() as trainer:
        daemon.start()
        trainer.open(
            COUNTS, frozen=tally.frozen, socket=str(daemon.socket), job="job", stall_limit_s=20
        )
        trainer.save()
        daemon.armed.touch()
        trainer.post("run", 400, 1)
        daemon.wait_end()
        daemon.shim = ""
        trainer.kill()
        acknowledged = max(1, trainer.drain())
        daemon.start()
        judge(tally, label, acknowledged, daemon)
    tally.kills[f"daemon {state}"] += 1
    tally.states[state] += 1


def _kill_trainer_in_state(
    tally: Tally, state: str, also_daemon: bool, flags: tuple[str, ...]
) -> None:
    victim = "both" if also_daemon else "trainer"
    slow = ("--dram", "1MiB", "--max-bandwidth", "16MiB") if state == "copying" else (
        "--max-bandwidth", "16MiB",
    )  # fmt: skip
    with Daemon(*flags, *slow) as daemon, Trainer() as trainer:
        daemon.start()
        trainer.open(COUNTS, frozen=tally.frozen, socket=str(daemon.socket), job="job")
        trainer.save()
        trainer.step()
        handle = trainer.checkpoint()
        seen = trainer.watch(handle, state)
        trainer.kill()
        if also_daemon:
            daemon.kill()
            daemon.start()
        # P1: a copied checkpoint becomes durable, unless the daemon was killed as well
        kept = seen == "durable" or (seen in ("copied", "writing") and not also_daemon)
        judge(tally, f"{victim}/{state}", 2 if kept else 1, daemon)
    tally.kills[f"{victim} {seen}"] += 1
    tally.states[seen] += 1


def _kill_at_random(tally: Tally, rng: random.Random, flags: tuple[str, ...]) -> None:
    victim = rng.choice(["daemon", "trainer", "both"])
    with Daemon(*flags) as daemon, Trainer() as trainer:
        daemon.start()
        trainer.open(
            COUNTS, frozen=tally.frozen, socket=str(daemon.socket), job="job", stall_limit_s=20
        )
        trainer.post("run", 100_000, 1)
        acknowledged = _train_until(trainer, rng)
        time.sleep(rng.random() * 0.02)  # not synchronisation: the moment of the kill is the test
        if victim != "trainer":
            daemon.kill()
        if victim != "daemon":
            trainer.signal(signal.SIGKILL)
        trainer.kill()
        acknowledged = max(acknowledged, trainer.drain())
        if victim != "trainer":
            daemon.start()
        judge(tally, f"{victim}/random", acknowledged, daemon)
    tally.kills[f"{victim} random"] += 1


def run(rounds: int, seed: int, engine: str = "pwrite", frozen: int = 0) -> Tally:
    """Plays `rounds` kills in the order of `ROTATION`."""
    rng = random.Random(seed)
    tally = Tally(frozen=frozen)
    flags = (
        "--chunk", "256KiB", "--block-bytes", "64KiB", "--dram", "16MiB", "--engine", engine,
    )  # fmt: skip
    rotation = ROTATION if engine == "pwrite" else OTHER_ROTATION
    for number in range(rounds):
        kind = rotation[number % len(rotation)]
        try:
            if kind in DAEMON_POINTS:
                _kill_daemon_at_point(tally, kind, rng.choice(_points(kind, engine)), flags)
            elif kind == "random":
                _kill_at_random(tally, rng, flags)
            else:
                _kill_trainer_in_state(
                    tally, kind.removeprefix("trainer "), rng.random() < 0.3, flags
                )
        except (AssertionError, RemoteError) as error:
            tally.violations.append(f"round {number} ({kind}): {error}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("pwrite", "mmap"), default="pwrite")
    parser.add_argument("--frozen", action="store_true", help="most of the model is frozen")
    options = parser.parse_args()
    frozen = FROZEN if options.frozen else 0
    tally = run(options.rounds, options.seed, options.engine, frozen)
    print(f"seed {options.seed}: {options.rounds} rounds, {tally.recovered} recovered, "
          f"{tally.empty} empty, {len(tally.violations)} violations")  # fmt: skip
    for name, count in sorted((tally.kills + tally.states).items()):
        print(f"  {name:24} {count}")
    for violation in tally.violations:
        print("VIOLATION", violation)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
