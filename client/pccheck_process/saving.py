"""A session with the daemon that saves one process image: room first, then pipes, then the index.

The daemon treats the session like a trainer of its own job: slots, order, retention and the
commit are the same. What differs is that the length is known at the end."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

from pccheck_native import _core
from pccheck_store import VERSION
from pccheck_wire import attach, ends
from pccheck_wire.basics import PROTOCOL_VERSION, START_HINT, Closing
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    PccheckError,
    WaitTimeoutError,
)
from pccheck_wire.messages import (
    CheckpointState,
    Describe,
    Described,
    Goodbye,
    Hello,
    Register,
    Registered,
    Role,
)
from pccheck_wire.units import MIB

from .index import ImageFile, ImageIndex

REGISTER_LIMIT_S = 120.0
#: For a free slot, and for memory that the daemon makes or takes back from others.
BEGIN_LIMIT_S = 60.0
GROW_LIMIT_S = 10.0
#: Nobody knows what such a process changes. One byte of so many is said to stay as it is: while
#: half of that is true, an earlier image is kept as a base.
FROZEN_PART = 8
_LOOK_S = 0.005
_ONE = 1  # the session's only snapshot
_BULK = ("pages-", "ghost-file-")


class ImageSession(Closing):
    """Saves one image. Every method raises PccheckError."""

    def __init__(self, job: str, socket: str | None, bound_bytes: int) -> None:
        """The slots of the job get room for an image of `bound_bytes`."""
        hello = Hello(
            PROTOCOL_VERSION, Role.TRAINER, VERSION, os.getpid(), job=job, fresh=True, solo=True,
            process=secrets.token_bytes(16), images=True,
        )  # fmt: skip
        self.bound_bytes = -(-bound_bytes // MIB) * MIB
        self._names: list[str] = []
        self._attachment = attach.connect(hello, socket)
        newest = self._attachment.welcome.newest_step
        self.step = 1 if newest is None else newest + 1
        try:
            self._native = _core.Client(self._attachment.memory_fd, self._attachment.page_fd)
            self._register()
        except BaseException:
            self._attachment.close()
            raise

    def _register(self) -> None:
        """Returns when the daemon has no more memory for this session soon."""
        deadline_s = time.monotonic() + GROW_LIMIT_S
        while True:
            wanted = Register(self.bound_bytes)
            answer = self._attachment.request(wanted, timeout_s=REGISTER_LIMIT_S)
            assert isinstance(answer, Registered)
            enough = min(self.bound_bytes, answer.expected_bytes)
            if answer.granted_bytes >= enough or time.monotonic() > deadline_s:
                return
            time.sleep(_LOOK_S)

    def begin(self, waits: Callable[[], None] = lambda: None) -> None:
        """Returns when the image has a slot, and chunks come. The target runs until then. Calls
        `waits` meanwhile."""
        self._native.request(_ONE)
        frozen_bytes = self.bound_bytes // FROZEN_PART
        self._native.image_begin(_ONE, self.bound_bytes, self.step, frozen_bytes)
        deadline_s = time.monotonic() + BEGIN_LIMIT_S
        while (word := self._word()) == _core.WORD_REQUESTED:
            if time.monotonic() > deadline_s:
                self.abandon()
                raise WaitTimeoutError(
                    f"no slot became free within {BEGIN_LIMIT_S:.0f} s",
                    hint="see: pccheckctl status",
                )
            waits()
            time.sleep(_LOOK_S)
        if word != _core.WORD_COPYING:
            raise self._failure()

    def stream(self, name: str, descriptor: int) -> None:
        """Another file of the image; the caller closes the descriptor."""
        self._names.append(name)
        try:
            self._native.image_stream(
                _ONE, descriptor, len(self._names) - 1, name.startswith(_BULK)
            )
        except OSError as error:
            raise self._failure() from error

    @property
    def read_bytes(self) -> int:
        """Of the image, so far."""
        return self._native.image_bytes(_ONE)

    def drained(self, limit_s: float) -> ImageIndex:
        """The index, when every stream has ended."""
        self._wait("drained", limit_s)
        try:
            extents = self._native.image_extents(_ONE)
        except OSError as error:
            raise self._failure() from error
        pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in self._names}
        for number, offset, length in extents:
            pieces[self._names[number]].append((offset, length))
        return ImageIndex({name: ImageFile(name, tuple(found)) for name, found in pieces.items()})

    def end(self, index: ImageIndex) -> int:
        """The image is complete; how many bytes it has."""
        packed = index.pack()
        try:
            self._native.image_end(_ONE, packed)
        except OSError as error:
            raise self._failure() from error
        return len(packed) + sum(stream.nbytes for stream in index.streams.values())

    def copied(self, limit_s: float, waits: Callable[[], None] = lambda: None) -> None:
        self._wait("copied", limit_s, waits)
        self._require(CheckpointState.COPIED)

    def durable(self, limit_s: float, waits: Callable[[], None] = lambda: None) -> int:
        """The image's sequence, when its record is durable. Calls `waits` meanwhile."""
        self._wait("durable", limit_s, waits)
        return self._require(CheckpointState.DURABLE)

    def abandon(self) -> None:
        """Closes every stream: CRIU gets EPIPE, and lets its target go on."""
        self._native.abandon(_ONE)

    def close(self) -> None:
        self._native.close()
        try:
            self._attachment.request(Goodbye(False), timeout_s=1.0)
        except PccheckError:
            pass  # the end of the connection says the same
        finally:
            self._attachment.close()

    def _word(self) -> int:
        state = self._native.state(_ONE)
        return _core.WORD_REFUSED if state is None else state.word

    def _wait(self, what: str, limit_s: float, waits: Callable[[], None] = lambda: None) -> None:
        deadline_ns = time.monotonic_ns() + int(limit_s * 1e9)
        try:
            while not self._native.wait(_ONE, what, time.monotonic_ns() + 100_000_000):
                waits()
                if time.monotonic_ns() > deadline_ns:
                    raise WaitTimeoutError(f"the image was not {what} within {limit_s:.0f} s")
        except ConnectionError as error:
            raise self._gone() from error

    def _require(self, least: CheckpointState) -> int:
        state = self._native.state(_ONE)
        if state is None or state.word != _core.WORD_COPIED:
            raise self._failure()
        outcome = CheckpointState(state.outcome)
        if outcome in (CheckpointState.SKIPPED, CheckpointState.FAILED) or outcome < least:
            raise self._failure()
        return state.sequence

    def failure(self) -> PccheckError | None:
        """Why the save ended, and with it the pipes; None while it goes on."""
        return self._failure() if self._word() != _core.WORD_COPYING else None

    def _failure(self) -> PccheckError:
        """Why it ended."""
        state = self._native.state(_ONE)
        if not self._native.alive() or state is None:
            return self._gone()
        if state.error:
            too_long = state.error_name == "EFBIG"
            return CheckpointFailedError(
                f"the image is larger than expected ({self.bound_bytes} bytes)"
                if too_long
                else f"the image could not be read ({state.error_name})",
                hint="try again: the size is estimated anew" if too_long else "",
            )
        why = ends.Why(state.cause, state.argument, state.stage, state.code)
        said = ends.sentence(why)
        if said.asks:
            answer = self._attachment.request(Describe(_ONE))
            assert isinstance(answer, Described)
            said = ends.Sentence(answer.reason, answer.hint, asks=False)
        return CheckpointFailedError(said.reason, hint=said.hint)

    def _gone(self) -> PccheckError:
        return DaemonUnreachableError("pccheckd ended during the snapshot", hint=START_HINT)
