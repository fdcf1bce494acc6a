"""What a look at a process finds: reasons to refuse a snapshot, notes, and open files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Refusal:
    """`what` is one sentence and names pid, path or port; `fix` is the way out, one clause."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} ({self.fix})"


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file that still has its name. `fd` is -1 for a file that is only mapped.

    `device` and `inode` tell whether the path still names the same file.
    """

    pid: int
    fd: int
    path: str
    size_bytes: int
    position: int
    flags: int  # of open()
    device: int
    inode: int

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def append(self) -> bool:
        return bool(self.flags & os.O_APPEND)

    @property
    def size_checked(self) -> bool:
        """CRIU refuses to restore when the size changed, except for files of mode "a"."""
        appended = os.O_APPEND | os.O_WRONLY
        return self.flags & appended != appended


@dataclass(frozen=True, slots=True)
class Attached:
    """A descriptor that is connected to a socket of pccheckd."""

    pid: int
    fd: int
    path: str  # of the daemon's socket


@dataclass(slots=True)
class Findings:
    """What the rules add to. A look owns its findings."""

    refusals: dict[str, Refusal] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    files: list[OpenFile] = field(default_factory=list)
    attached: list[Attached] = field(default_factory=list)
    outer_pipes: dict[str, None] = field(default_factory=dict)
    outer_terminals: dict[str, None] = field(default_factory=dict)
    # Bytes in the image, and sizes of files without a name; by device and inode.
    shared: dict[tuple[int, int], int] = field(default_factory=dict)
    ghosts: dict[tuple[int, int], int] = field(default_factory=dict)
    file_locks: bool = False
    tcp_established: bool = False
    gpu: bool = False

    def refuse(self, what: str, fix: str) -> None:
        """The same sentence counts once."""
        self.refusals.setdefault(what, Refusal(what, fix))

    def note(self, text: str) -> None:
        self.notes.setdefault(text)
