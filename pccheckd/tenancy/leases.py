"""Leases on checkpoints that reading sessions have opened: they are not recycled while they are
read, unless a new checkpoint would have no slot."""

from __future__ import annotations

from pccheck_native import _core, catalog
from pccheck_wire.errors import NoCheckpointError
from pccheckd.base.logs import LOG

from .volumes import Key, VolumeSet


def recycled(key: Key, sequence: int) -> NoCheckpointError:
    return NoCheckpointError(
        f"{key} has no durable checkpoint {sequence}: newer ones may have replaced it",
        hint="open the newest one again",
    )


class Leases:
    """Owned by a tenant. Leases are not on the disk, so they end with the daemon. No call waits
    for the disk."""

    def __init__(self, volumes: VolumeSet) -> None:
        self._volumes = volumes
        self._sessions: dict[int, set[int]] = {}  # by sequence

    def take(self, sequence: int, session: int) -> None:
        """Leases a checkpoint until `give_back`. Raises NoCheckpointError when it was recycled."""
        if not self._spare(sequence, True):
            raise recycled(self._volumes.key, sequence)
        self._sessions.setdefault(sequence, set()).add(session)

    def give_back(self, session: int) -> None:
        """Ends all leases of a session that has ended."""
        for sequence, sessions in list(self._sessions.items()):
            sessions.discard(session)
            if not sessions:
                self._end(sequence)

    def end_for_room(self) -> bool:
        """Ends the lease on `oldest_for_room`; False when there is none."""
        found = self.oldest_for_room()
        if found is None:
            return False
        self._end(found.sequence)
        LOG.info(
            "%s: lease of a reader on step %d ended: a new checkpoint needs the slot",
            self._volumes.key, found.step,
        )  # fmt: skip
        return True

    def oldest_for_room(self) -> catalog.Checkpoint | None:
        """The oldest leased checkpoint whose slot a new one can have."""
        current = self._volumes.current
        if current is None:
            return None
        leased = [one for one in current.checkpoints if one.sequence in self._sessions]
        for found in sorted(leased, key=lambda one: one.sequence):
            self._spare(found.sequence, False)
            try:
                if current.volume.has_expendable():
                    return found
            except ValueError:  # the volume is being reopened
                return None
            finally:
                self._spare(found.sequence, True)
        return None

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
        except (OSError, _core.NativeError):  # recycled
            return False
        except ValueError:  # closed, and about to be opened again: `renew` follows
            pass
        return True
