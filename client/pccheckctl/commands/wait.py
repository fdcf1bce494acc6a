"""`pccheckctl wait`: returns when a step, or a later one, is copied, durable or global; or when all
is durable that ended trainers have left."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from pccheck_wire.basics import some
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    PccheckError,
    UsageError,
    WaitTimeoutError,
    one_owner,
)
from pccheckctl.commands.listing import filtered
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, note, rows, text, whole
from pccheckctl.source import daemon

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
#: States in which a checkpoint is safe when the trainer ends.
COPIED = frozenset({"copied", "writing", "durable", "global"})
_ENDED = ("failed", "skipped")


class Seen(NamedTuple):
    """The checkpoints of a rank, as far as the daemon knows."""

    stored: list[Document]  # on the disk and valid, newest first
    recent: list[Document]  # in the memory of the daemon, oldest first
    known: bool = True  # the daemon knows this job and rank
    jobs: tuple[str, ...] = ()  # all that the daemon knows
    rank: int = 0

    @property
    def newest_step(self) -> int | None:
        """The one that was requested last, and did not fail."""
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
    """0 when the step has reached the state. Raises WaitTimeoutError at the deadline,
    CheckpointFailedError when the step failed or is lost and no later one is under way. A daemon
    that restarts is waited for, and so is a job that the daemon does not know yet. With --ended
    neither is waited for."""
    deadline = clock() + arguments.timeout
    if arguments.ended:
        return _until_written(arguments, deadline, clock, sleep)
    if arguments.job is None:
        raise UsageError("wait needs a job", hint="pccheckctl wait JOB --newest; or wait --ended")
    pause = FIRST_PAUSE_S
    step: int | None = arguments.step
    seen: Seen | None = None
    announced = False
    while True:
        last: PccheckError | None = None
        try:
            seen = look(arguments)
            step = seen.newest_step if step is None else step
            reached = None if step is None else judge(seen, step, arguments.state)
        except DaemonUnreachableError as error:
            last, reached = error, None
        if reached is not None:
            assert seen is not None
            _tell(arguments, reached, seen.rank)
            return 0
        left = deadline - clock()
        if left <= 0:
            raise last or WaitTimeoutError(
                f"timeout after {render.duration(arguments.timeout)}: "
                f"{_missing(arguments, step, seen)}",
                hint="see: pccheckctl status",
            )
        if seen is not None and not announced:
            announced = True
            if not seen.known or sys.stderr.isatty():  # an unknown job may be a wrong name
                limit = render.duration(arguments.timeout)
                note(f"{_missing(arguments, step, seen)}; waiting up to {limit}")
        sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _until_written(
    arguments: argparse.Namespace,
    deadline: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int:
    """0 when what ended trainers have copied is on the disk. Raises WaitTimeoutError."""
    while left := unwritten(arguments):
        if clock() >= deadline:
            raise WaitTimeoutError(
                f"timeout after {render.duration(arguments.timeout)}: still being written: "
                f"{some(left)}",
                hint="see: pccheckctl status",
            )
        sleep(LONGEST_PAUSE_S)
    answer(arguments, {"schema": 1, "job": arguments.job, "left": []},
           lambda: "everything is written that ended trainers have left")  # fmt: skip
    return 0


def unwritten(arguments: argparse.Namespace) -> list[str]:
    """The jobs of trainers that have ended, with checkpoints that are not on the disk yet."""
    with daemon(arguments) as chosen:
        ranks = rows(chosen.status(uid=arguments.uid), "ranks")
    return sorted({
        text(rank, "job")
        for rank in ranks
        if arguments.job in (None, text(rank, "job"))
        and rank.get("connected") is not True
        and whole(rank, "in_flight") + whole(rank, "in_memory")
    })  # fmt: skip


def _missing(arguments: argparse.Namespace, step: int | None, seen: Seen | None) -> str:
    """What is waited for, and what there is instead."""
    rank = arguments.rank if seen is None else seen.rank
    who = f"job {arguments.job!r}" + f" rank {rank}" * (rank is not None)
    if seen is not None and not seen.known:
        return f"the daemon does not know {who} yet (visible jobs: {some(seen.jobs) or 'none'})"
    if step is None:
        return f"{who} has requested no checkpoint yet"
    newest = on_gpu = ""
    if seen is not None:
        stored = seen.stored
        newest = f" (newest durable step: {whole(stored[0], 'step') if stored else 'none'})"
        if seen.recent and seen.recent[-1].get("on_device") is True:
            last = whole(seen.recent[-1], "step")
            on_gpu = f'; step {last} is on the GPU only, as its checkpoint(to="device") asks'
    return f"step {step} of {who}, or a later step, is not {arguments.state} yet{newest}{on_gpu}"


def look(arguments: argparse.Namespace) -> Seen:
    """Raises UsageError when users have jobs of the same name."""
    with daemon(arguments) as chosen:
        listed = chosen.listing(arguments.job, uid=arguments.uid)
        document = chosen.status(uid=arguments.uid)
    ranks = rows(document, "ranks")
    mine = [rank for rank in ranks if text(rank, "job") == arguments.job]
    one_owner(arguments.job, {whole(rank, "uid") for rank in mine})
    number = _first_here(mine) if arguments.rank is None else arguments.rank
    listed = filtered(listed, number)
    stored = [
        one
        for one in rows(listed, "checkpoints")
        if text(one, "job") == arguments.job and one.get("damaged") is not True
    ]
    stored.sort(key=lambda one: -whole(one, "sequence"))
    mine = [rank for rank in mine if rank.get("rank") == number]
    recent = [one for rank in mine for one in rows(rank, "checkpoints")]
    jobs = tuple(sorted({text(rank, "job") for rank in ranks}))
    return Seen(stored, recent, bool(mine or stored), jobs, number)


def _first_here(ranks: list[Document]) -> int:
    """The lowest rank that trains on this node, or has trained there: rank 0 may be on another."""
    now = [whole(rank, "rank") for rank in ranks if rank.get("connected") is True]
    return min(now or [whole(rank, "rank") for rank in ranks], default=0)


def _has_failed(one: Document, state: str) -> bool:
    """It will never reach the state. What is durable has a reason if it is given up: another rank
    did not save it."""
    alone = state == "global" and text(one, "state") == "durable" and text(one, "reason") != ""
    return alone or text(one, "state") in _ENDED or text(one, "lost") != ""


def judge(seen: Seen, step: int, state: str) -> Document | None:
    """The checkpoint of the step or of a later one that has reached the state, if any. Raises
    CheckpointFailedError when the step failed or is lost and no later one is under way."""
    durable = [one for one in seen.stored if whole(one, "step") >= step]
    if state == "global":
        # A rank that saves alone is every rank.
        durable = [
            one for one in durable if one.get("global") is True or whole(one, "world_size", 1) == 1
        ]
    if durable:
        reached = "global" if state == "global" else "durable"
        return min(durable, key=lambda one: whole(one, "step")) | {"state": reached}
    later = [one for one in seen.recent if whole(one, "step") >= step]
    if state == "copied":
        for one in later:
            if text(one, "state") in COPIED and not text(one, "lost"):
                return one
    if later and all(_has_failed(one, state) for one in later):
        one = later[-1]
        if lost := text(one, "lost"):
            raise CheckpointFailedError(
                f"step {whole(one, 'step')} was durable, and is lost: {lost}",
                hint="see what is left: pccheckctl list",
            )
        reason = text(one, "reason") or text(one, "state")
        raise CheckpointFailedError(
            f"step {whole(one, 'step')} failed: {reason}",
            hint="training continues, and saves its next checkpoint; see: pccheckctl status",
        )
    return None


def _tell(arguments: argparse.Namespace, one: Document, rank: int) -> None:
    later = "" if arguments.step in (None, one.get("step")) else f", later than {arguments.step}"
    reached = {name: one.get(name) for name in ("step", "sequence", "state")}
    answer(
        arguments,
        {"schema": 1, "job": arguments.job, "rank": rank, **reached},
        lambda: f"step {one.get('step')} is {one.get('state')}{later}",
    )
