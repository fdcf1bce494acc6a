"""The folders of the product: none is crowded, and each is a package, so that the wheel has it.
The contracts in pyproject.toml hold the order of imports between them, and test_core_layers.py that
of includes in C."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = {
    path.parent
    for top in ("client", "pccheckd", "native/pccheck_native")
    for path in (ROOT / top).rglob("*.py")
}


def test_no_room_has_more_than_a_dozen_modules() -> None:
    for room in ROOMS:
        modules = [path.name for path in room.glob("*.py") if not path.name.startswith("__")]
        assert len(modules) <= 12, room


def test_every_room_is_a_package() -> None:
    assert [room for room in ROOMS if not (room / "__init__.py").exists()] == []
