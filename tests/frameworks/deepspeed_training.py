"""A training loop with DeepSpeed, which prints every loss bit for bit."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # here, not in every child
import torch
import torch._dynamo
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from pccheck.integrations.deepspeed import PCcheckEngine, install
from tests.support.waiting import suspend

ITEMS, WIDTH, EPOCHS = 36, 8, 3
# Otherwise DeepSpeed compiles its shared memory transport, which takes more than a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def make_engine(stage: int, half: bool, hidden: int) -> Any:
    torch.manual_seed(5)
    norm = (
        nn.LayerNorm(hidden) if half else nn.BatchNorm1d(hidden)
    )  # BatchNorm mixes dtypes on CPUs
    model = nn.Sequential(nn.Linear(WIDTH, hidden), nn.Dropout(0.1), norm, nn.Linear(hidden, 4))
    model[0].bias.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": half},
    }  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return engine


class Order:
    """Stops the daemon from the second save to the next gate, so that nothing is copied between;
    prints when the gate is passed and when parameters are updated."""

    def __init__(self, engine: Any, saved: PCcheckEngine, daemon: int) -> None:
        self._saved, self._daemon = saved, daemon
        self._gate, self._save = saved.client.gate, engine.save_checkpoint
        engine.save_checkpoint, saved.client.gate = self.save, self.gate  # type: ignore[method-assign]
        engine.optimizer.optimizer.register_step_pre_hook(lambda *_: print("UPDATE", flush=True))

    def save(self, *arguments: Any, **options: Any) -> None:
        if self._saved.checkpoint is not None:
            self._saved.checkpoint.wait_durable(60)
            suspend(self._daemon)
        self._save(*arguments, **options)

    def gate(self) -> None:
        os.kill(self._daemon, signal.SIGCONT)
        self._gate()
        print("GATE", flush=True)


def run(
    folder: str, socket: str = "", stage: int = 1, half: bool = False, hidden: int = 16,
    kill_at: int = 0, every: int = 2, stop_at: int = 10_000, unnamed: bool = False,
    daemon: int = 0, load: dict[str, Any] | None = None, own: bool = False, closed: bool = False,
    between: str = "", durable_every: int = 1,
) -> None:  # fmt: skip
    """Without a socket it saves DeepSpeed's own files. `load` has options of load_checkpoint(),
    `own` calls checkpoint() without the engine, and `closed` closes the client. `between`: it also
    saves after the first micro-batch of a step, and ends there; "chosen" sets the boundary."""
    alone = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update({key: value for key, value in alone.items() if key not in os.environ})
    deepspeed.init_distributed("gloo", verbose=False)
    engine = make_engine(stage, half, hidden)
    rank, ranks = engine.global_rank, engine.world_size
    items = torch.linspace(-1, 1, ITEMS * WIDTH).reshape(ITEMS, WIDTH) ** 3
    sampler = torch.utils.data.DistributedSampler(range(ITEMS), ranks, rank, seed=3)
    loader = StatefulDataLoader(items, batch_size=2, sampler=sampler)
    torch.manual_seed(100 + rank)
    saved = None
    if socket:
        classes = [] if unnamed else [argparse.Namespace]
        saved = install(
            engine, loader=loader, classes=classes, job="deepspeed", socket=socket,
            durable_every=durable_every,
        )  # fmt: skip
        if daemon:
            Order(engine, saved, daemon)
        if own:
            saved.client.checkpoint(step=1)
        if closed:
            saved.client.close()
    path, client_state = (None, {}) if closed else engine.load_checkpoint(folder, **(load or {}))
    print(f"FROM {engine.global_steps} {path and path[len(folder) :]}", flush=True)
    if path:
        print(f"LOADED {sorted(client_state)} {weights(engine)}", flush=True)
    given = argparse.Namespace(mean=torch.zeros(1), epoch=0, batches=0)
    if path and not load:
        given = client_state["given"]
    for epoch in range(given.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        given.epoch = epoch
        for batch in loader:
            given.batches += 1
            batch = batch.bfloat16() if half else batch
            if between == "chosen":
                engine.set_gradient_accumulation_boundary(given.batches % 2 == 0)
            loss = engine(batch).float().square().mean()
            engine.backward(loss)
            given.mean.mul_(0.9).add_(given.batches)  # not held back by engine.step()
            engine.step()
            step = engine.global_steps
            place = f"{given.batches} {engine.get_lr()[0]} {batch.sum()} {given.mean.item()}"
            # DeepSpeed saves the buffers of rank 0 only.
            place += f" {buffers(engine)}" if rank == 0 else ""
            print(f"LOSS {step} {place} {loss.item().hex()}", flush=True)
            if given.batches % 2 and not between:
                continue
            if step % every == 0:
                engine.save_checkpoint(folder, client_state={"given": given})
                print(f"SAVE {step} {weights(engine)}", flush=True)
            if step == kill_at and bool(given.batches % 2) == bool(between):
                if saved is not None and saved.checkpoint is not None:
                    last = saved.checkpoint
                    (last.wait_global if durable_every == 1 else last.wait_copied)(60)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == stop_at:
                engine.save_16bit_model(folder, "weights.pt")
                engine.destroy()
                return
    engine.destroy()


def buffers(engine: Any) -> float:
    return float(sum(buffer.double().sum() for buffer in engine.module.buffers()))


def weights(engine: Any) -> str:
    return float(sum(p.detach().double().sum() for p in engine.module.parameters())).hex()
