"""A front: libzmq for one uid, in a process of its own. It passes whole messages on to the daemon
and its answers back, and understands neither.

    python -P -m pccheckd.front.program ARGUMENTS REQUEST_BYTES_MAX   (confine.HelperArguments)

A peer that reaches an ipc endpoint can make libzmq abort, or fill its memory: accept() asserts on
EMFILE, and the limits on sizes and on messages do not bound how many frames one message has. So
the damage stays here: the limits below kill this process, the daemon starts another, and no other
user notices. Imports little, since there is one per user; holds no lock, file or memory of the
daemon; ends with the daemon."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket

import zmq

from pccheckd.helper import confine, framing

#: Sessions of a uid (sessions.CONNECTIONS_PER_UID_MAX), and as many more that come and go.
FILES_MAX = 512
#: 40 MiB are there at the start; full queues of all sessions and a reply of the largest size fit.
ADDRESS_SPACE_BYTES = 384 << 20
#: Messages per peer that wait here. Of requests few: the largest are 64 KiB each.
REQUESTS_WAITING = 16
ANSWERS_WAITING = 256
HANDSHAKE_MS = 5000
BATCH = 64  # messages of one turn, so that requests and answers take turns
READ_BYTES = 256 * 1024
FRAMES = 2  # a DEALER's identity, one message
ANSWER_BYTES_MAX = (1 << 32) - 1  # the daemon is trusted


def main(arguments: list[str]) -> None:
    uid, gid, (listener,), link, _, own = confine.HelperArguments.of(arguments)
    confine.confine(uid, gid, files_max=FILES_MAX, address_space_bytes=ADDRESS_SPACE_BYTES)
    router = _router(uid, listener, request_bytes_max=int(own[0]))
    confine.limit(resource.RLIMIT_NPROC, 0)  # libzmq has its threads by now
    with socket.socket(fileno=link) as stream:
        stream.setblocking(False)
        Front(router, stream).run()


class Front:
    """Forwards between a router and the daemon until the daemon's end is closed."""

    def __init__(self, router: zmq.Socket[bytes], stream: socket.socket) -> None:
        self._router = router
        self._stream = stream
        self._unsent = memoryview(framing.READY)
        self._answers = framing.Unpacker(ANSWER_BYTES_MAX)
        self._open = True

    def run(self) -> None:
        """While the daemon does not read, the front does not read from clients, which then wait."""
        poller = zmq.Poller()
        stream = self._stream.fileno()
        while self._open:
            busy = len(self._unsent) > 0
            poller.register(stream, zmq.POLLIN | (zmq.POLLOUT if busy else 0))
            poller.register(self._router, 0 if busy else zmq.POLLIN)
            ready = dict(poller.poll())
            if ready.get(stream, 0) & ~zmq.POLLOUT:
                self._answer()
            if ready.get(self._router):
                self._unsent = memoryview(self._requests())
            if len(self._unsent):
                self._send()

    def _requests(self) -> bytes:
        taken = []
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCH):
                frames = self._router.recv_multipart(zmq.NOBLOCK)
                if len(frames) == FRAMES:
                    taken.append(framing.pack(*frames))
        return b"".join(taken)

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self._stream.send(self._unsent) :]

    def _answer(self) -> None:
        try:
            data = self._stream.recv(READ_BYTES)
        except BlockingIOError:
            return
        self._open = bool(data)
        for identity, message in self._answers.feed(data):
            # A peer that is gone, or does not read, loses its answers.
            with contextlib.suppress(zmq.Again):
                self._router.send_multipart([identity, message], zmq.NOBLOCK)


def _router(uid: int, listener: int, request_bytes_max: int) -> zmq.Socket[bytes]:
    """On a listening socket of the daemon: the socket outlives this process, so that no connect is
    refused between two fronts."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.setsockopt(zmq.MAXMSGSIZE, request_bytes_max)
    router.setsockopt(zmq.RCVHWM, REQUESTS_WAITING)
    router.setsockopt(zmq.SNDHWM, ANSWERS_WAITING)
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPC_FILTER_UID, ctypes.c_int(uid).value)  # takes the bits of a uid_t
    router.setsockopt(zmq.USE_FD, listener)
    router.bind(f"ipc://{socket.socket(fileno=os.dup(listener)).getsockname()}")
    return router


if __name__ == "__main__":
    confine.run(main)
