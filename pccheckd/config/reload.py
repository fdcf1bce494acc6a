"""SIGHUP: applies the options that may change while running, and logs those that need a restart.
A file with an error changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import fields

from pccheck_wire.errors import PccheckError
from pccheckd.base import logs
from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.base.notify import Notifier
from pccheckd.base.threads import Threads

from .options import OPTIONS, Config, Option
from .sources import Sources


class Reloader(Background):
    """Owns the changes of the shared `Config`. One reload at a time; signals that arrive meanwhile
    cause one more."""

    def __init__(self, config: Config, sources: Sources, notifier: Notifier) -> None:
        self._config = config
        self._sources = sources
        self._notifier = notifier
        self._thread = Threads(1, "reload")
        self._after: list[Callable[[], None]] = []
        self._wanted = asyncio.Event()

    def then(self, *calls: Callable[[], None]) -> None:
        """Calls these after every change, for parts that do not read the `Config` each time."""
        self._after += calls

    def request(self) -> None:
        self._wanted.set()

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._notifier.reloading()
            try:
                await self._reload()
            finally:
                self._notifier.send("READY=1")

    async def _reload(self) -> None:
        before = {one.name: getattr(self._config, one.name) for one in fields(Config)}
        try:
            # In a thread that no exit waits for: the file may lie on a disk that hangs.
            apply(self._config, await asyncio.wrap_future(self._thread.submit(self._sources.load)))
        except Exception as error:  # the edge of this reload
            for name, value in before.items():
                setattr(self._config, name, value)
            unexpected = not isinstance(error, PccheckError)
            LOG.error(
                "reload failed, no option changed: %s", error, exc_info=unexpected,
                extra={"always": True},
            )  # fmt: skip
            return
        for call in self._after:
            try:
                call()
            except Exception:  # the others are called anyway
                LOG.exception("reload: a part of the daemon could not apply it: %r", call)


def apply(config: Config, fresh: Config) -> None:
    """Copies live options from `fresh` to `config`; others wait for a restart."""
    changed, pending = [], {}
    for option in OPTIONS:
        before, after = getattr(config, option.field), getattr(fresh, option.field)
        if before == after:
            continue
        if option.live:
            setattr(config, option.field, after)
            changed.append(_change(option, before, after))
        else:
            pending[option.field] = after
    config.pending = pending
    config.file = fresh.file
    config.origins = {
        name: config.origins.get(name, origin) if name in pending else origin
        for name, origin in fresh.origins.items()
    }
    logs.set_up(config.log_format, config.log_level)
    if pending:
        LOG.warning(
            "reload: these options need a restart: %s",
            ", ".join(
                _change(option, getattr(config, option.field), pending[option.field])
                for option in OPTIONS
                if option.field in pending
            ),
        )
    # The sender of the signal (systemd, a test) waits for this line.
    LOG.info("reload: %s", ", ".join(changed) or "nothing changed", extra={"always": True})


def _change(option: Option, before: object, after: object) -> str:
    when = f", {option.when}" if option.when else ""
    return f"{option.key} {option.show(before)} -> {option.show(after)}{when}"


def on_hangup(reload: Callable[[], None], stop: Callable[[], None]) -> None:
    """SIGHUP reloads. If it reports that the daemon's terminal has gone, it stops the daemon, as
    usual, unless it was ignored (nohup)."""
    had_terminal = _has_terminal()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def arrived() -> None:
        if not had_terminal or _has_terminal():
            reload()
        elif not ignored:
            stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, arrived)


def _has_terminal() -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        return True
    return False
