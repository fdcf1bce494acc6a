"""A rank of a training on several nodes, in lockstep with the others, as torchrun starts it.

It prints `rank 1 begins at step 0 at 12.5 s` (of this machine's clock), `rank 1 step 7 loss 0.25`
for each step, with all digits, `rank 1 knows 7` for the newest step that it knows to be global, and
`rank 1 is done`. With --mib also `rank 1 holds 1f0c5a77 at step 7`, a digest of its state after the
restore and after each step."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pccheck import Checkpoint, CheckpointState, PCcheckClient

WIDTH = 64
GROWN = 1 << 19  # of 4 bytes
LIMIT_S = 240.0
STOPPED = 75  # the exit code after SIGUSR1
#: How a rank sees that another one hangs.
SILENCE = timedelta(seconds=60)
#: Of --apart.
GROUP_PORT = 29600


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0, help="seconds that a step takes longer")
    parser.add_argument("--grow", type=int, default=0, help="the state is larger from this step on")
    parser.add_argument("--mib", type=int, default=0, help="more state of each rank")
    parser.add_argument("--replicated", action="store_true", help="all ranks have the same state")
    parser.add_argument("--undisturbed", action="store_true", help="without a client")
    parser.add_argument("--late", action="store_true", help="the client comes after the group")
    parser.add_argument("--apart", action="store_true", help="the group has a store of its own")
    parser.add_argument("--die", help="RANK:STEP, once: SIGKILL after this step")
    parser.add_argument("--stop", action="store_true", help="at SIGUSR1, after a checkpoint")
    parser.add_argument("--folder", type=Path, help="for what a rank must remember of its end")
    return parser.parse_args()


class Training:
    """The same parameters on every rank, other data, and sums over all of them."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(100 + self.rank)  # part of a checkpoint

    def step(self) -> float:
        inputs = torch.randn(16, WIDTH)
        loss = (self.model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.ranks
        self.optimizer.step()
        return loss.item()

    def digest(self) -> int:
        found = 0
        for parameter in self.model.parameters():
            kept = self.optimizer.state.get(parameter, {})
            for tensor in (parameter.detach(), *(kept[key] for key in sorted(kept))):
                found = zlib.crc32(tensor.numpy().tobytes(), found)
        return found


class Growing:
    """Makes the state larger, and changes no loss. Every second step has the values of the step
    before, so that its checkpoint refers to that one."""

    def __init__(self, mib: int, rank: int) -> None:
        self._rank = rank
        self.more = torch.full((max(1, mib << 18),), self._value(0))

    def _value(self, step: int) -> float:
        return float(self._rank * 10_000 + step // 2)

    def make(self, step: int) -> None:
        if step % 2 == 0:
            self.more = torch.full_like(self.more, self._value(step))

    def check(self, step: int) -> None:
        assert (self.more == self._value(step)).all(), f"other values than those of step {step}"

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"more": self.more}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.more = state["more"]


class Known:
    """Prints what becomes global."""

    def __init__(self, rank: int) -> None:
        self._rank, self._step = rank, 0
        self._handles: list[Checkpoint] = []

    def add(self, handle: Checkpoint) -> None:
        self._handles.append(handle)
        self.look()

    def look(self) -> None:
        for handle in self._handles:
            if handle.state == CheckpointState.GLOBAL and (handle.step or 0) > self._step:
                self._step = handle.step or 0
                print(f"rank {self._rank} knows {self._step}", flush=True)
        self._handles = self._handles[-16:]

    def wait(self) -> None:
        if self._handles:
            self._handles[-1].wait_global(LIMIT_S)
            self.look()


def die_once(told: str, folder: Path, rank: int, step: int) -> None:
    if told == f"{rank}:{step}" and not (mark := folder / f"died-{rank}-{step}").exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def meet(apart: bool) -> None:
    """torchrun of torch 2.13 keeps its store when it starts ranks again: there gloo may find the
    addresses of dead ranks, and fails or hangs, unless the group is apart."""
    if not apart:
        dist.init_process_group("gloo", timeout=SILENCE)
        return
    host, rank, size = (os.environ[name] for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE"))
    store = dist.TCPStore(host, GROUP_PORT, int(size), is_master=rank == "0", timeout=SILENCE)
    dist.init_process_group(
        "gloo", store=store, rank=int(rank), world_size=int(size), timeout=SILENCE
    )


def train(chosen: argparse.Namespace, client: PCcheckClient | None) -> bool:
    """Whether it made all steps."""
    training = Training()
    rank, begin, known = training.rank, 0, Known(training.rank)
    growing = Growing(chosen.mib, 0 if chosen.replicated else rank)
    if client is not None:
        client.attach(model=training.model, optimizer=training.optimizer, rng=True, growing=growing)
        begin = client.restore().step or 0
        if chosen.mib:
            growing.check(begin)
    print(f"rank {rank} begins at step {begin} at {time.monotonic()} s", flush=True)
    if chosen.mib:
        print(f"rank {rank} holds {training.digest():08x} at step {begin}", flush=True)
    step = begin
    for step in range(begin + 1, chosen.steps + 1):
        print(f"rank {rank} step {step} loss {training.step()!r}", flush=True)
        if chosen.mib:
            growing.make(step)
            print(f"rank {rank} holds {training.digest():08x} at step {step}", flush=True)
        if step == chosen.grow:
            growing.more = torch.zeros(GROWN)
        if client is not None and step % chosen.every == 0:
            known.add(client.checkpoint(step=step))
        if chosen.stop and client is not None and client.should_stop():
            break
        time.sleep(chosen.pace)
        die_once(chosen.die, chosen.folder, rank, step)
    known.wait()
    if client is not None:
        client.close()
    return step == chosen.steps


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    client = None
    if not (chosen.undisturbed or chosen.late):
        client = PCcheckClient(replicated=chosen.replicated)
    meet(chosen.apart)
    if chosen.late and not chosen.undisturbed:
        client = PCcheckClient(replicated=chosen.replicated)
    if chosen.stop and client is not None:
        client.stop_on(signal.SIGUSR1)
    is_done = train(chosen, client)
    if is_done:
        print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if is_done else STOPPED)


if __name__ == "__main__":
    main()
