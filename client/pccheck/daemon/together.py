"""Whether the daemon ends with this process: what it has in memory only is lost then."""

from __future__ import annotations

import functools

from pccheck.warn import Warner
from pccheck_native.places import places
from pccheck_wire.messages import Welcome

_APART = (
    "a restart then gets the last one on the disk. A pccheckd apart from the job (a systemd "
    "service, a DaemonSet) keeps them: docs/service.md"
)


@functools.cache
def _mine() -> list[str]:
    return list(places())


def warn_if_together(warner: Warner, welcome: Welcome | None, *, private: bool) -> None:
    """Warns once, of a client that keeps checkpoints in memory only. `welcome`: of the daemon; None
    without one."""
    both = [one for one in _mine() if welcome is not None and one in welcome.places]
    if private:
        warner.once(
            "together",
            "memory-only checkpoints end with the private pccheckd, which ends "
            f"with this container, pod or Slurm step: {_APART}",
        )
    elif both:
        warner.once(
            "together",
            "memory-only checkpoints end with pccheckd, which runs in the same "
            f"{both[0]} as this process and ends with it: {_APART}",
        )
