"""What the documents promise about files in the repository is true."""

from __future__ import annotations

import re
from pathlib import Path

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
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"(?:`|^ {4})make ([a-z-]+)", document.read_text(), re.MULTILINE):
            assert target in targets, f"{document.name} names make {target}"
