"""What the scenarios do with the machine: commands, file systems."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


def sh(command: str, *, check: bool = True) -> str:
    """What it prints; its errors go into the failure."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(device: str, place: Path, options: str = "defaults") -> Iterator[Path]:
    place.mkdir(parents=True, exist_ok=True)
    sh(f"mount -o {options} {device} {place}")
    try:
        yield place
    finally:
        sh(f"umount {place}")
