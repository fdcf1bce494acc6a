"""A disk that is full from the start, or read-only: one clear error, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pccheck import CheckpointState, PCcheckClient, PccheckWarning
from tests.support.daemon import Start


def test_a_full_disk_is_named_and_what_fits_goes_on(start_daemon: Start, disk: Path) -> None:
    daemon = start_daemon("--allow-any-filesystem", storage=disk)
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        client.checkpoint([1]).wait_durable(60)
        with pytest.warns(PccheckWarning, match=r"MiB free") as told:
            ended = [client.checkpoint([torch.ones(5_000_000)]) for _ in range(3)]
        assert len(told) == 1
        assert {handle.state for handle in ended} == {CheckpointState.FAILED}
        assert client.checkpoint([5]).wait_durable(60).step == 5
        assert client.recover().state == [5]
    assert [path.name for path in disk.rglob("*.tmp")] == []


def test_a_daemon_starts_on_a_disk_without_a_block_left(start_daemon: Start, disk: Path) -> None:
    """The full disk may have the only checkpoints from which a job can resume."""
    daemon = start_daemon("--allow-any-filesystem", storage=disk)
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        client.checkpoint([3]).wait_durable(60)
    assert daemon.stop() == 0
    for made in disk.glob(".pccheckd*"):
        made.unlink()
    with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
        while True:
            filler.write(bytes(4096))
    daemon.start()
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        assert client.recover().state == [3]
        client.checkpoint([4]).wait_durable(60)
    assert daemon.stop() == 0


def test_a_read_only_disk_is_refused_and_can_be_read(start_daemon: Start, disk: Path) -> None:
    daemon = start_daemon("--allow-any-filesystem", storage=disk)
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        client.checkpoint([torch.ones(3)], step=7).wait_durable(60)
    daemon.stop()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    ran = subprocess.run(daemon.command("--allow-any-filesystem"), capture_output=True, text=True)
    assert ran.returncode == 10
    assert "read-write" in ran.stderr and str(disk) in ran.stderr
    for command in ("status", "list", "verify"):
        read = [sys.executable, "-m", "pccheckctl", "--storage", str(disk), command]
        assert "job" in subprocess.run(read, capture_output=True, text=True, check=True).stdout
