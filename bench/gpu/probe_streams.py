"""Parts of the probe about streams: order between processes, and what waits for what."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable

from bench.gpu.driver import (
    CHUNK_BYTES,
    GIB,
    MIB,
    Cuda,
    Host,
    Peer,
    RefusedError,
)
from bench.gpu.probe_memory import (
    HERE,
    Say,
    begin,
    begin_importing,
    copies_begin,
    make_plain,
    open_plain,
    step,
)
from tests.standin.behaviours import IpcHandle, NotHereError, batch_code, scattered

#: burn: `rounds` times eight multiply-adds a thread. sweep: adds 1 to every 32-bit word.
KERNELS = b"""\
.version 6.0
.target sm_50
.address_size 64
.visible .entry burn(.param .u64 out, .param .u64 rounds)
{ .reg .pred %p<3>; .reg .f32 %f<4>; .reg .b64 %d<5>; .reg .b32 %r<2>;
 ld.param.u64 %d1, [out]; cvta.to.global.u64 %d2, %d1; ld.param.u64 %d3, [rounds];
 mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1;
 mov.f32 %f2, 0f3F7FFFFE; mov.f32 %f3, 0f3F800001;
again:
FMA
 sub.u64 %d3, %d3, 1; setp.gt.u64 %p1, %d3, 0; @%p1 bra again;
 setp.lt.f32 %p2, %f1, 0f00000000; @!%p2 bra done;
 st.global.f32 [%d2], %f1;
done: ret; }
.visible .entry sweep(.param .u64 words, .param .u64 count)
{ .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %d<9>;
 ld.param.u64 %d1, [words]; cvta.to.global.u64 %d2, %d1; ld.param.u64 %d3, [count];
 mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mov.u32 %r4, %nctaid.x;
 mul.wide.u32 %d4, %r1, %r2; cvt.u64.u32 %d5, %r3; add.u64 %d4, %d4, %d5;
 mul.wide.u32 %d6, %r4, %r2;
again: setp.ge.u64 %p1, %d4, %d3; @%p1 bra done; shl.b64 %d7, %d4, 2; add.u64 %d8, %d2, %d7;
 ld.global.u32 %r5, [%d8]; add.u32 %r5, %r5, 1; st.global.u32 [%d8], %r5;
 add.u64 %d4, %d4, %d6; bra again;
done: ret; }
""".replace(b"FMA", b" fma.rn.f32 %f1, %f1, %f2, %f3;\n" * 8)
HOLD_S = 0.3


def spread(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    p99 = values[len(values) * 99 // 100]
    return {"median": statistics.median(values), "p99": p99, "max": values[-1], "runs": len(values)}


class Held:
    """A stream that waits for a word of a page; `let_go` may be called from any thread."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.page = cuda, Host(4096)
        self.words = cuda.words(self.page)
        self.number = 0

    def hold(self, stream: int) -> None:
        self.number += 1
        self.cuda("cuStreamWaitValue64_v2", stream, self.words, self.number, 0)

    def let_go(self) -> None:
        self.page.word(0).value = self.number

    def during(self, stream: int, run: Callable[[], object], hold_s: float = HOLD_S) -> float:
        """Milliseconds of a call while the stream is held; as long as `hold_s`: it was blocked."""
        self.hold(stream)
        timer = threading.Timer(hold_s, self.let_go)
        timer.start()
        start_s = time.monotonic()
        try:
            run()
            return (time.monotonic() - start_s) * 1e3
        finally:
            timer.join()
            self.cuda.wait(stream)


# -- latency ---------------------------------------------------------------------------------------


def pull_begin(ahead: int) -> None:
    HERE.ahead = ahead
    copies_begin()


def pull_end() -> float:
    return HERE.copies.stop()


def latency(say: Say, small: bool) -> None:
    """Microseconds of a copy of 4 bytes that is waited for, as loss.item() makes it, while this
    process (push) or another one (pull) copies chunks of 16 MiB, so many of them under way."""
    puller = Peer()
    begin()
    cuda = HERE.cuda
    open_from = make_plain(1, 4 * CHUNK_BYTES)
    small_memory, target, stream = cuda.memory(MIB), cuda.pinned(4096), cuda.stream()

    def measure() -> dict[str, float]:
        until_s, found = time.monotonic() + (0.05 if small else 0.7), []
        while time.monotonic() < until_s:
            start_s = time.perf_counter()
            cuda.to_host(target.address, small_memory, 4, stream)
            cuda.wait(stream)
            found.append((time.perf_counter() - start_s) * 1e6)
            time.sleep(0.0005)
        return spread(found)

    say("idle_us", measure())
    puller(begin_importing)
    with step(say, "pull"):
        puller(open_plain, open_from, 4 * CHUNK_BYTES)
    for ahead in (2, 3) if small else (2, 3, 8, 64):
        for way, start, stop in (
            ("push", lambda ahead=ahead: pull_begin(ahead), pull_end),
            ("pull", lambda ahead=ahead: puller(pull_begin, ahead), lambda: puller(pull_end)),
        ):
            with step(say, f"{way}_{ahead}"):
                start()
                found = measure()
                say(f"{way}_{ahead}_us", found | {"copies_gb_s": stop()})


# -- queue -----------------------------------------------------------------------------------------


def queue(say: Say, small: bool) -> None:
    """Device copies enqueued behind a held stream, one by one: which call blocks, for how long, and
    whether another thread's call waits with it. A kernel's first launch meanwhile. The same copies
    on a second stream when the driver has one queue for all streams. Then batches of copies."""
    narrow = Peer(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    begin()
    cuda = HERE.cuda
    held, stream = Held(cuda), cuda.stream()
    memory = cuda.memory(4 * MIB)
    event = cuda.event()
    cuda("cuEventRecord", event, 0)
    count = 200 if small else 1200
    calls_ms, others_ms, stopping = [], [], threading.Event()

    def ask() -> None:
        cuda.enter()
        while not stopping.wait(0.002):
            start_s = time.monotonic()
            cuda.code("cuEventQuery", event)
            others_ms.append((time.monotonic() - start_s) * 1e3)

    def enqueue() -> None:
        for number in range(count):
            start_s = time.monotonic()
            cuda(
                "cuMemcpyDtoDAsync_v2",
                memory + 2 * MIB,
                memory + 4096 * (number % 64),
                4096,
                stream,
            )
            calls_ms.append((time.monotonic() - start_s) * 1e3)

    asking = threading.Thread(target=ask)
    asking.start()
    hold_s = 0.2 if small else 1.0
    whole_ms = held.during(stream, enqueue, hold_s)
    stopping.set()
    asking.join()
    slow = [number for number, took in enumerate(calls_ms) if took > 20]
    say("copies", count)
    say("all_copies_ms", whole_ms)
    say("blocked_at", slow[0] if slow else None)
    say("longest_call_ms", max(calls_ms))
    say("longest_call_of_another_thread_ms", max(others_ms, default=0.0))
    say("held_ms", hold_s * 1e3)
    with step(say, "first_launch"):
        say("first_launch_while_held_ms", held.during(stream, lambda: Kernel(cuda, b"burn", 1)()))
    with step(say, "one_queue"):
        say("one_queue_copy_while_held_ms", narrow(copy_beside_held))
    with step(say, "batches"):
        batches(say, held, stream, small)


def batches(say: Say, held: Held, stream: int, small: bool) -> None:
    """Milliseconds of a call that enqueues a batch of device copies behind a held stream, by the
    number of copies; and until 1,168 tensors are copied, with one call and with a call each."""
    cuda, most, length = HERE.cuda, 1168, 4096 if small else 1820 * 1024
    source, target = cuda.memory(most * length), cuda.memory(most * length)

    def batch(*counts: int) -> None:
        for count in counts:
            code = batch_code(cuda, stream, scattered(source, target, count, length))
            if code:
                raise RefusedError("cuMemcpyBatchAsync", cuda.name(code))

    def one_by_one() -> None:
        for copy in scattered(source, target, most, length):
            cuda("cuMemcpyDtoDAsync_v2", *copy, stream)

    def until_copied(enqueue: Callable[[], None]) -> dict[str, float]:
        found = []
        for _ in range(3 if small else 20):
            start_s = time.perf_counter()
            enqueue()
            cuda.wait(stream)
            found.append((time.perf_counter() - start_s) * 1e3)
        return spread(found)

    for count in (64, 512, 1024, most):
        say(f"batch_of_{count}_ms", held.during(stream, functools.partial(batch, count)))
    say("two_batches_ms", held.during(stream, lambda: batch(1024, most - 1024)))
    say("copied_by_one_call_ms", until_copied(lambda: batch(most)))
    say("copied_one_by_one_ms", until_copied(one_by_one))
    say("copied_gb", most * length / 1e9)


def copy_beside_held() -> float:
    begin()
    cuda, other = HERE.cuda, HERE.cuda.stream()
    memory, target = cuda.memory(4096), cuda.pinned(4096)

    def copy() -> None:
        cuda.to_host(target.address, memory, 4096, other)
        cuda.wait(other)

    return Held(cuda).during(cuda.stream(), copy)


class Kernel:
    """One kernel with its memory; a call launches it."""

    def __init__(self, cuda: Cuda, name: bytes, count: int, length: int = MIB) -> None:
        self.cuda, self.stream = cuda, cuda.stream()
        module = cuda.out("cuModuleLoadData", KERNELS)
        self.function = cuda.out("cuModuleGetFunction", module, name)
        self.memory = ctypes.c_uint64(cuda.memory(length))
        self.count = ctypes.c_uint64(count)
        self.blocks = 8 * (cuda.out("cuDeviceGetAttribute", 16, cuda.device) & 0xFFFFFFFF)

    def __call__(self) -> None:
        pointers = (ctypes.c_void_p * 2)(
            ctypes.addressof(self.memory), ctypes.addressof(self.count)
        )
        self.cuda("cuLaunchKernel", self.function, self.blocks, 1, 1, 256, 1, 1, 0, self.stream,
                  pointers, None)  # fmt: skip

    def ms(self, seconds: float) -> float:
        """The mean of launches for so long."""
        start_s, launches = time.monotonic(), 0
        while time.monotonic() - start_s < seconds:
            for _ in range(16):
                self()
            self.cuda.wait(self.stream)
            launches += 16
        return (time.monotonic() - start_s) * 1e3 / launches


def overlap(say: Say, small: bool) -> None:
    """Kernels that compute and kernels that move memory beside copies; against both runs alone."""
    puller = Peer()
    begin()
    cuda, seconds = HERE.cuda, 0.1 if small else 0.6
    sent = make_plain(1, 16 * CHUNK_BYTES if not small else CHUNK_BYTES)
    puller(begin_importing)
    puller(open_plain, sent, HERE.length)
    length = 64 * MIB if small else GIB
    for name, count in ((b"burn", 20000), (b"sweep", length // 4)):
        with step(say, name.decode()):
            kernel = Kernel(cuda, name, count, length)
            kernel.ms(0.3)  # clocks go up
            before = kernel.ms(seconds)
            puller(pull_begin, 3)
            pulled = kernel.ms(seconds)
            pull_gb_s = puller(pull_end)
            pull_begin(3)
            pushed = kernel.ms(seconds)
            push_gb_s = pull_end()
            alone = (before + kernel.ms(seconds)) / 2
            say(name.decode(), {"alone_ms": alone, "pull": pulled / alone, "push": pushed / alone,
                                "pull_gb_s": pull_gb_s, "push_gb_s": push_gb_s})  # fmt: skip


# -- page ------------------------------------------------------------------------------------------


def watch(count: int) -> list[float]:
    """When this CPU has seen each number that a stream writes; tells so in the next word."""
    page, seen_s = HERE.pages[0], []
    for number in range(1, count + 1):
        await_word(page, 0, number)
        seen_s.append(time.perf_counter())
        page.word(1).value = number
    return seen_s


def release(count: int) -> list[float]:
    """Lets a stream go each time that it is asked to; when."""
    page, stored_s = HERE.pages[0], []
    for number in range(1, count + 1):
        await_word(page, 3, number)
        stored_s.append(time.perf_counter())
        page.word(2).value = number
    return stored_s


def await_word(page: Host, place: int, value: int) -> None:
    word, until_s = page.word(place), time.monotonic() + 5
    while word.value < value:
        if time.monotonic() > until_s:
            raise RefusedError("a word", "was not seen within 5 s")


def page(say: Say, small: bool) -> None:
    """Words of a memfd page between a stream of this process and another process's CPU, which has
    not registered the page. Python's own loops take about a microsecond."""
    HERE.pages = [Host(4096)]
    page, other = HERE.pages[0], Peer()
    begin()
    cuda = HERE.cuda
    words, stream, count = cuda.words(page), cuda.stream(), 20 if small else 200
    say("device_address_is_host_address", words == page.address)
    wrote_s = []
    other.tell(watch, count)
    for number in range(1, count + 1):
        wrote_s.append(time.perf_counter())
        cuda("cuStreamWriteValue64_v2", stream, words, number, 0)
        await_word(page, 1, number)
    late = [seen - wrote for seen, wrote in zip(other.hear(), wrote_s, strict=True)]
    say("stream_write_to_other_cpu_us", spread([value * 1e6 for value in late]))
    early, went_s = 0, []
    other.tell(release, count)
    for number in range(1, count + 1):
        cuda("cuStreamWaitValue64_v2", stream, words + 128, number, 0)
        cuda("cuStreamWriteValue64_v2", stream, words + 256, number, 0)
        time.sleep(0.0003)
        early += page.word(4).value >= number
        page.word(3).value = number
        await_word(page, 4, number)
        went_s.append(time.perf_counter())
    late = [went - stored for went, stored in zip(went_s, other.hear(), strict=True)]
    say("other_cpu_store_to_stream_us", spread([value * 1e6 for value in late]))
    say("went_on_before_the_store", early)


# -- locks, power ----------------------------------------------------------------------------------


def register_again_and_again(length: int, seconds: float) -> float:
    """As the daemon pins its pool; the mean in milliseconds."""
    begin()
    pool, start_s, count = Host(length), time.monotonic(), 0
    while time.monotonic() - start_s < seconds or not count:
        HERE.cuda("cuMemHostRegister_v2", pool.address, length, 1)
        HERE.cuda("cuMemHostUnregister", pool.address)
        count += 1
    return (time.monotonic() - start_s) * 1e3 / count


def locks(say: Say, small: bool) -> None:
    """Milliseconds of an allocation and its free while another process, or another thread, pins 256
    MiB at a time; and of single calls while the default stream, on which torch trains, is held."""
    other = Peer()
    begin()
    cuda = HERE.cuda
    length, seconds = (4 * MIB, 0.1) if small else (256 * MIB, 1.0)

    def allocations() -> dict[str, float]:
        until_s, found = time.monotonic() + seconds, []
        while time.monotonic() < until_s:
            start_s = time.perf_counter()
            address = cuda.memory(2 * MIB)
            found.append((time.perf_counter() - start_s) * 1e3)
            cuda("cuMemFree_v2", address)
        return spread(found)

    say("alloc_alone_ms", allocations())
    other.tell(register_again_and_again, length, 2 * seconds)
    time.sleep(seconds / 2)
    say("alloc_beside_a_process_that_pins_ms", allocations())
    say("pinning_ms", other.hear())
    thread = threading.Thread(target=register_again_and_again, args=(length, 1.2 * seconds))
    thread.start()
    say("alloc_beside_a_thread_that_pins_ms", allocations())
    thread.join()
    held, memory, event = Held(cuda), cuda.memory(CHUNK_BYTES), cuda.event()
    pinned, plain, stream = cuda.pinned(CHUNK_BYTES), Host(CHUNK_BYTES), cuda.stream()
    cuda("cuEventRecord", event, 0)

    def copy() -> None:
        cuda.to_host(pinned.address, memory, CHUNK_BYTES, stream)
        cuda.wait(stream)

    calls: dict[str, Callable[[], object]] = {
        "event_query": lambda: cuda.code("cuEventQuery", event),
        "copy": copy,
        "stream_create": cuda.stream,
        "alloc": lambda: cuda.memory(32 * MIB),
        "ipc_get": lambda: cuda("cuIpcGetMemHandle", ctypes.byref(IpcHandle()), memory),
        "register": lambda: cuda("cuMemHostRegister_v2", plain.address, CHUNK_BYTES, 1),
        "unregister": lambda: cuda("cuMemHostUnregister", plain.address),
        "free": lambda: cuda("cuMemFree_v2", memory),
    }  # fmt: skip
    hold_s = 0.05 if small else HOLD_S
    found = {key: held.during(0, call, hold_s) for key, call in calls.items()}
    say("ms_while_the_default_stream_is_held", found | {"held": hold_s * 1e3})


def power(say: Say, small: bool) -> None:
    """Watts, SM clock and state: without a context of ours, with an idle one, beside copies."""
    if shutil.which("nvidia-smi") is None:
        raise NotHereError("nvidia-smi is not installed")
    command = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm,pstate", "--format=csv,noheader"]

    def sample(name: str) -> None:
        time.sleep(2)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        say(name, ran.stdout.strip())

    peer = Peer()
    sample("without_context")
    peer(begin)
    sample("idle_context")
    peer(make_plain, 1, 4 * CHUNK_BYTES)
    peer(pull_begin, 3)
    sample("copying")
    peer(pull_end)
    sample("idle_again")
    os.kill(peer.pid, 9)
