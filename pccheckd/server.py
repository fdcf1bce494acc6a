"""Control over ZeroMQ: one ROUTER per uid on an endpoint that cannot be guessed and answers to that
uid only. Only frames pass here; what they mean is decided behind `handle`, so that a front process
per uid can be put in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq
import zmq.asyncio

from pccheck_wire.codec import REQUEST_BYTES_MAX

from .logs import LOG

HIGH_WATER_MARK = 256
HANDSHAKE_MS = 5000
REQUESTS_IN_PROGRESS_MAX = 256
FRAMES = 2  # a DEALER's identity, one message

#: The answer to a request of a uid, None for no answer. Never raises.
Handle = Callable[[int, bytes], Awaitable[bytes | None]]


class ControlServer:
    """Owns the directory of endpoints and the routers in it."""

    def __init__(self, socket_path: Path, handle: Handle) -> None:
        """`socket_path` is the attach socket's; its lock is held."""
        self._handle = handle
        self._directory = socket_path.parent / f"ctl-{secrets.token_hex(16)}"
        #: Names our directory, so that the next start removes it if we are killed.
        self._note = socket_path.with_name(socket_path.name + ".ctl")
        _remove_noted(self._note)
        self._context: zmq.asyncio.Context | None = None
        self._routers: dict[int, asyncio.Task[None]] = {}

    async def endpoint(self, uid: int) -> str:
        """The address for a uid's requests; its router runs from the first call on."""
        path = self._directory / f"{uid}.sock"
        if uid not in self._routers:
            self._routers[uid] = asyncio.get_running_loop().create_task(
                self._serve(uid, self._bind(uid, path))
            )
        return f"ipc://{path}"

    async def close(self) -> None:
        """Ends the routers; requests in progress are dropped."""
        for task in self._routers.values():
            task.cancel()
        await asyncio.gather(*self._routers.values(), return_exceptions=True)
        self._routers.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._note.unlink(missing_ok=True)

    def _bind(self, uid: int, path: Path) -> zmq.asyncio.Socket:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            _write_note(self._note, self._directory.name)
            self._directory.mkdir(mode=0o711)
            self._directory.chmod(0o711)
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        router.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPC_FILTER_UID, uid)
        router.bind(f"ipc://{path}")
        if os.geteuid() == 0:
            os.chown(path, uid, -1)
            path.chmod(0o600)
        else:  # the filter is what keeps others out
            path.chmod(0o600 if uid == os.geteuid() else 0o666)
        return router

    async def _serve(self, uid: int, router: zmq.asyncio.Socket) -> None:
        room = asyncio.Semaphore(REQUESTS_IN_PROGRESS_MAX)
        work: set[asyncio.Task[None]] = set()
        try:
            while True:
                frames = await router.recv_multipart()
                if len(frames) != FRAMES:
                    continue
                await room.acquire()
                task = asyncio.create_task(self._answer(uid, router, frames[0], frames[1]))
                work.add(task)
                task.add_done_callback(work.discard)
                task.add_done_callback(lambda _: room.release())
        finally:
            for task in work:
                task.cancel()
            router.close()

    async def _answer(
        self, uid: int, router: zmq.asyncio.Socket, identity: bytes, request: bytes
    ) -> None:
        answer = await self._handle(uid, request)
        if answer is None:
            return
        with contextlib.suppress(zmq.Again):  # a peer that does not read loses its answers
            try:
                await router.send_multipart([identity, answer], flags=zmq.DONTWAIT)
            except zmq.ZMQError as error:
                LOG.warning("no answer to uid %d: %s", uid, error)


def _write_note(note: Path, text: str) -> None:
    """Follows no link: the directory may be one that others write to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(note, flags, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _remove_noted(note: Path) -> None:
    """Removes the endpoints of a daemon that was killed."""
    with contextlib.suppress(OSError):
        name = note.read_text()
        if re.fullmatch(r"ctl-[0-9a-f]{32}", name):
            shutil.rmtree(note.with_name(name), ignore_errors=True)
        note.unlink()
