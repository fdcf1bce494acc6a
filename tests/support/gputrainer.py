"""A training process whose state lies on a GPU: on the stand-in, or with PCCHECK_TEST_GPU=real.

Every byte is a function of the step, its place and its tensor, and a step adds to every byte on
the stream. So any byte read back shows its step, and the tests find an update that was lost, came
too early or happened twice.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pccheck import PCcheckClient
from pccheck.state import devices
from pccheck.state.devices import HOST
from tests.standin.behaviours import Driver, free_bytes

from . import fakegpu, standin
from .as_user import import_all
from .fakegpu import Gpu
from .trainer import Commands, Trainer

if not fakegpu.is_real():
    standin.build()  # once, in the process from which trainers are forked

_PER_STEP = 31  # odd: the bytes of 256 steps all differ
_PER_STEP_INVERSE = 223
_OUT_OF_MEMORY = 2
_DEVICE_MAP = 2
MOMENT = 100  # added to the number of a moment's parameter


class Part(NamedTuple):
    """One tensor of the model. Forward changes buffers and frozen tensors."""

    count: int
    dtype: str = "float32"
    device: int = 0
    kind: str = "trained"  # "trained", "frozen", "buffer"
    shareable: bool = True
    expandable: bool = False  # in memory without a handle, and with descriptors


#: Tensors of every kind; with the moments several chunks of 1 MiB.
PARTS = (
    Part(300_000), Part(7, "bfloat16"), Part(90_001, "float16"), Part(5_000, kind="buffer"),
    Part(1_000, device=HOST),
)  # fmt: skip


def expected(step: int, number: int, nbytes: int) -> torch.Tensor:
    """The bytes of tensor `number` after `step`."""
    period = (torch.arange(256) * 7 + step * _PER_STEP + number * 13) % 256
    return period.to(torch.uint8).repeat(nbytes // 256 + 1)[:nbytes]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in place; torch does not count changes to them."""
    return tensor.data.reshape(-1).view(torch.uint8)


def off_by(have: torch.Tensor, step: int, number: int) -> str:
    """How bytes differ from those of the step; "" if they do not."""
    wanted = expected(step, number, have.numel())
    if torch.equal(have, wanted):
        return ""
    wrong = (have - wanted).unique().int() * _PER_STEP_INVERSE % 256
    steps = sorted({(value + 128) % 256 - 128 for value in wrong.tolist()})
    return f"tensor {number} is off from step {step} by {steps[:6]}"


class Model(torch.nn.Module):
    def __init__(self, gpu: Gpu, parts: list[Part]) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}
        for number, part in enumerate(parts):
            name = f"part{number}"
            self.numbers[name] = number
            tensor = _tensor(gpu, part)
            raw(tensor).copy_(expected(0, number, raw(tensor).numel()))
            if part.kind == "buffer":
                self.register_buffer(name, tensor)
            else:
                trained = part.kind == "trained"
                setattr(self, name, torch.nn.Parameter(tensor, requires_grad=trained))


def _tensor(gpu: Gpu, part: Part) -> torch.Tensor:
    dtype = getattr(torch, part.dtype)
    if part.device == HOST:
        return torch.empty(part.count, dtype=dtype)
    if part.expandable and not gpu.real:
        return gpu.expandable((part.count,), dtype, part.device)  # type: ignore[attr-defined]
    if part.shareable or gpu.real:
        return gpu.tensor((part.count,), dtype, part.device)
    return gpu.unshareable((part.count,), dtype, part.device)  # type: ignore[attr-defined]


class Advance(torch.optim.Optimizer):
    """Adds to every byte of its parameters and of their moments, which appear at the first step.

    GPU tensors change when the stream runs the update. `steps` is on the CPU, as Adam's `step`.
    """

    def __init__(self, gpu: Gpu, model: Model) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        super().__init__(list(trained.values()), {})
        self._gpu = gpu
        self._numbers = [model.numbers[name] for name in trained]
        self.now = 0
        self.slow_s = 0.0  #: that the stream needs for one update more

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.now += 1
        for number, parameter in zip(self._numbers, self.param_groups[0]["params"], strict=True):
            entry = self.state[parameter]
            if entry:
                advance(self._gpu, entry["moment"])
                entry["steps"] += 1
            else:
                entry["moment"] = self._moment(parameter, number)
                entry["steps"] = torch.tensor(float(self.now))
            advance(self._gpu, parameter)
            if self.slow_s and number == self._numbers[0]:
                self._gpu.launch(lambda: time.sleep(self.slow_s))

    def _moment(self, parameter: torch.Tensor, number: int) -> torch.Tensor:
        device = ordinal(parameter)
        start = expected(self.now, MOMENT + number, 4 * parameter.numel()).view(torch.float32)
        return start.clone() if device == HOST else self._gpu.like(start, device)


def ordinal(tensor: torch.Tensor) -> int:
    from pccheck.state import devices

    return devices.device_of(tensor)


def advance(gpu: Gpu, tensor: torch.Tensor, steps: int = 1, *, counted: bool = True) -> None:
    """Changes a tensor as an optimizer's kernel does; torch counts the change at the call."""
    place, more = raw(tensor), steps * _PER_STEP % 256
    if counted:
        torch.autograd.graph.increment_version(tensor)
    if ordinal(tensor) == HOST:
        place.add_(more)
    else:
        gpu.launch(lambda: place.add_(more), ordinal(tensor))


def wrong_in(state: dict[str, Any], step: int, model: Model) -> str:
    """What is wrong with a recovered state of CPU tensors; "" when it is right."""
    if state["model"].keys() != model.numbers.keys():
        return f"tensors of {sorted(state['model'])}"
    for name, tensor in state["model"].items():
        if tensor.device.type != "cpu":
            return f"{name} is on {tensor.device}"
        if told := off_by(raw(tensor), step, model.numbers[name]):
            return told
    trained = [model.numbers[n] for n, p in model.named_parameters() if p.requires_grad]
    entries = state["optimizer"]["state"] if "optimizer" in state else {}
    if entries and sorted(entries) != list(range(len(trained))):
        return f"state of {sorted(entries)}"
    for index, entry in entries.items():
        if int(entry["steps"]) != step:
            return f"a counter of {entry['steps']} at step {step}"
        if told := off_by(raw(entry["moment"]), step, MOMENT + trained[index]):
            return told
    return ""


#: Words of a Log: the newest step whose update is next on the stream, that is complete there, of
#: which the daemon has all that is not on the device, that is copied.
NEAR, READY, WHOLE, COPIED = range(4)


class Log:
    """Words in a file that outlives its process."""

    def __init__(self, path: Path) -> None:
        path.touch()
        with path.open("r+b") as file:
            file.truncate(4096)
            self._bytes = mmap.mmap(file.fileno(), 4096)

    def put(self, word: int, value: int) -> None:
        self._bytes[8 * word : 8 * word + 8] = value.to_bytes(8, "little")

    def register(self) -> None:
        """Lets streams of GPU 0 write the words."""
        host = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._cuda = Driver() if fakegpu.is_real() else standin.load()
        with self._cuda.on(0):
            self._cuda("cuMemHostRegister_v2", host, len(self._bytes), _DEVICE_MAP)
            self._device = self._cuda.out("cuMemHostGetDevicePointer_v2", host, 0)

    def enqueue(self, word: int, value: int) -> None:
        """The current stream writes it behind what is enqueued there."""
        stream, address = devices.current_stream(0), self._device + 8 * word
        with self._cuda.on(0):
            self._cuda("cuStreamWriteValue64_v2", stream, address, value, 0)

    def all(self) -> list[int]:
        return [int.from_bytes(self._bytes[at : at + 8], "little") for at in range(0, 32, 8)]


class GpuCommands(Commands):
    """`step()` only enqueues; calls that look at bytes wait for the stream first, except peek()."""

    def open(  # type: ignore[override]
        self,
        parts: list[Part],
        *,
        attach: bool = True,
        hook: bool = True,
        own_stream: bool = False,
        expands: bool = False,
        uid: int | None = None,
        **options: Any,
    ) -> int:
        self.gpu = fakegpu.choose()
        if not all(part.shareable for part in parts):
            os.environ["TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC"] = "0"  # a real one shares none then
            expands = expands or self.gpu.real
        if expands:
            self.gpu.expand()
        if uid is not None:
            os.setgroups([])
            import_all("pccheck")  # the other user may have no access to the files
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        self.kept = ExitStack()
        self.moved: torch.Tensor | None = None
        self.model = Model(self.gpu, parts)
        self.optimizer = Advance(self.gpu, self.model)
        self.gpu.synchronize()
        if own_stream:
            self.kept.enter_context(self.gpu.on_stream(self.gpu.new_stream()))
        self.client = PCcheckClient(**options)
        if attach and hook:
            self.client.attach(model=self.model, optimizer=self.optimizer)
        elif attach:
            self.client.attach(model=self.model)
        return os.getpid()

    def attach(self) -> None:
        """Attaches after open(attach=False)."""
        self.client.attach(model=self.model, optimizer=self.optimizer)

    def step(self, count: int = 1, *, ask: bool = True) -> int:
        """Forward changes tensors that no gate guards; then comes the update."""
        for _ in range(count):
            self.forward(ask=ask)
            self.optimizer.step()
        return self.optimizer.now

    def run(  # type: ignore[override]
        self, steps: int, every: int, *, stop: str = "", seed: int = 0, churn: bool = False
    ) -> tuple[int, dict[str, int]]:
        """Trains until the file `stop` exists; reports ("durable", step) when a newer step is
        durable. Returns the last step, and counts of how the checkpoints that reached the
        daemon have ended.
        """
        rng, told = random.Random(seed), -1
        for _ in range(steps):
            if stop and Path(stop).exists():
                break
            now = self.step()
            if now % every == 0:
                self.checkpoint()
            if rng.random() < 0.3:  # else the CPU runs ahead of the stream
                self.gpu.synchronize()
            if churn and rng.random() < 0.2:
                self.move_part0()
            durable = [h.step for h in self.handles[-100:] if h.state.name in ("DURABLE", "GLOBAL")]
            if durable and max(durable) > told:
                told = max(durable)
                self.native.send(("durable", told))
        states = [h.state.name.lower() for h in self.handles if h._in_flight.snapshot]
        return self.optimizer.now, collections.Counter(states)

    def run_on_device(self, log: str, every: int, *, seed: int = 0) -> None:
        """Trains for ever. Each step is left on the device, each `every`th copied to memory. Notes
        in a `Log` how far it is, in the order of the stream where that is what counts."""
        rng, marks = random.Random(seed), Log(Path(log))
        marks.register()
        self.optimizer.slow_s = 0.002
        copied: Any = None
        while True:
            now = self.optimizer.now + 1
            marks.enqueue(NEAR, now)
            self.step()
            level = "memory" if now == 1 or now % every == 0 else "device"
            handle = self.client.checkpoint(step=now, to=level)
            if now == 1:  # from then on the daemon has proof that it reads this memory
                handle.wait_copied(60)
            copied = handle if level == "memory" else copied
            marks.enqueue(READY, now)
            if level == "device" and rng.random() < 0.7:  # else the CPU runs ahead of the stream
                save = handle._in_flight
                self.gpu.synchronize()
                if save.snapshot and save.native.wait(
                    save.snapshot, "drained", time.monotonic_ns() + 10**10
                ):
                    if handle.state.name == "COPYING":
                        marks.put(WHOLE, now)
                    time.sleep(rng.random() * 0.004)
            if copied is not None and copied.state.name in ("COPIED", "WRITING", "DURABLE"):
                marks.put(COPIED, copied.step)

    def free_bytes(self) -> int:
        """Of GPU 0; this process has a context there from then on, and nothing else."""
        cuda = Driver() if fakegpu.is_real() else standin.load()
        with cuda.on(0):
            return free_bytes(cuda)

    def move_part0(self) -> None:
        """Moves part 0 to another allocation and frees the one before, so that its address may be
        used again. Every snapshot was read by then, or given up."""
        self.client.gate()
        self.gpu.synchronize()
        try:
            fresh = self.gpu.apart(self.model.part0.data)  # type: ignore[attr-defined]
        except fakegpu.DriverError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            return
        self.model.part0.data = fresh
        if self.moved is not None:
            self.gpu.free(self.moved)  # type: ignore[attr-defined]
        self.moved = fresh

    def forward(self, *, ask: bool = True) -> None:
        """Changes buffers at any time, and frozen tensors after a gate if `ask`."""
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        for tensor in self.model.buffers():
            advance(self.gpu, tensor)
        if frozen and ask:
            self.client.gate()
        for tensor in frozen:
            advance(self.gpu, tensor)

    def step_aside(self, late_s: float) -> int:
        """A step in another stream, which is delayed by `late_s`. Only on the stand-in."""
        with self.gpu.on_stream(self.gpu.new_stream()):
            self.gpu.launch(lambda: time.sleep(late_s))  # type: ignore[attr-defined]
            return self.step()

    def update_unasked(self, *, counted: bool) -> None:
        """An update without a gate; torch counts it only with `counted`."""
        self.optimizer.now += 1
        for tensor in self.model.state_dict().values():
            advance(self.gpu, tensor, counted=counted)

    def synchronize(self) -> None:
        self.gpu.synchronize()

    def idle(self, device: int = 0) -> bool:
        """Whether the stream has finished all enqueued work."""
        if fakegpu.is_real():
            return bool(torch.cuda.current_stream(device).query())
        cuda, stream = standin.load(), self.gpu.current_stream(device)  # type: ignore[attr-defined]
        with cuda.on(device):
            code = cuda.code("cuStreamQuery", stream)
        assert code in (standin.SUCCESS, standin.NOT_READY), code
        return code == standin.SUCCESS

    def check(self, step: int) -> str:
        self.gpu.synchronize()
        return self.peek(step)

    def peek(self, step: int) -> str:
        """How the state differs from that of `step`; does not wait for the stand-in's stream."""
        for name, tensor in self.model.state_dict().items():
            if told := off_by(raw(tensor).cpu(), step, self.model.numbers[name]):
                return told
        for parameter, entry in self.optimizer.state.items():
            if ordinal(entry["moment"]) != ordinal(parameter):
                return f"the moment of a parameter on {ordinal(parameter)} is elsewhere"
            number = next(n for n, p in enumerate(self._parts()) if p is parameter)
            if told := off_by(raw(entry["moment"]).cpu(), step, MOMENT + number):
                return told
            if int(entry["steps"]) != step:
                return f"a counter of {entry['steps']} at step {step}"
        return ""

    def _parts(self) -> list[torch.Tensor]:
        return [getattr(self.model, name) for name in self.model.numbers]

    def restore(self) -> dict[str, Any]:
        self.gpu.synchronize()
        return super().restore()

    def recover(self, **options: Any) -> dict[str, Any]:
        found = self.client.recover(**options)
        told = self._found(found)
        if found:
            told["wrong"] = wrong_in(found.state, found.step, self.model)
        return told

    def reopen(self, **options: Any) -> None:
        """Makes another client in this process, for the same state."""
        self.client = PCcheckClient(**options)
        self.client.attach(model=self.model, optimizer=self.optimizer)


class GpuTrainer(Trainer):
    commands = GpuCommands
