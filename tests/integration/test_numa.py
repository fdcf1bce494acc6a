"""Memory and writers near the trainer. The machine has two nodes of one CPU each, as far as the
daemon can see: a made-up tree is mounted for it alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import SMALL
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of

NODES = Path("/sys/devices/system/node")
MOUNTED = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
CPUS = sorted(os.sched_getaffinity(0))
SIZE = 3_000_000


def mounts() -> bool:
    """Whether this user may mount on this machine."""
    if shutil.which("unshare") is None or not NODES.is_dir():
        return False
    probe = [*MOUNTED, f"mount --bind / {NODES}"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.skipif(len(CPUS) < 2, reason="one CPU"),
    pytest.mark.skipif(not mounts(), reason="needs to mount"),
]


class TwoNodes(Daemon):
    def command(self, *flags: str) -> list[str]:
        tree = self.root / "nodes"
        for node in (0, 1):
            (tree / f"node{node}").mkdir(parents=True, exist_ok=True)
            (tree / f"node{node}" / "cpulist").write_text(f"{CPUS[node]}\n")
        script = f'mount --bind "$0" {NODES} && exec "$@"'
        return [*MOUNTED, script, str(tree), *super().command(*flags)]

    def writers(self) -> list[str]:
        """The CPUs that each writer thread may use."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            if not (task / "status").exists():  # a thread that has ended meanwhile
                continue
            fields = dict(
                line.split(":\t", 1) for line in (task / "status").read_text().splitlines()
            )
            if fields["Name"].startswith("pcc-write"):
                found.append(fields["Cpus_allowed_list"])
        return found


@contextmanager
def bound(cpus: set[int]) -> Iterator[None]:
    """Binds this thread, which is the trainer for the daemon, to these CPUs."""
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, set(CPUS))


def saved(daemon: Daemon, ctl: Ctl) -> object:
    """Saves a checkpoint; returns the node of the rank's memory."""
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        (shown,) = ctl(None, "--socket", daemon.socket, "status", "--json").json["ranks"]
        return shown["numa_node"]


def test_a_bound_trainer_is_served_near_its_node(stack: ExitStack, ctl: Ctl) -> None:
    daemon = stack.enter_context(TwoNodes(*SMALL)).start()
    with bound({CPUS[1]}):
        assert saved(daemon, ctl) == 1
    writers = daemon.writers()
    assert str(CPUS[1]) in writers
    assert str(CPUS[0]) not in writers


def test_a_trainer_that_may_run_anywhere_is_served_from_anywhere(
    stack: ExitStack, ctl: Ctl
) -> None:
    daemon = stack.enter_context(TwoNodes(*SMALL)).start()
    assert saved(daemon, ctl) is None
    assert not {str(CPUS[0]), str(CPUS[1])} & set(daemon.writers())


def test_on_one_node_nothing_is_placed(stack: ExitStack, ctl: Ctl) -> None:
    if len(list(NODES.glob("node[0-9]*"))) > 1:
        pytest.skip("this machine has more nodes")
    daemon = stack.enter_context(Daemon(*SMALL)).start()
    with bound({CPUS[1]}):
        assert saved(daemon, ctl) is None
