"""A connection whose native and daemon only record calls."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pccheck_native import WORD_ABANDONED, WORD_COPIED, WORD_COPYING, WORD_REFUSED, WORD_REQUESTED
from pccheck_wire.errors import PccheckError
from pccheck_wire.messages import CheckpointState, Done, Expose, Lend


class FakeLink:
    """Only the test changes snapshots; `calls` has every call in order."""

    chunk_bytes = 4096

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.words: dict[int, int] = {}
        self.outcomes: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.causes: dict[int, int] = {}
        self.faults: dict[int, int] = {}
        self.read: set[int] = set()
        self.provisional: set[int] = set()
        self.offered: dict[int, int] = {}
        self.requests: list[SimpleNamespace] = []  # what the daemon is asked for
        self.unholdable: set[int] = set()
        self.cannot_pull = ""
        self.holds = True
        self.captures = False
        self.behind: dict[int, int] = {}  # so often a snapshot's streams have not come to it
        self.expose_error: Exception | None = None
        self.no_staging = False
        self.interrupt: str = ""  # the call that Ctrl-C interrupts

    def _note(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name == self.interrupt:
            raise KeyboardInterrupt

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]

    def request(self, snapshot: int) -> None:
        self._note("request", snapshot)
        self.words[snapshot] = WORD_REQUESTED

    def submit(
        self, snapshot: int, ranges: bytes, volatile: bytes, data: bytes, offset: int,
        device_ranges: bytes = b"", pulled_bytes: int = 0, pulled_devices: int = 0, *,
        provisional: bool = False, offered_bytes: int = 0, **request: Any,
    ) -> None:  # fmt: skip
        self.requests.append(SimpleNamespace(snapshot=snapshot, **request))
        self.offered[snapshot] = offered_bytes
        self._note(
            "submit", snapshot, ranges, volatile, device_ranges, pulled_bytes, pulled_devices
        )
        self.words[snapshot] = WORD_COPYING
        if provisional:
            self.provisional.add(snapshot)

    def write(self, snapshot: int) -> bool:
        self._note("write", snapshot)
        return True

    def confirm(self, snapshot: int) -> None:
        self.provisional.discard(snapshot)

    def device_open(self, device: int) -> str:
        self._note("device_open", device)
        return self.cannot_pull

    def pin_for(self, device: int, *, later: bool = False) -> None:
        self._note("pin_for", device)

    def staging(self, device: int, nbytes: int) -> int:
        self._note("staging", device, nbytes)
        if self.no_staging:
            raise MemoryError
        return 1 << 40 | device << 32 | (-(-nbytes // 8192) * 8192)  # moves when it has to grow

    def staging_trim(self) -> None:
        self._note("staging_trim")

    def stage(self, device: int, stream: int, copies: bytes, *, aside: bool = False) -> None:
        self._note("stage", device, stream, copies, aside)

    def sample(self, snapshot: int, device: int, stream: int, device_ranges: bytes) -> None:
        self._note("sample", snapshot, device, stream, device_ranges)

    def mark(
        self, snapshot: int, device: int, stream: int, *, pull: bool, aside: bool = False
    ) -> None:
        self._note("mark", snapshot, device, stream, pull, aside)

    def hold(self, snapshot: int, device: int, stream: int | None, deadline_ns: int) -> bool:
        self._note("hold", snapshot, device, stream)
        return snapshot not in self.unholdable

    def reached(self, snapshot: int) -> bool:
        left = self.behind.get(snapshot, 0)
        self.behind[snapshot] = max(0, left - 1)
        return left == 0

    def capturing(self, device: int, stream: int) -> bool:
        return self.captures

    def expose(self, ranges: bytes, nbytes: int, known: bool = False, *replica: object) -> bytes:
        self._note("expose", ranges, nbytes, known, *(replica if any(replica) else ()))
        if self.expose_error is not None:
            raise self.expose_error
        return b"exposure" + ranges

    def unshareable(self, ranges: bytes) -> bytes:
        return bytes(1 for _ in range(len(ranges) // 32))

    def descriptors(self) -> list[int]:
        return []

    def exposure_holds(self) -> bool:
        return self.holds

    def wait_read(self, snapshot: int, deadline_ns: int, *, host_only: bool = False) -> bool:
        if deadline_ns == 2**63 - 1:  # the thread that gives late verdicts
            return False
        self._note("wait_read", snapshot, host_only)
        return snapshot in self.read

    def wait_copied(self, snapshot: int, deadline_ns: int) -> bool:
        self._note("wait_copied", snapshot)
        return self.words[snapshot] == WORD_COPIED

    def wait(self, snapshot: int, what: str, deadline_ns: int) -> bool:
        if what in ("read", "host_read"):
            return self.wait_read(snapshot, deadline_ns, host_only=what == "host_read")
        return what == "copied" and self.wait_copied(snapshot, deadline_ns)

    def abandon(self, snapshot: int) -> bool:
        self._note("abandon", snapshot)
        if self.words.get(snapshot) not in (WORD_REQUESTED, WORD_COPYING):
            return False
        self.words[snapshot] = WORD_ABANDONED
        self.read.add(snapshot)
        return True

    def state(self, snapshot: int) -> SimpleNamespace:
        return SimpleNamespace(
            word=self.words[snapshot], outcome=self.outcomes.get(snapshot, 0), sequence=0,
            newer=0, source_read=snapshot in self.read, error=0,
            error_name=self.errors.get(snapshot, ""), fault=self.faults.get(snapshot, 0),
            cause=self.causes.get(snapshot, 0), stage="copy", code="BAD_HANDLE", argument=0,
        )  # fmt: skip

    # -- what a real native and daemon would do by themselves

    def copied(self, snapshot: int) -> None:
        self.words[snapshot] = WORD_COPIED
        self.read.add(snapshot)

    def let_go(self, snapshot: int, error: str = "ETIMEDOUT") -> None:
        self.words[snapshot] = WORD_ABANDONED
        self.errors[snapshot] = error
        self.read.add(snapshot)

    def refuse(self, snapshot: int) -> None:
        self.words[snapshot] = WORD_REFUSED
        self.outcomes[snapshot] = CheckpointState.FAILED
        self.read.add(snapshot)


class FakeConnection:
    """The part of a Connection that the saving side uses."""

    def __init__(self, *, transfer: str = "pull", reason: str = "") -> None:
        self.native = FakeLink()
        self.welcome = SimpleNamespace(
            transfer=transfer, transfer_reason=reason, transfer_later=False, pid=1, start=bytes(16)
        )
        self.sent: list[Any] = []
        self.refusal: PccheckError | None = None
        self.refusals = -1  # so many more; -1: all
        self.lives = True
        self.snapshots = itertools.count(1)
        self.steps: dict[int, int] = {}
        self.saves_alone, self.pid = True, os.getpid()

    def alive(self) -> bool:
        return self.lives

    def has_to_make_way(self) -> bool:
        return False

    def pump(self) -> None:
        pass

    def post(self, body: object) -> None:
        self.sent.append(body)

    def lend(self, number: int, descriptors: list[int], *, timeout_s: float) -> None:
        self.sent.append(Lend(number, len(descriptors)))

    def ask(self, body: object, callback: Callable[[object], None]) -> None:
        self.sent.append(body)

    def request(self, body: object, *, timeout_s: float) -> Done:
        self.sent.append(body)
        if self.refusal is not None and self.refusals:
            self.refusals -= 1
            raise self.refusal
        return Done()

    def gone(self) -> PccheckError:
        return PccheckError("the daemon has ended")

    def exposed(self) -> list[int]:
        """The maps whose pieces have all arrived."""
        return [body.map for body in self.sent if isinstance(body, Expose) and not body.more]


class FakeSession:
    """A session with that connection."""

    error = None
    incarnation = 1
    uncounted = 0
    identity = SimpleNamespace(job="job", rank=0, world_size=1, guessed=False, is_wide=False)

    def __init__(self, connection: FakeConnection) -> None:
        self.uncounted = 0
        self.connection = connection

    def current(self) -> FakeConnection | None:
        return self.connection if self.connection.lives else None

    def require(self, *, timeout_s: float = 0) -> FakeConnection:
        return self.connection

    room_bytes = 1 << 40

    def register(self, connection: FakeConnection, payload_bytes: int, levels: int) -> None:
        assert levels
        connection.sent.append(("register", payload_bytes))

    def state_bytes(self, chunk_bytes: int) -> int:
        return chunk_bytes

    def warn_if_unrestored(self) -> None:
        pass

    def say_goodbye(self, done: bool, left_s: float | None = None) -> None:
        pass

    def warn_disconnected(self, *, private: bool) -> None:
        pass

    def forget_in_child(self) -> None:
        pass

    def close(self) -> None:
        pass
