"""Compares killed and resumed runs with uninterrupted runs, bit for bit.

    python -m bench.resume_check [--kinds fp32 bf16 ddp fsdp2 hf] [--steps 200] [--every 10]
                                 [--small] [--no-cost] [--directory DIR]

For each kind of training, all with the same seed:

1. a run without checkpoints,
2. a run with a checkpoint every few steps,
3. the same, killed with SIGKILL at a random step (--seed) and started again.

The three loss curves must be the same in every bit. Otherwise this names the first step that
differs, and ends with 1. fp32 and bf16 train examples/char_gpt.py: scheduler, dropout, a shuffled
loader. ddp and fsdp2 train examples/ddp.py and examples/fsdp2.py with two ranks under torchrun, hf
trains examples/hf_trainer.py with Hugging Face's Trainer (the extra `huggingface`). A picture shows
the curves of each kind; it needs matplotlib (the extra `plot`).

Then bench.figures measures what the checkpoints cost, against torch.save at the same interval.
Writes bench/results/resume_check-DATE.{json,md} and resume_check-KIND-DATE.png.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import common
from bench.common import BenchError, exit_code
from bench.figures.disk import unlimited
from bench.figures.plan import CPU, Plan
from bench.figures.registry import OURS
from bench.figures.report import slowdown_table
from bench.figures.rounds import Bench
from bench.ours import Daemon
from bench.rivals import UNSYNCED
from tests.support.curves import ROOT, Difference, Run, Trainer, differences


@dataclass(frozen=True, slots=True)
class Kind:
    """What is trained: a script, by how many ranks of torchrun (0: by Python alone)."""

    script: str
    ranks: int = 0
    flags: tuple[str, ...] = ()


KINDS = {
    "fp32": Kind("char_gpt.py"),
    "bf16": Kind("char_gpt.py", flags=("--dtype", "bfloat16")),
    "ddp": Kind("ddp.py", ranks=2),
    "fsdp2": Kind("fsdp2.py", ranks=2),
    "hf": Kind("hf_trainer.py"),
}
#: From this load for each CPU on, a report says that the machine was busy.
LOADED = 0.3
SMALL = {"kinds": ["fp32"], "steps": 12, "every": 2, "rounds": 1, "width": 64, "layers": 1}


@dataclass(frozen=True, slots=True)
class Check:
    """The runs of one kind, and where they are not the same."""

    kind: str
    whole: Run
    saved: Run
    killed: Run
    resumed: Run

    def differences(self) -> list[Difference]:
        return differences(self.whole, self.saved, self.killed, self.resumed)

    def problems(self) -> list[str]:
        """Empty when the check is passed."""
        found = [f"{self.kind}: {one}" for one in self.differences()[:1]]
        if not self.resumed.resumed:
            found.append(f"{self.kind}: the run that was started again began at step 1")
        for run in (self.saved, self.resumed):
            if run.last != self.whole.last:
                found.append(f"{self.kind}: a run ended at step {run.last}, not {self.whole.last}")
        return found

    @property
    def compared(self) -> int:
        runs = (self.saved, self.killed, self.resumed)
        return sum(len(ranks) for run in runs for ranks in run.losses.values())

    def row(self) -> str:
        different = self.differences()
        first = f"{len(different)}, the first at step {different[0].step}" if different else "none"
        return (
            f"| {self.kind} | {self.whole.last} | {self.killed.last} | {self.resumed.resumed} "
            f"| {self.compared} | {first} |"
        )

    def document(self) -> dict[str, object]:
        return {
            "killed_after": self.killed.last,
            "resumed_at": self.resumed.resumed,
            "compared": self.compared,
            "different": self.differences(),
            "losses": self.whole.losses,
        }


def check(kind: str, options: argparse.Namespace, daemon: Daemon) -> Check:
    """Raises RuntimeError, with the last lines of a script that failed."""
    what = KINDS[kind]
    script = ROOT / "examples" / what.script

    def start(job: str, every: int) -> Trainer:
        variables = {"PCCHECK_SOCKET": str(daemon.socket), "PCCHECK_JOB": f"{kind}-{job}"}
        flags = ("--steps", options.steps, "--every", every, *what.flags)
        return Trainer(script, *flags, ranks=what.ranks, variables=variables)

    # After the first checkpoint: before it, there is nothing to resume.
    kill_at = random.Random(f"{kind} {options.seed}").randrange(options.every + 1, options.steps)
    print(f"{kind}: without checkpoints, with them, killed at step {kill_at}", flush=True)
    whole = start("whole", 0).finish()
    saved = start("saved", options.every).finish()
    trainer = start("killed", options.every)
    for step in trainer.steps():
        if step >= kill_at:
            break
    killed = trainer.kill()
    resumed = start("killed", options.every).finish()
    made = Check(kind, whole, saved, killed, resumed)
    print(
        f"  killed after step {killed.last}, resumed at step {resumed.resumed}, "
        f"{made.compared} losses compared, {len(made.differences())} different",
        flush=True,
    )
    return made


def draw(made: Check, path: Path) -> None:
    """Above: the curves of rank 0, on top of one another. Below: how far from the first."""
    plot = common.require_pyplot()
    figure, axes = plot.subplots(
        2, 1, figsize=(9, 5.5), sharex=True, height_ratios=(4, 1), layout="constrained"
    )
    wanted = {step: float(ranks[0]) for step, ranks in made.whole.losses.items()}
    curves = {
        "not interrupted, no checkpoints": ([made.whole], "-", 5.0, "#b8cce0"),
        "not interrupted": ([made.saved], "-", 2.5, "#58a868"),
        "killed and resumed": ([made.killed, made.resumed], "--", 1.0, "#c03028"),
    }
    for name, (runs, style, width, colour) in curves.items():
        for index, run in enumerate(runs):
            losses = {step: float(r[0]) for step, r in sorted(run.losses.items()) if 0 in r}
            look = {"linestyle": style, "linewidth": width, "color": colour}
            axes[0].plot(list(losses), list(losses.values()), label="" if index else name, **look)
            away = [loss - wanted.get(step, 0.0) for step, loss in losses.items()]
            axes[1].plot(list(losses), away, **look)
    for axis in axes:
        axis.axvline(made.killed.last, color="#303030", linewidth=0.8)
        axis.axvline(made.resumed.resumed, color="#303030", linewidth=0.8, linestyle=":")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(
        f"{made.kind}: SIGKILL after step {made.killed.last}, resumed at step "
        f"{made.resumed.resumed} (dotted), {len(made.differences())} losses differ",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes[0].set_ylabel("loss")
    axes[1].set_ylabel("difference")
    axes[1].set_xlabel("step")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=100)
    plot.close(figure)


def pictures(made: list[Check]) -> list[str]:
    """Draws them, and returns their lines in the document. Without matplotlib prints what to
    install."""
    lines = []
    for one in made:
        path = common.result_path(f"resume_check-{one.kind}", ".png")
        try:
            draw(one, path)
        except BenchError as error:
            print(f"no pictures: {error}")
            break
        lines += [f"![{one.kind}]({path.name})", ""]
    return lines


def cost(options: argparse.Namespace) -> tuple[list[str], dict[str, object]]:
    """Table and figures of real training in bench.figures, at this interval."""
    torch.set_num_threads(1)  # as in the runs above; other threads would wait for a busy core
    plan = Plan(
        figures=("cpu",), rounds=options.rounds, contenders=(OURS, "torch.save", UNSYNCED),
        cpu_intervals=(options.every,), width=options.width, layers=options.layers,
    )  # fmt: skip
    with unlimited(options.directory) as disk:
        results = Bench(plan, disk, disk).run()
    lines = [
        "## What a checkpoint costs",
        "",
        "Slowdowns against training without checkpoints.",
        "",
    ]
    return lines + slowdown_table(results, "cpu", CPU), results.document()


def curves(options: argparse.Namespace) -> list[Check]:
    with Daemon("--slots", "5", "--keep", "2", "--dram", "256MiB") as daemon:
        daemon.start()
        try:
            made = [check(kind, options, daemon) for kind in options.kinds]
        except RuntimeError as error:
            raise BenchError(f"a training script failed: {error}") from None
        daemon.stop()
    return made


def report(made: list[Check], facts: dict[str, object]) -> list[str]:
    lines = common.heading("Killed and resumed, bit for bit", facts)
    load = os.getloadavg()[1]
    if load > LOADED * (os.cpu_count() or 1):
        lines += [
            f"Other programs ran on this machine (load average {load:.1f}): the losses are "
            "valid, the times are not.", "",
        ]  # fmt: skip
    lines += [
        "Every loss of three runs (with checkpoints, killed, and resumed after the kill) is "
        "compared with that of the same step in a run without checkpoints.", "",
        "| training | steps | killed after step | resumed at step | losses compared | different |",
        "|---|---|---|---|---|---|",
        *(one.row() for one in made), "",
    ]  # fmt: skip
    return lines + pictures(made)


def main() -> int:
    parser = common.arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument("--seed", type=int, default=1, help="for the steps of the kills")
    parser.add_argument("--small", action="store_true", help="fp32, and all as small as it goes")
    parser.add_argument("--no-cost", action="store_true", help="only the loss curves")
    parser.add_argument("--rounds", type=int, default=5, help="of the measurement")
    parser.add_argument("--width", type=int, default=384, help="of the model that is measured")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    if options.small:
        vars(options).update(SMALL)
    if not 1 <= options.every <= options.steps - 2:
        raise BenchError("--every must be at least 1, and at most --steps less 2")
    facts = common.facts_of(options.directory)
    warnings.simplefilter("ignore", FutureWarning)
    made = curves(options)
    problems = [text for one in made for text in one.problems()]
    lines = report(made, facts)
    document: dict[str, object] = {"facts": facts}
    document["curves"] = {one.kind: one.document() for one in made}
    if not problems and not options.no_cost:
        more, document["cost"] = cost(options)
        lines += more
    common.write_results("resume_check", document, "\n".join(lines))
    for text in problems:
        print(f"DIFFERENT {text}")
    print("FAILED" if problems else "OK: all losses are the same, bit for bit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
