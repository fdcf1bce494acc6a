"""What lines of the log carry, where they go, and that a loop cannot fill it."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
from pathlib import Path

import pytest
from _pytest.capture import CaptureResult

from pccheck_wire.ends import Cause, Why
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base import journal, logs
from pccheckd.base.log_queue import LINES_MAX, Queued
from pccheckd.base.logs import LOG
from pccheckd.base.repeats import BURST, WINDOW_S, Repeats
from pccheckd.tenancy.checkpoint import RankCheckpoint
from pccheckd.tenancy.outcomes import Chronicle
from pccheckd.tenancy.volumes import Key
from tests.support.jobs import saving

KEY = Key(7, "gpt", 3)
S = 1_000_000_000
TIMES = {
    "begin": 11 * S, "first_write": 12 * S, "sealed": 13 * S, "written": 15 * S,
    "flushed": 16 * S, "durable": 18 * S,
}  # fmt: skip


def checkpoint(state: State = State.DURABLE, **changes: object) -> RankCheckpoint:
    made = saving(100, 9, snapshot=4, payload_bytes=3 << 20, run=2, requested_ns=10 * S)
    made.state, made.slot, made.times_ns = state, 1, dict(TIMES)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def under_systemd() -> dict[str, str]:
    """What systemd sets for a process whose stderr is the journal."""
    stderr = os.fstat(2)
    return {"JOURNAL_STREAM": f"{stderr.st_dev}:{stderr.st_ino}"}


@pytest.fixture(autouse=True)
def _log_as_it_was() -> object:
    handlers, level = LOG.handlers[:], LOG.level
    yield
    LOG.handlers[:], LOG.propagate = handlers, True
    LOG.setLevel(level)


def written(capfd: pytest.CaptureFixture[str]) -> CaptureResult[str]:
    logs.flush()
    return capfd.readouterr()


def test_a_durable_checkpoint_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    logs.set_up("plain")
    Chronicle().ended(checkpoint())
    (line,) = written(capfd).err.splitlines()
    assert line.endswith(
        "INFO job 'gpt' rank 3 of uid 7: step 100 is durable 8.000 s after its request: waited "
        "1.000, copied 2.000, written 3.000, flushed 1.000, published 2.000 s (3.00 MiB, sequence "
        "9, slot 1)"
    )


def test_a_failure_says_why_and_what_helps(capfd: pytest.CaptureFixture[str]) -> None:
    logs.set_up("plain")
    Chronicle().ended(
        checkpoint(
            State.FAILED, why=Why(Cause.DESCRIBED, words="write: EIO", hint="check the disk")
        )
    )
    err = written(capfd).err
    assert "WARNING" in err and "step 100 failed: write: EIO; check the disk" in err


def test_json_lines_carry_fields(capfd: pytest.CaptureFixture[str]) -> None:
    logs.set_up("json")
    Chronicle().ended(checkpoint())
    line = json.loads(written(capfd).err)
    assert line["level"] == "info" and line["message"].startswith("job 'gpt'")
    wanted = {
        "event": "durable", "uid": 7, "job": "gpt", "rank": 3, "run": 2, "step": 100,
        "sequence": 9, "slot": 1, "session": 1, "payload_bytes": 3 << 20, "transfer": "push",
        "waited_s": 1.0, "copied_s": 2.0, "written_s": 3.0, "flushed_s": 1.0, "published_s": 2.0,
        "durable_s": 8.0,
    }  # fmt: skip
    assert wanted.items() <= line.items()


def test_every_line_of_a_rank_says_whose_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    logs.set_up("json")
    LOG.info("%s: pid %d connected", KEY, 12)
    LOG.warning("%s: the file is gone", KEY, extra={"fields": {"event": "volume-lost"}})
    LOG.warning("another line of %d", 12)
    first, second, third = map(json.loads, written(capfd).err.splitlines())
    assert KEY._asdict().items() <= first.items() and first["message"].endswith("12 connected")
    assert (KEY._asdict() | {"event": "volume-lost"}).items() <= second.items()
    assert "job" not in third


def test_the_journal_gets_fields(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears:
        ears.bind(str(path))
        ears.settimeout(10)
        output = journal.output(under_systemd(), path=str(path))
        assert output is not None
        handler = Queued(output)
        LOG.handlers[:], LOG.propagate = [handler], False
        LOG.setLevel(logging.INFO)
        Chronicle().ended(checkpoint(State.FAILED, why=Why(Cause.DESCRIBED, words="disk\nfull")))
        entry = ears.recv(1 << 16)
    lines = entry.split(b"\n")
    assert b"PRIORITY=4" in lines and b"SYSLOG_IDENTIFIER=pccheckd" in lines
    assert b"PCCHECK_JOB=gpt" in lines and b"PCCHECK_STEP=100" in lines
    assert b"PCCHECK_REASON\n" + struct.pack("<Q", 9) + b"disk\nfull\n" in entry
    LOG.info("the journal has gone")
    assert written(capfd).err == "<6>the journal has gone\n"
    output.close()


def test_without_a_journal_there_is_no_output_to_it(tmp_path: Path) -> None:
    assert journal.output({}) is None
    assert journal.output(under_systemd(), path=str(tmp_path / "none")) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears:
        ears.bind(str(tmp_path / "journal"))
        redirected = {"JOURNAL_STREAM": "8:1"}  # as a shell in a unit hands it on
        assert journal.output(redirected, path=str(tmp_path / "journal")) is None


def test_a_loop_cannot_fill_the_log() -> None:
    now = [0.0]
    repeats = Repeats(clock=lambda: now[0])

    def passes(text: str, *values: object, **extra: object) -> str:
        line = LOG.makeRecord("pccheckd", logging.INFO, "", 0, text, values, None, extra=extra)
        return line.getMessage() if repeats.filter(line) else ""

    told = [passes("%s: step %d failed", KEY, step) for step in range(100)]
    assert sum(map(bool, told)) == BURST
    assert passes("%s: step %d failed", "another", 1) and passes("something else")
    assert all(passes("%s is durable", KEY, always=True) for _ in range(100))
    now[0] = WINDOW_S
    assert passes("%s: step %d failed", KEY, 7).endswith(
        f"step 7 failed ({100 - BURST} more of these were left out)"
    )
    assert "left out" not in passes("%s: step %d failed", KEY, 8)


def test_replaced_checkpoints_in_memory_hide_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """A job that saves every step has one of them per step."""
    logs.set_up("plain")
    chronicle = Chronicle()
    for _ in range(2 * BURST):
        why = Why(Cause.REPLACED_IN_MEMORY, 101)
        chronicle.ended(checkpoint(State.SUPERSEDED, in_memory=True, why=why))
    assert written(capfd).err == ""
    for _ in range(2 * BURST):
        chronicle.ended(checkpoint(State.SUPERSEDED, why=Why(Cause.REPLACED)))
    chronicle.ended(checkpoint(State.FAILED, why=Why(Cause.DESCRIBED, words="write: EIO")))
    lines = written(capfd).err.splitlines()
    assert len(lines) == BURST + 1 and lines[-1].endswith("step 100 failed: write: EIO")


def test_trouble_with_the_record_does_not_reach_the_checkpoint(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs.set_up("plain")
    chronicle = Chronicle()

    class Broken:
        def requested(self, *_: object) -> None:
            raise RuntimeError("no")

        ended = requested

    chronicle.count_with(Broken())
    chronicle.requested(checkpoint())
    chronicle.ended(checkpoint())
    assert written(capfd).err.count("could not be recorded") == 2


def test_nothing_is_told_when_it_is_off(capfd: pytest.CaptureFixture[str]) -> None:
    logs.set_up("plain")
    chronicle = Chronicle(enabled=lambda: False)
    chronicle.ended(checkpoint())
    assert written(capfd).err == "" and not list(chronicle.ring.newest(0, 0))


def test_lines_are_dropped_and_counted_where_the_reader_has_stopped() -> None:
    reader = threading.Event()
    reached, seen = threading.Event(), list[str]()

    class Stopped(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reached.set()
            assert reader.wait(60)
            seen.append(record.getMessage())

    queue = Queued(Stopped())
    LOG.handlers[:], LOG.propagate = [queue], False
    LOG.setLevel(logging.INFO)
    LOG.info("first")
    assert reached.wait(60)
    for number in range(LINES_MAX + 7):
        LOG.info("line %d", number)
    assert queue.dropped == logs.dropped() == 7
    reader.set()
    queue.flush()
    LOG.info("last")
    queue.flush()
    gap = "7 log lines dropped: the log reader was stopped"
    lines = [f"line {number}" for number in range(LINES_MAX)]
    assert seen == ["first", *lines, gap, "last"]


def test_a_log_file_of_ones_own_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            logs.set_up("plain", environ={logs.BYTES_VARIABLE: "1000"})
            for number in range(100):
                LOG.info("line %d", number, extra={"always": True})
                logs.flush()
        finally:
            os.dup2(before, 2)
            os.close(before)
    first, last = Path(f"{log}.1").read_text(), log.read_text()
    assert len(first) < 1100 and len(last) < 1100
    assert last.endswith("line 99\n") and "line 99" not in first


def test_a_line_that_cannot_be_written_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    class Full(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            os.write(-1, b"line")

    queue = Queued(Full())
    LOG.handlers[:], LOG.propagate = [queue], False
    LOG.setLevel(logging.INFO)
    LOG.info("lost")
    queue.flush()
    assert queue.dropped == 1 and written(capfd).err == ""
