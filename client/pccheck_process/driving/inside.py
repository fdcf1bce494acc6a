"""Process 1 of a PID namespace: starts CRIU there, which finds the pids of its image free, and then
is the parent of the process. Run as a program; pccheckctl is outside, and reads what it says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

RESTORED = b"restored\n"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_AMBIENT = "-all,+checkpoint_restore,+setpcap"


def command(pid: int, said: int, criu: list[str]) -> list[str]:
    """The program in new namespaces. An ordinary user needs a user namespace for that, where the
    user has every capability; CRIU gets two of them."""
    line = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0:
        line += ["--user", "--map-current-user", "--keep-caps"]
        line += ["setpriv", "--inh-caps", _AMBIENT, "--ambient-caps", _AMBIENT]
    root = str(Path(__file__).parent.parent.parent)
    begin = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import main; main()"
    return [*line, sys.executable, "-c", begin, str(pid), str(said), *criu]


def main() -> None:
    """Exits as the process does."""
    pid, said, criu = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(said, False)
    status = subprocess.run(criu, stdin=subprocess.DEVNULL, close_fds=False, check=False).returncode
    if status != 0:
        sys.exit(1)
    for number in SIGNALS:
        signal.signal(number, lambda sent, _: send(pid, sent))
    os.write(said, RESTORED)
    os.close(said)
    sys.exit(exit_code(wait_for(pid)))


def wait_for(pid: int) -> int:
    """The status of this child. Collects others on the way."""
    while True:
        found, status = os.wait()
        if found == pid:
            return status


def exit_code(status: int) -> int:
    """As a shell has it: 128 and the number of a signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
