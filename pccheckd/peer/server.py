"""The daemon's side of peer servers: one for each user with a job on several nodes. They start with
the first such job, and stay: the other nodes know their addresses."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import pwd
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pccheck_native.nodes import peer
from pccheck_native.nodes.offers import ADDRESSES_MAX
from pccheck_wire.errors import PccheckError, UsageError
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads
from pccheckd.config import listen
from pccheckd.helper.keeper import Handed, HelperKind, Keeper

from . import identity
from .grant import GrantRequest, ReadGrant, refusal

BACKLOG = 256
NOBODY = 65534
REQUEST_BYTES_MAX = 2 * peer.ASK_BYTES_MAX


class Endpoint(NamedTuple):
    """Of a user's server."""

    addresses: tuple[str, ...]
    fingerprint: bytes


#: What a question may read; raises PccheckError with the words for who asked.
Allow = Callable[[int, peer.Ask], Awaitable[ReadGrant]]
#: A part was found damaged when it was read.
Damaged = Callable[[int, peer.Ask, int], Awaitable[None]]


class Peers:
    """Owned by the nodes of the daemon."""

    def __init__(self, where: str, allow: Allow, damaged: Damaged) -> None:
        self._where, self._allow, self._damaged = where, allow, damaged
        self._servers: dict[int, tuple[Keeper, Endpoint]] = {}
        self._troubles: dict[int, str] = {}  # why there is no server
        self._locks: dict[int, asyncio.Lock] = {}
        self._threads = Threads(1, "peers")

    async def endpoint(self, uid: int) -> Endpoint | None:
        """Of the user's server, which is started; None: without --listen, or if that fails."""
        if not self._where:
            return None
        async with self._locks.setdefault(uid, asyncio.Lock()):
            if uid not in self._servers:
                try:
                    self._servers[uid] = await self._start(uid)
                except (PccheckError, OSError, RuntimeError) as error:
                    LOG.warning(
                        "uid %d: other nodes cannot read its checkpoints from here: %s", uid, error
                    )
                    self._troubles[uid] = str(error)
                    return None
                self._troubles.pop(uid, None)
            return self._servers[uid][1]

    def why_closed(self, uid: int) -> str:
        """Why the user has no server, in words that end a sentence; "": there is one, or there will
        be."""
        return self._troubles.get(uid, "") if self._where else "it has no --listen"

    async def close(self) -> None:
        for keeper, _ in self._servers.values():
            await keeper.close()
        self._threads.stop()

    async def _start(self, uid: int) -> tuple[Keeper, Endpoint]:
        """Raises UsageError, OSError, RuntimeError."""
        self._threads.begin()
        made = await asyncio.wrap_future(self._threads.submit(identity.make))
        sockets = _sockets(self._where)
        kind = HelperKind(
            "pccheckd.peer.program", "sends checkpoints to other nodes",
            "checkpoints of this node do not need it", REQUEST_BYTES_MAX, secret=made.pem,
            takes_files=True,
        )  # fmt: skip
        keeper = Keeper(kind, uid, _gid(uid), sockets, self._threads, self._answer)
        keeper.start()
        where = tuple(peer.address(*one.getsockname()[:2]) for one in sockets)
        LOG.info("uid %d: other nodes read its checkpoints at %s", uid, ", ".join(where))
        if all(listen.is_loopback(one.getsockname()[0]) for one in sockets):
            LOG.warning("--listen %s is reached from this machine only", self._where)
        return keeper, Endpoint(where, made.fingerprint)

    async def _answer(self, uid: int, request: bytes) -> bytes | Handed | None:
        try:
            asked = GrantRequest.of_packed(request)
            ask = peer.Ask.of_packed(asked.ask)
            if asked.damaged:
                await self._damaged(uid, ask, asked.damaged)
                return refusal("")
            grant = await self._allow(uid, ask)
        except PccheckError as error:
            return refusal(error.message)
        except ValueError as error:
            return refusal(str(error))
        except Exception:  # the edge of this question
            LOG.exception("uid %d: the question of a peer server cannot be answered", uid)
            return refusal("an internal error of the daemon")
        return Handed(grant.packed(), grant.descriptor)


def _gid(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return NOBODY


def _sockets(where: str) -> list[socket.socket]:
    """Raises UsageError, OSError."""
    made: list[socket.socket] = []
    try:
        for place in listen.parse(where):
            made += (_bound(address, place.port) for address in listen.addresses(place))
        if len(made) > ADDRESSES_MAX:
            raise UsageError(
                f"--listen {where} has {len(made)} addresses, more than {ADDRESSES_MAX}",
                hint="name one interface between the nodes, or one address",
            )
    except BaseException:
        for one in made:
            one.close()
        raise
    return made


def _bound(address: str, port: int) -> socket.socket:
    """The first free port from `port` on; 0: any."""
    is_v6 = ipaddress.ip_address(address).version == 6
    made = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM)
    last = port + listen.PORTS - 1 if port else 0
    for number in range(port, last + 1):
        try:
            made.bind((address, number))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and number < last:
                continue
            made.close()
            where = peer.address(address, port)
            raise OSError(error.errno, f"--listen {where}: {error.strerror}") from error
        made.listen(BACKLOG)
        break
    return made
