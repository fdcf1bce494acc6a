"""The CUDA driver by ctypes, and processes that share it, for the parts of the probe.

Needs libcuda.so.1 and Python's own library. A call that this driver lacks raises NotHereError, and
a call that fails raises RefusedError. A `Peer` is forked before its parent has used CUDA. It runs
functions of the probe in its own process, under another user if asked, and passes descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import resource
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tests.standin.behaviours import Access, Driver, NotHereError, Properties

MIB, GIB = 1 << 20, 1 << 30
CHUNK_BYTES = 16 * MIB  # what the daemon copies at once
NOT_READY = 600
PORTABLE, DEVICE_MAP = 1, 2  # flags of cuMemHostRegister
POSIX_FD = 1  # a CUmemAllocationHandleType
READ_ONLY, READ_WRITE = 1, 3
SILENCE_LIMIT_S = 60.0
FDS_MAX = 250  # of a message

_libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    def __init__(self, call: str, name: str) -> None:
        super().__init__(call, name)  # as pickle hands them back

    def __str__(self) -> str:
        return ": ".join(self.args)


class Cuda(Driver):
    """The driver with the primary context of one GPU current."""

    access = 0  # of the last range that was mapped

    def __init__(self, ordinal: int = 0) -> None:
        try:
            super().__init__()
        except OSError as error:
            raise NotHereError(str(error)) from error
        code = self.code("cuInit", 0)
        if code or not self.out("cuDeviceGetCount") & 0xFFFFFFFF:
            raise NotHereError(f"no GPU: {self.name(code)}")
        self.device = self.out("cuDeviceGet", ordinal) & 0xFFFFFFFF
        self.context = self.out("cuDevicePrimaryCtxRetain", self.device)
        self.enter()

    def enter(self) -> None:
        """For a thread: the context becomes its own."""
        self("cuCtxPushCurrent_v2", self.context)

    def __call__(self, call: str, *arguments: Any) -> None:
        code = self.code(call, *arguments)
        if code:
            raise RefusedError(call, self.name(code))

    def name(self, code: int) -> str:
        text = ctypes.c_char_p()
        known = self.code("cuGetErrorName", code, ctypes.byref(text)) == 0 and text.value
        return known.decode() if known else f"CUDA error {code}"

    def result(self, call: str, *arguments: Any) -> str:
        """How the call ends, as a text."""
        try:
            return self.name(self.code(call, *arguments))
        except NotHereError as error:
            return str(error)

    # -- memory ----------------------------------------------------------------------------------

    def memory(self, length: int) -> int:
        return self.out("cuMemAlloc_v2", length)

    def free_bytes(self) -> int:
        total = ctypes.c_uint64()
        return self.out("cuMemGetInfo_v2", ctypes.byref(total))

    def fill(self, address: int, value: int, length: int, stream: int = 0) -> None:
        self("cuMemsetD32Async", address, value, length // 4, stream)

    def pinned(self, length: int) -> Host:
        host = Host(length)
        self("cuMemHostRegister_v2", host.address, length, PORTABLE)
        return host

    def words(self, host: Host) -> int:
        """Registers a page of words that streams write and wait for; its device address."""
        self("cuMemHostRegister_v2", host.address, len(host), PORTABLE | DEVICE_MAP)
        return self.out("cuMemHostGetDevicePointer_v2", host.address, 0)

    def read(self, address: int, length: int = 4) -> bytes:
        target = ctypes.create_string_buffer(length)
        self("cuMemcpyDtoH_v2", target, address, length)
        return target.raw

    # -- streams ---------------------------------------------------------------------------------

    def stream(self) -> int:
        return self.out("cuStreamCreate", 1)  # non-blocking, as the product's are

    def event(self) -> int:
        return self.out("cuEventCreate", 2)  # without a time

    def to_host(self, host: int, address: int, length: int, stream: int) -> None:
        self("cuMemcpyDtoHAsync_v2", host, address, length, stream)

    def wait(self, stream: int = 0) -> None:
        self("cuStreamSynchronize", stream)

    # -- memory with a descriptor: what torch's expandable segments are ---------------------------

    def properties(self) -> Properties:
        return Properties(1, POSIX_FD, 1, self.device)

    def create(self, length: int) -> int:
        """A handle of `length` bytes, a multiple of the granularity."""
        return self.out("cuMemCreate", length, ctypes.byref(self.properties()), 0)

    def map(self, handles: Sequence[int], length: int, access: int = READ_WRITE) -> int:
        """One range over handles of `length` bytes each; read-only where the driver can do that,
        see `access`."""
        base = self.out("cuMemAddressReserve", length * len(handles), 0, 0, 0)
        for number, handle in enumerate(handles):
            self("cuMemMap", base + number * length, length, 0, handle, 0)
        wanted = Access(1, self.device, access)
        self.access = access
        if self.code("cuMemSetAccess", base, length * len(handles), ctypes.byref(wanted), 1):
            self.access = wanted.flags = READ_WRITE
            self("cuMemSetAccess", base, length * len(handles), ctypes.byref(wanted), 1)
        return base

    def unmap(self, base: int, handles: Sequence[int], length: int) -> None:
        self("cuMemUnmap", base, length * len(handles))
        self("cuMemAddressFree", base, length * len(handles))
        for handle in handles:
            self("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """A descriptor."""
        return self.out("cuMemExportToShareableHandle", handle, POSIX_FD, 0) & 0xFFFFFFFF

    def take(self, descriptor: int) -> int:
        """The handle of a descriptor, which is closed."""
        handle = self.out("cuMemImportFromShareableHandle", ctypes.c_void_p(descriptor), POSIX_FD)
        os.close(descriptor)
        return handle


class Host:
    """Touched memory of this process and of those that it forks later, as the pool's is."""

    def __init__(self, length: int) -> None:
        descriptor = os.memfd_create("probe")
        os.ftruncate(descriptor, length)
        self.map = mmap.mmap(descriptor, length)
        os.close(descriptor)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        ctypes.memset(self.address, 0, length)

    def __len__(self) -> int:
        return len(self.map)

    def word(self, number: int) -> ctypes.c_uint64:
        """A word in a cache line of its own."""
        return ctypes.c_uint64.from_buffer(self.map, 64 * number)

    def holds(self, value: int, length: int) -> bool:
        """Whether each of the first words of 32 bits has this value."""
        first = ctypes.c_uint32.from_address(self.address).value
        rest = ctypes.c_void_p(self.address + 4)
        same = _libc.memcmp(ctypes.c_void_p(self.address), rest, ctypes.c_size_t(length - 4))
        return first == value and same == 0


class Copies:
    """Copies device memory to the host over and over from a thread, with `ahead` chunks under way,
    as the daemon (pull) or the client (push) does; `stop` returns GB/s."""

    def __init__(self, cuda: Cuda, source: int, length: int, ahead: int) -> None:
        self.cuda, self.source, self.length, self.ahead = cuda, source, length, ahead
        self.host = cuda.pinned(4 * CHUNK_BYTES)
        self.done_bytes, self.stopping = 0, False
        self.start_s = time.monotonic()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.cuda.enter()
        stream, events = self.cuda.stream(), [self.cuda.event() for _ in range(self.ahead)]
        chunks = self.length // CHUNK_BYTES
        number = 0
        while not self.stopping:
            event = events[number % self.ahead]
            if number >= self.ahead:
                self.cuda("cuEventSynchronize", event)
                self.done_bytes += CHUNK_BYTES
            at = number % chunks * CHUNK_BYTES
            target = self.host.address + number % 4 * CHUNK_BYTES
            self.cuda.to_host(target, self.source + at, CHUNK_BYTES, stream)
            self.cuda("cuEventRecord", event, stream)
            number += 1
        self.took_s = time.monotonic() - self.start_s
        self.cuda.wait(stream)

    def stop(self) -> float:
        self.stopping = True
        self.thread.join()
        self.cuda("cuMemHostUnregister", self.host.address)
        return self.done_bytes / self.took_s / 1e9


# -- other processes -------------------------------------------------------------------------------


class Peer:
    """A child that runs functions: `peer(function, *arguments)` returns what the function returns,
    or raises what the function has raised. Descriptors are passed as the keyword `fds`; a function
    that returns descriptors returns `Fds`."""

    def __init__(self, uid: int | None = None, environment: dict[str, str] | None = None) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(SILENCE_LIMIT_S)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            os.environ.update(environment or {})
            _serve(theirs, uid, parent)
        theirs.close()

    def tell(self, function: Callable[..., Any], *arguments: Any, fds: Sequence[int] = ()) -> None:
        message = pickle.dumps((function, arguments))
        socket.send_fds(self.socket, [message], list(fds))

    def hear(self) -> Any:
        """The answer; with descriptors (value, descriptors)."""
        message, fds, _, _ = socket.recv_fds(self.socket, 1 << 18, FDS_MAX)
        if not message:
            raise RefusedError("a peer", "has ended")
        value = pickle.loads(message)
        if isinstance(value, Exception):
            raise value
        return (value, list(fds)) if fds else value

    def __call__(
        self, function: Callable[..., Any], *arguments: Any, fds: Sequence[int] = ()
    ) -> Any:
        self.tell(function, *arguments, fds=fds)
        return self.hear()

    def kill(self) -> float:
        """SIGKILL; seconds until the process was gone."""
        start_s = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.socket.close()
        return time.monotonic() - start_s

    def end(self) -> None:
        """Lets it end, as a trainer does; a process that hangs is killed by its alarm."""
        self.socket.shutdown(socket.SHUT_RDWR)  # later peers have inherited this end
        self.socket.close()
        os.waitpid(self.pid, 0)


class Fds(list[int]):
    """Descriptors that a function returns."""


def _serve(channel: socket.socket, uid: int | None, parent: int) -> None:
    code = 1
    try:
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which another uid would clear
        if os.getppid() == parent:
            signal.alarm(120)
            _answer(channel)
            code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _answer(channel: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 18, FDS_MAX)
        if not message:
            return
        function, arguments = pickle.loads(message)
        found: Any
        try:
            found = function(*arguments, *([list(fds)] if fds else []))
        except NotHereError as error:
            found = error
        except Exception as error:
            found = RefusedError(function.__name__, f"{type(error).__name__}: {error}")
        sent = found if isinstance(found, Fds) else ()
        socket.send_fds(channel, [pickle.dumps(len(sent) if sent else found)], list(sent))
        for descriptor in sent:
            os.close(descriptor)


def more_descriptors() -> None:
    """As many as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1 << 16), most))
