"""The daemon's side of peer servers: one for each user with a job on several nodes. They start with
the first such job, and stay: the other nodes know their addresses."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import pwd
import socket
from pathlib import Path
from typing import NamedTuple, Protocol

from pccheck_native.nodes import peer
from pccheck_native.nodes.offers import ADDRESSES_MAX, PeerServer
from pccheck_wire.errors import PccheckError, RefusedError, UsageError
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads
from pccheckd.config import listen
from pccheckd.helper.keeper import Handed, HelperKind, Keeper
from pccheckd.storage.node import secret_of

from .grant import GrantRequest, ReadGrant, document, refusal
from .identity import NodeIdentity, PeerKey

BACKLOG = 256
NOBODY = 65534
REQUEST_BYTES_MAX = 2 * peer.ASK_BYTES_MAX


class Shares(Protocol):
    """What others may know and read of a user's jobs here: nodes/nodes.py. Raises PccheckError with
    the words for who asked."""

    async def allow(self, uid: int, ask: peer.Ask) -> ReadGrant: ...
    async def held(self, uid: int, job: str) -> bytes: ...  # `holding.Holding`, packed
    async def reached(self, uid: int, job: str) -> bytes: ...  # `peer.packed_reach`
    async def damaged(
        self, uid: int, ask: peer.Ask, sequence: int
    ) -> None: ...  # a read has found it damaged


class _Running(NamedTuple):
    """A user's server."""

    keeper: Keeper
    addresses: tuple[str, ...]
    fingerprint: bytes


class Peers:
    """Owned by the nodes of the daemon."""

    def __init__(self, where: str, storage: Path, shares: Shares) -> None:
        """`where`: --listen."""
        self._listen, self._storage, self._shares = where, storage, shares
        self._servers: dict[int, _Running] = {}
        self._troubles: dict[int, str] = {}  # why there is no server
        self._locks: dict[int, asyncio.Lock] = {}
        self._threads = Threads(1, "peers")
        self._identity: NodeIdentity | None = None

    async def server(self, uid: int, job: str) -> PeerServer | None:
        """Where others read a job of the user; None: nowhere, as with `start`."""
        running = await self.start(uid)
        if running is None:
            return None
        assert self._identity is not None
        return PeerServer(running.addresses, running.fingerprint, self._identity.token(uid, job))

    async def start(self, uid: int) -> _Running | None:
        """The user's server, which is started if there is none; None: without --listen, or if that
        fails."""
        if not self._listen:
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
            return self._servers[uid]

    def why_closed(self, uid: int) -> str:
        """Why the user has no server, in words that end a sentence; "": there is one, or there will
        be."""
        return self._troubles.get(uid, "") if self._listen else "it has no --listen"

    async def close(self) -> None:
        for running in self._servers.values():
            await running.keeper.close()
        self._threads.stop()

    async def _start(self, uid: int) -> _Running:
        """Raises PccheckError, OSError, RuntimeError."""
        self._threads.begin()
        made = await asyncio.wrap_future(self._threads.submit(self._key, uid))
        assert self._identity is not None
        sockets = _sockets(self._listen, self._identity.port(uid))
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
            LOG.warning("--listen %s is reached from this machine only", self._listen)
        return _Running(keeper, where, made.fingerprint)

    def _key(self, uid: int) -> PeerKey:
        self._identity = self._identity or NodeIdentity(secret_of(self._storage))
        return self._identity.key(uid)

    async def _answer(self, uid: int, request: bytes) -> bytes | Handed | None:
        try:
            asked = GrantRequest.of_packed(request)
            ask = peer.Ask.of_packed(asked.ask)
            assert self._identity is not None
            if not hmac.compare_digest(ask.token, self._identity.token(uid, ask.job)):
                raise RefusedError("the token is not the token of this job on this node")
            if ask.reach:
                return document(await self._shares.reached(uid, ask.job))
            if not ask.start:
                return document(await self._shares.held(uid, ask.job))
            if asked.damaged:
                await self._shares.damaged(uid, ask, asked.damaged)
                return refusal("")
            grant = await self._shares.allow(uid, ask)
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


def _sockets(where: str, usual: int) -> list[socket.socket]:
    """`usual`: the port, where none is named, unless it is taken. Raises UsageError, OSError."""
    made: list[socket.socket] = []
    try:
        for place in listen.parse(where):
            made += (_bound(address, place.port, usual) for address in listen.addresses(place))
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


def _bound(address: str, port: int, usual: int) -> socket.socket:
    """The first free port from `port` on; 0: the usual one, or else any."""
    is_v6 = ipaddress.ip_address(address).version == 6
    made = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM)
    # Connections of the earlier daemon may still be closing on this port.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tried = range(port, port + listen.PORTS) if port else (usual, 0)
    for number in tried:
        try:
            made.bind((address, number))
            made.listen(BACKLOG)  # another socket may have bound the port, too
            return made
        except OSError as error:
            if error.errno == errno.EADDRINUSE and number != tried[-1]:
                continue
            made.close()
            where = peer.address(address, port)
            raise OSError(error.errno, f"--listen {where}: {error.strerror}") from error
    raise AssertionError("no port was tried")
