"""Processes that tests look at: small programs that do something, then wait."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from pccheck_process.looking import Looked, look

OTHER_UID = 4242

_WAIT = "\nimport sys\nprint('ready', flush=True)\nsys.stdin.read()\n"


@contextlib.contextmanager
def child(code: str = "", **options: object) -> Iterator[int]:
    """A Python program in a session of its own; yields its pid after `code` has run."""
    words = [sys.executable, "-I", "-S", "-c", code + _WAIT]
    with running(words, **options) as pid:
        yield pid


@contextlib.contextmanager
def shell(uid: int = OTHER_UID, **options: object) -> Iterator[int]:
    """A shell of another user, who may have no access to our Python."""
    words = ["/bin/sh", "-c", "echo ready; read line"]
    with running(words, user=uid, group=uid, extra_groups=[], cwd="/", **options) as pid:
        yield pid


@contextlib.contextmanager
def running(words: list[str], **options: object) -> Iterator[int]:
    process = subprocess.Popen(  # type: ignore[call-overload]
        words, stdin=-1, stdout=-1, text=True, start_new_session=True, **options
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def refusals(pid: int, *, tree: bool = False, root: bool = True) -> list[str]:
    """What a look refuses, with (pid) and (comm) left out."""
    return sentences(look(pid, tree=tree, root=root))


def sentences(looked: Looked) -> list[str]:
    name = f"process {looked.pid} ({looked.comm})"
    return [one.what.replace(name, "P") for one in looked.refusals]
