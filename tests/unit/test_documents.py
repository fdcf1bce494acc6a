"""What the documents promise about files in the repository is true."""

from __future__ import annotations

import re
from pathlib import Path

from pccheck_native import FORMAT_VERSION
from pccheck_wire.basics import PROTOCOL_VERSION

ROOT = Path(__file__).parents[2]


def test_the_script_in_the_readme_is_the_quickstart() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith("\n\n" + script)
    assert sum(1 for line in script.splitlines() if line) <= 20


def test_links_lead_somewhere() -> None:
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (ROOT / target).exists(), f"{document.name} links to {target}"


def test_make_targets_named_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ROOT.glob("*.md"):
        for target in re.findall(
            r"(?:`|^ {4})make ([a-z0-9-]+)", document.read_text(), re.MULTILINE
        ):
            assert target in targets, f"{document.name} names make {target}"


def test_version_numbers_in_documents_are_those_of_the_code() -> None:
    page = re.search(
        r"PCC_PAGE_VERSION (\d+)u", (ROOT / "native/src/shared/pcc_shared.h").read_text()
    )
    assert page is not None
    protocol = (ROOT / "client/pccheck_wire/PROTOCOL.md").read_text()
    assert f"Version {PROTOCOL_VERSION} (the page: version {page[1]})." in protocol
    released = f"Volume format {FORMAT_VERSION}, wire protocol {PROTOCOL_VERSION}."
    assert released in (ROOT / "CHANGELOG.md").read_text()
