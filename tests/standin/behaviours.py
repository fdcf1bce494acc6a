"""What PCcheck believes of CUDA's driver: every belief is a sentence and a check.

    python tests/standin/behaviours.py [--json FILE] [--only NAME]... [--limit-s 60]

The driver is whatever libcuda.so.1 the loader finds: a card's, or the stand-in's with the variables
of tests/support/standin.py. One line per belief says "holds", "FALSE" with what was seen, or
"skipped" with the reason, always in the same order: the lines of a card and of the stand-in can be
compared. The exit code is 1 if a belief is false. Needs Linux and Python's own library only; takes
2 s on the stand-in, and on a card the time of some twelve contexts. Root also tries other users.

Each check plays with processes of its own: they are forked before CUDA is touched, obey one command
at a time, and end with this process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NoReturn

PAGE = 4096
MIB = 1 << 20
BLOCK = 2 * MIB  #: what the driver gives out memory in
SIZE = 4 * MIB
UIDS = (64001, 64002)  #: users that nobody has
ANSWER_LIMIT_S = 20.0
SUCCESS, INVALID_VALUE, NOT_READY = 0, 1, 600
INVALID_CONTEXT, ILLEGAL_STATE = 201, 401
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
BUFFER_ID, IPC_CAPABLE = 7, 10
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
NOT_INITIALIZED, OPERATING_SYSTEM = 3, 304
MAP_VERSION = 13000
READ, READ_WRITE = 1, 3


class NotHereError(Exception):
    """The belief cannot be tried here."""


class DriverError(AssertionError):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)

    def __bytes__(self) -> bytes:
        return ctypes.string_at(ctypes.addressof(self), 64)


class Properties(ctypes.Structure):
    """CUmemAllocationProp of pinned memory on device 0."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("type", "handle_types", "where", "device"))
    _fields_ += (("unused", ctypes.c_uint64 * 2),)


class Access(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("where", "device", "flags"))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the source is read in the order of the stream by default."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class Driver:
    """The driver in this process. `cuda.code("cuInit", 0)` returns the result code, and
    `cuda("cuInit", 0)` raises it; `out(...)` returns the value of a first parameter that is an
    out-pointer.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self.library = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self._contexts: dict[int, int] = {}

    def code(self, call: str, *arguments: Any) -> int:
        """Integers are passed with 64 bits, which also suits parameters with fewer."""
        try:
            function = getattr(self.library, call)
        except AttributeError:
            raise NotHereError(f"this driver has no {call}") from None
        return int(function(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments)))

    def __call__(self, call: str, *arguments: Any) -> None:
        code = self.code(call, *arguments)
        if code != SUCCESS:
            raise DriverError(call, code)

    def out(self, call: str, *arguments: Any) -> int:
        """Calls a function whose first parameter is an out-pointer; returns its value."""
        value = ctypes.c_uint64()
        self(call, ctypes.byref(value), *arguments)
        return value.value

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Makes the primary context of the device current; it stays retained."""
        if device not in self._contexts:
            self("cuInit", 0)
            self._contexts[device] = self.out("cuDevicePrimaryCtxRetain", device)
        self("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self.code("cuCtxPopCurrent_v2", None)


# -- processes -----------------------------------------------------------------------------------


class Peer:
    """A process with a context on device 0. `peer(function, ...)` calls function(cuda, ...) there;
    an answer or a last argument of type Descriptor travels as a descriptor."""

    def __init__(self, page: mmap.mmap, uid: int = 0) -> None:
        self._link, theirs = multiprocessing.get_context("fork").Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _serve(theirs, page, uid)
        theirs.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        _send(self._link, function, *arguments)

    def answers(self, limit_s: float = 0.0) -> bool:
        return bool(self._link.poll(limit_s or _held_s))

    def answer(self) -> Any:
        assert self.answers(ANSWER_LIMIT_S), "the driver hangs"
        kind, answer = _receive(self._link)
        if kind is not None:
            raise kind(answer)
        return answer

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.answer()

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            until = time.monotonic() + ANSWER_LIMIT_S  # a process may hang in the kernel's driver
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                time.sleep(0.001)
            self._link.close()
        self.pid = 0


class Descriptor(int):
    """A file descriptor on its way to another process."""


def _send(link: Any, *message: Any) -> None:
    link.send(message)
    if isinstance(message[-1], Descriptor):
        reduction.send_handle(link, message[-1], None)


def _receive(link: Any) -> tuple[Any, ...]:
    message: tuple[Any, ...] = link.recv()
    if isinstance(message[-1], Descriptor):
        return (*message[:-1], Descriptor(reduction.recv_handle(link)))
    return message


_page: mmap.mmap  # words that all processes share
_held_s = 0.05  # for so long, what must wait is watched


def _serve(link: Any, page: mmap.mmap, uid: int) -> NoReturn:
    global _page
    _page = page
    cuda = Driver()
    if uid:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its parent
    try:
        while True:
            function, *arguments = _receive(link)
            try:
                with cuda.on(0):
                    _send(link, None, function(cuda, *arguments))
            except NotHereError as reason:
                _send(link, NotHereError, str(reason))
            except Exception as error:
                _send(link, AssertionError, str(error) or repr(error))
    finally:
        os._exit(0)


class World:
    """The processes of the checks: an owner of memory, a reader, and others on demand."""

    def __init__(self) -> None:
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = 0
        self._peers: dict[str, Peer] = {}

    def __getattr__(self, name: str) -> Peer:
        return self._peer(name, 0)

    def user(self, uid: int) -> Peer:
        if os.geteuid() != 0:
            raise NotHereError("not root")
        return self._peer(f"user {uid}", uid)

    def _peer(self, name: str, uid: int) -> Peer:
        if name not in self._peers:
            self._peers[name] = Peer(self.page, uid)
        return self._peers[name]

    def word(self) -> int:
        """The number of a word of the page that is 0."""
        self._words = (self._words + 1) % (mmap.PAGESIZE // 8)
        self.store(self._words, 0)
        return self._words

    def store(self, word: int, value: int) -> None:
        self.page[8 * word : 8 * word + 8] = value.to_bytes(8, sys.byteorder)

    def sees(self, word: int, number: int, limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while self.page[8 * word : 8 * word + 8] != number.to_bytes(8, sys.byteorder):
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def end(self, *names: str) -> None:
        for name in names or tuple(self._peers):
            self._peers.pop(name).kill()


# -- what peers do -------------------------------------------------------------------------------


def code(cuda: Driver, call: str, *arguments: Any) -> int:
    return cuda.code(call, *arguments)


def value(cuda: Driver, call: str, *arguments: Any) -> int:
    return cuda.out(call, *arguments)


def stream(cuda: Driver, flags: int = 1) -> int:
    return cuda.out("cuStreamCreate", flags)


def event(cuda: Driver) -> int:
    return cuda.out("cuEventCreate", 2)


def pattern(seed: int, length: int) -> bytes:
    """No part of it is repeated after 4 KiB, and no two seeds have the same byte anywhere."""
    period = bytes((i + seed) % 251 for i in range(251))
    return (period * (length // 251 + 1))[:length]


def write(cuda: Driver, address: int, seed: int, length: int = SIZE) -> None:
    cuda("cuMemcpyHtoD_v2", address, pattern(seed, length), length)


def allocate(cuda: Driver, seed: int, length: int = SIZE) -> int:
    address = cuda.out("cuMemAlloc_v2", length)
    write(cuda, address, seed, length)
    return address


def free(cuda: Driver, *addresses: int) -> None:
    for address in addresses:
        cuda("cuMemFree_v2", address)


def differs(have: bytes, seed: int) -> str:
    """Where bytes are not the pattern's; "" if they are."""
    wanted = pattern(seed, len(have))
    pages = range(0, len(have), PAGE)
    wrong = [at for at in pages if have[at : at + PAGE] != wanted[at : at + PAGE]]
    return (
        f"{len(wrong)} of {len(pages)} pages are wrong, first at byte {wrong[0]}" if wrong else ""
    )


def check(cuda: Driver, address: int, seed: int, length: int = SIZE) -> str:
    """As `differs`, for device memory."""
    host = ctypes.create_string_buffer(length)
    cuda("cuMemcpyDtoH_v2", host, address, length)
    return differs(host.raw, seed)


def first_byte(cuda: Driver, address: int) -> int:
    """Read on a stream that waits for no other."""
    host = ctypes.c_ubyte()
    idle = stream(cuda)
    cuda("cuMemcpyDtoHAsync_v2", ctypes.byref(host), address, 1, idle)
    cuda("cuStreamSynchronize", idle)
    return host.value


def fill(cuda: Driver, address: int, byte: int, on: int | None, length: int = SIZE) -> None:
    cuda("cuMemsetD8Async", address, byte, length, on)


_registered: dict[str, int] = {}  # addresses
_kept: list[Any] = []  # what must not be freed


def registered(cuda: Driver, length: int = SIZE) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, length)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _kept.append(memory)
    cuda("cuMemHostRegister_v2", address, length, 3)
    return memory, address


def word_address(cuda: Driver, word: int) -> int:
    if "page" not in _registered:
        host = ctypes.addressof(ctypes.c_char.from_buffer(_page))
        cuda("cuMemHostRegister_v2", host, mmap.PAGESIZE, 3)
        _registered["page"] = cuda.out("cuMemHostGetDevicePointer_v2", host, 0)
    return _registered["page"] + 8 * word


def hold(cuda: Driver, on: int, word: int, least: int = 1) -> None:
    """Holds the stream until the word is that large."""
    cuda("cuStreamWaitValue64_v2", on, word_address(cuda, word), least, 0)


def held(cuda: Driver, word: int, flags: int = 1) -> int:
    made = stream(cuda, flags)
    hold(cuda, made, word)
    return made


def tell(cuda: Driver, on: int, word: int, number: int) -> None:
    cuda("cuStreamWriteValue64_v2", on, word_address(cuda, word), number, 0)


def stays(cuda: Driver, wanted: int, call: str, *arguments: Any) -> None:
    """Asserts that a query returns this code for a while."""
    until = time.monotonic() + _held_s
    while time.monotonic() < until:
        found = cuda.code(call, *arguments)
        assert found == wanted, f"{call} returned {found}, not {wanted}"
        time.sleep(0.002)


def export(cuda: Driver, address: int) -> bytes:
    handle = IpcHandle()
    cuda("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle)


def open_code(cuda: Driver, handle: bytes) -> tuple[int, int]:
    address = ctypes.c_uint64()
    found = cuda.code(
        "cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(handle), 1
    )
    return found, address.value


def open_memory(cuda: Driver, handle: bytes) -> int:
    found, address = open_code(cuda, handle)
    assert found == SUCCESS, f"cuIpcOpenMemHandle: {found}"
    return address


def close(cuda: Driver, *addresses: int) -> None:
    for address in addresses:
        cuda("cuIpcCloseMemHandle", address)


def range_of(cuda: Driver, address: int) -> tuple[int, int]:
    length = ctypes.c_uint64()
    base = cuda.out("cuMemGetAddressRange_v2", ctypes.byref(length), address)
    return base, length.value


def number_of(cuda: Driver, address: int) -> int:
    return cuda.out("cuPointerGetAttribute", BUFFER_ID, address)


def ipc_capable(cuda: Driver, address: int) -> int:
    return cuda.out("cuPointerGetAttribute", IPC_CAPABLE, address) & 1


def free_bytes(cuda: Driver) -> int:
    return cuda.out("cuMemGetInfo_v2", ctypes.byref(ctypes.c_uint64()))


def properties(handle_types: int = 1) -> Properties:
    return Properties(1, handle_types, 1, 0)


def create(cuda: Driver, length: int = SIZE, handle_types: int = 1) -> int:
    return cuda.out("cuMemCreate", length, ctypes.byref(properties(handle_types)), 0)


def map_at(cuda: Driver, address: int, handle: int, flags: int, length: int = SIZE) -> None:
    cuda("cuMemMap", address, length, 0, handle, 0)
    if flags:
        cuda("cuMemSetAccess", address, length, ctypes.byref(Access(1, 0, flags)), 1)


def virtual(cuda: Driver, seed: int, handle_types: int = 1) -> tuple[int, int]:
    """(handle, address) of virtual memory with the pattern in it."""
    handle = create(cuda, SIZE, handle_types)
    address = cuda.out("cuMemAddressReserve", SIZE, 0, 0, 0)
    map_at(cuda, address, handle, READ_WRITE)
    write(cuda, address, seed)
    return handle, address


def give(cuda: Driver, handle: int) -> Descriptor:
    number = ctypes.c_int()
    cuda("cuMemExportToShareableHandle", ctypes.byref(number), handle, 1, 0)
    return Descriptor(number.value)


def take(cuda: Driver, flags: int, descriptor: Descriptor) -> tuple[int, int]:
    """(handle, address)"""
    handle = cuda.out("cuMemImportFromShareableHandle", int(descriptor), 1)
    os.close(descriptor)
    address = cuda.out("cuMemAddressReserve", SIZE, 0, 0, 0)
    map_at(cuda, address, handle, flags)
    return handle, address


def drop(cuda: Driver, handle: int, address: int) -> None:
    cuda("cuMemUnmap", address, SIZE)
    cuda("cuMemAddressFree", address, SIZE)
    if handle:
        cuda("cuMemRelease", handle)


def lock_code(cuda: Driver, pid: int, timeout_ms: int) -> int:
    arguments = (ctypes.c_uint32 * 16)(timeout_ms)
    return cuda.code("cuCheckpointProcessLock", pid, arguments)


def state(cuda: Driver, pid: int) -> int:
    found = ctypes.c_int()
    cuda("cuCheckpointProcessGetState", pid, ctypes.byref(found))
    return found.value


def state_code(cuda: Driver, pid: int) -> int:
    return cuda.code("cuCheckpointProcessGetState", pid, ctypes.byref(ctypes.c_int()))


def restore_code(cuda: Driver, pid: int, old: bytes, new: bytes) -> int:
    """With a map of one device."""
    if cuda.out("cuDriverGetVersion") & 0xFFFFFFFF < MAP_VERSION:
        raise NotHereError("this driver takes no map of devices")
    pairs = ctypes.create_string_buffer(old + new, 2 * len(old))
    arguments = (ctypes.c_uint64 * 8)(ctypes.addressof(pairs), 1)
    return cuda.code("cuCheckpointProcessRestore", pid, arguments)


def uuid(cuda: Driver) -> bytes:
    found = ctypes.create_string_buffer(16)
    cuda("cuDeviceGetUuid_v2", found, 0)
    return found.raw


# -- beliefs: copies, streams, events, words -----------------------------------------------------


def copies_are_whole(world: World) -> None:
    """A copy to the device, on it and to the host moves every byte."""
    world.owner(_copies_are_whole)


def _copies_are_whole(cuda: Driver) -> None:
    length = SIZE - 123
    source, target = (registered(cuda) for _ in range(2))
    first, second = (cuda.out("cuMemAlloc_v2", SIZE) for _ in range(2))
    source[0][:length] = pattern(7, length)
    on = stream(cuda)
    cuda("cuMemcpyHtoDAsync_v2", first, source[1], length, on)
    cuda("cuMemcpyDtoDAsync_v2", second, first, length, on)
    cuda("cuMemcpyDtoHAsync_v2", target[1], second, length, on)
    cuda("cuStreamSynchronize", on)
    wrong = differs(target[0][:length], 7)
    free(cuda, first, second)
    assert not wrong, wrong


def a_copy_has_arrived_when_its_event_is_done(world: World) -> None:
    """A copy to the host is there, to the last byte, once the event behind it is done."""
    world.owner(_arrives)


def _arrives(cuda: Driver) -> None:
    address = allocate(cuda, 9)
    memory, host = registered(cuda)
    on, done = stream(cuda), event(cuda)
    cuda("cuMemcpyDtoHAsync_v2", host, address, SIZE, on)
    cuda("cuEventRecord", done, on)
    while cuda.code("cuEventQuery", done) == NOT_READY:
        pass
    last = memory[-PAGE:]
    free(cuda, address)
    assert last == pattern(9, SIZE)[-PAGE:], "its last bytes come later"


def an_event_is_not_done_before_its_stream_is(world: World) -> None:
    """An event is done when all work before it in its stream is, and not before."""
    word, done = world.word(), world.owner(event)
    on = world.owner(held, word)
    assert world.owner(code, "cuEventRecord", done, on) == SUCCESS
    world.owner(stays, NOT_READY, "cuEventQuery", done)
    world.store(word, 1)
    assert world.owner(code, "cuStreamSynchronize", on) == SUCCESS
    assert world.owner(code, "cuEventQuery", done) == SUCCESS


def a_stream_is_busy_until_its_work_is_done(world: World) -> None:
    """A stream's query says "not ready" and its synchronization waits, as long as it works."""
    word = world.word()
    on = world.owner(held, word)
    world.owner(stays, NOT_READY, "cuStreamQuery", on)
    world.owner.start(code, "cuStreamSynchronize", on)
    assert not world.owner.answers(), "cuStreamSynchronize returned"
    world.store(word, 1)
    assert world.owner.answer() == SUCCESS
    assert world.owner(code, "cuStreamQuery", on) == SUCCESS


def a_stream_waits_for_a_word(world: World) -> None:
    """A stream waits until a word is as large as asked, and a CPU of any process may write it."""
    word, on, memory = world.word(), world.owner(stream), world.owner(allocate, 1)
    world.owner(hold, on, word, 5)
    world.owner(fill, memory, 200, on)
    world.store(word, 4)
    world.owner(stays, NOT_READY, "cuStreamQuery", on)
    assert world.owner(first_byte, memory) == 1, "it went on"
    world.store(word, 6)
    assert world.owner(code, "cuStreamSynchronize", on) == SUCCESS
    assert world.owner(first_byte, memory) == 200
    world.owner(free, memory)


def a_word_is_written_after_what_is_before_it(world: World) -> None:
    """What a stream did before it writes a word is there for other processes that see the word."""
    word, told = world.word(), world.word()
    memory = world.owner(allocate, 1)
    opened = world.reader(open_memory, world.owner(export, memory))
    on = world.owner(held, word)
    world.owner(fill, memory, 200, on)
    world.owner(tell, on, told, 9)
    assert not world.sees(told, 9, _held_s), "the word came early"
    world.store(word, 1)
    assert world.sees(told, 9, ANSWER_LIMIT_S), "the word never came"
    assert world.reader(first_byte, opened + SIZE - 1) == 200, "the bytes came later"
    world.reader(close, opened)
    world.owner(free, memory)


def a_stream_waits_for_an_event(world: World) -> None:
    """A stream that waits for an event does nothing before the event is done."""
    word, done = world.word(), world.owner(event)
    first, second = world.owner(held, word), world.owner(stream)
    memory = world.owner(allocate, 1)
    assert world.owner(code, "cuEventRecord", done, first) == SUCCESS
    assert world.owner(code, "cuStreamWaitEvent", second, done, 0) == SUCCESS
    world.owner(fill, memory, 200, second)
    world.owner(stays, NOT_READY, "cuStreamQuery", second)
    assert world.owner(first_byte, memory) == 1, "it went on"
    world.store(word, 1)
    assert world.owner(code, "cuStreamSynchronize", second) == SUCCESS
    assert world.owner(first_byte, memory) == 200
    world.owner(free, memory)


def an_event_without_a_record_holds_nothing(world: World) -> None:
    """A stream does not wait for an event that was never recorded."""
    on, done = world.owner(stream), world.owner(event)
    assert world.owner(code, "cuStreamWaitEvent", on, done, 0) == SUCCESS
    assert world.owner(code, "cuStreamSynchronize", on) == SUCCESS


def the_null_stream_waits_for_blocking_streams(world: World) -> None:
    """The null stream waits for streams that were created without "non-blocking", and others
    do not wait for it."""
    word, other, memory = world.word(), world.owner(stream), world.owner(allocate, 1)
    world.owner(held, word, 0)
    world.owner(fill, memory, 200, None)
    world.owner(stays, NOT_READY, "cuStreamQuery", None)
    assert world.owner(code, "cuStreamSynchronize", other) == SUCCESS
    assert world.owner(first_byte, memory) == 1
    world.store(word, 1)
    assert world.owner(code, "cuStreamSynchronize", None) == SUCCESS
    assert world.owner(first_byte, memory) == 200
    world.owner(free, memory)


def a_held_stream_lets_other_work_through(world: World) -> None:
    """While a stream waits, other streams copy, and memory is allocated and registered."""
    word = world.word()
    on = world.owner(held, word)
    memory = world.owner(allocate, 3)
    world.owner(_copies_through, memory)
    world.store(word, 1)
    assert world.owner(code, "cuStreamSynchronize", on) == SUCCESS
    world.owner(free, memory)


def _copies_through(cuda: Driver, address: int) -> None:
    memory, host = registered(cuda)
    on = stream(cuda)
    cuda("cuMemcpyDtoHAsync_v2", host, address, SIZE, on)
    cuda("cuStreamSynchronize", on)
    wrong = differs(memory[:SIZE], 3)
    assert not wrong, wrong


def freeing_waits_for_all_streams(world: World) -> None:
    """Memory is freed only when the streams of its context are idle."""
    word = world.word()
    world.owner(held, word)
    memory = world.owner(value, "cuMemAlloc_v2", SIZE)
    world.owner.start(code, "cuMemFree_v2", memory)
    assert not world.owner.answers(), "it returned at once"
    world.store(word, 1)
    assert world.owner.answer() == SUCCESS


def a_full_stream_blocks_who_enqueues(world: World) -> None:
    """A waiting stream takes about a thousand operations; who enqueues more waits in the driver."""
    word, memory = world.word(), world.owner(allocate, 1)
    on = world.owner(held, word)
    world.owner(_enqueue, memory, on, 900)
    world.owner.start(_enqueue, memory, on, 300)
    assert not world.owner.answers(), "it takes 1,200"
    world.store(word, 1)
    world.owner.answer()
    assert world.owner(code, "cuStreamSynchronize", on) == SUCCESS
    world.owner(free, memory)


def _enqueue(cuda: Driver, address: int, on: int, count: int) -> None:
    for _ in range(count):
        cuda("cuMemcpyDtoDAsync_v2", address + MIB, address, 256, on)


def batch_code(cuda: Driver, on: int | None, copies: list[tuple[int, int, int]]) -> int:
    """Enqueues (to, from, length) copies with one call; its code."""
    columns = [(ctypes.c_uint64 * len(copies))(*column) for column in zip(*copies, strict=True)]
    attributes, first, failed = CopyAttributes(order=1), ctypes.c_size_t(), ctypes.c_size_t()
    return cuda.code("cuMemcpyBatchAsync", *columns, len(copies), ctypes.byref(attributes),
                     ctypes.byref(first), 1, ctypes.byref(failed), on)  # fmt: skip


def scattered(source: int, target: int, count: int, length: int) -> list[tuple[int, int, int]]:
    return [(target + at * length, source + at * length, length) for at in range(count)]


def a_batch_is_copied_in_its_streams_order(world: World) -> None:
    """A batch moves every byte of its copies, after what came before it in its stream."""
    word = world.word()
    on, first, second = world.owner(held, word), world.owner(allocate, 5), world.owner(allocate, 9)
    whole = 1000 * PAGE
    copies = [(second + whole, first + whole, SIZE - whole), *scattered(first, second, 1000, PAGE)]
    assert world.owner(batch_code, on, copies) == SUCCESS
    assert world.owner(first_byte, second) == pattern(9, 1)[0], "it came too early"
    world.store(word, 1)
    assert world.owner(code, "cuStreamSynchronize", on) == SUCCESS
    wrong = world.owner(check, second, 5)
    world.owner(free, first, second)
    assert not wrong, wrong


def a_batch_needs_a_stream(world: World) -> None:
    """A batch on the default stream is refused with 1, and not made."""
    first, second = world.owner(allocate, 5), world.owner(allocate, 9)
    copies = scattered(first, second, 4, PAGE)
    found = [world.owner(batch_code, on, copies) for on in (None, 1)]
    wrong = world.owner(check, second, 9)
    world.owner(free, first, second)
    assert found == [INVALID_VALUE] * 2, found
    assert not wrong, wrong


def a_stream_takes_large_batches(world: World) -> None:
    """A waiting stream takes four batches of 1,024 copies; who enqueues them does not wait."""
    word, memory = world.word(), world.owner(allocate, 1)
    on = world.owner(held, word)
    copies = scattered(memory, memory + 2 * MIB, 1024, 2048)
    codes, waited = [], False
    for _ in range(4):
        world.owner.start(batch_code, on, copies)
        waited = waited or not world.owner.answers(5.0)
        if waited:
            world.store(word, 1)
        codes.append(world.owner.answer())
    world.store(word, 1)
    assert world.owner(code, "cuStreamSynchronize", on) == SUCCESS
    world.owner(free, memory)
    assert codes == [SUCCESS] * 4, codes
    assert not waited, "who enqueues them waits"


# -- beliefs: memory -----------------------------------------------------------------------------


def an_address_gives_its_allocation(world: World) -> None:
    """Any address in an allocation gives the allocation's first address and length."""
    memory = world.owner(value, "cuMemAlloc_v2", SIZE)
    assert world.owner(range_of, memory + SIZE - 1) == (memory, SIZE)
    assert world.owner(ipc_capable, memory)
    world.owner(free, memory)


def freed_memory_is_no_address(world: World) -> None:
    """The driver refuses addresses of freed memory: their range, their number, copies of them."""
    memory = world.owner(allocate, 1)
    world.owner(free, memory)
    for call, *more in ((range_of,), (number_of,), (check, 1)):
        try:
            world.owner(call, memory, *more)
        except AssertionError:
            continue
        raise AssertionError(f"{call.__name__} is answered")


def numbers_of_allocations_never_come_back(world: World) -> None:
    """An allocation's number (BUFFER_ID) differs from those of all before, at the same address,
    too."""
    seen: set[int] = set()
    for _ in range(8):
        memory = world.owner(value, "cuMemAlloc_v2", SIZE)
        seen.add(world.owner(number_of, memory))
        world.owner(free, memory)
    assert len(seen) == 8, f"8 allocations have {len(seen)} numbers"


def memory_is_given_out_in_blocks(world: World) -> None:
    """An allocation of 9 MiB takes 10 MiB: the driver gives out blocks of 2 MiB."""
    before = world.owner(free_bytes)
    memory = world.owner(value, "cuMemAlloc_v2", 9 * MIB)
    taken = before - world.owner(free_bytes)
    world.owner(free, memory)
    assert taken == 10 * MIB, f"it takes {taken / MIB} MiB"


def host_memory_is_registered_once(world: World) -> None:
    """Registering host memory again fails with 712, and unregistering it again with 713."""
    world.owner(_registers_once)


def _registers_once(cuda: Driver) -> None:
    _, address = registered(cuda)
    found = [
        cuda.code("cuMemHostRegister_v2", address, SIZE, 3),
        cuda.code("cuMemHostUnregister", address),
        cuda.code("cuMemHostUnregister", address),
    ]
    assert found == [ALREADY_REGISTERED, SUCCESS, NOT_REGISTERED], found


# -- beliefs: memory of other processes ----------------------------------------------------------


def a_handle_opens_the_memory_it_was_made_of(world: World) -> None:
    """Each handle opens its own allocation, from the first byte to the last."""
    memory = [world.owner(allocate, seed) for seed in (11, 12, 13)]
    opened = [world.reader(open_memory, world.owner(export, one)) for one in memory]
    wrong = [world.reader(check, one, seed) for one, seed in zip(opened, (11, 12, 13), strict=True)]
    world.reader(close, *opened)
    world.owner(free, *memory)
    assert not any(wrong), wrong


def a_new_handle_opens_new_memory(world: World) -> None:
    """After a handle was closed and its memory freed, the next handle opens the next memory."""
    wrong = []
    for seed in (14, 15, 16):
        memory = world.owner(allocate, seed)
        opened = world.reader(open_memory, world.owner(export, memory))
        wrong.append(world.reader(check, opened, seed))
        world.reader(close, opened)
        world.owner(free, memory)
    assert not any(wrong), wrong


def opened_memory_shows_what_its_owner_writes(world: World) -> None:
    """What the owner writes after the opening is read through the opened memory."""
    memory = world.owner(allocate, 21)
    opened = world.reader(open_memory, world.owner(export, memory))
    for seed in (21, 22, 23):
        world.owner(write, memory, seed)
        wrong = world.reader(check, opened, seed)
        assert not wrong, f"write {seed - 20}: {wrong}"
    world.reader(close, opened)
    world.owner(free, memory)


def a_handle_opened_twice_is_one_mapping(world: World) -> None:
    """Opening a handle again gives the same address, which needs as many closings."""
    memory = world.owner(allocate, 31)
    handle = world.owner(export, memory)
    opened = [world.reader(open_memory, handle) for _ in range(2)]
    assert opened[0] == opened[1]
    world.reader(close, opened[0])
    wrong = world.reader(check, opened[1], 31)
    assert not wrong, wrong
    world.reader(close, opened[1])
    assert world.reader(code, "cuIpcCloseMemHandle", opened[1]) != SUCCESS
    world.owner(free, memory)


def opened_memory_is_as_long_at_least(world: World) -> None:
    """The range of opened memory begins at its address, and is as long as the owner's at least."""
    memory = world.owner(value, "cuMemAlloc_v2", SIZE - MIB)
    opened = world.reader(open_memory, world.owner(export, memory))
    base, length = world.reader(range_of, opened + MIB)
    world.reader(close, opened)
    world.owner(free, memory)
    assert base == opened and length >= SIZE - MIB, (opened, base, length)


def no_process_opens_its_own_handle(world: World) -> None:
    """Opening a handle in the process that made it fails with 201."""
    memory = world.owner(allocate, 1)
    found, _ = world.owner(open_code, world.owner(export, memory))
    world.owner(free, memory)
    assert found == INVALID_CONTEXT, found


def a_handle_of_freed_memory_does_not_open(world: World) -> None:
    """The handle of memory that is free by now does not open."""
    memory = world.owner(allocate, 1)
    handle = world.owner(export, memory)
    world.owner(free, memory)
    found, _ = world.reader(open_code, handle)
    assert found != SUCCESS, "it opens"


def other_users_open_handles(world: World) -> None:
    """A handle opens for other users, for root, and a user opens root's."""
    ends = [world.user(UIDS[0]), world.user(UIDS[1]), world.owner]
    for owner, reader in ((0, 1), (0, 2), (2, 0)):
        memory = ends[owner](allocate, 41)
        opened = ends[reader](open_memory, ends[owner](export, memory))
        wrong = ends[reader](check, opened, 41)
        ends[reader](close, opened)
        ends[owner](free, memory)
        assert not wrong, wrong


def opened_memory_outlives_its_owner(world: World) -> None:
    """After the owner's SIGKILL opened memory keeps its bytes, and is free again once closed."""
    memory = world.mortal(allocate, 51, 2 * SIZE)
    opened = world.reader(open_memory, world.mortal(export, memory))
    world.end("mortal")
    wrong = world.reader(check, opened, 51, 2 * SIZE)
    before = world.reader(free_bytes)
    world.reader(close, opened)
    back = world.reader(free_bytes) - before
    assert not wrong, wrong
    assert back == 2 * SIZE, f"{back / MIB} MiB of 8 came back"


def a_copy_outlives_its_owner(world: World) -> None:
    """Copies from opened memory that are under way at the owner's SIGKILL bring right bytes."""
    word = world.word()
    memory = world.mortal(allocate, 52)
    opened = world.reader(open_memory, world.mortal(export, memory))
    world.reader(_copy_behind, opened, word)
    world.end("mortal")
    world.store(word, 1)
    wrong = world.reader(_copied, 52)
    world.reader(close, opened)
    assert not wrong, wrong


def _copy_behind(cuda: Driver, address: int, word: int) -> None:
    memory, host = registered(cuda)
    on = held(cuda, word)
    cuda("cuMemcpyDtoHAsync_v2", host, address, SIZE, on)
    _kept.append((memory, on))


def _copied(cuda: Driver, seed: int) -> str:
    memory, on = _kept.pop()
    cuda("cuStreamSynchronize", on)
    return differs(memory[:SIZE], seed)


def a_dead_process_writes_no_more(world: World) -> None:
    """Once a killed process is gone, nothing that it had enqueued changes memory."""
    memory = world.mortal(allocate, 53)
    opened = world.reader(open_memory, world.mortal(export, memory))
    world.mortal(_fill_often, memory)
    world.end("mortal")
    first = world.reader(_bytes_at, opened)
    time.sleep(_held_s)
    assert first == world.reader(_bytes_at, opened), "its bytes still change"
    world.reader(close, opened)


def _fill_often(cuda: Driver, address: int) -> None:
    on = stream(cuda)
    for i in range(500):
        fill(cuda, address, i % 256, on)


def _bytes_at(cuda: Driver, address: int) -> bytes:
    host = ctypes.create_string_buffer(SIZE)
    cuda("cuMemcpyDtoH_v2", host, address, SIZE)
    return host.raw


def a_handle_of_a_dead_process_does_not_open(world: World) -> None:
    """The handle of a process that is dead by now does not open."""
    handle = world.mortal(export, world.mortal(allocate, 54))
    world.end("mortal")
    found, _ = world.reader(open_code, handle)
    assert found != SUCCESS, "it opens"


# -- beliefs: virtual memory, as torch's expandable segments -------------------------------------


def virtual_memory_comes_in_blocks(world: World) -> None:
    """Virtual memory comes in multiples of 2 MiB."""
    found = world.owner(_granularity)
    assert found == (BLOCK, INVALID_VALUE), found


def _granularity(cuda: Driver) -> tuple[int, int]:
    wanted = ctypes.byref(properties())
    made = ctypes.byref(ctypes.c_uint64())
    return (
        cuda.out("cuMemGetAllocationGranularity", wanted, 0),
        cuda.code("cuMemCreate", made, 3 * MIB, wanted, 0),
    )


def pieces_side_by_side_are_one_memory(world: World) -> None:
    """A copy may span pieces that are mapped side by side; an address gives its own piece."""
    world.owner(_side_by_side)


def _side_by_side(cuda: Driver) -> None:
    address = cuda.out("cuMemAddressReserve", 2 * SIZE, 0, 0, 0)
    handles = [create(cuda) for _ in range(2)]
    for at, handle in enumerate(handles):
        map_at(cuda, address + at * SIZE, handle, READ_WRITE)
    write(cuda, address, 61, 2 * SIZE)
    wrong, piece = check(cuda, address, 61, 2 * SIZE), range_of(cuda, address + SIZE + 5)
    for at, handle in enumerate(handles):
        cuda("cuMemUnmap", address + at * SIZE, SIZE)
        cuda("cuMemRelease", handle)
    cuda("cuMemAddressFree", address, 2 * SIZE)
    assert not wrong, wrong
    assert piece == (address + SIZE, SIZE), piece


def mapped_memory_needs_access_first(world: World) -> None:
    """Memory that is mapped without access cannot be copied."""
    found = world.mortal(_without_access)
    world.end("mortal")
    assert found != SUCCESS, "it can"


def _without_access(cuda: Driver) -> int:
    address = cuda.out("cuMemAddressReserve", SIZE, 0, 0, 0)
    map_at(cuda, address, create(cuda), 0)
    return cuda.code("cuMemcpyDtoH_v2", ctypes.create_string_buffer(64), address, 64)


def virtual_memory_has_no_handle(world: World) -> None:
    """Virtual memory has no legacy handle, and its attribute says so."""
    handle, address = world.owner(virtual, 62)
    found = world.owner(ipc_capable, address), world.owner(_export_code, address)
    world.owner(drop, handle, address)
    assert found == (0, INVALID_VALUE), found


def _export_code(cuda: Driver, address: int) -> int:
    return cuda.code("cuIpcGetMemHandle", ctypes.byref(IpcHandle()), address)


def an_address_gives_its_handle(world: World) -> None:
    """An address in mapped memory gives the handle that was mapped, with its properties."""
    handle, address = world.owner(virtual, 63)
    found = world.owner(_handle_of, address + SIZE - 1)
    world.owner(drop, handle, address)
    assert found == (handle, 1, 1, 0), found


def _handle_of(cuda: Driver, address: int) -> tuple[int, int, int, int]:
    handle = cuda.out("cuMemRetainAllocationHandle", address)
    told = Properties()
    cuda("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(told), handle)
    cuda("cuMemRelease", handle)
    return handle, told.type, told.handle_types, told.device


def a_descriptor_gives_memory_to_another_process(world: World) -> None:
    """Each descriptor gives its own memory to another process, with what is written later."""
    both = [world.owner(virtual, seed) for seed in (71, 72)]
    taken = [world.reader(take, READ_WRITE, world.owner(give, handle)) for handle, _ in both]
    wrong = [world.reader(check, at, seed) for (_, at), seed in zip(taken, (71, 72), strict=True)]
    world.owner(write, both[0][1], 73)
    wrong.append(world.reader(check, taken[0][1], 73))
    for one, other in zip(both, taken, strict=True):
        world.owner(drop, *one)
        world.reader(drop, *other)
    assert not any(wrong), wrong


def a_descriptor_may_be_mapped_to_read(world: World) -> None:
    """Memory from a descriptor can be mapped with access to read only."""
    handle, address = world.owner(virtual, 74)
    taken = world.reader(take, READ, world.owner(give, handle))
    wrong = world.reader(check, taken[1], 74)
    world.reader(drop, *taken)
    world.owner(drop, handle, address)
    assert not wrong, wrong


def a_descriptor_gives_memory_to_another_user(world: World) -> None:
    """A descriptor gives memory to a process of another user."""
    owner, reader = world.user(UIDS[0]), world.user(UIDS[1])
    handle, address = owner(virtual, 75)
    taken = reader(take, READ_WRITE, owner(give, handle))
    wrong = reader(check, taken[1], 75)
    reader(drop, *taken)
    owner(drop, handle, address)
    assert not wrong, wrong


def only_memory_made_for_it_has_a_descriptor(world: World) -> None:
    """Memory that was made without a handle type has no descriptor."""
    handle, address = world.owner(virtual, 76, 0)
    try:
        world.owner(give, handle)
    except AssertionError:
        return
    finally:
        world.owner(drop, handle, address)
    raise AssertionError("it has one")


def virtual_memory_lives_until_its_last_mapping(world: World) -> None:
    """Mapped memory keeps its bytes without its handle and after its owner's SIGKILL, and is free
    again once it is unmapped."""
    handle, address = world.mortal(virtual, 77)
    assert world.mortal(code, "cuMemRelease", handle) == SUCCESS
    assert not world.mortal(check, address, 77)
    handle, address = world.mortal(virtual, 78)
    handle, address = world.reader(take, READ_WRITE, world.mortal(give, handle))
    assert world.reader(code, "cuMemRelease", handle) == SUCCESS
    world.end("mortal")
    wrong = world.reader(check, address, 78)
    before = world.reader(free_bytes)
    world.reader(drop, 0, address)
    back = world.reader(free_bytes) - before
    assert not wrong, wrong
    assert back == SIZE, f"{back / MIB} MiB of 4 came back"


# -- beliefs: the driver's checkpoints of a process ----------------------------------------------

MOVES = {  #: call -> (the state that it needs, the state after it)
    "cuCheckpointProcessLock": (RUNNING, LOCKED),
    "cuCheckpointProcessCheckpoint": (LOCKED, CHECKPOINTED),
    "cuCheckpointProcessRestore": (CHECKPOINTED, LOCKED),
    "cuCheckpointProcessUnlock": (LOCKED, RUNNING),
}


def a_process_is_locked_before_it_is_checkpointed(world: World) -> None:
    """A process is locked, checkpointed, restored, unlocked; every other move fails with 401."""
    world.mortal(allocate, 81)
    for call, (needed, after) in MOVES.items():
        assert world.reader(state, world.mortal.pid) == needed
        for other, (wanted, _) in MOVES.items():
            if wanted != needed:
                found = world.reader(code, other, world.mortal.pid, None)
                assert found == ILLEGAL_STATE, f"{other} in state {needed}: {found}"
        assert world.reader(code, call, world.mortal.pid, None) == SUCCESS, call
        assert world.reader(state, world.mortal.pid) == after, call
    world.end("mortal")


def a_locked_process_waits_in_the_driver(world: World) -> None:
    """A locked process waits in its next call until it is unlocked."""
    world.mortal(allocate, 82)
    assert world.reader(lock_code, world.mortal.pid, 0) == SUCCESS
    world.mortal.start(allocate, 83)
    assert not world.mortal.answers(), "it does not wait"
    assert world.reader(code, "cuCheckpointProcessUnlock", world.mortal.pid, None) == SUCCESS
    world.mortal.answer()
    world.end("mortal")


def a_checkpointed_process_holds_no_memory(world: World) -> None:
    """A checkpointed process takes no device memory, and has its bytes again when restored."""
    memory = world.mortal(allocate, 84, 2 * SIZE)
    pid, before = world.mortal.pid, world.reader(free_bytes)
    assert world.reader(lock_code, pid, 0) == SUCCESS
    assert world.reader(code, "cuCheckpointProcessCheckpoint", pid, None) == SUCCESS
    back = world.reader(free_bytes) - before
    assert world.reader(code, "cuCheckpointProcessRestore", pid, None) == SUCCESS
    assert world.reader(code, "cuCheckpointProcessUnlock", pid, None) == SUCCESS
    wrong = world.mortal(check, memory, 84, 2 * SIZE)
    world.end("mortal")
    assert back >= 2 * SIZE, f"{back / MIB} MiB of 8 came back"
    assert not wrong, wrong


def locking_gives_up_after_its_time(world: World) -> None:
    """A process whose stream waits is not locked: after the given time it runs as before."""
    word, pid = world.word(), world.mortal.pid
    on = world.mortal(held, word)
    found = world.reader(lock_code, pid, 30), world.reader(state, pid)
    world.store(word, 1)
    assert world.mortal(code, "cuStreamSynchronize", on) == SUCCESS
    world.end("mortal")
    assert found == (NOT_READY, RUNNING), found


def only_a_process_with_cuda_has_a_state(world: World) -> None:
    """A process without CUDA has no state (3), and neither has one that there is not (304)."""
    assert world.reader(state, world.owner.pid) == RUNNING
    pid = world.mortal.pid
    world.end("mortal")
    found = world.reader(state_code, os.getpid()), world.reader(state_code, pid)
    assert found == (NOT_INITIALIZED, OPERATING_SYSTEM), found


def a_map_of_devices_has_all_of_them(world: World) -> None:
    """A restore takes a map of all devices of the process; a map of others is refused, and the
    process can still be restored then."""
    pid, memory = world.mortal.pid, world.mortal(allocate, 86)
    own = world.mortal(uuid)
    assert world.reader(lock_code, pid, 0) == SUCCESS
    assert world.reader(code, "cuCheckpointProcessCheckpoint", pid, None) == SUCCESS
    refused = world.reader(restore_code, pid, bytes(16), own), world.reader(state, pid)
    assert world.reader(restore_code, pid, own, own) == SUCCESS
    assert world.reader(code, "cuCheckpointProcessUnlock", pid, None) == SUCCESS
    wrong = world.mortal(check, memory, 86)
    world.end("mortal")
    assert refused[0] != SUCCESS and refused[1] == CHECKPOINTED, refused
    assert not wrong, wrong


def a_checkpoint_goes_on_without_who_asked(world: World) -> None:
    """A process is checkpointed to the end although who asked for it is killed meanwhile."""
    memory, pid = world.owner(allocate, 87, 16 * SIZE), world.owner.pid
    assert world.mortal(lock_code, pid, 0) == SUCCESS
    world.mortal.start(code, "cuCheckpointProcessCheckpoint", pid, None)
    world.end("mortal")
    found = world.reader(state, pid)
    if found == CHECKPOINTED:
        assert world.reader(code, "cuCheckpointProcessRestore", pid, None) == SUCCESS
    assert world.reader(code, "cuCheckpointProcessUnlock", pid, None) == SUCCESS
    wrong = world.owner(check, memory, 87, 16 * SIZE)
    world.owner(free, memory)
    assert found in (LOCKED, CHECKPOINTED), found
    assert not wrong, wrong


def a_process_that_shares_memory_is_not_checkpointed(world: World) -> None:
    """A process with a legacy handle that is open elsewhere is not checkpointed."""
    memory, pid = world.mortal(allocate, 85), world.mortal.pid
    opened = world.reader(open_memory, world.mortal(export, memory))
    assert world.reader(lock_code, pid, 0) == SUCCESS
    found = world.reader(code, "cuCheckpointProcessCheckpoint", pid, None)
    world.end("mortal")
    world.reader(close, opened)
    assert found != SUCCESS, "it is"


BELIEFS: dict[str, Callable[[World], None]] = {
    name: found
    for name, found in list(globals().items())
    if getattr(found, "__annotations__", {}) == {"world": "World", "return": "None"}
    and not name.startswith("_")
}


def find_out(world: World, belief: Callable[[World], None]) -> tuple[str, str]:
    """("holds", "FALSE" or "skipped", why). After anything but "holds" the processes are new."""
    try:
        belief(world)
    except NotHereError as reason:
        found = "skipped", str(reason)
    except (AssertionError, EOFError, OSError) as error:
        found = "FALSE", str(error) or repr(error)
    else:
        return "holds", ""
    world.end()
    return found


def about(cuda: Driver) -> dict[str, Any]:
    name = ctypes.create_string_buffer(128)
    cuda("cuDeviceGetName", name, len(name), 0)
    return {"gpu": name.value.decode(), "driver": cuda.out("cuDriverGetVersion") & 0xFFFFFFFF}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--only", action="append", choices=tuple(BELIEFS), metavar="NAME")
    parser.add_argument("--held-s", type=float, help="watch so long what must wait (0.05)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="begin no check after that")
    options = parser.parse_args()
    global _held_s
    _held_s = options.held_s or _held_s
    until, world = time.monotonic() + options.limit_s, World()
    results: dict[str, Any] = {}
    document = world.owner(about) | {"beliefs": results}
    for name in options.only or BELIEFS:
        sentence = " ".join((BELIEFS[name].__doc__ or "").split())
        late = time.monotonic() > until
        found, why = ("skipped", "no time left") if late else find_out(world, BELIEFS[name])
        results[name] = {"belief": sentence, "found": found, "why": why}
        print(f"{found:8}{sentence}{f' -- {why}' if why else ''}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    world.end()
    return int(any(result["found"] == "FALSE" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
