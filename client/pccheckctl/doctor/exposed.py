"""Asks the daemon for pull as a trainer does: shares a little memory of each GPU with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import struct
from collections.abc import Iterator

from pccheck_native import _core
from pccheck_store import VERSION
from pccheck_wire import attach
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.codec import PIECE_BYTES
from pccheck_wire.errors import PccheckError
from pccheck_wire.messages import Expose, Hello, Role

from . import gpu
from .finding import Finding, ok, problem, warning

NBYTES = 1 << 20
_PUSHED = "jobs of this user push: the training process copies its GPU tensors itself"
_FIX = "pccheckctl status names the reason for each job; docs/gpu.md lists what can be done"


def gpus(socket: str | None) -> Iterator[Finding]:
    """A context on each GPU that this process sees, for a moment; nothing is saved."""
    if not gpu.has_driver():
        yield ok("gpu pull", "not checked: doctor has no driver (libcuda.so.1), so no GPU to share")
        return
    try:
        attachment = attach.connect(_hello(), socket)
    except PccheckError as error:
        yield problem("gpu pull", error.message, effect=_PUSHED, fix=error.hint)
        return
    with attachment:
        reason = attachment.welcome.transfer_reason
        if attachment.welcome.transfer != "pull":
            yield warning("gpu pull", f"the daemon offers push: {reason}", effect=_PUSHED, fix=_FIX)
            return
        native = _core.Client(attachment.memory_fd, attachment.page_fd)
        with contextlib.closing(native):
            count = _count()
            for device in range(count):
                yield _one(attachment, native, device)
        if not count:
            yield ok("gpu pull", "not checked: doctor sees no GPU (CUDA_VISIBLE_DEVICES)")


def _hello() -> Hello:
    return Hello(
        PROTOCOL_VERSION, Role.TRAINER, VERSION, os.getpid(), job=f"doctor-{os.getpid()}",
        fresh=True, solo=True, process=secrets.token_bytes(16),
    )  # fmt: skip


def _count() -> int:
    """The GPUs of this process (CUDA_VISIBLE_DEVICES)."""
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def _one(attachment: attach.Attachment, native: _core.Client, device: int) -> Finding:
    name = f"GPU {device}"
    try:
        if reason := native.device_open(device):
            return warning("gpu pull", f"{name}: {reason}", effect=_PUSHED, fix=_FIX)
        address = native.staging(device, NBYTES)
        data = native.expose(struct.pack("<QQQII", address, 0, NBYTES, device, 0), NBYTES)
        _send(attachment, device + 1, data)
    except (_core.NativeError, MemoryError, OSError, PccheckError) as error:
        reason = error.message if isinstance(error, PccheckError) else str(error)
        return warning("gpu pull", f"{name}: {reason}", effect=_PUSHED, fix=_FIX)
    return ok("gpu pull", f"{name}: the daemon maps and reads memory of this user")


def _send(attachment: attach.Attachment, number: int, data: bytes) -> None:
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    attachment.request(Expose(number, pieces))
