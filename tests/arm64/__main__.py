"""The C tests, then those of the daemon, on emulated arm64 processors; `make arm64-check`.

python -m tests.arm64                        # all
python -m tests.arm64 tests/integration/test_slots.py -k refused      # pytest's words: only those
WHEEL=dist/pccheck-....whl python -m tests.arm64 tests/format   # with the core of `make wheels`

qemu's user mode has this machine's pages, kernel and memory order: what is tried is the
instructions, the calls' numbers and layouts, and the compiler. It does not know
landlock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.arm64 import apart, userland

#: Volumes from x86-64, the binding, and a real daemon with a real trainer.
TESTS = (
    "tests/format",
    "tests/unit/pccheck_native/test_core_volume.py",
    "tests/promises/test_p1_copied.py::test_killed_after_copied_it_becomes_durable",
)
PROGRAM_LIMIT_S = 600


def native(root: Path) -> tuple[int, list[str]]:
    """How many C tests ended well, and those that did not."""
    passed, failed = 0, []
    place = userland.ROOT / "tests/native"
    for program in sorted(place.glob("build/arm64/test_*")):
        began = time.monotonic()
        try:
            ended = subprocess.run(
                userland.inside(root, place, program), capture_output=True, text=True,
                check=False, timeout=PROGRAM_LIMIT_S,
            )  # fmt: skip
            how, said = str(ended.returncode), ended.stdout + ended.stderr
        except subprocess.TimeoutExpired as error:
            how, said = f"more than {error.timeout:.0f} s", ""
        took = time.monotonic() - began
        print(f"{program.name:32} {'ok' if how == '0' else how} ({took:.0f} s)", flush=True)
        if how == "0":
            passed += 1
        else:
            failed.append(program.name)
            print(said[-4000:])
    return passed, failed


def main() -> int:
    if os.uname().machine == "aarch64":
        print("this machine is arm64 itself: make test")
        return 2
    if lacking := userland.missing():
        print(f"not installed: apt-get install --no-install-recommends {' '.join(lacking)}")
        return 2
    if os.geteuid() != 0:
        print("arm64-check needs root, to make an arm64 Debian: sudo make arm64-check")
        return 2
    words = sys.argv[1:]
    root = userland.make()
    userland.compile_all()
    try:
        apart.go()
    except OSError as error:
        print(f"arm64 programs cannot be run here ({error}): a kernel from 6.7 on is needed")
        return 2
    userland.enter(root)
    passed, failed = (0, []) if words else native(root)
    command = ["python3", "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "0", "-rs",
               *(words or TESTS)]  # fmt: skip
    tests = subprocess.run(userland.inside(root, userland.ROOT, *command), check=False)
    if not words:
        print(f"arm64: C tests: {passed} passed, {len(failed)} failed {' '.join(failed)}")
    return 1 if failed or tests.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
