"""A file system on a block device that fails on command: file -> nbdkit -> nbdfuse -> loop
device -> ext4 or xfs. Needs root, and of Debian nbdkit, libnbd-bin, fuse3, e2fsprogs, xfsprogs."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tests.support.daemon import build
from tests.support.waiting import until

READ, WRITE, FLUSH = 1, 2, 4
#: The minimum of mkfs.xfs, and enough for a few small volumes.
DISK_BYTES = 320 << 20
TOOLS = ("nbdkit", "nbdfuse", "losetup", "fusermount3", "mkfs.ext4", "mkfs.xfs")
LIMIT_S = 240.0


def missing() -> str:
    """Why this machine cannot make such a disk; "" if it can."""
    if os.getuid() != 0:
        return "needs root, to mount"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: nbdkit, libnbd-bin, fuse3, xfsprogs)"
    return "" if Path("/dev/fuse").exists() and Path("/dev/loop-control").exists() else "no loop"


class FaultyDisk:
    """Mounted at `mount` within the with block."""

    def __init__(self, file_system: str) -> None:
        self.file_system = file_system
        self.root = Path(tempfile.mkdtemp(prefix="pcc-disk-"))
        self.mount = self.root / "mount"
        self._fuse = self.root / "fuse"
        self._control_path = self.root / "control"
        self._loop = ""
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _open(self) -> None:
        self.mount.mkdir()
        self._fuse.mkdir()
        self._control_path.write_bytes(bytes(4096))
        with self._control_path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 4096)
        image = self.root / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        environment = os.environ | {
            "LD_PRELOAD": str(build("diskshim")), "PCC_DISK_CONTROL": str(self._control_path)
        }  # fmt: skip
        with (self.root / "log").open("wb") as log:
            self._server = subprocess.Popen(
                ["nbdfuse", str(self._fuse / "disk"), "--command", "nbdkit", "-s",
                 "--exit-with-parent", "file", str(image)],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        until((self._fuse / "disk").exists, (self.root / "log").read_text)
        self._loop = _run(
            "losetup", "--direct-io=on", "--show", "-f", str(self._fuse / "disk")
        ).strip()
        _run(f"mkfs.{self.file_system}", "-q", self._loop)
        _run("mount", self._loop, str(self.mount))

    def fail(self, kinds: int, *, skip: int, persistent: bool) -> None:
        """Lets operations of these kinds fail, after `skip` more of them."""
        self._control[4:16] = struct.pack("<III", skip, persistent, 0)
        self._control[0:4] = struct.pack("<I", kinds)

    def mend(self) -> int:
        """Ends the fault; returns how many operations have failed. Remounts a file system that has
        stopped because its journal could not be written."""
        self._control[0:4] = bytes(4)
        return int(struct.unpack("<I", self._control[12:16])[0])

    def remount(self) -> None:
        """No process may use the file system meanwhile. A process that has just copied all mounts
        into a new namespace keeps the stopped file system for a moment."""

        def is_readable() -> bool:
            _run("umount", str(self.mount))
            _run("mount", self._loop, str(self.mount))
            try:
                any(self.mount.iterdir())
            except OSError:
                return False
            return True

        until(is_readable, every_s=0.1)

    def close(self) -> None:
        if self._server is not None:
            self._control[0:4] = bytes(4)
            subprocess.run(["umount", str(self.mount)], capture_output=True)
            subprocess.run(["losetup", "-d", self._loop], capture_output=True)
            deadline = time.monotonic() + LIMIT_S  # the loop device closes the file later
            while (
                subprocess.run(
                    ["fusermount3", "-u", str(self._fuse)], capture_output=True
                ).returncode
                and time.monotonic() < deadline
            ):
                time.sleep(0.1)
            try:
                self._server.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        shutil.rmtree(self.root, ignore_errors=True)


def _run(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stderr}"
    return ran.stdout
