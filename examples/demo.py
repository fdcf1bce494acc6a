"""What PCcheck is for, in a minute or two (`make demo`), with examples/char_gpt.py:

1. The same training without checkpoints, with several checkpoints in flight, with one at a time,
   and with torch.save: in turn, several times. What does each cost?
2. The training with several in flight again; its process is killed with SIGKILL at a random step.
3. The same command once more: it restores the newest checkpoint, and trains to the end.

All runs begin with the same seed, and every loss is compared, bit for bit. The disk is made slow on
purpose, as a disk in a network is (slow_disk.c): only then do you see why several checkpoints are
kept in flight. Exit code 1 when a single loss differs in a single bit.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pccheck_store.observer import Observer
from pccheck_wire.errors import DaemonUnreachableError

HERE = Path(__file__).parent
LINE = re.compile(r"step (\d+) loss (\S+)")
IN_FLIGHT = ("requested", "copying", "copied", "writing")
KEEP, SEVERAL = 2, 3
CHAR_GPT = (str(HERE / "char_gpt.py"),)
TORCH_SAVES = ("-m", "examples.torch_saves")
CHECKPOINT_BYTES = 5.2e6
#: How long a checkpoint is written, in intervals: more than one, less than SEVERAL.
WRITE_INTERVALS = 2.2
WARM_STEPS = 10
READY_LIMIT_S = 60.0


@dataclass
class Run:
    """One process: its losses with all digits by step, and when each was printed."""

    losses: dict[int, str] = field(default_factory=dict)
    seen_s: dict[int, float] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    resumed: int = 0  #: the step that was restored

    @property
    def first(self) -> int:
        return min(self.losses)

    @property
    def last(self) -> int:
        return max(self.losses)

    def step_s(self) -> float:
        """Without the first steps, which make everything ready."""
        warm = min(WARM_STEPS, self.last // 2)
        return (self.seen_s[self.last] - self.seen_s[warm]) / (self.last - warm)


@dataclass(frozen=True)
class Way:
    """How a run saves: what Python starts, and with which variables."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    script: tuple[str, ...] = CHAR_GPT
    saves: bool = True


NONE = Way("none", saves=False)


def train(options: argparse.Namespace, way: Way, kill_at: int = 0) -> Iterator[Run]:
    """Yields the run after each step; with `kill_at` this step is the last."""
    flags = ["--steps", options.steps, "--every", options.every * way.saves, "--seed", options.seed]
    run, said = Run(), []
    with subprocess.Popen(
        [sys.executable, *way.script, *map(str, flags)], cwd=HERE.parent,
        env=environment(way.variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if found := LINE.match(line):
                step = int(found[1])
                run.losses[step], run.seen_s[step] = found[2], time.monotonic()
                yield run
                if step == kill_at:
                    process.kill()
            elif found := re.match(r"resumed at step (\d+)", line):
                run.resumed = int(found[1])
            else:
                said.append(line)
    if process.returncode and not kill_at:
        raise SystemExit(f"{' '.join(way.script)} ended with {process.returncode}\n{''.join(said)}")


def whole(options: argparse.Namespace, way: Way) -> Run:
    *_, run = train(options, way)
    return run


def environment(more: dict[str, str]) -> dict[str, str]:
    """Without PCcheck's variables of this shell. A model this small needs one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PCCHECK_")}
    return kept | {"OMP_NUM_THREADS": "1", "PCCHECK_CONFIG": os.devnull} | more


@dataclass(frozen=True)
class Node:
    """Daemons on one slow disk: one with SEVERAL checkpoints in flight, one with a single one."""

    place: Path
    slow: dict[str, str]  #: the variable with the speed of the disk
    several: Path  #: the daemons' sockets
    single: Path

    def pccheck(self, socket: Path, job: str, name: str = "") -> Way:
        return Way(name, {"PCCHECK_SOCKET": str(socket), "PCCHECK_JOB": job})

    def ways(self, job: str) -> list[Way]:
        saved = {"CHECKPOINT": str(self.place / "checkpoint.pt")}
        return [
            NONE,
            self.pccheck(self.several, job, f"PCcheck, {SEVERAL} in flight"),
            self.pccheck(self.single, job, "PCcheck, 1 at a time"),
            Way("torch.save and fsync", saved | self.slow, TORCH_SAVES),
        ]


@contextmanager
def node(options: argparse.Namespace, first: Run) -> Iterator[Node]:
    """Its disk writes a checkpoint in WRITE_INTERVALS intervals of the first run."""
    with ExitStack() as stack:
        scratch = tempfile.TemporaryDirectory(prefix=".demo-", dir=Path.cwd())
        place = Path(stack.enter_context(scratch))
        library, source = str(place / "slow_disk.so"), str(HERE / "slow_disk.c")
        compiler = os.environ.get("CC", "cc").split()
        subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        speed = CHECKPOINT_BYTES / (WRITE_INTERVALS * options.every * first.step_s())
        slow = {"SLOW_DISK": str(speed)}
        print(f"   (the disk is made slow: {speed / 1e6:.1f} MB/s for each checkpoint)", flush=True)
        variables = slow | {"LD_PRELOAD": library}
        several, single = (
            stack.enter_context(daemon(place, in_flight, variables)) for in_flight in (SEVERAL, 1)
        )
        yield Node(place, slow, several, single)


@contextmanager
def daemon(place: Path, in_flight: int, variables: dict[str, str]) -> Iterator[Path]:
    """Yields the socket of a pccheckd that has so many checkpoints in flight."""
    storage = place / f"in-flight-{in_flight}"
    storage.mkdir()
    log = place / f"in-flight-{in_flight}.log"
    # Elsewhere, because the path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="pcc-demo-") as run, log.open("wb") as output:
        socket = Path(run) / "attach.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "pccheckd", "--storage", storage, "--socket", socket,
             "--slots", str(KEEP + in_flight), "--keep", str(KEEP), "--dram", "128MiB"],
            cwd=HERE.parent, env=environment(variables), stdout=output, stderr=output,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + READY_LIMIT_S
            while not answers(socket):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"pccheckd did not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield socket
        finally:
            process.terminate()
            process.wait()


def answers(socket: Path) -> bool:
    try:
        Observer(str(socket)).close()
    except DaemonUnreachableError:
        return False
    return True


def in_flight(socket: Path, job: str) -> str:
    """From the document that `pccheckctl status --json` prints."""
    with Observer(str(socket)) as observer:
        document: Any = observer.status()
    found = [one for rank in document["ranks"] if rank["job"] == job for one in rank["checkpoints"]]
    shown = (f"step {it['step']} {it['state']}" for it in found if it["state"] in IN_FLIGHT)
    return ", ".join(shown) or "none"


def compare(options: argparse.Namespace, node: Node, first: Run) -> dict[str, list[Run]]:
    """The runs by the way to save, made in turn. The first one has been made already."""
    runs: dict[str, list[Run]] = {}
    for number in range(options.rounds):
        for way in node.ways(f"round-{number}"):
            run = whole(options, way) if runs else first
            runs.setdefault(way.name, []).append(run)
            print(f"   {way.name:22} {run.step_s() * 1e3:6.1f} ms a step", flush=True)
    return runs


def costs(runs: dict[str, list[Run]]) -> str:
    """What each way costs, as a table."""
    lines = [f"   {'checkpoints':22} {'ms a step':>9}   slowdown (lowest to highest)"]
    for way, made in runs.items():
        pairs = zip(made, runs[NONE.name], strict=True)
        ratios = [run.step_s() / none.step_s() for run, none in pairs]
        step_ms = statistics.median(run.step_s() for run in made) * 1e3
        spread = "" if way == NONE.name else f"  ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"   {way:22} {step_ms:9.1f} {statistics.median(ratios):10.2f}{spread}")
    lines.append("   Medians; each round is compared with its own run without checkpoints.")
    return "\n".join(lines)


def kill_and_resume(options: argparse.Namespace, node: Node, kill_at: int) -> tuple[Run, Run]:
    way = node.pccheck(node.several, "killed")
    print(f"2. {SEVERAL} in flight; SIGKILL at step {kill_at} (--kill-seed {options.kill_seed})")
    for dead in train(options, way, kill_at):
        if dead.last % 10 == 1 or dead.last == kill_at:
            flying = in_flight(node.several, "killed")
            loss = float(dead.losses[dead.last])
            print(f"   step {dead.last:3} loss {loss:.4f}   in flight: {flying}", flush=True)
    print("3. The same command again", flush=True)
    again = whole(options, way)
    print(
        f"   resumed at step {again.resumed}: {dead.last - again.resumed} steps were lost\n"
        f"   next step {again.seen_s[again.first] - again.started_s:.1f} s after the start "
        "(most of it imports torch)\n\n$ pccheckctl status", flush=True,
    )  # fmt: skip
    command = [sys.executable, "-m", "pccheckctl", "--socket", str(node.several), "status"]
    subprocess.run(command, check=False)
    return dead, again


def differences(wanted: Run, runs: list[Run]) -> list[str]:
    return [
        f"step {step}: loss {loss} instead of {wanted.losses[step]}"
        for run in runs
        for step, loss in run.losses.items()
        if loss != wanted.losses[step]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the training")
    parser.add_argument("--kill-seed", type=int, default=random.randrange(10_000))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the daemons, too
    half, late = options.steps // 2, options.steps * 9 // 10
    kill_at = random.Random(options.kill_seed).randrange(half, late)

    print(f"1. A small GPT, {options.steps} steps, a checkpoint (5 MB) every {options.every} steps")
    first = whole(options, NONE)
    with node(options, first) as both:
        compared = compare(options, both, first)
        print(f"\n{costs(compared)}\n", flush=True)
        dead, again = kill_and_resume(options, both, kill_at)
    runs = [run for made in compared.values() for run in made] + [dead, again]
    wrong = differences(first, runs)
    if not again.resumed or again.last != options.steps:
        wrong.append(f"the last run resumed at step {again.resumed} and ended at {again.last}")
    for text in wrong[:10]:
        print(f"DIFFERENT {text}")
    losses = sum(len(run.losses) for run in runs)
    print(
        f"\nFAILED: {len(wrong)} differences" if wrong
        else f"\nOK: all {losses} losses of {len(runs)} runs are the same, bit for bit"
    )  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
