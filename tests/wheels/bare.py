"""A root directory with the C library and this Python, without compilers, headers and shells.

It shows folders of this machine, in namespaces of users and mounts that end with the command. So it
needs no root where the system lets everybody make such namespaces.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from tests.arm64.apart import BIND, RECURSIVE, mount

PYTHON = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/proc", "/dev", "/etc/passwd")
#: Parts of a compiler that are in a folder of SYSTEM.
COVERED = ("/usr/lib/gcc", "/usr/lib/gcc-cross", *map(str, Path("/usr/lib").glob("llvm-*")))
#: What begins a command that has mounts of its own.
ALONE = ("unshare", "--mount", *(("--user", "--map-root-user") if os.geteuid() else ()))


@dataclass
class Root:
    """`path` as a root, which also shows each folder or file of `shown` at another path."""

    path: Path
    shown: dict[str, str] = field(default_factory=dict)

    def command(self, *words: object, variables: dict[str, str]) -> list[str]:
        """The arguments that run a command in there, with no variables but these."""
        ours = {name: name for name in (*SYSTEM, str(PYTHON), f"{sys.base_prefix}/lib")}
        what = [str(self.path), ours | self.shown, variables, [*map(str, words)]]
        return [*ALONE, sys.executable, "-m", __name__, json.dumps(what)]


def _show(here: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if here.is_symlink():  # /lib is usr/lib
        if not target.is_symlink():
            target.symlink_to(here.readlink())
    elif here.is_dir():
        target.mkdir(exist_ok=True)
        mount(str(here), target, flags=BIND | RECURSIVE)
    elif here.exists():
        target.touch()
        mount(str(here), target, flags=BIND)


def main() -> None:
    place, shown, variables, command = json.loads(sys.argv[1])
    root = Path(place)
    for here, there in shown.items():
        _show(Path(here), root / there.lstrip("/"))
    nothing = root / "nothing"
    nothing.mkdir(exist_ok=True)
    for name in COVERED:
        if (target := root / name.lstrip("/")).is_dir():
            mount(str(nothing), target, flags=BIND)
    (root / "tmp").mkdir(exist_ok=True)
    os.chroot(root)
    os.chdir("/tmp")
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    main()
