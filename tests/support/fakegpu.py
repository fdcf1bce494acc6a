"""GPU tensors for tests: on the stand-in driver, or on a real GPU with PCCHECK_TEST_GPU=real.

    gpu = fakegpu.choose()      # in the process that trains, before a client exists
    weights = gpu.tensor((300, 7), torch.float32)
    optimizer = StreamSGD(gpu, [weights], seed=1)
    optimizer.step()            # only enqueues: the CPU runs ahead of the stream
    assert gpu.read(weights).equal(...)

On the stand-in these are CPU tensors over device memory: torch regards them as CPU tensors, and
`pccheck.state.devices` is patched to report their GPU. Change them only within `launch()`.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tests.standin.behaviours import READ_WRITE, Access, DriverError, Properties

from . import standin
from .gputraining import DriftingBuffer, Gpu, Graph, StreamSGD, module_to
from .standin import Faults, StandinDaemon, environment, new_directory

__all__ = [
    "DriftingBuffer", "DriverError", "Faults", "Gpu", "Graph", "StandGpu", "StandinDaemon",
    "StreamSGD", "choose", "environment", "is_real", "module_to", "new_directory",
]  # fmt: skip

# torch's caching allocator: rounding, small and large blocks, allocations above the latter
_ROUNDING = 512
_SMALL, _SMALL_BLOCK = 1 << 20, 2 << 20
_LARGE, _LARGE_BLOCK = 10 << 20, 20 << 20
_HUGE_ROUNDING = 2 << 20
_SEGMENT, _PIECE = 1 << 30, 2 << 20
_NULL_STREAM = 0
_NON_BLOCKING = 1
_NO_TIMING = 2


def choose() -> Gpu:
    """The GPU of this process; on the stand-in its environment() must be set by now."""
    if os.environ.get("PCCHECK_TEST_GPU") == "real":
        from .realgpu import RealGpu

        return RealGpu()
    return StandGpu().install()


def is_real() -> bool:
    return os.environ.get("PCCHECK_TEST_GPU") == "real"


class _Graph:
    def __init__(self, gpu: StandGpu, device: int) -> None:
        self._gpu = gpu
        self._device = device
        self.functions: list[Callable[[], object]] = []

    def replay(self) -> None:
        for function in self.functions:
            self._gpu.launch(function, self._device)


class _Stream:
    def __init__(self, handle: int, device: int) -> None:
        self.handle = handle
        self.device = device


class StandGpu:
    """CPU tensors over the stand-in's device memory."""

    real = False

    def __init__(self) -> None:
        self.cuda = standin.load()
        self._blocks: list[tuple[int, int, int]] = []  # address, length, device; by address
        self._open: dict[tuple[int, bool], list[int]] = {}  # (device, small): next address, end
        self._expands = False
        self._segments: dict[int, list[int]] = {}  # device: next address, end of what is mapped
        self._local = threading.local()
        self._calls: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count(1)
        self._called = standin.HOST_FUNCTION(self._call)
        self._failures: list[BaseException] = []
        self._graph: _Graph | None = None
        self._unused: dict[int, list[int]] = {}  # device -> blocks that torch would keep for later

    def install(self) -> StandGpu:
        """Makes the client treat tensors of this object as GPU tensors."""
        from pccheck.state import devices

        devices.device_of = self.device_of
        devices.current_stream = self.current_stream
        devices.follow = self.follow
        devices.synchronize = self.synchronize
        devices.capturing = self.capturing
        devices.empty = self._empty
        devices.empty_cache = self.empty_cache
        return self

    # -- memory

    def _block(self, nbytes: int, device: int, call: str = "cuMemAlloc_v2") -> int:
        with self.cuda.on(device):
            address = self.cuda.out(call, nbytes)
        bisect.insort(self._blocks, (address, nbytes, device))
        return address

    def _allocate(self, nbytes: int, device: int) -> int:
        nbytes = -(-nbytes // _ROUNDING) * _ROUNDING
        if nbytes >= _LARGE:
            return self._block(-(-nbytes // _HUGE_ROUNDING) * _HUGE_ROUNDING, device)
        key = (device, nbytes <= _SMALL)
        at, end = self._open.get(key, (0, 0))
        if end - at < nbytes:
            size = _SMALL_BLOCK if nbytes <= _SMALL else _LARGE_BLOCK
            at = self._block(size, device)
            end = at + size
        self._open[key] = [at + nbytes, end]
        return at

    @staticmethod
    def _over(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: int = 0
    ) -> torch.Tensor:
        """A tensor in new memory; its content is undefined."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        allocate = self._expand if self._expands else self._allocate
        return self._over(allocate(count * dtype.itemsize, device), count, dtype).view(tuple(shape))

    def expand(self) -> None:
        """All tensors are in expandable segments from now on."""
        self._expands = True

    def unshareable(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: int = 0
    ) -> torch.Tensor:
        """A tensor in memory without an IPC handle, as with expandable segments."""
        count = torch.Size(shape).numel()
        address = self._block(count * dtype.itemsize, device, "standinAllocUnshareable")
        return self._over(address, count, dtype).view(tuple(shape))

    def expandable(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: int = 0
    ) -> torch.Tensor:
        """A tensor in an expandable segment."""
        count = torch.Size(shape).numel()
        address = self._expand(count * dtype.itemsize, device)
        return self._over(address, count, dtype).view(tuple(shape))

    def _expand(self, nbytes: int, device: int) -> int:
        """Pieces of memory are mapped into the addresses of a segment as they are needed."""
        nbytes = -(-nbytes // _ROUNDING) * _ROUNDING
        with self.cuda.on(device):
            if device not in self._segments:
                address = self.cuda.out("cuMemAddressReserve", _SEGMENT, 0, 0, 0)
                bisect.insort(self._blocks, (address, _SEGMENT, device))
                self._segments[device] = [address, address]
            at, mapped = self._segments[device]
            while at + nbytes > mapped:
                wanted = Properties(1, 1, 1, device)
                handle = self.cuda.out("cuMemCreate", _PIECE, ctypes.byref(wanted), 0)
                self.cuda("cuMemMap", mapped, _PIECE, 0, handle, 0)
                access = ctypes.byref(Access(1, device, READ_WRITE))
                self.cuda("cuMemSetAccess", mapped, _PIECE, access, 1)
                self.cuda("cuMemRelease", handle)
                mapped += _PIECE
            self._segments[device] = [at + nbytes, mapped]
        return at

    def apart(self, source: torch.Tensor) -> torch.Tensor:
        """A copy on device 0 in an allocation of its own, of any size; for free()."""
        address = self._block(-(-source.nbytes // _ROUNDING) * _ROUNDING, 0)
        fresh = self._over(address, source.numel(), source.dtype).view(tuple(source.shape))
        fresh.copy_(source.detach())
        return fresh

    def free(self, tensor: torch.Tensor) -> None:
        """Frees the memory of a tensor with an allocation of its own (10 MiB or more). The tensor
        must not be used again."""
        index = self._index(tensor.data_ptr())
        assert index is not None, "not a tensor of this GPU"
        address, _, device = self._blocks[index]
        assert address == tensor.data_ptr(), "it shares its block with others"
        with self.cuda.on(device):
            self.cuda("cuMemFree_v2", address)
        del self._blocks[index]

    def keep_unused(self, nbytes: int, device: int = 0) -> None:
        """As if tensors of this size were freed: torch's allocator keeps their memory."""
        with self.cuda.on(device):
            self._unused.setdefault(device, []).append(self.cuda.out("cuMemAlloc_v2", nbytes))

    def empty_cache(self, device: int = 0) -> None:
        with self.cuda.on(device):
            for address in self._unused.pop(device, []):
                self.cuda("cuMemFree_v2", address)

    def like(self, source: torch.Tensor, device: int = 0) -> torch.Tensor:
        """A copy on the device; the caller may use it on the CPU at once."""
        fresh = self.tensor(source.shape, source.dtype, device)
        fresh.copy_(source.detach())
        return fresh

    def _empty(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        like: torch.Tensor,
    ) -> torch.Tensor:
        device = self.device_of(like)
        if device < 0 or 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        return self.tensor((count,), dtype, device).as_strided(tuple(shape), tuple(strides))

    def _index(self, address: int) -> int | None:
        index = bisect.bisect_right(self._blocks, (address, 1 << 64, 0)) - 1
        if index < 0:
            return None
        start, nbytes, _ = self._blocks[index]
        return index if start <= address < start + nbytes else None

    def device_of(self, tensor: torch.Tensor) -> int:
        try:
            index = self._index(tensor.data_ptr())
        except (RuntimeError, ValueError, NotImplementedError):
            return -1
        return -1 if index is None else self._blocks[index][2]

    # -- streams

    def _currents(self) -> dict[int, int]:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        currents: dict[int, int] = self._local.streams
        return currents

    def current_stream(self, device: int) -> int:
        return self._currents().get(device, _NULL_STREAM)

    def follow(self, device: int, stream: int) -> None:
        with self.cuda.on(device):
            event = self.cuda.out("cuEventCreate", _NO_TIMING)
            self.cuda("cuEventRecord", event, stream)
            self.cuda("cuStreamWaitEvent", self.current_stream(device), event, 0)
            self.cuda("cuEventDestroy_v2", event)

    def new_stream(self, device: int = 0) -> _Stream:
        with self.cuda.on(device):
            return _Stream(self.cuda.out("cuStreamCreate", _NON_BLOCKING), device)

    @contextmanager
    def on_stream(self, stream: _Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self._currents()[stream.device] = stream.handle
        try:
            yield
        finally:
            self._currents()[stream.device] = before

    def _call(self, number: int | None) -> None:
        try:
            with torch.no_grad():
                self._calls.pop(number or 0)()
        except BaseException as error:  # raised by synchronize(): it would be lost otherwise
            self._failures.append(error)

    def launch(self, function: Callable[[], object], device: int = 0) -> None:
        """Enqueues the call on the current stream, like a kernel; the stream's thread runs it."""
        if self._graph is not None and self.capturing():
            self._graph.functions.append(function)
            return
        number = next(self._numbers)
        self._calls[number] = function
        with self.cuda.on(device):
            self.cuda("cuLaunchHostFunc", self.current_stream(device), self._called, number)

    def synchronize(self, device: int | None = None) -> None:
        devices = {0, *(block[2] for block in self._blocks)} if device is None else {device}
        for one in devices:
            with self.cuda.on(one):
                self.cuda("cuCtxSynchronize")
        if self._failures:
            raise self._failures.pop(0)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The content as a CPU tensor, after all enqueued work."""
        self.synchronize()
        return tensor.detach().clone()

    # -- graphs

    def capturing(self) -> bool:
        status = ctypes.c_int(0)
        for device, stream in self._currents().items():
            with self.cuda.on(device):
                self.cuda("cuStreamIsCapturing", stream, ctypes.byref(status))
            if status.value:
                return True
        return False

    @contextmanager
    def capture(self, device: int = 0) -> Iterator[Graph]:
        """Like torch.cuda.graph: launched calls are recorded for replay(), and do not run.

        Raises at the end if any thread made a forbidden call.
        """
        stream = self.new_stream(device)
        graph = _Graph(self, device)
        with self.on_stream(stream), self.cuda.on(device):
            self.cuda("standinBeginCapture", stream.handle, 0)
            self._graph = graph
            try:
                yield graph
            finally:
                self._graph = None
                code = self.cuda.code("standinEndCapture", stream.handle)
                self.cuda("cuStreamDestroy_v2", stream.handle)
        if code:
            raise DriverError("standinEndCapture", code)
