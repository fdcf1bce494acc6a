"""Does a resumed run on the GPU continue bit for bit?

    python -m bench.gpu.resume [--steps 8] [--dtypes bf16,fp32] [--device cpu --tiny]
                               [--directory DIR] [--json FILE]

For each dtype and each way to take the bytes: train `steps` steps without checkpoints (reference);
train the same with a checkpoint half way, whose copy overlaps the steps behind it (saved); make a
model with other numbers in it, restore that checkpoint and train on (resumed). All losses, and
every parameter and moment at the end, must equal the reference's bit for bit. Ends with 1 when they
do not.

Kernels are the deterministic ones. To prove that, two runs without checkpoints are compared first.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import torch

from bench import common
from bench.common import BenchError
from bench.gpu import contender
from bench.gpu.contender import LIMIT_S, Node, Report, recorded
from bench.gpu.model import Training


@dataclass(frozen=True, slots=True)
class Run:
    """Losses by step, and the state at the end; all on the CPU."""

    losses: dict[int, torch.Tensor]
    tensors: dict[str, torch.Tensor]

    def differences(self, other: Run) -> list[str]:
        """Where `other`, which may have begun later, is not the same bit for bit."""
        found = [
            f"loss of step {step}"
            for step, loss in other.losses.items()
            if not same(loss, self.losses[step])
        ]
        if other.tensors.keys() != self.tensors.keys():
            return [*found, "names of tensors"]
        return found + [
            name for name, tensor in other.tensors.items() if not same(tensor, self.tensors[name])
        ]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def train(training: Training, first: int, last: int) -> dict[int, torch.Tensor]:
    return {step: training.step(step).cpu() for step in range(first, last)}


def finished(training: Training, losses: dict[int, torch.Tensor]) -> Run:
    return Run(losses, {name: t.detach().cpu() for name, t in training.tensors().items()})


def saved(training: Training, node: Node, mode: dict[str, object], steps: int) -> Run:
    """Saves after half of the steps, and does not wait for the checkpoint."""
    node.connect(mode)
    losses = train(training, 0, steps // 2)
    checkpoint = node.client.checkpoint(step=steps // 2)
    losses |= train(training, steps // 2, steps)
    checkpoint.wait_durable(LIMIT_S)
    return finished(training, losses)


def resumed(training: Training, node: Node, steps: int) -> Run:
    """A restarted trainer, before the moments exist."""
    node.state = training.state
    node.reconnect()
    found = node.client.restore()
    if found.step != steps // 2:
        raise BenchError(f"step {found.step} was restored, not {steps // 2}")
    return finished(training, train(training, steps // 2, steps))


def compare(
    options: argparse.Namespace,
    dtype: str,
    directory: Path,
    rows: list[dict[str, object]],
    failures: list[str],
) -> None:
    """One row for the control, then one for each mode and for the saved and the resumed run."""
    steps: int = options.steps

    def judge(mode: str, what: str, run: Run) -> None:
        different = reference.differences(run)
        rows.append({"dtype": dtype, "mode": mode, "run": what, "chosen": chosen,
                     "different": len(different), "first": different[:3]})  # fmt: skip
        print(f"  {dtype} {mode:8} {what:8} {len(different)} differences", flush=True)

    def fresh(seed: int = 1) -> Training:
        return contender.training_of(options, dtype, seed)

    chosen = ""
    training = fresh()
    reference = finished(training, train(training, 0, steps))
    del training
    training = fresh()
    judge("none", "control", finished(training, train(training, 0, steps)))
    with contender.node_of(training, directory) as node:
        for name in contender.modes(training.device):
            mode = contender.OURS[name] if training.device.type == "cuda" else {}
            with recorded(failures, f"{dtype} {name}"):
                training = fresh()
                node.state = training.state
                run = saved(training, node, mode, steps)
                chosen = node.chosen()
                judge(name, "saved", run)
                training = fresh(seed=2)
                judge(name, "resumed", resumed(training, node, steps))
            chosen = ""


def table(rows: list[dict[str, object]], failures: list[str]) -> list[str]:
    lines = [
        "| dtype | mode | run | chosen | tensors and losses that differ |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['dtype']} | {row['mode']} | {row['run']} | {row['chosen']} "
            f"| {row['different']} |"
        )
    return [*lines, "", *(f"- failed: {text}" for text in failures)]


def main() -> int:
    parser = contender.parser(__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtypes", default="bf16,fp32")
    options = contender.begin(parser)
    torch.use_deterministic_algorithms(True)
    report = Report("resume", options)
    rows: list[dict[str, object]] = []
    failures: list[str] = []
    with common.scratch(options.directory) as scratch:
        for dtype in options.dtypes.split(","):
            directory = scratch / dtype
            directory.mkdir()
            with recorded(failures, dtype):
                if report.has_time():
                    compare(options, dtype, directory, rows, failures)
                else:
                    failures.append(f"{dtype}: no time")
            report.keep(rows=rows, failures=failures)
    report.finish(table(rows, failures))
    return 1 if failures or any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
