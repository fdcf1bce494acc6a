"""What an image says of itself is its owner's word."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from pccheck_process import facts
from pccheck_process.looking import look
from pccheck_wire.errors import CheckpointFailedError, DamagedError


def plain() -> dict[str, Any]:
    mine = look(os.getpid(), tree=True, root=True)
    return facts.of(mine, facts.dump_options(mine), {}, {"job": 3}).plain()


def test_a_process_that_was_killed_has_no_facts() -> None:
    """Its files are closed by then: a restore would not know what to cut off."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        looked = look(child.pid, tree=True, root=True)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(CheckpointFailedError, match=f"process {child.pid} has ended"):
            facts.of(looked, facts.dump_options(looked), {}, {})


def test_what_a_snapshot_notes_is_read_again() -> None:
    noted = plain()
    assert facts.Facts.of_plain(noted).plain() == facts.Facts.of_plain(noted).plain()
    assert facts.Facts.of_plain(noted).pid == os.getpid()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("options", ["--action-script", "/tmp/evil"]), ("options", ["--exec-cmd"]),
        ("pipes", ["/etc/passwd"]), ("terminals", ["tty[1:2]\n--exec-cmd"]), ("cwd", "a\0b"),
        ("cwd", 7), ("tree", {"1": [1]}), ("tree", []), ("written", [{"path": 1}]),
        ("fingerprint", []), ("gpu", 3), ("standard", []), ("pid", "x"), ("sockets", ["a\0"]),
        ("open_files", [1]), ("argv", [3]), ("affinity", 1),
    ],
)  # fmt: skip
def test_what_no_snapshot_notes_is_damage(field: str, value: object) -> None:
    with pytest.raises(DamagedError, match="cannot be read"):
        facts.Facts.of_plain(plain() | {field: value})


def test_a_field_that_is_unknown_or_missing_is_damage() -> None:
    noted = plain()
    with pytest.raises(DamagedError):
        facts.Facts.of_plain(noted | {"more": 1})
    del noted["uid"]
    with pytest.raises(DamagedError):
        facts.Facts.of_plain(noted)
