"""Where each checkpoint is to be safe: on the disk, copied into the daemon's memory only, or left
on the GPU, where the daemon finds it if this process dies before the next update. Every rank
decides by its own calls; the daemon writes on all ranks what one of them wants on the disk."""

from __future__ import annotations

import math

from pccheck.options import Options
from pccheck.warn import Warner
from pccheck_native import LEVEL_DEVICE, LEVEL_DISK, LEVEL_MEMORY
from pccheck_wire.errors import CheckpointFailedError, UsageError
from pccheck_wire.messages import STATES_IN_MEMORY as STATES
from pccheck_wire.units import MIB

_NAMES = {"disk": LEVEL_DISK, "memory": LEVEL_MEMORY, "device": LEVEL_DEVICE}
#: Where a checkpoint on the GPU is not possible, none is made: a copy would cost what the caller
#: did not ask for.
_INSTEAD = 'use to="memory", or let durable_every choose'
#: Why nothing withdraws one, by what the call of checkpoint() waits for instead.
_UNHELD = {
    "copied": "no optimizer is attached, whose step would announce the next update; attach it, or "
    'use gate="manual" and call gate() before each change',
    "read": 'checkpoint() waits until the tensors were read, because of snapshot="blocking", of '
    "tensors that changed without gate(), or of a GPU without memory for staging",
}


class Levels:
    """Training thread only."""

    def __init__(self, options: Options, warner: Warner) -> None:
        self._every = options.writes_every
        self._warner = warner
        self._since = 0  # checkpoints since the last one for the disk
        self.uses_device = False  #: one checkpoint at least was for level "device"
        #: Bit n: level n has checkpoints of its own. Without those for the disk ("auto") the daemon
        #: gives an idle disk what is in memory.
        self.used = (1 << LEVEL_MEMORY if self._every > 1 else 0) | (
            1 << LEVEL_DISK if self._every < math.inf else 0
        )

    def choose(self, to: str | None) -> int:
        """The level of this call of `checkpoint(to=...)`. Raises UsageError."""
        if to not in (None, *_NAMES):
            raise UsageError(
                f"to={to!r} is not a level",
                hint='use to="memory", which survives the end of this process, to="disk", or '
                'to="device"',
            )
        if to == "device":  # between the copied ones; if it is pulled, it becomes one in memory
            self.used |= 1 << LEVEL_MEMORY
            self.uses_device = True
            return LEVEL_DEVICE
        self._since += 1
        level = LEVEL_DISK if self._since >= self._every else LEVEL_MEMORY
        level = _NAMES[to] if to is not None else level
        if level == LEVEL_DISK:
            self._since = 0
        if level == LEVEL_MEMORY:
            self.used |= 1 << LEVEL_MEMORY
        return level

    def require_device(self, *, on_gpu: bool = True, pulls: bool, wait: str) -> None:
        """Raises CheckpointFailedError, and warns once, if a checkpoint cannot stay on the GPU.
        `on_gpu`: it has GPU tensors. `pulls`: the daemon can read them there. `wait`: why nothing
        withdraws it before a change."""
        if not on_gpu:
            why = "no tensor of the state is on a GPU"
        elif not pulls:
            why = "the daemon does not pull these tensors (see: pccheckctl status)"
        elif wait:
            why = _UNHELD[wait]
        else:
            return
        error = CheckpointFailedError(f'to="device" is not possible: {why}', hint=_INSTEAD)
        self._warner.once(
            "to device", f"{error.message}. These checkpoints are skipped: {_INSTEAD}"
        )
        raise error

    def fitting(self, level: int, state_bytes: int, room_bytes: int) -> int:
        """The level of a checkpoint that takes `state_bytes` of the daemon's memory, which has room
        for `room_bytes` of this rank. With room for two states the daemon skips those whose copy
        would have to wait. Raises CheckpointFailedError for one that may not be copied instead."""
        states = room_bytes // max(1, state_bytes)
        if level == LEVEL_DEVICE and states < 2:
            raise CheckpointFailedError(
                'to="device" needs room for two states in pccheckd\'s memory', hint=_INSTEAD
            )
        if level != LEVEL_MEMORY or states >= STATES:
            return level
        self._warner.once(
            "memory only",
            f"memory-only checkpoints need room for {STATES} states of {state_bytes // MIB} MiB "
            "in pccheckd's memory (one is being copied, one is copied, one is written), and this "
            f"rank gets {room_bytes // MIB} MiB: "
            f"{'some are skipped' if states >= 2 else 'they go to the disk'}. Give pccheckd "
            f"{-(-(STATES * state_bytes - room_bytes) // MIB)} MiB more for each rank: --dram",
        )
        return level if states >= 2 else LEVEL_DISK
