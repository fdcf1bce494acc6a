"""A peer that has disconnected leaves nothing: it occupies no place, and no request stays."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Any, cast

import pytest

from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import RefusedError
from pccheck_wire.messages import Hello, Role
from pccheckd.control import attach
from pccheckd.control.attach import AttachServer, _hung_up, _packet
from pccheckd.core.descriptors import Lot
from pccheckd.jobs.sessions import Peer, Session
from tests.unit.pccheckd.control.test_handlers import KEY, Place
from tests.unit.pccheckd.control.test_handlers import place as place  # a fixture

CARRIED_MAX = 253  #: descriptors in a packet: SCM_MAX_FD of the kernel


def test_a_hang_up_is_seen_without_reading() -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours:
        assert not _hung_up(ours)
        theirs.send(b"a request that comes early")
        assert not _hung_up(ours)
        theirs.close()
        assert not _hung_up(ours)
        assert ours.recv(100) == b"a request that comes early"
        assert _hung_up(ours)
    assert _hung_up(ours)


async def test_all_descriptors_of_a_packet_come() -> None:
    """What did not fit the kernel would close within the call."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    came = Lot()
    with ours, theirs:
        ours.setblocking(False)
        socket.send_fds(theirs, [b"x"], [theirs.fileno()] * CARRIED_MAX)
        assert await _packet(ours, came) == b"x"
        assert len(came) == CARRIED_MAX
        came.close()
        with pytest.raises(OSError, match="Invalid argument"):  # no more can be sent
            socket.send_fds(theirs, [b"x"], [theirs.fileno()] * (CARRIED_MAX + 1))


async def test_a_peer_of_whom_nothing_is_known_is_not_counted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_connection: socket.socket) -> Peer:
        raise OSError(errno.ENOTCONN, "gone")

    monkeypatch.setattr(attach, "_peer", unknown)
    server = AttachServer(cast(socket.socket, None), place.sessions, place.handlers)
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        await server._serve(ours)
        assert theirs.recv(1) == b"" and ours.fileno() == -1
    assert not +server._count and min(server._count.values(), default=0) == 0


@pytest.mark.parametrize(
    ("mine", "others", "said"),
    [
        (192, 0, ""),
        (193, 0, "uid 7 has 192 connections, which is the limit"),
        (16, 1024, ""),  # six users cannot keep a seventh out
        (17, 1024, "1040 connections, 16 of them of uid 7"),
        (1, 2048, "2048 connections, 0 of them of uid 7"),
    ],
)
def test_a_few_users_cannot_keep_others_out(mine: int, others: int, said: str) -> None:
    server = AttachServer(cast(Any, None), cast(Any, None), cast(Any, None))
    server._count.update({7: mine, 8: others})
    with pytest.raises(RefusedError, match=said) if said else contextlib.nullcontext():
        server._check_limits(7)


@pytest.mark.parametrize("occupied", [True, False])
async def test_a_peer_that_has_hung_up_does_not_join(place: Place, occupied: bool) -> None:
    if not occupied:
        place.job.left(KEY.rank, b"\1" * 16)
        place.leave()
    session = Session(
        number=9, token=bytes(16), role=Role.TRAINER, uid=KEY.uid, pid=1, kernel_pid=1,
        connected_ns=0, process=b"\2" * 16,
    )  # fmt: skip
    hello = Hello(PROTOCOL_VERSION, Role.TRAINER, "test", 1, job=KEY.job)
    peer = Peer(os.getuid(), os.getgid(), 1, gone=lambda: True)
    with pytest.raises(RefusedError, match="disconnected"):
        await place.sessions._attach_trainer(session, hello, peer)
    assert place.job.members.starts.of(KEY.rank, session.process) is None
