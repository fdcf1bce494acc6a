"""The gate: streams wait for GPU parts, the CPU for the rest, and neither beyond the deadline."""

from __future__ import annotations

import errno

import pytest

from pccheck.flight.in_flight import InFlight
from pccheck.saving.gate import Breaker, Gate
from pccheck.state.extents import DevicePart, Shape, lay_out
from pccheck_native import NativeError
from pccheck_wire.errors import CheckpointFailedError
from pccheck_wire.messages import CheckpointState
from tests.support.fakelink import FakeConnection, FakeLink
from tests.support.payload import FakeDevices
from tests.unit.pccheck.state.test_extents import view


class Kit:
    def __init__(self) -> None:
        self.connection = FakeConnection()
        self.expired: list[int] = []
        self.gate = Gate(5, lambda item: self.expired.append(item.snapshot))

    @property
    def native(self) -> FakeLink:
        return self.connection.native

    def add(
        self, part: DevicePart | None = None, *, host: bool = False, owners: object = None
    ) -> InFlight:
        number = next(self.connection.snapshots)
        self.native.request(number)
        made = InFlight(1, self.connection, number)  # type: ignore[arg-type]
        self.gate.add(made, [owners], host=host, part=part)
        return made


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeDevices:
    return FakeDevices().install(monkeypatch)


def part(*devices: int, staged: bool = False, aside: bool = False) -> DevicePart:
    views = [view(1 << 40, 512, device) for device in devices or (0,)]
    if staged:
        views += [view(2 << 40, 64, device, volatile=True) for device in devices or (0,)]
    made = lay_out(views, Shape(4096, aside)).device
    assert made
    return made


def test_streams_wait_and_the_cpu_does_not(kit: Kit) -> None:
    kit.add(part(0, 3))
    kit.gate.wait()
    assert sorted(kit.native.named("hold")) == [("hold", 1, 0, 100), ("hold", 1, 3, 103)]
    assert not kit.native.named("wait_read", "abandon") and not kit.expired
    assert not kit.gate.idle  # its memory is kept until it was read
    kit.native.copied(1)
    kit.gate.collect()
    assert kit.gate.idle and not kit.expired


def test_every_stream_waits_once(kit: Kit, fakes: FakeDevices) -> None:
    kit.add(part(0))
    kit.gate.wait()
    kit.gate.wait()
    assert len(kit.native.named("hold")) == 1
    fakes.streams[0] = 7  # another optimizer, which steps in a stream of its own
    kit.gate.wait()
    assert kit.native.named("hold") == [("hold", 1, 0, 100), ("hold", 1, 0, 7)]
    kit.native.copied(1)
    fakes.streams[0] = 8
    kit.gate.wait()
    kit.gate.wait()
    assert len(kit.native.named("hold")) == 3 and kit.gate.idle


def test_the_cpu_waits_for_host_memory_only(kit: Kit) -> None:
    kit.add(part(0), host=True)
    kit.native.read.add(1)
    kit.gate.wait()
    assert kit.native.named("hold", "wait_read") == [("hold", 1, 0, 100), ("wait_read", 1, True)]


def test_cpu_tensors_are_waited_for_as_before(kit: Kit) -> None:
    kit.add(None, host=True)
    kit.native.read.add(1)
    kit.gate.wait()
    assert kit.native.named("hold", "wait_read") == [("wait_read", 1, False)]
    assert kit.gate.idle


def test_what_records_a_graph_waits_on_the_cpu(kit: Kit) -> None:
    kit.add(part(0))
    kit.native.read.add(1)
    kit.gate.wait(on_cpu=True)
    assert kit.native.named("hold", "wait_read") == [("wait_read", 1, False)]
    assert kit.gate.idle


@pytest.mark.parametrize("host", [True, False])
def test_an_expired_deadline_abandons_and_tells_once(kit: Kit, host: bool) -> None:
    made = kit.add(part(0), host=host)
    if not host:
        kit.native.unholdable.add(1)
    kit.gate.wait()
    assert kit.native.named("abandon") == [("abandon", 1)]
    assert made.state is CheckpointState.FAILED and made.reason.startswith("abandoned")
    kit.gate.wait()
    kit.gate.collect()
    assert kit.expired == [1] and kit.gate.idle


def test_a_snapshot_that_was_copied_just_in_time_has_not_expired(kit: Kit) -> None:
    kit.add(part(0))
    kit.native.unholdable.add(1)
    kit.native.copied(1)
    kit.gate.wait()
    assert not kit.expired and kit.gate.idle


def test_what_the_link_gave_up_while_a_stream_waited_is_noticed_once(kit: Kit) -> None:
    made = kit.add(part(0))
    kit.gate.wait()
    kit.native.let_go(1)
    for _ in range(3):
        kit.gate.collect()
    assert kit.expired == [1] and made.state is CheckpointState.FAILED
    assert made.reason.startswith("abandoned") and kit.gate.idle


def test_work_before_the_snapshot_is_no_stall(kit: Kit) -> None:
    """A GPU that is still busy gets more time, and afterwards the daemon gets its own limit."""
    kit.add(part(0, staged=True, aside=True))
    kit.native.behind[1] = 3
    kit.native.unholdable.add(1)
    with pytest.raises(CheckpointFailedError, match="staging"):
        kit.gate.free_staging(part(0, staged=True, aside=True), skip=False)
    assert kit.native.named("hold") == [("hold", 1, 0, None)] * 4
    assert kit.expired == [1]


def test_the_cpu_waits_for_what_the_gpu_has_to_do_first(kit: Kit) -> None:
    kit.add(part(0))
    kit.native.behind[1] = 2
    kit.gate.wait(on_cpu=True)
    assert len(kit.native.named("wait_read")) == 3
    assert kit.expired == [1]


def test_the_next_one_has_its_own_time_after_a_busy_gpu(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the first snapshot passed the limit because the GPU was busy; the second may
    still be copied."""
    now_s, deadlines = 0.0, {}

    def wait_read(snapshot: int, deadline_ns: int, **_: bool) -> bool:
        nonlocal now_s
        now_s += 60
        deadlines[snapshot] = deadline_ns / 1e9
        return True

    monkeypatch.setattr("pccheck.saving.gate.time.monotonic_ns", lambda: int(now_s * 1e9))
    kit.native.wait_read = wait_read  # type: ignore[method-assign]
    kit.add(part(0))
    kit.add(part(0))
    kit.native.behind[1] = 1
    kit.gate.wait(on_cpu=True)
    assert deadlines == {1: 5, 2: 65}


def test_pushed_behind_a_busy_gpu_is_no_stall(kit: Kit) -> None:
    """The CPU waits until all copies are enqueued. Memory for them may become free only through
    copies that the GPU has not begun."""
    kit.add(part(0))
    kit.native.behind[1] = 2
    kit.native.unholdable.add(1)
    kit.gate.wait()
    assert len(kit.native.named("hold")) == 3
    assert kit.expired == [1]


def test_a_failing_gpu_is_no_stall(kit: Kit) -> None:
    made = kit.add(part(0))
    kit.gate.wait()
    kit.native.let_go(1, "DEVICE")
    kit.gate.collect()
    assert not kit.expired and made.state is CheckpointState.FAILED
    assert "GPU" in made.reason and "DEVICE" in made.reason


def test_a_daemon_that_ended_is_no_stall(kit: Kit) -> None:
    made = kit.add(part(0))
    kit.gate.wait()
    kit.connection.lives = False
    kit.native.let_go(1)
    kit.gate.collect()
    assert not kit.expired and kit.gate.idle
    assert made.state is CheckpointState.FAILED


def test_a_stream_that_cannot_wait_makes_the_cpu_wait(kit: Kit) -> None:
    def broken(*_: object) -> bool:
        raise NativeError("the driver refused")

    kit.add(part(0))
    kit.native.hold = broken  # type: ignore[assignment]
    kit.native.read.add(1)
    kit.gate.wait()
    assert kit.native.named("wait_read") == [("wait_read", 1, False)] and not kit.expired


def test_interrupted_it_abandons_what_nothing_waits_for(kit: Kit) -> None:
    first = kit.add(part(0))
    kit.gate.wait()
    second = kit.add(part(0), host=True)
    third = kit.add(part(0))
    kit.native.interrupt = "wait_read"
    with pytest.raises(KeyboardInterrupt):
        kit.gate.wait()
    assert kit.native.named("abandon") == [("abandon", 2), ("abandon", 3)]
    assert first.state is not CheckpointState.FAILED  # the stream waits for it
    assert second.state is third.state is CheckpointState.FAILED
    assert not kit.expired


def test_memory_is_kept_until_it_was_read(kit: Kit) -> None:
    import weakref

    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    kit.add(part(0), owners=owner)
    del owner
    kit.gate.wait()
    kit.gate.collect()
    assert gone() is not None
    kit.native.copied(1)
    kit.gate.collect()
    assert gone() is None


# -- staging memory ----------------------------------------------------------------------------


def test_a_stream_that_waits_already_is_order_enough_for_staging(
    kit: Kit, fakes: FakeDevices
) -> None:
    kit.add(part(0, staged=True))
    kit.gate.wait()
    kit.gate.free_staging(part(0, staged=True), skip=True)
    assert not kit.native.named("wait_read")
    fakes.streams[0] = 7
    with pytest.raises(CheckpointFailedError, match="staging"):
        kit.gate.free_staging(part(0, staged=True), skip=True)
    kit.native.read.add(1)
    kit.gate.free_staging(part(0, staged=True), skip=True)


def test_without_a_gate_between_them_staging_waits_on_the_gpu(kit: Kit) -> None:
    kit.add(part(0, 3, staged=True))
    kit.native.interrupt = "hold"
    with pytest.raises(KeyboardInterrupt):
        kit.gate.free_staging(part(0, staged=True), skip=False)
    kit.native.interrupt = ""
    kit.native.calls.clear()
    for _ in range(2):  # once is enough
        kit.gate.free_staging(part(0, staged=True), skip=False)
        assert sorted(kit.native.calls) == [("hold", 1, 0, None), ("hold", 1, 3, None)]
    kit.add(part(0, staged=True))  # it may be staged while the first one is being read
    kit.gate.free_staging(part(0, staged=True), skip=False)
    assert kit.native.named("hold")[2:] == [("hold", 2, 0, None)] and not kit.expired


def test_staging_that_cannot_wait_in_time_fails_its_checkpoint(kit: Kit) -> None:
    kit.add(part(0, staged=True))
    kit.native.unholdable.add(1)
    with pytest.raises(CheckpointFailedError, match="stall_limit_s"):
        kit.gate.free_staging(part(0, staged=True), skip=False)
    assert kit.expired == [1]
    kit.gate.free_staging(part(0, staged=True), skip=False)


def test_staging_waits_on_the_cpu_if_the_driver_refuses(kit: Kit) -> None:
    def refuse(*_: object) -> bool:
        raise NativeError("no memory")

    kit.native.hold = refuse  # type: ignore[method-assign]
    kit.add(part(0, staged=True))
    kit.native.read.add(1)
    kit.gate.free_staging(part(0, staged=True), skip=False)
    kit.native.read.clear()
    with pytest.raises(CheckpointFailedError, match="stall_limit_s"):
        kit.gate.free_staging(part(0, staged=True), skip=False)
    assert kit.native.named("wait_read") == [("wait_read", 1, False)]


def test_other_gpus_and_snapshots_that_stage_nothing_are_not_waited_for(kit: Kit) -> None:
    kit.add(part(1, staged=True))
    kit.add(part(0))
    kit.gate.free_staging(part(0, staged=True), skip=True)
    assert not kit.native.named("wait_read")


def test_the_stream_of_a_device_snapshot_waited_for_less(kit: Kit) -> None:
    kit.add(part(0, aside=True))
    kit.gate.wait()
    with pytest.raises(CheckpointFailedError, match="staging"):
        kit.gate.free_staging(part(0, aside=True), skip=True)


def test_a_driver_without_memory_for_the_wait_makes_the_cpu_wait(kit: Kit) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(errno.ENOMEM, "out of memory")

    kit.native.hold = refuse  # type: ignore[method-assign]
    kit.add(part(0))
    kit.gate.wait()
    assert kit.native.named("wait_read", "abandon") == [("wait_read", 1, False), ("abandon", 1)]


def test_a_breaker_asks_again_when_an_answer_was_lost(kit: Kit) -> None:
    now = 0.0
    breaker = Breaker(5, clock=lambda: now)
    asked = []
    kit.connection.ask = lambda body, callback: asked.append(callback)  # type: ignore[method-assign]
    breaker.trip(kit.connection, [])  # type: ignore[arg-type]
    assert not breaker.closed() and len(asked) == 1
    now = 6
    assert not breaker.closed() and len(asked) == 2
    asked[1](None)
    assert breaker.closed()
