"""The daemon does all its work under the restrictions of pccheckd.service, as an ordinary user."""

from __future__ import annotations

import os
import platform
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from tests.conftest import SMALL
from tests.support import sandbox
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of

UNIT = Path(__file__).parents[2] / "systemd" / "pccheckd.service"
SIZE = 3_000_000

pytestmark = [
    pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64 only"),
    pytest.mark.skipif(not sandbox.numbers(), reason="no kernel headers"),
]


class Confined(Daemon):
    """A daemon whose forbidden calls fail with EPERM, as SystemCallErrorNumber= says."""

    allowed: str

    def start(self, *flags: str) -> Self:
        before = os.umask(0)  # the notify socket is for that user, too
        try:
            return super().start(*flags)
        finally:
            os.umask(before)

    def command(self, *flags: str) -> list[str]:
        command = super().command(*flags)
        return [command[0], "-m", sandbox.__name__, self.allowed, *command[3:]]


@pytest.fixture
def confined(stack: ExitStack) -> Confined:
    daemon = stack.enter_context(Confined(*SMALL))
    known = sandbox.numbers()
    names = sandbox.allowed(UNIT) & known.keys()
    daemon.allowed = ",".join(str(known[name]) for name in sorted(names))
    if os.geteuid() == 0:
        for path in (daemon.root, daemon.storage):
            os.chown(path, sandbox.NOBODY, sandbox.NOBODY)
    return daemon


def test_the_filter_bites(confined: Confined) -> None:
    names = sandbox.allowed(UNIT)
    assert {"pwritev2", "mlock", "sched_setaffinity", "memfd_create"} <= names
    assert not {"chroot", "mount", "ptrace", "setpriority", "init_module", "bpf"} & names


def test_it_serves_in_confinement(confined: Confined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCHECK_DAEMON_UID", "65534")  # as seen from outside its user namespace
    confined.start()
    status = Path(f"/proc/{confined.pid}/status").read_text()
    assert "\nSeccomp:\t2\n" in status and "\nNoNewPrivs:\t1\n" in status
    for step in (1, 2, 3):
        with Rank(confined.socket) as rank:
            rank.register(SIZE)
            rank.save(step, payload_of(step, SIZE))
    assert confined.stop() == 0
    confined.start()
    with Rank(confined.socket) as rank:
        opened, data = rank.restore()
    assert (opened.step, data) == (3, payload_of(3, SIZE))
    assert confined.stop() == 0
