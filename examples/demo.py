"""PCcheck from end to end (`make demo`): train, kill, resume, and compare every loss bit for bit.

1. A reference run of examples/char_gpt.py, without checkpoints and without interruption.
2. The same run with a checkpoint every few steps; its trainer is SIGKILLed at a random step.
3. The trainer is started again, restores the newest checkpoint and trains to the end.

The daemon is a real one on a temporary storage directory. Its disk is made slow on purpose, as a
disk in a network is: only then do you see why several checkpoints are kept in flight. Exit code 1
when a single loss differs in a single bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from pccheck_store.observer import Observer
from tests.support.curves import Run, Trainer, differences
from tests.support.daemon import Daemon

SCRIPT = Path(__file__).with_name("char_gpt.py")
#: Three checkpoints in flight (slots - keep), two durable ones never overwritten.
SLOTS, KEEP = 5, 2
JOB = "demo"
IN_FLIGHT = ("requested", "copying", "copied", "writing")


def start(options: argparse.Namespace, every: int, variables: dict[str, str]) -> Trainer:
    flags = ("--steps", options.steps, "--every", every, "--seed", options.seed)
    return Trainer(SCRIPT, *flags, variables=variables)


def with_daemon(options: argparse.Namespace, socket: Path) -> Trainer:
    return start(options, options.every, {"PCCHECK_SOCKET": str(socket), "PCCHECK_JOB": JOB})


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def checkpoints(socket: Path) -> list[dict[str, Any]]:
    """The newest checkpoints, from the document that `pccheckctl status --json` prints."""
    with Observer(str(socket)) as observer:
        document: Any = observer.status()
    return [found for rank in document["ranks"] for found in rank["checkpoints"]]


def reference(options: argparse.Namespace) -> Run:
    print(f"1. Reference: {options.steps} steps without checkpoints or interruption", flush=True)
    run = start(options, 0, {}).finish()
    say(f"loss {show(run, 1)} -> {show(run, options.steps)}")
    return run


def interrupted(options: argparse.Namespace, socket: Path, kill_at: int) -> tuple[Run, int]:
    """Trains until `kill_at`; the run and the most checkpoints that were seen in flight."""
    print(
        f"2. With a checkpoint every {options.every} steps; SIGKILL at step {kill_at} "
        f"(random, --kill-seed {options.kill_seed})",
        flush=True,
    )
    trainer, most = with_daemon(options, socket), 0
    for step in trainer.steps():
        if step >= kill_at:
            break
        if step % 20 == 1:
            flying = [found for found in checkpoints(socket) if found["state"] in IN_FLIGHT]
            most = max(most, len(flying))
            shown = ", ".join(f"step {found['step']} {found['state']}" for found in flying)
            say(f"step {step:3} loss {show(trainer.run, step)}  in flight: {shown or 'none'}")
    run = trainer.kill()
    say(f"killed after step {run.last}")
    return run, most


def resumed(options: argparse.Namespace, socket: Path) -> Run:
    print("3. The same command again", flush=True)
    run = with_daemon(options, socket).finish()
    say(f"resumed at step {run.resumed}")
    say(f"loss at step {options.steps}: {show(run, options.steps)}")
    return run


def show(run: Run, step: int) -> str:
    return f"{float(run.losses[step][0]):.4f}"


def delay_us(options: argparse.Namespace, whole: Run) -> int:
    """The delay of each write. A checkpoint of this size is two writes, one after the other (data,
    manifest), and so needs more than two intervals to be durable."""
    interval_s = options.every * whole.seconds_per_step(10, whole.last)
    return int(1.3 * interval_s * 1e6)


def table(
    options: argparse.Namespace, whole: Run, first: Run, second: Run, most: int, durable_s: float
) -> str:
    """The figures of this run; start-up (Python, torch) is part of the seconds to resume."""
    warm_up = min(10, first.last // 2)
    slowdown = first.seconds_per_step(warm_up, first.last) / whole.seconds_per_step(
        warm_up, first.last
    )
    made = first.last // options.every + (second.last - second.resumed) // options.every
    rows = {
        "steps lost by the kill": f"{first.last - second.resumed} (of {first.last})",
        "seconds from restart to the next step": f"{second.first_s - second.started_s:.1f}",
        "checkpoints": str(made),
        "seconds from request to durable": f"{durable_s:.2f} (the disk is made slow)",
        "most seen in flight at once": f"{most} (of {SLOTS - KEEP})",
        "slowdown against no checkpoints": f"{slowdown:.2f}",
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {value}" for name, value in rows.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the training")
    parser.add_argument("--kill-seed", type=int, default=random.randrange(10_000))
    options = parser.parse_args()
    kill_at = random.Random(options.kill_seed).randrange(
        options.steps // 2, options.steps * 9 // 10
    )

    whole = reference(options)
    with Daemon(
        "--slots", str(SLOTS), "--keep", str(KEEP), "--dram", "256MiB",
        shim=f"slow:data:{delay_us(options, whole)}",
    ) as daemon:  # fmt: skip
        daemon.start()
        daemon.armed.touch()
        first, most = interrupted(options, daemon.socket, kill_at)
        second = resumed(options, daemon.socket)
        wrong = [str(one) for one in differences(whole, first, second)]
        compared = len(first.losses) + len(second.losses)
        durable_s = statistics.median(
            found["durable_s"] for found in checkpoints(daemon.socket) if found["durable_s"]
        )
        print(table(options, whole, first, second, most, durable_s))
        print("\n$ pccheckctl status", flush=True)
        subprocess.run(
            [sys.executable, "-m", "pccheckctl", "--socket", str(daemon.socket), "status"],
            check=False,
        )
        daemon.stop()
    if not second.resumed:
        wrong.append("the second run did not restore a checkpoint")
    if second.last != options.steps:
        wrong.append(f"the second run ended at step {second.last}")
    for text in wrong[:10]:
        print(f"DIFFERENT {text}")
    print(
        f"\nFAILED: {len(wrong)} differences" if wrong
        else f"\nOK: all {compared} losses are those of the reference run, bit for bit"
    )  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
