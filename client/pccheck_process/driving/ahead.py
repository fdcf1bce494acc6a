"""Reads a file of an image ahead: some threads fill some buffers, in the order of the file."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pccheck_wire.basics import Closing

_HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class ReadPiece:
    """Of a file: where it lies in the payload, in bytes. `at`: its place in a page."""

    offset: int
    length: int

    @property
    def at(self) -> int:
        return self.offset % mmap.PAGESIZE


class Buffers(Closing):
    """Memory of one mapping, which is used again and again: new pages cost more than the copy. Huge
    pages, where they can be had, because a disk reads into them at twice the speed."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        large = count * self._nbytes >= _HUGE_PAGE
        spare = _HUGE_PAGE if large else 0
        self._memory = mmap.mmap(
            -1, count * self._nbytes + spare, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._view: ctypes.c_char | None = ctypes.c_char.from_buffer(self._memory)
        address = ctypes.addressof(self._view)
        self._first = -address % _HUGE_PAGE if large else 0
        if large:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = address + self._first

    def address(self, number: int) -> int:
        return self._address + number * self._nbytes

    def renew(self, number: int) -> None:
        """The pages are left to whom they were given; the buffer gets others."""
        self._memory.madvise(mmap.MADV_DONTNEED, self._first + number * self._nbytes, self._nbytes)

    def close(self) -> None:
        self._view = None
        self._memory.close()


class ReadAhead(Closing):
    """`next` gives the pieces in their order, each in a buffer, which `give_back` takes again."""

    def __init__(
        self, pieces: Sequence[ReadPiece], buffers: int, threads: int,
        fill: Callable[[ReadPiece, int], None],
    ) -> None:  # fmt: skip
        """`fill` reads a piece to an address; it is called by several threads at a time."""
        self._pieces, self._fill = pieces, fill
        buffers = min(buffers, len(pieces))
        self._buffers = Buffers(buffers, max(one.at + one.length for one in pieces))
        self._changed = threading.Condition()
        self._free = deque(range(buffers))
        self._filled: dict[int, int] = {}  # piece to buffer
        self._begun = self._taken = 0  # pieces
        self._stopped = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name="criu-read")
            for _ in range(min(threads, buffers))
        ]
        for one in self._threads:
            one.start()

    def wait(self, limit_s: float) -> bool:
        """Whether `next` has an answer by then."""
        with self._changed:
            return self._changed.wait_for(self._has_news, limit_s)

    def next(self) -> tuple[int, int, int] | None:
        """The number of the buffer, address and length; None after the last piece. Raises what
        `fill` has raised."""
        with self._changed:
            self._changed.wait_for(self._has_news)
            if self._error is not None:
                raise self._error
            if self._taken == len(self._pieces):
                return None
            number = self._filled.pop(self._taken)
            piece = self._pieces[self._taken]
            self._taken += 1
            return number, self._buffers.address(number) + piece.at, piece.length

    def give_back(self, number: int, *, renewed: bool) -> None:
        """`renewed`: others may still refer to its pages."""
        if renewed:
            self._buffers.renew(number)
        with self._changed:
            self._free.append(number)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for one in self._threads:
            one.join()
        self._buffers.close()

    def _has_news(self) -> bool:
        return (
            self._taken in self._filled
            or self._taken == len(self._pieces)
            or self._error is not None
        )

    def _run(self) -> None:
        try:
            while (got := self._begin()) is not None:
                number, buffer = got
                piece = self._pieces[number]
                self._fill(piece, self._buffers.address(buffer) + piece.at)
                with self._changed:
                    self._filled[number] = buffer
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._stopped = True
                self._changed.notify_all()

    def _begin(self) -> tuple[int, int] | None:
        """The next piece and its buffer, together: so the first piece that is missing always has
        one."""
        with self._changed:
            while not self._free and not self._stopped:
                self._changed.wait()
            if self._stopped or self._begun == len(self._pieces):
                return None
            self._begun += 1
            return self._begun - 1, self._free.popleft()
