"""The carrier as a member uses it: what fails is asked again, for ever, since saves go on
meanwhile and only new facts are missing. Values are msgpack. A key that holds what cannot be read
counts as absent: whoever reaches the store may write there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgpack  # type: ignore[import-untyped]

from pccheckd.base.logs import LOG

from .carrier import VALUE_MAX, Carrier, CarrierError

_T = TypeVar("_T")

RETRY_S = 0.5
WARN_AFTER_S = 5.0
#: How long a node listens before it looks whether the store still holds what the node has written.
LISTEN_S = 20.0


@dataclass(slots=True, eq=False)
class _Call:
    """One that has not succeeded yet."""

    due_s: float  # time.monotonic()
    why: str = ""  # it has failed so far


class Patient:
    """Owned by a member. Only `look` raises CarrierError."""

    def __init__(self, carrier: Carrier, job: str, is_live: Callable[[], bool]) -> None:
        """`is_live`: whether anybody here still waits; else a failure is no news."""
        self._carrier, self._job, self._is_live = carrier, job, is_live
        self.operations = 0  #: so far
        self._calls: list[_Call] = []
        self._is_warned = False

    @property
    def silent(self) -> str:
        """Why the carrier does not answer; "": it has not failed."""
        return next((one.why for one in self._calls if one.why), "")

    @property
    def silent_s(self) -> float:
        """For how long it has not answered; 0.0: nobody waits for it."""
        return max([0.0, *(time.monotonic() - one.due_s for one in self._calls)])

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return await self._sure(lambda: self._carrier.get(keys), counts=_reads(keys))

    async def look(self, keys: Sequence[str]) -> list[bytes | None]:
        """The same, once. Raises CarrierError."""
        self.operations += _reads(keys)
        return await self._carrier.get(keys)

    async def count(self, key: str) -> int:
        return counted((await self.get([key]))[0])

    async def add(self, key: str, amount: int) -> int:
        return await self._sure(lambda: self._carrier.add(key, amount))

    async def set(self, key: str, plain: object) -> None:
        value = packed(plain)
        await self._sure(lambda: self._carrier.set(key, value), counts=2)

    async def swap(self, key: str, value: bytes) -> bytes:
        """`value`: as `packed` makes it."""
        return await self._sure(lambda: self._carrier.swap(key, value))

    async def ring(self, key: str, plain: object, bell: str) -> None:
        value = packed(plain)
        await self._sure(lambda: self._carrier.ring(key, value, bell), counts=4)

    async def hear(
        self, bell: str, heard: int, keys: Sequence[str]
    ) -> tuple[int, list[bytes | None]]:
        """Waits until a bell has rung again: how often, and the values of the keys."""
        while True:
            listen = functools.partial(self._carrier.listen, bell, heard, keys, LISTEN_S)
            answer = await self._sure(listen, counts=3 + _reads(keys), limit_s=LISTEN_S)
            if answer is not None:
                return answer
            heard = min(heard, await self.count(bell))  # a store that is empty again begins at 0

    async def _sure(
        self, call: Callable[[], Awaitable[_T]], counts: int = 1, limit_s: float = 0.0
    ) -> _T:
        """Again and again, until the carrier has done it. `limit_s`: it may take so long."""
        mine = _Call(time.monotonic() + limit_s)
        self._calls.append(mine)
        try:
            while True:
                self.operations += counts
                try:
                    return await call()
                except CarrierError as error:
                    mine.why = error.message
                    self._warn(mine)
                    await asyncio.sleep(RETRY_S)
        finally:
            self._calls.remove(mine)
            if self._is_warned and not self.silent:
                self._is_warned = False
                LOG.warning("job %s: the other nodes are reached again", self._job)

    def _warn(self, call: _Call) -> None:
        """When it has lasted for a while: a process that ends takes its connection along."""
        lasts = time.monotonic() - call.due_s >= WARN_AFTER_S
        if lasts and not self._is_warned and self._is_live():
            self._is_warned = True
            LOG.warning("job %s: the other nodes cannot be reached: %s", self._job, call.why)


def counted(value: bytes | None) -> int:
    """What `add` has made of a key."""
    return int(value) if value is not None and value.isdigit() else 0


def packed(plain: object) -> bytes:
    value = msgpack.packb(plain)
    assert isinstance(value, bytes)
    if len(value) > VALUE_MAX:
        raise CarrierError(f"a value of {len(value)} bytes is too large for the store")
    return value


def unpacked(value: bytes | None) -> object:
    """None for what is absent or cannot be read."""
    if value is None or len(value) > VALUE_MAX:
        return None
    with contextlib.suppress(ValueError, TypeError, msgpack.UnpackException):  # a key is a list
        return msgpack.unpackb(value, use_list=True, strict_map_key=False)
    return None


def parsed(read: Callable[[object], _T], value: bytes | None) -> _T | None:
    """The same, of a type whose `read` raises ValueError."""
    plain = unpacked(value)
    return None if plain is None else checked(read, plain)


def checked(read: Callable[[object], _T], plain: object) -> _T | None:
    """None for what is not valid."""
    try:
        return read(plain)
    except ValueError as error:
        LOG.warning("a value of another node cannot be read: %s", error)
        return None


def _reads(keys: Sequence[str]) -> int:
    """Operations of a torch store: one for each key, or three for all of them."""
    return min(len(keys), 3)
