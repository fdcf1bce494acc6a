"""How the core is compiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.arm64 import userland


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
