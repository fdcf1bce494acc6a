"""What the documents say of GPUs stands in a results file that they name beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.repository.test_documents import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
#: Where each figure is one of a GPU: a document, and the heading of a section (empty: all of it).
OF_GPUS = {"docs/performance.md": "On a GPU", "docs/gpu.md": ""}
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*bench/results/[^)]+)\)")
NAMED = re.compile(r"bench/results/|#what-was-tried|`-20\d\d-")
CARD = re.compile(r"\b(?:H100|H200)\b")
BY_HAND = re.compile(r"\b(?:tried|tested|Tried|Tested)\b[^.|]*\bby hand\b|\(by hand\)")
TARGET = re.compile(r"at (?:least|most) [\d.]+")
FIGURE = re.compile(
    r"(?<![\w.,-])(?:\d+\.\d+|\d+(?= (?:ms|s|GB/s|MiB|GB|times|%|passed|need)\b))(?![\w.]*\d)"
)


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, items of lists and rows of tables, without the heads of tables."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"^#.*$", "", text, flags=re.MULTILINE)):
        lines = paragraph.strip("\n").splitlines()
        if lines and lines[0].startswith("|"):
            yield from lines[2:]
        else:
            yield from re.split(r"\n(?=- )", paragraph)


def section(document: Path, heading: str) -> str:
    text = document.read_text()
    if not heading:
        return text
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    return str(found)


@cache
def numbers(results: Path) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", results.read_text())]


def stands_in(figure: str, results: Path) -> bool:
    digits = len(figure.partition(".")[2])
    return any(round(number, digits) == float(figure) for number in numbers(results))


def unfounded(block: str, folder: Path) -> list[str]:
    """Figures of the block that no results file has which the block names."""
    files = [(folder / place).resolve() for _, place in LINK.findall(block)]
    wrong = [
        f"{text} in {place}" for text, place in LINK.findall(block)
        if FIGURE.fullmatch(text) and not stands_in(text, (folder / place).resolve())
    ]  # fmt: skip
    rest = TARGET.sub("", LINK.sub("", block))
    return wrong + [
        figure for figure in FIGURE.findall(rest)
        if not any(stands_in(figure, file) for file in files)
    ]  # fmt: skip


@pytest.mark.parametrize("place", OF_GPUS)
def test_figures_of_gpus_stand_in_the_files_named_beside_them(place: str) -> None:
    document = ROOT / place
    found = list(blocks(section(document, OF_GPUS[place])))
    assert any(LINK.search(block) for block in found)
    assert [wrong for block in found for wrong in unfounded(block, document.parent)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_was_tried_on_a_card_or_by_hand_names_its_results(document: Path) -> None:
    claims = [
        block for block in blocks(document.read_text())
        if (CARD.search(block) or BY_HAND.search(block)) and not NAMED.search(block)
    ]  # fmt: skip
    assert claims == []


def test_a_figure_that_no_results_file_has_is_noticed() -> None:
    file = "../bench/results/gpu-2026-11-26-train.md"
    docs = ROOT / "docs"
    assert unfounded(f"[1.011]({file}), at most 1.03", docs) == []
    assert unfounded(f"[1.017]({file})", docs) == [f"1.017 in {file}"]
    assert unfounded(f"1.017 of [none]({file})", docs) == unfounded("1.017", docs) == ["1.017"]
    assert BY_HAND.search("| a GPU | tried on one card by hand |")
