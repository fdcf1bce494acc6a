"""Terminals of a tree: the other end, a window or an ssh session, is outside."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from pccheck_process.procs.descriptors import OpenDescriptor
from pccheck_process.procs.procfs import shown, whole

from .found import Findings

_FIRST_SLAVE, _LAST_SLAVE = 136, 143  # major numbers of /dev/pts
_CONSOLES, _CURRENT, _CONSOLE, _MASTER = 4, (5, 0), (5, 1), (5, 2)


def is_terminal(one: OpenDescriptor) -> bool:
    if one.stat is None or not stat.S_ISCHR(one.stat.st_mode):
        return False
    device = os.major(one.stat.st_rdev), os.minor(one.stat.st_rdev)
    is_slave = _FIRST_SLAVE <= device[0] <= _LAST_SLAVE
    return is_slave or device[0] == _CONSOLES or device in (_CURRENT, _CONSOLE, _MASTER)


def look_at_terminals(found: Findings, opened: Iterable[OpenDescriptor]) -> None:
    """Notes each terminal whose master the tree does not have."""
    terminals = [one for one in opened if is_terminal(one)]
    masters = {
        whole(one.info.get("tty-index"))
        for one in terminals
        if one.stat and (os.major(one.stat.st_rdev), os.minor(one.stat.st_rdev)) == _MASTER
    }
    for one in terminals:
        assert one.stat is not None
        number = os.major(one.stat.st_rdev), os.minor(one.stat.st_rdev)
        index = (number[0] - _FIRST_SLAVE) * 256 + number[1]
        is_slave = _FIRST_SLAVE <= number[0] <= _LAST_SLAVE
        if number == _MASTER or (is_slave and index in masters):
            continue
        # The name that CRIU gives to a terminal outside, for --external and --inherit-fd.
        found.outer_terminals.setdefault(f"tty[{one.stat.st_rdev:x}:{one.stat.st_dev:x}]")
        found.note(
            f"{one.member} has the terminal {shown(one.path)} open: after a restore, "
            "restore-process --stdout FILE gets the output"
        )
