"""The gate of a step: where it is passed, whatever calls the step, and how."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from pccheck.saving.hooks import StepHooks
from tests.support.payload import FakeDevices


class Gate:
    """Notes the value of the parameter at each passage."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer = optimizer([self.parameter], lr=0.25, **options)
        self.order: list[str] = []
        self.steps: list[torch.optim.Optimizer] = []
        self.hooks = StepHooks()
        self.hooks.put(self.passed, [self.optimizer], self.stepped)

    def passed(self) -> None:
        changed = bool((self.parameter != 1).any())
        self.order.append("late" if changed and "gate" not in self.order else "gate")

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        assert not self.hooks.stepping
        self.steps.append(optimizer)

    def closure(self) -> torch.Tensor:
        self.order.append("closure")
        assert self.hooks.stepping
        self.optimizer.zero_grad()
        loss = self.parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_a_closure_runs_before_the_gate_is_passed(cls: Any, named: bool) -> None:
    """Forward and backward are what a copy overlaps with."""
    gate = Gate(cls)
    assert not gate.hooks
    if named:
        gate.optimizer.step(closure=gate.closure)
    else:
        gate.optimizer.step(gate.closure)
    assert gate.order[:2] == ["closure", "gate"] and "late" not in gate.order
    assert gate.hooks and not gate.hooks.stepping
    assert bool((gate.parameter != 1).all())


class Own(torch.optim.SGD):
    """Changes parameters before it calls its closure: nothing is known of it."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        return closure() if closure else None


def test_other_optimizers_pass_the_gate_first() -> None:
    gate = Gate(Own)
    gate.optimizer.step(gate.closure)
    assert gate.order == ["gate", "closure"]


def test_a_closure_that_fails_changes_nothing_and_passes_nothing() -> None:
    gate = Gate(torch.optim.SGD)

    def fail() -> float:
        raise RuntimeError("no batch")

    with pytest.raises(RuntimeError, match="no batch"):
        gate.optimizer.step(fail)
    assert not gate.order and not gate.hooks.stepping
    assert not gate.hooks.halfway


@pytest.fixture
def halfway() -> Gate:
    """A step of its optimizer has failed behind the gate."""
    gate = Gate(Own)

    def fail() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gate.optimizer.step(fail)
    return gate


def test_a_step_that_fails_behind_the_gate_has_changed_something_until_one_ends(
    halfway: Gate,
) -> None:
    assert halfway.hooks.halfway and not halfway.hooks.stepping
    halfway.hooks.put(
        halfway.passed, [halfway.optimizer], halfway.stepped
    )  # attach() of one thing more
    assert halfway.hooks.halfway
    halfway.optimizer.step()
    assert not halfway.hooks.halfway


def test_the_next_client_of_an_optimizer_knows_of_its_failed_step(halfway: Gate) -> None:
    halfway.hooks.remove()
    later = StepHooks()
    later.put(halfway.passed, [halfway.optimizer], halfway.stepped)
    assert later.halfway
    later.restored()
    assert not later.halfway
    halfway.hooks.put(halfway.passed, [halfway.optimizer], halfway.stepped)
    assert not halfway.hooks.halfway


def test_a_whole_step_of_another_optimizer_does_not_end_a_failed_one(halfway: Gate) -> None:
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    halfway.hooks.put(halfway.passed, [halfway.optimizer, other], halfway.stepped)
    other.step()
    assert halfway.hooks.halfway
    halfway.optimizer.step()
    assert not halfway.hooks.halfway


def test_hooks_that_were_registered_later_belong_to_the_step() -> None:
    gate, seen = Gate(torch.optim.SGD), []

    def fail(*_: object) -> None:
        seen.append(gate.hooks.stepping)
        raise KeyboardInterrupt

    hook = gate.optimizer.register_step_post_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        gate.optimizer.step()
    assert seen == [True] and gate.hooks.halfway
    hook.remove()
    gate.optimizer.step()
    assert not gate.hooks.halfway


class Extended(torch.optim.SGD):
    """Changes parameters after the step of the class that it extends, which has hooks, too."""

    after: Callable[[], object]

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.after()


def test_a_step_ends_with_the_call_that_it_began_with() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])  # torch puts hooks into its step()
    gate, seen = Gate(Extended), []

    def fail() -> None:
        raise KeyboardInterrupt

    gate.optimizer.after = fail  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            gate.optimizer.step()
        assert gate.hooks.halfway and not gate.hooks.stepping
    gate.optimizer.after = lambda: seen.append(gate.hooks.stepping)  # type: ignore[attr-defined]
    gate.optimizer.step()
    assert seen == [True] and not gate.hooks.halfway and not gate.hooks.stepping
    assert gate.hooks.progress.steps == 1


@pytest.mark.parametrize("method", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_that_ctrl_c_left_out_are_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    gate = Gate(torch.optim.SGD)
    gate.optimizer.step()
    assert gate.hooks

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gate.optimizer, method, interrupt)
        gate.hooks.put(gate.passed, [gate.optimizer], gate.stepped)
    gate.optimizer.step()
    assert not gate.hooks and not gate.hooks.stepping and not gate.hooks.halfway
    gate.hooks.put(gate.passed, [gate.optimizer], gate.stepped)
    gate.optimizer.step()
    assert gate.hooks


@pytest.mark.parametrize("early", [True, False])
def test_compiled_steps_pass_the_gate_every_time(early: bool) -> None:
    gate = Gate(torch.optim.SGD)
    if not early:
        gate.hooks.remove()
    gate.parameter.grad = torch.ones(3)
    step = torch.compile(lambda: gate.optimizer.step(), backend="eager")
    for _ in range(2 if not early else 0):
        step()
    gate.hooks.put(gate.passed, [gate.optimizer], gate.stepped)
    with torch.no_grad():
        gate.parameter.fill_(1)
    for count in range(1, 4):
        step()
        assert len(gate.order) == count
    assert gate.order[0] == "gate"  # before the first change
    assert gate.hooks and not gate.hooks.stepping


def test_a_snapshot_comes_after_a_step_in_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of its GPUs, and only where the stream is another one."""
    fakes = FakeDevices().install(monkeypatch)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    for gpu, parameter in enumerate(parameters[:2]):
        fakes.put(parameter, gpu)
    optimizer = torch.optim.SGD(parameters, lr=0.25)
    hooks, gate = StepHooks(), Gate(torch.optim.SGD)
    hooks.put(gate.passed, [optimizer], gate.stepped)
    hooks.follow()
    fakes.streams[1] = 7  # with torch.cuda.stream(side): optimizer.step()
    optimizer.step()
    hooks.follow()
    assert fakes.followed == []
    fakes.streams[1], fakes.captures = 8, True
    optimizer.step()  # recorded, not made
    del fakes.streams[1]
    hooks.follow()
    assert fakes.followed == [(1, 7)]


def test_a_step_that_begins_while_the_one_before_is_looked_for_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads: one asks while the other ends a step and begins the next one."""
    hooks = StepHooks()
    hooks._steps[1] = 7, sys._getframe()

    def frames() -> dict[int, FrameType]:
        hooks._steps[1] = threading.get_ident(), sys._getframe(3)
        return {}  # the step that is looked for has ended

    with monkeypatch.context() as patch:
        patch.setattr(sys, "_current_frames", frames)
        assert not hooks.stepping
    assert hooks.stepping


def test_each_whole_step_is_told_once() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            super().step(closure)

    for kind in (torch.optim.SGD, Twice):
        made = Gate(kind)
        made.optimizer.step()
        made.optimizer.step(made.closure)
        assert made.steps == [made.optimizer] * 2
