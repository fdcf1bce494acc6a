"""One boot of qemu: a scenario runs in the guest, what it prints comes out here.

The guest's processor is emulated, so that no /dev/kvm is needed. It has no network. Whatever it
writes to its disks is gone with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from .image import Image

DISK_BYTES = 4 << 30  # sparse
TAIL_LINES = 40  #: of the console, shown when a guest says nothing more


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a guest is like, and how long it may take."""

    name: str
    minutes: int
    memory_mib: int = 1536
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of a scenario's tests."""

    passed: int
    failed: int


def run(scenario: Scenario, image: Image, payload: Path, place: Path, seed: int) -> Outcome:
    """Prints what the scenario prints, as it comes. A guest that hangs counts as one failure."""
    console, said, disk = _files(scenario, place)
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    said.touch()
    process = subprocess.Popen(
        _command(scenario, image, payload, place, seed), stdin=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(place)},
    )  # fmt: skip
    try:
        _follow(process, said, scenario.minutes * 60)
    finally:
        process.kill()
        process.wait()
        disk.unlink()
    text = said.read_text(errors="replace")
    if not re.search(r"^ended with [01]\r?$", text, re.MULTILINE):
        print(f"the guest did not end as it should; the end of {console}:")
        print("\n".join(console.read_text(errors="replace").splitlines()[-TAIL_LINES:]))
        return Outcome(_count("passed", text), _count("(?:failed|error|errors)", text) + 1)
    return Outcome(_count("passed", text), _count("(?:failed|error|errors)", text))


def _files(scenario: Scenario, place: Path) -> tuple[Path, Path, Path]:
    """The console's text, the scenario's, and a disk of its own."""
    return place / f"{scenario.name}.console", place / f"{scenario.name}.log", place / "disk.img"


def _command(scenario: Scenario, image: Image, payload: Path, place: Path, seed: int) -> list[str]:
    console, said, disk = _files(scenario, place)
    kernel = f"root=/dev/vda rw console=ttyS0 panic=-1 quiet scenario={scenario.name} seed={seed}"
    return [
        "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max",
        "-smp", "2", "-m", str(scenario.memory_mib), "-nodefaults", "-display", "none",
        "-no-reboot", "-device", "virtio-rng-pci", "-serial", f"file:{console}",
        "-serial", f"file:{said}", "-kernel", str(image.kernel), "-initrd", str(image.initrd),
        "-append", f"{kernel} {scenario.kernel}",
        "-drive", f"file={image.root},if=virtio,format=raw,snapshot=on",
        "-drive", f"file={payload},if=virtio,format=raw,readonly=on",
        "-drive", f"file={disk},if=virtio,format=raw,cache=unsafe",
    ]  # fmt: skip


def _follow(process: subprocess.Popen[bytes], said: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    with said.open(errors="replace") as lines:
        while process.poll() is None and time.monotonic() < deadline:
            print(lines.read(), end="", flush=True)
            time.sleep(0.2)  # a file tells nobody that it has grown
        print(lines.read(), end="", flush=True)


def _count(what: str, text: str) -> int:
    """From pytest's last line: "2 failed, 7 passed in 310.44s"."""
    lines = re.findall(r"^=* ?(\d+ .*) in [\d.]+s", text, re.MULTILINE)
    return sum(map(int, re.findall(rf"(\d+) {what}\b", lines[-1]))) if lines else 0
