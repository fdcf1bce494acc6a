"""`pccheck.snapshot`: the command line's snapshot of a process, from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from pccheck_process.taken import ProcessSnapshot
from pccheck_wire.errors import InternalError, UsageError, error_from_wire


def snapshot(
    pid: int, *, name: str | None = None, tree: bool = False, leave_running: bool = False,
    socket: str | None = None,
) -> ProcessSnapshot:  # fmt: skip
    """Saves another process, which knows nothing of PCcheck, and ends it unless `leave_running`.
    `tree`: with its child processes. `name`: the job of its snapshots (default COMMAND-PID).

    A command does it, because the process that takes a snapshot may not be in it, and may become
    another user. Returns when the snapshot is durable; its times are in seconds. Raises
    RefusedError with every reason why the process could not be restored, before it is stopped;
    CheckpointFailedError when the snapshot failed, and the process goes on; UsageError.
    """
    if pid == os.getpid():
        raise UsageError(
            "a process cannot save itself as a whole",
            hint="run pccheckctl snapshot elsewhere, or save the state with PCcheckClient",
        )
    flags = {"--tree": tree, "--leave-running": leave_running}
    given = {"--name": name, "--socket": socket}
    words = [flag for flag, wanted in flags.items() if wanted]
    words += [word for flag, value in given.items() if value for word in (flag, value)]
    done = subprocess.run(
        [sys.executable, "-m", "pccheckctl", "snapshot", str(pid), "--json", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        told = json.loads(done.stdout)
    except ValueError as error:
        raise InternalError(f"pccheckctl snapshot ended with {done.stderr[-500:]!r}") from error
    if "error" in told:
        why = told["error"]
        raise error_from_wire(why["code"], why["message"], why["hint"], why["retryable"])
    del told["schema"]
    return ProcessSnapshot(nbytes=told.pop("bytes"), notes=tuple(told.pop("notes")), **told)
