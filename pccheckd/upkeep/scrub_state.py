"""What the background check remembers over a restart of the daemon: a small file beside the
volumes. Losing it costs a pass that begins anew, nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pccheckd.base import state_file

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
    unreadable: int = 0
    checked: int = 0


def load(storage: Path) -> State:
    """What was stored; a fresh one when there is nothing, or nothing that makes sense."""
    made, plain = State(), state_file.load(storage / NAME, SCHEMA)
    for item in fields(State):
        value = plain.get(item.name)
        if type(value) is type(getattr(made, item.name)):
            setattr(made, item.name, value)
    return made


def store(storage: Path, state: State) -> None:
    """Replaces the file. Raises OSError."""
    state_file.store(storage / NAME, SCHEMA, asdict(state))
