"""Checks whether the daemon can copy GPU tensors by itself (pull)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

from pccheckctl.output import render
from pccheckctl.output.documents import Document, part, text

from .finding import Finding, ok, problem, warning

DEVICES = Path("/dev")
_PUSHED = "the training process copies its GPU tensors itself, which takes its CPU time"


def cuda(status: Document) -> Iterator[Finding]:
    """Loads the driver, and makes nothing on a GPU."""
    devices = sorted(path.name for path in DEVICES.glob("nvidia[0-9]*"))
    if not has_driver():
        if devices:
            yield warning(
                "cuda", f"found {', '.join(devices)}, but no driver (libcuda.so.1)",
                effect="neither training nor pccheckd can use the GPUs",
                fix="install the driver; in a container, pass it in (nvidia runtime)",
            )  # fmt: skip
        else:
            yield ok("cuda", "no GPU and no driver (libcuda.so.1): only CPU tensors are saved")
        return
    daemon = part(status, "daemon")
    reason = text(daemon, "transfer_reason")
    if not daemon:
        yield ok("cuda", f"driver found, {render.plural(len(devices), 'GPU')}; no daemon to check")
        return
    if text(daemon, "transfer") != "pull":
        lacking = [n for n in ("nvidiactl", "nvidia-uvm") if not (DEVICES / n).exists()]
        missing = "".join(f"; {DEVICES / name} is missing" for name in lacking)
        yield warning(
            "cuda", f"pccheckd does not pull: {reason or 'it gives no reason'}{missing}",
            effect=_PUSHED,
            fix="nvidia-modprobe -c 0 -u, as root" if lacking
            else "give pccheckd access to the driver and to /dev/nvidia*; it tries again by itself",
        )  # fmt: skip
    else:
        yield ok("cuda", f"pccheckd pulls: {reason}")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def held() -> Iterator[Finding]:
    """Lets processes go on that a killed snapshot left in the driver."""
    from pccheck_process import gpu

    check = "gpu snapshots"
    for pid in gpu.held_now():
        yield warning(
            check, f"process {pid} is held in the NVIDIA driver",
            effect="it waits in its next CUDA call until its snapshot ends",
            fix="wait: a snapshot is under way, or its guard lets the process go on",
        )  # fmt: skip
    going, troubles = gpu.recover()
    for pid in going:
        yield ok(check, f"process {pid}, which a killed snapshot had left in the driver, goes on")
    for error in troubles:
        yield problem(check, error.message, effect="the process stands still", fix=error.hint)
