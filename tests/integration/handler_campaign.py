"""Every call of a client in a signal handler in the middle of every other, at each instruction.

    python -m tests.integration.handler_campaign [--outer checkpoint] [--inner flush] [--every 1]

A tracer calls the inner call before an instruction of the client's own code, as Python calls a
signal handler or a `__del__`. Checked after each case: only errors of PCcheck were raised, the
outer call did its work, what was saved was not lost, and the next checkpoint is durable and right.
A call that waits for `stall_limit_s` or for a lock does not end. Prints counts per pair of calls.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import pccheck
import pccheck_wire
from pccheck import Checkpoint, CheckpointState, PCcheckClient, PccheckError
from tests.support.daemon import Daemon
from tests.support.trainer import Stamp, Stamped, mismatch

COUNTS = [70_000, 70_000]  # more than what is copied at once
STALL_S = 900.0  # a case that waits so long does not end
CASE_S = 60.0
OURS = (
    *(f"{Path(one.__file__ or '').parent}{os.sep}" for one in (pccheck, pccheck_wire)),
    contextlib.__file__,
)
LOST = (CheckpointState.FAILED, CheckpointState.SKIPPED)


class At:
    """For sys.settrace: calls `inner` once, before instruction number `at` of the client's code in
    this thread; counts them with at=0."""

    def __init__(self, at: int = 0, inner: Callable[[], object] = lambda: None) -> None:
        self.at, self.inner, self.seen = at, inner, 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.startswith(OURS):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self.inner()
        return self

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


class Place:
    """A client with a model, and the calls. Its values show the step."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.model = Stamped(COUNTS)
        self.optimizer = Stamp(list(self.model.parts))
        self.kept = 0  # the step of the newest checkpoint that was seen durable
        self.client: PCcheckClient = self.connect()
        self.handle: Checkpoint | None = None  # of the newest checkpoint before the outer call
        self.made: list[Checkpoint] = []  # by inner and outer calls
        self.restored = False  # a call has put an older step into the model

    def connect(self) -> PCcheckClient:
        client = PCcheckClient(
            job="job", rank=0, world_size=1, socket=self.daemon.socket, stall_limit_s=STALL_S
        )
        client.attach(model=self.model, optimizer=self.optimizer)
        client.stop_on(signal.SIGUSR2)
        if self.kept:
            client.adopt()
        return client

    def prepare(self) -> None:
        """A step, and a checkpoint in flight."""
        if self.client.closed:
            self.client = self.connect()
        self.made, self.restored = [], False
        self.optimizer.step()
        self.handle = self.save()
        self.made = []

    def save(self) -> Checkpoint:
        made = self.client.checkpoint(step=self.optimizer.now)
        self.made.append(made)
        return made

    def restore(self) -> object:
        self.restored = True
        return self.client.restore()

    def before(self) -> Checkpoint:
        assert self.handle is not None
        return self.handle

    def pin(self) -> None:
        with contextlib.suppress(pccheck.NoCheckpointError):  # not durable yet
            self.client.pin(self.kept)

    def attach(self) -> None:
        self.client.attach(model=self.model, optimizer=self.optimizer)

    def check(self) -> str:
        """What is wrong afterwards."""
        if self.client.closed:
            self.client = self.connect()
        lost = [
            made for made in self.made if made.state in LOST and "another call" not in made.reason
        ]
        if lost:
            return f"{lost[0]}: {lost[0].reason}"
        self.optimizer.step()
        now = self.optimizer.now
        made = self.client.checkpoint(step=now)
        made.wait_durable(CASE_S)
        found = self.client.recover()
        self.client.unpin(self.kept)
        self.kept = now
        tensors = [found.state["model"][f"parts.{index}"] for index in range(len(COUNTS))]
        if found.step != now:
            return f"recovered step {found.step} instead of {now}"
        return mismatch(tensors, now)


CALLS: dict[str, Callable[[Place], object]] = {
    "checkpoint": Place.save,
    "flush": lambda place: place.client.flush(CASE_S),
    "gate": lambda place: place.client.gate(),
    "close": lambda place: place.client.close(),
    "steps": lambda place: place.client.steps(),
    "recover": lambda place: place.client.recover(),
    "restore": Place.restore,
    "adopt": lambda place: place.client.adopt(),
    "attach": Place.attach,
    "pin": Place.pin,
    "unpin": lambda place: place.client.unpin(place.kept),
    "should_checkpoint": lambda place: place.client.should_checkpoint(place.optimizer.now),
    "should_stop": lambda place: place.client.should_stop(),
    "wait_copied": lambda place: place.before().wait_copied(CASE_S),
    "wait_durable": lambda place: place.before().wait_durable(CASE_S),
    "reason": lambda place: place.before().reason,
}
#: A client of the same job and rank: closes the other one.
OUTERS = CALLS | {"constructor": Place.connect}


@dataclass
class Tally:
    """Counts by pair of calls, what was wrong, and the slowest case."""

    cases: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # by inner call: errors of PCcheck
    violations: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")


def case(place: Place, outer: str, inner: str, at: int, tally: Tally) -> None:
    """One inner call before instruction `at` of the outer one."""
    label = f"{inner} in {outer} at {at}"
    place.prepare()
    began_s = time.monotonic()

    def handler() -> None:
        try:
            CALLS[inner](place)
        except PccheckError:
            tally.refused[inner] += 1
        except BaseException:
            tally.violations.append(f"{label}: inner: {traceback.format_exc(limit=-4)}")

    tracer = At(at, handler)
    is_program = __name__ == "__main__"  # pytest has a limit of its own
    faulthandler.dump_traceback_later(CASE_S, exit=is_program, file=sys.__stderr__)  # it hangs
    try:
        with tracer.traced():
            OUTERS[outer](place)
    except PccheckError as error:  # of a client that the handler has closed before the call
        if inner != "close":
            tally.violations.append(f"{label} ({tracer.where}): outer: {error!r}")
    except BaseException:
        tally.violations.append(f"{label} ({tracer.where}): {traceback.format_exc(limit=-4)}")
    took_s = time.monotonic() - began_s
    tally.slowest = max(tally.slowest, (took_s, label))
    try:
        wrong = place.check()
    except BaseException:
        wrong = traceback.format_exc(limit=-4)
    faulthandler.cancel_dump_traceback_later()
    if wrong:
        tally.violations.append(f"{label} ({tracer.where}): afterwards: {wrong}")
    tally.cases[outer, inner] += 1


def instructions(place: Place, outer: str) -> int:
    """How many instructions of the client's code the call runs."""
    counter = At()
    place.prepare()
    with counter.traced():
        OUTERS[outer](place)
    place.check()
    return counter.seen


def run(
    daemon: Daemon, outers: list[str], inners: list[str], pick: Callable[[int], list[int]]
) -> Tally:
    """`pick` chooses instructions among that many."""
    tally, place = Tally(), Place(daemon)
    place.prepare()
    place.check()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for outer in outers:
            counted = instructions(place, outer)
            for inner in inners:
                for at in pick(counted):
                    case(place, outer, inner, at, tally)
    place.client.close()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outer", action="append", choices=OUTERS)
    parser.add_argument("--inner", action="append", choices=CALLS)
    parser.add_argument("--every", type=int, default=1, help="only every N-th instruction")
    parser.add_argument("--seed", type=int, default=1, help="which one of N is the first")
    options = parser.parse_args()
    first = random.Random(options.seed).randrange(options.every) + 1
    wrong = 0
    for outer in options.outer or OUTERS:
        with Daemon("--chunk", "1MiB", "--block-bytes", "64KiB", "--dram", "64MiB") as daemon:
            daemon.start()
            tally = run(
                daemon, [outer], options.inner or list(CALLS),
                lambda count: list(range(first, count + 1, options.every)),
            )  # fmt: skip
        wrong += len(tally.violations)
        for (_, inner), count in tally.cases.items():
            refused = f", {tally.refused[inner]} refused" if tally.refused[inner] else ""
            print(f"{inner} in {outer}: {count} instructions{refused}")
        print(f"{outer}: slowest {tally.slowest}, violations: {len(tally.violations)}", flush=True)
        print(*tally.violations[:8], sep="\n", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of each client that continues the job
    sys.exit(main())
