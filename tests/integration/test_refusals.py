"""Every setup that cannot work is refused with one clear error that names the fix, and without
loss."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from tests.support import live
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, RemoteError

NOBODY = 65534


def refused(daemon: Daemon, *flags: str, user: int | None = None) -> tuple[int, str]:
    """Exit code and stderr of a daemon that must not start."""
    command = daemon.command(*flags)
    if user is not None:
        command = as_user(user, "pccheckd.cli", *command[3:])
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=800, env=daemon.environment()
    )
    assert "Traceback" not in ran.stderr
    return ran.returncode, ran.stderr


def as_user(user: int, module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.as_user", str(user), module, *arguments]


def make_checkpoint(daemon: Daemon, connect: Connect, step: int = 3) -> None:
    trainer = connect(daemon)
    trainer.step(step)
    trainer.wait_durable(trainer.checkpoint())
    trainer.kill()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--slots", "1"), "--slots"),
        (("--slots", "33"), "32"),
        (("--slots", "2", "--keep", "2"), "--keep"),
        (("--dram", "lots"), "8GiB"),
        (("--chunk", "3KiB"), "--chunk"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
def test_wrong_flags(stack: object, flags: tuple[str, ...], said: str) -> None:
    with Daemon() as daemon:
        code, text = refused(daemon, *flags)
        assert code == 2
        assert said in text


def test_a_misspelt_flag_is_answered_with_the_one_that_was_meant() -> None:
    with Daemon() as daemon:
        code, text = refused(daemon, "--slot", "4")
        assert code == 2
        assert text == (
            "pccheckd: unrecognized arguments: --slot 4 (did you mean --slots? see: pccheckd "
            "--help)\n"
        )


def test_a_storage_directory_is_made_but_not_its_parents() -> None:
    with Daemon() as daemon:
        daemon.storage.rmdir()
        daemon.start()
        assert daemon.storage.is_dir()
        daemon.stop()
        daemon.storage = daemon.storage / "not" / "mounted"
        code, text = refused(daemon)
        assert code == 10
        assert "mkdir" in text


def test_tmpfs_needs_the_override() -> None:
    with Daemon(storage=Path("/dev/shm") / f"pcc-{os.getpid()}") as daemon:
        try:
            code, text = refused(daemon)
            assert code != 0
            assert "tmpfs" in text
            assert "--allow-any-filesystem" in text
            daemon.start("--allow-any-filesystem")
            assert daemon.stop() == 0
        finally:
            live.remove(daemon.storage)


def test_a_second_daemon_is_told_who_has_the_storage(start_daemon: Start) -> None:
    first = start_daemon()
    with Daemon(storage=first.storage) as second:
        code, text = refused(second)
        assert code == 11
        assert str(first.pid) in text


def test_a_second_daemon_on_the_same_socket(start_daemon: Start) -> None:
    first = start_daemon()
    with Daemon() as second:
        second.socket = first.socket
        code, text = refused(second)
        assert code != 0
        assert str(first.socket) in text
    # the first one still serves
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    probe.connect(str(first.socket))
    probe.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
def test_storage_of_another_owner() -> None:
    with Daemon() as daemon:
        daemon.root.chmod(0o755)
        daemon.storage.chmod(0o700)
        code, text = refused(daemon, user=NOBODY)
        assert code in (1, 10)
        assert "chown" in text or "permission" in text.lower()


def test_another_protocol_version(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(10)
        peer.connect(str(daemon.socket))
        peer.send(msgpack.packb({"t": "hello", "protocol": 99, "future": "field"}))
        answer = peer.recv(1 << 16)
    assert b"PROTOCOL" in answer
    assert b"99" in answer


def test_a_live_duplicate_is_refused_with_both_pids(daemon: Daemon, start_trainer: Connect) -> None:
    first = start_trainer(daemon)
    first.save()
    second = start_trainer(daemon, on_error="warn")
    with pytest.raises(RemoteError, match=str(first.pid)) as error:
        second.restore()
    assert str(second.pid) in error.value.message
    assert first.save() == "durable"


def overwrite(path: Path, *, where: int) -> None:
    with path.open("r+b") as file:
        file.seek(where if where >= 0 else path.stat().st_size + where)
        file.write(os.urandom(4096))


@pytest.mark.parametrize("how", ["scribbled", "truncated", "newer"])
def test_a_volume_that_cannot_be_read_is_kept_and_named(
    daemon: Daemon, start_trainer: Connect, how: str
) -> None:
    make_checkpoint(daemon, start_trainer)
    daemon.stop()
    (volume,) = daemon.storage.rglob("*.pcc")
    size = volume.stat().st_size
    if how == "scribbled":
        for where in (0, 1 << 20, -(2 << 20), -(1 << 20)):
            overwrite(volume, where=where)
    elif how == "truncated":
        os.truncate(volume, size // 2)
    else:
        _pretend_newer_format(volume)
    daemon.start()
    trainer = start_trainer(daemon)
    with pytest.raises(RemoteError, match="rank-0") as error:
        trainer.restore()
    assert error.value.kind != "InternalError"
    trainer.step()
    handle = trainer.checkpoint()
    trainer.step()
    assert trainer.state(handle) == "failed"  # the file is not overwritten: it may be rescued
    assert volume.exists()


def _pretend_newer_format(volume: Path) -> None:
    """Raises the version in every record, with a correct CRC, as a later release would."""
    data = bytearray(volume.read_bytes())
    for where in (0, 1 << 20, len(data) - (2 << 20), len(data) - (1 << 20)):
        if data[where : where + 8] == b"PCCPREC1":
            data[where + 8 : where + 12] = (99).to_bytes(4, "little")
            data[where + 4092 : where + 4096] = _crc32c(data[where : where + 4092]).to_bytes(
                4, "little"
            )
    volume.write_bytes(data)


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF
