"""The torch store of a job on several nodes, by which its daemons agree. Each connection here is
PCcheck's own: an operation of torch's client locks its store, and may block as long as TCP does."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from pccheck_wire.messages import NOT_YET
from pccheck_wire.packing import VALUE_BYTES_MAX

#: Before all keys: other users of the store never see theirs change.
PREFIX = "pccheck/"
#: To find the server, which may not listen yet or any more.
CONNECT_LIMIT_S = 10.0
#: For the answer to any operation. A server's one thread may stall for 20 s, when many connect.
ANSWER_LIMIT_S = 30.0
WAIT_S_MAX = 86400.0
#: For an answer that comes at once, if it comes.
PROBE_LIMIT_S = 5.0
#: How often a store is asked that is not torch's TCPStore, or has another format.
POLL_S = 0.05

#: Of TCPStore's own format: queries, which begin with their number, and answers to the first one.
_HELLO = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 1)  # that it is a client, and a ping
_WAIT, _CANCEL = 6, bytes([12])
_THERE, _CANCELLED = b"\0", b"\1"
_PROBE = PREFIX + "probe"
_NOTHING = b"pccheck: no value"
#: So many keys are read together, if all are there.
MANY = 4
#: Rings of a bell that stay in the store, for those who are late.
RINGS_KEPT = 64

_DESCRIPTOR = re.compile(r"\bfd=(\d+)")
_T = TypeVar("_T")
#: Any: its classes have no annotations, and are missing where torch was built without them.
distributed: Any = torch.distributed
#: Waits until the descriptor, if there is one, can be read (True), for so many seconds (False), or
#: until this thread is called away (None).
Sleep = Callable[[int | None, float], bool | None]


class StoreError(Exception):
    """Why an operation has failed. What it did is unknown, unless the text begins with NOT_YET."""


class JobStore:
    """Opened with its first operation, and again after a failure. Operations are for one thread.
    Each raises StoreError within ANSWER_LIMIT_S if the server is stopped or cut off. Only torch's
    connect() has no limit when a server listens and is stopped."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._store: Any = None
        self._socket: socket.socket | None = None  # another descriptor of the store's
        self._has_opened = False
        self._old: list[str] = []  # rings, to be deleted
        self._knows_format: bool | None = None
        self._broken_off = False

    def set(self, key: str, value: bytes) -> None:
        """The store has the value on return: `set` has no answer of its own."""

        def work(store: Any) -> None:
            store.set(PREFIX + key, value)
            if not store.check([PREFIX + key]):
                raise StoreError("the store has lost what was set")

        self._do(work)

    def add(self, key: str, amount: int) -> int:
        """The sum."""
        return self._do(lambda store: int(store.add(PREFIX + key, amount)))

    def swap(self, key: str, value: bytes) -> bytes:
        """Sets a key that is missing; what the key holds then. The value must not be empty:
        compare_set() takes an empty one as "the key is missing"."""
        if not value:
            raise StoreError("swap needs a value that is not empty")
        return self._do(lambda store: bytes(store.compare_set(PREFIX + key, b"", value)))

    def get(self, keys: list[str]) -> list[bytes | None]:
        """The values in order, None for a key that is missing; at least one value, and no more than
        together have VALUE_BYTES_MAX."""

        def work(store: Any) -> list[bytes | None]:
            names = [PREFIX + key for key in keys]
            if len(names) >= MANY and store.check(names):  # all; three round trips together
                return _within([bytes(value) for value in store.multi_get(names)])
            return _within([_held(store, name) for name in names])

        return self._do(work)

    def ring(self, key: str, value: bytes, bell: str) -> int:
        """Sets a key, then rings a bell; how often that has rung. Each ring is a key for which
        others wait; `tidy` deletes the old ones."""

        def work(store: Any) -> int:
            store.set(PREFIX + key, value)
            count = int(store.add(PREFIX + bell, 1))
            store.set(f"{PREFIX}{bell}/{count}", b"1")
            self._old.append(f"{PREFIX}{bell}/{count - RINGS_KEPT}")
            return count

        return self._do(work)

    def tidy(self) -> None:
        """Deletes what was rung long ago: after the answer, for which others wait."""
        old, self._old = self._old, []

        def work(store: Any) -> None:
            for name in old:
                store.delete_key(name)

        if old:
            with contextlib.suppress(StoreError):  # the next operation finds out, too
                self._do(work)

    def wait(self, key: str, limit_s: float, sleep: Sleep | None = None) -> bool:
        """True as soon as the key is there; False if it is not within `limit_s`, or when `sleep`
        says that this thread is called away."""
        until_s = time.monotonic() + min(limit_s, WAIT_S_MAX)
        sleep = sleep or _sleep
        self._do(self._learn_format)
        return self._do(lambda store: self._appears(store, PREFIX + key, until_s, sleep))

    def break_off(self) -> None:
        """From another thread: ends the operation in progress, and all later ones."""
        self._broken_off = True
        held = self._socket
        if held is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        held, self._store, self._socket = self._socket, None, None
        if held is not None:
            held.close()

    def _do(self, work: Callable[[Any], _T]) -> _T:
        try:
            if self._store is None:
                self._open()
            if self._socket is not None and _has_hung_up(self._socket):
                self.close()
                raise StoreError("the store closed the connection")
            return work(self._store)
        except StoreError:
            raise
        except Exception as error:  # torch: RuntimeError and its kinds, also for a dead connection
            self.close()
            raise StoreError(f"{type(error).__name__}: {error}".split("\n")[0][:500]) from error

    def _appears(self, store: Any, name: str, until_s: float, sleep: Sleep) -> bool:
        """torch's own wait() would log a warning whenever it ends without the key, and nothing
        could end it earlier. So this asks the server, on torch's connection, in torch's format."""
        if store.check([name]):
            return True
        if self._socket is None or not self._knows_format:
            while (left_s := until_s - time.monotonic()) > 0:
                if sleep(None, min(left_s, POLL_S)) is None:
                    break
                if store.check([name]):
                    return True
            return False
        held = self._socket
        held.sendall(_wait_for(name))
        while (left_s := until_s - time.monotonic()) > 0:
            ready = sleep(held.fileno(), left_s)
            if ready:
                return _one_byte(held) == _THERE
            if ready is None:
                break
        held.sendall(_CANCEL)
        answer = _one_byte(held)
        if answer == _THERE:  # meanwhile; the other answer follows
            _one_byte(held)
        return answer == _THERE

    def _learn_format(self, store: Any) -> None:
        """Whether this server answers _wait_for(), as those of torch 2.4 to 2.13 do. If not, the
        connection is of no use any more."""
        if self._socket is None or self._knows_format is not None:
            return
        store.add(_PROBE, 0)
        self._socket.sendall(_wait_for(_PROBE))
        ready = _sleep(self._socket.fileno(), PROBE_LIMIT_S)
        self._knows_format = bool(ready) and self._socket.recv(1) == _THERE
        if not self._knows_format:
            self.close()

    def _open(self) -> None:
        if self._broken_off:
            raise StoreError("this client is closed")
        self._store = _find(self._environ, again=self._has_opened)
        self._has_opened = True
        self._socket = _socket_of(self._store)
        if self._socket is not None:
            _limit(self._socket)
        if self._broken_off:  # meanwhile
            self.close()
            raise StoreError("this client is closed")


def _find(environ: Mapping[str, str], *, again: bool) -> Any:
    """A connection of its own to the job's store: the agent's, which is there before the script
    begins, else that of init_process_group(). Raises StoreError, and torch's errors. `again`: the
    server may have ended or be stopped meanwhile."""
    if not distributed.is_available():
        raise StoreError("this torch has no torch.distributed")
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if host and port.isdecimal() and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _connected(host, int(port), again)
    if not distributed.is_initialized():
        raise StoreError(f"{NOT_YET}: the script has not called init_process_group()")
    store: Any = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, distributed.TCPStore):
        return _connected(store.host, store.port, again)
    return store.clone()


def _connected(host: str, port: int, again: bool) -> Any:
    if again:
        _require_life(host, port)
    return distributed.TCPStore(
        host, port, None, False, timedelta(seconds=CONNECT_LIMIT_S), wait_for_workers=False
    )


def _require_life(host: str, port: int) -> None:
    """Raises StoreError when no server answers there: torch would log that as errors, and would
    wait for the answer of a stopped server without a limit."""
    try:
        with socket.create_connection((host, port), CONNECT_LIMIT_S) as tried:
            tried.settimeout(ANSWER_LIMIT_S)
            tried.sendall(_HELLO)
            tried.recv(4)  # nothing, from a server with another format, which lives as well
    except ConnectionResetError:
        pass  # ... or that
    except OSError as error:
        why = error.strerror or error
        raise StoreError(f"no store answers at {host} port {port}: {why}") from error


def _socket_of(store: Any) -> socket.socket | None:
    """The connection under torch's client, which only its text names; None for another store."""
    found = _DESCRIPTOR.search(repr(store))
    if found is None:
        return None
    try:
        held = socket.socket(fileno=os.dup(int(found[1])))
    except OSError:
        return None
    return held


def _limit(held: socket.socket) -> None:
    """Ends a recv() or send() of torch's client, which has no limits of its own. A stopped server's
    kernel still acknowledges, so TCP_USER_TIMEOUT alone ends only what is cut off."""
    seconds = int(ANSWER_LIMIT_S)
    limit = struct.pack("ll", seconds, int(ANSWER_LIMIT_S % 1 * 1e6))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit),
        (socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 3)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 6)),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * ANSWER_LIMIT_S)),
    ):
        with contextlib.suppress(OSError):  # not a TCP socket
            held.setsockopt(level, option, value)


def _has_hung_up(held: socket.socket) -> bool:
    """torch's client would print a stack of C++ functions with the next operation."""
    ended = select.poll()
    ended.register(held, select.POLLRDHUP)
    return bool(ended.poll(0))


def _wait_for(name: str) -> bytes:
    """Asks TCPStore for an answer as soon as the key is there."""
    key = b"/" + name.encode()
    return struct.pack("=BQQ", _WAIT, 1, len(key)) + key


def _one_byte(held: socket.socket) -> bytes:
    """Raises OSError."""
    byte = held.recv(1)
    if byte not in (_THERE, _CANCELLED):
        raise ConnectionError("the store closed the connection, or has another format")
    return byte


def _held(store: Any, name: str) -> bytes | None:
    """In one round trip, and without waiting: a comparison with what no key holds. For a key that
    is missing the answer is that value."""
    found = bytes(store.compare_set(name, _NOTHING, _NOTHING))
    return None if found == _NOTHING else found


def _sleep(descriptor: int | None, limit_s: float) -> bool | None:
    arrivals = select.poll()
    if descriptor is not None:
        arrivals.register(descriptor, select.POLLIN)
    return bool(arrivals.poll(1000 * limit_s))


def _within(values: list[bytes | None]) -> list[bytes | None]:
    """The first values that together have VALUE_BYTES_MAX, and the first in any case."""
    total = 0
    for number, value in enumerate(values):
        total += len(value or b"")
        if total > VALUE_BYTES_MAX:
            if not number:
                raise StoreError(f"a value of {total} bytes; the limit is {VALUE_BYTES_MAX}")
            return values[:number]
    return values
