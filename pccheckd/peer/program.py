"""A peer server: sends other nodes blocks of one user's checkpoints, and what this node holds of a
job, over TLS 1.3, in a process of its own. The reader checks the blocks; this process checks those
that the reader doubts.

    python -P -m pccheckd.peer.program ARGUMENTS   (confine.HelperArguments; the key on stdin)

Whoever connects is unknown until the daemon has accepted the token of the first message. Before
that a connection gets few bytes and little time, and an old one gives way to a new one. The
daemon hands over the volume's file, open for reading; this process opens none."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import queue
import socket
import ssl
import struct
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from pccheck_native import NativeError, _core
from pccheck_native.nodes import peer
from pccheckd.helper import confine, framing

from .grant import GrantRequest, ReadGrant, RefusedGrantError, answer_of, has_file

#: Connections that have shown no token yet, and those that have.
STRANGERS_MAX, READERS_MAX = 256, 128
#: When there are as many, one gives way that has said nothing for so long; else the new one does.
STRANGER_YOUNG_S, READER_QUIET_S = 1.0, 10.0
STRANGER_LIMIT_S = 10.0  # for the handshake, for the first message, for an answer without a part
IDLE_LIMIT_S = 120.0  # between two requests
SEND_LIMIT_S = 120.0  # a piece takes longer: the reader has stopped
FILES_MAX = 1024
#: Stacks and buffers of all connections, with blocks of up to 16 MiB.
ADDRESS_SPACE_BYTES = 4 << 30
STACK_BYTES = 512 * 1024
DAEMON_LIMIT_S = 60.0
ANSWER_BYTES_MAX = peer.HOLDING_BYTES_MAX + 1024
BUSY = "the peer server has as many connections as it takes"


class Daemon:
    """Asks the daemon, from any thread. Ends the process with the daemon."""

    def __init__(self, link: socket.socket, hand: socket.socket) -> None:
        self._link, self._hand = link, hand
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._waiting: dict[bytes, queue.SimpleQueue[bytes]] = {}
        self._files: dict[bytes, int] = {}
        threading.Thread(target=self._read, name="daemon", daemon=True).start()

    def ready(self) -> None:
        self._link.sendall(framing.READY)

    def ask(self, question: bytes) -> ReadGrant | bytes:
        """Raises RefusedGrantError."""
        return self._exchange(GrantRequest(question))

    def damaged(self, question: bytes, sequence: int) -> None:
        with contextlib.suppress(RefusedGrantError):
            self._exchange(GrantRequest(question, sequence))

    def _exchange(self, request: GrantRequest) -> ReadGrant | bytes:
        identity = struct.pack("<Q", next(self._numbers))
        answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._waiting[identity] = answers
        try:
            with self._sending:
                self._link.sendall(framing.pack(identity, request.packed()))
            answer = answers.get(timeout=DAEMON_LIMIT_S)
        except (OSError, queue.Empty) as error:
            raise RefusedGrantError("the daemon of this node does not answer") from error
        finally:
            del self._waiting[identity]
        return answer_of(answer, self._files.pop(identity, -1))

    def _read(self) -> None:
        frames = framing.Unpacker(ANSWER_BYTES_MAX)
        with contextlib.suppress(OSError):
            while data := self._link.recv(1 << 16):
                for identity, message in frames.feed(data):
                    self._take_file(identity, message)
                    if (answers := self._waiting.get(identity)) is not None:
                        answers.put(message)
        os._exit(0)

    def _take_file(self, identity: bytes, message: bytes) -> None:
        """Files come in the order of the answers that they belong to."""
        if not has_file(message):
            return
        whose, files, _, _ = socket.recv_fds(self._hand, len(identity), 1)
        if whose == identity and identity in self._waiting:
            self._files[identity] = files[0]
        else:
            os.close(files[0])


class Server:
    """Accepts connections; a thread for each."""

    def __init__(self, context: ssl.SSLContext, daemon: Daemon) -> None:
        self._context, self._daemon = context, daemon
        #: Since when, oldest first; and of readers, when each has asked for something.
        self._strangers: OrderedDict[ssl.SSLSocket, float] = OrderedDict()
        self._readers: OrderedDict[ssl.SSLSocket, float] = OrderedDict()
        self._lock = threading.Lock()

    def accept(self, listener: socket.socket) -> None:
        while True:
            try:
                stream = self._accepted(listener)
                if stream is not None:
                    threading.Thread(target=self._serve, args=(stream,), daemon=True).start()
            except (OSError, ValueError, RuntimeError):  # no room, or the other end has gone
                time.sleep(0.05)

    def _accepted(self, listener: socket.socket) -> ssl.SSLSocket | None:
        """None: there are too many who have just come; the reader tries again."""
        connection, _ = listener.accept()
        connection.settimeout(STRANGER_LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        with self._lock:
            if _takes(self._strangers, STRANGERS_MAX, STRANGER_YOUNG_S):
                self._strangers[stream] = time.monotonic()
                return stream
        stream.close()
        return None

    def _serve(self, stream: ssl.SSLSocket) -> None:
        try:
            with stream:
                stream.do_handshake()
                self._answer(stream)
        except (OSError, ValueError):
            pass  # it has gone, or speaks something else
        finally:
            with self._lock:
                self._strangers.pop(stream, None)

    def _answer(self, stream: ssl.SSLSocket) -> None:
        question = _first_message(stream)
        try:
            answer = self._daemon.ask(question)
        except RefusedGrantError as error:
            _fail(stream, peer.REFUSED, str(error))
            return
        if isinstance(answer, bytes):
            stream.settimeout(STRANGER_LIMIT_S)
            stream.sendall(peer.ANSWER.pack(peer.OK, len(answer)) + answer)
            return
        with self._lock:
            is_taken = stream in self._strangers and _takes(
                self._readers, READERS_MAX, READER_QUIET_S
            )
            self._strangers.pop(stream, None)
            if is_taken:
                self._readers[stream] = time.monotonic()
        if not is_taken:
            os.close(answer.descriptor)
            _fail(stream, peer.BUSY, BUSY)
            return
        try:
            self._send(stream, question, answer)
        finally:
            with self._lock:
                self._readers.pop(stream, None)

    def _asked(self, stream: ssl.SSLSocket) -> None:
        with self._lock:
            if stream in self._readers:
                self._readers[stream] = time.monotonic()
                self._readers.move_to_end(stream)

    def _send(self, stream: ssl.SSLSocket, question: bytes, grant: ReadGrant) -> None:
        try:
            with contextlib.closing(
                _core.Volume(grant.path, writable=False, allow_buffered=True, fd=grant.descriptor)
            ) as volume:
                _send_payload(stream, volume, grant, self._asked)
        except NativeError as error:
            is_damaged = error.code_name == "DAMAGED"
            if is_damaged:
                self._daemon.damaged(question, grant.sequence)
            _fail(stream, peer.DAMAGED if is_damaged else peer.UNREADABLE, str(error))
        except FileNotFoundError:
            _fail(stream, peer.REFUSED, "the checkpoint was replaced by a newer one")


def _takes(known: OrderedDict[ssl.SSLSocket, float], most: int, quiet_s: float) -> bool:
    """Whether there is room for one more, perhaps because the quietest one gives way."""
    if len(known) < most:
        return True
    oldest, since_s = next(iter(known.items()))
    if time.monotonic() - since_s < quiet_s:
        return False
    del known[oldest]
    # Wakes the thread that reads from it. The method of SSLSocket would also change the object,
    # which the thread uses.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(oldest, socket.SHUT_RDWR)
    return True


def _first_message(stream: ssl.SSLSocket) -> bytes:
    """The daemon reads it. Raises ValueError, OSError."""
    deadline_s = time.monotonic() + STRANGER_LIMIT_S
    (nbytes,) = peer.ASK.unpack(_exactly(stream, peer.ASK.size, deadline_s))
    if nbytes > peer.ASK_BYTES_MAX:
        raise ValueError("the question is too long")
    return _exactly(stream, nbytes, deadline_s)


def _send_payload(
    stream: ssl.SSLSocket, volume: _core.Volume, grant: ReadGrant,
    asked: Callable[[ssl.SSLSocket], None],
) -> None:  # fmt: skip
    """The manifest, then what is asked for."""
    manifest = volume.manifest(grant.sequence)
    entry = next(one for one in volume.table() if one.sequence == grant.sequence)
    payload, block = entry.payload_bytes, volume.info().block_bytes
    stream.settimeout(SEND_LIMIT_S)
    first = peer.WALL.pack(grant.wall_ns) + manifest
    stream.sendall(peer.ANSWER.pack(peer.OK, len(first)) + first)
    most = max(peer.PIECE_BYTES, block)
    buffer = mmap.mmap(-1, most)  # aligned, as the disk wants it
    while True:
        stream.settimeout(IDLE_LIMIT_S)
        offset, length = peer.REQUEST.unpack(_exactly(stream, peer.REQUEST.size))
        asked(stream)
        is_doubted, offset = offset & peer.DOUBTED, offset & ~peer.DOUBTED
        if not 0 < length <= most or offset + length > payload:
            _fail(stream, peer.REFUSED, "there are no such blocks")
            return
        if is_doubted:
            volume.read(grant.sequence, offset, length)  # raises
            _fail(stream, peer.REFUSED, "the blocks match their checksums there")
            return
        # The reader checks them.
        volume.read_blocks(grant.sequence, offset, length, buffer)
        stream.settimeout(SEND_LIMIT_S)
        stream.sendall(peer.ANSWER.pack(peer.OK, length))
        stream.sendall(memoryview(buffer)[:length])


def _exactly(stream: ssl.SSLSocket, nbytes: int, deadline_s: float = math.inf) -> bytes:
    """Raises OSError when the connection ends before, TimeoutError after the deadline."""
    found = bytearray()
    while len(found) < nbytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if left_s < math.inf:
            stream.settimeout(left_s)
        data = stream.recv(nbytes - len(found))
        if not data:
            raise ConnectionResetError("the connection has ended")
        found += data
    return bytes(found)


def _fail(stream: ssl.SSLSocket, said: int, words: str) -> None:
    text = words.encode()[: peer.TEXT_BYTES_MAX]
    stream.settimeout(STRANGER_LIMIT_S)
    stream.sendall(peer.ANSWER.pack(said, len(text)) + text)


def _context(pem: bytes) -> ssl.SSLContext:
    """OpenSSL reads keys from files, so the key is in memory that looks like one; and before this
    process gives up files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is ever resumed
    with os.fdopen(os.memfd_create("key"), "wb") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def main(arguments: list[str]) -> None:
    given = confine.HelperArguments.of(arguments)
    context = _context(sys.stdin.buffer.read())
    confine.confine(
        given.uid, given.gid, files_max=FILES_MAX, address_space_bytes=ADDRESS_SPACE_BYTES
    )
    threading.stack_size(STACK_BYTES)
    daemon = Daemon(socket.socket(fileno=given.link), socket.socket(fileno=given.hand))
    server = Server(context, daemon)
    first, *others = (socket.socket(fileno=number) for number in given.listeners)
    daemon.ready()
    for listener in others:
        threading.Thread(target=server.accept, args=(listener,), daemon=True).start()
    server.accept(first)


if __name__ == "__main__":
    confine.run(main)
