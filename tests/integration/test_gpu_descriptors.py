"""Pull of memory that has descriptors in the place of handles, as torch's expandable segments."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck.state.devices import HOST
from pccheck_wire import attach, codec
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import RefusedError
from pccheck_wire.messages import Chose, Expose, Hello, Request, Role
from tests.support import fakegpu
from tests.support.gpunode import Node
from tests.support.gputrainer import PARTS, GpuTrainer, Part
from tests.support.standin import SAMPLES

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's counts")
#: More than a piece of 2 MiB.
LARGE = (*PARTS, Part(3_000_000))


def saves(trainer: GpuTrainer, steps: int = 3) -> None:
    """Saves this many steps, each followed at once by an update; checks the newest checkpoint."""
    for _ in range(steps):
        trainer.step()
        last = trainer.checkpoint()
    trainer.step()
    assert trainer.wait_durable(last) == "durable"
    assert trainer.recover()["wrong"] == ""
    assert trainer.warnings == []


#: Files that other work of the daemon opens meanwhile.
FEW = 2


def open_files(node: Node) -> int:
    """Of the daemon."""
    assert node.daemon.process is not None
    return len(list(Path(f"/proc/{node.daemon.process.pid}/fd").iterdir()))


def test_expandable_segments_are_pulled_and_restored(node: Node) -> None:
    trainer = node.connect(LARGE, expands=True)
    saves(trainer)
    assert node.transfer() == ("pull", "")
    assert trainer.faults.bytes_to_host < 64 << 10  # proofs only
    assert node.faults.open_mappings > 10  # pieces
    trainer.kill()
    node.faults.wait_for(lambda f: f.open_mappings == 0 and f.reserved_bytes == 0)
    again = node.connect(LARGE, expands=True)
    assert again.check(again.restore()["step"]) == ""
    saves(again)
    assert node.transfer() == ("pull", "")


#: With a handle, with descriptors, and with neither.
THREE_WAYS = (
    Part(300_000), Part(3_000_000, expandable=True), Part(600_001, shareable=False),
    Part(5_000, kind="buffer"), Part(1_000, device=HOST),
)  # fmt: skip


def test_only_what_cannot_be_shared_is_pushed(node: Node) -> None:
    trainer = node.connect(THREE_WAYS)
    saves(trainer)
    before = trainer.faults.bytes_to_host, node.faults.bytes_to_host
    for _ in range(3):
        trainer.step()
        last = trainer.checkpoint()
    trainer.step()  # its stream waits for both
    assert trainer.wait_durable(last) == "durable"
    assert trainer.recover()["wrong"] == ""
    transfer, reason = node.transfer()
    assert transfer == "pull"
    assert "2.29 MiB of GPU memory that cannot be shared are pushed" in reason
    assert 0 <= trainer.faults.bytes_to_host - before[0] - 3 * 600_001 * 4 <= 3 * SAMPLES * 64
    assert node.faults.bytes_to_host - before[1] > 3 * 2 * 3_000_000 * 4  # its moment, too
    trainer.kill()
    again = node.connect(THREE_WAYS)
    assert again.check(again.restore()["step"]) == ""


def test_sessions_that_come_and_go_leave_nothing_open(node: Node) -> None:
    files, mapped = set(), set()
    for _ in range(4):
        trainer = node.connect(LARGE, expands=True)
        trainer.restore()
        saves(trainer)
        mapped.add(node.faults.open_mappings)
        files.add(open_files(node))
        trainer.kill()
        node.faults.wait_for(lambda f: f.open_mappings == 0 and f.reserved_bytes == 0)
    assert len(mapped) == 1 and max(files) - min(files) <= 3  # what the first one leaves


@pytest.mark.parametrize("late", ["daemon", "trainer"])
def test_an_update_waits_for_both_ways(node: Node, late: str) -> None:
    trainer = node.connect(THREE_WAYS[:3])
    saves(trainer)
    held, other = trainer.faults, node.faults
    if late == "daemon":
        held, other = other, held
    start = other.bytes_to_host
    trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    copied = other.bytes_to_host
    held.hold_copies(after=SAMPLES if late == "trainer" else 0)
    handle = trainer.checkpoint()
    step = trainer.step() - 1
    held.wait_for(lambda f: f.held_copies > 0)
    other.wait_for(lambda f: f.bytes_to_host >= 2 * copied - start)  # all that it has to copy
    for _ in range(20):  # the daemon would have released the stream by now
        node.status()
    assert trainer.faults.waits > 0
    held.release_copies()
    assert trainer.wait_durable(handle) == "durable"
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (step, "")
    assert trainer.check(step + 1) == ""


# -- hostile trainers ------------------------------------------------------------------------------


@pytest.fixture
def hostile(node: Node) -> Iterator[attach.Attachment]:
    """A trainer's session that sends what it likes. Behind it, nothing of it stays open."""
    hello = Hello(
        PROTOCOL_VERSION, Role.TRAINER, "", os.getpid(), job="hostile", fresh=True, solo=True,
        process=os.urandom(16),
    )  # fmt: skip
    files = []
    for hostile in (False, True):
        with attach.connect(hello, str(node.daemon.socket)) as session:
            if hostile:
                yield session
        node.wait_for(lambda: not node.status()["sessions"])
        files.append(open_files(node))
    assert files[1] <= files[0] + FEW
    assert node.alive()


def send(session: attach.Attachment, number: int, count: int) -> None:
    with tempfile.TemporaryFile() as file:
        session.lend(number, [file.fileno()] * count, timeout_s=5)


def refused(session: attach.Attachment, body: Expose, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        session.request(body)


def run(pieces: int, uuid: bytes = bytes(16)) -> bytes:
    """An exposure of one run of pieces of 2 MiB."""
    magic = int.from_bytes(b"PCCGEXP3", "little")
    head = struct.pack("<QIIQIIQ16xQII", magic, 1, 1, 1 << 20, 0, 0, 0, 0, 0, 0)
    allocation = struct.pack("<64s16sQQQII", os.urandom(64), uuid, pieces << 21, 0, 0, 0, pieces)
    return head + allocation + struct.pack("<IIQQQ", 0, 0, 0, 0, 1 << 20)


@pytest.fixture
def uuid(node: Node) -> bytes:
    """Of a GPU that the daemon uses for another trainer by now."""
    trainer = node.connect(expands=True)
    saves(trainer)
    text = node.status()["gpus"][0]["uuid"]
    trainer.kill()
    node.faults.wait_for(lambda f: f.open_mappings == 0)
    return bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))


def test_descriptors_of_no_gpu_memory(node: Node, uuid: bytes, hostile: attach.Attachment) -> None:
    for number in range(1, 4):
        before = open_files(node)
        send(hostile, number, 3)
        body = Expose(number, [run(3, uuid)], descriptors=3)
        refused(hostile, body, r"INVALID_VALUE \(1\)")
        assert open_files(node) <= before
    assert node.faults.open_mappings == node.faults.reserved_bytes == 0


@pytest.mark.parametrize(
    ("sent", "said"), [([], 3), ([2], 3), ([3, 3], 3), ([253] * 4, 3), ([3], 0)]
)
def test_a_wrong_number_of_descriptors(
    hostile: attach.Attachment, sent: list[int], said: int
) -> None:
    for count in sent:
        send(hostile, 1, count)
    refused(hostile, Expose(1, [run(3)], descriptors=said), f"came, not {said}")


def test_descriptors_for_another_exposure(hostile: attach.Attachment) -> None:
    send(hostile, 2, 3)
    refused(hostile, Expose(1, [run(3)], descriptors=3), "0 descriptors of GPU memory came")
    send(hostile, 2, 3)
    refused(hostile, Expose(3, [run(3)], descriptors=3), "0 descriptors of GPU memory came")


def test_more_descriptors_than_a_user_may_have_waiting(
    node: Node, hostile: attach.Attachment
) -> None:
    before = open_files(node)
    for _ in range(30):
        send(hostile, 1, 253)
    refused(hostile, Expose(1, [run(3)], descriptors=30 * 253), "too many descriptors")
    assert open_files(node) <= before + FEW


def test_a_session_that_ends_while_its_descriptors_wait(
    node: Node, hostile: attach.Attachment
) -> None:
    before = open_files(node)
    send(hostile, 1, 253)
    node.wait_for(lambda: open_files(node) >= before + 253 - FEW)


def test_descriptors_with_any_other_packet(node: Node, hostile: attach.Attachment) -> None:
    before = open_files(node)
    body = codec.encode(Request(7, hostile.welcome.token, Chose("push", "")))
    with tempfile.TemporaryFile() as file:
        for _ in range(3):
            socket.send_fds(hostile.socket, [body], [file.fileno()] * 200)
            hostile.receive(7, timeout_s=5)
    assert open_files(node) <= before + FEW
