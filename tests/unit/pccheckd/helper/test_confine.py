"""What a helper may still do when it has confined itself."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFINE = (
    "import socket\n"
    "from pccheckd.helper.confine import confine; "
    "confine({uid}, {gid}, files_max=64, address_space_bytes=1 << 30)\n"
)
HAS_LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


def confined(
    then: str, *, uid: int = os.getuid(), gid: int = os.getgid(),
    inside: list[str] | None = None,
) -> list[str]:  # fmt: skip
    """The lines that a confined process prints."""
    program = CONFINE.format(uid=uid, gid=gid) + then
    command = [*(inside or []), sys.executable, "-P", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def opens(path: Path, flags: str = "os.O_RDONLY") -> str:
    return (
        f"import os\ntry:\n    os.open({os.fspath(path)!r}, {flags})\n    print('open')\n"
        "except PermissionError:\n    print('refused')\n"
    )


@pytest.mark.skipif(not HAS_LANDLOCK, reason="needs a kernel with Landlock")
def test_a_confined_process_opens_no_file() -> None:
    assert confined(opens(Path("/etc/passwd"))) == ["refused"]


@pytest.mark.skipif(not HAS_LANDLOCK, reason="needs a kernel with Landlock")
def test_a_confined_process_connects_nowhere() -> None:
    script = (
        "try:\n    socket.create_connection(('127.0.0.1', 1))\n"
        "except PermissionError:\n    print('refused')\n"
        "except ConnectionRefusedError:\n    print('tried')\n"
    )
    version = ctypes.CDLL(None).syscall(444, None, 0, 1)
    assert confined(script) == ["refused" if version >= 4 else "tried"]


def test_root_of_a_container_without_setgroups_confines_itself() -> None:
    """Such a container has one user, and that user is root in it."""
    inside = ["unshare", "--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("needs user namespaces")
    confined("", uid=0, gid=0, inside=inside)
