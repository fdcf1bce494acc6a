"""A carrier over etcd v3: what the nodes of a job agree on outlives the job and its torch store.

There is no watch: `listen` asks again and again. Keys are bound to a lease of this daemon, which is
renewed while it uses them; LEASE_S after the last use they go."""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from .carrier import CarrierError
from .gateway import NOT_FOUND, AnsweredError, Gateway

#: A job may be paused for so long.
LEASE_S = 30 * 86400
#: The lease is renewed at the first use after this part of its time.
RENEWED_AFTER = 0.1
#: Keys that are read at once: by default etcd takes 128 operations.
KEYS_AT_ONCE = 64
#: `listen` asks again after the first of these times, then after twice as much, up to the second.
PAUSES_S = (0.005, 0.5)

#: A call may last this much longer than its request, so that the request's own error, which says
#: more, comes first.
GRACE_S = 0.5

Json = dict[str, Any]


class Etcd:
    """A `Carrier`. `limit_s` is the time of a call."""

    def __init__(
        self, gateway: Gateway, prefix: str, *, limit_s: float = 5.0, lease_s: int = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Keys begin with `prefix`. `lease` is its number, or nothing."""
        self._gateway, self._prefix, self.limit_s = gateway, prefix, limit_s
        self._lease_s, self._clock = lease_s, clock
        self.lease = ""
        self._renewed_s = 0.0
        self._leasing = asyncio.Lock()

    async def set(self, key: str, value: bytes) -> None:
        async with self._limited():
            await self._write([], {key: value})

    async def add(self, key: str, amount: int) -> int:
        # Asked for again, it could be a second addition.
        return await self._add(key, amount, {}, again=False)

    async def ring(self, key: str, value: bytes, bell: str) -> int:
        return await self._add(bell, 1, {key: value}, again=True)

    async def _add(self, key: str, amount: int, values: Mapping[str, bytes], *, again: bool) -> int:
        """Sets the values in the same moment."""
        async with self._limited():
            while True:
                found = (await self._find([key]))[0]
                revision, before = (found.revision, found.value) if found else ("0", b"0")
                if not before.lstrip(b"-").isdigit():
                    raise CarrierError(f"{key} in etcd holds no number", retryable=False)
                unchanged = [{**self._key(key), "target": "MOD", "mod_revision": revision}]
                total = int(before) + amount
                puts = {key: b"%d" % total, **values}
                if (await self._write(unchanged, puts, again=again)).succeeded:
                    return total

    async def swap(self, key: str, value: bytes) -> bytes:
        absent = [{**self._key(key), "target": "CREATE", "create_revision": "0"}]
        async with self._limited():
            answer = await self._write(absent, {key: value})
        if answer.succeeded:
            return value
        if not (answer.found and answer.found[0]):
            raise CarrierError(f"etcd lost {key} while it answered")
        return answer.found[0].value

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        async with self._limited():
            if self.lease:
                await self._leased()
            return [found.value if found else None for found in await self._find(keys)]

    async def listen(
        self, bell: str, after: int, keys: Sequence[str], limit_s: float
    ) -> tuple[int, list[bytes | None]] | None:
        until, pause_s = self._clock() + limit_s, PAUSES_S[0]
        while (rung := _number((await self.get([bell]))[0])) <= after:
            if (left_s := until - self._clock()) <= 0:
                return None
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, PAUSES_S[1])
        return rung, await self.get(keys)

    # -- requests ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.limit_s + GRACE_S):
                yield
        except TimeoutError:
            raise CarrierError(
                f"{self._gateway} did not answer within {self.limit_s:g} s"
            ) from None

    def _key(self, key: str) -> Json:
        return {"key": _text((self._prefix + key).encode())}

    def _range(self, key: str) -> Json:
        return {"request_range": self._key(key)}

    async def _find(self, keys: Sequence[str]) -> list[_Found | None]:
        found: list[_Found | None] = []
        for first in range(0, len(keys), KEYS_AT_ONCE):
            some = keys[first : first + KEYS_AT_ONCE]
            answer = await self._txn({"success": [self._range(key) for key in some]}, True)
            found += answer.found
        if len(found) != len(keys):
            raise CarrierError(f"etcd answered with {len(found)} of {len(keys)} keys")
        return found

    async def _write(
        self, compare: list[Json], values: Mapping[str, bytes], *, again: bool = True
    ) -> _Answer:
        """Puts the values if the comparison holds, else reads what the keys hold."""
        for last in (False, True):
            lease = await self._leased()
            puts = [
                {**self._key(key), "value": _text(value), "lease": lease}
                for key, value in values.items()
            ]
            body = {
                "compare": compare,
                "success": [{"request_put": put} for put in puts],
                "failure": [self._range(key) for key in values],
            }
            try:
                return await self._txn(body, again)
            except AnsweredError as error:
                if last or error.number != NOT_FOUND:
                    raise
            if self.lease == lease:  # it has ended: etcd put nothing
                self.lease = ""
        raise AssertionError

    async def _txn(self, body: Json, again: bool) -> _Answer:
        answer = await self._gateway.ask("kv/txn", body, self.limit_s, again=again)
        try:
            ranges = [part.get("response_range", {}) for part in answer.get("responses", [])]
            kvs = [(part.get("kvs") or [None])[0] for part in ranges]
            return _Answer(answer.get("succeeded") is True, [kv and _found(kv) for kv in kvs])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CarrierError("an answer of etcd is not understood") from None

    async def _leased(self) -> str:
        """The lease of this daemon, granted or renewed if that is due."""
        async with self._leasing:
            now_s = self._clock()
            if self.lease and now_s - self._renewed_s > RENEWED_AFTER * self._lease_s:
                asked = {"ID": self.lease}
                renewed = await self._gateway.ask("lease/keepalive", asked, self.limit_s)
                self._renewed_s = now_s
                if "TTL" not in (renewed.get("result") or ()):  # a lease that has ended has 0 s
                    self.lease = ""
            if not self.lease:
                granted = await self._gateway.ask(
                    "lease/grant", {"TTL": str(self._lease_s)}, self.limit_s
                )
                self.lease, self._renewed_s = str(granted.get("ID", "")), now_s
            return self.lease


@dataclass(frozen=True, slots=True)
class _Found:
    value: bytes
    revision: str


@dataclass(frozen=True, slots=True)
class _Answer:
    succeeded: bool
    found: list[_Found | None]  # of each range


def _found(kv: Json) -> _Found:
    return _Found(b64decode(kv.get("value", ""), validate=True), str(kv["mod_revision"]))


def _number(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0


def _text(value: bytes) -> str:
    return b64encode(value).decode()
