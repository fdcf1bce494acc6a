"""Runs pccheckd, and checks that no thread with an event loop makes a call that may wait for a
disk, a GPU or another user (docs/internals/failures.md, invariants 7 and 8).

    PCC_LOOP_CHECK=FILE python -m tests.support.loopcheck FLAGS OF PCCHECKD...

Each such call is written to FILE with its stack; `tests.support.daemon` then fails the test.
PCC_REST_S is how long ranks without a trainer keep their writers."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pccheck_native import _core

#: Calls of the native core that wait at most for a lock that is never held over I/O, a page
#: fault or a call of the CUDA driver: `lock` of the tenant, the volume, the pool and the GPUs
#: (pcc_tenant_private.h, pcc_volume.h).
LOCK_ONLY = {
    "Tenant": {
        "drop",
        "noted",
        "number",
        "policy",
        "refuse",
        "retry",
        "set_outcome",
        "usage",
        "write",
    },
    "Volume": {
        "bytes_per_second",
        "engine",
        "has_expendable",
        "is_full",
        "limit",
        "set_group",
        "spare",
    },
    "Pool": {"stored", "usage"},
}
_FUNCTIONS = ("Tenant", "Volume", "create_volume", "cuda_driver", "cuda_missing")
_ON_FILES = ("open", "os.", "shutil.")


def on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def report(what: str) -> None:
    text = f"{what} was called on the event loop\n{''.join(traceback.format_stack()[:-2])}\n"
    with Path(os.environ["PCC_LOOP_CHECK"]).open("a") as file:
        file.write(text)


def watched(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if on_loop():
            report(what)
        return function(*arguments, **named)

    return call


def watch_files(storage: str) -> None:
    """Reports calls that name a file below the storage directory."""
    reporting = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal reporting
        if reporting or not event.startswith(_ON_FILES) or not arguments:
            return
        place = arguments[0]
        if isinstance(place, str | Path) and str(place).startswith(storage) and on_loop():
            reporting = True
            try:
                report(f"{event} of {place}")
            finally:
                reporting = False

    sys.addaudithook(hook)


def main(arguments: list[str]) -> int:
    for kind in (_core.Tenant, _core.Volume, _core.Pool, _core.Gpus):
        for name, found in list(vars(kind).items()):
            short = name not in LOCK_ONLY.get(kind.__name__, {"info"})
            if short and callable(found) and not name.startswith("_"):
                setattr(kind, name, watched(f"{kind.__name__}.{name}", found))
    for name in _FUNCTIONS:
        setattr(_core, name, watched(name, getattr(_core, name)))
    os.statvfs = watched("statvfs", os.statvfs)
    shutil.disk_usage = watched("disk_usage", shutil.disk_usage)
    if "--storage" in arguments:
        watch_files(arguments[arguments.index("--storage") + 1])
    from pccheckd import cli
    from pccheckd.upkeep import rest

    rest.REST_S = float(os.environ.get("PCC_REST_S", rest.REST_S))

    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
