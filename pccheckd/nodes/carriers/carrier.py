"""What moves small values between the nodes of a job: the job's torch store, or etcd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pccheck_wire.errors import PccheckError
from pccheck_wire.packing import VALUE_BYTES_MAX

VALUE_MAX = VALUE_BYTES_MAX  #: bytes of one value


class CarrierError(PccheckError):
    """The carrier failed, or did not answer in time. Whether it did what it was asked for is
    unknown."""

    code = "CARRIER"
    default_retryable = True


class Carrier(Protocol):
    """Keys are short, ASCII, and public: whoever reaches a torch store reads them. A value has at
    most VALUE_MAX bytes. Every call has a deadline, and raises CarrierError when it has failed.
    Calls may overlap, and a `listen` delays no other call.

    A carrier may lose everything that it holds, at any time, and says nothing."""

    async def set(self, key: str, value: bytes) -> None:
        """The value has arrived on return."""

    async def add(self, key: str, amount: int) -> int:
        """The sum; an absent key counts as 0. After a CarrierError a second try may add twice.
        `get` reads a sum as decimal digits."""

    async def swap(self, key: str, value: bytes) -> bytes:
        """Sets a key that is absent. Returns what the key holds now: the first value wins."""

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values, in the order of the keys; None for an absent key."""

    async def ring(self, key: str, value: bytes, bell: str) -> int:
        """As `set`, and then rings a bell: adds 1 to `bell`, which `listen` waits for. Returns the
        sum."""

    async def listen(
        self, bell: str, after: int, keys: Sequence[str], limit_s: float
    ) -> tuple[int, list[bytes | None]] | None:
        """As soon as the bell has rung more than `after` times: how often (at least), and the
        values of the keys after that. None: it has not within `limit_s` seconds."""
