"""What two processes have in common that end together."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccheck_native.places import places

HOST = {"ipc": "ipc:[4026531839]", "net": "net:[4026531840]", "pid": "pid:[4026531836]",
        "mnt": "mnt:[4026531841]"}  # fmt: skip


def process(path: Path, environ: dict[str, str] | None = None, **namespaces: int) -> set[str]:
    """What a process says that has these namespaces of its own."""
    path.mkdir()
    for kind, name in (HOST | {k: f"{k}:[{v}]" for k, v in namespaces.items()}).items():
        (path / kind).symlink_to(name)
    return set(places(environ or {}, path))


STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}
POD = {"ipc": 5, "net": 6}
#: By name: trainer, daemon, whether they end together.
CASES = {
    "two containers of a pod": (POD | {"pid": 7, "mnt": 8}, POD | {"pid": 9, "mnt": 10}, True),
    "one container": (POD | {"pid": 7, "mnt": 8}, POD | {"pid": 7, "mnt": 8}, True),
    "one container with the host's IPC": ({"pid": 7, "mnt": 8}, {"pid": 7, "mnt": 8}, True),
    "on the host": ({}, {}, False),
    "on the host, in mounts of their own": ({"mnt": 8}, {"mnt": 9}, False),
    "two pods": (POD, {"ipc": 7, "net": 8}, False),
    "two containers on the host's network": ({"ipc": 5}, {"ipc": 7}, False),
    "a container that borrows the daemon's IPC and PIDs": (
        {"ipc": 5, "pid": 7, "net": 1, "mnt": 2}, {"ipc": 5, "pid": 7, "net": 3, "mnt": 4}, False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_containers(name: str, tmp_path: Path) -> None:
    trainer, daemon, together = CASES[name]
    both = process(tmp_path / "a", **trainer) & process(tmp_path / "b", **daemon)
    assert bool(both) == together


@pytest.mark.parametrize(
    ("other", "together"),
    [(STEP, True), (STEP | {"SLURM_STEP_ID": "1"}, False), ({"SLURM_JOB_ID": "12"}, False),
     (STEP | {"SLURM_JOB_ID": "13"}, False), ({}, False)],
)  # fmt: skip
def test_slurm_steps(other: dict[str, str], together: bool) -> None:
    assert bool(set(places(STEP)) & set(places(other))) == together


def test_a_service_of_a_machine_that_is_a_container(tmp_path: Path) -> None:
    """LXC: systemd runs the daemon, and a user the trainer."""
    service = process(tmp_path / "a", {"NOTIFY_SOCKET": "/n"}, **POD)
    assert not service & process(tmp_path / "b", **POD)


def test_a_sandbox_without_proc(tmp_path: Path) -> None:
    assert list(places({}, tmp_path / "none")) == []
