"""The stand-in CUDA driver for tests (tests/standin): builds it, loads it, and injects faults.

A process with "GPUs" is started with `environment(...)`. A process that runs already (a forked
trainer) calls `load()` before libcuda.so.1 is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from tests.standin.behaviours import Driver

from .daemon import Daemon

_SOURCE = Path(__file__).parent.parent / "standin"
_WORDS = re.findall(
    r"^    uint64_t (\w+);",
    (_SOURCE / "standin_control.h").read_text(),
    re.MULTILINE,
)
_MAGIC = 0x4C5254434E415453
ALWAYS = 2**64 - 1
TO_HOST, TO_DEVICE, ON_DEVICE = 1, 2, 4
#: Copies to the host, of a few bytes each, that a trainer's stream makes for each checkpoint.
SAMPLES = 32
#: Calls about other processes, for the words that begin with process_.
STATE, LOCK, CHECKPOINT, RESTORE, UNLOCK = 1, 2, 4, 8, 16
SUCCESS, NOT_READY = 0, 600
WAIT_LIMIT_S = 240.0


@functools.cache
def build() -> Path:
    """Builds libcuda.so.1 if its sources are newer; returns its path."""
    subprocess.run(["make", "-s", "-C", str(_SOURCE)], check=True)
    return _SOURCE / "build" / "libcuda.so.1"


def new_directory() -> Path:
    """A directory for the device memory of one test, in DRAM if possible. The caller removes it, or
    the next caller does once this process has been killed: such a directory may hold a GiB."""
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob("pcc-gpu-*-*"):
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=f"pcc-gpu-{os.getpid()}-", dir=parent))
    directory.chmod(0o777)
    return directory


@contextlib.contextmanager
def device_memory() -> Iterator[Path]:
    """As `new_directory`, and removed in the end."""
    made = new_directory()
    try:
        yield made
    finally:
        shutil.rmtree(made)


def environment(
    directory: Path,
    *,
    devices: int = 1,
    visible: str = "",
    dead: str = "scramble",
    faults: Faults | None = None,
    same_uid: bool = False,
    lie: str = "",
    memory_bytes: int = 0,
    context_bytes: int = 0,
    stages: bool = False,
    version: int = 0,
    release: str = "",
) -> dict[str, str]:
    """The variables with which a process finds the stand-in instead of a driver.

    `visible` is as CUDA_VISIBLE_DEVICES. `dead`: the result of copies from a dead
    exporter's memory, "scramble", "error" or "keep". `same_uid`: processes of other users cannot
    open handles. `lie`: a name of tests/standin/lie.c. All processes of a test need the same
    `memory_bytes` (all memory of a device) and `context_bytes` (what a context takes of it).
    `stages`: a checkpointed process has its device memory in its own. `version`: of CUDA, 13000 is
    13.0; `release`: of the driver.
    """
    others = os.environ.get("LD_LIBRARY_PATH", "")
    found = {
        "LD_LIBRARY_PATH": f"{build().parent}{':' if others else ''}{others}",
        "PCCHECK_STANDIN_DIR": str(directory),
        "PCCHECK_STANDIN_DEVICES": str(devices),
        "PCCHECK_STANDIN_DEAD": dead,
        "PCCHECK_STANDIN_UIDS": "same" if same_uid else "",
        "PCCHECK_STANDIN_LIE": lie,
        "PCCHECK_STANDIN_FAULTS": str(faults.path) if faults else "",
    }
    if visible:
        found["PCCHECK_STANDIN_VISIBLE"] = visible
    if memory_bytes:
        found["PCCHECK_STANDIN_MEMORY"] = str(memory_bytes)
    if context_bytes:
        found["PCCHECK_STANDIN_CONTEXT"] = str(context_bytes)
    if version:
        found["PCCHECK_STANDIN_VERSION"] = str(version)
    if release:
        found["PCCHECK_STANDIN_RELEASE"] = release
    if stages:
        found["PCCHECK_STANDIN_STAGES"] = "1"
    return found


class Faults:
    """One process's control file: every word of `struct standin_control` is an attribute.

    >>> faults = Faults(tmp_path / "daemon.faults")
    >>> faults.fail_copy(3, 700)            # its third device-to-host copy from now
    >>> faults.wait_for(lambda f: f.open_mappings == 0)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists() or path.stat().st_size == 0:
            path.write_bytes(_MAGIC.to_bytes(8, "little").ljust(mmap.PAGESIZE, b"\0"))
            path.chmod(0o666)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._words = (ctypes.c_uint64 * len(_WORDS)).from_buffer(self._map)

    def __getattr__(self, name: str) -> int:
        if name not in _WORDS:
            raise AttributeError(name)
        return int(self._words[_WORDS.index(name)])

    def set(self, **words: int) -> None:
        """Written in the order given."""
        for name, value in words.items():
            self._words[_WORDS.index(name)] = value

    def words(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _WORDS[1:]}

    def fail_copy(self, nth: int, code: int, *, kinds: int = TO_HOST, behind: bool = True) -> None:
        """Lets the nth copy from now fail. `behind`: the call succeeds, and a later call in the
        stream fails."""
        self.set(copy_fail_kinds=kinds, copy_fail_code=code, copy_fail_async=int(behind))
        self.set(copy_fail_at=nth)

    def slow_copies(self, us_per_mib: int, *, kinds: int = TO_HOST) -> None:
        self.set(copy_us_per_mib=us_per_mib, copy_slow_kinds=kinds)

    def hold_copies(self, *, after: int = 0, kinds: int = TO_HOST) -> None:
        """Lets all copies after the next `after` wait until release_copies()."""
        self.set(copy_hold_skip=after, copy_hold_kinds=kinds)

    def release_copies(self) -> None:
        self.set(copy_hold_kinds=0, copy_hold_skip=0)

    def fail_open(self, code: int, times: int = ALWAYS) -> None:
        self.set(open_fail_code=code, open_fail_count=times)

    def fail_export(self, code: int, times: int = ALWAYS) -> None:
        self.set(export_fail_code=code, export_fail_count=times)

    def fail_register(self, times: int = ALWAYS) -> None:
        self.set(register_fail_code=2, register_fail_count=times)

    def fail_alloc(self, times: int = ALWAYS) -> None:
        self.set(alloc_fail_count=times)

    def wait_for(self, condition: Callable[[Faults], bool], limit_s: float = WAIT_LIMIT_S) -> Self:
        """Polls until the condition holds; at the deadline raises with all words."""
        until = time.monotonic() + limit_s
        while not condition(self):
            if time.monotonic() > until:
                raise AssertionError(f"it never came to pass: {self.words()}")
            time.sleep(0.001)
        return self


class StandinDaemon(Daemon):
    """A daemon with stand-in GPUs: `gpus` is what `environment()` returned."""

    def __init__(self, *flags: str, gpus: dict[str, str], **options: Any) -> None:
        super().__init__(*flags, **options)
        self.gpus = gpus

    def environment(self) -> dict[str, str]:
        return super().environment() | self.gpus


HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def load() -> Driver:
    """Loads the stand-in into this process: a later dlopen("libcuda.so.1") finds it."""
    return Driver(str(build()))
