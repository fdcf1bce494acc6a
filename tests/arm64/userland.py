"""What runs for arm64: a small Debian made once from Debian's packages, what Python needs, and the
project's C code, compiled here by a cross compiler. Python itself and the tests run there.

The Debian lies in .arm64/, named after its recipe; the project's own files are mounted into it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from setup import CORE
from tests.arm64 import apart

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".arm64"
BUILD = CACHE / "build"
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = "python3,procps,coreutils,dash,base-files,mount,util-linux,make,libstdc++6,libgomp1"
#: As in constraints.txt, all that they need with them: pip would ask for what torch needs here.
WHEELS = (
    "msgpack", "pyzmq", "psutil", "uvloop", "numpy", "pytest", "pytest-timeout", "hypothesis",
    "anyio", "idna", "iniconfig", "packaging", "pluggy", "pygments", "sortedcontainers", "filelock",
    "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "typing_extensions",
)  # fmt: skip
TORCH = ("torch==2.6.0", "sympy==1.13.1")  #: its wheel for arm64 is without CUDA
TOOLS = ("CC=aarch64-linux-gnu-gcc", "LD=aarch64-linux-gnu-ld")
SITE = "opt/site"  # in the Debian
PRELOADED = "etc/ld.so.preload"
#: One without instructions that qemu 7.2 announces and does not have in its user mode (DC CVAP).
PROCESSOR = "cortex-a72"

_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}

NEEDED = {
    str(apart.QEMU): "qemu-user-static",
    "/usr/bin/aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "/usr/aarch64-linux-gnu/include/stdio.h": "libc6-dev-arm64-cross",
    "/usr/bin/mmdebstrap": "mmdebstrap",
    "/usr/bin/arch-test": "arch-test",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}


def missing() -> list[str]:
    """The packages that have to be installed first."""
    return sorted(package for path, package in NEEDED.items() if not Path(path).exists())


def make() -> Path:
    """The Debian's root directory, made if it is not there yet."""
    recipe = "\n".join((SUITE, PACKAGES, *WHEELS, *TORCH))
    place = CACHE / f"{SUITE}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not place.exists():
        print(f"making an arm64 Debian {SUITE} in {CACHE} (once, a minute or two)", flush=True)
        CACHE.mkdir(exist_ok=True)  # mmdebstrap does not make the folder around its own
        fresh = place.with_suffix(f".{os.getpid()}")
        try:
            # Only unpacked: scripts that set packages up would take minutes on such a processor.
            _run("mmdebstrap", "--quiet", "--architectures=arm64", "--variant=extract",
                 "--mode=root", "--format=directory", f"--include={PACKAGES}", SUITE,
                 fresh)  # fmt: skip
            for name, text in _FILES.items():
                (fresh / name).write_text(text)
            _install(fresh / SITE, "-c", ROOT / "constraints.txt", *WHEELS)
            _install(fresh / SITE, *TORCH)
            fresh.rename(place)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    return place


def _install(site: Path, *wanted: object) -> None:
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--upgrade",
         "--only-binary=:all:", "--target", site, "--python-version", PYTHON,
         "--implementation", "cp", "--platform", "manylinux_2_28_aarch64",
         "--platform", "manylinux_2_17_aarch64", "--platform", "manylinux2014_aarch64",
         *wanted)  # fmt: skip


def compile_all() -> None:
    """The C tests, the extension and the libraries that tests preload, for arm64."""
    _run("make", "-s", "-C", ROOT / "tests/native", "VARIANT=arm64", *TOOLS, "all")  # and xxhash.h
    BUILD.mkdir(parents=True, exist_ok=True)
    compiler = TOOLS[0].partition("=")[2]
    if wheel := os.environ.get("WHEEL"):
        with zipfile.ZipFile(wheel) as packed:
            (BUILD / "_core.abi3.so").write_bytes(packed.read("pccheck_native/_core.abi3.so"))
    else:  # the headers of this machine's Python: the stable ABI is the same on both
        _run(compiler, *CORE.extra_compile_args, "-fPIC", "-shared",
             *(f"-I{ROOT / path}" for path in CORE.include_dirs),
             f"-I{sysconfig.get_path('include')}", "-o", BUILD / "_core.abi3.so",
             *(ROOT / source for source in CORE.sources))  # fmt: skip
    for source in (*ROOT.glob("tests/support/*.c"), ROOT / "tests/arm64/honest.c"):
        _run(compiler, "-shared", "-fPIC", "-O1", "-o", BUILD / f"{source.stem}.so", source, "-ldl")
    driver = ROOT / "tests/standin/build/arm64/libcuda.so.1"
    for place in (BUILD / "standin", BUILD / "standin/arm64"):  # for Python, and for the C tests
        place.mkdir(exist_ok=True)
        shutil.copy(driver, place)


def enter(root: Path) -> None:
    """Mounts below `root` the project, at the same path as here, and the kernel's file systems."""
    here = root / ROOT.relative_to("/")
    here.mkdir(parents=True, exist_ok=True)
    for name in ("proc", "sys", "dev"):
        apart.mount(f"/{name}", root / name, flags=apart.BIND | apart.RECURSIVE)
    apart.mount(str(ROOT), here, flags=apart.BIND)
    for made, name in {
        "_core.abi3.so": "native/pccheck_native/_core.abi3.so",
        "": "tests/support/build",
        "standin": "tests/standin/build",
    }.items():
        if not (here / name).exists():
            (here / name).mkdir()
        apart.mount(str(BUILD / made), here / name, flags=apart.BIND)
    (root / PRELOADED).write_text(f"{BUILD}/honest.so\n")


def inside(root: Path, place: Path, *command: object) -> list[str]:
    """The arguments that run a command in the Debian, in a directory of the project."""
    paths = ":".join(map(str, (ROOT, ROOT / "client", ROOT / "native", f"/{SITE}")))
    return [
        "chroot", str(root), "/usr/bin/env", "-i", "-C", str(place), "PATH=/usr/bin:/usr/sbin",
        f"PYTHONPATH={paths}", "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1",
        "TEST_PATIENCE=20", "HOME=/root",
        "OMP_NUM_THREADS=1", f"QEMU_CPU={PROCESSOR}", *map(str, command),
    ]  # fmt: skip


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], stdout=subprocess.DEVNULL, check=True)
