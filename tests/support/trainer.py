"""A real training process for tests, with commands over a pipe.

Every element of its state is a function of the step. So a tensor that is read back shows its
step, and a mix of two steps is detected. Trainers are forked from a server process that has
imported torch already, which makes hundreds of kills cheap.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

from pccheck import PCcheckClient
from pccheck_wire.errors import CheckpointFailedError
from tests.support import stall
from tests.support.programs import CONTEXT
from tests.support.waiting import suspend, until

ANSWER_LIMIT_S = 400.0
FROZEN = 1000  # as `index`: a tensor that no step changes


def expected(step: int, index: int, count: int) -> torch.Tensor:
    """The values of tensor `index` after `step`: float32, exact below 2**24."""
    return (torch.arange(count, dtype=torch.float32) % 65521) + float(step * 3 + index)


def mismatch(tensors: list[torch.Tensor], step: int) -> str:
    """What is wrong with tensors that should be those of `step`; "" when nothing is."""
    for index, tensor in enumerate(tensors):
        wanted = expected(step, index, tensor.numel())
        if not torch.equal(tensor.detach().reshape(-1), wanted):
            seen = sorted({int(v) for v in (tensor.detach().reshape(-1) - wanted).unique()[:4]})
            return f"tensor {index} is off from step {step} by {seen}"
    return ""


class Stamp(torch.optim.Optimizer):
    """An optimizer whose step writes `expected(step)` in place."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.now = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.now += 1
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                parameter.copy_(expected(self.now, index, parameter.numel()).view_as(parameter))


#: torch loads its compiler with the first optimizer: here once, instead of in every forked trainer.
Stamp([torch.nn.Parameter(torch.zeros(1))]).step()


class Stamped(torch.nn.Module):
    def __init__(self, counts: list[int], frozen: int = 0) -> None:
        super().__init__()
        if frozen:
            self.still = torch.nn.Parameter(expected(0, FROZEN, frozen), requires_grad=False)
        self.parts = torch.nn.ParameterList(
            [torch.nn.Parameter(expected(0, i, count)) for i, count in enumerate(counts)]
        )


class Commands:
    """The commands of a trainer; one instance per process."""

    def __init__(self, link: Connection) -> None:
        self.native = link
        self.handles: list[Any] = []

    def open(
        self, counts: list[int], *, attach: bool = True, hook: bool = True, frozen: int = 0,
        rng: bool = False, **options: Any,
    ) -> int:  # fmt: skip
        self.model = Stamped(counts, frozen)
        self.optimizer = Stamp(list(self.model.parts))
        self.client = PCcheckClient(**options)
        if attach and hook:
            self.client.attach(model=self.model, optimizer=self.optimizer, rng=rng)
        elif attach:
            self.client.attach(model=self.model)
        return os.getpid()

    def tensors(self) -> list[torch.Tensor]:
        return [p.data for p in self.model.parts]

    def restore(self, **options: Any) -> dict[str, Any]:
        done = self.client.restore(**options)
        if done:
            self.optimizer.now = done.step
        return self._found(done)

    def restored(self) -> tuple[int, str]:
        """Restores; the step, and how the state differs from that of the step."""
        step = self.restore()["step"]
        return step, self.check(step)

    @staticmethod
    def _found(done: Any) -> dict[str, Any]:
        return {
            "found": bool(done), "step": done.step, "sequence": done.sequence,
            "source": done.source, "skipped": [s.step for s in done.skipped],
        }  # fmt: skip

    def check(self, step: int) -> str:
        still = [self.model.still] if hasattr(self.model, "still") else []
        wrong = [part for part in still if not torch.equal(part, expected(0, FROZEN, len(part)))]
        return "the frozen tensor is another" if wrong else mismatch(self.tensors(), step)

    def step(self, count: int = 1) -> int:
        for _ in range(count):
            self.optimizer.step()
        return self.optimizer.now

    def checkpoint(self, **options: Any) -> int:
        options.setdefault("step", self.optimizer.now)
        self.handles.append(self.client.checkpoint(**options))
        return len(self.handles) - 1

    def wait_copied(self, handle: int, timeout: float = 60) -> str:
        self.handles[handle].wait_copied(timeout)
        return self.state(handle)

    def wait_durable(self, handle: int, timeout: float = 60) -> str:
        self.handles[handle].wait_durable(timeout)
        return self.state(handle)

    def save(self) -> str:
        """Makes a step and its checkpoint, and waits until the checkpoint is durable."""
        self.step()
        return self.wait_durable(self.checkpoint())

    def ended(self, handle: int, timeout: float = 60) -> str:
        """Waits until the checkpoint has ended on this rank; returns its state."""
        with contextlib.suppress(CheckpointFailedError):
            self.handles[handle].wait_durable(timeout)
        return self.state(handle)

    def wait_global(self, handle: int, timeout: float = 60) -> str:
        self.handles[handle].wait_global(timeout)
        return self.state(handle)

    def flushed(self) -> int | None:
        """The step that flush() returns."""
        found = self.client.flush()
        return found.step if found is not None else None

    def state(self, handle: int) -> str:
        return str(self.handles[handle].state.name).lower()

    def reason(self, handle: int) -> str:
        return str(self.handles[handle].reason)

    def states(self) -> list[str]:
        return [self.state(i) for i in range(len(self.handles))]

    def watch(self, handle: int, state: str) -> str:
        """Spins until the handle has reached `state`; for kills in a given state."""
        order = ["requested", "copying", "copied", "writing"]
        while True:
            now = self.state(handle)
            if now not in order or order.index(now) >= order.index(state):
                return now

    def run(self, steps: int, every: int, *, stop: str = "") -> int:
        """Trains until the file `stop` exists; reports ("durable", step) when a newer step is
        durable."""
        told = -1
        for _ in range(steps):
            if stop and Path(stop).exists():
                break
            now = self.step()
            if now % every == 0:
                self.checkpoint()
            durable = [h.step for h in self.handles[-64:] if h.state.name in ("DURABLE", "GLOBAL")]
            if durable and max(durable) > told:
                told = max(durable)
                self.native.send(("durable", told))
        return self.optimizer.now

    def recover(self, **options: Any) -> dict[str, Any]:
        found = self.client.recover(**options)
        if not found:
            return self._found(found)
        parts = [v for k, v in found.state["model"].items()]
        return self._found(found) | {"wrong": mismatch(parts, found.step)}

    def damage_ungated(self, step: int, *, counted: bool = False) -> int:
        """Overwrites the tensors without a gate. torch counts the change only with `counted`."""
        self.optimizer.now = step
        with torch.no_grad():
            for index, parameter in enumerate(self.model.parts):
                target = parameter if counted else parameter.data
                target.copy_(expected(step, index, parameter.numel()))
        return step

    def connected(self) -> bool:
        return self.client.connected

    def shorten(self, stall_limit_s: float) -> None:
        stall.shorten(self.client, stall_limit_s)

    def pin(self, step: int) -> None:
        self.client.pin(step)

    def close(self, **options: Any) -> None:
        self.client.close(**options)

    def evaluate(self, function: Callable[[Any], Any]) -> Any:
        return function(self)


def _main(link: Connection, environment: dict[str, str], commands: type[Commands]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    trainer = commands(link)
    while True:
        try:
            name, arguments, options = link.recv()
        except EOFError:
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answer = ("answer", getattr(trainer, name)(*arguments, **options))
            except Exception as error:
                answer = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
        link.send((*answer, [str(w.message) for w in caught]))


class RemoteError(AssertionError):
    """An exception in the trainer: `.kind` is its class name."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


class Trainer:
    """A trainer process; `trainer.step(3)` runs there and returns its result here."""

    commands: type[Commands] = Commands

    def __init__(self, **environment: str) -> None:
        self._link, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=_main, args=(theirs, environment, self.commands), daemon=True
        )
        self.process.start()
        theirs.close()
        self.durable = -1  #: the newest durable step that run() has reported
        self._ended: list[tuple[Any, ...]] = []  # the end of a command, read by drain()
        self.warnings: list[str] = []

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def post(self, name: str, *arguments: Any, **options: Any) -> None:
        """Starts a command; `answer()` returns its result."""
        self._link.send((name, arguments, options))

    def _receive(self, limit_s: float) -> tuple[Any, ...]:
        if self._ended:
            return self._ended.pop()
        if not self._link.poll(limit_s):
            raise AssertionError("the trainer does not answer: it hangs")
        return tuple(self._link.recv())

    def answer(self, limit_s: float = ANSWER_LIMIT_S) -> Any:
        while True:
            kind, value, *rest = self._receive(limit_s)
            if kind == "durable":
                self.durable = value
                continue
            self.warnings += rest[0]
            if kind == "raised":
                raise RemoteError(*value)
            return value

    @property
    def has_answered(self) -> bool:
        """Whether the command has returned or raised."""
        return bool(self._ended) or self._link.poll(0)

    def wait_for_durable(self, step: int, limit_s: float = ANSWER_LIMIT_S) -> int:
        """During a posted run(): waits until `step` or a later step is reported as durable."""
        while self.durable < step:
            kind, value, *_ = self._receive(limit_s)
            assert kind == "durable", (kind, value)
            self.durable = value
        return self.durable

    def connects_again(self) -> int:
        """Trains until the client has connected again; returns the handle of the checkpoint that
        made it connect."""

        handles: list[int] = []

        def tried() -> bool:
            self.step()
            handles.append(self.checkpoint())
            return bool(self.connected())

        until(tried, lambda: self.warnings)
        return handles[-1]

    def drain(self) -> int:
        """Reads the reports of run() so far; returns the newest durable step among them."""
        try:
            while self._link.poll(0):
                message = self._link.recv()
                if message[0] == "durable":
                    self.durable = max(self.durable, message[1])
                else:
                    self._ended.append(message)
        except (EOFError, OSError):
            pass
        return self.durable

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.post(name, *arguments, **options)
            return self.answer()

        return call

    def signal(self, number: int) -> None:
        suspend(self.pid) if number == signal.SIGSTOP else os.kill(self.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
        self._link.close()


Connect = Callable[..., Trainer]  #: the fixture `start_trainer`
