"""The CUDA driver's checkpoints of other processes: found by dlopen, asked with limits, and its
answers in words. Names and layouts are those of NVIDIA's cuda.h.

The driver is started once in a process (cuInit takes seconds on large machines). Every call runs in
a thread of its own: a call that never returns is given up, and takes nobody with it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pccheck_wire.errors import DeviceError, RefusedError, WaitTimeoutError

from . import nvml

LIBRARY = "libcuda.so.1"
#: The oldest release with these calls, and the oldest CUDA version that takes a map of GPUs.
LEAST_RELEASE, LEAST_MAP_VERSION = "570", 13000
LEAST_HINT = f"install an NVIDIA driver of release {LEAST_RELEASE} or newer"
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
STATES = (
    "running", "locked", "checkpointed", "failed", "being checkpointed", "being restored",
)  # fmt: skip
SUCCESS, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 0, 2, 3, 100
OPERATING_SYSTEM, ILLEGAL_STATE, NOT_READY = 304, 401, 600
NOT_PERMITTED, NOT_SUPPORTED = 800, 801
DOCTOR_HINT = "a guard goes on trying to let it go on; pccheckctl doctor tells"
_LIBRARY_WAY = "or save with PCcheckClient, which needs none of this"
NVML_LIMIT_S = 60.0
_LOOK_S = 0.05
_SYMBOLS = (
    "cuCheckpointProcessGetState", "cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock",
)  # fmt: skip


def state_name(state: int) -> str:
    return STATES[state] if 0 <= state < len(STATES) else f"in state {state}"


class LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class RestoreArguments(ctypes.Structure):
    """CUcheckpointRestoreArgs of CUDA 13; zeros before."""

    _fields_ = (
        ("pairs", ctypes.POINTER(GpuPair)),
        ("count", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("reserved", ctypes.c_uint64 * 6),
    )


@dataclass(frozen=True)
class CallLimits:
    """In seconds. Each is above the driver's own: who gives up first must be the driver, which then
    leaves the process as it was."""

    init_s: float = 60.0
    lock_s: float = 10.0  #: the driver's own limit
    lock_margin_s: float = 5.0
    move_s: float = 60.0  #: to move nothing; more with the bytes:
    bytes_per_s: float = 0.5e9  #: the slowest that was seen moved twice as much
    room_s: float = 60.0  #: for other processes to leave the GPU
    settle_s: float = 30.0  #: for calls that were given up

    def to_move(self, nbytes: int) -> float:
        return self.move_s + nbytes / self.bytes_per_s


class CudaCheckpoints:
    """The driver in this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises RefusedError, without starting anything."""
        self._library = library
        self.version = self._version()
        missing = [name for name in _SYMBOLS if not hasattr(library, name)]
        if missing:
            version = f"{self.version // 1000}.{self.version % 1000 // 10}"
            raise RefusedError(
                f"the NVIDIA driver (CUDA {version}) cannot checkpoint processes", hint=LEAST_HINT
            )
        self._started = False

    @property
    def takes_map(self) -> bool:
        return self.version >= LEAST_MAP_VERSION

    def _version(self) -> int:
        number = ctypes.c_int()
        self._library.cuDriverGetVersion(ctypes.byref(number))
        return number.value

    def start(self, asking: Asking) -> None:
        """Raises DeviceError, and WaitTimeoutError."""
        if self._started:
            return
        with _all_gpus_visible():
            code = asking.answer("cuInit", asking.limits.init_s, self._library.cuInit, 0)
        if code != SUCCESS:
            raise DeviceError(f"the NVIDIA driver does not start: {self.name(code)}")
        self._started = True

    def name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return f"{(text.value or b'error').decode()} ({code})"

    def function(self, name: str) -> Callable[..., int]:
        found: Callable[..., int] = getattr(self._library, name)
        return found


@contextlib.contextmanager
def _all_gpus_visible() -> Iterator[None]:
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


@functools.cache
def load() -> CudaCheckpoints:
    """Raises RefusedError when this machine has no driver that can do it."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RefusedError(f"{LIBRARY} cannot be loaded here", hint=LEAST_HINT) from error
    return CudaCheckpoints(library)


def answer_within(
    what: str, limit_s: float, lives: Callable[[], None], function: Callable[..., Any], *given: Any
) -> Any:
    """What the function returns. Raises WaitTimeoutError when it has not returned in time; its
    thread then stays."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: answers.put(function(*given)), daemon=True)
    thread.start()
    deadline_s = time.monotonic() + limit_s
    while True:
        lives()
        left_s = deadline_s - time.monotonic()
        try:
            return answers.get(timeout=max(0.0, min(_LOOK_S, left_s)))
        except queue.Empty:
            if left_s <= 0:
                raise UnansweredError(what, limit_s, thread) from None


class UnansweredError(WaitTimeoutError):
    """A call goes on in its thread, and may still succeed."""

    def __init__(self, what: str, limit_s: float, thread: threading.Thread) -> None:
        text = f"the NVIDIA driver has not answered {what} within {limit_s:g} s"
        super().__init__(text, hint=DOCTOR_HINT)
        self.thread = thread


def watched_devices(lives: Callable[[], None] = lambda: None) -> list[nvml.GpuDevice]:
    """The GPUs by NVML, which asks the driver. Raises WaitTimeoutError."""
    found: list[nvml.GpuDevice] = answer_within("NVML", NVML_LIMIT_S, lives, nvml.devices)
    return found


class Asking:
    """Calls of one request, each with its limit. `lives` is called while one waits."""

    def __init__(
        self, driver: CudaCheckpoints, limits: CallLimits, lives: Callable[[], None] = lambda: None
    ) -> None:
        self.driver, self.limits, self._lives = driver, limits, lives
        self._unanswered: list[threading.Thread] = []

    def answer(self, what: str, limit_s: float, function: Callable[..., Any], *given: Any) -> Any:
        """What the function returns. Raises UnansweredError when it has not returned in time."""
        try:
            return answer_within(what, limit_s, self._lives, function, *given)
        except UnansweredError as error:
            self._unanswered.append(error.thread)
            raise

    def settle(self) -> bool:
        """Waits once more for calls that were given up: what they do must be undone, too. Whether
        none is left."""
        until_s = time.monotonic() + self.limits.settle_s
        while any(one.is_alive() for one in self._unanswered) and self.wait(until_s):
            pass
        return not any(one.is_alive() for one in self._unanswered)

    def devices(self) -> list[nvml.GpuDevice]:
        """Raises WaitTimeoutError."""
        return watched_devices(self._lives)

    def wait(self, until_s: float) -> bool:
        """For a moment; False once it is later than `until_s`."""
        self._lives()
        time.sleep(_LOOK_S)
        return time.monotonic() < until_s

    def state_code(self, pid: int, nbytes: int = 0) -> tuple[int, int]:
        """(code, state). The driver answers after what it is doing with the process."""
        state = ctypes.c_int(-1)
        call = "cuCheckpointProcessGetState"
        limit_s = self.limits.to_move(nbytes)
        code = self._code(call, pid, limit_s, ctypes.byref(state))
        return code, state.value

    def state(self, pid: int, nbytes: int = 0) -> int:
        """Raises DeviceError."""
        code, state = self.state_code(pid, nbytes)
        if code != SUCCESS:
            raise self._error("tell the state of", pid, code)
        return state

    def lock(self, pid: int) -> None:
        """Raises DeviceError; the process then runs as before, as far as the driver can tell."""
        given = LockArguments(timeout_ms=max(1, int(self.limits.lock_s * 1000)))
        limit_s = self.limits.lock_s + self.limits.lock_margin_s
        code = self._code("cuCheckpointProcessLock", pid, limit_s, ctypes.byref(given))
        if code == NOT_READY:
            raise DeviceError(
                f"process {pid} was busy on its GPU for more than {self.limits.lock_s:g} s",
                hint="try again later: a kernel, or a copy, takes longer than that",
                retryable=True,
            )
        if code != SUCCESS:
            raise self._error("lock", pid, code)

    def checkpoint(self, pid: int, nbytes: int) -> None:
        """Raises DeviceError."""
        limit_s = self.limits.to_move(nbytes)
        code = self._code("cuCheckpointProcessCheckpoint", pid, limit_s, None)
        if code == NOT_SUPPORTED:
            raise DeviceError(
                f"the driver cannot checkpoint process {pid}: it shares GPU memory with other "
                "processes (CUDA IPC), or uses managed memory (UVM)",
                hint=f"start it without that, {_LIBRARY_WAY}",
            )
        if code != SUCCESS:
            raise self._error("checkpoint", pid, code)

    def restore(self, pid: int, nbytes: int, pairs: Sequence[tuple[str, str]]) -> None:
        """`pairs`: old and new UUID of every GPU; without any the driver chooses the old ones.
        Raises DeviceError."""
        array = (GpuPair * len(pairs))(*(GpuPair(*map(_uuid_bytes, pair)) for pair in pairs))
        given = ctypes.byref(RestoreArguments(array, len(pairs))) if pairs else None
        limit_s = self.limits.to_move(nbytes)
        code = self._code("cuCheckpointProcessRestore", pid, limit_s, given)
        if code == OUT_OF_MEMORY:
            raise DeviceError(
                f"a GPU has too little free memory for process {pid}, which no driver of today "
                "restores after that",
                hint="end the process, and restore it from its newest snapshot",
            )
        if code != SUCCESS:
            raise self._error("restore", pid, code)

    def unlock(self, pid: int) -> None:
        """Raises DeviceError."""
        code = self._code("cuCheckpointProcessUnlock", pid, self.limits.to_move(0), None)
        if code != SUCCESS:
            raise self._error("unlock", pid, code)

    def _code(self, call: str, pid: int, limit_s: float, *given: Any) -> int:
        what = f"{call} of process {pid}"
        code: int = self.answer(what, limit_s, self.driver.function(call), pid, *given)
        return code

    def _error(self, verb: str, pid: int, code: int) -> DeviceError:
        text = f"the driver could not {verb} process {pid}: {self.driver.name(code)}"
        if code == ILLEGAL_STATE:
            return DeviceError(text, hint="another program checkpoints it at the same time")
        if code == NOT_PERMITTED:
            return DeviceError(text, hint="ask as the user of that process")
        if code in (OPERATING_SYSTEM, NOT_INITIALIZED):
            return DeviceError(text, hint="it has ended, or no longer uses CUDA")
        return DeviceError(text, hint=f"see the kernel's log (dmesg), {_LIBRARY_WAY}")


def _uuid_bytes(text: str) -> Any:
    """Of "GPU-1234abcd-..."."""
    return (ctypes.c_ubyte * 16)(*bytes.fromhex(text.partition("-")[2].replace("-", "")))
