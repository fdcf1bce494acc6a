"""`pccheckctl wait`: returns when a step, or a later one, is copied, durable or global."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    PccheckError,
    WaitTimeoutError,
)
from pccheck_wire.owners import one_owner
from pccheckctl.commands.listing import filtered
from pccheckctl.output import render
from pccheckctl.output.documents import Document, note, print_json, rows, say, text, whole
from pccheckctl.source.choice import daemon

NAMED_MAX = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
#: States in which the daemon vouches for a checkpoint.
COPIED = frozenset({"copied", "writing", "durable", "global"})
_ENDED = ("failed", "skipped")


class Seen(NamedTuple):
    """What is known of a rank's checkpoints."""

    stored: list[Document]  # on the disk and undamaged, newest first
    recent: list[Document]  # that the daemon remembers, oldest first
    known: bool = True  # the daemon has met this job and rank
    jobs: tuple[str, ...] = ()  # all that it has met

    @property
    def newest_step(self) -> int | None:
        """The one that was asked for last, unless it has ended without becoming anything."""
        for one in reversed(self.recent):
            if text(one, "state") not in (*_ENDED, "superseded"):
                return whole(one, "step")
        return whole(self.stored[0], "step") if self.stored else None


def run(
    arguments: argparse.Namespace,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """0 when it is there. Raises WaitTimeoutError at the deadline, CheckpointFailedError when the
    step has failed and no later one is on its way. A daemon that restarts is waited for, and so is
    a job that has not come yet; whoever has misspelt it reads so at once."""
    deadline = clock() + arguments.timeout
    pause = FIRST_PAUSE_S
    step: int | None = arguments.step
    seen: Seen | None = None
    told = False
    while True:
        last: PccheckError | None = None
        reached: Document | None = None
        try:
            seen = look(arguments)
            step = seen.newest_step if step is None else step
            reached = None if step is None else judge(seen, step, arguments.state)
        except DaemonUnreachableError as error:
            last = error
        if reached is not None:
            _tell(arguments, reached)
            return 0
        left = deadline - clock()
        if left <= 0:
            raise last or _too_late(arguments, step, seen)
        if seen is not None and not told:
            told = True
            _say(arguments, step, seen)
        sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _say(arguments: argparse.Namespace, step: int | None, seen: Seen) -> None:
    """What is waited for: at a terminal, and wherever it may be a slip."""
    who, limit = _who(arguments), render.duration(arguments.timeout)
    if not seen.known:
        note(f"{who} has not come to this daemon yet ({_jobs(seen)}); waiting {limit} for it")
    elif sys.stderr.isatty():
        what = "a checkpoint" if step is None else f"step {step} or a later one"
        note(f"waiting {limit} until {what} of {who} is {arguments.state}; {_newest(seen)}")


def _too_late(arguments: argparse.Namespace, step: int | None, seen: Seen | None) -> PccheckError:
    who, limit = _who(arguments), render.duration(arguments.timeout)
    if seen is not None and not seen.known:
        return WaitTimeoutError(
            f"{who} did not come to this daemon within {limit}; {_jobs(seen)}", hint=_HINT
        )
    if step is None:
        return WaitTimeoutError(f"{who} has begun no checkpoint within {limit}", hint=_HINT)
    newest = f"; {_newest(seen)}" if seen is not None else ""
    return WaitTimeoutError(
        f"{who} has neither step {step} nor a later one {arguments.state} after {limit}{newest}",
        hint=_HINT,
    )


_HINT = "see: pccheckctl status"


def _who(arguments: argparse.Namespace) -> str:
    return f"job {arguments.job!r} rank {arguments.rank}"


def _jobs(seen: Seen) -> str:
    more = ", ..." if len(seen.jobs) > NAMED_MAX else ""
    known = f"{', '.join(seen.jobs[:NAMED_MAX])}{more}" if seen.jobs else "no job"
    return f"it shows you {known}"


def _newest(seen: Seen) -> str:
    if not seen.stored:
        return "none is durable yet"
    return f"the newest durable step is {whole(seen.stored[0], 'step')}"


def look(arguments: argparse.Namespace) -> Seen:
    """Raises UsageError when users have jobs of the same name."""
    with daemon(arguments) as chosen:
        listed = filtered(chosen.listing(arguments.job, uid=arguments.uid), arguments.rank)
        document = chosen.status(uid=arguments.uid)
    stored = [
        one
        for one in rows(listed, "checkpoints")
        if text(one, "job") == arguments.job and one.get("damaged") is not True
    ]
    stored.sort(key=lambda one: -whole(one, "sequence"))
    ranks = rows(document, "ranks")
    mine = [rank for rank in ranks if text(rank, "job") == arguments.job]
    one_owner(arguments.job, {whole(rank, "uid") for rank in mine})
    mine = [rank for rank in mine if rank.get("rank") == arguments.rank]
    recent = [one for rank in mine for one in rows(rank, "checkpoints")]
    jobs = tuple(sorted({text(rank, "job") for rank in ranks}))
    return Seen(stored, recent, bool(mine or stored), jobs)


def judge(seen: Seen, step: int, state: str) -> Document | None:
    """The checkpoint of the step or of a later one that is in the wanted state, if any. Raises
    CheckpointFailedError when the step itself has failed and nothing later may still bring it."""
    durable = [one for one in seen.stored if whole(one, "step") >= step]
    if state == "global":
        durable = [one for one in durable if _is_global(one)]
    if durable:
        told = "global" if state == "global" else "durable"
        return min(durable, key=lambda one: whole(one, "step")) | {"state": told}
    later = [one for one in seen.recent if whole(one, "step") >= step]
    if state == "copied":
        for one in later:
            if text(one, "state") in COPIED:
                return one
    if later and all(text(one, "state") in _ENDED for one in later):
        one = later[-1]
        reason = text(one, "reason") or text(one, "state")
        raise CheckpointFailedError(f"step {whole(one, 'step')} failed: {reason}")
    return None


def _is_global(one: Document) -> bool:
    """Every rank has it; a rank that saves alone is every rank."""
    return one.get("global") is True or whole(one, "world_size", 1) == 1


def _tell(arguments: argparse.Namespace, one: Document) -> None:
    document: Document = {
        "schema": 1,
        "job": arguments.job,
        "rank": arguments.rank,
        "step": one.get("step"),
        "sequence": one.get("sequence"),
        "state": one.get("state"),
    }
    if arguments.json:
        print_json(document)
    else:
        asked = (
            "" if arguments.step in (None, one.get("step")) else f", later than {arguments.step}"
        )
        say(f"step {one.get('step')} is {one.get('state')}{asked}")
