"""pccheckd installed in the guest, by the commands of docs/service.md themselves."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.guest.inside.shell import sh

DOCUMENT = Path("docs/service.md").read_text()
UNIT = Path("/etc/systemd/system/pccheckd.service")
CONFIG = Path("/etc/pccheck/pccheckd.toml")
STORAGE = Path("/mnt/ssd/checkpoints")
LIMIT_S = 300.0


def _block(number: int) -> list[str]:
    """The lines of an indented block of "Install", without comments behind commands."""
    part = DOCUMENT.split("## Install\n")[1].split("\n## ")[0]
    blocks = [text for text in part.split("\n\n") if "\n    " in f"\n{text}"]
    lines = [line[4:] for line in blocks[number].splitlines() if line.startswith("    ")]
    return [re.split(r"  +#", line)[0] for line in lines]


def install() -> None:
    """Needs the user alice."""
    for command in _block(0):
        if not command.startswith("pip "):  # the program is there
            sh(command)


def use_disk(device: str) -> None:
    """For the storage; the configuration has still to name it."""
    sh(f"mkfs.ext4 -q -F {device} && mkdir -p /mnt/ssd")
    with Path("/etc/fstab").open("a") as table:
        table.write(f"{device} /mnt/ssd ext4 defaults 0 0\n")
    drop_in = UNIT.with_name("pccheckd.service.d") / "override.conf"
    drop_in.parent.mkdir()
    edit, *lines = _block(1)
    assert edit == "# systemctl edit pccheckd"
    drop_in.write_text("\n".join(lines) + "\n")
    sh("systemctl daemon-reload && systemctl start mnt-ssd.mount")
    for command in _block(2):
        sh(command)


def shown(name: str, unit: str = "pccheckd.service") -> str:
    """A property of the unit, from systemctl."""
    return sh(f"systemctl show --value -p {name} {unit}")


def status() -> dict[str, Any]:
    """The status as root, with the jobs of all users; `degraded` is not an error here."""
    return dict(json.loads(sh("pccheckctl status --json", check=False)))


def kept_steps() -> set[int]:
    """The kept steps, read from the volumes."""
    document = json.loads(sh(f"pccheckctl --storage {STORAGE} list --json"))
    return {one["step"] for one in document["checkpoints"]}


def wait_for(what: Callable[[], Any]) -> None:
    """Waits until the condition is true."""
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, sh("systemctl status pccheckd; journalctl -n 30")
        time.sleep(0.2)  # neither systemctl nor the journal reports changes
