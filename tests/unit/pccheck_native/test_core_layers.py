"""The layers of the C core: who may include whom, as the import linter holds it for Python."""

from __future__ import annotations

import re
from pathlib import Path

from pccheck_native import _core

ROOT = Path(__file__).parents[3]
SRC = ROOT / "native" / "src"
#: Lowest first: a file includes from its own folder and from those named here.
BELOW = {
    "base": (),
    "io": ("base",),
    "disk": ("base", "io"),
    "gpu": ("base",),
    "shared": ("base",),
    "pool": ("base",),
    "events": ("base", "disk", "shared"),
    "daemon": ("base", "io", "disk", "gpu", "shared", "pool", "events"),
    "client": ("base", "gpu", "shared"),
}
FILES_MAX = 12  # .c files of one folder
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def includes() -> dict[str, list[str]]:
    """By file, what it includes of ours; both as "folder/file"."""
    return {
        f"{path.parent.name}/{path.name}": INCLUDE.findall(path.read_text())
        for path in sorted(SRC.glob("*/*.[ch]"))
    }


def test_every_file_lies_in_a_layer() -> None:
    assert {path.name for path in SRC.iterdir()} == set(BELOW)
    for folder in BELOW:
        assert (SRC / folder / "README.md").is_file()
        assert len(list((SRC / folder).glob("*.c"))) <= FILES_MAX


def test_includes_go_downwards_only() -> None:
    wrong = []
    for file, named in includes().items():
        folder = file.partition("/")[0]
        for target in named:
            to = target.partition("/")[0]
            if not (SRC / target).is_file() or (to != folder and to not in BELOW[folder]):
                wrong.append(f"{file} includes {target}")
    assert wrong == []


def test_what_is_private_stays_in_its_folder() -> None:
    wrong = [
        f"{file} includes {target}"
        for file, named in includes().items()
        for target in named
        if target.endswith("_private.h") and target.partition("/")[0] != file.partition("/")[0]
    ]
    assert wrong == []


def test_no_headers_include_each_other() -> None:
    graph = includes()
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join((*path, file))
        if file not in done:
            for target in graph[file]:
                visit(target, (*path, file))
            done.add(file)

    for file in graph:
        visit(file, ())


def test_codes_of_the_core_are_no_numbers_in_python() -> None:
    """Their numbers are places in a list of pcc_base.h: a new code in its middle moves them."""
    folders = (ROOT / one for one in ("client", "pccheckd", "native/pccheck_native", "tests"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert [path for path in files if re.search(r"-100[0-4]\d\b", path.read_text())] == []
    codes = re.findall(r"^    X\((\w+),", (SRC / "base" / "pcc_base.h").read_text(), re.MULTILINE)
    assert [-getattr(_core, f"E_{name}") - 10000 for name in codes] == list(range(len(codes)))
