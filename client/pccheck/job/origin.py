"""Which process made a checkpoint: recorded with it, logged when a run continues from it, and
compared when the job has only the script's name."""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pccheck_wire import tree
from pccheck_wire.errors import UsageError

_COMMAND_MAX = 4096
_SHORT_MAX = 120  # of the command in a line that comes with every restart


class Origin(NamedTuple):
    host: str
    directory: str
    command: str  # the script and its arguments
    pid: int

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid} on {self.host}, in {self.directory})"

    def shortened(self) -> Origin:
        """With the first words of a long command: Ray starts its workers with 1000 characters."""
        if len(self.command) <= _SHORT_MAX:
            return self
        start = self.command[:_SHORT_MAX]
        return self._replace(command=f"{start.rpartition(' ')[0] or start} ...")


# At the import: a script may change its directory and sys.argv later.
try:
    _DIRECTORY = str(Path.cwd())
except OSError:  # it was removed
    _DIRECTORY = "?"
_SCRIPT, *_ARGUMENTS = sys.argv or [""]
_COMMAND = shlex.join([Path(_SCRIPT).name, *_ARGUMENTS])[:_COMMAND_MAX]


def this_process() -> Origin:
    return Origin(socket.gethostname(), _DIRECTORY, _COMMAND, os.getpid())


#: With the process id a name of this process alone: a forked child inherits the token.
_TOKEN = secrets.token_hex(8)
_CLIENTS = itertools.count(1)


def name_client() -> str:
    """A name for a client of this process, which no other client has, anywhere."""
    return f"{_TOKEN}.{os.getpid()}.{next(_CLIENTS)}"


def node(attached: Mapping[str, Any], client: str) -> tree.Mapping:
    """For the tree: this process, its client, and kinds of attached optimizers and schedulers."""
    optimizers = {
        name: type(thing).__qualname__
        for name, thing in attached.items()
        if isinstance(thing, torch.optim.Optimizer)
    }
    schedulers = {name: kind for name, one in attached.items() if (kind := kind_of_scheduler(one))}
    return _mapping(
        {
            **this_process()._asdict(), "client": client, "optimizers": _mapping(optimizers),
            "schedulers": _mapping(schedulers),
        }
    )  # fmt: skip


def kind_of_scheduler(thing: object) -> str:
    """torch's class of a learning-rate scheduler, with the classes of those that it has; "" for
    other things, and for a class of the script's that is of none of torch's: it may be renamed."""
    base = torch.optim.lr_scheduler.LRScheduler
    if not issubclass(type(thing), base):
        return ""
    kind = next(cls for cls in type(thing).__mro__ if cls.__module__.startswith("torch.optim."))
    if issubclass(base, kind) or kind.__name__ == "_LRScheduler":
        return ""
    parts = [kind_of_scheduler(part) or "LRScheduler" for part in getattr(thing, "_schedulers", ())]
    return f"{kind.__name__}({', '.join(parts)})" if parts else kind.__name__


def _mapping(values: Mapping[str, Any]) -> tree.Mapping:
    return tree.Mapping(tree.Tag.DICT, [*values.items()])


def _about(described: tree.Tree) -> dict[str, Any]:
    found = tree.plain(described.about)
    return found if isinstance(found, dict) else {}


def of(described: tree.Tree) -> Origin:
    about = _about(described)
    host, directory, command = (str(about.get(key, "?")) for key in Origin._fields[:3])
    pid = about.get("pid")
    return Origin(host, directory, command, pid if isinstance(pid, int) else 0)


def by_another_client(described: tree.Tree, client: str) -> bool:
    """Whether the process of `client` saved this itself, through another client."""
    made_by = str(_about(described).get("client", ""))
    return made_by != client and made_by.rpartition(".")[0] == client.rpartition(".")[0]


def kind(described: tree.Tree, things: str, name: str) -> str:
    """The class of what was attached under this name, one of `things`: "optimizers", or
    "schedulers" as `kind_of_scheduler()` has it. "" when the class is not known."""
    kinds = _about(described).get(things)
    return str(kinds.get(name, "")) if isinstance(kinds, dict) else ""


def age(wall_ns: int) -> str:
    """How long ago, for people."""
    seconds = max(0.0, time.time() - wall_ns / 1e9)
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def require_same(job: str, step: int, wall_ns: int, made_by: Origin) -> None:
    """Raises UsageError when a job that is named after its script would continue from a checkpoint
    that another command made, or the same command in another directory."""
    mine = this_process()
    if (made_by.command, made_by.directory) == (mine.command, mine.directory):
        return
    raise UsageError(
        f"step {step} of job {job!r} was saved {age(wall_ns)} by another command, {made_by}, and "
        f"this process is {mine}. This run has only the script's name, so nothing is restored",
        hint=f"to continue from that checkpoint, set PCCHECK_JOB={job} or job={job!r}; to start a "
        "separate run, use another job name",
    )
