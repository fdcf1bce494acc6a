"""The stand-in driver does what tests rely on: CUDA's documented rules, and faults."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.standin.behaviours import CopyAttributes, Driver, IpcHandle
from tests.support import standin
from tests.support.standinpeer import Peer

MIB = 1 << 20
NOT_READY = 600
INVALID = 1
UNDEFINED = 0xDB
OUT = "out"  # an argument: room for a result that nobody looks at


@pytest.fixture
def directory() -> Iterator[Path]:
    with standin.device_memory() as made:
        yield made


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., Peer]]:
    with ExitStack() as stack:
        yield lambda name="peer", **options: stack.enter_context(Peer(directory, name, **options))


# -- what peers do; device 0 throughout


def allocate(cuda: Driver, length: int, byte: int) -> int:
    with cuda.on(0):
        address = cuda.out("cuMemAlloc_v2", length)
        cuda("cuMemsetD8Async", address, byte, length, None)
        cuda("cuStreamSynchronize", None)
    return address


def export(cuda: Driver, address: int) -> bytes:
    handle = IpcHandle()
    with cuda.on(0):
        cuda("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle)


def attach(cuda: Driver, handle: bytes) -> tuple[int, int]:
    """(code, address)"""
    address = ctypes.c_uint64()
    with cuda.on(0):
        code = cuda.code(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(handle), 1
        )
    return code, address.value


def code_of(cuda: Driver, call: str, *arguments: Any) -> int:
    with cuda.on(0):
        return without_context(cuda, call, *arguments)


def value_of(cuda: Driver, call: str, *arguments: Any) -> int:
    with cuda.on(0):
        return cuda.out(call, *arguments)


def without_context(cuda: Driver, call: str, *arguments: Any) -> int:
    room = ctypes.create_string_buffer(64)
    return cuda.code(call, *(room if item == OUT else item for item in arguments))


def read(cuda: Driver, address: int, length: int, stream: int | None = None) -> set[int] | int:
    """The different bytes there, or the code that the copy failed with."""
    host = (ctypes.c_ubyte * length)()
    with cuda.on(0):
        code = cuda.code("cuMemcpyDtoHAsync_v2", host, address, length, stream)
    return code or set(bytes(host))


def capture_status(cuda: Driver, stream: int) -> int:
    status = ctypes.c_int()
    with cuda.on(0):
        cuda("cuStreamIsCapturing", stream, ctypes.byref(status))
    return status.value


_pinned: dict[str, Any] = {}


def pin(cuda: Driver, length: int) -> int:
    """Registered memory of its own; its address."""
    memory = mmap.mmap(-1, length)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _pinned["memory"] = memory
    with cuda.on(0):
        cuda("cuMemHostRegister_v2", address, length, 3)
    return address


def pinned_bytes(_cuda: Driver, length: int) -> set[int]:
    return set(_pinned["memory"][:length])


def free_bytes(cuda: Driver) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with cuda.on(0):
        cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def context_code(cuda: Driver) -> int:
    cuda("cuInit", 0)
    return cuda.code("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_uint64()), 0)


def forked_code(cuda: Driver) -> int:
    child = os.fork()
    if child == 0:
        os._exit(cuda.code("cuDeviceGetCount", ctypes.byref(ctypes.c_int())))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def become(_cuda: Driver, user: int) -> None:
    os.setuid(user)


# -- memory of another process


def test_handles_map_memory_in_another_process(start: Callable[..., Peer]) -> None:
    owner, reader = start("owner"), start("reader")
    address = owner(allocate, MIB, 7)
    handle = owner(export, address)
    assert owner(attach, handle)[0] == 201  # its own
    code, mapped = reader(attach, handle)
    assert (code, reader(read, mapped, MIB)) == (0, {7})
    assert reader(attach, handle) == (0, mapped)  # counted, not mapped again
    assert reader.faults.open_mappings == 1
    assert reader(code_of, "cuIpcCloseMemHandle", mapped) == 0
    assert reader(read, mapped, MIB) == {7}
    assert reader(code_of, "cuIpcCloseMemHandle", mapped) == 0
    assert reader(read, mapped, MIB) == INVALID
    assert (reader.faults.open_mappings, reader.faults.opens, reader.faults.closes) == (0, 2, 2)


def test_freed_memory_is_undefined_and_cannot_be_opened(start: Callable[..., Peer]) -> None:
    owner, reader = start("owner"), start("reader")
    address = owner(allocate, MIB, 7)
    handle = owner(export, address)
    mapped = reader(attach, handle)[1]
    assert owner(code_of, "cuMemFree_v2", address) == 0
    assert reader(read, mapped, MIB) == {UNDEFINED}
    assert start("third")(attach, handle)[0] == 400
    assert reader(attach, b"\0" * 64)[0] == INVALID
    unshareable = owner(value_of, "standinAllocUnshareable", MIB)
    assert owner(code_of, "cuIpcGetMemHandle", OUT, unshareable) == 1


@pytest.mark.parametrize(("dead", "bytes_read"), [("scramble", {UNDEFINED}), ("keep", {7})])
def test_a_copy_that_outlives_the_exporter(
    start: Callable[..., Peer], dead: str, bytes_read: set[int]
) -> None:
    owner, reader = start("owner"), start("reader", dead=dead)
    handle = owner(export, owner(allocate, MIB, 7))
    mapped = reader(attach, handle)[1]
    host = reader(pin, MIB)
    stream = reader(value_of, "cuStreamCreate", 1)
    reader.faults.hold_copies()
    assert reader(code_of, "cuMemcpyDtoHAsync_v2", host, mapped, MIB, stream) == 0
    reader.faults.wait_for(lambda f: f.held_copies == 1)
    owner.kill()
    reader.faults.release_copies()
    assert reader(code_of, "cuStreamSynchronize", stream) == 0  # it does not say so
    assert reader(pinned_bytes, MIB) == bytes_read
    assert start("late")(attach, handle)[0] == 400


def test_a_dead_exporter_may_also_be_an_error(start: Callable[..., Peer]) -> None:
    owner, reader = start("owner"), start("reader", dead="error")
    mapped = reader(attach, owner(export, owner(allocate, MIB, 7)))[1]
    owner.kill()
    assert reader(read, mapped, MIB) == 700
    assert reader(code_of, "cuCtxSynchronize") == 700  # the context is lost


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_users_are_compared_on_demand(start: Callable[..., Peer]) -> None:
    owner = start("owner")
    owner(become, 65534)
    handle = owner(export, owner(allocate, MIB, 7))
    assert start("strict", same_uid=True)(attach, handle)[0] == INVALID


def test_the_memory_of_a_device_is_one(start: Callable[..., Peer]) -> None:
    """Contexts take some, and what a dead process has shared stays taken while another has it."""
    size = {"memory_bytes": 10 * MIB, "context_bytes": 2 * MIB}
    owner, reader = start("owner", **size), start("reader", **size)
    handle = owner(export, owner(allocate, 4 * MIB, 7))
    code, mapped = reader(attach, handle)
    assert (code, reader(free_bytes)) == (0, 2 * MIB)
    assert reader(code_of, "cuMemAlloc_v2", OUT, 3 * MIB) == 2
    owner.kill()
    assert reader(free_bytes) == 4 * MIB  # the context is gone, the memory is not
    assert reader(code_of, "cuIpcCloseMemHandle", mapped) == 0
    assert reader(free_bytes) == 8 * MIB
    assert reader(value_of, "standinAllocUnshareable", 7 * MIB)
    assert start("late", **size)(context_code) == 2
    assert reader(without_context, "cuDevicePrimaryCtxRelease_v2", 0) == 0
    assert start("later", **size)(free_bytes) == 8 * MIB


def test_opening_may_take_time(start: Callable[..., Peer]) -> None:
    owner, reader = start("owner"), start("reader")
    handle = owner(export, owner(allocate, MIB, 7))
    reader.faults.set(open_us=50_000)
    began_s = time.monotonic()
    assert reader(attach, handle)[0] == 0
    assert time.monotonic() - began_s >= 0.05


# -- streams


def test_a_single_queue_keeps_the_order_of_all_streams(start: Callable[..., Peer]) -> None:
    peer = start()
    memory, host = peer(allocate, MIB, 1), peer(pin, MIB)
    first, second = (peer(value_of, "cuStreamCreate", 1) for _ in range(2))
    peer.faults.hold_copies()
    peer.faults.set(one_queue=1)
    assert peer(code_of, "cuMemcpyDtoHAsync_v2", host, memory, MIB, first) == 0
    assert peer(code_of, "cuMemsetD8Async", memory, 2, MIB, second) == 0
    assert peer(code_of, "cuStreamQuery", second) == NOT_READY
    peer.faults.release_copies()
    assert peer(code_of, "cuCtxSynchronize") == 0
    assert peer(read, memory, 8) == {2}


def test_graph_capture_is_spoilt_by_forbidden_calls(start: Callable[..., Peer]) -> None:
    peer = start()
    stream, event = peer(value_of, "cuStreamCreate", 1), peer(value_of, "cuEventCreate", 2)
    assert peer(code_of, "standinBeginCapture", stream, 0) == 0
    assert peer(capture_status, stream) == 1
    assert peer(code_of, "standinEndCapture", stream) == 0
    for call, arguments in (("cuEventQuery", (event,)), ("cuEventRecord", (event, stream))):
        assert peer(code_of, "standinBeginCapture", stream, 0) == 0
        assert peer(code_of, call, *arguments) == 900
        assert peer(code_of, "standinEndCapture", stream) == 901
    assert peer.faults.broken_captures == 2


def test_one_copy_at_a_time_in_each_direction(start: Callable[..., Peer]) -> None:
    peer = start()
    memory, host = peer(allocate, MIB, 1), peer(pin, MIB)
    first, second, other = (peer(value_of, "cuStreamCreate", 1) for _ in range(3))
    peer.faults.hold_copies()
    for stream in (first, second):
        assert peer(code_of, "cuMemcpyDtoHAsync_v2", host, memory, 8, stream) == 0
    assert peer(code_of, "cuMemcpyHtoDAsync_v2", memory + 8, host, 8, other) == 0
    assert peer(code_of, "cuStreamSynchronize", other) == 0
    peer.faults.wait_for(lambda f: f.held_copies == 1)
    assert (peer(code_of, "cuStreamQuery", first), peer(code_of, "cuStreamQuery", second)) == (
        NOT_READY,
        NOT_READY,
    )
    peer.faults.set(copy_hold_skip=1)
    assert peer(code_of, "cuStreamSynchronize", first) == 0
    assert peer(code_of, "cuStreamQuery", second) == NOT_READY
    peer.faults.release_copies()
    assert peer(code_of, "cuStreamSynchronize", second) == 0
    assert peer.faults.to_host_queued == 0


# -- rules


def test_contexts_initialisation_and_forks(start: Callable[..., Peer]) -> None:
    peer = start()
    assert peer(without_context, "cuDeviceGetCount", OUT) == 3  # cuInit comes first
    assert peer(without_context, "cuInit", 0) == 0
    assert peer(without_context, "cuMemAlloc_v2", OUT, 8) == 201
    assert peer(value_of, "cuMemAlloc_v2", 8)
    assert peer.faults.contexts == 1
    assert peer(forked_code) == 3
    assert peer(without_context, "cuDevicePrimaryCtxRelease_v2", 0) == 0
    assert (peer.faults.contexts, peer.faults.allocations, peer.faults.streams) == (0, 0, 0)


def test_ranges_are_checked(start: Callable[..., Peer]) -> None:
    peer = start()
    memory, host = peer(allocate, MIB, 1), peer(pin, MIB)
    for address, length in ((memory + 1, MIB), (host, 8), (0, 8)):
        assert peer(code_of, "cuMemcpyDtoHAsync_v2", host, address, length, None) == INVALID
    assert peer(code_of, "cuMemcpyDtoHAsync_v2", host + 8, memory, MIB, None) == INVALID
    assert peer(code_of, "cuMemHostRegister_v2", host + 4096, 4096, 3) == 712
    assert peer(code_of, "cuMemHostUnregister", host + 4096) == 713
    assert peer.faults.registered_bytes == MIB
    assert peer(code_of, "cuMemHostUnregister", host) == 0
    assert peer(code_of, "cuMemHostUnregister", host) == 713
    assert peer(code_of, "cuMemcpyDtoHAsync_v2", host, memory, MIB, None) == 0  # pageable
    assert (peer.faults.registered_bytes, peer.faults.pageable_copies) == (0, 1)


def batch(
    cuda: Driver,
    on: int | None,
    copies: list[tuple[int, int, int]],
    orders: tuple[int, ...] = (1,),
    firsts: tuple[int, ...] = (0,),
    flags: int = 0,
) -> tuple[int, int]:
    """(code, the number of the refused copy)"""
    columns = [(ctypes.c_uint64 * len(copies))(*column) for column in zip(*copies, strict=True)]
    columns = columns or [(ctypes.c_uint64 * 1)()] * 3
    attributes = (CopyAttributes * len(orders))(*((order, (0, 0, 0, 0), flags) for order in orders))
    failed = ctypes.c_size_t()
    with cuda.on(0):
        code = cuda.code(
            "cuMemcpyBatchAsync", *columns, len(copies), attributes,
            (ctypes.c_size_t * len(firsts))(*firsts), len(orders), ctypes.byref(failed), on,
        )  # fmt: skip
    return code, failed.value


NONE_OF_THEM = 2**64 - 1


def test_batches_are_checked(start: Callable[..., Peer]) -> None:
    peer = start()
    memory, stream = peer(allocate, MIB, 1), peer(value_of, "cuStreamCreate", 1)
    half = MIB // 2
    good = [(memory + half, memory, 8), (memory + half + 8, memory + 8, 8)]
    assert peer(batch, stream, good) == (0, NONE_OF_THEM)
    assert peer(batch, stream, good, (1, 3), (0, 1), 1) == (0, NONE_OF_THEM)
    for refused in (
        (None, good), (1, good), (stream, []), (stream, good, (0,)), (stream, good, (4,)),
        (stream, good, (1,), (1,)), (stream, good, (1, 1), (0, 0)), (stream, good, (1, 1), (0, 2)),
        (stream, good, (1, 1, 1), (0, 1, 2)), (stream, good, (1,), (0,), 2),
    ):  # fmt: skip
        assert peer(batch, *refused) == (INVALID, NONE_OF_THEM), refused
    for wrong in (
        (memory, memory + 8, 0),
        (memory, memory + MIB, 8),
        (memory + MIB - 4, memory, 8),
    ):
        assert peer(batch, stream, [*good, wrong, *good]) == (INVALID, 2)
    peer.faults.set(batch_fail_code=801)
    assert peer(batch, stream, good) == (801, NONE_OF_THEM)
    assert peer(code_of, "cuStreamSynchronize", stream) == 0
    assert peer.faults.launches == 1 + 2 + 3  # allocate() fills; copies before a wrong one are made
    assert peer.faults.copies_on_device == 2 * 5


# -- faults on demand


def test_a_batch_fails_at_one_of_its_copies(start: Callable[..., Peer]) -> None:
    peer = start()
    memory, stream = peer(allocate, MIB, 1), peer(value_of, "cuStreamCreate", 1)
    copies = [(memory + MIB // 2 + 8 * at, memory + 8 * at, 8) for at in range(5)]
    peer.faults.fail_copy(4, 999, kinds=standin.ON_DEVICE, behind=False)
    assert peer(batch, stream, copies) == (999, 3)
    assert peer(code_of, "cuStreamSynchronize", stream) == 0
    assert peer.faults.copies_on_device == 3
    peer.faults.fail_copy(4, 999, kinds=standin.ON_DEVICE)
    assert peer(batch, stream, copies) == (0, NONE_OF_THEM)
    assert peer(code_of, "cuStreamSynchronize", stream) == 999


def test_copies_fail_at_the_call_or_behind_it(start: Callable[..., Peer]) -> None:
    peer = start()
    memory, host = peer(allocate, MIB, 1), peer(pin, MIB)
    stream, event = peer(value_of, "cuStreamCreate", 1), peer(value_of, "cuEventCreate", 2)
    copy = ("cuMemcpyDtoHAsync_v2", host, memory, MIB, stream)
    peer.faults.fail_copy(2, 999, behind=False)
    assert [peer(code_of, *copy) for _ in range(3)] == [0, 999, 0]
    assert peer(code_of, "cuStreamSynchronize", stream) == 0
    peer.faults.fail_copy(1, 999)
    assert (peer(code_of, *copy), peer(code_of, "cuEventRecord", event, stream)) == (0, 0)
    assert peer(code_of, "cuStreamSynchronize", stream) == 999
    assert peer(code_of, "cuEventQuery", event) == 999
    assert peer(code_of, *copy) == 0  # that one failed, not the context
    peer.faults.fail_copy(1, 719)
    assert peer(code_of, *copy) == 0
    assert peer(code_of, "cuStreamSynchronize", stream) == 719
    assert peer(code_of, *copy) == 719
    assert peer(code_of, "cuEventQuery", event) == 719
    assert peer(code_of, "cuMemFree_v2", memory) == 719


def test_other_calls_fail_on_demand(start: Callable[..., Peer]) -> None:
    owner, peer = start("owner"), start()
    handle = owner(export, owner(allocate, MIB, 7))
    peer.faults.fail_open(205, times=2)
    assert [peer(attach, handle)[0] for _ in range(3)] == [205, 205, 0]
    peer.faults.fail_alloc(1)
    assert peer(code_of, "cuMemAlloc_v2", OUT, 8) == 2
    address = peer(allocate, 8, 1)
    peer.faults.fail_export(801)
    assert peer(code_of, "cuIpcGetMemHandle", OUT, address) == 801
    peer.faults.set(no_memory_ops=1)
    assert peer(code_of, "cuStreamWaitValue64_v2", None, address, 1, 0) == 801
    peer.faults.set(lose_context=700)
    assert peer(code_of, "cuMemFree_v2", address) == 700
    late = start("late")
    late.faults.set(init_fail_code=100)
    assert late(without_context, "cuInit", 0) == 100


def test_memory_of_a_killed_test_goes_with_the_next() -> None:
    with subprocess.Popen(["sleep", "0"]) as ended:
        left = Path(tempfile.mkdtemp(prefix=f"pcc-gpu-{ended.pid}-", dir="/dev/shm"))
    with standin.device_memory() as first, standin.device_memory() as second:
        assert not left.exists()
        assert first.exists() and second.exists()
    assert not first.exists() and not second.exists()
