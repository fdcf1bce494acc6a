"""What the documents promise about files in the repository is true."""

from __future__ import annotations

import fnmatch
import re
from functools import cache
from pathlib import Path

import pytest

from pccheck_native import FORMAT_VERSION
from pccheck_wire.basics import PROTOCOL_VERSION

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "native/**/*.md", "client/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
EVERY_DOCUMENT = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)
#: File names in a document, and the names of folders, which end with a slash.
NAMED = re.compile(
    r"(?<![\w/.~$*-])[A-Za-z][\w.*/-]*(?:\.(?:py|pyi|c|h|md|sh|conf|service|socket|yml)\b|/(?=`))"
)
#: Names of functions, classes and attributes: `one_word`, `Class.method`.
IDENTIFIER = re.compile(r"`([A-Za-z]\w*(?:\.\w+)?)(?:\(\))?`")
METRIC = re.compile(r"pccheck_(?!wire|native)")  # test_metrics.py
PLACES = ["bench", "client", "deploy", "docs", "examples", "native", "pccheckd", "systemd", "tests"]
#: Files of others, and the place of a name to be chosen.
NOT_OURS = {"train.py", "pcc_io_NAME.c", "Python.h"}


@cache
def files() -> list[str]:
    """Every file of the repository, as a path from its root."""
    found_in = [ROOT.glob("*")] + [(ROOT / name).rglob("*") for name in PLACES]
    found = [path.relative_to(ROOT) for place in found_in for path in place if path.is_file()]
    return [str(path) for path in found if not {"build", "__pycache__"} & set(path.parts)]


@cache
def words_of_the_code() -> set[str]:
    code = [name for name in files() if name.endswith((".c", ".h", ".py"))]
    return {word for name in code for word in re.findall(r"\w+", (ROOT / name).read_text())}


def exists(named: str) -> bool:
    """A path from the root of the repository, or the end of a path in it."""
    if named.endswith("/"):
        return any(f"/{name}".find(f"/{named}") >= 0 for name in files())
    return any(
        fnmatch.fnmatchcase(name, named) or fnmatch.fnmatchcase(name, f"*/{named}")
        for name in files()
    )


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_script_in_the_readme_is_the_quickstart() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith("\n\n" + script)
    assert sum(1 for line in script.splitlines() if line) <= 20


def test_the_diffs_beside_the_examples_are_in_them() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    diffs = re.findall(r"\]\((\w+\.py)\)\):\n\n```diff\n(.*?)```", text, re.DOTALL)
    assert len(diffs) == text.count("```diff") >= 4
    for script, diff in diffs:
        lines = [line.removeprefix("+").strip() for line in diff.splitlines() if line[0] == "+"]
        assert 1 <= len(lines) <= 5
        code = [
            line.split("  #")[0].strip()
            for line in (ROOT / "examples" / script).read_text().splitlines()
        ]
        assert [line for line in lines if line not in code] == [], script


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@EVERY_DOCUMENT
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^):]+)\)", document.read_text()):
        place, _, title = target.partition("#")
        leads_to = document.parent / place if place else document
        assert leads_to.exists(), target
        if title:
            assert title in anchors(leads_to), target


@EVERY_DOCUMENT
def test_files_and_folders_named_exist(document: Path) -> None:
    text = re.sub(r"```python\n.*?```", "", document.read_text(), flags=re.DOTALL)
    missing = {
        named
        for quoted in re.findall(r"`([^`\n]+)`", text)
        for named in NAMED.findall(f"{quoted}`")
        if named not in NOT_OURS and not exists(named)
    }
    assert missing == set()


@EVERY_DOCUMENT
def test_names_in_the_code_exist(document: Path) -> None:
    stems = {Path(name).stem for name in files()}
    named = {
        word
        for name in IDENTIFIER.findall(document.read_text())
        for word in name.split(".")
        if ("_" in name or "." in name) and not METRIC.match(name)
    }
    assert named - stems - words_of_the_code() == set()


@EVERY_DOCUMENT
def test_make_targets_named_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^ {4})make ([a-z0-9-]+)", document.read_text(), re.MULTILINE)
    assert set(named) <= targets


def test_version_numbers_in_documents_are_those_of_the_code() -> None:
    page = re.search(
        r"PCC_PAGE_VERSION (\d+)u", (ROOT / "native/src/shared/pcc_shared.h").read_text()
    )
    assert page is not None
    protocol = (ROOT / "client/pccheck_wire/PROTOCOL.md").read_text()
    assert f"Version {PROTOCOL_VERSION} (the page: version {page[1]})." in protocol
    released = f"Volume format {FORMAT_VERSION}, wire protocol {PROTOCOL_VERSION}."
    assert released in (ROOT / "CHANGELOG.md").read_text()
