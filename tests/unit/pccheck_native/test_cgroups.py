"""How much memory a process may have, by the files of both versions of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pccheck_native import cgroups

MIB = 1 << 20
RAM = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Groups:
    """What stands in for /proc/self/cgroup and /sys/fs/cgroup."""

    def __init__(self, place: Path) -> None:
        self.of_process, self.root = place / "self", place / "fs"
        self.root.mkdir()

    def put(self, group: str, **files: object) -> None:
        (self.root / group).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (self.root / group / name.replace("__", ".")).write_text(f"{value}\n")

    def memory(self, process: str) -> tuple[int, str]:
        self.of_process.write_bytes(os.fsencode(process))
        return cgroups.memory_bytes(self.of_process, self.root)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_without_cgroups_the_ram_bounds(groups: Groups) -> None:
    assert groups.memory("") == (RAM, "the RAM of this host")
    assert cgroups.memory_bytes(groups.root / "none", groups.root) == (RAM, "the RAM of this host")


def test_the_least_limit_above_counts(groups: Groups) -> None:
    groups.put("", memory__current=1)
    groups.put("job", memory__current=5, memory__max=64 * MIB, memory__high="max")
    groups.put("job/step", memory__current=5, memory__max="max", memory__high=96 * MIB)
    room, bound = groups.memory("0::/job/step\n")
    assert (room, bound) == (64 * MIB, f"memory.max of cgroup {groups.root}/job")
    groups.put("job/step", memory__high=32 * MIB)
    room, bound = groups.memory("0::/job/step\n")
    assert (room, bound) == (32 * MIB, f"memory.high of cgroup {groups.root}/job/step")


def test_version_1_has_its_own_tree(groups: Groups) -> None:
    unlimited = 9223372036854771712
    one = {"memory__usage_in_bytes": 7}
    groups.put("memory", **one, memory__limit_in_bytes=unlimited)
    groups.put("memory/slurm", **one, memory__limit_in_bytes=48 * MIB)
    groups.put("memory/slurm/job", **one, memory__limit_in_bytes=unlimited)
    process = "5:devices:/\n4:cpu,memory:/slurm/job\n0::/\n"
    assert groups.memory(process) == (
        48 * MIB, f"memory.limit_in_bytes of cgroup {groups.root}/memory/slurm"
    )  # fmt: skip


@pytest.mark.parametrize("process", ["0::/docker/1a2b\n", "0::/../../host.slice\n", "0::/\n"])
def test_a_container_sees_its_own_group_at_the_root(groups: Groups, process: str) -> None:
    groups.put("", memory__current=1, memory__max=16 * MIB)
    assert groups.memory(process)[0] == 16 * MIB


def test_a_group_may_have_any_name(groups: Groups) -> None:
    name = "job\x0b\x85 \N{LINE SEPARATOR}\udcff"
    groups.put(name, memory__current=5, memory__max=64 * MIB)
    room, bound = groups.memory(f"0::/{name}\n")
    assert room == 64 * MIB and bound.encode()
