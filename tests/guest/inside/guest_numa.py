"""Two NUMA nodes: memory and writers of a trainer that is bound to one are on that node, with the
daemon confined as its unit says."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.inside import service
from tests.guest.inside.service import CONFIG, STORAGE, shown
from tests.guest.inside.shell import sh
from tests.guest.inside.user import User, connect, restored, save

SIZE = 24 << 20


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    sh("useradd -m alice")
    service.install()
    service.use_disk("/dev/vdc")
    CONFIG.write_text(f'storage = "{STORAGE}"\ndram = "64MiB"\nchunk = "1MiB"\n')


@pytest.fixture
def alice() -> Iterator[User]:
    """The first trainer of a daemon."""
    sh("systemctl restart pccheckd")
    with User("alice") as user:
        yield user


def daemon() -> Path:
    return Path("/proc") / shown("MainPID")


def writers() -> list[str]:
    """The CPUs that each writer thread may run on."""
    found = []
    for task in (daemon() / "task").iterdir():
        told = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        if told["Name"].startswith("pcc-write"):
            found.append(told["Cpus_allowed_list"])
    return found


def near(job: str) -> int | None:
    """The node, as the daemon says."""
    (node,) = [one["numa_node"] for one in service.status()["ranks"] if one["job"] == job]
    return int(node) if node is not None else None


def pages() -> Counter[int]:
    """Of the segments, by node."""
    found: Counter[int] = Counter()
    for line in (daemon() / "numa_maps").read_text().splitlines():
        if "memfd:pccheck-segment" in line:
            found.update({int(n): int(count) for n, count in re.findall(r"N(\d+)=(\d+)", line)})
    return found


def test_the_machine_has_two_nodes() -> None:
    assert Path("/sys/devices/system/node/online").read_text().strip() == "0-1"


@pytest.mark.parametrize("node", [1, 0])
def test_memory_and_writers_are_with_the_trainer(alice: User, node: int) -> None:
    alice.run(os.sched_setaffinity, 0, {node})  # each has one CPU
    alice.run(connect, SIZE, f"bound-{node}")
    for step in (1, 2, 3):
        alice.run(save, step)
    assert alice.run(restored) == (3, True)
    assert near(f"bound-{node}") == node
    run_on = writers()  # those of a lane that had no work yet may run anywhere
    assert str(node) in run_on and str(1 - node) not in run_on, run_on
    found = pages()
    print(f"trainer on node {node}: writers may run on {run_on}, pages by node {dict(found)}")
    assert found[node] > 0.9 * found.total() > 0


def test_a_trainer_that_may_run_anywhere_is_served_from_anywhere(alice: User) -> None:
    alice.run(connect, SIZE, "unbound")
    alice.run(save, 1)
    assert set(writers()) == {"0-1"}
    assert near("unbound") is None
