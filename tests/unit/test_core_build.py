"""What pyproject.toml says of the extension is what lies in native/."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from tests.arm64 import userland

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("key", "suffix"), [("sources", "c"), ("depends", "h")])
def test_every_file_of_the_core_is_named(key: str, suffix: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        (extension,) = tomllib.load(file)["tool"]["setuptools"]["ext-modules"]
    here = {
        str(path.relative_to(ROOT))
        for pattern in ("python/*", "src/*/*")
        for path in (ROOT / "native").glob(f"{pattern}.{suffix}")
    }
    assert set(extension[key]) == here
    assert extension["name"] == "pccheck_native._core"


def test_it_is_compiled_for_arm64_with_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[object, ...]] = []
    monkeypatch.setattr(userland, "_run", lambda *words: commands.append(words))
    monkeypatch.setattr(userland, "BUILD", tmp_path)
    monkeypatch.setattr(shutil, "copy", lambda *_: None)
    userland.compile_all()
    assert "-DPy_LIMITED_API=0x030b0000" in commands[1]
