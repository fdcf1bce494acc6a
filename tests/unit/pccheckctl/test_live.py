"""--watch and progress bars: what is drawn on a terminal, and what elsewhere."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from argparse import Namespace

import pytest

from pccheck_store.reading import state_reader
from pccheck_wire.errors import DaemonUnreachableError
from pccheckctl import cli
from pccheckctl.output import progress
from pccheckctl.output import watch as watching
from pccheckctl.output.documents import Document


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(answers: list[object], **flags: object) -> None:
    """Looks until the answers are used up, then it is interrupted."""
    left = list(answers)

    def fetch(_: Namespace) -> Document:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, dict)
        return answer

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if not left:
            raise KeyboardInterrupt

    arguments = Namespace(**({"json": False, "watch": 0.5} | flags))
    with pytest.raises(KeyboardInterrupt):
        watching.run(arguments, fetch, lambda one: f"n is {one['n']}", sleep=sleep)


def test_plain_texts_follow_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    watch([{"n": 1}, DaemonUnreachableError("it is away"), {"n": 2}])
    told = capsys.readouterr()
    assert "\x1b" not in told.out
    lines = told.out.splitlines()
    assert (lines[1], lines[2], lines[4]) == ("n is 1", "", "n is 2")
    assert "it is away" in told.err


def test_json_is_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    watch([{"n": 1}, {"n": 2}], json=True)
    assert [json.loads(line)["n"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


def test_a_terminal_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    size = os.terminal_size((20, 5))
    monkeypatch.setattr(watching.shutil, "get_terminal_size", lambda: size)
    watch([{"n": "1\n" * 9}, DaemonUnreachableError("it is away from here")])
    _, first, second = screen.getvalue().split("\x1b[H")
    assert first.count("\n") <= size.lines - 1
    assert "more lines" in first
    # A line as wide as the terminal wraps, or the code that clears the rest removes its end.
    assert all(len(line.split("\x1b")[0]) < size.columns for line in first.splitlines())
    assert "it is away" in second


def test_a_narrow_terminal_shows_the_whole_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    size = os.terminal_size((30, 20))
    monkeypatch.setattr(watching.shutil, "get_terminal_size", lambda: size)
    warning = "warning: job 'gpt': the last 3 checkpoints failed: /data/a-b/c: No space left"
    watch([{"n": f"1\n\n{warning}\n\njob  rank  last durable step  age\ngpt     0"}])
    shown = [line.split("\x1b")[0] for line in screen.getvalue().split("\x1b[H")[1].splitlines()]
    assert warning in " ".join(shown)
    assert all(len(line) < size.columns for line in shown)
    assert shown.index("gpt     0") == shown.index("job  rank  last durable step ") + 1


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from pccheckctl import __main__
    from pccheckctl.commands import status

    def interrupted(*_: object) -> Document:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "fetch", interrupted)
    monkeypatch.setattr("sys.argv", ["pccheckctl", "status", "--watch"])
    assert __main__.main() == 130


@pytest.mark.parametrize("words", ["list --watch job", "list --watch=0", "status --watch=-1"])
def test_a_period_that_cannot_be(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    assert "--watch" in capsys.readouterr().err


def test_the_period_may_be_given() -> None:
    assert cli.parser().parse_args(["list", "job", "--watch"]).watch == 2.0
    assert cli.parser().parse_args(["list", "--watch=500ms", "job"]).watch == 0.5
    assert cli.parser().parse_args(["status"]).watch is None


# -- bars --------------------------------------------------------------------------------------


def test_no_bar_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(progress, "DELAY_S", 0)
    with progress.Bar("x", 100) as bar:
        bar.advance(50)
    assert said.getvalue() == ""


def test_a_bar_is_drawn_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "DELAY_S", 0)
    with progress.Bar("reading", 100) as bar:
        bar.advance(50)
        while " 50%" not in screen.getvalue():
            pass
    assert screen.getvalue().endswith("\r\x1b[K")


def test_a_bar_says_how_far_how_fast_and_how_long() -> None:
    bar = progress.Bar("reading", 4 << 30)
    bar.advance(1 << 30)
    assert bar.line(2.0) == (
        "reading [######..................]  25% 1.00 GiB of 4.00 GiB, 512 MiB/s, 6.0 s left"
    )
    bar.advance(9 << 30)
    assert bar.done == bar.total
    counted = progress.Bar("bench", 6, unit="part")
    counted.advance(3)
    assert "3 of 6 parts" in counted.line(1.0)


def test_long_reads_are_cut_without_loss() -> None:
    ranges = [(1000, 0, 10), (5000, 10, 25), (9000, 50, 5)]
    packed = b"".join(struct.pack("<QQQ", *one) for one in ranges)
    pieces = list(state_reader.cut(packed, 8))
    assert [nbytes for _, nbytes in pieces] == [8, 8, 8, 8, 8]
    seen = {}
    for piece, nbytes in pieces:
        cut = list(struct.iter_unpack("<QQQ", piece))
        assert sum(length for _, _, length in cut) == nbytes
        for address, offset, length in cut:
            for at in range(length):
                assert offset + at not in seen
                seen[offset + at] = address + at
    assert seen == {o + at: a + at for a, o, n in ranges for at in range(n)}


def test_what_this_process_reads_is_known() -> None:
    before = progress.bytes_read()
    with open("/dev/zero", "rb") as file:  # noqa: PTH123
        file.read(100_000)
    assert progress.bytes_read() - before >= 100_000
