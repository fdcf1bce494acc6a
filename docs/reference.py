"""Writes what is made from the daemon's table of options: docs/configuration.md's tables and
systemd/pccheckd.toml. `make reference` runs it; tests compare."""

from __future__ import annotations

from pathlib import Path

from pccheckd.config import text as config_text

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- options: made by `make reference` -->\n", "<!-- end of options -->"


def main() -> None:
    (ROOT / "systemd" / "pccheckd.toml").write_text(config_text.help_text("toml"))
    document = ROOT / "docs" / "configuration.md"
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{document} has lost its marks: {BEGIN.strip()} ... {END}")
    document.write_text(before + begin + config_text.help_text("markdown") + end + after)


if __name__ == "__main__":
    main()
