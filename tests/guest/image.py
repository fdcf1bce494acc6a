"""What a guest boots: a small Debian, made once from Debian's packages, and a tar with the project.

The Debian lies in .guest/, named after its recipe; it has everything but the project itself,
so that a change of the project costs no new one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".guest"
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = (
    "linux-image-amd64,initramfs-tools,systemd,systemd-sysv,udev,dbus,kmod,procps,python3,"
    "python3-venv,e2fsprogs,xfsprogs,dmsetup,iproute2"
)
#: As in constraints.txt; those of the daemon, and what runs the scenarios.
WHEELS = ("msgpack", "pyzmq", "psutil", "uvloop", "cryptography", "pytest")
#: Most of a Debian's bytes.
UNWANTED = (
    "usr/share/doc", "usr/share/man", "usr/share/locale", "lib/modules/*/kernel/sound",
    "lib/modules/*/kernel/drivers/gpu", "lib/modules/*/kernel/drivers/media",
    "lib/modules/*/kernel/drivers/net/wireless",
)  # fmt: skip
ROOM = "+400M"  #: on the root file system, beyond what Debian takes

NEEDED = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "genext2fs": "genext2fs",
    "resize2fs": "e2fsprogs",
    "tune2fs": "e2fsprogs",
}

#: Put on the root file system. /dev/vdb is a tar, not a file system.
_FILES = {
    "etc/systemd/system/scenario.service": """\
[Unit]
Description=The scenario that the kernel's command line names
After=dbus.service systemd-user-sessions.service

[Service]
Type=exec
ExecStart=/bin/sh -c 'mkdir /run/payload; cd /run/payload; tar -xf /dev/vdb; \
    exec sh tests/guest/inside/start.sh'
StandardOutput=file:/dev/ttyS1
StandardError=file:/dev/ttyS1

[Install]
WantedBy=multi-user.target
""",
    "usr/local/bin/pccheckd": """\
#!/opt/pccheck/bin/python
import sys
from pccheckd.cli import main
sys.exit(main())
""",
    "usr/local/bin/pccheckctl": """\
#!/opt/pccheck/bin/python
import sys
from pccheckctl.__main__ import main
sys.exit(main())
""",
}


@dataclass(frozen=True, slots=True)
class Image:
    """A kernel, its initial file system, and the root file system (never written to)."""

    kernel: Path
    initrd: Path
    root: Path


def missing() -> list[str]:
    """The packages that have to be installed first."""
    lacking = {package for program, package in NEEDED.items() if not _which(program)}
    if os.geteuid() != 0 and not _which("newuidmap"):
        lacking.add("uidmap")
    if not Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists():
        lacking.add("debian-archive-keyring")
    return sorted(lacking)


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def make() -> Image:
    """The Debian, made if it is not there yet (two minutes)."""
    wheels = _wheels()
    recipe = [
        SUITE,
        PACKAGES,
        ROOM,
        str(UNWANTED),
        str(_FILES),
        *sorted(path.name for path in wheels),
    ]
    name = hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:12]
    place = CACHE / f"{SUITE}-{name}"
    if not place.exists():
        fresh = place.with_suffix(f".{os.getpid()}")
        fresh.mkdir(parents=True)
        try:
            _bootstrap(fresh, wheels)
            fresh.rename(place)
        except BaseException:
            shutil.rmtree(fresh)
            raise
    return Image(place / "vmlinuz", place / "initrd.img", place / "root.img")


def _wheels() -> list[Path]:
    """For the guest's Python, which may not be the one that runs here."""
    place = CACHE / f"wheels-{PYTHON}-{len(WHEELS)}"
    if not place.exists():
        fresh = place.with_suffix(f".{os.getpid()}")
        _run(
            sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", fresh,
            "-c", ROOT / "constraints.txt", "--python-version", PYTHON,
            "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64", *WHEELS,
        )  # fmt: skip
        fresh.rename(place)
    return list(place.glob("*.whl"))


def _bootstrap(place: Path, wheels: list[Path]) -> None:
    print(f"making a Debian {SUITE} in {place.parent} (once, a few minutes)", flush=True)
    extra = place / "extra"
    for name, text in _FILES.items():
        path = extra / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if "bin/" in name else 0o644)
    hooks = [
        f"sync-in {extra} /",
        'chroot "$1" systemctl -q enable scenario.service',
        'chroot "$1" python3 -m venv /opt/pccheck',
        'mkdir "$1/wheels"',
        f"copy-in {' '.join(map(str, wheels))} /wheels",
        'chroot "$1" sh -c "/opt/pccheck/bin/pip install -q --no-index --no-deps /wheels/*"',
        'mv "$1"/boot/vmlinuz-* "$1/boot/vmlinuz"',
        'mv "$1"/boot/initrd.img-* "$1/boot/initrd.img"',
        f"copy-out /boot/vmlinuz /boot/initrd.img {place}",
        'rm -r "$1/wheels" "$1"/boot/*',
    ]
    _run(
        "mmdebstrap", "--quiet", "--variant=minbase", "--format=ext2", f"--include={PACKAGES}",
        f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
        *(f"--dpkgopt=path-exclude=/{path}/*" for path in UNWANTED),
        *(f"--customize-hook={hook}" for hook in hooks), SUITE, place / "root.img",
    )  # fmt: skip
    _run("truncate", "-s", ROOM, place / "root.img")
    subprocess.run(["e2fsck", "-fp", place / "root.img"], stdout=subprocess.DEVNULL, check=False)
    _run("resize2fs", place / "root.img")
    _run("tune2fs", "-O", "extents,has_journal", place / "root.img")


def payload(place: Path) -> Path:
    """A tar with the project's wheel, its unit files and what of its tests runs in a guest."""
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "-w", place, ROOT)  # fmt: skip
    _run("make", "-s", "-C", ROOT / "tests/native", "build/plain/test_io_engines")
    made = place / "payload.tar"
    with tarfile.open(made, "w") as tar:
        (wheel,) = place.glob("*.whl")
        tar.add(wheel, wheel.name)
        program = "tests/native/build/plain/test_io_engines"
        for name in ("systemd", "docs/service.md", "tests/__init__.py", "tests/support",
                     "tests/guest", program):  # fmt: skip
            tar.add(ROOT / name, name, filter=_source)
    return made


def _source(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if re.search(r"/(__pycache__|build/.*\.(o|so))", item.name) else item


def _run(*command: object) -> None:
    search = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    subprocess.run([str(word) for word in command], stdout=subprocess.DEVNULL, check=True,
                   env=os.environ | {"PATH": search})  # fmt: skip
