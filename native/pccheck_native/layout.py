"""Names and places in a storage directory.

    <storage>/.pccheckd.lock                          the daemon's flock
    <storage>/.pccheckd.socket                        where a private daemon listens
    <storage>/.pccheckd.starting                      its clients' flock, to find or start it
    <storage>/.pccheckd.node                          the id of the node that the directory is of
    <storage>/.pccheckd.secret                        its keys and tokens follow from it
    <storage>/<uid>/<job>/rank-<rank>.<generation>.pcc   a volume
    <storage>/<uid>/<job>/rank-....pcc.<anything>.tmp    one that is being made
    <storage>/<uid>/<job>/start-<id>.json             the record of a start of several nodes
    <storage>/<uid>/<job>/servers.json                where these nodes read from each other

A volume whose state outgrew its slots is followed by one of the next generation. Names are built
from checked parts only, and links are never followed, so that nothing here leaves the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

LOCK_NAME = ".pccheckd.lock"
SOCKET_NAME = ".pccheckd.socket"
NODE_NAME = ".pccheckd.node"
SECRET_NAME = ".pccheckd.secret"
_PATH_BYTES_MAX = 4096
#: An attribute of the directory: its own number, and the identity that it has instead.
_REPLACES = "user.pccheck.replaces"
UID_MAX = 2**32 - 2  # for the kernel (uid_t)-1 means "no user"
RANK_MAX = 65535
GENERATION_MAX = 10**9 - 1
_MIB = 1 << 20

#: A job is a directory name: these characters only, not starting with a dot. As on the wire.
_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_NUMBER = r"(0|[1-9][0-9]{0,9})"
_UID = re.compile(_NUMBER)
_VOLUME = re.compile(rf"rank-{_NUMBER}\.{_NUMBER}\.pcc")
_START = re.compile(r"start-([0-9a-f]{32})\.json(\.tmp)?")
_SERVERS = "servers.json"
_LEFT = re.compile(r"(start-[0-9a-f]{32}|servers)\.json(\.tmp)?")
_TEMPORARY = re.compile(r"\.?((rank|start)-.*|servers\.json)\.tmp", re.DOTALL)


class VolumeFile(NamedTuple):
    """A volume by its name; says nothing about what is in the file. Ordered by its key."""

    uid: int
    job: str
    rank: int
    generation: int
    path: Path


def check_job(job: str) -> str:
    """Returns `job`; ValueError unless it can be a directory name on every file system."""
    if _JOB.fullmatch(job) is None:
        raise ValueError(
            f"job name {job!r}: 1 to 128 of A-Z a-z 0-9 . _ -, not starting with . or -"
        )
    return job


def _check_number(what: str, value: int, highest: int) -> int:
    if not 0 <= value <= highest:
        raise ValueError(f"{what} {value} is not within 0..{highest}")
    return value


def socket_note(storage: Path) -> Path:
    """The file that names the socket of the directory's private daemon."""
    return storage / SOCKET_NAME


def note_socket(storage: Path, socket: Path) -> None:
    """Writes into the directory where its daemon listens. Needs the daemon's lock. Raises
    OSError."""
    store(socket_note(storage), os.fsencode(socket.absolute()), durable=False)


def noted_socket(storage: Path) -> Path | None:
    """Where the daemon of a directory listens, or did when it was killed; None where there is no
    such note, or note or socket belong to another user."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(socket_note(storage), flags), "rb") as file:
            mine = os.fstat(file.fileno()).st_uid == os.geteuid()
            named = Path(os.fsdecode(file.read(_PATH_BYTES_MAX)))
        found = named.lstat()
    except (OSError, ValueError):
        return None
    ours = mine and stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
    return named if ours and named.is_absolute() else None


def identity(storage: Path) -> str:
    """Differs for another directory that is mounted in its place. Stable until the next boot, which
    ends every training process. If a running daemon has continued in an empty directory in place of
    the old one, the new directory has the identity of the old one. Raises OSError."""
    own = number(storage)
    with contextlib.suppress(OSError, ValueError):
        itself, replaced = os.getxattr(storage, _REPLACES).decode("ascii").split()
        if itself == own:  # else it is a copy
            return replaced
    return own


def replace(storage: Path, replaced: str) -> None:
    """Gives the directory the identity of another one."""
    with contextlib.suppress(OSError):  # a file system without attributes
        os.setxattr(storage, _REPLACES, f"{number(storage)} {replaced}".encode())


def number(storage: Path) -> str:
    """Which directory it is, whatever its name. Raises OSError."""
    found = os.stat(storage)  # noqa: PTH116
    return f"{found.st_dev}:{found.st_ino}"


def lock_path(storage: Path) -> Path:
    """The file whose flock makes a daemon the only one on this storage."""
    return storage / LOCK_NAME


def volume_path(storage: Path, uid: int, job: str, rank: int, generation: int = 0) -> Path:
    """The file of one (uid, job, rank) and generation."""
    _check_number("rank", rank, RANK_MAX)
    _check_number("generation", generation, GENERATION_MAX)
    owner = str(_check_number("uid", uid, UID_MAX))
    return storage / owner / check_job(job) / f"rank-{rank}.{generation}.pcc"


def start_path(storage: Path, uid: int, job: str, start: bytes) -> Path:
    """The record of a start of several nodes (native/FORMAT.md, Promise)."""
    return volume_path(storage, uid, job, 0).with_name(f"start-{start.hex()}.json")


def servers_path(storage: Path, uid: int, job: str) -> Path:
    """Where the nodes of a job read from each other (pccheckd/nodes/records.py)."""
    return volume_path(storage, uid, job, 0).with_name(_SERVERS)


def jobs_with_servers(storage: Path) -> list[tuple[int, str]]:
    """Uid and name of each job with such a file."""
    found = []
    for path in storage.glob(f"*/*/{_SERVERS}"):
        uid, job = path.parts[-3:-1]
        is_linked = any(one.is_symlink() for one in (path, *path.parents[:2]))
        if _UID.fullmatch(uid) and int(uid) <= UID_MAX and _JOB.fullmatch(job) and not is_linked:
            found.append((int(uid), job))
    return sorted(found)


def start_records(directory: Path) -> dict[bytes, Path]:
    """The records of starts in the directory of a job, by the ids of the starts."""
    with contextlib.suppress(FileNotFoundError):
        names = sorted(entry.name for entry in _entries(directory))
        found = (match for name in names if (match := _START.fullmatch(name)) and not match[2])
        return {bytes.fromhex(match[1]): directory / match[0] for match in found}
    return {}


def left_records(directory: Path) -> list[Path]:
    """The files of a job without a volume there: records of starts, the servers, and unfinished
    ones. None while the job has a volume there."""
    names = sorted(entry.name for entry in _entries(directory))
    if any(_VOLUME.fullmatch(name) for name in names):
        return []
    return [directory / name for name in names if _LEFT.fullmatch(name)]


def parse_volume_path(storage: Path, path: Path) -> VolumeFile:
    """The inverse of `volume_path`; ValueError for any other path, also one that is not under
    `storage` or takes a detour."""
    try:
        parts = path.relative_to(storage).parts
    except ValueError:
        parts = ()
    found = _parse(storage, *parts) if len(parts) == 3 else None
    if found is None:
        raise ValueError(f"{os.fspath(path)!r} is not the path of a volume in {storage}")
    return found


def _parse(storage: Path, uid: str, job: str, name: str) -> VolumeFile | None:
    match = _VOLUME.fullmatch(name)
    if _UID.fullmatch(uid) is None or _JOB.fullmatch(job) is None or match is None:
        return None
    rank, generation = int(match[1]), int(match[2])
    if int(uid) > UID_MAX or rank > RANK_MAX or generation > GENERATION_MAX:
        return None
    return VolumeFile(int(uid), job, rank, generation, storage / uid / job / name)


#: What to do about a MisplacedError, by its code.
MISPLACED_HINTS = {
    "LINK": "move the files back, or mount their disk there: mount --bind",
    "WRONG_TYPE": "move it away; if it took the place of a directory or a volume, put that back",
}


class MisplacedError(OSError):
    """Something else where the directory of a user or of a job, or a volume, should be."""

    def __init__(self, found: os.DirEntry[str], wanted: str) -> None:
        linked = found.is_symlink()
        self.code_name = "LINK" if linked else "WRONG_TYPE"
        fault = "a symbolic link, and no such link is followed" if linked else f"not a {wanted}"
        self.message = f"{found.path} is {fault}"
        super().__init__(errno.ELOOP if linked else errno.EINVAL, self.message)


class HiddenPlace(NamedTuple):
    """A place that may have volumes, and that cannot be listed. Rank and generation are 0, and the
    job is "", if the place does not name them."""

    file: VolumeFile
    error: OSError  # a MisplacedError, or what the disk answered; it names the place


def _entries(parent: Path, only: str | None = None) -> list[os.DirEntry[str]]:
    with os.scandir(parent) as entries:
        return [entry for entry in entries if only in (None, entry.name)]


def _below(
    at: VolumeFile, found: os.DirEntry[str], hidden: list[HiddenPlace], only: str | None = None
) -> list[os.DirEntry[str]]:
    """What is in the directory of a user or of a job; else why it cannot be listed is added to
    `hidden`."""
    try:
        if not found.is_dir(follow_symlinks=False):
            raise MisplacedError(found, "directory")
        return _entries(at.path, only)
    except FileNotFoundError:  # a job that was dropped while we looked
        pass
    except OSError as error:
        hidden.append(HiddenPlace(at, error))
    return []


def _look(
    storage: Path, uid: int | None, job: str | None
) -> tuple[list[VolumeFile], list[Path], list[HiddenPlace]]:
    """Volumes, temporary files, and what may hide others; all in order. One user or job hides no
    other. Raises OSError when the storage directory cannot be listed."""
    if not storage.is_dir():
        raise FileNotFoundError(f"no storage directory {storage}")
    files, temporary, hidden = list[VolumeFile](), list[Path](), list[HiddenPlace]()
    for owner in _entries(storage, None if uid is None else str(uid)):
        if _UID.fullmatch(owner.name) is None:
            continue
        of_user = VolumeFile(int(owner.name), job or "", 0, 0, Path(owner.path))
        for run in _below(of_user, owner, hidden, job):
            if _JOB.fullmatch(run.name) is None:
                continue
            of_job = of_user._replace(job=run.name, path=Path(run.path))
            for entry in _below(of_job, run, hidden):
                file = _parse(storage, owner.name, run.name, entry.name)
                regular = entry.is_file(follow_symlinks=False)
                if file is not None and regular:
                    files.append(file)
                elif file is not None:
                    hidden.append(HiddenPlace(file, MisplacedError(entry, "regular file")))
                elif regular and _TEMPORARY.fullmatch(entry.name):
                    temporary.append(Path(entry.path))
    return sorted(files), sorted(temporary), sorted(hidden, key=lambda one: one.file)


def list_hidden(
    storage: Path, *, uid: int | None = None, job: str | None = None
) -> list[HiddenPlace]:
    """Why `files_in_place` may lack volumes: one was moved to another disk, a directory cannot be
    read."""
    return _look(storage, uid, job)[2]


def list_volumes(
    storage: Path, *, uid: int | None = None, job: str | None = None, rank: int | None = None
) -> list[VolumeFile]:
    """Every volume by name, ordered by (uid, job, rank, generation); None means any.

    Raises FileNotFoundError without a storage directory, PermissionError for another user's. For
    one user's job also raises why volumes may be hidden: the job may have checkpoints, and must not
    begin at step 0.
    """
    if None not in (uid, job):
        for one in list_hidden(storage, uid=uid, job=job):
            raise one.error
    return files_in_place(storage, uid=uid, job=job, rank=rank)


def files_in_place(
    storage: Path, *, uid: int | None = None, job: str | None = None, rank: int | None = None
) -> list[VolumeFile]:
    """The same without what is hidden, for reports, in which one job hides no other."""
    return [file for file in _look(storage, uid, job)[0] if rank in (None, file.rank)]


def list_temporary(storage: Path) -> list[Path]:
    """Files of volumes, or records of starts, whose making was interrupted, unless a daemon runs
    and makes them now."""
    return _look(storage, None, None)[1]


def mark(path: Path) -> tuple[int, ...]:
    """Differs when the file, its permissions or its content have changed; () without a file."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino, found.st_ctime_ns
    return ()


def next_generation(storage: Path, uid: int, job: str, rank: int) -> int:
    """One above the newest generation of this rank here; 0 without a volume."""
    files = list_volumes(storage, uid=uid, job=check_job(job), rank=rank)
    return files[-1].generation + 1 if files else 0


def capacity_for(payload_bytes: int) -> int:
    """The size of a slot in a new volume: the payload and a little growth."""
    rounded = -(-payload_bytes // _MIB) * _MIB
    return rounded + rounded // 32 + _MIB


def make_directories(path: Path) -> None:
    """Makes the directories of a volume, 0700, and makes their names durable: a volume whose
    directory is lost in a crash is lost with it."""
    storage = path.parents[2]
    for directory in (path.parents[1], path.parent):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            if directory.is_symlink() or not directory.is_dir():
                raise
    for directory in (path.parent, path.parents[1], storage):
        sync(directory)


def store(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces a small file, or makes it, 0600. If it is durable, a crash leaves what was there
    before, or all of `content`. One process at a time. Raises OSError."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(fresh, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    fresh.replace(path)
    if durable:
        sync(path.parent)


def load(path: Path, limit_bytes: int) -> bytes:
    """What `store` wrote. Raises OSError; ValueError for more than the limit, or no regular
    file."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("it is no regular file")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags), "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ValueError(f"it is larger than {limit_bytes} bytes")
    return content


def sync(place: Path) -> None:
    """Makes the bytes of a file durable, or the names in a directory."""
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
