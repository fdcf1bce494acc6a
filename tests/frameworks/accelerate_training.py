"""A training loop with Accelerate, which prints every loss bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pccheck import PCcheckClient
from pccheck.integrations.accelerate import attach, skip_first_batches

ITEMS, WIDTH, EPOCHS, ACCUMULATION = 26, 8, 3, 2


class Count:
    """A custom object, registered for checkpoints."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """Has a length and no state."""

    def __init__(self, items: TensorDataset) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for index in range(len(self.items)):
            (item,) = self.items[index]
            yield (item,)


def run(
    socket: str = "", kill_at: int = 0, every: int = 2, stateful: bool = False,
    seedable: bool = False, workers: int = 0, between: bool = False,
    stream: bool = False, dispatch: bool | None = None, split: bool = False,
    durable_every: int = 1,
) -> None:  # fmt: skip
    """Without a socket it trains without PCcheck. `between`: it saves after each micro-batch, and
    ends after the first one of a step."""
    torch.manual_seed(5)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=stateful, use_seedable_sampler=seedable,
            dispatch_batches=dispatch, split_batches=split,
        ),
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.1), nn.LayerNorm(16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    items = TensorDataset(torch.linspace(-1, 1, ITEMS * WIDTH).reshape(ITEMS, WIDTH) ** 3)
    data = Stream(items) if stream else items
    loader = DataLoader(data, batch_size=2, shuffle=not stream, num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    count = Count()
    accelerator.register_for_checkpointing(count)
    torch.manual_seed(100 + accelerator.process_index)
    per_epoch = -(-len(loader) // ACCUMULATION)
    step = first = 0
    rest = loader
    client = None
    if socket:
        client = PCcheckClient(
            "accelerate", socket=socket, replicated=accelerator.num_processes > 1,
            durable_every=durable_every,
        )  # fmt: skip
        attach(client, accelerator)
        step = client.restore().step
        first, done = divmod(step, per_epoch)
        if not stateful:
            rest = skip_first_batches(loader, done * ACCUMULATION)
        print(f"FROM {step}", flush=True)
    for epoch in range(first, EPOCHS):
        for (batch,) in rest if epoch == first else loader:
            count.batches += 1
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            place = f"{epoch} {count.batches} {scheduler.get_last_lr()[0]} {batch.sum()}"
            print(f"LOSS {step + 1} {place} {loss.item().hex()}", flush=True)
            if accelerator.sync_gradients:
                step += 1
                if client is not None and step % every == 0:
                    last = client.checkpoint(step=step)
                if step == kill_at and not between:
                    (last.wait_durable if durable_every == 1 else last.wait_copied)(60)
                    os.kill(os.getpid(), signal.SIGKILL)
            elif client is not None and between:
                client.checkpoint(step=step)
                if step == kill_at:
                    client.flush(60)
                    os.kill(os.getpid(), signal.SIGKILL)
    if client is not None:
        client.close()
