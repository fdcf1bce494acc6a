"""What runs before and after each step of the attached optimizers."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from . import devices


class StepHooks:
    """Calls a method, whose object may go away, before any of the optimizers steps.

    `trusted` ends when a step was recorded in a CUDA graph: replays of it run no hooks. One that
    trains on a GPU may be in a graph already, and must first be seen to step.
    """

    def __init__(self) -> None:
        self.trusted = True
        self._handles: list[Any] = []
        self._unseen: set[int] = set()
        #: By optimizer: the thread and the call in which it steps, or did before it failed.
        self._steps: dict[int, tuple[int, FrameType]] = {}

    @property
    def stepping(self) -> bool:
        """Whether a step of an attached optimizer goes on: in another thread, or in this one, which
        then runs a signal handler or a closure. What is attached is of two steps meanwhile."""
        for number, (thread, call) in list(self._steps.items()):
            frame = sys._current_frames().get(thread)
            while frame is not None and frame is not call:
                frame = frame.f_back
            if frame is not None:
                return True
            self._steps.pop(number, None)  # it has failed
        return False

    def __bool__(self) -> bool:
        """Whether every update is seen."""
        return self.trusted and bool(self._handles) and not self._unseen

    def put(self, method: Callable[[], None], things: Iterable[object]) -> None:
        """On the optimizers among `things`, in the place of those before."""
        self.remove()
        found, unseen, steps = weakref.WeakMethod(method), self._unseen, self._steps

        def before_step(optimizer: object, _args: object, _kwargs: object) -> None:
            unseen.discard(id(optimizer))
            held = found()
            if held is not None:
                # Before the gate is passed: whoever comes after that finds it out.
                steps[id(optimizer)] = threading.get_ident(), sys._getframe(1)
                held()

        def after_step(optimizer: object, _args: object, _kwargs: object) -> None:
            steps.pop(id(optimizer), None)

        for thing in things:
            if isinstance(thing, torch.optim.Optimizer):
                self._handles.append(thing.register_step_pre_hook(before_step))
                self._handles.append(thing.register_step_post_hook(after_step))
                if _may_be_recorded(thing):
                    unseen.add(id(thing))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unseen.clear()
        self._steps.clear()


def _may_be_recorded(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        group.get("capturable")
        or any(devices.device_of(p) != devices.HOST for p in group["params"])
        for group in optimizer.param_groups
    )
