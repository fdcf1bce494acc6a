"""Connections that cannot be accepted, or have ended: what the log and users read."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from typing import Any, cast

import pytest

from pccheckd.base.errors import shortage, translated
from pccheckd.base.logs import LOG
from pccheckd.control import attach
from pccheckd.control.handlers import Handlers
from pccheckd.jobs.sessions import Sessions


async def test_a_lack_of_descriptors_is_told_once_with_its_fix(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOG, "propagate", True)
    monkeypatch.setattr(attach, "ACCEPT_RETRY_S", 0)
    caplog.set_level(logging.INFO, LOG.name)
    answers: list[int | None] = [errno.EMFILE] * 3 + [None] + [errno.EMFILE] * 2 + [errno.ENFILE]
    loop, accepted = asyncio.get_running_loop(), asyncio.Event()

    async def accept(_: object) -> tuple[socket.socket, None]:
        if not answers:
            accepted.set()
            await asyncio.Event().wait()
        error = answers.pop(0)
        if error is not None:
            raise OSError(error, os.strerror(error))
        return socket.socketpair()[0], None

    monkeypatch.setattr(loop, "sock_accept", accept)
    nothing: Any = None
    with socket.socket() as listener:
        async with attach.AttachServer(listener, cast(Sessions, nothing), cast(Handlers, nothing)):
            await accepted.wait()
    told = [record.message for record in caplog.records]
    few = "no process can connect: Too many open files (raise pccheckd's limit: ulimit -n, or "
    few += "LimitNOFILE= of the service)"
    assert told[:2] == [few, few] and len(told) == 3
    assert "sysctl fs.file-max" in told[2]


def test_a_refused_thread_names_both_limits() -> None:
    """glibc answers EAGAIN also where the stack of the thread cannot be mapped."""
    for error in (OSError(errno.EAGAIN, "again"), RuntimeError("can't start new thread")):
        assert "of processes or of address space" in shortage(error)


def test_a_call_of_the_core_for_an_ended_session_is_told_in_words() -> None:
    error = OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    told = translated(error, "the volume of job/0").message
    assert told == "the session has ended, or the daemon is stopping"
