"""The folders of the product: none is crowded, and all of them are in the package that is built.
The contracts in pyproject.toml hold the order of imports between them, and test_core_layers.py that
of includes in C."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
ROOMS = sorted(
    place.parent
    for top in ("client", "pccheckd", "native/pccheck_native")
    for place in (ROOT / top).rglob("__init__.py")
)


def test_no_room_has_more_than_a_dozen_modules() -> None:
    for room in ROOMS:
        modules = [path.name for path in room.glob("*.py") if not path.name.startswith("__")]
        assert len(modules) <= 12, room


def test_every_room_is_built() -> None:
    tops = {ROOT / path: name for name, path in PROJECT["package-dir"].items()}
    for room in ROOMS:
        top = next(place for place in (room, *room.parents) if place in tops)
        name = ".".join((tops[top], *room.relative_to(top).parts))
        assert name in PROJECT["packages"], name
