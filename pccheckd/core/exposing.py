"""What a trainer reports about its GPU memory: exposures in pieces, and the transfer it chose."""

from __future__ import annotations

from dataclasses import dataclass, field

from pccheck_native import _core
from pccheck_native.transfer import PULL, PUSH, PUSHED
from pccheck_wire.errors import RefusedError, UsageError
from pccheck_wire.messages import Chose, Expose

#: Incomplete exposures, of all sessions of a user.
UNFINISHED_BYTES_MAX = 8 * _core.EXPOSURE_BYTES_MAX
REASON_CHARACTERS_MAX = 200


@dataclass(slots=True)
class Exposing:
    """The exposure of one session that is being received."""

    map: int = 0  # the newest that was begun; numbers only grow
    _open: bool = False
    _held: bytearray = field(default_factory=bytearray)

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    def take(self, body: Expose, *, room_bytes: int) -> bytes | None:
        """The whole exposure when this was its last piece. A new map number drops what was
        received of the one before. Raises UsageError, RefusedError; what was received is gone."""
        try:
            return self._take(body, room_bytes)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Drops what was received; its number stays used."""
        self._held = bytearray()
        self._open = False

    def _take(self, body: Expose, room_bytes: int) -> bytes | None:
        if body.map != self.map or not self._open:
            if body.map <= self.map:
                raise UsageError(
                    f"$.body.map must grow (got {body.map} after {self.map})",
                    hint="map numbers start at 1",
                )
            self.drop()
            self.map, self._open = body.map, True
        held_bytes = self.held_bytes + sum(map(len, body.data))
        if held_bytes > _core.EXPOSURE_BYTES_MAX:
            raise RefusedError(
                f"an exposure must have at most {_core.EXPOSURE_BYTES_MAX} bytes", hint=PUSHED
            )
        if held_bytes > room_bytes:
            raise RefusedError(
                f"too many exposures of this user are incomplete ({UNFINISHED_BYTES_MAX} bytes)",
                hint=PUSHED, retryable=True,
            )  # fmt: skip
        self._held += b"".join(body.data)
        if body.more:
            return None
        whole = bytes(self._held)
        self.drop()
        return whole


def checked(body: Chose) -> tuple[str, str]:
    """Transfer and reason, for the log and for terminals. Raises UsageError."""
    if body.transfer not in (PUSH, PULL):
        raise UsageError(f"$.body.transfer: {body.transfer[:20]!r} is neither push nor pull")
    if len(body.reason) > REASON_CHARACTERS_MAX or not body.reason.isprintable():
        raise UsageError(
            f"$.body.reason: more than {REASON_CHARACTERS_MAX} characters, or not printable"
        )
    return body.transfer, body.reason
