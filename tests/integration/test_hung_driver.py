"""A CUDA driver that never answers: ranks connect, and use push."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from tests.conftest import SMALL
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of

RANKS = 4
SIZE = 100_000
_HANGS = (
    "import sys, threading; from pccheck_native import _core; from tests.support import loopcheck; "
    "_core.cuda_missing = threading.Event().wait; sys.exit(loopcheck.main(sys.argv[1:]))"
)


class HungDriver(Daemon):
    def command(self, *flags: str) -> list[str]:
        python, _, _, *rest = super().command(*flags)
        return [python, "-c", _HANGS, *rest]


def test_a_driver_that_never_answers_keeps_no_rank_out(stack: ExitStack) -> None:
    daemon = stack.enter_context(HungDriver(*SMALL)).start()
    with ThreadPoolExecutor(RANKS) as threads:

        def connect(number: int) -> Rank:
            return Rank(daemon.socket, rank=number, world_size=RANKS)

        ranks = list(threads.map(connect, range(RANKS)))
    for rank in ranks:
        stack.callback(rank.close)
        assert rank.welcome.transfer == "push"
        assert rank.welcome.transfer_reason == "CPU tensors" or "driver" in (
            rank.welcome.transfer_reason
        )
    for rank in ranks:
        rank.register(SIZE)
    snapshots = [rank.begin(1, payload_of(rank.rank, SIZE)) for rank in ranks]
    for rank, snapshot in zip(ranks, snapshots, strict=True):
        rank.wait(snapshot)
    daemon.logs("the CUDA driver does not answer")
    log = daemon.log.read_text()
    assert log.count("the CUDA driver does not answer") == 1
    for rank in ranks:
        rank.close()
    assert daemon.stop() == 0
