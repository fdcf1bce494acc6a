"""Gives CRIU the files of an image back: each is read ahead, checked, and spliced into its pipe."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import queue
import struct
import termios
import threading
import time
from collections.abc import Iterator

from pccheck_store.reading.source import Payloads
from pccheck_wire.basics import Closing

from . import streaming
from .criu import PrivatePlace
from .index import ImageFile, ImageIndex

#: Of one read, and of one buffer.
PIECE_BYTES = 4 << 20
#: Buffers of all files together: what a restore takes of the node's memory.
BUFFERS = 16
#: Of one file: one is read, one is spliced, and one may still be in the pipe.
_AHEAD = 3
_LATE_S, _LOOK_S = 0.02, 0.001
_LIBC = ctypes.CDLL(None, use_errno=True)


class Serving(Closing):
    """Answers CRIU in threads of this process. `error` says why a file could not be read: then its
    pipe was closed early, and CRIU fails."""

    def __init__(
        self, place: PrivatePlace, payloads: Payloads, rank: int, index: ImageIndex
    ) -> None:
        self._conversation = streaming.Conversation(place.path, streaming.SERVE)
        self._payloads, self._rank, self._index = payloads, rank, index
        self._reading = threading.Lock()  # one load at a time
        self._buffers = threading.BoundedSemaphore(BUFFERS)
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
        read: queue.Queue[tuple[mmap.mmap, int] | None] = queue.Queue(_AHEAD)
        reader = threading.Thread(target=self._read, args=(stream, read), daemon=True)
        reader.start()
        last: mmap.mmap | None = None  # the pipe may still refer to its pages
        piece: tuple[mmap.mmap, int] | None = None
        ended = False
        try:
            while not ended:
                try:
                    piece = read.get(timeout=_LATE_S)
                except queue.Empty:  # other files have all buffers: this one gives its last back
                    if last is not None and _is_drained(descriptor):
                        self._release(last)
                        last = None
                    continue
                ended = piece is None
                if piece is None:
                    break
                _splice(descriptor, *piece)
                if last is not None:
                    self._release(last)
                last = piece[0]
            while not self._stop.is_set() and not _is_drained(descriptor):
                time.sleep(_LOOK_S)
        except BrokenPipeError:
            self._stop.set()  # CRIU has ended, and says why
        except Exception as error:
            self._fail(error)
        finally:
            os.close(descriptor)
            if last is not None:
                self._release(last)
            while not ended:  # what was read for a pipe that is closed
                piece = read.get()
                ended = piece is None
                if piece is not None:
                    self._release(piece[0])
            reader.join()

    def _read(self, stream: ImageFile, to: queue.Queue[tuple[mmap.mmap, int] | None]) -> None:
        try:
            for pieces in _pieces(stream):
                while not self._buffers.acquire(timeout=0.1):
                    if self._stop.is_set():
                        return
                buffer = mmap.mmap(-1, PIECE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                count = self._fill(buffer, pieces)
                to.put((buffer, count))
                if self._stop.is_set():
                    return
        except BaseException as error:
            self._fail(error)
        finally:
            to.put(None)

    def _fill(self, buffer: mmap.mmap, pieces: list[tuple[int, int]]) -> int:
        """Reads and checks one piece of a file, which may lie in several places of the payload."""
        view = (ctypes.c_char * PIECE_BYTES).from_buffer(buffer)
        address, ranges, at = ctypes.addressof(view), [], 0
        for offset, length in sorted(pieces):
            ranges.append((offset, length))
        places = {}
        for offset, length in pieces:
            places[offset] = address + at
            at += length
        packed = b"".join(
            struct.pack("<QQQ", places[offset], offset, length) for offset, length in ranges
        )
        first, last = ranges[0][0], ranges[-1][0] + ranges[-1][1]
        with self._reading:
            self._payloads.read_into(self._rank, first, last - first, packed)
        del view
        return at

    def _release(self, buffer: mmap.mmap) -> None:
        buffer.close()
        self._buffers.release()


def _pieces(stream: ImageFile) -> Iterator[list[tuple[int, int]]]:
    """The extents, cut so that each list has PIECE_BYTES at most."""
    pieces: list[tuple[int, int]] = []
    room = PIECE_BYTES
    for offset, length in stream.extents:
        at = 0
        while at < length:
            count = min(room, length - at)
            pieces.append((offset + at, count))
            at, room = at + count, room - count
            if not room:
                yield pieces
                pieces, room = [], PIECE_BYTES
    if pieces:
        yield pieces


def _splice(descriptor: int, buffer: mmap.mmap, count: int) -> None:
    """Moves the pages themselves into the pipe; the reader's read() is the only copy."""
    view = (ctypes.c_char * PIECE_BYTES).from_buffer(buffer)
    address, at = ctypes.addressof(view), 0
    del view
    while at < count:
        vector = (ctypes.c_size_t * 2)(address + at, count - at)
        moved = _LIBC.vmsplice(descriptor, vector, ctypes.c_size_t(1), 0)
        if moved < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        at += moved


def _is_drained(descriptor: int) -> bool:
    """Whether CRIU has read all that is in the pipe."""
    return fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0") == b"\0\0\0\0"
