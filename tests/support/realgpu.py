"""The real GPU behind the interface of fakegpu.Gpu: torch's own tensors, streams and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def expandable_segments(*, on: bool) -> None:
    """Whether torch's allocator takes new memory in expandable segments."""
    now: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # from 2.10 on
    (now or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{on}")


class RealGpu:
    real = True

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: int = 0
    ) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=f"cuda:{device}")

    def like(self, source: torch.Tensor, device: int = 0) -> torch.Tensor:
        return source.detach().to(f"cuda:{device}", copy=True)

    def expand(self) -> None:
        """All tensors are in expandable segments from now on."""
        expandable_segments(on=True)

    def launch(self, function: Callable[[], object], device: int = 0) -> None:
        """What the function does to tensors goes to the current stream: torch enqueues itself."""
        with torch.cuda.device(device), torch.no_grad():
            function()

    def new_stream(self, device: int = 0) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

    def synchronize(self, device: int | None = None) -> None:
        for one in range(torch.cuda.device_count()) if device is None else (device,):
            torch.cuda.synchronize(one)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.synchronize()
        return tensor.detach().cpu()

    @contextmanager
    def capture(self, device: int = 0) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            yield graph
