"""Processes with GPUs are held in the driver, and go on again whatever happens: on the stand-in,
with faults on demand."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.standin.behaviours import CHECKPOINTED, LOCKED, RUNNING, Driver
from tests.support import standin
from tests.support.gpuholder import Holder, HolderError
from tests.support.standin import CHECKPOINT, LOCK, RESTORE, UNLOCK
from tests.support.standinpeer import Peer
from tests.support.waiting import until

MIB = 1 << 20
SIZE = 4 * MIB
A = "GPU-7374616e-642d-696e-2067-70752030a55a"
QUICK = {"lock_s": 0.2, "lock_margin_s": 0.2, "move_s": 0.5, "settle_s": 0.2, "room_s": 0.2}
PATIENT = {"lock_s": 20.0, "settle_s": 60.0}
MAPS = {"version": 13000}


@pytest.fixture
def directory() -> Iterator[Path]:
    with standin.device_memory() as made:
        yield made


@pytest.fixture
def target(directory: Path) -> Iterator[Callable[..., Peer]]:
    """Starts processes with a pattern in their GPU memory."""
    with ExitStack() as stack:

        def started(name: str = "target", device: int = 0, **options: Any) -> Peer:
            peer = stack.enter_context(Peer(directory, name, stages=True, **options))
            peer.address = peer(_allocate, ord(name[-1]), device)  # type: ignore[attr-defined]
            return peer

        yield started


@pytest.fixture
def holder(directory: Path) -> Iterator[Callable[..., Holder]]:
    with ExitStack() as stack:
        yield lambda name="holder", **options: stack.enter_context(
            Holder(directory, name, **options)
        )


@pytest.fixture
def watcher(directory: Path) -> Iterator[Peer]:
    with Peer(directory, "watcher") as peer:
        yield peer


# -- what processes do


def _allocate(cuda: Driver, byte: int, device: int) -> int:
    with cuda.on(device):
        address = cuda.out("cuMemAlloc_v2", SIZE)
        cuda("cuMemsetD8Async", address, byte, SIZE, None)
        cuda("cuStreamSynchronize", None)
    return address


def _free(cuda: Driver, address: int) -> None:
    with cuda.on(0):
        cuda("cuMemFree_v2", address)


def _bytes(cuda: Driver, address: int, device: int) -> bytes:
    host = ctypes.create_string_buffer(SIZE)
    with cuda.on(device):
        cuda("cuMemcpyDtoH_v2", host, address, SIZE)
    return host.raw


def _state(cuda: Driver, pid: int) -> int:
    state = ctypes.c_int(-1)
    with cuda.on(0):
        cuda("cuCheckpointProcessGetState", pid, ctypes.byref(state))
    return state.value


def _do(cuda: Driver, call: str, *arguments: Any) -> None:
    with cuda.on(0):
        cuda(call, *arguments)


def _block(cuda: Driver) -> int:
    """A stream that waits for a word."""
    memory = ctypes.create_string_buffer(8192)
    start = -(-ctypes.addressof(memory) // 4096) * 4096
    _kept.append(memory)
    with cuda.on(0):
        stream = cuda.out("cuStreamCreate", 1)
        cuda("cuMemHostRegister_v2", start, 4096, 3)
        word = cuda.out("cuMemHostGetDevicePointer_v2", start, 0)
        cuda("cuStreamWaitValue64_v2", stream, word, 1, 0)
    return start


def _open(cuda: Driver, start: int) -> None:
    ctypes.c_uint64.from_address(start).value = 1


_kept: list[Any] = []


def _pid(peer: Peer) -> int:
    assert peer.process.pid is not None
    return peer.process.pid


def _intact(peer: Peer, name: str = "target", device: int = 0) -> bool:
    found: bytes = peer(_bytes, peer.address, device)  # type: ignore[attr-defined]
    return found == bytes([ord(name[-1])]) * SIZE


def _left(directory: Path) -> list[Path]:
    return [*(directory / "runtime").glob("*/*")]


# -- taken and let go


def test_a_process_is_taken_and_goes_on(
    directory: Path, target: Any, holder: Any, watcher: Peer
) -> None:
    one, asks = target(), holder()
    found = asks("inspect", pid=_pid(one))
    assert found["gpu"] and found["bytes"] >= SIZE and found["refusals"] == []
    for _ in range(3):
        facts = asks("hold", pids=[_pid(one)], limits={})["facts"]
        assert watcher(_state, _pid(one)) == CHECKPOINTED
        assert not [*directory.glob(f"memory-*-{_pid(one)}-*")], "its memory is still on the GPU"
        assert _left(directory)
        asks("release")
        assert watcher(_state, _pid(one)) == RUNNING and _intact(one)
        assert not _left(directory)
    assert facts["processes"] == {str(_pid(one)): {"seen": [A], "bytes": {A: SIZE + 4096}}}
    assert facts["gpus"] == {A: {"name": "Stand-in A", "bytes": 64 << 30}}
    assert asks.faults.inits == 1, "the driver is started once, however many calls there are"


def test_a_process_waits_in_its_next_call(target: Any, holder: Any) -> None:
    one, asks = target(), holder()
    asks("hold", pids=[_pid(one)], limits={})
    one._link.send((_bytes, (one.address, 0)))
    assert not one._link.poll(0.05), "it goes on while it is held"
    asks("release")
    assert one._link.poll(60) and one._link.recv() == (False, b"t" * SIZE)


def test_a_process_without_a_gpu_is_left_alone(holder: Any, directory: Path) -> None:
    asks = holder()
    assert asks("hold", pids=[os.getpid()], limits={})["facts"] == {}
    asks("release")
    assert asks.faults.inits == 0 and not _left(directory)


def test_a_process_may_end_while_it_is_held(target: Any, holder: Any, directory: Path) -> None:
    one, asks = target(), holder()
    asks("hold", pids=[_pid(one)], limits={})
    one.kill()
    asks("release")
    assert not _left(directory)


def test_what_another_program_holds_stays_as_it_is(
    target: Any, holder: Any, watcher: Peer, directory: Path
) -> None:
    one, asks = target(), holder()
    watcher(_do, "cuCheckpointProcessLock", _pid(one), None)
    with pytest.raises(HolderError, match="is locked in the driver, not running") as refused:
        asks("hold", pids=[_pid(one)], limits={})
    assert refused.value.kind == "RefusedError"
    assert watcher(_state, _pid(one)) == LOCKED and not _left(directory)


# -- faults


@pytest.mark.parametrize("call", [LOCK, CHECKPOINT])
def test_one_of_several_fails_and_all_go_on(
    target: Any, holder: Any, watcher: Peer, call: int, directory: Path
) -> None:
    names = ("target-a", "target-b", "target-c")
    several, asks = [target(name) for name in names], holder()
    asks.faults.set(process_fail_skip=1, process_fail_code=801, process_fail_calls=call)
    with pytest.raises(HolderError, match=f"process {_pid(several[1])}"):
        asks("hold", pids=[_pid(one) for one in several], limits={})
    for one, name in zip(several, names, strict=True):
        assert watcher(_state, _pid(one)) == RUNNING and _intact(one, name)
    assert not _left(directory)


def test_a_busy_process_is_not_taken(target: Any, holder: Any, watcher: Peer) -> None:
    one, asks = target(), holder()
    word = one(_block)
    with pytest.raises(HolderError, match=r"was busy on its GPU for more than 0\.2 s"):
        asks("hold", pids=[_pid(one)], limits=QUICK)
    assert watcher(_state, _pid(one)) == RUNNING
    one(_open, word)
    assert _intact(one)


@pytest.mark.parametrize("call", [LOCK, CHECKPOINT])
def test_a_slow_call_is_waited_for(target: Any, holder: Any, call: int) -> None:
    one, asks = target(), holder()
    asks.faults.set(process_slow_us=300_000, process_slow_calls=call)
    assert asks("hold", pids=[_pid(one)], limits={"lock_s": 0.05})["facts"]
    asks("release")
    assert _intact(one)


@pytest.mark.parametrize("call", [LOCK, CHECKPOINT, RESTORE, UNLOCK])
def test_a_call_that_does_not_return_is_given_up_and_undone(
    target: Any, holder: Any, watcher: Peer, call: int
) -> None:
    """In the end it returns, perhaps after the command: then the guard undoes it."""
    one, asks = target(), holder()
    asks.faults.set(process_hold_calls=call)
    with pytest.raises(HolderError, match=r"has not answered cuCheckpointProcess\w+ of process"):
        asks("hold", pids=[_pid(one)], limits=QUICK)
        asks("release")
    asks.faults.set(process_hold_calls=0)
    until(lambda: watcher(_state, _pid(one)) == RUNNING)
    assert _intact(one)


PHASES = [(call, done) for call in (LOCK, CHECKPOINT, RESTORE, UNLOCK) for done in (0, 1)]


@pytest.mark.parametrize(("call", "done"), PHASES)
def test_a_guard_lets_them_go_on_when_the_command_is_killed(
    target: Any, holder: Any, watcher: Peer, call: int, done: int, directory: Path
) -> None:
    names = ("target-a", "target-b")
    several, asks = [target(name) for name in names], holder()
    asks.faults.set(process_hold_done=done, process_hold_skip=1, process_hold_calls=call)
    asks.start("hold", pids=[_pid(one) for one in several], limits=PATIENT)
    if call in (RESTORE, UNLOCK):
        asks.answer()
        asks.start("release")
    asks.faults.wait_for(lambda faults: faults.held_calls == 1)
    asks.kill()
    asks.faults.set(process_hold_calls=0)
    for one, name in zip(several, names, strict=True):
        until(lambda one=one: watcher(_state, _pid(one)) == RUNNING)  # type: ignore[misc]
        assert _intact(one, name)
    until(lambda: not _left(directory))


def test_the_next_command_undoes_what_nobody_else_has(
    target: Any, holder: Any, watcher: Peer, directory: Path
) -> None:
    one, dead = target(), holder()
    guard = dead("hold", pids=[_pid(one)], limits={})["guard"]
    os.kill(guard, signal.SIGKILL)
    dead.kill()
    assert watcher(_state, _pid(one)) == CHECKPOINTED and _left(directory)
    asks = holder("next")
    assert asks("recover") == {"going": [_pid(one)], "troubles": []}
    assert watcher(_state, _pid(one)) == RUNNING and _intact(one)
    assert asks("recover") == {"going": [], "troubles": []} and not _left(directory)


def test_a_living_command_keeps_what_it_holds(target: Any, holder: Any, watcher: Peer) -> None:
    one, living = target(), holder()
    living("hold", pids=[_pid(one)], limits={})
    assert holder("next")("recover") == {"going": [], "troubles": []}
    assert watcher(_state, _pid(one)) == CHECKPOINTED
    living("release")


def test_a_note_of_another_process_does_nothing(
    target: Any, holder: Any, watcher: Peer, directory: Path
) -> None:
    """The pid is used again, or the machine was started again."""
    one, dead = target(), holder()
    os.kill(dead("hold", pids=[_pid(one)], limits={})["guard"], signal.SIGKILL)
    dead.kill()
    (noted,) = _left(directory)
    text = noted.read_text()
    noted.write_text(text.replace('"start_time": ', '"start_time": 1'))
    (noted.parent / "reboot").write_text(text.replace('"boot": "', '"boot": "0'))
    (noted.parent / "torn").write_text(text[: len(text) // 2])
    asks = holder("next")
    assert asks("recover") == {"going": [], "troubles": []}
    assert watcher(_state, _pid(one)) == CHECKPOINTED, "that process is not ours"
    assert asks.faults.inits == 0 and not _left(directory)


def test_nothing_is_restored_without_room(
    target: Any, holder: Any, watcher: Peer, directory: Path
) -> None:
    """The driver would lose the process. The guard waits for room."""
    memory = {"memory_bytes": 300 * MIB}
    one, asks = target(**memory), holder(**memory)
    asks("hold", pids=[_pid(one)], limits=QUICK)
    with Peer(directory, "other", **memory) as other:
        blocks = [other(_allocate, 1, 0) for _ in range(12)]
        with pytest.raises(HolderError, match=r"MiB free of .*stays checkpointed, in host memory"):
            asks("release")
        assert watcher(_state, _pid(one)) == CHECKPOINTED
        for block in blocks:
            other(_free, block)
        until(lambda: watcher(_state, _pid(one)) == RUNNING)
    assert _intact(one)


# -- made again


def _image(asks: Holder, one: Peer) -> dict[str, Any]:
    """What a snapshot notes; the process is then as CRIU makes it again."""
    facts: dict[str, Any] = asks("hold", pids=[_pid(one)], limits={})["facts"]
    asks("forget")
    return facts


def test_a_process_gets_its_gpu_again(target: Any, holder: Any, watcher: Peer) -> None:
    one, asks = target(), holder()
    facts = _image(asks, one)
    assert asks("refusals", facts=facts, gpus={}) == {"refusals": []}
    asks("wake", facts=facts, gpus={}, limits={})
    assert watcher(_state, _pid(one)) == RUNNING and _intact(one)


def _other(number: int) -> str:
    """The UUID of another device."""
    return A.replace("30a55a", f"3{number}a55a")


def test_two_gpus_are_swapped(target: Any, holder: Any, watcher: Peer) -> None:
    one, asks = target(devices=2, **MAPS), holder(devices=2, **MAPS)
    facts = _image(asks, one)
    assert [*facts["gpus"]] == [*facts["processes"][str(_pid(one))]["bytes"]]
    new = _other(1)
    asks("wake", facts=facts, gpus={A: new}, limits={})
    assert _intact(one)
    assert asks("hold", pids=[_pid(one)], limits={})["facts"]["gpus"].keys() == {new}
    asks("release")


def test_a_driver_that_ignores_the_map_is_noticed(target: Any, holder: Any) -> None:
    one, asks = target(devices=2, **MAPS), holder(devices=2, **MAPS)
    facts = _image(asks, one)
    new = _other(1)
    asks.faults.set(process_no_map=1)
    with pytest.raises(HolderError, match=f"has put process .* on GPU {A}, not on {new}"):
        asks("wake", facts=facts, gpus={A: new}, limits={})
    one.process.join(60)
    assert one.process.exitcode == -signal.SIGKILL


def test_a_restore_that_never_returns_ends(target: Any, holder: Any, directory: Path) -> None:
    one, asks = target(), holder()
    facts = _image(asks, one)
    asks.faults.set(process_hold_calls=RESTORE)
    with pytest.raises(HolderError, match="has not answered cuCheckpointProcessRestore") as said:
        asks("wake", facts=facts, gpus={}, limits=QUICK)
    assert said.value.hint == "the process was ended again, and its snapshot is as it was"
    one.process.join(60)
    assert one.process.exitcode == -signal.SIGKILL and not _left(directory)


def test_a_killed_restore_is_finished_by_its_guard(target: Any, holder: Any, watcher: Peer) -> None:
    one, asks = target(), holder()
    facts = _image(asks, one)
    asks.faults.set(process_hold_calls=RESTORE, process_hold_done=1)
    asks.start("wake", facts=facts, gpus={}, limits={})
    asks.faults.wait_for(lambda faults: faults.held_calls == 1)
    assert watcher(_state, _pid(one)) == LOCKED
    asks.kill()
    asks.faults.set(process_hold_calls=0)
    until(lambda: watcher(_state, _pid(one)) == RUNNING)
    assert _intact(one)


def test_what_does_not_fit_is_refused_before(
    target: Any, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, asks = target(devices=3), holder(devices=3)
    facts = _image(asks, one)
    other, gone = _other(1), _other(9)

    def said(asks: Holder = asks, facts: dict[str, Any] = facts, to: str = A) -> str:
        found = asks("refusals", facts=facts, gpus={A: to} if to != A else {})
        return "; ".join(found["refusals"])

    assert said() == ""
    assert "cannot put a process on another GPU: release 580 or newer can" in said(to=other)
    assert f"GPU {gone} is not in this machine: name another one with --gpus" in said(to=gone)
    found = asks("refusals", facts=facts, gpus={other: A})["refusals"]
    assert f"its processes had no GPU {other}; they had {A}" in found
    assert said(facts={**facts, "processes": {}}, to=other).startswith("its processes used no GPU")
    newer = holder("newer", devices=3, release="595.1", **MAPS)
    assert said(newer, to=other).startswith("the NVIDIA driver's release is 595.1; the snapshot")
    monkeypatch.setenv("PCCHECK_STANDIN_ODD", "1")
    odd = holder("odd", devices=3, **MAPS)
    assert said(odd, to=other) == (
        f"GPU {other} is a Stand-in B; the snapshot was taken on a Stand-in A"
    )
    two = {**facts, "gpus": {**facts["gpus"], other: facts["gpus"][A]}}
    assert "two of its GPUs would become the same one" in said(newer, two, to=other)
