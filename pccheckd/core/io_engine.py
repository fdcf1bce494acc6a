"""Which storage engine volumes are opened with: the one that --engine names, or the first of
`ENGINES` where the kernel or the file system refuses that one."""

from __future__ import annotations

from pccheck_native import ENGINES
from pccheckd.base.logs import LOG
from pccheckd.config.options import Config

EVERYWHERE = ENGINES[0][0]
_REFUSED = {name: refusal for name, _, refusal in ENGINES}


class IoEngine:
    """Only the loop touches it."""

    def __init__(self, config: Config) -> None:
        self.wanted = config.engine
        self.running = config.engine  # what the last volume got

    def opened(self, running: str) -> None:
        """A volume was opened for writing, and this is what it got."""
        if running not in (self.wanted, self.running):
            LOG.warning("engine %s instead of %s: %s", running, self.wanted, _REFUSED[self.wanted])
        self.running = running

    @property
    def reason(self) -> str:
        """Why this one is used; "" when it was requested."""
        return "" if self.running == self.wanted else f"{self.wanted}: {_REFUSED[self.wanted]}"

    def document(self) -> dict[str, object]:
        """For status."""
        return {"engine": self.running, "engine_wanted": self.wanted, "engine_reason": self.reason}
