"""Pipes and terminals whose other end is outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pccheck_process.looking import look

from .children import child, refusals, sentences
from .fakes import FakeProc


def test_standard_pipes_are_noted_with_the_process_at_the_other_end() -> None:
    with child() as pid:
        looked = look(pid, tree=False, root=True)
        links = {str(Path(f"/proc/{pid}/fd/{fd}").readlink()) for fd in (0, 1)}
    assert looked.refusals == ()
    assert set(looked.outer_pipes) == links
    assert f"is a pipe to process {os.getpid()} (" in looked.notes[0]
    assert looked.notes[1].startswith("standard output of process")
    assert looked.notes[1].endswith(
        "after a restore, restore-process --stdout FILE gets the output"
    )


def test_another_pipe_to_the_outside_is_refused() -> None:
    reading, writing = os.pipe()
    with child(pass_fds=(writing,)) as pid:
        said = refusals(pid)
        os.close(writing)
    os.close(reading)
    assert len(said) == 1
    assert said[0].startswith(f"P has a pipe to process {os.getpid()} (")
    assert said[0].endswith(f"open as descriptor {writing}")


def test_a_pipe_whose_other_end_is_closed_is_kept() -> None:
    with child("import os; one, other = os.pipe(); os.close(one)") as pid:
        assert refusals(pid) == []


def test_a_pipe_to_a_child_is_inside_the_tree_only() -> None:
    code = """
import os
reading, writing = os.pipe()
if os.fork() == 0:
    os.close(writing); os.read(reading, 1); os._exit(0)
os.close(reading)
"""
    with child(code) as pid:
        assert refusals(pid, tree=True) == []


def test_a_copy_of_standard_output_goes_with_it(fake: FakeProc) -> None:
    fake.fd(70, 1, "pipe:[5]", flags=1)
    fake.fd(70, 9, "pipe:[5]", flags=1)
    fake.process(60)
    fake.fd(60, 3, "pipe:[5]", flags=0)
    looked = fake.look()
    assert looked.refusals == ()
    assert looked.outer_pipes == ("pipe:[5]",)


def test_an_unreadable_neighbour_may_hold_the_other_end(fake: FakeProc) -> None:
    fake.fd(70, 5, "pipe:[5]", flags=1)
    assert sentences(fake.look()) == []
    fake.process(60)
    (fake.root / "60/fd").rmdir()
    assert sentences(fake.look()) == ["P has a pipe to another process open as descriptor 5"]


def test_a_terminal_outside_is_noted() -> None:
    master, slave = os.openpty()
    words = [sys.executable, "-I", "-S", "-c", "import sys; print('ready'); sys.stdin.read()"]
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    try:
        assert os.read(master, 5) == b"ready"
        looked = look(process.pid, tree=False, root=True)
        seen = os.fstat(slave)
        assert looked.outer_terminals == (f"tty[{seen.st_rdev:x}:{seen.st_dev:x}]",)
        assert looked.refusals == ()
        assert [one.split(": ")[1] for one in looked.notes] == [
            "after a restore, restore-process --stdout FILE gets the output"
        ]
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
