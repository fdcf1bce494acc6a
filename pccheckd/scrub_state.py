"""What the background check remembers over a restart of the daemon: a small file beside the
volumes. Losing it costs a pass that begins anew, nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

NAME = ".pccheckd.scrub.json"
SCHEMA = 1


@dataclass(slots=True)
class State:
    """Times are wall clock seconds: they have to hold over a reboot."""

    since_s: float = 0.0  # when the first pass could have begun: the daemon's first start here
    began_s: float = 0.0  # of the pass that goes on, or of the last one; 0: none ever began
    ended_s: float = 0.0  # of the last one that came to its end
    after: str = ""  # the volume that the pass in progress has finished last; "" between passes
    running: bool = False
    damaged: int = 0  # found by the last or present pass
    checked: int = 0


def load(storage: Path) -> State:
    """What was stored; a fresh one when there is nothing, or nothing that makes sense."""
    made = State()
    with contextlib.suppress(OSError, ValueError):
        plain = json.loads((storage / NAME).read_text())
        if isinstance(plain, dict) and plain.get("schema") == SCHEMA:
            for item in fields(State):
                value = plain.get(item.name)
                if type(value) is type(getattr(made, item.name)):
                    setattr(made, item.name, value)
    return made


def store(storage: Path, state: State) -> None:
    """Replaces the file. Raises OSError."""
    path = storage / NAME
    fresh = path.with_name(NAME + ".tmp")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"schema": SCHEMA} | asdict(state), file)
    fresh.replace(path)
