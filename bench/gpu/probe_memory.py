"""Parts of the probe about memory: how it is shared, what outlives its process, what it takes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.gpu.driver import (
    CHUNK_BYTES,
    FDS_MAX,
    GIB,
    MIB,
    READ_ONLY,
    Copies,
    Cuda,
    Fds,
    Host,
    Peer,
    RefusedError,
    more_descriptors,
)
from tests.standin.behaviours import IpcHandle, NotHereError

Say = Callable[[str, object], None]
USER_A, USER_B = 64001, 64002
SCRIBBLED = 0xDEADBEEF


class Shared:
    """Allocations of this process, or of another one: what a peer keeps between two calls."""

    cuda: Cuda
    length = 0
    addresses: list[int]
    handles: list[int]
    copies: Copies
    tensor: Any
    pages: list[Host]  # inherited from the parent
    ahead = 3


HERE = Shared()  # of each process


# -- both sides of sharing: functions that peers run ---------------------------------------------


def begin() -> None:
    more_descriptors()
    HERE.cuda = Cuda()


def make_plain(count: int, length: int) -> list[bytes]:
    """Allocations, the nth filled with n; their IPC handles."""
    cuda, sent = HERE.cuda, []
    HERE.length, HERE.addresses = length, [cuda.memory(length) for _ in range(count)]
    for number, address in enumerate(HERE.addresses):
        cuda.fill(address, number, length)
        handle = IpcHandle()
        cuda("cuIpcGetMemHandle", ctypes.byref(handle), address)
        sent.append(bytes(handle))
    cuda.wait()
    return sent


def make_mapped(count: int, length: int) -> int:
    """The same of memory with descriptors; its granularity."""
    cuda = HERE.cuda
    smallest = cuda.out("cuMemGetAllocationGranularity", ctypes.byref(cuda.properties()), 0)
    HERE.length = -(-length // smallest) * smallest
    HERE.handles = [cuda.create(HERE.length) for _ in range(count)]
    base = cuda.map(HERE.handles, HERE.length)
    HERE.addresses = [base + n * HERE.length for n in range(count)]
    for number, address in enumerate(HERE.addresses):
        cuda.fill(address, number, HERE.length)
    cuda.wait()
    return smallest


def make_of_torch(length: int) -> int:
    """Memory of torch's expandable segments, in pieces of 2 or 20 MiB; how many were exported."""
    torch = importlib.import_module("torch")
    tensor = torch.zeros(length // 4, dtype=torch.int32, device="cuda")
    begin()
    piece, cuda = 20 * MIB, HERE.cuda
    base = tensor.data_ptr() // (2 * MIB) * (2 * MIB)
    HERE.length, HERE.addresses = piece, list(range(base, base + length - piece, piece))
    HERE.handles = [cuda.out("cuMemRetainAllocationHandle", at) for at in HERE.addresses]
    for number, address in enumerate(HERE.addresses):
        cuda.fill(address, number, piece)
    cuda.wait()
    HERE.tensor = tensor
    return len(HERE.handles)


def send(first: int, count: int) -> Fds:
    return Fds(HERE.cuda.export(handle) for handle in HERE.handles[first : first + count])


def open_plain(sent: list[bytes], length: int) -> None:
    for raw in sent:
        handle = IpcHandle.from_buffer_copy(raw)
        HERE.addresses.append(HERE.cuda.out("cuIpcOpenMemHandle_v2", handle, 1))
    HERE.length = length


def take_mapped(fds: list[int]) -> None:
    HERE.handles += [HERE.cuda.take(descriptor) for descriptor in fds]


def map_taken(length: int) -> None:
    base = HERE.cuda.map(HERE.handles, length, READ_ONLY)
    HERE.length = length
    HERE.addresses = [base + n * length for n in range(len(HERE.handles))]


def mapped_access() -> str:
    return "read-only" if HERE.cuda.access == READ_ONLY else "read and write"


def right_bytes() -> int:
    """How many allocations have their number in the first and in the last word."""

    def word(address: int) -> int:
        return int.from_bytes(HERE.cuda.read(address), "little")

    return sum(
        word(address) == number == word(address + HERE.length - 4)
        for number, address in enumerate(HERE.addresses)
    )


def close_plain() -> None:
    for address in HERE.addresses:
        HERE.cuda("cuIpcCloseMemHandle", address)
    HERE.addresses = []


def close_mapped() -> None:
    HERE.cuda.unmap(HERE.addresses[0], HERE.handles, HERE.length)
    HERE.addresses, HERE.handles = [], []


def begin_importing() -> None:
    begin()
    HERE.addresses, HERE.handles = [], []


def sized() -> int:
    return HERE.length


def ms(run: Callable[..., object], *arguments: Any, **named: Any) -> float:
    start_s = time.monotonic()
    run(*arguments, **named)
    return (time.monotonic() - start_s) * 1e3


# -- the parts -------------------------------------------------------------------------------------


@contextlib.contextmanager
def step(say: Say, name: str) -> Iterator[None]:
    """A question whose failure is an answer; the next one is still asked."""
    try:
        yield
    except (RefusedError, NotHereError, TimeoutError) as error:
        kind = "not here" if isinstance(error, NotHereError) else "refused"
        say(name, f"{kind}: {error}")


def share_plain(source: Peer, target: Peer, count: int, length: int) -> float:
    """Opens in `target` what `source` makes; milliseconds of opening."""
    sent, took_ms = source(make_plain, count, length), 0.0
    for at in range(0, count, FDS_MAX):
        took_ms += ms(target, open_plain, sent[at : at + FDS_MAX], length)
    return took_ms


def share_mapped(source: Peer, target: Peer, count: int) -> tuple[float, float]:
    """The same of what `source` has made: milliseconds of import and of map."""
    took_ms = 0.0
    for at in range(0, count, FDS_MAX):
        _, fds = source(send, at, FDS_MAX)
        took_ms += ms(target, take_mapped, fds=fds)
        for descriptor in fds:
            os.close(descriptor)
    length = source(sized)
    return took_ms, ms(target, map_taken, length)


def pair(users: bool) -> tuple[Peer, Peer]:
    """An exporter and an importer; of two users, neither root, where this process may make them."""
    if users and os.getuid() == 0:
        return Peer(USER_A), Peer(USER_B)
    return Peer(), Peer()


def vmm(say: Say, small: bool) -> None:
    """Bytes of memory with a descriptor, and of plain memory, in a process of another user."""
    say("other_uid", os.getuid() == 0)
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # Imported here: another user may not be able to read torch's files.
    version = (
        importlib.import_module("torch").version.cuda if importlib.util.find_spec("torch") else None
    )
    plain, mapped, torch = pair(True), pair(True), pair(True)
    count, length = (3, 2 * MIB) if small else (8, 20 * MIB)
    with step(say, "plain"):
        for peer, function in zip(plain, (begin, begin_importing), strict=True):
            peer(function)
        share_plain(*plain, count, length)
        say("plain_right", [plain[1](right_bytes), count])
    with step(say, "mapped"):
        for peer, function in zip(mapped, (begin, begin_importing), strict=True):
            peer(function)
        say("granularity_bytes", mapped[0](make_mapped, count, length))
        share_mapped(*mapped, count)
        say("mapped_right", [mapped[1](right_bytes), count])
        say("mapped_access", mapped[1](mapped_access))
    with step(say, "of_torch"):
        if version is None:
            raise NotHereError("a torch with CUDA")
        made = torch[0](make_of_torch, 200 * MIB)
        torch[1](begin_importing)
        share_mapped(*torch, made)
        say("of_torch_right", [torch[1](right_bytes), made])


def handles(say: Say, small: bool) -> None:
    """How long sharing takes, for many and for large allocations, and closing beside copies."""
    plain, large, mapped = pair(False), pair(False), pair(False)
    count, length = (20, MIB) if small else (2000, 20 * MIB)
    say("allocations", [count, length // MIB])
    with step(say, "mapped"):
        mapped[0](begin)
        mapped[1](begin_importing)
        mapped[0](make_mapped, count, length)
        took = share_mapped(*mapped, count)
        say("mapped_import_ms", took[0])
        say("mapped_map_ms", took[1])
        say("mapped_right", [mapped[1](right_bytes), count])
        say("mapped_close_ms", ms(mapped[1], close_mapped))
    for peer in mapped:
        peer.end()
    with step(say, "plain"):
        plain[0](begin)
        plain[1](begin_importing)
        say("plain_open_ms", share_plain(*plain, count, length))
        say("plain_right", [plain[1](right_bytes), count])
        plain[0](copies_begin)
        say("plain_close_beside_copies_ms", ms(plain[1], close_plain))
        say("copies_beside_gb_s", plain[0](copies_end))
    for peer in plain:
        peer.end()
    with step(say, "large"):
        large[0](begin)
        large[1](begin_importing)
        size = 64 * MIB if small else 60 * GIB
        say("large_mib", size // MIB)
        say("large_open_ms", share_plain(*large, 1, size))
        say("large_close_ms", ms(large[1], close_plain))


def copies_begin() -> None:
    whole = HERE.length >= CHUNK_BYTES
    source = HERE.addresses[0] if whole else HERE.cuda.memory(CHUNK_BYTES)
    HERE.copies = Copies(HERE.cuda, source, CHUNK_BYTES, HERE.ahead)


def copies_end() -> float:
    return HERE.copies.stop()


def scribble(small: bool) -> float:
    """Takes most free memory and writes it, as a restarted trainer would; GiB."""
    begin()
    cuda, taken = HERE.cuda, 0
    piece = 16 * MIB if small else 2 * GIB
    wanted = 64 * MIB if small else cuda.free_bytes() // 10 * 9
    with contextlib.suppress(RefusedError):
        while taken + piece <= wanted:
            cuda.fill(cuda.memory(piece), SCRIBBLED, piece)
            taken += piece
    cuda.wait()
    return taken / GIB


def train(number_of_page: int) -> None:
    """Steps without end, which copies of nothing follow: a stream writes READY = n, "computes", and
    writes GONE = n before the update that makes every word n + 1."""
    cuda = HERE.cuda
    words, stream = cuda.words(HERE.pages[number_of_page]), cuda.stream()
    other = cuda.memory(HERE.length)
    for number in range(1, 1 << 30):
        for address in HERE.addresses:
            cuda.fill(address, number, HERE.length, stream)
        cuda("cuStreamWriteValue64_v2", stream, words, number, 0)
        for _ in range(4):
            cuda.fill(other, number, HERE.length, stream)
        cuda("cuStreamWriteValue64_v2", stream, words + 64, number, 0)
        if number % 8 == 0:
            cuda.wait(stream)


def death(say: Say, small: bool) -> None:
    """SIGKILL of a process whose memory another has open. Do the bytes stay right, though a third
    process writes all memory that is free, and does the memory come back at close? "training": does
    the word GONE, which the dead stream wrote before each update, tell whether the step is whole?
    """
    length = 64 * MIB if small else 512 * MIB
    rounds = [(kind, way) for way in ("idle", "copying", "training", "training")
              for kind in ("plain", "mapped")]  # fmt: skip
    HERE.pages = [Host(4096) for _ in rounds]
    sources = [Peer() for _ in rounds]
    third = [Peer(), Peer()]
    begin_importing()
    cuda = HERE.cuda
    host, stream = cuda.pinned(length), cuda.stream()
    say("mib", length // MIB)
    for number, (kind, way) in enumerate(rounds):
        name = f"{number} {kind}, {way}"
        with step(say, name):
            source, before = sources[number], cuda.free_bytes()
            HERE.addresses, HERE.handles = [], []
            source(begin)
            if kind == "plain":
                open_plain(source(make_plain, 1, length), length)
            else:
                source(make_mapped, 1, length)
                _, fds = source(send, 0, 1)
                take_mapped(fds)
                map_taken(length)
            if way == "training":
                source.tell(train, number)
                time.sleep(0.3 + 0.05 * number)
            if way == "copying":
                read_all(host, stream, length)
            found: dict[str, Any] = {"dead_ms": source.kill() * 1e3}
            if way == "training":
                found |= judge(host, stream, length, HERE.pages[number])
            else:
                cuda.wait(stream)
                found["right"] = host.holds(0, length) if way == "copying" else None
                if way == "idle":
                    found["scribbled_gib"] = third.pop()(scribble, small)
                read_all(host, stream, length)
                cuda.wait(stream)
                found["right_later"] = host.holds(0, length)
            found["held_mib"] = (before - cuda.free_bytes()) // MIB
            (close_plain if kind == "plain" else close_mapped)()
            found["back_ms"] = ms(await_free, before)
            found["lost_mib"] = (before - cuda.free_bytes()) // MIB
            say(name, found)


def read_all(host: Host, stream: int, length: int) -> None:
    ctypes.memset(host.address, 0xFF, length)  # no pass may take another's bytes for its own
    for at in range(0, length, CHUNK_BYTES):
        HERE.cuda.to_host(host.address + at, HERE.addresses[0] + at, CHUNK_BYTES, stream)


def judge(host: Host, stream: int, length: int, page: Host) -> dict[str, object]:
    ready, gone = page.word(0).value, page.word(1).value
    read_all(host, stream, length)
    HERE.cuda.wait(stream)
    whole = gone < ready
    return {"ready": ready, "gone": gone, "whole": whole,
            "right": host.holds(ready, length) if whole else None}  # fmt: skip


def await_free(wanted: int) -> None:
    until_s = time.monotonic() + 3
    while wanted - HERE.cuda.free_bytes() > MIB and time.monotonic() < until_s:
        time.sleep(0.01)


def mps(say: Say, small: bool) -> None:
    """Memory of a client of the MPS server, opened by another client and by no client."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise NotHereError("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory(prefix="pcc-mps-") as place:
        paths = {"CUDA_MPS_PIPE_DIRECTORY": place, "CUDA_MPS_LOG_DIRECTORY": place}
        environment = os.environ | paths
        pairs = {
            "client_to_client": (Peer(environment=paths), Peer(environment=paths)),
            "client_to_other": (Peer(environment=paths), Peer()),
            "other_to_client": (Peer(), Peer(environment=paths)),
        }
        for peer in (peer for peers in pairs.values() for peer in peers):
            peer.socket.settimeout(5)  # the server must be ended before this part's time is up
        subprocess.run([control, "-d"], env=environment, check=True, timeout=10)
        try:
            for name, (source, target) in pairs.items():
                for kind in ("plain", "mapped"):
                    with step(say, f"{name}, {kind}"):
                        source(begin)
                        target(begin_importing)
                        if kind == "plain":
                            share_plain(source, target, 2, 2 * MIB)
                        else:
                            source(make_mapped, 2, 2 * MIB)
                            share_mapped(source, target, 2)
                        say(f"{name}, {kind}", f"{target(right_bytes)} of 2 right")
        finally:
            for peers in pairs.values():
                for peer in peers:
                    peer.end()
            subprocess.run([control], input="quit\n", text=True, env=environment, timeout=20,
                           check=False)  # fmt: skip


ATTRIBUTES = {
    "multiprocessors": 16, "compute_mode": 20, "copy_engines": 40, "unified_addressing": 41,
    "capability_major": 75, "vmm": 102, "posix_descriptors": 103, "memory_ops_64": 122,
}  # fmt: skip


def facts(say: Say, small: bool) -> None:
    second = Peer()
    say("context_ms", ms(begin))
    cuda = HERE.cuda
    say("driver_version", cuda.out("cuDriverGetVersion"))
    name = ctypes.create_string_buffer(100)
    cuda("cuDeviceGetName", name, 99, cuda.device)
    say("name", name.value.decode())
    for key, number in ATTRIBUTES.items():
        with step(say, key):
            say(key, cuda.out("cuDeviceGetAttribute", number, cuda.device) & 0xFFFFFFFF)
    say("free_gib", cuda.free_bytes() / GIB)
    made: dict[str, Callable[[], int]] = {
        "plain": lambda: cuda.memory(4 * MIB),
        "mapped": lambda: make_mapped(1, 2 * MIB) and HERE.addresses[0],
        "async": lambda: cuda.out("cuMemAllocAsync", 4 * MIB, cuda.stream()),
    }
    for kind, make in made.items():
        with step(say, f"{kind}_handle"):
            handle = ctypes.byref(IpcHandle())
            say(f"{kind}_handle", cuda.result("cuIpcGetMemHandle", handle, make()))
    before = cuda.free_bytes()
    say("second_context_ms", ms(second, begin))
    say("second_context_mib", (before - cuda.free_bytes()) / MIB)


def register(places: Sequence[int], length: int) -> None:
    for place in places:
        HERE.cuda("cuMemHostRegister_v2", place, length, 1)


def host(say: Say, small: bool) -> None:
    """GB/s of copies between pinned memory and the GPU, and ms of registering a pool's memory."""
    begin()
    cuda = HERE.cuda
    length = 64 * MIB if small else 2 * GIB
    device, pool = cuda.memory(length), Host(length)
    for piece in (length, 256 * MIB, 64 * MIB):
        places = range(pool.address, pool.address + length, min(piece, length))
        took_ms = ms(register, places, min(piece, length))
        say(f"register_{length // MIB}_mib_by_{min(piece, length) // MIB}_ms", took_ms)
        rates = {"to_host": 0.0, "to_device": 0.0}
        for way in rates:
            start_s = time.monotonic()
            for at in range(0, length, CHUNK_BYTES):
                if way == "to_host":
                    cuda.to_host(pool.address + at, device + at, CHUNK_BYTES, 0)
                else:
                    cuda("cuMemcpyHtoDAsync_v2", device + at, pool.address + at, CHUNK_BYTES, 0)
            cuda.wait()
            rates[way] = round(length / (time.monotonic() - start_s) / 1e9, 2)
        say(f"copies_by_{min(piece, length) // MIB}_gb_s", rates)
        for at in places:
            cuda("cuMemHostUnregister", at)
