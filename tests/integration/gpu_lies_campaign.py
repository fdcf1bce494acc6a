"""What a driver that lies does to checkpoints: a table of all lies of the stand-in.

    python -m tests.integration.gpu_lies_campaign [--lie NAME]... [--way WAY]...

Each lie of tests/standin/lie.c, in the drivers of trainer and daemon, for each way in which tensors
get into a checkpoint, on two GPUs: some steps with late updates, slow copies and memory that moves,
each step saved while the next one is already enqueued. Then the daemon and a new trainer start with
an honest driver, and compare the bytes of the newest checkpoint with those of its step. The way
"last" is pull, and then a step that is left on the GPU by a trainer that is killed. The lie "none"
is an honest driver; the exit code is 1 if anything is wrong then. Columns:

- saved: how the checkpoints ended, and why they failed.
- durable: what is wrong in the newest durable checkpoint, read by an honest process.
- training: how the state of the training differs from what its steps make.
- restored: how the state of a lying trainer differs after restore().
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from typing import Any

from tests.support.gpunode import Node
from tests.support.gputrainer import GpuTrainer, Part
from tests.support.standin import ON_DEVICE, TO_HOST
from tests.support.waiting import until
from tests.unit.repository.test_behaviours import NOTICED

WAYS: dict[str, dict[str, Any]] = {
    "pull": {"transfer": "auto"},
    "descriptors": {"transfer": "auto", "expands": True},
    "push": {"transfer": "push"},
    "device": {"transfer": "auto", "snapshot": "device"},
    "last": {"transfer": "auto"},
}
PARTS = (
    Part(2_700_000), Part(2_700_000), Part(2_700_000, device=1), Part(7, "bfloat16"),
    Part(5_000, kind="buffer"),
)  # fmt: skip
COLUMNS = ("saved", "durable", "training", "restored")
UPDATE_S = 0.3
US_PER_MIB = 5000


def late_step(trainer: Any) -> int:
    """The update begins late, and the CPU does not wait for it."""
    for device in range(2):
        trainer.gpu.launch(lambda: time.sleep(UPDATE_S), device)
    return int(trainer.step())


def train(trainer: GpuTrainer, steps: int) -> str:
    """Saves each step without waiting; how the checkpoints ended."""
    ends: collections.Counter[str] = collections.Counter()
    for _ in range(steps):
        trainer.evaluate(late_step)
        handle = trainer.checkpoint()
        trainer.step()  # begins as soon as the gate lets it
        state = trainer.ended(handle)
        ends[state if state != "failed" else trainer.reason(handle)[:60]] += 1
        for _ in range(2):  # the second time to the address before
            trainer.move_part0()
    return ", ".join(f"{count} {end}" for end, count in ends.items())


def last_is_handed_over(trainer: Any) -> bool:
    """All that the daemon does not read on the GPU. False: the last checkpoint has ended."""
    save, limit = trainer.handles[-1]._in_flight, time.monotonic_ns() + 10**10
    return bool(save.snapshot) and save.native.wait(save.snapshot, "host_read", limit)


def leave_last(node: Node, trainer: GpuTrainer) -> None:
    """One more step, on the GPU only, of a trainer that dies then. It has shown its memory before,
    and the daemon has the rest."""
    trainer.step()
    trainer.ended(trainer.checkpoint())
    trainer.evaluate(late_step)
    handle = trainer.checkpoint(to="device")
    trainer.synchronize()
    if trainer.evaluate(last_is_handed_over):
        until(lambda: trainer.state(handle) not in ("requested", "queued"))
    trainer.kill()
    node.wait_for(lambda: not node.status()["sessions"])


def play(node: Node, way: str, steps: int) -> dict[str, str]:
    trainer = node.connect(PARTS, **WAYS[way])
    trainer.evaluate(late_step)
    trainer.ended(trainer.checkpoint())
    for faults in (node.faults, trainer.faults):
        faults.slow_copies(US_PER_MIB, kinds=TO_HOST | ON_DEVICE)
    found = {"saved": train(trainer, steps), "training": trainer.check(1 + 2 * steps)}
    if way != "push" and node.transfer()[0] != "pull":
        found["saved"] += f"; pushed: {node.transfer()[1][:60]}"
    if way == "last":
        leave_last(node, trainer)
    trainer.kill()
    liar = node.connect(PARTS, **WAYS[way])
    found["restored"] = liar.restored()[1]
    liar.kill()
    node.be_honest()
    if way != "last":  # else it may be in memory only
        node.daemon.kill()
        node.start()
    reader = node.connect(PARTS, **WAYS[way])
    back = reader.recover()
    skipped = f"; skipped {back['skipped']}" if back["skipped"] else ""
    right = f"right, step {back['step']}" if back["found"] else "nothing"
    found["durable"] = (back.get("wrong") or right) + skipped
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lie", action="append", choices=("none", *NOTICED))
    parser.add_argument("--way", action="append", choices=tuple(WAYS))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    wrong = False
    print("| lie | way | saved | durable | training | restored |\n|---|---|---|---|---|---|")
    for lie in options.lie or ("none", *NOTICED):
        for way in options.way or WAYS:
            lying = "" if lie == "none" else lie
            with Node("--dram", "512MiB", devices=2, dead="keep", lie=lying) as node:
                try:
                    found = play(node.start(), way, options.steps)
                except Exception as error:
                    found = {"saved": f"{type(error).__name__}: {error}"[:200].replace("\n", " ")}
            cells = [found[name] or "right" if name in found else "not seen" for name in COLUMNS]
            print("|", " | ".join([lie, way, *cells]), "|", flush=True)
            wrong |= lie == "none" and (cells[2:] != ["right"] * 2 or "right" not in cells[1])
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
