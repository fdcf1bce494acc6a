"""Writes what is made from the daemon's table of options: docs/configuration.md's tables and
systemd/pccheckd.toml. `make reference` runs it; tests compare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pccheckd.config.text import changes, file_text, groups, sentence, takes

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- options: made by `make reference` -->\n", "<!-- end of options -->"


def main() -> None:
    (ROOT / "systemd" / "pccheckd.toml").write_text(file_text())
    document = ROOT / "docs" / "configuration.md"
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{document} has lost its marks: {BEGIN.strip()} ... {END}")
    document.write_text(before + begin + table() + end + after)


def table() -> str:
    """Every option, in a table for each group."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for group, options in groups():
        yield f"### {group}\n"
        yield "| key | takes | default | changes | what it is |"
        yield "|---|---|---|---|---|"
        for option in options:
            default = "*required*" if option.required else option.shown_default
            cells = (f"`{option.key}`", takes(option), default, changes(option),
                     sentence(option.help))  # fmt: skip
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


if __name__ == "__main__":
    main()
