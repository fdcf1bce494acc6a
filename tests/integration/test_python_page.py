"""The code blocks of docs/python.md run as printed, one after another."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.daemon import Daemon

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_blocks_of_the_page_run(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    daemon = start_daemon()
    ran = subprocess.run(
        [sys.executable, str(script)], text=True, capture_output=True, timeout=300, cwd=tmp_path,
        env=daemon.environment() | {"PCCHECK_SOCKET": str(daemon.socket)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    warned = [line for line in ran.stderr.splitlines() if "Warning" in line]
    assert all("which this process saved itself" in line for line in warned), warned
