"""Row 8 of the fault plan, the stateful part. In any order a trainer connects, saves, is killed and
reconnects; the daemon is killed, stopped and started; the job is dropped. An oracle of a few
numbers knows what must be recovered. PCC_EXAMPLES=400 runs that many examples. hypothesis prints
the shortest failing example, and keeps it in .hypothesis for the next run."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from pccheck_wire import attach
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import PccheckError
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Drop, Empty, Hello, Role
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of

SIZE = 300_000
STEPS = 25
EXAMPLES = int(os.environ.get("PCC_EXAMPLES", "4"))
FLAGS = ("--chunk", "64KiB", "--block-bytes", "4KiB", "--dram", "4MiB", "--engine", "pwrite")


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.daemon = Daemon(*FLAGS).start()
        self.rank: Rank | None = None
        self.step = 0  # begun last
        self.acknowledged = 0
        self.dropped = 0  # steps up to here must never be seen again
        self.launches = 0

    def teardown(self) -> None:
        if self.rank is not None:
            self.rank.close()
        self.daemon.cleanup()

    @precondition(lambda self: self.rank is None)
    @rule()
    def connect(self) -> None:
        self.launches += 1
        self.rank = Rank(self.daemon.socket, launch=str(self.launches))
        found = self.rank.open()
        if isinstance(found, Empty):
            assert self.acknowledged == 0, f"nothing of step {self.acknowledged}"
        else:
            opened, data = self.rank.restore()
            assert max(self.acknowledged, self.dropped + 1) <= opened.step <= self.step
            assert data == payload_of(opened.step, SIZE), f"wrong bytes of step {opened.step}"
        self.rank.register(SIZE)

    @precondition(lambda self: self.rank is not None)
    @rule()
    def save(self) -> None:
        assert self.rank is not None
        self.step += 1
        state = self.rank.wait(self.rank.begin(self.step, payload_of(self.step, SIZE)))
        assert state.outcome in (State.DURABLE, State.GLOBAL), state
        self.acknowledged = self.step

    @precondition(lambda self: self.rank is not None)
    @rule()
    def begin(self) -> None:
        """And look no further."""
        assert self.rank is not None
        self.step += 1
        self.rank.begin(self.step, payload_of(self.step, SIZE))

    @precondition(lambda self: self.rank is not None)
    @rule()
    def begin_without_data(self) -> None:
        assert self.rank is not None
        self.step += 1
        self.rank.begin(self.step, payload_of(self.step, SIZE), fill=False)
        self.kill_trainer()

    @precondition(lambda self: self.rank is not None)
    @rule()
    def kill_trainer(self) -> None:
        assert self.rank is not None
        self.rank.close()
        self.rank = None

    @rule()
    def kill_daemon(self) -> None:
        self.daemon.kill()
        self._after()

    @rule()
    def stop_daemon(self) -> None:
        assert self.daemon.stop() == 0
        self._after()

    def _after(self) -> None:
        if self.rank is not None:
            self.kill_trainer()
        self.daemon.start()

    @precondition(lambda self: self.rank is None)
    @rule()
    def drop(self) -> None:
        hello = Hello(PROTOCOL_VERSION, Role.OBSERVER, "test", os.getpid())
        with attach.connect(hello, self.daemon.socket) as observer:
            try:
                observer.request(Drop("job"))
            except PccheckError:  # there is none, or it has a checkpoint in flight
                return
        self.acknowledged, self.dropped = 0, self.step


def test_whatever_happens_the_acknowledged_is_recovered() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Life,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, print_blob=True,
            derandomize=EXAMPLES < 10, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
