"""What a machine that has run out refuses the daemon, in words, and what to do about it."""

from __future__ import annotations

import errno

HINT = "raise its limits (ulimit -a; in systemd TasksMax=, LimitNOFILE=, MemoryMax=)"
_WHAT = {
    errno.ENOMEM: "memory",
    errno.EAGAIN: "a thread",
    errno.EMFILE: "a descriptor",
    errno.ENFILE: "a descriptor",
}


def told(error: BaseException) -> str:
    """The words; "" when the error is none of this kind."""
    if isinstance(error, MemoryError):
        what = "memory"
    elif isinstance(error, RuntimeError):
        what = "a thread" if "start new thread" in str(error) else ""
    else:
        what = _WHAT.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"the machine refuses the daemon {what}" if what else ""
