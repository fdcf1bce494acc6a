"""What runs before and after each step of the attached optimizers."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch

from pccheck.state import devices

_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

#: Optimizers of this process whose step has passed its gate, and runs or has failed. The next
#: client of such an optimizer needs to know this, too.
_CHANGING: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

#: Where the standard library is, and often the installed packages, too.
_STANDARD = f"{Path(threading.__file__).parent}{os.sep}"

#: So many checkpoints without a step of an optimizer in between are no accident.
_IDLE_CHECKPOINTS = 3


class Progress:
    """Whether the attached optimizers still step, judged by the numbers of the checkpoints.

    A run with gradient accumulation may number and save its micro-batches: then some checkpoints in
    a row have no step of the optimizer in between. So the pause must also be more than twice as
    long, in these numbers, as every earlier one between two steps.
    """

    def __init__(self) -> None:
        self.steps = 0  #: that the attached optimizers have made
        self._seen = 0  # of them at the checkpoint before
        self._at = self._last = 0  # the checkpoint that saw the newest step; the one before
        self._longest = 0  # from one that saw a step to the next; 0: not known yet
        self._idle = 0  # checkpoints since `_at`

    def idle_since(self, number: int) -> int | None:
        """For each checkpoint: the number of the last one that saw a step, when none follow."""
        if self.steps != self._seen:
            if self._seen:
                self._longest = max(self._longest, number - self._at)
            self._seen, self._at, self._idle = self.steps, number, 0
        elif number > self._last:
            self._idle += 1
        self._last = number
        paused = self._idle >= _IDLE_CHECKPOINTS and number - self._at > 2 * self._longest
        return self._at if self._longest and paused else None


class StepHooks:
    """Calls methods, whose object may be deleted, before and after each step of the optimizers.

    `trusted` ends when a step was recorded in a CUDA graph, whose replays run no hooks. Each of the
    optimizers must first make a step: it may be in a graph already, or train by other methods
    (SAM's first_step), or only be wrapped by the one that trains.
    """

    def __init__(self) -> None:
        self.trusted = True
        self.progress = Progress()
        self.thread = 0  #: the one that made the last step, or the last call of gate() by hand
        self._handles: list[Any] = []
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._whole = False  # put() has ended: Ctrl-C may leave some hooks out
        self._unseen: set[int] = set()
        #: By optimizer: the thread and the call in which it steps, or did before it failed.
        self._steps: dict[int, tuple[int, FrameType]] = {}
        self._streams: dict[int, int] = {}  # by GPU: where its last step was enqueued

    @property
    def stepping(self) -> bool:
        """Whether a step of an attached optimizer runs: in another thread, or in this one, which
        then runs a signal handler or a closure. Meanwhile the attached tensors are of two steps."""
        for number, step in list(self._steps.items()):
            if runs(*step):
                return True
            if self._steps.get(number) is step:  # else it has ended, and another thread steps again
                self._steps.pop(number, None)  # it has failed
        return False

    def trained_by(self) -> str:
        """The name of another thread, if it trains now; else "". A thread that waits changes
        nothing: for this one, for work of a pool, or for the next cell of a notebook."""
        if self.thread in (0, threading.get_ident()):
            return ""
        frame = sys._current_frames().get(self.thread)
        file = frame.f_code.co_filename if frame is not None else _STANDARD
        if file.startswith(_STANDARD) and "-packages" not in file:  # waits for a lock or a queue
            return ""
        names = (one.name for one in threading.enumerate() if one.ident == self.thread)
        return next(names, "unknown")

    def __bool__(self) -> bool:
        """Whether every update is seen."""
        return self.trusted and self._whole and bool(self._handles) and not self._unseen

    @property
    def halfway(self) -> bool:
        """Whether an exception may have ended a step that had changed tensors, if none runs."""
        return any(optimizer in _CHANGING for optimizer in self._hooked)

    def restored(self) -> None:
        """Everything attached was restored: no tensors of two steps are left."""
        _CHANGING.difference_update(self._hooked)

    def put(
        self,
        before: Callable[[], None],
        things: Iterable[object],
        after: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """Hooks the optimizers among `things`; earlier hooks are removed."""
        self.remove()
        gate, stepped = weakref.WeakMethod(before), weakref.WeakMethod(after)
        unseen, steps = self._unseen, self._steps
        progress = self.progress = Progress()
        streams, gpus = self._streams, dict[int, set[int]]()
        inner: Counter[int] = Counter()  # by optimizer: calls of super().step() in its step
        ends: dict[int, Any] = {}  # by optimizer: the handle of after_step

        def pass_gate(optimizer: torch.optim.Optimizer) -> None:
            _call(gate)
            _CHANGING.add(optimizer)

        def before_step(
            optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
        ) -> _Arguments | None:
            _make_last(ends[id(optimizer)])
            unseen.discard(id(optimizer))
            call, outer = (threading.get_ident(), _caller()), steps.get(id(optimizer))
            if outer not in (None, call) and runs(*outer):
                inner[id(optimizer)] += 1
            else:
                inner[id(optimizer)] = 0
                # Before the gate: a call after it has to see that a step runs.
                steps[id(optimizer)] = call
            return _later(optimizer, args, kwargs, pass_gate)

        def after_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
            if inner[id(optimizer)]:
                inner[id(optimizer)] -= 1
                return
            steps.pop(id(optimizer), None)
            _CHANGING.discard(optimizer)
            progress.steps += 1
            on = gpus[id(optimizer)]
            if on and not devices.capturing():  # a graph's stream does nothing, and may be deleted
                streams.update({gpu: devices.current_stream(gpu) for gpu in on})
            _call(stepped, optimizer)

        for thing in things:
            if isinstance(thing, torch.optim.Optimizer):
                unseen.add(id(thing))
                on = {devices.device_of(p) for group in thing.param_groups for p in group["params"]}
                gpus[id(thing)] = on - {devices.HOST}
                # Not compiled into a step: what they look at changes without it.
                pre, post = map(torch.compiler.disable, (before_step, after_step))
                # Ctrl-C between the two leaves no step that seems to have no end.
                ends[id(thing)] = thing.register_step_post_hook(post)
                self._handles.append(ends[id(thing)])
                self._handles.append(thing.register_step_pre_hook(pre))
                self._hooked.add(thing)
        self._whole = True

    def follow(self) -> None:
        """Work that this thread enqueues from now on waits for the last step, in whatever stream
        that was: otherwise a snapshot could be of half a step."""
        for gpu, stream in self._streams.items():
            if devices.current_stream(gpu) != stream:
                devices.follow(gpu, stream)

    def remove(self) -> None:
        self._whole = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._unseen.clear()
        self._steps.clear()
        self._streams.clear()
        self.thread = 0


def _call(method: weakref.WeakMethod[Any], *arguments: object) -> None:
    """Unless its object was deleted."""
    held = method()
    if held is not None:
        held(*arguments)


def runs(thread: int, call: FrameType) -> bool:
    """Whether the thread is in that call."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def _caller() -> FrameType:
    """The call of step() that a hook is in."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch._dyn"):
        frame = frame.f_back
    return frame


def _make_last(hook: Any) -> None:
    """Other hooks of the step, which may change tensors, too, are called before this one."""
    hooks = hook.hooks_dict_ref()
    if hooks and next(reversed(hooks)) != hook.id and hook.id in hooks:
        hooks.move_to_end(hook.id)


def _later(
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pass_gate: Callable[[torch.optim.Optimizer], None],
) -> _Arguments | None:
    """Passes the gate, or gives the arguments of a step that passes it later: optimizers of torch
    call a closure, in which forward and backward run, before they change anything."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure) or not type(optimizer).__module__.startswith("torch.optim."):
        pass_gate(optimizer)
        return None

    @functools.wraps(closure)
    def then_pass() -> Any:
        loss = closure()
        pass_gate(optimizer)  # returns at once when it was passed before
        return loss

    if len(args) > 1:
        return (args[0], then_pass, *args[2:]), kwargs
    return args, kwargs | {"closure": then_pass}
