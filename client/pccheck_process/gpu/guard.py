"""A process beside the one that holds others in the driver. When that one dies, it lets them go on;
else it never touches the driver."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from .journal import HoldJournal, opened

_DONE = b"done"


class Guard:
    """Is started with the journal. The end of this process is what the guard waits for."""

    def __init__(self, noted: HoldJournal) -> None:
        reading, self._writing = os.pipe()
        root = str(Path(__file__).parents[2])
        begin = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import main; main()"
        words = [sys.executable, "-c", begin, str(noted.path), str(noted.descriptor)]
        try:
            self._process = subprocess.Popen(
                words, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[noted.descriptor], start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)

    def close(self, *, done: bool) -> None:
        """When not all is `done`, the guard goes on trying."""
        with contextlib.suppress(OSError):
            os.write(self._writing, _DONE if done else b"")
        os.close(self._writing)
        if done:  # it may just be starting: nobody waits for that
            threading.Thread(target=self._process.wait, daemon=True).start()


def main() -> None:
    """Of the guard."""
    path, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    if os.read(0, len(_DONE)) == _DONE:
        return
    from .holding import finish  # loads what is needed only now

    finish(opened(path, descriptor))
