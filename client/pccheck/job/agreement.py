"""A number on which the ranks of a job agree: the largest of theirs, reduced on the CPU."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import distributed

from pccheck.warn import LOG, Warner
from pccheck_wire.errors import UsageError

#: A rank that waits longer for the first call of the others says so: gloo waits half an hour.
_WAIT_S = 30.0


class RankAgreement:
    """Among the ranks that save together, in the order of their calls. One rank agrees at once."""

    def __init__(self, world_size: int, warner: Warner) -> None:
        self._world_size = world_size
        self._warner = warner
        self._group: distributed.ProcessGroup | None = None
        self._broken = False

    def begin(self, caller: str) -> None:
        """All ranks must call it before `largest`. Raises UsageError, which names `caller`."""
        if self._world_size > 1 and self._group is None and not self._broken:
            late = threading.Timer(
                _WAIT_S, LOG.warning,
                ("PCcheck: %s waits for the other ranks: every rank must call it", caller),
            )  # fmt: skip
            late.daemon = True
            late.start()
            try:
                self._group = _group(self._world_size, caller)
            finally:
                late.cancel()

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers; after a rank has ended, this rank's own."""
        if self._group is None:
            return number
        word = torch.tensor([number], dtype=torch.int64, device="cpu")
        try:
            distributed.all_reduce(word, distributed.ReduceOp.MAX, self._group)
        except (RuntimeError, ValueError) as error:  # a rank or the group has ended
            self._give_up(self._group, error)
            return number
        return int(word.item())

    def _give_up(self, group: distributed.ProcessGroup, error: Exception) -> None:
        self._group, self._broken = None, True
        # Without this the others would wait for this rank, for gloo's half an hour.
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            distributed.destroy_process_group(group)
        self._warner.once(
            "agreement",
            f"the ranks cannot agree any more on when to stop or to save ({error}): should_stop() "
            "reports only signals to this rank from now on, and should_checkpoint() follows only "
            "what this rank measures",
        )


def _group(world_size: int, caller: str) -> distributed.ProcessGroup:
    """Reduces numbers over all ranks on the CPU, whatever backend training uses."""
    is_set_up = distributed.is_available() and distributed.is_initialized()
    ranks = distributed.get_world_size() if is_set_up else 0
    if ranks != world_size:
        raise UsageError(
            f"{caller}: the {world_size} ranks of the job have to agree, and "
            + (f"torch.distributed has {ranks}" if ranks else "torch.distributed is not set up"),
            hint=f"call torch.distributed.init_process_group() before {caller}, on every rank",
        )
    made: distributed.ProcessGroup = distributed.new_group(backend="gloo")
    return made
