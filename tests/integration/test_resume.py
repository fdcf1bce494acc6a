"""A training that is stopped and resumed equals an undisturbed training bit for bit."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from pccheck import PCcheckClient
from tests.support.daemon import Daemon


class Net(nn.Module):
    """Tied weights, dropout, batch statistics, a frozen parameter, buffers of every kind."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(8, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("mask", torch.rand(1, 16).expand(8, 16))
        self.register_buffer("window", torch.rand(10).as_strided((4, 4), (1, 2)))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x * self.frozen)).relu()) * self.mask
        return (hidden - self.last(x)).pow(2).mean() * self.window.sum()


class Counting(optim.SGD):
    """An optimizer that keeps an entry of no parameter in `state`, from its first step on."""

    def step(self, closure: Any = None) -> Any:
        entry: dict[str, Any] = self.state["all"]  # type: ignore[index]
        entry["steps"] = entry.get("steps", 0) + 1
        entry["noise"] = torch.rand(2)
        for group in self.param_groups:
            group["lr"] = 0.01 / entry["steps"]
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.01, history_size=4, max_iter=3),
    "rmsprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.1),
    "own-state": Counting,
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


class Run:
    """A training from a seed, as one process runs it."""

    def __init__(self, seed: int, optimizer: str, scheduler: str, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Net(dtype)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def attach(self, client: PCcheckClient) -> None:
        client.attach(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            scaler=self.scaler, rng=True,
        )  # fmt: skip

    def step(self) -> float:
        x = torch.randn(8, 8) * random.random() * np.random.rand()
        x = x.to(self.model.frozen.dtype)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(x)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if isinstance(self.optimizer, optim.LBFGS):
            loss = float(self.optimizer.step(closure))
        else:
            self.optimizer.zero_grad()
            found = self.model(x)
            self.scaler.scale(found).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            loss = float(found.detach())
        self.scheduler.step(*([loss] if "plateau" in repr(type(self.scheduler)).lower() else []))
        return loss


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "dtype"),
    [
        *((name, "restarts", torch.float32) for name in OPTIMIZERS),
        *(("foreach", name, torch.float32) for name in SCHEDULERS),
        ("fused", "restarts", torch.bfloat16),
    ],
)
def test_losses_are_those_of_an_uninterrupted_run(
    daemon: Daemon, optimizer: str, scheduler: str, dtype: torch.dtype
) -> None:
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        run = Run(1, optimizer, scheduler, dtype)
        run.attach(client)
        assert not client.restore()
        for step in range(1, 5):
            run.step()
            handle = client.checkpoint(step=step)
        expected = [run.step() for _ in range(4)]
        handle.wait_durable(60)
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        again = Run(2, optimizer, scheduler, dtype)
        again.attach(client)
        assert client.restore().step == 4
        assert [again.step() for _ in range(4)] == expected
    for name, tensor in run.model.state_dict().items():
        found = again.model.state_dict()[name]
        assert torch.equal(tensor, found) and tensor.stride() == found.stride(), name


@pytest.fixture
def another_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("another_default_device")
def test_the_default_device_does_not_matter(daemon: Daemon) -> None:
    """Scripts set it to their GPU; restored tensors are on their original device."""
    model = nn.Linear(3, 3, device="cpu")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        client.attach(model=model, rng=True)
        client.checkpoint(step=1, metadata="x").wait_durable(60)
        found = client.recover().state["model"]
        with torch.no_grad():
            model.weight.zero_()
        assert client.restore().step == 1
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(model.state_dict()[name], tensor)


def test_an_interrupted_restore_can_be_repeated(daemon: Daemon) -> None:
    """Ctrl-C at any moment of a restore: the next restore succeeds."""
    state = nn.ParameterList([torch.ones(8_000_000)])
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        client.attach(model=state)
        client.checkpoint(step=1).wait_durable(60)
        main = threading.main_thread().ident
        assert main is not None
        for tenths_of_ms in range(0, 200, 10):
            with torch.no_grad():
                state[0].zero_()
            timer = threading.Timer(tenths_of_ms / 1e4, signal.pthread_kill, (main, signal.SIGINT))
            with contextlib.suppress(KeyboardInterrupt):
                timer.start()
                assert client.restore().step == 1
                timer.join()
            assert client.restore().step == 1
            assert bool((state[0] == 1).all())
