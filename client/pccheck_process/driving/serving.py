"""Gives CRIU the files of an image back: each is read ahead, checked, and spliced into its pipe."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import termios
import threading
import time
from collections import deque

from pccheck_process.driving import streaming
from pccheck_process.driving.ahead import ReadAhead, ReadPiece
from pccheck_process.driving.criu import PrivatePlace
from pccheck_process.index import ImageFile, ImageIndex
from pccheck_store.reading.files import FilePayloads
from pccheck_store.reading.source import Payloads
from pccheck_wire.basics import Closing

#: Of one read, and of one buffer. Pieces end where the payload has a multiple of it, so that most
#: are whole chunks, which the disk reads into the buffer itself.
PIECE_BYTES = 4 << 20
#: Of the node's memory, for all files together. With more large files than this is enough for, each
#: has two buffers all the same: none of them waits for another, as their processes do.
MEMORY_BYTES = 64 << 20
#: Reads at a time, of all files. One alone leaves the disk idle while its bytes are checked.
_READS = 3
_LOOK_S = 0.001
#: CRIU copies these. It may move the pages of other files on, into pipes of the new process.
_COPIED = "pages-"
_LIBC = ctypes.CDLL(None, use_errno=True)


class Serving(Closing):
    """Answers CRIU in threads of this process. `error` says why a file could not be read: then its
    pipe was closed early, and CRIU fails."""

    def __init__(
        self, place: PrivatePlace, payloads: Payloads, rank: int, index: ImageIndex
    ) -> None:
        self._conversation = streaming.Conversation(place.path, streaming.SERVE)
        self._payloads, self._rank, self._index = payloads, rank, index
        # A session with a daemon has one load at a time.
        reads = _READS if isinstance(payloads, FilePayloads) else 1
        self._reading = threading.BoundedSemaphore(reads)
        large = sum(one.nbytes > PIECE_BYTES for one in index.streams.values())
        self._buffers = max(2, MEMORY_BYTES // PIECE_BYTES // max(1, large))
        self._feeders: list[threading.Thread] = []
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="criu-serve")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._conversation.close()
        self._thread.join()
        for feeder in self._feeders:
            feeder.join()

    def _run(self) -> None:
        try:
            if not self._conversation.accept():
                return
            while (name := self._conversation.filename()) is not None:
                stream = self._index.streams.get(name)
                self._conversation.answer(exists=stream is not None)
                if stream is not None:
                    self._start(stream, self._conversation.descriptor())
        except Exception as error:
            self._fail(error)

    def _start(self, stream: ImageFile, descriptor: int) -> None:
        feeder = threading.Thread(
            target=self._feed, args=(stream, descriptor), daemon=True, name="criu-feed"
        )
        self._feeders.append(feeder)
        feeder.start()

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._stop.set()
        self._conversation.close()

    def _feed(self, stream: ImageFile, descriptor: int) -> None:
        try:
            if pieces := _pieces(stream):
                with ReadAhead(pieces, self._buffers, _READS, self._fill) as ahead:
                    self._pass_on(ahead, descriptor, copied=stream.name.startswith(_COPIED))
        except BrokenPipeError:
            self._stop.set()  # CRIU has ended, and says why
        except Exception as error:
            self._fail(error)
        finally:
            os.close(descriptor)

    def _pass_on(self, ahead: ReadAhead, descriptor: int, *, copied: bool) -> None:
        """All pieces. A buffer is filled again when nobody refers to its pages."""
        in_pipe: deque[tuple[int, int]] = deque()  # buffer, and where its end is in the file
        spliced = 0
        while not self._stop.is_set():
            while in_pipe and in_pipe[0][1] <= spliced - _unread(descriptor):
                ahead.give_back(in_pipe.popleft()[0], renewed=False)
            if not ahead.wait(_LOOK_S):
                continue
            read = ahead.next()
            if read is None:
                break
            number, address, length = read
            _splice(descriptor, address, length)
            spliced += length
            if copied:
                in_pipe.append((number, spliced))
            else:
                ahead.give_back(number, renewed=True)
        while in_pipe and not self._stop.is_set() and _unread(descriptor):
            time.sleep(_LOOK_S)

    def _fill(self, piece: ReadPiece, address: int) -> None:
        packed = struct.pack("<QQQ", address, piece.offset, piece.length)
        with self._reading:
            self._payloads.read_into(self._rank, piece.offset, piece.length, packed)


def _pieces(stream: ImageFile) -> list[ReadPiece]:
    """Its extents, cut where the payload has a multiple of PIECE_BYTES."""
    pieces: list[ReadPiece] = []
    for offset, length in stream.extents:
        at, end = offset, offset + length
        while at < end:
            cut = min(end, at - at % PIECE_BYTES + PIECE_BYTES)
            pieces.append(ReadPiece(at, cut - at))
            at = cut
    return pieces


def _splice(descriptor: int, address: int, count: int) -> None:
    """Moves the pages themselves into the pipe; the reader's read() is the only copy."""
    at = 0
    while at < count:
        vector = (ctypes.c_size_t * 2)(address + at, count - at)
        moved = _LIBC.vmsplice(descriptor, vector, ctypes.c_size_t(1), 0)
        if moved < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        at += moved


def _unread(descriptor: int) -> int:
    """The bytes that CRIU has not read from the pipe."""
    packed = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0")
    return int(struct.unpack("i", packed)[0])
