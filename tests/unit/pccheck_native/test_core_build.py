"""How the core is compiled."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arm64 import userland

ROOT = Path(__file__).parents[3]


def test_it_is_compiled_for_arm64_with_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[object, ...]] = []
    monkeypatch.setattr(userland, "_run", lambda *words: commands.append(words))
    monkeypatch.setattr(userland, "BUILD", tmp_path)
    monkeypatch.setattr(shutil, "copy", lambda *_: None)
    userland.compile_all()
    assert "-DPy_LIMITED_API=0x030b0000" in commands[1]
    assert userland.ROOT / "native/src/base/pcc_base.c" in commands[1]


def test_the_containerfile_copies_what_setup_compiles(tmp_path: Path) -> None:
    for line in (ROOT / "Containerfile").read_text().splitlines():
        if line.startswith("COPY "):
            *names, target = line.split()[1:]
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, tmp_path / target)
                else:
                    shutil.copy(ROOT / name, tmp_path / target)
    compiled = subprocess.run(
        [
            sys.executable, "-c",
            "from setuptools import build_meta\n"
            "from distutils.core import run_setup\n"
            "(core,) = run_setup('setup.py', stop_after='init').ext_modules\n"
            "print(core.name, *core.sources, sep='\\n')",
        ],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    name, *sources = compiled.stdout.splitlines()
    assert name == "pccheck_native._core"
    there = (*ROOT.glob("native/src/*/*.c"), *ROOT.glob("native/python/*.c"))
    assert sources == sorted(str(path.relative_to(ROOT)) for path in there)
