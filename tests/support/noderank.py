"""A rank of a job on several nodes, whose state tells which line of the job it is of."""

from __future__ import annotations

import logging
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pccheck.warn import LOG
from tests.support.trainer import Commands, Trainer, mismatch

#: A line is what ranks save after one restore. Its number and the step are one number, the stamp.
STEPS_MAX = 100_000
#: So long ranks wait for a rank that was killed.
STANDS_S = 5.0


class Together:
    """Ranks make their steps together, as collectives make them. The file has a word per rank."""

    def __init__(self, path: str, rank: int) -> None:
        self._steps = np.memmap(path, np.int64, "r+")
        self._rank = rank

    @staticmethod
    def make(path: str, ranks: int) -> None:
        np.zeros(ranks, np.int64).tofile(path)

    def wait(self) -> None:
        """Until all have made this step, or one of them has stood still."""
        self._steps[self._rank] += 1
        since_s = time.monotonic()
        while self._steps.min() < self._steps[self._rank]:
            if time.monotonic() - since_s > STANDS_S:
                return
            time.sleep(0.0005)


class _Tell(logging.Handler):
    """What the client says goes to the parent, while the command that says it runs."""

    def __init__(self, link: Connection) -> None:
        super().__init__(logging.WARNING)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is threading.main_thread():
            self._link.send(("said", record.getMessage()))


class RankCommands(Commands):
    def __init__(self, link: Connection) -> None:
        super().__init__(link)
        LOG.addHandler(_Tell(link))

    def restore_stamp(self, step: int | None = None) -> tuple[bool, int, str]:
        """Whether there was a checkpoint, its stamp, and what is wrong with its content."""
        done = self.client.restore(step)
        if not done:
            return False, 0, ""
        stamp = int(self.tensors()[0][0]) // 3
        wrong = mismatch(self.tensors(), stamp)
        if stamp % STEPS_MAX != done.step:
            wrong += f"; the state is of step {stamp % STEPS_MAX}, and restore() says {done.step}"
        self.optimizer.now = stamp
        self.handles = []
        return True, stamp, wrong

    def begin_line(self, line: int) -> None:
        self.optimizer.now = line * STEPS_MAX + self.optimizer.now % STEPS_MAX

    def save_step(self, limit_s: float) -> tuple[int, str, str]:
        """Makes a step, and waits until all nodes have it: the stamp, the state, and why."""
        at = self.checkpoint(step=self.step() % STEPS_MAX)
        try:
            self.wait_global(at, limit_s)
        except Exception as error:
            return self.optimizer.now, self.state(at), f"{error} ({self.reason(at)})"
        return self.optimizer.now, self.state(at), ""

    def train(self, pause_s: float, stop: str, rank: int) -> list[tuple[int, str, str]]:
        """Saves every step until the file `stop` exists. Reports the stamp of what is global."""
        told, steps, others = -1, list[int](), Together(f"{stop}.steps", rank)
        while not Path(stop).exists() and self.optimizer.now % STEPS_MAX < STEPS_MAX - 50:
            self.checkpoint(step=self.step() % STEPS_MAX)
            steps.append(self.optimizer.now)
            recent = list(zip(steps, self.handles[-len(steps) :], strict=True))[-64:]
            newest = max((at for at, one in recent if one.state.name == "GLOBAL"), default=-1)
            if newest > told:
                told = newest
                self.native.send(("durable", told))
            time.sleep(pause_s)
            others.wait()
        return [
            (at, self.state(number), self.reason(number))
            for number, at in enumerate(steps, len(self.handles) - len(steps))
        ]


class NodeRank(Trainer):
    """`durable` is the newest stamp that this rank was told is global."""

    commands = RankCommands

    def __init__(self, **environment: str) -> None:
        super().__init__(**environment)
        self.said: list[str] = []
        self.number = 0  # the rank

    def _receive(self, limit_s: float) -> tuple[Any, ...]:
        while (message := super()._receive(limit_s))[0] == "said":
            self.said.append(message[1])
        return message

    def listen(self) -> None:
        """Reads what has arrived, also of a process that was killed."""
        ended = []
        try:
            while self._link.poll(0):
                message = self._link.recv()
                if message[0] == "said":
                    self.said.append(message[1])
                elif message[0] == "durable":
                    self.durable = max(self.durable, message[1])
                else:
                    ended.append(message)
        except (EOFError, OSError):
            pass
        self._ended += ended
