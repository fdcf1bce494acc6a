"""NVML, NVIDIA's library to watch GPUs, which comes with every driver: which GPUs there are, who
uses them, and how much memory is free."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_INSUFFICIENT_SIZE = 7
_MOST_PROCESSES = 1024
_UNKNOWN_BYTES = 2**64 - 1


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class GpuDevice:
    """A GPU of this machine, as it is now."""

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    used_by: Mapping[int, int]  #: process -> bytes; -1 where NVML does not tell


def devices() -> list[GpuDevice]:
    """Empty where NVML is missing, or finds nothing."""
    try:
        library = ctypes.CDLL(LIBRARY)
        if library.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            found.append(_device(library, handle))
    return found


def release() -> str:
    """Of the driver, such as "570.86.10"; "" where NVML does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(LIBRARY)
        if library.nvmlInit_v2() == 0:
            return _text(library.nvmlSystemGetDriverVersion)
    return ""


def _device(library: ctypes.CDLL, handle: ctypes.c_void_p) -> GpuDevice:
    memory = _Memory()
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    uuid = _text(library.nvmlDeviceGetUUID, handle)
    name = _text(library.nvmlDeviceGetName, handle)
    return GpuDevice(uuid, name, memory.total, memory.free, _used_by(library, handle))


def _used_by(library: ctypes.CDLL, handle: ctypes.c_void_p) -> dict[int, int]:
    rows = (_Process * _MOST_PROCESSES)()
    count = ctypes.c_uint(_MOST_PROCESSES)
    code = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), rows)
    if code not in (0, _INSUFFICIENT_SIZE):
        return {}
    listed = rows[: min(count.value, _MOST_PROCESSES)]
    return {one.pid: -1 if one.used == _UNKNOWN_BYTES else one.used for one in listed}


def _text(function: Any, *given: Any) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    return (
        buffer.value.decode(errors="replace") if not function(*given, buffer, len(buffer)) else ""
    )
