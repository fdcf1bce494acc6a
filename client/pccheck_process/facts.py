"""What a snapshot notes beside the image: who the process was, how CRIU dumped it, and which files
it wrote. Plain JSON, in the index."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pccheck_process.procs import fingerprint
from pccheck_wire.errors import CheckpointFailedError, DamagedError

from .looking.look import Looked, OpenFile, files_of
from .looking.sockets import unix_sockets
from .procs.members import descendants
from .procs.procfs import Proc, parse_stat

_STANDARD = (0, 1, 2)


@dataclass(frozen=True)
class Facts:
    """Of one snapshot."""

    pid: int
    tree: dict[int, list[int]]  #: the threads of each process, also of those that have ended
    comm: str
    argv: list[str]
    uid: int
    gid: int
    groups: list[int]
    cwd: str
    standard: list[str]  #: what input, output and error of the process were
    options: list[str]  #: of CRIU
    pipes: list[str]  #: those whose other end was outside, as CRIU names them
    terminals: list[str]
    written: list[OpenFile]
    read: list[OpenFile]
    affinity: dict[int, list[int]]  #: the CPUs of each thread, which CRIU does not put back
    open_files: list[int]  #: the limits, soft and hard, which CRIU can only lower
    fingerprint: dict[str, object]
    sockets: list[str]  #: directories of its unix sockets: CRIU binds them again
    gpu: dict[str, object]  #: what gpu.devices notes; empty without
    wall_s: float
    library: dict[str, int] = field(default_factory=dict)  #: see library.newest_steps

    def plain(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: dict[str, object]) -> Facts:
        """Raises DamagedError."""
        try:
            made = cls(**plain)  # type: ignore[arg-type]
            if not _is_honest(made):
                raise ValueError("no snapshot has such options, paths or pids")
            tree = {int(pid): [*map(int, threads)] for pid, threads in made.tree.items()}
            written = [OpenFile(**one) for one in made.written]  # type: ignore[arg-type]
            read = [OpenFile(**one) for one in made.read]  # type: ignore[arg-type]
            affinity = {int(thread): cpus for thread, cpus in made.affinity.items()}
            found = {"tree": tree, "written": written, "read": read, "affinity": affinity}
            return cls(**{**vars(made), **found})
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedError(f"the facts of the process image cannot be read: {error}") from error


#: What `dump_options` makes, and how CRIU names pipes and terminals.
_OPTION = re.compile(
    r"--manage-cgroups=ignore|--shell-job|--file-locks|--tcp-established|--network-lock|skip"
    r"|--ghost-limit|\d{1,15}"
)
_OUTER = re.compile(r"pipe:\[\d+\]|tty\[[0-9a-f]+:[0-9a-f]+\]")


def _is_honest(made: Facts) -> bool:
    """CRIU gets nothing but what a snapshot can have noted: an image is its owner's word."""
    texts = [made.comm, made.cwd, *made.argv, *made.standard, *made.sockets]
    texts += [one["path"] for one in [*made.written, *made.read]]  # type: ignore[index]
    numbers = [made.pid, made.uid, made.gid, *made.groups, *map(int, made.tree), *made.open_files]
    return (
        all(_OPTION.fullmatch(one) for one in made.options)
        and all(_OUTER.fullmatch(one) for one in [*made.pipes, *made.terminals])
        and all("\0" not in one for one in texts)
        and all(type(one) is int for one in numbers[:3])
        and all(int(one) > 1 for one in made.tree)
        and len(made.standard) == len(_STANDARD) and len(made.open_files) == 2
        and isinstance(made.fingerprint, dict) and isinstance(made.gpu, dict)
        and all(type(step) is int for step in made.library.values())
    )  # fmt: skip


def of(
    looked: Looked, options: list[str], gpu: dict[str, object], library: dict[str, int]
) -> Facts:
    """While the process stands still: it may have other children and larger files by now than when
    it was looked at. Raises CheckpointFailedError when it has been killed meanwhile."""
    pid, tree = looked.pid, tree_now(looked.pid)
    files = files_of(tree)
    made = Facts(
        pid=pid,
        tree={one: _threads(one) for one in descendants(Proc(Path("/proc")), pid)},
        comm=looked.comm,
        argv=[*looked.argv],
        uid=looked.uid,
        gid=looked.gid,
        groups=[*looked.groups],
        cwd=_link(pid, "cwd"),
        standard=[_link(pid, f"fd/{fd}") for fd in _STANDARD],
        options=options,
        pipes=[*looked.outer_pipes],
        terminals=[*looked.outer_terminals],
        written=[one for one in files if one.writable],
        read=[one for one in files if not one.writable],
        affinity={one: _affinity(one) for pid in tree for one in _threads(pid)},
        open_files=[*resource.prlimit(pid, resource.RLIMIT_NOFILE)],
        fingerprint=fingerprint.fingerprint(tree),
        sockets=_socket_directories(tree),
        gpu=gpu,
        wall_s=time.time(),
        library=library,
    )
    _require_alive([pid, *tree])
    return made


def _require_alive(pids: Iterable[int]) -> None:
    """A process that is killed meanwhile loses its memory before its files: one that has memory has
    had all of its files until now."""
    for pid in pids:
        if not Proc(Path("/proc")).text(pid, "maps"):
            raise CheckpointFailedError(f"process {pid} has ended meanwhile")


def tree_now(pid: int) -> list[int]:
    """The process and its descendants, without those that have ended."""
    files = Proc(Path("/proc"))
    stats = {one: parse_stat(files.text(one, "stat")) for one in descendants(files, pid)}
    return [one for one, stat in stats.items() if stat is not None and not stat.ended]


def _socket_directories(tree: Iterable[int]) -> list[str]:
    """Some programs remove the directory of a socket at their end, as multiprocessing does."""
    files = Proc(Path("/proc"))
    found: set[str] = set()
    for pid in tree:
        listed = unix_sockets(files.text(pid, "net", "unix"))
        for fd in files.numbers(pid, "fd") or []:
            inode = (files.link(pid, "fd", fd) or "").removeprefix("socket:[").removesuffix("]")
            if inode.isdecimal() and int(inode) in listed:
                path = listed[int(inode)].path
                if path.startswith("/"):
                    found.add(str(Path(path).parent))
    return sorted(found)


def dump_options(looked: Looked) -> list[str]:
    """Of CRIU, both at dump and at restore. The process stays in the cgroup of who restores it."""
    options = ["--manage-cgroups=ignore"]
    if looked.shell_job:
        options.append("--shell-job")
    if looked.file_locks:
        options.append("--file-locks")
    if looked.tcp_established:
        options += ["--tcp-established", "--network-lock", "skip"]
    if looked.ghost_bytes:
        options += ["--ghost-limit", str(max(looked.ghost_bytes, 1 << 20))]
    return options


def _threads(pid: int) -> list[int]:
    try:
        return sorted(int(one.name) for one in Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return []


def _affinity(thread: int) -> list[int]:
    try:
        return sorted(os.sched_getaffinity(thread))
    except ProcessLookupError:
        return []


def _link(pid: int, name: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/{name}").readlink())
    except OSError:
        return ""
