"""`pccheckctl wait`: returns when a step, or a later one, is copied or durable."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    PccheckError,
    WaitTimeoutError,
)

from . import render
from .listing import filtered
from .output import Document, print_json, rows, text, whole
from .source import choose

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
#: States in which the daemon vouches for a checkpoint.
COPIED = frozenset({"copied", "writing", "durable", "global"})


def run(
    arguments: argparse.Namespace,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """0 when it is there. Raises WaitTimeoutError at the deadline, CheckpointFailedError when the
    step has failed and no later one is on its way. A daemon that restarts is waited for."""
    deadline = clock() + arguments.timeout
    pause = FIRST_PAUSE_S
    while True:
        last: PccheckError | None = None
        try:
            reached = look(arguments)
        except DaemonUnreachableError as error:
            reached, last = None, error
        if reached is not None:
            _tell(arguments, reached)
            return 0
        left = deadline - clock()
        if left <= 0:
            if last is not None:
                raise last
            raise WaitTimeoutError(
                f"step {arguments.step} of job {arguments.job!r} rank {arguments.rank} is not "
                f"{arguments.state} after {render.duration(arguments.timeout)}",
                hint="see: pccheckctl status",
            )
        sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def look(arguments: argparse.Namespace) -> Document | None:
    """The checkpoint of the step or of a later one that is in the wanted state, if any."""
    with choose(arguments) as chosen:
        listed = filtered(chosen.listing(arguments.job, uid=arguments.uid), arguments.rank)
        document = chosen.status(uid=arguments.uid)
    durable = [
        one | {"state": "durable"}
        for one in rows(listed, "checkpoints")
        if text(one, "job") == arguments.job
        and whole(one, "step") >= arguments.step
        and one.get("damaged") is not True
    ]
    if durable:
        return min(durable, key=lambda one: whole(one, "step"))
    in_flight = _of_rank(document, arguments)
    if arguments.state == "copied":
        for one in in_flight:
            if text(one, "state") in COPIED and whole(one, "step") >= arguments.step:
                return one
    _raise_failed(in_flight, arguments)
    return None


def _of_rank(status: Document, arguments: argparse.Namespace) -> list[Document]:
    return [
        one
        for rank in rows(status, "ranks")
        if text(rank, "job") == arguments.job and rank.get("rank") == arguments.rank
        for one in rows(rank, "checkpoints")
    ]


def _raise_failed(in_flight: list[Document], arguments: argparse.Namespace) -> None:
    """The step itself has failed and nothing later may still bring it."""
    later = [one for one in in_flight if whole(one, "step") >= arguments.step]
    ended = ("failed", "skipped")
    if later and all(text(one, "state") in ended for one in later):
        one = later[-1]
        reason = text(one, "reason") or text(one, "state")
        raise CheckpointFailedError(f"step {whole(one, 'step')} failed: {reason}")


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
        print(f"step {one.get('step')} is {one.get('state')}")
