"""Pipes whose other end is outside the tree: after a restore nobody reads or fills them."""

from __future__ import annotations

from collections.abc import Iterable

from pccheck_process.procs.descriptors import OpenDescriptor
from pccheck_process.procs.holders import Holders

from .found import Findings

_STANDARD = {0: "standard input", 1: "standard output", 2: "standard error"}


def look_at_pipes(found: Findings, opened: Iterable[OpenDescriptor], holders: Holders) -> None:
    """A pipe of standard input, output or error can be replaced at restore; others cannot."""
    pipes: dict[str, list[OpenDescriptor]] = {}
    for one in opened:
        if one.target.startswith("pipe:["):
            pipes.setdefault(one.target, []).append(one)
    for name, ends in pipes.items():
        whole = any(end.reads for end in ends) and any(end.writes for end in ends)
        if whole or holders.nobody(name):  # CRIU restores an end whose other end is closed
            continue
        _look_at_end(found, name, ends, holders.name(name))


def _look_at_end(found: Findings, name: str, ends: list[OpenDescriptor], other: str) -> None:
    standard = [end for end in ends if end.fd in _STANDARD]
    if not standard:
        end = ends[0]
        found.refuse(
            f"{end.member} has a pipe to {other} open as descriptor {end.fd}",
            f"start the process with that descriptor closed: {end.fd}>&-",
        )
        return
    found.outer_pipes.setdefault(name)
    for end in standard:
        text = f"{_STANDARD[end.fd]} of {end.member} is a pipe to {other}"
        if end.writes:
            found.note(f"{text}: after a restore, restore-process --stdout FILE gets the output")
        else:
            found.note(f"{text}: a restored process reads the end of its input")
