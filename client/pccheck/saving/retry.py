"""When to ask again for what was refused once: a moment without memory is no reason for weeks."""

from __future__ import annotations

#: Checkpoints until the first time, which doubles with every refusal up to the last one.
AGAIN_AFTER, AGAIN_AFTER_MAX = 10, 640


class Again:
    """Counts checkpoints down to the next try."""

    def __init__(self) -> None:
        self._distance = AGAIN_AFTER
        self._left = 0

    def refused(self) -> None:
        self._left = self._distance
        self._distance = min(2 * self._distance, AGAIN_AFTER_MAX)

    def due(self) -> bool:
        """Asked once a checkpoint: whether it is time."""
        self._left -= 1
        return self._left <= 0
