"""A machine that refuses the daemon memory, threads or descriptors, or kills it for its memory. The
core's own calls: tests/native/test_scarcity_*.c."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pccheck_wire.errors import PccheckError
from tests.support.daemon import Daemon, Start
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Connect

MIB = 1 << 20
NOBODY = 4321
GROUPS = Path("/sys/fs/cgroup/memory")
REFUSALS = ("limit reached", "needs at least two chunks")
LIMITED = """
import os, resource, sys
name, limit = sys.argv[1], int(sys.argv[2])
resource.setrlimit(getattr(resource, name), (limit, limit))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


class Limited(Daemon):
    """A daemon under a limit of the kernel's."""

    limit = ("RLIMIT_MEMLOCK", 0)

    def command(self, *flags: str) -> list[str]:
        name, limit = self.limit
        return [sys.executable, "-c", LIMITED, name, str(limit), *super().command(*flags)[1:]]


@pytest.mark.parametrize("limit", [("RLIMIT_MEMLOCK", 0), ("RLIMIT_AS", 780 * MIB)])
def test_what_the_limits_leave_is_used(limit: tuple[str, int]) -> None:
    """A checkpoint becomes durable, or fails with a reason; the daemon goes on."""
    daemon = Limited("--chunk", "1MiB", "--block-bytes", "64KiB", "--dram", "1GiB")
    daemon.limit = limit
    with daemon:
        daemon.start()
        for attempt in range(3):
            try:
                with Rank(daemon.socket, job=f"job-{attempt}") as rank:
                    rank.register(20 * MIB)
                    data = payload_of(attempt, 20 * MIB)
                    rank.save(attempt, data)
                    assert rank.restore()[1] == data
            except PccheckError as error:
                assert limit[0] == "RLIMIT_AS", error
                assert any(words in error.message for words in REFUSALS) and error.hint, error
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()


def test_a_volume_above_the_limit_on_file_sizes_is_told_with_its_fix() -> None:
    daemon = Limited("--chunk", "1MiB", "--dram", "64MiB")
    daemon.limit = ("RLIMIT_FSIZE", 20 * MIB)
    with daemon:
        daemon.start()
        with Rank(daemon.socket) as rank, pytest.raises(PccheckError, match="File too") as refused:
            rank.register(20 * MIB)
        assert "ulimit -f" in refused.value.hint


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user without processes")
def test_a_refused_thread_is_told_in_words() -> None:
    with tempfile.TemporaryDirectory(prefix="pcc-") as root:
        os.chown(root, NOBODY, NOBODY)
        storage = Path(root) / "storage"
        storage.mkdir()
        os.chown(storage, NOBODY, NOBODY)
        ran = subprocess.run(
            [sys.executable, "-c", LIMITED, "RLIMIT_NPROC", "1", "-m", "tests.support.as_user",
             str(NOBODY), "pccheckd.cli", "--storage", str(storage), "--allow-any-filesystem",
             "--socket", f"{root}/run/attach.sock"],
            capture_output=True, text=True, timeout=800,
        )  # fmt: skip
    assert ran.returncode == 1
    assert "cannot start a thread: limit reached, of processes or of address sp" in ran.stderr
    assert "(raise its limits" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of its own."""
    made = GROUPS / f"pccheck-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(1 << 40))
    except OSError as error:
        pytest.skip(f"no memory cgroup to be had: {error}")
    yield made
    made.rmdir()


class Grouped(Daemon):
    """A daemon that starts in a cgroup."""

    group = GROUPS

    def command(self, *flags: str) -> list[str]:
        join = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
        join += "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        procs = str(self.group / "cgroup.procs")
        return [sys.executable, "-c", join, procs, *super().command(*flags)[1:]]


def test_the_default_dram_is_a_quarter_of_the_cgroups_limit(group: Path) -> None:
    (group / "memory.limit_in_bytes").write_text(str(512 * MIB))
    with Grouped("--chunk", "1MiB") as daemon:
        daemon.group = group
        daemon.start()
        daemon.logs("DRAM 0.12 GiB")  # 128 MiB
        assert daemon.stop() == 0
        daemon.start("--dram", "1GiB")
        log = daemon.log.read_text()
        assert f"--dram 1.00 GiB is more than memory.limit_in_bytes of cgroup {group} allows" in log
        assert daemon.stop() == 0


def test_killed_for_its_memory(start_daemon: Start, start_trainer: Connect, group: Path) -> None:
    """The kernel kills the daemon when its memory grows: the trainer goes on and connects to the
    next daemon by itself, and durable checkpoints are not lost."""
    daemon = start_daemon("--dram", "256MiB")
    trainer = start_trainer(daemon, [12_000_000])  # 48 MB
    trainer.save()
    (group / "cgroup.procs").write_text(str(daemon.pid))
    (group / "memory.limit_in_bytes").write_text(str(16 * MIB))
    with ExitStack() as stack:
        for number in range(4):  # new pages of the pool count against the limit
            try:
                rank = Rank(daemon.socket, job=f"other-{number}")
                stack.callback(rank.close)
                rank.register(40 * MIB)
                rank.save(1, payload_of(number, 40 * MIB))
            except (AssertionError, OSError, PccheckError):
                break
    assert daemon.wait_end(60) == -9
    trainer.step(3)
    trainer.checkpoint()  # skipped, with a warning
    daemon.start()
    assert trainer.wait_durable(trainer.connects_again()) == "durable"
    trainer.kill()
    again = start_trainer(daemon, [12_000_000])
    step = again.restore()["step"]
    assert step > 1 and again.check(step) == ""
