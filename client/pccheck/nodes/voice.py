"""The daemon of this node speaks to the other nodes of the job through this process: two threads do
what the daemon asks for in the job's torch store."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pccheck.version import VERSION
from pccheck.warn import LOG
from pccheck_wire import attach, codec, packing
from pccheck_wire.errors import ProtocolError
from pccheck_wire.messages import CARRY_LIMIT_S, Carried, Carry

from .stores import JobStore, StoreError

#: Lane 0 executes what the store answers at once, lane 1 what waits.
LANES = 2
#: Behind CARRY_LIMIT_S: the daemon was restarted or is overloaded.
LATE_S = 10.0
#: The daemon keeps a process that it will not ask waiting for less than this.
NOT_ASKED_S = 1.0
#: How long the end of the process, or close(), waits for a lane whose operation was broken off.
JOIN_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a lane gets its operations: a daemon's socket, and the token of a session there."""

    path: Path
    token: bytes


class Voice:
    """Of one client. Its lanes live until `close`, and serve one connection after the other. Only
    `close` waits for them."""

    def __init__(self, store: Callable[[], JobStore] = JobStore) -> None:
        self._store = store
        self._lanes: list[_Lane] = []

    def follow(self, path: Path, token: bytes) -> None:
        """A session began, of the daemon whose socket has this path."""
        try:
            while len(self._lanes) < LANES:
                self._lanes.append(_Lane(len(self._lanes), self._store()))
        except (OSError, RuntimeError) as error:  # no descriptor or no thread: tried with the next
            LOG.warning("PCcheck: no thread for the agreement with the other nodes: %s", error)
        for lane in self._lanes:
            lane.turn_to(_Place(path, token))

    def leave(self) -> None:
        """The session has ended."""
        for lane in self._lanes:
            lane.turn_to(None)

    def close(self) -> None:
        """Ends the lanes. A thread that is still in C++ while Python ends could end the process by
        SIGABRT: so its operation is broken off, and is given a moment."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.end()
        deadline = time.monotonic() + JOIN_LIMIT_S
        for lane in lanes:
            if lane.thread is not threading.current_thread():  # the collector ran there
                lane.thread.join(max(0.0, deadline - time.monotonic()))
            if not lane.thread.is_alive():
                os.close(lane.bell)

    def forget_in_child(self) -> None:
        """In a forked child, which has no lanes."""
        for lane in self._lanes:
            os.close(lane.bell)
            if lane.connection is not None:
                lane.connection.close()
        self._lanes = []


class _Lane:
    """A thread, and what other threads tell it: where to turn to, and that it ends. Its connection
    is its own, so that no wait of the daemon's answers holds up a request of the trainer."""

    def __init__(self, number: int, store: JobStore) -> None:
        """Raises OSError, RuntimeError."""
        self._number, self._store = number, store
        self._place: _Place | None = None
        self._ends = False
        self.connection: attach.Attachment | None = None
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # daemon: it may be in C++, where nothing reaches it
        self.thread = threading.Thread(
            target=self._run, name=f"pccheck-voice-{number}", daemon=True
        )
        try:
            self.thread.start()
        except RuntimeError:
            os.close(self.bell)
            raise

    def turn_to(self, place: _Place | None) -> None:
        self._place = place
        os.eventfd_write(self.bell, 1)

    def end(self) -> None:
        self._ends = True
        self.turn_to(None)  # first: one that only waits is called away, which is no error
        self._store.break_off()

    # -- in the thread

    def _run(self) -> None:
        try:
            while not self._ends:
                place = self._place
                if place is None:
                    self._sleep(None)
                    continue
                try:
                    with attach.observe(place.path, version=VERSION) as connection:
                        self.connection = connection
                        self._serve(place, connection)
                except Exception as error:  # the edge of this thread; most likely the daemon ended
                    LOG.debug("lane %d: %s", self._number, error, exc_info=True)
                finally:
                    self.connection = None
                if self._place is place:
                    self._sleep(CARRY_LIMIT_S)
        finally:
            self._store.close()

    def _sleep(self, limit_s: float | None, descriptor: int | None = None) -> bool | None:
        """True once the descriptor can be read, False when the time is over, None when another
        thread has rung the bell."""
        arrivals = select.poll()
        arrivals.register(self.bell, select.POLLIN)
        if descriptor is not None:
            arrivals.register(descriptor, select.POLLIN)
        ready = arrivals.poll(None if limit_s is None else max(0.0, 1000 * limit_s))
        if any(found == self.bell for found, _ in ready):
            os.eventfd_read(self.bell)
            return None
        return bool(ready)

    def _serve(self, place: _Place, connection: attach.Attachment) -> None:
        """Until another session begins, or the daemon does not ask this process: then the daemon
        has one connection less to keep."""
        batch = 0
        results: list[Any] = []
        while self._place is place:
            begun_s = time.monotonic()
            number = 0
            for body, last in _parts(self._number, batch, results):
                number = connection.send(body, token=place.token, is_answered=last)
            self._store.tidy()
            answer = self._answer(place, connection, number)
            if answer is None:
                continue  # once more, with the same results
            batch, results = answer.batch, []
            operations = packing.joined(answer.operations)
            if not operations and time.monotonic() - begun_s < NOT_ASKED_S:
                return
            total = 0
            for operation in operations:
                if self._place is not place or total > packing.VALUE_BYTES_MAX:
                    break
                results.append(self._execute(place, operation))
                total += _size(results[-1])

    def _answer(self, place: _Place, connection: attach.Attachment, number: int) -> Carried | None:
        """None: it does not come in time, or another session begins. Raises PccheckError."""
        deadline = time.monotonic() + CARRY_LIMIT_S + LATE_S
        while self._place is place and (left_s := deadline - time.monotonic()) > 0:
            if self._sleep(left_s, connection.socket.fileno()):
                answer = connection.receive(number, timeout_s=LATE_S)
                if isinstance(answer, Carried):
                    return answer
                raise ProtocolError(f"no Carried but {answer}")
        return None

    def _wait(self, place: _Place, key: str, limit_s: float) -> bool:
        """For the key, while the daemon is the one that asked for it."""

        def sleep(descriptor: int | None, left_s: float) -> bool | None:
            until_s = time.monotonic() + left_s
            while self._place is place:
                ready = self._sleep(until_s - time.monotonic(), descriptor)
                if ready is not None:
                    return ready
            return None

        return self._store.wait(key, limit_s, sleep)

    def _listen(
        self, place: _Place, bell: str, after: int, keys: list[str], limit_s: float
    ) -> list[Any] | None:
        """How often the bell has rung at least, as soon as that is more than `after`, and the
        values."""
        count = self._store.add(bell, 0)
        if count <= after:
            if not self._wait(place, f"{bell}/{after + 1}", limit_s):
                return None
            # Of several keys others may have been set meanwhile: one look for all.
            count = after + 1 if len(keys) == 1 else self._store.add(bell, 0)
        return [count, self._store.get(keys)]

    def _execute(self, place: _Place, operation: Any) -> Any:
        store = self._store
        try:
            match operation:
                case ["set", str(key), bytes(value)]:
                    return store.set(key, value)
                case ["add", str(key), int(amount)]:
                    return store.add(key, amount)
                case ["swap", str(key), bytes(value)]:
                    return store.swap(key, value)
                case ["get", [_, *_] as keys]:
                    return store.get([str(key) for key in keys])
                case ["ring", str(key), bytes(value), str(bell)]:
                    return store.ring(key, value, bell)
                case [
                    "listen",
                    str(bell),
                    int(after),
                    [_, *_] as keys,
                    (int() | float()) as limit_s,
                ]:
                    return self._listen(place, bell, after, [str(k) for k in keys], limit_s)
            return ["error", f"not an operation: {str(operation)[:80]}"]
        except StoreError as error:
            return ["error", str(error)]


def _size(result: Any) -> int:
    """About the bytes that it takes in msgpack."""
    if isinstance(result, list):
        return sum(map(_size, result))
    return len(result) + 5 if isinstance(result, bytes) else 9


def _parts(lane: int, batch: int, results: list[Any]) -> Iterator[tuple[Carry, bool]]:
    """The messages of these results, and which is the last one."""
    pieces = packing.pieces(results) if results else []
    for first in range(0, max(1, len(pieces)), codec.PIECES_MAX):
        some = pieces[first : first + codec.PIECES_MAX]
        last = first + codec.PIECES_MAX >= len(pieces)
        yield Carry(lane, batch, some, at=first * codec.PIECE_BYTES, more=not last), last
