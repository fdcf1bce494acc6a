"""Whom to ask: the daemon when it answers, a storage directory when one is named.

What an answer does not need is imported late: to start takes longer than to answer.
"""

from __future__ import annotations

import argparse
import contextlib
import os

from pccheck_wire import basics
from pccheck_wire.errors import DaemonUnreachableError, PccheckError, RefusedError

TYPE_CHECKING = False  # the import of `typing` takes a fifth of the time of `status`
if TYPE_CHECKING:
    from pathlib import Path

    from pccheck_store.directory import Storage
    from pccheck_store.observer import Observer
    from pccheck_store.reading.source import Source


NAMED_MAX = 4
#: For each private daemon that a hint may name: it may be stopped.
_PROBE_LIMIT_S = 1.0


def choose(arguments: argparse.Namespace, *, ask: bool = False) -> Observer | Storage:
    """The daemon, unless --storage is given; without a daemon the directory in PCCHECK_STORAGE.
    With `ask` the private daemon that serves the directory, if it answers.

    Raises DaemonUnreachableError, whose hint names all of them; RefusedError.
    """
    place = arguments.storage
    if not place:
        try:
            return _permitted(observe(arguments.socket), arguments)
        except DaemonUnreachableError as error:
            place = os.environ.get("PCCHECK_STORAGE")
            if not place:
                error.hint += "; or read the files without a daemon: pccheckctl --storage DIR ..."
                raise
    from pccheck_store.directory import Storage

    storage = Storage(place)
    if ask:
        with contextlib.suppress(PccheckError):  # it was killed, or is another version
            return _private(storage.path)
    return storage


def daemon(arguments: argparse.Namespace) -> Observer:
    """For what only a daemon knows; with --storage the private daemon that serves it. Raises
    NoStoreError, DaemonUnreachableError, RefusedError."""
    if arguments.socket or not arguments.storage:
        return _permitted(observe(arguments.socket), arguments)
    from pccheck_store.directory import Storage

    return _private(Storage(arguments.storage).path)


def _permitted(found: Observer, arguments: argparse.Namespace) -> Observer:
    """A daemon shows users their own jobs only: to filter these by another uid would say that
    the other user has none. Raises RefusedError."""
    uid = getattr(arguments, "uid", None)
    if uid is None or os.geteuid() in (0, uid):
        return found
    found.close()
    raise RefusedError(
        f"uid {os.geteuid()} may not see or change jobs of uid {uid}",
        hint="run the command as that user or as root",
    )


def observe(socket: str | None) -> Observer:
    """The daemon of this node. Raises DaemonUnreachableError, whose hint names private ones."""
    from pccheck_store.observer import Observer

    try:
        return Observer(socket)
    except DaemonUnreachableError as error:
        error.hint += _private_daemons()
        raise


def require_known(observer: Observer, job: str) -> None:
    """Raises NoCheckpointError for a job of which the daemon has nothing."""
    from pccheck_store.directory import none_of
    from pccheckctl.output.documents import part, rows, text

    known = observer.status()  # also what has no checkpoint yet
    if all(text(rank, "job") != job for rank in rows(known, "ranks")):
        raise none_of(job, text(part(known, "storage"), "path"))


def _private(place: Path) -> Observer:
    """Raises DaemonUnreachableError."""
    from pccheck_native import layout

    if layout.noted_socket(place) is not None:
        from pccheck_store.observer import private_daemon

        if (found := private_daemon(place)) is not None:
            return found
    raise DaemonUnreachableError(
        f"no private daemon of uid {os.geteuid()} serves {place}",
        hint="leave --storage out to ask the daemon of this node; --socket PATH names another",
    )


def _private_daemons() -> str:
    """How to ask the private daemons that run, for a hint. Only they know their directories."""
    import shlex

    from pccheck_store.observer import Observer

    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    roots = [f"{runtime}/pccheck"] * bool(runtime)
    for place in dict.fromkeys((os.environ.get("TMPDIR") or basics.TEMPORARY, basics.TEMPORARY)):
        roots.append(f"{place}/pccheck-{os.getuid()}")
    commands: list[str] = []
    for root in roots:
        with contextlib.suppress(OSError):
            for name in os.listdir(root):  # noqa: PTH208  (pathlib and glob take long to import)
                with contextlib.suppress(PccheckError):
                    socket = f"{root}/{name}/attach.sock"
                    with Observer(socket, timeout_s=_PROBE_LIMIT_S) as found:
                        place = shlex.quote(found.storage())
                        commands.append(f"pccheckctl --storage {place} status")
    if not commands:
        return ""
    named = ", ".join(sorted(set(commands))[:NAMED_MAX])
    return f"; or ask your private daemon: {named}{', ...' * (len(commands) > NAMED_MAX)}"


def files(arguments: argparse.Namespace) -> Source:
    """For commands that read checkpoints. The directory itself, also that of a running daemon,
    since that costs the daemon nothing; through the daemon where this user may not read it."""
    from pathlib import Path

    from pccheck_store.directory import Storage

    with choose(arguments) as chosen:
        if isinstance(chosen, Storage):
            return chosen
        place = Path(chosen.storage())
    if _may_read(place):
        storage = Storage(place)
        storage.served, storage.socket = True, arguments.socket
        return storage
    from pccheck_store.remote import DaemonSource

    return DaemonSource(arguments.socket, place)


def of_all_nodes(arguments: argparse.Namespace) -> Source | None:
    """For commands that write what all ranks have: the nodes of a job that has run on several. None
    for another job, where a directory or a sequence is named, or the nodes have nothing in common
    and this node has the rank."""
    from pccheck_store.documents import job_of
    from pccheckctl.output.documents import note, rows, texts

    if arguments.storage or arguments.sequence is not None:
        return None
    try:
        with observe(arguments.socket) as observer:
            job = job_of(observer.servers(), arguments.job, uid=arguments.uid)
            here = rows(observer.listing(arguments.job, uid=arguments.uid), "checkpoints")
    except DaemonUnreachableError:
        return None
    if job is None or not any(texts(node, "addresses") for node in rows(job, "nodes")):
        return None
    from pccheck_store.all_nodes import ClusterSource  # imports ssl

    found = ClusterSource(job, arguments.step, note)
    if arguments.rank is not None and any(one.get("rank") == arguments.rank for one in here):
        try:
            ClusterSource(job, arguments.step, lambda _: None).held(rank=arguments.rank)
        except PccheckError as error:
            note(f"read from this node only, since the nodes have no common step: {error.message}")
            return None
    return found


def _may_read(place: Path) -> bool:
    """The directory, and the directory of every user in it."""
    try:
        entries = [place, *(entry for entry in place.iterdir() if entry.is_dir())]
        return all(os.access(entry, os.R_OK | os.X_OK) for entry in entries)
    except OSError:
        return False
