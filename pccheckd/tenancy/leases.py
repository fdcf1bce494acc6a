"""Leases on checkpoints that reading sessions have opened: they are not recycled while they are
read, unless a new checkpoint would have no slot."""

from __future__ import annotations

import contextlib

from pccheck_native import _core
from pccheck_wire.errors import NoCheckpointError
from pccheckd.base.logs import LOG

from .volumes import VolumeSet


class Leases:
    """Owned by a tenant. Leases are not on the disk, so they end with the daemon. No call waits
    for the disk."""

    def __init__(self, volumes: VolumeSet) -> None:
        self._volumes = volumes
        self._sessions: dict[int, set[int]] = {}  # by sequence

    def take(self, sequence: int, session: int) -> None:
        """Leases a checkpoint until `give_back`. Raises NoCheckpointError when it was recycled."""
        if not self._spare(sequence, True):
            raise NoCheckpointError(
                f"{self._volumes.key} has no durable checkpoint {sequence} (any more)",
                hint="open the newest one again",
            )
        self._sessions.setdefault(sequence, set()).add(session)

    def give_back(self, session: int) -> None:
        """Ends all leases of a session that has ended."""
        for sequence, sessions in list(self._sessions.items()):
            sessions.discard(session)
            if not sessions:
                self._end(sequence)

    def end_for_room(self) -> bool:
        """Ends the lease on the oldest checkpoint whose slot a new one can have; False when there
        is none."""
        current = self._volumes.current
        if current is None:
            return False
        steps = {found.sequence: found.step for found in current.checkpoints}
        for sequence in sorted(self._sessions.keys() & steps.keys()):
            self._spare(sequence, False)
            with contextlib.suppress(ValueError):  # the volume is being reopened
                if current.volume.has_expendable():
                    del self._sessions[sequence]
                    LOG.info(
                        "%s: lease of a reader on step %d ended: a new checkpoint needs the slot",
                        self._volumes.key, steps[sequence],
                    )  # fmt: skip
                    return True
            self._spare(sequence, True)
        return False

    def renew(self) -> None:
        """Leases the same checkpoints again, after a volume was read from the disk again."""
        for sequence in list(self._sessions):
            if not self._spare(sequence, True):
                del self._sessions[sequence]

    def _end(self, sequence: int) -> None:
        del self._sessions[sequence]
        self._spare(sequence, False)

    def _spare(self, sequence: int, spared: bool) -> bool:
        item = self._volumes.find(sequence)
        if item is None:
            return False
        try:
            item.volume.spare(sequence, spared)
        except (OSError, ValueError, _core.NativeError):  # recycled, or its volume is closed
            return False
        return True
