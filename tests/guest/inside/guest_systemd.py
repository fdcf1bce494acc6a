"""The daemon as a service of a real systemd, installed as docs/service.md says."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guest.inside import service
from tests.guest.inside.service import CONFIG, DOCUMENT, STORAGE, UNIT, kept_steps, shown, wait_for
from tests.guest.inside.shell import sh
from tests.guest.inside.user import SOCKET, User, connect, copy, restored, save

SIZE = 8 << 20
SLOW = "1MiB"  #: bytes per second: a checkpoint then stays copied, and not durable, for seconds


def journal(*fields: str) -> list[dict[str, str]]:
    lines = sh(f"journalctl -u pccheckd -o json --no-pager {' '.join(fields)}").splitlines()
    return [json.loads(line) for line in lines]


def set_option(name: str, value: str) -> None:
    text = re.sub(rf"(?m)^{name} = .*\n", "", CONFIG.read_text())
    CONFIG.write_text(text + f"{name} = {value}\n")


@pytest.fixture(scope="module", autouse=True)
def _users() -> None:
    sh("useradd -m alice && useradd -m bob")


@pytest.fixture
def alice() -> Iterator[User]:
    with User("alice") as user:
        yield user


# The tests build on each other, in this order.


def test_installed_as_the_document_says() -> None:
    service.install()
    assert shown("ActiveState") == "active"
    assert oct(SOCKET.stat().st_mode & 0o777) == "0o660"
    assert sh("stat -c '%a %U %G' /run/pccheck") == "750 pccheck pccheck"
    assert sh("stat -c '%a %U' /var/lib/pccheck") == "700 pccheck"
    assert "ok" in sh("runuser -u alice -- pccheckctl status")


def test_storage_on_a_disk_of_its_own() -> None:
    service.use_disk("/dev/vdc")
    CONFIG.write_text(f'storage = "{STORAGE}"\nmax-bandwidth = "{SLOW}"\ndram = "64MiB"\n')
    sh("umount /mnt/ssd && systemctl restart pccheckd")
    assert "/dev/vdc" in sh("findmnt -n /mnt/ssd"), "RequiresMountsFor= has mounted it"
    assert service.status()["storage"]["path"] == str(STORAGE)


def test_the_units_are_without_fault() -> None:
    for unit in (UNIT, UNIT.with_suffix(".socket")):
        assert sh(f"systemd-analyze verify --man=no {unit} 2>&1") == ""


def test_it_is_as_closed_as_the_document_says() -> None:
    told = sh("systemd-analyze security --no-pager pccheckd")
    (level,) = re.findall(r"Overall exposure level for pccheckd.service: (\S+)", told)
    print(f"systemd-analyze security: {level}")
    (promised,) = re.findall(r"security pccheckd` gives (\S+)", DOCUMENT)
    assert float(level) <= float(promised)
    fields = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{shown('MainPID')}/status").read_text().splitlines()
    )
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["Uid"].split()[0] == sh("id -u pccheck")


def test_the_socket_starts_the_service(alice: User) -> None:
    sh("systemctl stop pccheckd.service")
    assert shown("ActiveState") == "inactive"
    assert shown("ActiveState", "pccheckd.socket") == "active"
    alice.run(connect, SIZE)
    assert shown("ActiveState") == "active"
    assert shown("Type") == "notify"


def test_a_checkpoint_of_an_ordinary_user(alice: User) -> None:
    alice.run(connect, SIZE)
    wait_for(lambda: shown("StatusText").startswith("1 trainer, 0 checkpoints in flight"))
    alice.run(save, 1)
    wait_for(lambda: "1 made durable" in shown("StatusText"))
    print(f"StatusText={shown('StatusText')}")
    assert alice.run(restored) == (1, True)
    assert kept_steps() == {1}


def test_who_is_not_in_the_group_stays_outside() -> None:
    told = sh("runuser -u bob -- pccheckctl status 2>&1", check=False)
    assert f"uid {sh('id -u bob')} may not use the socket" in told and "join the group" in told


def test_the_journal_has_the_fields() -> None:
    uid = sh("id -u alice")
    (line,) = journal("PCCHECK_EVENT=durable", "PCCHECK_JOB=job", "PCCHECK_STEP=1")
    assert line["PCCHECK_UID"] == uid and line["PRIORITY"] == "6"
    assert int(line["PCCHECK_PAYLOAD_BYTES"]) == SIZE and float(line["PCCHECK_DURABLE_S"]) > 0
    assert line["_SYSTEMD_UNIT"] == "pccheckd.service"
    assert line["SYSLOG_IDENTIFIER"] == "pccheckd"


def test_reload_takes_over_what_was_changed() -> None:
    pid = shown("MainPID")
    set_option("drain-limit", '"61s"')
    set_option("slots", "5")
    sh("systemctl reload pccheckd")

    def row(name: str) -> dict[str, Any]:
        options = json.loads(sh("pccheckctl config show --json"))["options"]
        return next(one for one in options if one["name"] == name)

    wait_for(lambda: row("drain-limit")["value"] == 61)
    assert row("slots")["after_restart"] == "5"
    assert (shown("MainPID"), shown("ActiveState")) == (pid, "active")
    set_option("drain-limit", '"1min')  # not TOML
    sh("systemctl reload pccheckd")
    wait_for(lambda: any("no option changed" in line["MESSAGE"] for line in journal("-n 20")))
    assert row("drain-limit")["value"] == 61
    set_option("drain-limit", '"1min"')
    set_option("slots", "4")
    sh("systemctl reload pccheckd")


def test_what_was_copied_survives_a_killed_daemon(alice: User) -> None:
    """P1: the trainer is killed as well, so only systemd's descriptor store has the bytes."""
    alice.run(connect, SIZE)
    alice.run(restored)
    alice.run(copy, 2)
    pid = shown("MainPID")
    stored = int(shown("NFileDescriptorStore"))
    assert service.status()["kept"]["limit"] == int(shown("FileDescriptorStoreMax"))
    assert stored >= 2
    os.kill(int(pid), signal.SIGKILL)
    assert kept_steps() == {1}, "not durable yet"
    alice.kill()
    wait_for(lambda: shown("MainPID") not in (pid, "0") and shown("ActiveState") == "active")
    print(f"{stored} descriptors were stored; restarts so far: {shown('NRestarts')}")
    assert shown("NRestarts") == "1"
    assert service.status()["kept"]["adopted_checkpoints"] == 1
    wait_for(lambda: journal("PCCHECK_EVENT=durable", "PCCHECK_STEP=2"))
    with User("alice") as again:
        again.run(connect, SIZE)
        assert again.run(restored) == (2, True)


def test_a_trainer_waits_in_the_socket_while_it_restarts(alice: User) -> None:
    os.kill(int(shown("MainPID")), signal.SIGKILL)
    wait_for(lambda: shown("SubState") == "auto-restart")
    alice.run(connect, SIZE)
    assert alice.run(restored) == (2, True)


def test_the_watchdog_ends_what_hangs(alice: User) -> None:
    """A hang does not lose copied checkpoints either."""
    alice.run(connect, SIZE)
    alice.run(restored)
    before = int(shown("NRestarts"))
    alice.run(copy, 3)
    started = time.monotonic()
    os.kill(int(shown("MainPID")), signal.SIGSTOP)
    wait_for(lambda: int(shown("NRestarts")) == before + 1)
    print(f"started again {time.monotonic() - started:.0f} s after it was stopped")
    assert any("Watchdog timeout" in line["MESSAGE"] for line in journal("-n 50"))
    wait_for(lambda: journal("PCCHECK_EVENT=durable", "PCCHECK_STEP=3"))
    assert alice.run(connect, SIZE) is None
    assert alice.run(restored) == (3, True)


def test_a_stop_makes_durable_what_was_copied(alice: User) -> None:
    alice.run(connect, SIZE)
    alice.run(restored)
    alice.run(copy, 4)
    assert kept_steps() == {2, 3}, "not durable yet"
    sh("systemctl stop pccheckd.service")
    assert (shown("Result"), shown("ExecMainStatus")) == ("success", "0")
    assert max(kept_steps()) == 4
    assert any(line["MESSAGE"] == "stopped" for line in journal("-n 20"))
    assert SOCKET.exists()
    sh("systemctl stop pccheckd.socket")
    assert not SOCKET.exists()


def test_systemd_has_understood_everything() -> None:
    """systemd has logged no unit, message or descriptor that it did not understand."""
    lines = sh("journalctl -b --no-pager -o cat _PID=1").splitlines()
    strange = [
        line
        for line in lines
        if "pccheckd" in line and re.search(r"(?i)ignor|unknown|too many", line)
    ]
    assert strange == []
