"""The code blocks of docs/python.md run as printed, one after another."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.programs import python

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_blocks_of_the_page_run(daemon: Daemon, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    variables = daemon.environment() | {"PCCHECK_SOCKET": str(daemon.socket)}
    with python(str(script), environment=variables, cwd=tmp_path) as program:
        printed = program.finish()
    assert program.returncode == 0, printed
    warned = [line for line in printed.splitlines() if "Warning" in line]
    assert all("an earlier client of this process saved" in line for line in warned), warned
