"""What pyproject.toml says of the extension is what lies in native/."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

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
