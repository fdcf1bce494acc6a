"""Two training loops: one whose steps take a given time without a CPU, one that computes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.common import BenchError, tensors_of, total_bytes
from bench.rivals import State

Gate = Callable[[], object]
SYMBOLS, WINDOW, BATCH = 256, 128, 4
TENSORS = 16


class Trainer(ABC):
    """`step()` trains once; `gate` is called just before the state changes."""

    state: State

    def __init__(self) -> None:
        self.steps_done = 0

    @property
    def payload_bytes(self) -> int:
        return total_bytes(tensors_of(self.state.model, self.state.optimizer).values())

    @abstractmethod
    def step(self, gate: Gate) -> None: ...

    def saved_step(self) -> int:
        """The step whose state this is, from its bytes; raises BenchError if they are of several
        steps. 0 if the bytes do not tell."""
        return 0


class _Overwrite(torch.optim.Optimizer):
    """Sets every element to the number of the step, so that a torn checkpoint is noticed."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.number = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(self.number)


class Paced(Trainer):
    """An accelerator: a step takes `step_s` whatever the CPUs do. At its end the state, which has
    `payload_bytes`, is really overwritten.

    An accelerator has its next work in a queue. So a gate that holds the update delays it, and a
    call between two steps does, but not a thread that wakes up late because no CPU is free.
    """

    def __init__(self, payload_bytes: int, step_s: float) -> None:
        super().__init__()
        numbers = max(1, payload_bytes // 4 // TENSORS)
        model = nn.ParameterList(nn.Parameter(torch.zeros(numbers)) for _ in range(TENSORS))
        self.optimizer = _Overwrite(model.parameters())
        self.state = State(model, self.optimizer)
        self.step_s = step_s
        self.update_s = min(self._timed_update() for _ in range(5))
        self._due = self._ended = time.monotonic()

    def _timed_update(self) -> float:
        start = time.monotonic()
        self.optimizer.step()
        return time.monotonic() - start

    def step(self, gate: Gate) -> None:
        self._due += time.monotonic() - self._ended + self.step_s
        time.sleep(max(0.0, self._due - self.update_s - time.monotonic()))
        ready = time.monotonic()
        gate()
        self._due += time.monotonic() - ready
        self.steps_done += 1
        self.optimizer.number = self.steps_done
        self.optimizer.step()
        self._ended = time.monotonic()

    def saved_step(self) -> int:
        ends = [torch.aminmax(p.detach()) for p in self.state.model.parameters()]
        found = {float(end) for both in ends for end in both}
        if len(found) != 1:
            raise BenchError(f"the state that was loaded is torn: of the steps {sorted(found)}")
        return int(found.pop())


class Gpt(Trainer):
    """A transformer on random text; the arithmetic is real."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        model = _Model(width, layers)
        self.state = State(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        self.step(lambda: None)  # Adam's moments exist from the first step on

    def step(self, gate: Gate) -> None:
        loss = self.state.model(torch.randint(SYMBOLS, (BATCH, WINDOW)))
        self.state.optimizer.zero_grad()
        loss.backward()
        gate()
        self.state.optimizer.step()
        self.steps_done += 1


class _Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
