"""Which checkpoint a restore reads: the newest, an older one after damage, another one when newer
ones replaced it; and how long it waits for one that is being written."""

from __future__ import annotations

import dataclasses
import errno
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck.restoring import reading
from pccheck.restoring.reading import ask_open, read_newest
from pccheck.warn import PccheckWarning
from pccheck_native import _core
from pccheck_store.reading import loads, state_reader
from pccheck_store.reading.errors import RecycledError
from pccheck_store.reading.loads import DaemonPayloads
from pccheck_wire.errors import (
    DaemonUnreachableError,
    DamagedError,
    DeviceError,
    NoCheckpointError,
    PccheckError,
    UnreadableError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Done, Empty, Open, Opened, Part, Skipped, Writing

MIB = 1 << 20


def opened(sequence: int, **about: Any) -> Opened:
    found = Opened(0, sequence, 10 * sequence, 1, 1, bytes(16), b"d", 100, 60, 40)
    return dataclasses.replace(found, **about)


class Daemon:
    """Has checkpoints 1 to `newest`. Reading one ends with its code in `codes`, 0 otherwise."""

    def __init__(self, newest: int, codes: dict[int, int] | None = None) -> None:
        self.newest = newest
        self.codes = codes or {}
        self.replaced: set[int] = set()
        self.asked: list[Open] = []
        self.load_broken_off = False
        self.reads: list[int] = []
        self.loads = itertools.count(1)
        self.native: Any = SimpleNamespace(
            load_start=lambda *_: None, load_wait=self._wait, loaded=(0, 100)
        )

    def request(self, body: Any, *, timeout_s: float) -> Any:
        if not isinstance(body, Open):
            self.reads.append(body.sequence)
            if body.sequence in self.replaced:
                self.replaced.discard(body.sequence)
                self.newest += 1
                raise NoCheckpointError("it is gone")
            return Done()
        self.asked.append(body)
        newest = self.newest if body.before is None else body.before - 1
        if newest < 1:
            if body.before is None:
                return Empty([])
            raise NoCheckpointError("no older one", hint="see list")
        return opened(newest)

    def _wait(self, *_: int) -> int:
        return self.codes.get(self.reads[-1], 0)


@pytest.fixture(autouse=True)
def _no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a tree are test_tree.py's subject."""
    monkeypatch.setattr(loads.tree, "decode", lambda *_: SimpleNamespace(metadata=None))
    monkeypatch.setattr(state_reader.parts, "merge", lambda own, *_: own)


def found(daemon: Any, step: int | None = None) -> tuple[int, list[int]]:
    """The sequence that was restored, and those that were skipped."""
    result, _ = read_newest(daemon, step, lambda opened, *_: opened.sequence, job="job")
    assert result.state == (result.sequence or None)
    return result.sequence, [one.sequence for one in result.skipped]


DAMAGED, UNREADABLE, GONE = _core.E_DAMAGED, _core.E_UNREADABLE, -errno.ENOENT


def test_the_newest_is_read_first() -> None:
    daemon = Daemon(3)
    assert found(daemon) == (3, [])
    assert daemon.asked == [Open()]


@pytest.mark.parametrize("code", [DAMAGED, UNREADABLE])
def test_after_damage_the_previous_one_is_read_and_the_result_says_so(code: int) -> None:
    daemon = Daemon(3, {3: code, 2: code})
    assert found(daemon) == (1, [3, 2])
    assert [one.before for one in daemon.asked] == [None, 3, 2]


@pytest.mark.parametrize(
    ("code", "error", "why"),
    [
        (DAMAGED, DamagedError, "the data does not match its checksums"),
        (UNREADABLE, UnreadableError, "the disk could not read the data"),
    ],
)
def test_when_none_is_left_the_error_names_all(
    code: int, error: type[PccheckError], why: str
) -> None:
    with pytest.raises(error) as raised:
        found(Daemon(2, {2: code, 1: code}))
    assert raised.value.message == f"step 20: {why}; step 10: {why}; no older one"
    assert raised.value.hint == "see list"


def test_one_that_newer_ones_replaced_is_not_damaged() -> None:
    daemon = Daemon(3)
    daemon.replaced = {3}
    assert found(daemon) == (4, [])
    assert [one.before for one in daemon.asked] == [None, None]


def test_it_does_not_chase_newer_ones_for_ever() -> None:
    with pytest.raises(RecycledError, match=r"step 30 .* was replaced by a newer one"):
        found(Daemon(3, {3: GONE}))


def test_nothing_is_returned_only_when_the_volume_holds_nothing() -> None:
    """P7: an empty result lets a run begin at step 0."""
    assert found(Daemon(0)) == (0, [])
    with pytest.raises(NoCheckpointError, match="no valid checkpoint of step 5"):
        found(Daemon(0), step=5)


@pytest.mark.parametrize(
    ("code", "error"), [(loads.DEVICE_CODES[0], DeviceError), (-9999, DaemonUnreachableError)]
)
def test_other_errors_end_the_restore(code: int, error: type[Exception]) -> None:
    """A GPU or a daemon that fails says nothing about the checkpoint."""
    daemon = Daemon(3, {3: code})
    with pytest.raises(error):
        found(daemon)
    assert len(daemon.asked) == 1


def test_the_part_of_a_missing_rank_is_damage() -> None:
    connection: Any = Daemon(1)
    payloads = DaemonPayloads(connection, opened(1, rank=0, parts=[Part(0, 100, 60, 40)]))
    with pytest.raises(DamagedError, match="the part of rank 1 is missing"):
        payloads.tree(1)


@pytest.mark.parametrize(("nbytes", "offset"), [(0, 60), (101, 0), (50, 60)])
def test_a_tree_outside_of_its_payload_is_damage(nbytes: int, offset: int) -> None:
    connection: Any = Daemon(1)
    made = opened(1, rank=0, parts=[Part(1, 100, offset, nbytes)])
    with pytest.raises(DamagedError, match="a tree of"):
        DaemonPayloads(connection, made).tree(1)


# -- what is still being written ---------------------------------------------------------------


class Writer:
    """Answers with these, the last one for ever; a second passes with each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers, self.now_s = list(answers), 0.0
        monkeypatch.setattr(reading.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(reading, "STUCK_LIMIT_S", 10.0)

    def request(self, *_: object, timeout_s: float) -> Any:
        self.now_s += 1.0
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def writing(left: int) -> Writing:
    return Writing(7, 1, 64 * MIB, left * MIB)


def test_it_waits_as_long_as_something_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon: Any = Writer(monkeypatch, *map(writing, range(60, 0, -1)), Empty([Skipped(1, 1, "")]))
    assert ask_open(daemon, Open()) == Empty([Skipped(1, 1, "")])
    assert daemon.now_s == 61


def test_what_the_nodes_warn_of_is_warned_of_here(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon: Any = Writer(monkeypatch, Empty([], ["step 4 is global, and cannot be restored"]))
    with pytest.warns(PccheckWarning, match="PCcheck: step 4 is global, and cannot be restored"):
        ask_open(daemon, Open())


def test_a_disk_that_stands_still_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon: Any = Writer(monkeypatch, writing(60), writing(32))
    with pytest.raises(WaitTimeoutError, match=r"32 of 64 MiB .* nothing was written for 10 s"):
        ask_open(daemon, Open())
    assert daemon.now_s == 12
