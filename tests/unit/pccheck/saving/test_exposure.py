"""Exposures: sent to the daemon, made again when necessary, and what follows from a refusal."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from pccheck.saving.exposure import STAGING_BYTES_MAX, Exposure, NoStagingError
from pccheck.state.extents import DevicePart, Range, Shape, lay_out, pack_device
from pccheck_native import E_BAD_HANDLE, NativeError
from pccheck_wire.codec import PIECE_BYTES, PIECES_MAX
from pccheck_wire.ends import Why
from pccheck_wire.errors import DeviceError, RefusedError, WaitTimeoutError
from pccheck_wire.messages import Chose, Expose, Lend
from tests.support.fakelink import FakeConnection
from tests.support.payload import FakeDevices
from tests.unit.pccheck.state.test_extents import view


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeDevices:
    return FakeDevices().install(monkeypatch)


def part(*addresses: int, volatile: int = 0, aside: bool = False) -> DevicePart:
    views = [view(address, 512, 0) for address in addresses or (1 << 40,)]
    if volatile:
        views.append(view(3 << 40, volatile, 0, volatile=True))
    made = lay_out(views, Shape(4096, aside)).device
    assert made
    return made


def chosen(connection: FakeConnection) -> list[tuple[str, str]]:
    return [(b.transfer, b.reason) for b in connection.sent if isinstance(b, Chose)]


def automatic() -> tuple[FakeConnection, Exposure]:
    connection = FakeConnection()
    return connection, Exposure(connection, "auto", 5)  # type: ignore[arg-type]


def native_error(text: str, name: str = "BAD_HANDLE") -> NativeError:
    error = NativeError(text)
    error.code, error.code_name = E_BAD_HANDLE, name
    return error


def test_the_same_layout_is_exposed_once() -> None:
    connection, exposure = automatic()
    first = exposure.prepare(part())
    again = exposure.prepare(part())
    assert (first.map, again.map, connection.exposed()) == (1, 1, [1])
    assert chosen(connection) == [("pull", "")]
    assert exposure.prepare(part(1 << 41)).map == 2
    assert connection.exposed() == [1, 2]
    assert chosen(connection) == [("pull", "")]
    assert connection.native.named("device_open") == [("device_open", 0)]


def test_other_memory_at_the_same_addresses_is_exposed_anew() -> None:
    connection, exposure = automatic()
    exposure.prepare(part())
    connection.native.holds = False
    assert exposure.prepare(part()).map == 2


def test_long_exposures_go_in_pieces() -> None:
    connection, exposure = automatic()
    data = os.urandom(2 * PIECES_MAX * PIECE_BYTES + 5)
    connection.native.expose = lambda *_: data  # type: ignore[method-assign]
    exposure.prepare(part())
    messages = [body for body in connection.sent if isinstance(body, Expose)]
    assert [message.more for message in messages] == [True, True, False]
    assert all(len(m.data) <= PIECES_MAX for m in messages)
    assert all(len(piece) <= PIECE_BYTES for m in messages for piece in m.data)
    assert b"".join(piece for m in messages for piece in m.data) == data


@pytest.mark.parametrize(
    ("transfer", "change", "reason"),
    [
        ("push", {}, "the client has"),
        ("auto", {"welcome": "no driver"}, "no driver"),
        ("auto", {"cannot_pull": "no memops"}, "GPU 0: no memops"),
        ("auto", {"expose_error": native_error("no handle")}, "neither a CUDA IPC handle"),
        ("auto", {"expose_error": native_error("no slot", "TOO_LARGE")}, "separate ranges"),
        ("auto", {"refusal": RefusedError("another uid")}, "another uid"),
        ("auto", {"refusal": RefusedError("two\nlines" + "x" * 300)}, "two lines"),
    ],
)
def test_what_cannot_be_pulled_is_pushed(
    transfer: str, change: dict[str, Any], reason: str
) -> None:
    connection = FakeConnection()
    if "welcome" in change:
        connection = FakeConnection(transfer="push", reason=change["welcome"])
    exposure = Exposure(connection, transfer, 5)  # type: ignore[arg-type]
    connection.native.cannot_pull = change.get("cannot_pull", "")
    connection.native.expose_error = change.get("expose_error")
    connection.refusal = change.get("refusal")
    for _ in range(3):
        assert exposure.prepare(part()).map == 0
    ((how, why),) = chosen(connection)
    assert how == "push" and reason in why and len(why) <= 200 and why.isprintable()
    assert len(connection.native.named("expose")) <= 1  # refused once is refused
    fresh = FakeConnection()  # but another daemon may take it
    exposure = Exposure(fresh, transfer, 5)  # type: ignore[arg-type]
    assert exposure.prepare(part()).map == (1 if transfer == "auto" else 0)


def test_a_refusal_that_may_pass_is_asked_about_again() -> None:
    connection, exposure = automatic()
    connection.refusal = RefusedError("its context was not made", retryable=True)
    maps = [exposure.prepare(part()).map for _ in range(31)]
    assert not any(maps)
    assert connection.exposed() == [1, 2, 3]  # at the first, the 11th and the 31st
    assert len(chosen(connection)) == 1
    connection.refusal = None
    maps = [exposure.prepare(part()).map for _ in range(40)]
    assert maps == [0] * 39 + [4]
    assert chosen(connection)[-1] == ("pull", "")


def test_what_cannot_be_shared_is_laid_out_apart_and_pushed() -> None:
    connection, exposure = automatic()
    both, flags = (1 << 40, 2 << 40), [b"\0\1"]
    connection.native.unshareable = lambda ranges: flags[0]  # type: ignore[method-assign]
    connection.native.expose_error = native_error("no handle")
    assert exposure.prepare(part(*both)).map == 0
    assert exposure.pushed == {2 << 40}
    connection.native.expose_error = None
    views = [view(address, 512, 0) for address in both]
    made = lay_out(views, Shape(4096, pushed=exposure.pushed)).device
    assert made
    handover = exposure.prepare(made)  # the next checkpoint, not the tenth
    assert handover.map == 1
    assert handover.sources() == (made.rest, 4096, 1)
    assert chosen(connection)[-1] == (
        "pull",
        "512 B of GPU memory that cannot be shared are pushed",
    )
    handover.enqueue(connection.native, 5)  # type: ignore[arg-type]
    assert [call[-2] for call in connection.native.named("mark")] == [True, False]
    # No progress, or nothing left to pull: refused for good.
    connection.native.holds, flags[0] = False, b"\1"
    connection.native.expose_error = native_error("no handle")
    assert [exposure.prepare(made).map for _ in range(20)] == [0] * 20
    assert "neither" in chosen(connection)[-1][1]


def test_memory_that_the_daemon_sees_otherwise_is_pushed() -> None:
    """Of that GPU alone, if there is another one."""
    connection, exposure = automatic()
    views = [view(1 << 40, 512, 0), view(2 << 40, 512, 1)]

    def laid_out() -> DevicePart:
        made = lay_out(views, Shape(4096, pushed=exposure.pushed)).device
        assert made
        return made

    assert exposure.prepare(laid_out()).map == 1
    exposure.broke(Why(stage="copy", code="DEVICE", argument=1))
    assert not exposure.pushed
    assert exposure.prepare(laid_out()).map == 2
    exposure.broke(Why(stage="copy", code="OTHER_MEMORY", argument=1))
    assert exposure.pushed == {2 << 40}
    handover = exposure.prepare(laid_out())
    assert handover.map == 3 and handover.sources()[1:] == (4096, 1)
    why = "512 B of GPU memory that pccheckd reads differently are pushed"
    assert chosen(connection)[-1] == ("pull", why)
    exposure.broke(Why(stage="copy", code="OTHER_MEMORY", argument=0))  # the daemon refuses it
    assert exposure.pushed == {2 << 40}
    connection.refusal = RefusedError("GPU 0")
    assert exposure.prepare(laid_out()).map == 0
    assert chosen(connection)[-1] == ("push", "GPU 0")


@pytest.mark.parametrize("code", ["DEVICE", "DEVICE_LOST"])
def test_only_memory_that_cannot_be_shared_is_refused_for_good(code: str) -> None:
    connection, exposure = automatic()
    connection.native.expose_error = native_error("a moment's failure", code)
    assert [exposure.prepare(part()).map for _ in range(10)] == [0] * 10
    connection.native.expose_error = None
    assert exposure.prepare(part()).map == 1


def test_descriptors_go_before_the_exposure_and_are_closed() -> None:
    connection, exposure = automatic()
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    batches = [descriptors[:2], descriptors[2:], []]
    connection.native.descriptors = lambda: batches.pop(0)  # type: ignore[method-assign]
    assert exposure.prepare(part()).map == 1
    *lent, exposed = [body for body in connection.sent if isinstance(body, (Lend, Expose))]
    assert lent == [Lend(1, 2), Lend(1, 1)]
    assert isinstance(exposed, Expose) and exposed.descriptors == 3
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_the_daemon_keeps_runs_only_of_an_exposure_that_it_took() -> None:
    connection, exposure = automatic()
    exposure.prepare(part())
    exposure.prepare(part(1 << 41))
    exposure.broke(Why())
    exposure.prepare(part(1 << 41))
    connection.refusal = RefusedError("no", retryable=True)
    exposure.prepare(part(1 << 42))
    connection.refusal = None
    for _ in range(10):
        exposure.prepare(part(1 << 42))
    known = [call[3] for call in connection.native.named("expose")]
    assert known == [False, True, False, True, False]


def test_a_daemon_whose_driver_is_late_is_asked_again() -> None:
    connection = FakeConnection(transfer="push", reason="still loading")
    connection.welcome.transfer_later = True
    exposure = Exposure(connection, "auto", 5)  # type: ignore[arg-type]
    assert [exposure.prepare(part()).map for _ in range(10)] == [0] * 9 + [1]
    asked = FakeConnection(transfer="push", reason="still loading")
    asked.welcome.transfer_later = True
    exposure = Exposure(asked, "push", 5)  # type: ignore[arg-type]
    assert not any(exposure.prepare(part()).map for _ in range(30))


def test_a_full_gpu_gets_what_torch_keeps_for_later(fakes: FakeDevices) -> None:
    """The room for the probe, for staging, and for what the daemon needs there."""
    connection, exposure = automatic()
    real, failures = connection.native.expose, [OSError(errno.ENOMEM, "out of memory")]

    def once_full(ranges: bytes, nbytes: int, known: bool, *replica: object) -> bytes:
        if failures:
            raise failures.pop()
        return real(ranges, nbytes, known, *replica)

    connection.native.expose = once_full  # type: ignore[method-assign]
    assert exposure.prepare(part()).map == 1
    assert fakes.emptied == [0]
    connection.refusal = DeviceError("no memory left for the daemon", retryable=True)
    connection.refusals = 1
    assert exposure.prepare(part(1 << 41)).map == 3
    assert fakes.emptied == [0, 0]
    connection.native.no_staging = True
    with pytest.raises(NoStagingError) as caught:
        exposure.prepare(part(volatile=512))
    assert caught.value.retryable
    assert fakes.emptied == [0, 0, 0]


def test_pull_that_cannot_be_had_is_an_error_when_it_was_demanded() -> None:
    connection = FakeConnection()
    exposure = Exposure(connection, "pull", 5)  # type: ignore[arg-type]
    connection.refusal = RefusedError("another uid")
    for _ in range(2):
        with pytest.raises(DeviceError, match="another uid"):
            exposure.prepare(part())
    assert chosen(connection) == [("push", "another uid")]
    connection.refusal = None  # the failure was temporary: a handle that did not open once
    assert exposure.prepare(part()).map == 3
    assert chosen(connection)[-1] == ("pull", "")


def test_a_gpu_that_lacks_what_pull_needs_is_named_every_time() -> None:
    connection = FakeConnection()
    exposure = Exposure(connection, "pull", 5)  # type: ignore[arg-type]
    connection.native.cannot_pull = "no stream memory operations"
    for _ in range(2):
        with pytest.raises(DeviceError, match="no stream memory"):
            exposure.prepare(part())
    assert connection.exposed() == []


def test_a_daemon_that_does_not_answer_is_no_refusal() -> None:
    connection, exposure = automatic()
    connection.refusal = WaitTimeoutError("slow")
    with pytest.raises(WaitTimeoutError):
        exposure.prepare(part())
    connection.refusal = None
    assert exposure.prepare(part()).map == 2


def test_a_gpu_that_cannot_be_opened_fails_the_checkpoint() -> None:
    connection, exposure = automatic()

    def broken(device: int) -> str:
        raise native_error("the CUDA driver refused")

    connection.native.device_open = broken  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="refused"):
        exposure.prepare(part())


def test_memory_stays_until_the_next_exposure_is_acknowledged() -> None:
    connection, exposure = automatic()
    one, two = part(), part(1 << 41)
    exposure.prepare(one)
    assert exposure._kept == [one]
    connection.refusal = WaitTimeoutError("slow")
    with pytest.raises(WaitTimeoutError):
        exposure.prepare(two)
    assert exposure._kept == [[one], two]
    connection.refusal = None
    exposure.prepare(two)
    assert exposure._kept == [two]


def test_a_broken_copy_is_exposed_anew_until_the_daemon_refuses() -> None:
    connection, exposure = automatic()
    for number in range(1, 6):
        assert exposure.prepare(part()).map == number
        exposure.broke(Why())
    connection.refusal = RefusedError("the GPU driver failed")
    assert exposure.prepare(part()).map == 0
    assert chosen(connection)[-1] == ("push", "the GPU driver failed")


def test_what_waits_for_a_slot_keeps_its_exposure() -> None:
    """A state that does not fit is pushed meanwhile, so nothing is sent to the daemon."""
    connection, exposure = automatic()
    assert exposure.prepare(part()).map == 1
    assert exposure.prepare(part(), queued=True).map == 1
    assert exposure.prepare(part(1 << 41), queued=True).map == 0
    assert connection.exposed() == [1]
    assert chosen(connection) == [("pull", "")]
    assert exposure.prepare(part(1 << 41)).map == 2
    exposure.broke(Why())
    assert exposure.prepare(part(1 << 41), queued=True).map == 0
    connection.refusal = RefusedError("another uid")
    assert exposure.prepare(part(1 << 42)).map == 0
    assert chosen(connection)[-1] == ("push", "another uid")


def test_demanded_pull_fails_beside_what_waits_for_a_slot() -> None:
    connection = FakeConnection()
    exposure = Exposure(connection, "pull", 5)  # type: ignore[arg-type]
    exposure.prepare(part())
    with pytest.raises(DeviceError, match="waits for a slot"):
        exposure.prepare(part(1 << 41), queued=True)
    assert connection.exposed() == [1]


def test_what_is_staged_is_exposed_where_it_is_staged() -> None:
    connection, exposure = automatic()
    made = part(volatile=512)
    handover = exposure.prepare(made)
    address = connection.native.staging(0, 512)
    assert handover.ranges == made.ranges({0: address})
    exposure.trim()
    assert not connection.native.named("staging_trim")
    exposure.prepare(part(volatile=9000))  # moves
    exposure.trim()
    exposure.trim()
    assert len(connection.native.named("staging_trim")) == 1
    assert connection.exposed() == [1, 2]


def test_staging_for_what_no_gate_guards_is_limited() -> None:
    connection, exposure = automatic()
    with pytest.raises(NoStagingError, match="without a gate"):
        exposure.prepare(part(volatile=STAGING_BYTES_MAX + 1))
    exposure.prepare(part(volatile=STAGING_BYTES_MAX + 1, aside=True))
    connection.native.no_staging = True
    with pytest.raises(NoStagingError, match="GPU 0 has no"):
        exposure.prepare(part(volatile=512))


def test_streams_are_sampled_before_staging_and_marked_after(fakes: FakeDevices) -> None:
    connection = FakeConnection()
    exposure = Exposure(connection, "push", 5)  # type: ignore[arg-type]
    views = [view(1 << 40, 512, 0), view(2 << 40, 64, 0, volatile=True), view(3 << 40, 64, 2)]
    made = lay_out(views, Shape(4096, aside=True)).device
    assert made
    handover = exposure.prepare(made)
    connection.native.calls.clear()
    fakes.streams = {0: 7, 2: 9}
    handover.enqueue(connection.native, 5)
    assert [(c[0], c[1], c[2], c[-1]) for c in connection.native.named("stage")] == [
        ("stage", 0, 7, False), ("stage", 0, 7, True), ("stage", 2, 9, True),
    ]  # fmt: skip
    assert connection.native.named("mark") == [
        ("mark", 5, 0, 7, False, True), ("mark", 5, 2, 9, False, True),
    ]  # fmt: skip
    names = [call[0] for call in connection.native.calls]
    assert names == ["sample", "stage", "stage", "mark", "sample", "stage", "mark"]
    everything = pack_device([Range(1 << 40, 0, 512), Range(2 << 40, 512, 64)], 0)
    everything += pack_device([Range(3 << 40, 4096, 64)], 2)  # where it is before it was staged
    assert connection.native.named("sample") == [
        ("sample", 5, 0, 7, everything), ("sample", 5, 2, 9, everything),
    ]  # fmt: skip


def test_graphs_that_are_recorded_are_noticed() -> None:
    connection, exposure = automatic()
    connection.native.captures = True
    assert not exposure.capturing()  # no stream of a GPU is known yet
    exposure.prepare(part())
    assert exposure.capturing()


def test_no_room_for_the_probe_is_no_reason_to_fail() -> None:
    connection, exposure = automatic()
    connection.native.expose_error = OSError(errno.ENOMEM, "out of memory")
    assert exposure.prepare(part()).map == 0
    assert "out of memory" in chosen(connection)[0][1]
    assert connection.exposed() == []  # there was nothing to take back


def test_what_is_pushed_from_now_on_is_taken_back() -> None:
    connection, exposure = automatic()
    exposure.prepare(part())
    connection.native.expose_error = native_error("no handle")
    for _ in range(2):
        assert exposure.prepare(part(1 << 41)).map == 0
    messages = [body for body in connection.sent if isinstance(body, Expose)]
    assert [bool(message.data) for message in messages] == [True, False]
    assert messages[1].map > messages[0].map


def replicated(rank: int = 0) -> DevicePart:
    views = [view(address << 40, 512, 0) for address in (1, 2)]
    for number, one in enumerate(views):
        one.path, one.shared = f"x.{number}", True
    made = lay_out(views, Shape(4096, rank=rank, world_size=2, replica=True)).device
    assert made and made.replica.id
    return made


def test_what_other_ranks_store_is_exposed_beside_what_this_one_does() -> None:
    connection, exposure = automatic()
    one = replicated()
    for _ in range(2):
        assert exposure.prepare(one).map == 1
    (call,) = connection.native.named("expose")
    assert call[-3:] == (one.replica.id, one.replica.ranges, one.replica.shares)
    assert len(one.replica.ranges) == 2 * len(one.ranges({}))
    exposure.prepare(part(1 << 40))  # the same payload, and nothing for others
    assert connection.exposed() == [1, 2]


def test_memory_of_other_ranks_that_cannot_be_shared_ends_nothing() -> None:
    connection, exposure = automatic()
    real, asked = connection.native.expose, []

    def refuse(ranges: bytes, nbytes: int, known: bool, *replica: object) -> bytes:
        asked.append(any(replica))
        if any(replica):
            raise native_error("no handle")
        return real(ranges, nbytes, known, *replica)

    connection.native.expose = refuse  # type: ignore[method-assign]
    for _ in range(2):
        assert exposure.prepare(replicated()).map == 1
    assert (asked, exposure.exposes_replica) == ([True, False], False)
