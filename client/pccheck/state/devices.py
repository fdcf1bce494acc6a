"""What only torch knows about GPU memory: where a tensor is, and which stream trains.

The native client does all else about GPUs, by the driver. The functions are looked up here at
each call, so that tests without a GPU put others in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: CUDA ordinals above this are not supported (PCC_DEVICES).
DEVICES_MAX = 16
HOST = -1


def device_of(tensor: torch.Tensor) -> int:
    """The CUDA ordinal of the GPU whose memory the tensor lies in; HOST for CPU tensors."""
    return tensor.get_device() if tensor.is_cuda else HOST


def current_stream(device: int) -> int:
    """The handle of the stream that this thread's work on the GPU goes to."""
    return torch.cuda.current_stream(device).cuda_stream


def follow(device: int, stream: int) -> None:
    """Work that this thread enqueues on the GPU from now on waits for the work in `stream`."""
    other = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
    torch.cuda.current_stream(device).wait_stream(other)


def synchronize(device: int) -> None:
    """Returns when all work on the GPU that this process has enqueued is done."""
    torch.cuda.synchronize(device)


def empty_cache(device: int) -> None:
    """Frees what torch's allocator keeps and does not use. Enqueued work is done on return."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def capturing() -> bool:
    """Whether this thread records a CUDA graph on its current stream."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def empty(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    """New memory on the device of `like`."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
