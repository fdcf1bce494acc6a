"""What `make wheels` made, proved and used: python -m tests.wheels

1. auditwheel: each wheel needs no newer glibc than its name says.
2. In a root directory without compiler and headers (bare.py), pip installs the wheel for this
   processor. Then examples/quickstart.py is killed there, and run again.
3. In the same root the source archive ends with the sentence that names the compiler's package.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from setup import NEEDED
from tests.wheels.bare import ALONE, PYTHON, Root

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
MACHINES = ("aarch64", "x86_64")
MACHINE = os.uname().machine
LIMIT_S = 300.0
VENV, HOUSE = "/tmp/venv", "/house"
VARIABLES = {"HOME": "/tmp", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}


class WheelError(Exception):
    """A wheel is not what its name says."""


def wheel(machine: str) -> Path:
    (found,) = DIST.glob(f"pccheck-*-cp311-abi3-manylinux_*_{machine}.whl")
    return found


def proved(path: Path) -> str:
    """The versions of glibc's symbols that the wheel needs, after auditwheel has agreed."""
    tag = path.stem.rpartition("-")[2]
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    words = " ".join(shown.stdout.split())
    if f'consistent with the following platform tag: "{tag}"' not in words:
        raise WheelError(f"{path.name} is not {tag}:\n{shown.stdout}{shown.stderr}")
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", words)}
    return (
        f"{len(versions)} versions of symbols, the newest GLIBC_{'.'.join(map(str, max(versions)))}"
    )


def prepare(path: Path) -> Root:
    """The root, with the wheels of all that pccheck needs, and the torch of this environment."""
    (house := path / "house").mkdir()
    if subprocess.run([*ALONE, "true"], check=False).returncode:
        raise WheelError("run it as root, or where every user may make namespaces (unshare)")
    needs = ("pip", "download", "-q", "-d", house, "-c", ROOT / "constraints.txt", wheel(MACHINE))
    subprocess.run([sys.executable, "-m", *needs, "setuptools"], check=True)
    (source,) = DIST.glob("*.tar.gz")
    root = Root(
        path / "root",
        {
            str(house): HOUSE,
            str(source): f"/source/{source.name}",
            sysconfig.get_path("purelib"): "/site",
            str(ROOT / "examples/quickstart.py"): "/quickstart.py",
        },
    )
    root.path.mkdir()
    run(root, PYTHON, "-m", "venv", VENV)
    return root


def run(root: Root, *words: object) -> str:
    """What the command printed. Raises WheelError when it did not end with 0."""
    ended = subprocess.run(
        root.command(*words, variables=VARIABLES), cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    if ended.returncode != 0:
        raise WheelError(
            f"{' '.join(map(str, words))} ended with {ended.returncode}:\n{ended.stdout}"
        )
    return ended.stdout


def install(root: Root, what: str) -> None:
    run(root, f"{VENV}/bin/python", "-m", "pip", "install", "-q", "--no-index",
        "--find-links", HOUSE, what)  # fmt: skip


def refused(root: Root) -> None:
    """The source archive's sentence; it also shows that the root has no compiler."""
    (source,) = DIST.glob("*.tar.gz")
    try:
        install(root, f"/source/{source.name}")
    except WheelError as error:
        if NEEDED["stdlib.h"] in str(error):
            return
        raise
    raise WheelError("the root has a compiler")


def steps(root: Root) -> Iterator[int]:
    """The steps that the quickstart prints, in the root. Its process is killed when the caller has
    seen enough."""
    with subprocess.Popen(
        root.command(f"{VENV}/bin/python", "-u", "/quickstart.py", variables=VARIABLES), cwd=ROOT,
        stdout=subprocess.PIPE, text=True,
    ) as trainer:  # fmt: skip
        assert trainer.stdout is not None
        try:
            for line in trainer.stdout:
                if found := re.match(r"step (\d+) ", line):
                    yield int(found[1])
        finally:
            trainer.kill()


def used(root: Root) -> str:
    """The product in the root, from the command line to a killed script that goes on."""
    for program in ("pccheckd", "pccheckctl"):
        run(root, f"{VENV}/bin/{program}", "--version")
    # Only now: pip must find nothing of this environment.
    (site,) = (root.path / VENV[1:]).glob("lib/python*/site-packages")
    (site / "torch.pth").write_text("/site\n")
    at = 0
    with contextlib.closing(steps(root)) as first:
        for at in first:
            if at >= 100:
                break
    again = list(steps(root))
    if not 0 < at < 2000 or not again or again[0] <= 10 or again[-1] != 2000:
        raise WheelError(f"killed at step {at}, the quickstart went on with {again[:3]}")
    run(root, f"{VENV}/bin/pccheckctl", "--storage", "/tmp/checkpoints", "verify")
    return f"killed at step {at}, printed step {again[0]} first, ended at step {again[-1]}"


def main() -> int:
    for machine in MACHINES:
        print(f"{wheel(machine).name}: {proved(wheel(machine))}", flush=True)
    (ROOT / "build").mkdir(exist_ok=True)  # on the disk: checkpoints are refused on a tmpfs
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="wheels-") as directory:
        root = prepare(Path(directory))
        refused(root)
        print("a root without compiler: the source archive ends with one sentence", flush=True)
        install(root, f"{HOUSE}/{wheel(MACHINE).name}")
        print(f"the wheel is installed there, and the quickstart was {used(root)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WheelError as error:
        print(f"FAILED: {error}")
        sys.exit(1)
