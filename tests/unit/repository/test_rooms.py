"""The folders of the product: none is crowded, and each is a package, so that the wheel has it.
The contracts in pyproject.toml hold the order of imports between them, and test_core_layers.py that
of includes in C."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = {
    path.parent
    for top in ("client", "pccheckd", "native/pccheck_native")
    for path in (ROOT / top).rglob("*.py")
}

#: Class names that are used twice, and why.
TWICE = {
    "PCcheckCallback": "the callback of each framework, under the name that its users know",
    "Session": "the two ends of one session: in the client and in the daemon",
    "Shard": "the user's block of a tensor, and the tree's node for such a block",
}


def test_class_names_are_used_once() -> None:
    paths = (path for room in ROOMS for path in room.glob("*.py"))
    names = Counter(
        name for path in paths for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.M)
    )
    assert {name for name, count in names.items() if count > 1} == TWICE.keys()


def test_no_room_has_more_than_a_dozen_modules() -> None:
    for room in ROOMS:
        modules = [path.name for path in room.glob("*.py") if not path.name.startswith("__")]
        assert len(modules) <= 12, room


def test_every_room_is_a_package() -> None:
    assert [room for room in ROOMS if not (room / "__init__.py").exists()] == []
