"""CRIU's `--stream`: one socket, on which CRIU asks for files by name. At a dump it sends the read
end of a pipe for each; at a restore it is told whether the file exists, and sends the write end."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

from pccheck_wire.errors import PccheckError, ProtocolError

CAPTURE, SERVE = "streamer-capture.sock", "streamer-serve.sock"
#: CRIU says that it has difficulties with more than 4 MiB.
PIPE_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_REQUEST_BYTES_MAX = 4096
_FILENAME = 0x0A  # protobuf: field 1, a string
_EXISTS = b"\x08"  # field 1, a bool


class Conversation:
    """The requests of one CRIU."""

    def __init__(self, directory: Path, name: str) -> None:
        """Listens; CRIU finds the socket in its directory of images."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / name))
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._closed = False

    def accept(self) -> bool:
        """Waits for CRIU. False when the conversation was closed instead."""
        with contextlib.suppress(OSError):
            self._socket, _ = self._listener.accept()
        return self._socket is not None and not self._closed

    def filename(self) -> str | None:
        """The next file that CRIU asks for; None when CRIU has closed the socket."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        body = self._exactly(length) if length <= _REQUEST_BYTES_MAX else None
        if body is None or len(body) < 2:
            raise _unknown()
        name_length, at = _varint(body, 1)
        name = body[at:]
        if body[0] != _FILENAME or name_length != len(name) or b"/" in name:
            raise _unknown()
        return name.decode("ascii", "strict")

    def answer(self, *, exists: bool) -> None:
        assert self._socket is not None
        self._socket.sendall(_LENGTH.pack(2) + _EXISTS + bytes([exists]))

    def descriptor(self) -> int:
        """The end of the pipe for the file that was asked for."""
        assert self._socket is not None
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if len(descriptors) != 1:
            raise _unknown()
        with contextlib.suppress(OSError):  # a limit of the machine: the pipe stays smaller
            fcntl.fcntl(descriptors[0], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return descriptors[0]

    def close(self) -> None:
        """Also wakes a thread that waits in another method."""
        self._closed = True
        for one in (self._listener, self._socket):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def _exactly(self, count: int) -> bytes | None:
        assert self._socket is not None
        found = b""
        while len(found) < count:
            try:
                data = self._socket.recv(count - len(found))
            except OSError:
                if self._closed:
                    return None
                raise
            if not data:
                return None
            found += data
        return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            break
    return value, at


def _unknown() -> PccheckError:
    return ProtocolError("criu asked for a file in an unknown way", hint="see: criu --version")
