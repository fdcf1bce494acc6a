"""Training on a GPU that is killed and resumed equals an undisturbed training bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import fakegpu
from tests.support.fakegpu import StreamSGD, module_to
from tests.support.gpunode import Node
from tests.support.gputrainer import GpuTrainer, Part

STEPS = 24
AHEAD = 32


class Net(nn.Module):
    """Tied weights, batch statistics, a frozen tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(64, 256)
        self.wide = nn.Linear(256, 1200)
        self.norm = nn.BatchNorm1d(256)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.rand(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x * self.frozen)).relu() - self.last(x)
        return self.wide(hidden).float().pow(2).mean()


def begin(trainer: Any, dtype: str) -> None:
    torch.manual_seed(7)
    if fakegpu.is_real():
        torch.use_deterministic_algorithms(True, warn_only=True)
    gpu = trainer.gpu
    trainer.net = module_to(gpu, Net().to(getattr(torch, dtype)))
    trained = [p for p in trainer.net.parameters() if p.requires_grad]
    trainer.sgd = StreamSGD(gpu, trained, seed=7, lr=0.01)
    trainer.losses = {}
    trainer.client.attach(model=trainer.net, optimizer=trainer.sgd)
    gpu.synchronize()


def train_step(trainer: Any, step: int) -> None:
    """Everything happens on the stream: the CPU runs ahead."""
    net = trainer.net

    def forward_and_backward() -> None:
        noise = torch.Generator().manual_seed(1000 + step)
        x = torch.rand(32, 64, generator=noise).to(net.frozen.device, net.frozen.dtype)
        with torch.enable_grad():
            loss = net(x)
            for parameter in net.parameters():
                parameter.grad = None
            loss.backward()
        trainer.losses[step] = loss.detach().clone()

    trainer.gpu.launch(forward_and_backward)
    trainer.sgd.step()


def train(trainer: Any, first: int, last: int, every: int) -> None:
    for step in range(first, last + 1):
        train_step(trainer, step)
        if step % every == 0:
            trainer.handles.append(trainer.client.checkpoint(step=step))


def train_on(trainer: Any) -> None:
    """Trains until it is killed, soon after step 8 is durable.

    Torch counts changes when the stand-in's stream makes them, so checkpoint() may find each
    checkpoint changed, for thousands of steps, which `whole` repeats. From step AHEAD on the stream
    has ended a step before its checkpoint."""
    for step in range(1, 100_000):
        if step < AHEAD:
            train(trainer, step, step, 2)
        else:
            train_step(trainer, step)
            trainer.gpu.synchronize()
            if step % 2 == 0:
                trainer.handles.append(trainer.client.checkpoint(step=step))
        if any(h.step >= 8 and h.state.name == "DURABLE" for h in trainer.handles[-100:]):
            trainer.native.send(("durable", step))


def resume(trainer: Any) -> int:
    return int(trainer.client.restore().step)


def outcome(trainer: Any) -> tuple[dict[int, bytes], dict[str, bytes]]:
    """Losses and final state, as bytes."""
    trainer.gpu.synchronize()
    state = {f"net.{name}": tensor for name, tensor in trainer.net.state_dict().items()}
    for index, entry in enumerate(trainer.sgd.state.values()):
        state |= {f"sgd.{index}.{key}": value for key, value in entry.items()}
    return {k: raw(v) for k, v in trainer.losses.items()}, {k: raw(v) for k, v in state.items()}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def start(node: Node, dtype: str, **options: object) -> GpuTrainer:
    trainer = node.connect((Part(8),), attach=False, **options)
    trainer.evaluate(Call(begin, dtype))
    return trainer


class Call:
    """A function with arguments, for Trainer.evaluate."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __call__(self, trainer: Any) -> Any:
        return self.function(trainer, *self.arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("transfer", "snapshot"), [("pull", "overlap"), ("pull", "device"), ("push", "overlap")]
)
def test_resumed_training_is_the_same(node: Node, transfer: str, snapshot: str, dtype: str) -> None:
    whole = start(node, dtype, job="whole", transfer=transfer, snapshot=snapshot)
    killed = start(node, dtype, transfer=transfer, snapshot=snapshot)
    killed.post("evaluate", train_on)
    killed.wait_for_durable(8)
    killed.kill()

    resumed = start(node, dtype, transfer=transfer, snapshot=snapshot)
    step = resumed.evaluate(resume)
    assert step >= 8
    assert step % 2 == 0
    last = step + STEPS
    whole.evaluate(Call(train, 1, last, 2))
    resumed.evaluate(Call(train, step + 1, last, 2))
    losses, state = whole.evaluate(outcome)
    losses_after, state_after = resumed.evaluate(outcome)
    assert losses_after == {k: v for k, v in losses.items() if k > step}
    assert len(losses_after) == STEPS
    assert len(set(losses_after.values())) > STEPS // 2  # it did learn something
    assert state_after.keys() == state.keys()
    assert [name for name in state if state_after[name] != state[name]] == []


def keep_best(trainer: Any, gone: int) -> None:
    """Attaches a copy of the weights of the best step so far."""
    trainer.gpu.synchronize()
    weights = {name: trainer.gpu.like(one) for name, one in trainer.net.state_dict().items()}
    trainer.best = {"weights": weights, "step": gone}
    trainer.client.attach(best=trainer.best)


def save(trainer: Any, step: int) -> None:
    trainer.gpu.synchronize()
    trainer.client.checkpoint(step=step).wait_durable(60)


def best(trainer: Any) -> tuple[int, dict[str, bytes]]:
    trainer.gpu.synchronize()
    return trainer.best["step"], {k: raw(v) for k, v in trainer.best["weights"].items()}


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_best_weights_beside_the_model_stay_apart(node: Node, transfer: str) -> None:
    killed = start(node, "float32", transfer=transfer)
    killed.evaluate(Call(train, 1, 3, 10))
    killed.evaluate(Call(keep_best, 3))
    killed.evaluate(Call(train, 4, 8, 10))
    killed.evaluate(Call(save, 8))
    state, weights = killed.evaluate(outcome)[1], killed.evaluate(best)
    killed.kill()

    resumed = start(node, "float32", transfer=transfer)
    resumed.evaluate(Call(keep_best, 0))
    assert resumed.evaluate(resume) == 8
    assert resumed.evaluate(outcome)[1] == state
    assert resumed.evaluate(best) == weights
    assert weights[1]["wide.weight"] != state["net.wide.weight"]


def test_a_damaged_gradient_would_be_seen(node: Node) -> None:
    """Shows that the test above can fail: one changed bit of one batch changes all later losses."""
    one, other = start(node, "float32", job="one"), start(node, "float32", job="other")
    one.evaluate(Call(train, 1, 5, 2))
    other.evaluate(Call(train, 2, 6, 2))
    assert one.evaluate(outcome)[1] != other.evaluate(outcome)[1]
