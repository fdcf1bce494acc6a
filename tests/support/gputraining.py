"""Training on a GPU of tests/support/fakegpu.py, real or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Graph(Protocol):
    def replay(self) -> None: ...


class Gpu(Protocol):
    """The calls of tests on a GPU, real or not. Devices are CUDA ordinals."""

    real: bool

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype = ..., device: int = 0
    ) -> torch.Tensor: ...
    def like(self, source: torch.Tensor, device: int = 0) -> torch.Tensor: ...
    def expand(self) -> None: ...
    def launch(self, function: Callable[[], object], device: int = 0) -> None: ...
    def new_stream(self, device: int = 0) -> Any: ...
    def on_stream(self, stream: Any) -> AbstractContextManager[None]: ...
    def synchronize(self, device: int | None = None) -> None: ...
    def read(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def capture(self, device: int = 0) -> AbstractContextManager[Graph]: ...


def module_to(gpu: Gpu, module: torch.nn.Module) -> torch.nn.Module:
    """Moves parameters and buffers to the GPU, in place; tied tensors stay tied."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            fresh = gpu.like(tensor.detach())
            if isinstance(tensor, torch.nn.Parameter):
                fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = fresh
        return moved[id(tensor)]

    kept = list(module.parameters()) + list(module.buffers())  # ids stay those of living tensors
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = move(tensor)  # type: ignore[assignment]
    del kept
    return module


class StreamSGD(torch.optim.Optimizer):
    """SGD with momentum that only enqueues: `step()` returns before anything has changed.

    The stream uses the gradients in `.grad`; without gradients it uses noise made from seed and
    step, so two runs with the same seed are equal bit for bit. `state[p]["step"]` is a CPU
    tensor, as Adam's is.
    """

    def __init__(
        self,
        gpu: Gpu,
        params: Iterable[torch.Tensor],
        *,
        seed: int = 0,
        lr: float = 0.1,
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": 0.9})
        self._gpu = gpu
        self._seed = seed

    def _momentum(self, parameter: torch.Tensor, device: int) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = self._gpu.like(torch.zeros(parameter.shape), device)
            state["step"] = torch.zeros(())
        state["step"] += 1
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                device = _ordinal(parameter)
                buffer = self._momentum(parameter, device)
                number = int(self.state[parameter]["step"])
                self._gpu.launch(
                    _Update(parameter, buffer, (self._seed, number, index), group), device
                )


class _Update:
    def __init__(
        self,
        parameter: torch.Tensor,
        buffer: torch.Tensor,
        seeds: tuple[int, int, int],
        group: dict[str, Any],
    ) -> None:
        self.parameter, self.buffer, self.seeds = parameter, buffer, seeds
        self.lr, self.momentum = group["lr"], group["momentum"]

    def __call__(self) -> None:
        gradient = self.parameter.grad
        if gradient is None:
            seed, step, index = self.seeds
            number = seed * 1_000_003 + step * 1_009 + index  # the generator takes 32 bits
            noise = torch.Generator().manual_seed(number % 2**32)
            gradient = torch.rand(self.parameter.shape, generator=noise) - 0.5
        self.buffer.mul_(self.momentum).add_(gradient.to(self.buffer))
        self.parameter.data.sub_((self.buffer * self.lr).to(self.parameter.dtype))


def _ordinal(tensor: torch.Tensor) -> int:
    from pccheck.state import devices

    return devices.device_of(tensor)


class DriftingBuffer(torch.nn.Module):
    """A module whose buffer changes in forward(), on the stream, as BatchNorm's do."""

    def __init__(self, gpu: Gpu, count: int) -> None:
        super().__init__()
        self._gpu = gpu
        self.seen: torch.Tensor
        self.register_buffer("seen", gpu.like(torch.zeros(count)))

    def forward(self, _input: object = None) -> None:
        seen = self.seen
        self._gpu.launch(lambda: seen.mul_(0.5).add_(1.0))
