"""Needed before the first message: the protocol's version, and where the daemon listens. Also sizes
as text.

Imports neither `messages` nor `pathlib`, which take longer to load than a command that only asks
takes for its answer."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Self

PROTOCOL_VERSION = 18

#: Default place of the attach socket; `PCCHECK_SOCKET` and `--socket` override it.
DEFAULT_SOCKET = "/run/pccheck/attach.sock"
#: Has the sockets of private daemons where neither XDG_RUNTIME_DIR nor TMPDIR can.
TEMPORARY = "/tmp"

#: Variables that clients and the command line read, besides the daemon's options.
VARIABLES = (
    "PCCHECK_SOCKET", "PCCHECK_DAEMON_UID", "PCCHECK_STORAGE", "PCCHECK_JOB", "PCCHECK_CONFIG",
    "PCCHECK_CRIU",
)  # fmt: skip

START_HINT = "start it with: pccheckd --storage DIR"
#: The error of a daemon without any option; pccheckctl distinguishes it from errors in a file.
STORAGE_MISSING = "--storage is missing"
SAME_VERSION_HINT = "install the same version of pccheck on both sides"


class Closing:
    """Is closed at the end of a `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def arrives(source: int | socket.socket, limit_s: float) -> bool:
    """Whether something can be read there, or it has ended, within the limit. (`select.select()`
    takes no descriptor above 1023.)"""
    arrivals = select.poll()
    arrivals.register(source, select.POLLIN)
    return bool(arrivals.poll(1000 * max(0, limit_s)))


def socket_name(given: str | os.PathLike[str] | None) -> str:
    """Where the daemon listens: the argument, PCCHECK_SOCKET, the system's socket, the user's."""
    chosen = os.fspath(given) if given else os.environ.get("PCCHECK_SOCKET", "")
    if chosen:
        return chosen
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not runtime or os.path.exists(DEFAULT_SOCKET):  # noqa: PTH110
        return DEFAULT_SOCKET
    return f"{runtime}/pccheck/attach.sock"


_SIZES = ("KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(count: int) -> str:
    """Bytes with three significant digits: "0 B", "1.50 MiB", "12.3 GiB"."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in _SIZES:
        value /= 1024
        if value < 1023.5 or unit == _SIZES[-1]:
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some(names: Iterable[object]) -> str:
    """At most eight of them, and dots for the others: "0, 1, 2"."""
    shown = [*map(str, names)]
    return ", ".join([*shown[:8], "..."] if len(shown) > 8 else shown)


def with_options(text: str, options: Iterable[str]) -> str:
    """The text, in which every command of pccheckctl gets these options unless it begins with one:
    users paste the commands that they read."""
    if "pccheckctl " not in text:
        return text
    import re  # for messages only
    import shlex

    command = " ".join(["pccheckctl", *map(shlex.quote, options), ""])
    return re.sub(r"\bpccheckctl (?=[a-z])", lambda _: command, text)


def did_you_mean(words: list[str], known: list[str]) -> str:
    """For the first of these words that resembles a known one: "did you mean --slots? ", or ""."""
    found = (nearest(word.partition("=")[0], known) for word in words)
    return next((f"did you mean {near}? " for near in found if near), "")


def nearest(word: str, known: list[str]) -> str:
    """What was probably meant; "" when nothing is like it."""
    import difflib  # for people who mistyped only

    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.65)), "")
