"""What the GPU benches train: GPT-2 medium in plain torch, on random text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from bench import common
from bench.rivals import State

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BATCHES = 4  # different ones, made before the clock starts


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    width: int
    heads: int
    symbols: int
    window: int


MEDIUM = Shape(layers=24, width=1024, heads=16, symbols=50257, window=1024)
TINY = Shape(layers=2, width=128, heads=2, symbols=512, window=64)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, window, width = x.shape
        parts = self.qkv(self.ln_1(x)).view(batch, window, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, window, width))
        mixed: torch.Tensor = x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        return mixed


class Gpt(nn.Module):
    """Returns the loss of predicting the next token. The head is the embedding, as in GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.symbols, shape.width)
        self.places = nn.Embedding(shape.window, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln = nn.LayerNorm(shape.width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """Model, AdamW and text on one device; the moments exist from the first step on."""

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, batch: int, seed: int = 1
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        with torch.device(device):
            model = Gpt(shape).to(dtype)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, weight_decay=0.1, fused=device.type == "cuda"
        )
        self.state = State(model, optimizer)
        text = torch.Generator(device="cpu").manual_seed(1)
        self.text = torch.randint(
            shape.symbols, (BATCHES, batch, shape.window), generator=text
        ).to(device)  # fmt: skip

    def step(self, number: int) -> torch.Tensor:
        """One step; its loss, not waited for."""
        loss: torch.Tensor = self.state.model(self.text[number % BATCHES])
        self.state.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.state.optimizer.step()
        return loss.detach()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        return common.tensors_of(self.state.model, self.state.optimizer)

    def payload_bytes(self) -> int:
        return common.total_bytes(self.tensors().values())
