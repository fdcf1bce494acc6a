"""How long `checkpoint()` holds the calling thread: attached state of 1,000 tensors.

    python -m bench.call_overhead [--calls 300] [--warm 20] [--directory DIR]

A real daemon; 250 small parameters with AdamW's three tensors each, so that the copy itself is
short. Each call is timed from outside. Between two calls the optimizer steps and the checkpoint
becomes durable. Every second call is cold: before it other memory replaces what is in the caches,
as a forward and a backward pass on the CPU do.

After each call one look at every tensor is timed, with the caches in the same state: its address
and its count of changes, in a Python loop. A call that notices every replaced and every changed
tensor could do no less without native code. The look also shows how fast the machine is just then.

Prints milliseconds, and the ratio to the look: for model and optimizer alone, with scheduler and
generators, and for a model that FSDP2 has sharded (on a mesh of one rank).
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench import common
from bench.common import Spread
from bench.ours import Daemon
from pccheck import PCcheckClient

OTHER_BYTES = 64 << 20  # more than caches hold
CASES = {
    "plain": "model, optimizer",
    "everything": "model, optimizer, scheduler, rng",
    "sharded": "model, optimizer as DTensors",
}


def model_of(layers: int, *, sharded: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    update(model, optimizer)
    return model, optimizer


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def between(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, other: torch.Tensor | None
) -> None:
    """Two calls: a step, and then `other` memory in the caches."""
    update(model, optimizer)
    if other is not None:
        other.add_(1)


def measure(daemon: Daemon, case: str, calls: int, warm: int) -> dict[str, Any]:
    model, optimizer = model_of(125, sharded=case == "sharded")
    more: dict[str, Any] = {}
    if case == "everything":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        more = {"scheduler": scheduler, "rng": True}
    took: dict[bool, list[float]] = {True: [], False: []}  # by whether the caches are cold
    looked: dict[bool, list[float]] = {True: [], False: []}
    attached = common.tensors_of(model, optimizer).values()
    watched = [getattr(tensor, "_local_tensor", tensor) for tensor in attached]
    other = torch.ones(OTHER_BYTES // 4)
    with PCcheckClient(job=f"call-{case}", socket=daemon.socket) as client:
        client.attach(model=model, optimizer=optimizer, **more)
        for step in range(2 * calls + warm):
            cold = step % 2 == 0
            begin = time.perf_counter_ns()
            last = client.checkpoint(step=step)
            took[cold].append((time.perf_counter_ns() - begin) / 1e6)
            last.wait_durable(60)  # the call alone is the question, not back-pressure
            between(model, optimizer, other if cold else None)
            begin = time.perf_counter_ns()
            _ = [(tensor.data_ptr(), tensor._version) for tensor in watched]
            looked[cold].append((time.perf_counter_ns() - begin) / 1e6)
            between(model, optimizer, None if cold else other)
    found: dict[str, Any] = {"attached": CASES[case], "tensors": len(watched)}
    for name, cold in (("warm", False), ("cold", True)):
        counted = took[cold][warm // 2 :]  # the first ones make the volume and the plan
        found[name] = {
            "call_ms": Spread.of(counted), "p95_ms": statistics.quantiles(counted, n=20)[-1],
            "look_ms": Spread.of(looked[cold][warm // 2 :]),
        }  # fmt: skip
    return found


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--warm", type=int, default=20, help="first calls, which do not count")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = common.facts_of(options.directory)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    with (
        common.scratch(options.directory) as storage,
        Daemon("--chunk", "1MiB", "--dram", "64MiB", storage=storage).start() as daemon,
    ):
        found = [measure(daemon, case, options.calls, options.warm) for case in CASES]
    dist.destroy_process_group()
    lines = common.heading("How long checkpoint() holds the calling thread", facts)
    lines += [
        f"{options.calls} calls each; ms, median [min-max].", "",
        "| attached | tensors | caches | checkpoint() | one look at each | ratio |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for one, caches in itertools.product(found, ("warm", "cold")):
        call, look = one[caches]["call_ms"], one[caches]["look_ms"]
        cells = (one["attached"], one["tensors"], caches, call.text(4), look.text(4))
        lines += [f"| {' | '.join(map(str, cells))} | {call.median / look.median:.1f} |"]
    common.write_results("call_overhead", facts | {"runs": found}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
