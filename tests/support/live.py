"""Storage directories in use, copied and removed while their daemon writes there."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from tests.support.waiting import until


def copy(of: Path, to: Path) -> Path:
    """As `cp -a` would, without the temporary files, which the daemon renames at any moment."""
    return Path(shutil.copytree(of, to, ignore=shutil.ignore_patterns("*.tmp")))


def remove(directory: Path) -> None:
    """As `rm -rf` would. A file that appears or goes meanwhile changes nothing."""
    until(lambda: _removed(directory))


def _removed(directory: Path) -> bool:
    try:
        shutil.rmtree(directory)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
            raise
    return not directory.exists()
