"""What a run has, and what no checkpoint gives back to the next run: it is refused as soon as the
client can see it, or named once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import CheckpointState, PCcheckClient, PccheckWarning, UnsupportedStateError
from pccheck.unsaved import trainable
from tests.support.daemon import Daemon
from tests.support.programs import script

PACKED = """
import sys, torch
from torch import nn
from pccheck import PCcheckClient

class Packed(nn.Linear):  # as a quantized layer: its state dict has more than torch loads
    def __init__(self, size):
        super().__init__(size, size)
        self.weight.requires_grad_(False)
        self.scale = torch.ones(size)
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.scale

base = nn.Sequential(Packed(4), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(base[1].parameters())
with PCcheckClient(job="packed", socket=sys.argv[1]) as client:
    what = base if sys.argv[2] == "whole" else base[1]
    client.attach(model=what, optimizer=optimizer)
    done = client.restore()
    print("FROM", done.step)
    base(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print(client.checkpoint(step=done.step + 1).result(60).step)
"""


def test_a_base_that_cannot_load_its_state_is_refused(daemon: Daemon) -> None:
    """When it is attached, and not by restore() of the next run."""
    with script(PACKED, daemon.socket, "whole") as run:
        said = run.finish()
    assert run.returncode == 1 and "FROM" not in said
    error = said.splitlines()[-1]
    assert "UnsupportedStateError: model.0.weight.absmax: load_state_dict() refuses" in error
    assert "Packed" in error and "attach the adapters alone" in error
    for step in (0, 1):
        with script(PACKED, daemon.socket, "adapters") as run:
            said = run.finish()
        assert run.returncode == 0, said
        assert {f"FROM {step}", f"{step + 1}"} <= set(said.splitlines())


def test_a_model_that_is_packed_later_is_refused_when_saved(daemon: Daemon) -> None:
    class Late(nn.Linear):
        packed = False

        def _save_to_state_dict(self, destination: Any, *args: Any) -> None:
            super()._save_to_state_dict(destination, *args)
            if self.packed:
                destination["absmax"] = self.weight.abs().max()

    model = Late(2, 2)
    with PCcheckClient(job="late", socket=daemon.socket) as client:
        client.attach(model=model)
        model.packed = True
        with pytest.raises(UnsupportedStateError, match=r"^model\.absmax: load_state_dict\(\)"):
            client.checkpoint(step=1)


PROJECTED = """
import sys, torch
from torch import nn
from pccheck import PCcheckClient

class Projector:  # as in GaLore: it keeps its matrix
    def __init__(self, p): self.matrix = torch.ones(p.shape[0], 1)

class Projected(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("projector", Projector(p))

model = nn.Linear(4, 1)
optimizer = Projected(model.parameters(), lr=0.1)
with PCcheckClient(job="projected", socket=sys.argv[1]) as client:
    client.attach(model=model, optimizer=optimizer)
    client.restore()
    for step in range(1, 1001):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        print("STEP", step, flush=True)
        if step == 1000:
            client.checkpoint(step=step)
"""


def test_a_state_that_cannot_be_stored_ends_the_first_step(daemon: Daemon) -> None:
    """And not the first checkpoint, hours later."""
    with script(PROJECTED, daemon.socket) as run:
        said = run.finish()
    assert run.returncode == 1 and "STEP" not in said
    error = said.splitlines()[-1]
    assert "UnsupportedStateError: optimizer.state.0.projector: a value of type" in error
    assert "Projected" in error and 'save_strategy="steps"' in error


class Odd(torch.Tensor):
    """With data of its own."""


class Keeps(torch.optim.SGD):
    """Its entries have what `make` returns."""

    def __init__(self, parameters: Any, make: Callable[[], object], first: int = 1) -> None:
        super().__init__(parameters, lr=0.1)
        self.make, self.first, self.steps = make, first, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step(closure)
        if self.steps >= self.first:
            self.state[self.param_groups[0]["params"][0]]["kept"] = self.make()


def kit(*kept: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, Keeps(model.parameters(), *kept)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Odd, "subclass"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: {"deep": [object()]}, "object"),
        (lambda: lambda: 0, "function"),
    ],
)
def test_what_an_optimizer_keeps_is_looked_at_after_its_step(
    daemon: Daemon, make: Any, words: str
) -> None:
    model, optimizer = kit(make, 2)
    with PCcheckClient(job="keeps", socket=daemon.socket) as client:
        client.attach(model=model, adam=optimizer)
        optimizer.step()  # has made no state
        with pytest.raises(UnsupportedStateError, match=rf"^adam\.state\.0\.kept.*{words}"):
            optimizer.step()
        optimizer.step()  # once
        with pytest.raises(UnsupportedStateError):
            client.checkpoint(step=3)


def test_an_optimizer_that_is_attached_later_only_warns(daemon: Daemon) -> None:
    """Its checkpoints fail, too, and do not end a training that has saved."""
    model, optimizer = kit(lambda: torch.ones(2))
    _, later = kit(object)
    with PCcheckClient(job="later", socket=daemon.socket) as client:
        client.attach(model=model, optimizer=optimizer)
        optimizer.step()
        assert client.checkpoint(step=1).result(60).step == 1
        client.attach(optimizer=later)
        with pytest.warns(PccheckWarning, match=r"checkpoints will fail: optimizer\.state\.0"):
            later.step()
        with pytest.warns(PccheckWarning, match=r"optimizer\.state\.0\.kept"):
            assert client.checkpoint(step=2).state is CheckpointState.FAILED


def test_an_optimizer_beside_a_given_state_is_not_looked_at(daemon: Daemon) -> None:
    """It is attached for its gate, and something else is saved."""
    model, optimizer = kit(object)
    with PCcheckClient(job="given", socket=daemon.socket) as client:
        client.attach(optimizer=optimizer, rng=True)
        optimizer.step()
        made = client.checkpoint({"weights": model.state_dict()}, step=1)
        assert made.result(60).step == 1


def test_an_optimizer_with_a_state_dict_of_its_own_is_not_called(daemon: Daemon) -> None:
    class Gathers(Keeps):
        calls = 0

        def state_dict(self) -> Any:  # may wait for all ranks
            self.calls += 1
            return super().state_dict()

    model = nn.Linear(2, 1)
    optimizer = Gathers(model.parameters(), object)
    with PCcheckClient(job="gathers", socket=daemon.socket) as client:
        client.attach(model=model, optimizer=optimizer)
        optimizer.step()
        assert optimizer.calls == 0


UNFREEZES = """
import sys, torch
from torch import nn
from pccheck import PCcheckClient

back, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1)
model = nn.Sequential(back, head)
optimizer = torch.optim.AdamW([*head.parameters(), *back.parameters()])
with PCcheckClient(job="unfreezes", socket=sys.argv[1]) as client:
    client.attach(model=model, optimizer=optimizer)
    first = client.restore().step + 1
    if sys.argv[2] == "again" and first > 3:
        back.requires_grad_(True)
    for step in range(first, first + 4):
        if step == 3:
            back.requires_grad_(True)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        client.checkpoint(step=step)
    client.flush()
    if sys.argv[2] == "kill":
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("then", ["forgets", "again"])
def test_a_parameter_that_stays_frozen_is_named(daemon: Daemon, then: str) -> None:
    with script(UNFREEZES, daemon.socket, "kill") as run:
        first = run.finish()
    with script(UNFREEZES, daemon.socket, then) as run:
        said = run.finish()
    assert run.returncode == 0, said
    words = (
        "model.0.bias was trained in the run that saved step 4, and is frozen now (2 parameters "
        "differ): restore() does not set requires_grad"
    )
    assert said.count(words) == (then == "forgets"), said
    assert "requires_grad" not in first


Flags = dict[str, bool]


def frozen(flags: Flags) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags.get(name, True))
    return model


def told(daemon: Daemon, before: nn.Module, now: nn.Module, change: Any = None) -> list[str]:
    """What a run with `now` says that continues one with `before`."""
    with PCcheckClient(job="flags", socket=daemon.socket) as client:
        client.attach(model=before)
        client.checkpoint(step=1).wait_durable(60)
    with (
        warnings.catch_warnings(record=True) as caught,
        PCcheckClient(job="flags", socket=daemon.socket) as client,
    ):
        warnings.simplefilter("always")
        client.attach(model=now)
        client.restore()
        if change is not None:
            change(now)
        for step in (2, 3):
            client.checkpoint(step=step).wait_durable(60)
    return [text for one in caught if "requires_grad" in (text := str(one.message))]


NAMED = "0.weight"


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ({}, {}, ""),
        ({NAMED: False}, {NAMED: False}, ""),
        ({NAMED: False}, {}, "model.0.weight was frozen .* step 1, and is trained now"),
        ({}, {"1.bias": False}, r"model.1.bias was trained .* and is frozen now: restore"),
    ],
)
def test_only_a_flag_that_differs_is_named(
    daemon: Daemon, saved: Flags, now: Flags, words: str
) -> None:
    said = told(daemon, frozen(saved), frozen(now))
    assert len(said) == bool(words) and all(re.search(words, one) for one in said), said


def test_a_flag_that_the_script_sets_itself_is_not_named(daemon: Daemon) -> None:
    """After restore(), as in the run before; or later, as it goes on."""
    assert not told(daemon, frozen({}), frozen({NAMED: False}), nn.Module.requires_grad_)
    assert not told(daemon, frozen({}), frozen({}), lambda model: model.requires_grad_(False))


def test_a_flag_that_changes_between_checkpoints_is_saved(daemon: Daemon) -> None:
    """Although the plan of the tensors stays the same: the parameter is neither trained by an
    attached optimizer nor frozen."""
    model = frozen({})
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with PCcheckClient(job="flags", socket=daemon.socket) as client:
        client.attach(model=model, optimizer=optimizer)
        for step in (1, 2, 3):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            model[0].requires_grad_(step < 3)
            client.checkpoint(step=step).wait_durable(60)
        client.restore()
        assert client._recovery.trainable == {"model": [False, False, True, True, True, False]}


def test_a_checkpoint_without_the_flags_is_restored(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of earlier versions."""
    with monkeypatch.context() as patched:
        patched.setattr(trainable, "record", lambda _attached: ("other", 1))
        assert told(daemon, frozen({}), frozen({NAMED: False})) == []


HIDES = """
import sys, torch
from torch import nn
from pccheck import PCcheckClient

class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = [nn.Linear(4, 4) for _ in range(2)]  # no ModuleList
        self.queue = torch.zeros(4)  # no buffer
        self.table = torch.arange(4.0)
    def forward(self, x):
        for layer in (self.first, *self.rest):
            x = layer(x + self.table)
        if sys.argv[2] == "queue":
            self.queue[:] = x.detach().mean(0)
        return x

torch.manual_seed(0)
model, critic = Contrast(), nn.Linear(4, 1)
trained = {
    "queue": [model.first], "list": [model.first, *model.rest], "critic": [model.first, critic],
    "none": [model.first],
}[sys.argv[2]]
optimizer = torch.optim.AdamW(p for module in trained for p in module.parameters())
with PCcheckClient(job="hides", socket=sys.argv[1]) as client:
    client.attach(model=model, optimizer=optimizer)
    for step in range(1, 5):
        critic(model(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        client.checkpoint(step=step).wait_durable(60)
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("queue", "model.queue has changed since attach(), and is not saved"),
        ("list", "model.rest.0.weight (and 3 more tensors) has changed since attach(), and is not"),
        ("critic", "2 of the 4 parameters that the attached optimizer trains are not saved"),
        ("none", ""),
    ],
)
def test_a_tensor_outside_of_the_state_dict_is_named_once(
    daemon: Daemon, what: str, words: str
) -> None:
    with script(HIDES, daemon.socket, what) as run:
        said = run.finish()
    assert run.returncode == 0, said
    assert said.count("not saved") == bool(words) and words in said, said


BESIDE = """
import sys, torch
from torch import nn
from pccheck import PCcheckClient

model, discriminator = nn.Linear(4, 3), nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
other = torch.optim.AdamW(discriminator.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
things = {
    "weights": {"model": model},
    "no schedule": {"model": model, "optimizer": optimizer},
    "all": {"model": model, "optimizer": optimizer, "scheduler": schedule},
}[sys.argv[2]]
with PCcheckClient("beside", socket=sys.argv[1], gate=sys.argv[3]) as client:
    client.attach(**things)
    client.restore()
    client.checkpoint(step=0).wait_durable(60)
    for step in range(1, 4):
        client.gate()
        for net, one in ((discriminator, other), (model, optimizer)):
            net(torch.ones(2, 4)).sum().backward()
            one.step()
        schedule.step()
        client.checkpoint(step=step).wait_durable(60)
"""


@pytest.mark.parametrize("gate", ["auto", "manual"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("weights", "state of an optimizer (AdamW) that trains the attached model is not saved"),
        ("no schedule", "the learning rate scheduler of the attached optimizer is not saved"),
        ("all", ""),
    ],
)
def test_what_trains_beside_the_attached_is_named_once(
    daemon: Daemon, what: str, words: str, gate: str
) -> None:
    with script(BESIDE, daemon.socket, what, gate) as run:
        said = run.finish()
    assert run.returncode == 0, said
    assert said.count("not saved") == bool(words) and words in said, said
