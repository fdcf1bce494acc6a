"""Scenarios that need a machine of their own, each in a fresh one of qemu's; `make guest`.

python -m tests.guest              # all
python -m tests.guest dax systemd
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.guest import image, machine
from tests.guest.machine import Scenario

#: An emulated processor is twenty times slower than yours.
SCENARIOS = (
    Scenario("systemd", minutes=20),
    Scenario("nodes", minutes=40),
    Scenario("dax", minutes=15, memory_mib=2048, kernel="memmap=512M!1G"),
    Scenario("powercut", minutes=60),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.guest", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(names)}; all without any")
    parser.add_argument("--seed", type=int, default=1, help="of the power cuts")
    options = parser.parse_args()
    wanted = options.scenario or names
    if unknown := set(wanted) - set(names):
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}")
    if lacking := image.missing():
        print(f"not installed: apt-get install --no-install-recommends {' '.join(lacking)}")
        return 2
    debian = image.make()
    passed = failed = 0
    with tempfile.TemporaryDirectory(dir=image.CACHE, prefix="run-") as place:
        payload = image.payload(Path(place))
        for scenario in SCENARIOS:
            if scenario.name in wanted:
                print(f"== {scenario.name}", flush=True)
                outcome = machine.run(scenario, debian, payload, Path(place), options.seed)
                passed, failed = passed + outcome.passed, failed + outcome.failed
    print(f"guest: {passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
