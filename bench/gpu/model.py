"""What the GPU benches train, in plain torch on random data: transformers in the shapes of GPT-2
medium, OPT-1.3B and BERT-large, with the three projections of a layer in one tensor, and VGG16."""

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
    """A transformer, or VGG16 (`layers` 0, `window` the images' width)."""

    layers: int
    width: int
    heads: int
    symbols: int
    window: int
    batch: int
    dtype: str = "bf16"
    causal: bool = True


MODELS = {
    "gpt2-medium": Shape(24, 1024, 16, 50257, 1024, batch=16),
    "opt-1.3b": Shape(24, 2048, 32, 50272, 2048, batch=4),
    "bert-large": Shape(24, 1024, 16, 30522, 512, batch=16, dtype="fp32", causal=False),
    "vgg16": Shape(0, 0, 0, 1000, 224, batch=64, dtype="fp32"),
}
TINY = Shape(layers=2, width=128, heads=2, symbols=512, window=64, batch=2)
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads, self.causal = shape.width, shape.heads, shape.causal
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, window, width = x.shape
        parts = self.qkv(self.ln_1(x)).view(batch, window, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
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


class Vgg16(nn.Module):
    """Returns the loss of telling random images apart. Zeros in VGG16 are poolings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        channels = 3
        for width in VGG16:
            if width:
                parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            else:
                parts.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(7), nn.Flatten())
        head = (nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU())
        self.head = nn.Sequential(*head, nn.Linear(4096, shape.symbols))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.features(images)).float()
        return F.cross_entropy(logits, torch.arange(len(images), device=images.device))


class Training:
    """Model, AdamW (VGG16: SGD with momentum) and data on one device; the optimizer's state exists
    from the first step on."""

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, batch: int, seed: int = 1
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        kind = Gpt if shape.layers else Vgg16
        with torch.device(device):
            model = kind(shape).to(dtype)
        self.autocast = kind is Vgg16 and device.type == "cuda"  # its weights stay fp32
        made = torch.Generator(device="cpu").manual_seed(1)
        optimizer: torch.optim.Optimizer
        if shape.layers:
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=1e-4, weight_decay=0.1, fused=device.type == "cuda"
            )
            size: tuple[int, ...] = (BATCHES, batch, shape.window)
            self.data = torch.randint(shape.symbols, size, generator=made).to(device)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            size = (BATCHES, batch, 3, shape.window, shape.window)
            self.data = torch.randn(size, generator=made).to(device, dtype)
        self.state = State(model, optimizer)

    def step(self, number: int) -> torch.Tensor:
        """One step; its loss, not waited for."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss: torch.Tensor = self.state.model(self.data[number % BATCHES])
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
