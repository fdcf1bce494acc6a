"""Files that are open in every mode, read and written at each step, one of them deleted. The folder
is that of the log; at the end every file is looked at again by its name."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.transparent.targets.steps import Log, words

MODES = {"w": "wb", "x": "xb", "w+": "w+b", "r+": "r+b", "a": "ab", "a+": "a+b"}


def main() -> None:
    options = words().parse_args()
    folder = Path(options.log).parent / "files"
    folder.mkdir()
    (folder / "r").write_bytes(bytes(range(256)) * 64)
    (folder / "r+").write_bytes(b"old " * 4096)
    log = Log(options)
    reading = (folder / "r").open("rb")
    opened = {name: (folder / name).open(mode) for name, mode in MODES.items()}
    gone = (folder / "gone").open("w+b")
    (folder / "gone").unlink()
    for step in range(1, options.steps + 1):
        text = f"{step} {hashlib.sha256(str(step).encode()).hexdigest()}\n".encode()
        for file in (*opened.values(), gone):
            file.write(text)
            file.flush()
        places = [file.tell() for name, file in opened.items() if not name.startswith("a")]
        log.step(step, reading.read(7).hex(), *places, gone.tell())
    gone.seek(0)
    log.line("gone", hashlib.sha256(gone.read()).hexdigest())
    for name, file in opened.items():
        file.close()
        # A line that was appended after a snapshot may be appended again.
        lines = sorted(set((folder / name).read_bytes().splitlines()))
        log.line(name, len(lines), hashlib.sha256(b"\n".join(lines)).hexdigest())


if __name__ == "__main__":
    main()
