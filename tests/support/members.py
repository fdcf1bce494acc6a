"""Ranks of one group in processes of their own, in lockstep, for tests that kill them.

A rank writes what it observes of its checkpoints to a board, a file that all ranks map. An
observation counts even if its process is killed a moment later. A payload names its start, rank and
step, so a mix of starts cannot pass.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
import warnings
from pathlib import Path
from typing import Any

from pccheck.job.steps import Steps
from pccheck_native import (
    OUTCOME_GIVEN_UP,
    SNAPSHOTS,
    WORD_ABANDONED,
    WORD_COPIED,
    WORD_COPYING,
    WORD_REFUSED,
    ClientState,
)
from pccheck_wire.errors import DaemonUnreachableError, PccheckError
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Joined, Opened, Restored
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Commands, Trainer, expected
from tests.support.waiting import PATIENCE

RANKS_MAX = 4
STEPS_MAX = 4096
STALL_LIMIT_S = 240.0 * PATIENCE
POLL_S = 0.0005
AWAY_S = 0.01
SLOW_STEP_S = 0.05
COPIED, DURABLE, GLOBAL, ENDED, ASKED = 1, 2, 4, 8, 16
STARTS_STRIDE, RANK_STRIDE = 80_000, 20_000  #: 3 x their sums are exact in float32
_HEAD = 64
_VOUCHED = {
    State.COPIED: COPIED,
    State.WRITING: COPIED,
    State.DURABLE: COPIED | DURABLE,
    State.GLOBAL: COPIED | DURABLE | GLOBAL,
    State.SKIPPED: ENDED,
    State.FAILED: ENDED,
    State.SUPERSEDED: ENDED,
}
_OVER = frozenset((State.DURABLE, State.GLOBAL, State.SUPERSEDED, State.SKIPPED, State.FAILED))


def stamp(start: int, rank: int, step: int) -> int:
    """A number that names a start, a rank and a step."""
    return start * STARTS_STRIDE + rank * RANK_STRIDE + step


class Board:
    """What the ranks of one start report to each other and to the test. One writer per word."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        nbytes = 8 * (_HEAD + STEPS_MAX * RANKS_MAX)
        if make:
            path.write_bytes(bytes(nbytes))
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), nbytes)).cast("q")

    def come(self, rank: int, step: int) -> None:
        self._words[rank] = step

    def at(self, world: int) -> int:
        """The step that every rank has reached."""
        return min(self._words[:world])

    def furthest(self, world: int) -> int:
        """The step that the first rank has reached."""
        return max(self._words[:world])

    def came(self, rank: int) -> int:
        return self._words[rank]

    def stop(self, step: int) -> None:
        """Ends the run of all ranks before this step; for tests that do not kill them."""
        self._words[16] = step

    @property
    def stopped(self) -> int:
        return self._words[16]

    def reconnected(self, rank: int, step: int) -> None:
        self._words[8 + rank] = step

    def connected_since(self, world: int) -> int:
        """The first step that no rank requested from an earlier daemon."""
        return max(self._words[8 : 8 + world])

    def waited(self, rank: int, seconds: float) -> None:
        self._words[24 + rank] = max(self._words[24 + rank], int(seconds * 1000))

    def longest_s(self, world: int) -> float:
        return max(self._words[24 : 24 + world]) / 1000

    def note(self, rank: int, index: int, flags: int, sequence: int = 0) -> None:
        """`index` counts the steps of a start from 1."""
        at = _HEAD + index * RANKS_MAX + rank
        before = self._words[at]
        self._words[at] = (sequence or before >> 8) << 8 | (before & 0xFF | flags)

    def flags(self, rank: int, index: int) -> int:
        return self._words[_HEAD + index * RANKS_MAX + rank] & 0xFF

    def sequence(self, rank: int, index: int) -> int:
        return self._words[_HEAD + index * RANKS_MAX + rank] >> 8

    def seen(self, flag: int, world: int, last: int) -> list[int]:
        """Indices of the steps for which every rank has seen `flag`, ascending."""
        return [
            index
            for index in range(1, min(last, STEPS_MAX - 1) + 1)
            if all(self.flags(rank, index) & flag for rank in range(world))
        ]

    def seen_by_one(self, flag: int, world: int, last: int) -> bool:
        return any(
            self.flags(rank, index) & flag
            for index in range(1, min(last, STEPS_MAX - 1) + 1)
            for rank in range(world)
        )


class _Member(Commands):
    """A rank that connects, restores and trains on command. Subclasses differ in how they save."""

    def begin_start(self, plan: dict[str, Any]) -> int:
        """Connects. `plan` has its identity; see `group_campaign`."""
        self.plan = plan
        self.rank, self.world = plan["rank"], plan["world"]
        self.board = Board(Path(plan["board"]))
        self.process_id = secrets.token_bytes(16)
        self.log = os.open(plan["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.flying: dict[int, Any] = {}
        self.base = 0
        self.connect()
        return os.getpid()

    def connect(self) -> None:
        raise NotImplementedError

    def restore_state(self) -> tuple[Any, ...]:
        """("found", start, step, what is wrong), ("empty",) or ("error", class, message)."""
        try:
            return self.take_newest()
        except PccheckError as error:
            return "error", type(error).__name__, str(error)

    def take_newest(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def recover_only(self) -> None:
        """recover(): what is found does not come into the state."""
        raise NotImplementedError

    def once_more(self, how: str) -> tuple[Any, ...]:
        """Restores again; or looks first, and then restores again."""
        if how == "recover":
            self.recover_only()
        return self.restore_state()

    def train(self, base: int, **spec: Any) -> None:
        """Trains from `base` on until the process is killed, or the board has stop set. `spec`:
        interval_s; alone (`alone` steps, not in lockstep); skips, fails, renews: indices of steps
        without a checkpoint, with a failing checkpoint, or with a new client; back: the index
        before which this rank restores, and how often; look: the index before which it calls
        recover(); lead: by how many steps ranks may be ahead; late: this rank begins when the
        others are so far ahead."""
        self.base, index = base, 0
        board, rank = self.board, self.rank
        back, times = spec.get("back", (0, 0))
        lead = spec.get("lead", 0)
        while board.furthest(self.world) < spec.get("late", 0):
            time.sleep(POLL_S)
        while not spec.get("alone") or index < spec["alone"]:
            index += 1
            if index >= STEPS_MAX:
                raise AssertionError("the board is full")
            board.come(rank, index)
            while not spec.get("alone") and board.at(self.world) < index - lead:
                time.sleep(POLL_S)
                self.look()
            if 0 < board.stopped <= index:
                return
            if index in spec.get("renews", ()):
                self.renew()
            if index == back:
                self.finish(5.0)  # what was given up after it was durable stays in flight here
                for _ in range(times):
                    self.restore_state()
            if index == spec.get("look"):
                self.recover_only()
            since = time.monotonic()
            self.update(base + index)
            if index not in spec.get("skips", ()):
                self.save(index, base + index, fail=index in spec.get("fails", ()))
            board.waited(rank, time.monotonic() - since)
            slowly = index > STEPS_MAX // 4  # or the board is full before a slow disk has anything
            until = time.monotonic() + (SLOW_STEP_S if slowly else spec["interval_s"])
            self.look()
            while time.monotonic() < until:
                time.sleep(min(0.001, spec["interval_s"]))
                self.look()

    def finish(self, limit_s: float = 90.0) -> None:
        """Calls look() until no checkpoint is in flight."""
        deadline = time.monotonic() + limit_s
        while self.flying and time.monotonic() < deadline:
            self.look()
            time.sleep(POLL_S)

    def update(self, step: int) -> None:
        raise NotImplementedError

    def save(self, index: int, step: int, *, fail: bool) -> None:
        raise NotImplementedError

    def renew(self) -> None:
        raise NotImplementedError

    def look(self) -> None:
        raise NotImplementedError

    def tell(self, index: int, state: State, sequence: int, reason: Any) -> bool:
        """Writes an observation to the board; returns whether it is the last of this checkpoint."""
        flags = _VOUCHED.get(state, 0)  # an ended checkpoint has the sequence of a newer one
        self.board.note(self.rank, index, flags, sequence if flags & COPIED else 0)
        if state in (State.FAILED, State.SKIPPED):
            self.say(index, state.name, reason())
        return state in _OVER and (state is not State.DURABLE or self.world == 1)

    def say(self, index: int, what: str, reason: str) -> None:
        os.write(self.log, f"{index} {what} {reason}\n".encode())


class WireMember(_Member):
    """A rank without torch: only the wire, and bytes."""

    def connect(self) -> None:
        self.restored: int | None = 0 if self.plan["how"] == "fresh" else None
        self.incarnation = 0
        self.next_try = 0.0
        self.session: Rank | None = None
        self.steps = Steps()
        self._connect(first=True)

    def _connect(self, *, first: bool = False) -> None:
        plan = self.plan
        self.session = Rank(
            Path(plan["socket"]), rank=self.rank, world_size=self.world, launch=plan["launch"],
            fresh=plan["how"] == "fresh", process=self.process_id, incarnation=self.incarnation,
            restored=self.restored,
        )  # fmt: skip
        self.incarnation = self.session.welcome.incarnation
        if first and self.session.welcome.newest_step is None and self.restored is None:
            self.restored = 0
        if not first:
            self.session.register(self.plan["nbytes"])

    def take_newest(self) -> tuple[Any, ...]:
        session = self.session
        assert session is not None
        opened = session.open()
        if not isinstance(opened, Opened):
            session.ask(Restored(0))
            self.restored = 0
            return ("empty",)
        code, data = session.load(opened)
        assert code == 0, code
        turn = self.steps.next_turn(self.incarnation)
        answer = session.ask(Restored(opened.sequence, opened.sequence, turn))
        assert isinstance(answer, Joined)
        self.incarnation = answer.incarnation
        self.restored = opened.sequence
        self.steps.restored(opened.sequence, self.incarnation)
        for start in range(1, self.plan["start"]):
            if data == payload_of(stamp(start, self.rank, opened.step), len(data)):
                return "found", start, opened.step, ""
        return "found", 0, opened.step, f"the bytes are of no start's step {opened.step}"

    def recover_only(self) -> None:
        assert self.session is not None
        with contextlib.suppress(PccheckError):
            opened = self.session.open()
            sequence = opened.sequence if isinstance(opened, Opened) else 0
            self.session.ask(Restored(sequence))
            self.restored = sequence

    def train(self, base: int, **spec: Any) -> None:
        assert self.session is not None
        self.session.register(self.plan["nbytes"])
        super().train(base, **spec)

    def update(self, step: int) -> None:
        """Acts as a gate: the update waits until earlier snapshots have been read."""
        self.steps.moved()
        session = self.session
        if session is None:
            return
        deadline = time.monotonic_ns() + int(STALL_LIMIT_S * 1e9)
        for index, snapshot in list(self.flying.items()):
            with contextlib.suppress(ValueError, OSError):
                if not session.native.wait(snapshot, "read", deadline):
                    session.native.abandon(snapshot)
                    self.say(index, "STALLED", "the copy did not end within the limit")

    def save(self, index: int, step: int, *, fail: bool) -> None:
        self.steps.called(step)
        self._free_entry()
        if self.session is not None and not self.session.native.alive():
            self.look()
            self.session.close()
            self.session = None
            self.flying.clear()
        if self.session is None and time.monotonic() >= self.next_try:
            try:
                self._connect()
                self.board.reconnected(self.rank, index)
            except (PccheckError, OSError, AssertionError) as error:
                self.next_try = time.monotonic() + 0.05
                self.say(index, "AWAY", str(error))
        if self.session is None:
            time.sleep(AWAY_S)  # else it would make thousands of steps without a daemon
            return
        self.board.note(self.rank, index, ASKED)
        data = payload_of(stamp(self.plan["start"], self.rank, step), self.plan["nbytes"])
        on_busy = self.plan["on_busy"]
        snapshot = self.session.begin(
            step, data, on_busy=on_busy, fill=not fail,
            base=self.steps.base, turn=self.steps.base_turn, descents=self.steps.descents,
            row=self.steps.row,
        )  # fmt: skip
        if fail:
            time.sleep(0.002)
            self.session.native.abandon(snapshot)
        self.flying[index] = snapshot

    def _free_entry(self) -> None:
        """Waits for the snapshot whose entry in the page is used again, and notes how it ended."""
        session = self.session
        before = session.snapshots - SNAPSHOTS + 1 if session is not None else 0
        if session is not None and before > 0:
            with contextlib.suppress(DaemonUnreachableError):
                session.wait(before)
            self.look()

    def renew(self) -> None:
        """Becomes a new client in the same process, which does not know what was restored."""
        if self.session is not None:
            self.finish(5.0)
            self.session.close()
        self.flying.clear()
        self.incarnation, self.restored = 0, None
        if self.world == 1:
            self.process_id = secrets.token_bytes(16)
        self._connect()

    def look(self) -> None:
        session = self.session
        if session is None:
            return
        alive = session.native.alive()
        for index, snapshot in list(self.flying.items()):
            found = session.native.state(snapshot)
            if found is None:  # its entry in the page is used again; the daemon still knows it
                try:
                    grouped = alive and self.world > 1  # it may have become global since
                    known = session.describe(snapshot, limit_s=1.0) if grouped else None
                except (PccheckError, AssertionError):
                    alive, known = False, None
                if known is None or self.tell(
                    index, known.state, known.sequence, lambda why=known.reason: why
                ):
                    del self.flying[index]
                continue
            state = _state_of(found)

            def reason(snapshot: int = snapshot) -> str:
                nonlocal alive
                if alive:
                    try:
                        return session.describe(snapshot, limit_s=1.0).reason
                    except (PccheckError, AssertionError):
                        alive = False  # the daemon was killed: more requests would wait as long
                return "unknown"

            if not alive and state in (State.FAILED, State.SKIPPED):
                continue
            if self.tell(index, state, found.sequence, reason):
                del self.flying[index]


def _state_of(found: ClientState) -> State:
    if found.word == WORD_ABANDONED:
        return State.FAILED
    if found.word == WORD_REFUSED:
        return State.SKIPPED if found.outcome == State.SKIPPED else State.FAILED
    if found.word == WORD_COPIED and found.outcome == OUTCOME_GIVEN_UP:
        return State.DURABLE
    if found.word == WORD_COPIED:
        return State(max(found.outcome, State.COPIED))
    return State.COPYING if found.word == WORD_COPYING else State.REQUESTED


class ClientMember(_Member):
    """A rank with torch, an attached optimizer and the real client."""

    def connect(self) -> None:
        plan = self.plan
        self.open(
            [plan["nbytes"] // 4], job="job", rank=self.rank, world_size=self.world,
            socket=plan["socket"], on_busy=plan["on_busy"], fresh=plan["how"] == "fresh",
            stall_limit_s=STALL_LIMIT_S,
        )  # fmt: skip

    def take_newest(self) -> tuple[Any, ...]:
        done = self.client.restore()
        if not done:
            return ("empty",)
        now = round(float(self.tensors()[0][0]) / 3)
        start, mine = divmod(now, STARTS_STRIDE)
        wrong = self.check(now)
        if mine != self.rank * RANK_STRIDE + done.step:
            wrong = wrong or f"the tensors are of {now}, not of rank {self.rank} step {done.step}"
        return "found", start, done.step, wrong

    def recover_only(self) -> None:
        with contextlib.suppress(PccheckError):
            self.client.recover()

    def update(self, step: int) -> None:
        self.optimizer.now = stamp(self.plan["start"], self.rank, step) - 1
        self.optimizer.step()

    def save(self, index: int, step: int, *, fail: bool) -> None:
        if fail:
            return
        if not self.client.connected:
            self.look()
            self.flying.clear()
        before = self.client.connected
        if not before:
            time.sleep(AWAY_S)
        handle = self.client.checkpoint(step=step)
        if not before and self.client.connected:
            self.board.reconnected(self.rank, index)
        self.board.note(self.rank, index, ASKED)
        self.flying[index] = handle

    def renew(self) -> None:
        self.client.close()
        self.look()
        self.flying.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.connect()

    def look(self) -> None:
        for index, handle in list(self.flying.items()):
            state = handle.state
            alive = self.client.connected
            if not alive and state in (State.FAILED, State.SKIPPED):
                del self.flying[index]
                continue
            if self.tell(index, state, handle.sequence, lambda handle=handle: handle.reason):
                del self.flying[index]


class Member(Trainer):
    """The process of a rank; may be killed several times."""

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            super().signal(number)


class Wire(Member):
    commands = WireMember


class Client(Member):
    commands = ClientMember


def tensor_of(start: int, rank: int, step: int, nbytes: int) -> Any:
    """The tensor that a `Client` rank has saved."""
    return expected(stamp(start, rank, step), 0, nbytes // 4)
