"""LoRA by hand with PCcheck: the frozen base is not saved, only the adapters and their optimizer.

    python examples/lora.py

Kill it and run it again: it continues at the next step. A checkpoint, with AdamW's moments, has
under three percent of the base's size. Here the base is made from a seed, in place of a pretrained
model from a file.
"""

import argparse

import torch
from torch import Tensor, nn

from pccheck import PCcheckClient

WIDTH, LAYERS, RANK, BATCH = 1024, 4, 4, 64


class LowRank(nn.Module):
    """Adds up(down(x)) to the output of a frozen layer; nothing at first, since `up` is zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        layer.register_forward_hook(self.added)

    def added(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        added: Tensor = output + self.up(self.down(inputs[0]))
        return added


def make_base() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 16)).requires_grad_(False)


def train(options: argparse.Namespace) -> None:
    base, wanted = make_base(), make_base()
    linear = [layer for layer in base.modules() if isinstance(layer, nn.Linear)]
    for layer in (module for module in wanted.modules() if isinstance(module, nn.Linear)):
        layer.weight += torch.randn(layer.out_features, 1) @ torch.randn(1, WIDTH) / WIDTH**0.5 / 4
    torch.manual_seed(options.seed)
    adapters = nn.ModuleList(LowRank(layer) for layer in linear)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=2e-3)

    with PCcheckClient(autostart=True, storage="checkpoints") as client:
        client.attach(adapters=adapters, optimizer=optimizer, rng=True)  # and not the base
        done = client.restore()
        if done:
            print(f"resumed at step {done.step}", flush=True)
        for step in range(done.step + 1 if done else 1, options.steps + 1):
            inputs = torch.randn(BATCH, WIDTH)
            loss = (base(inputs) - wanted(inputs)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item()}", flush=True)
            if step % options.every == 0:
                client.checkpoint(step=step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())
