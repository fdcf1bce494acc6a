"""A small GPT on Python's own language reference, with a checkpoint every few steps.

Kill it whenever you like and start it again: it continues from the newest checkpoint, and its
losses are those of a run that was never stopped, bit for bit (`make demo` compares them).

    export PCCHECK_SOCKET=$HOME/.pccheck/attach.sock
    pccheckd --storage ~/checkpoints &
    python examples/char_gpt.py
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from pccheck import PCcheckClient

WINDOW, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 128, 4, 2


class Loader:
    """Windows of the text in a new random order every epoch; continues in mid-epoch."""

    def __init__(self, text: str, seed: int) -> None:
        self.symbols = sorted(set(text))
        number = {symbol: index for index, symbol in enumerate(self.symbols)}
        self.tokens = torch.tensor([number[symbol] for symbol in text])
        self.seed, self.epoch, self.position = seed, 0, 0
        self.order = self._shuffled()

    def _shuffled(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm((len(self.tokens) - 1) // WINDOW, generator=generator) * WINDOW

    def next_batch(self) -> tuple[Tensor, Tensor]:
        if self.position + BATCH > len(self.order):
            self.epoch, self.position = self.epoch + 1, 0
            self.order = self._shuffled()
        starts = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        rows = torch.stack([self.tokens[start : start + WINDOW + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.order = self._shuffled()


class CharGPT(nn.Module):
    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(WINDOW, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 512, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, symbols)
        self.mask = nn.Transformer.generate_square_subsequent_mask(WINDOW)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(inputs) + self.place, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=5, help="steps; 0 = no checkpoints at all")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--dtype", default="float32", help="of the model: float32, bfloat16")
options = parser.parse_args()
torch.manual_seed(options.seed)
torch.use_deterministic_algorithms(True)
torch.set_default_dtype(getattr(torch, options.dtype))
loader = Loader("\n".join(topics[name] for name in sorted(topics)), options.seed)
model = CharGPT(len(loader.symbols))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)

first = 1
if options.every:
    client = PCcheckClient()
    client.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, rng=True)
    if done := client.restore():  # falsy the first time: there is nothing to restore
        first = done.step + 1
        print(f"resumed at step {done.step}, from {done.source}", flush=True)
for step in range(first, options.steps + 1):
    loss = model(*loader.next_batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # waits, if necessary, until the last checkpoint was copied
    scheduler.step()
    print(f"step {step} loss {loss.item()}", flush=True)
    if options.every and step % options.every == 0:
        client.checkpoint(step=step)  # returns at once
if options.every:
    client.close()  # waits until the last checkpoint is durable
