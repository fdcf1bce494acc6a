"""Why a checkpoint ended: one table of reasons, for the daemon's log and the trainer's handle.

The session page holds cause, stage, error code and argument (`struct pcc_reason`), and both sides
make the same sentence of them. What needs more words (a path, another rank's failure) has
`asks`: the daemon answers `Describe` with the whole of it."""

from __future__ import annotations

import enum
import errno
from typing import NamedTuple

from .basics import SAME_VERSION_HINT


class Cause(enum.IntEnum):
    """A number of 16 bits. The first three are the native core's (`enum pcc_cause`); those from
    CLIENT on never stand in the page: the client itself ended the checkpoint."""

    CODE = 0  # stage and code say why
    REPLACED = 1
    OTHER_RANK = 2  # the core knows no more of the group
    DESCRIBED = 3  # the words are the daemon's
    REPLACED_ON_ALL = 4
    ENDED_BEFORE = 5
    STOPPING = 6
    BAD_REQUEST = 7
    REQUEST_LOST = 8
    FENCED = 9
    NO_ROOM = 10
    QUEUE_FULL = 11
    SLOTS_BUSY = 12
    SLOTS_LATE = 13
    SLOTS_PROTECTED = 14
    SLOTS_BROKEN = 15
    UNLIKE = 16
    RANK_BUSY = 17
    RANK_LACKS = 18
    RANK_ENDED = 19
    RANK_NEVER = 20
    RANK_DROPPED = 21
    INTERNAL = 22

    CLIENT = 1 << 15
    INTERRUPTED = CLIENT + 1
    RUN_ENDED = CLIENT + 2
    OVERDUE = CLIENT + 3
    STREAM_OVERDUE = CLIENT + 4
    SOURCE_GONE = CLIENT + 5
    NOT_READ = CLIENT + 6
    DAEMON_ENDED = CLIENT + 7
    FORKED = CLIENT + 8
    UNKNOWN = CLIENT + 9
    SAVED = CLIENT + 10
    LOST = CLIENT + 11


class Why(NamedTuple):
    """Why a checkpoint ended so, as the page has it; `words` and `hint` are of DESCRIBED."""

    cause: int = Cause.CODE
    argument: float = 0  # of the cause: a rank, a limit, a sequence
    stage: str = ""  # of a failure: begin, copy, base, write, flush, publish
    code: str = ""  # its name: "EIO", "NO_SLOT"
    number: int = 0  # of the code: negative, as the page has it
    words: str = ""
    hint: str = ""


def in_words(words: str, hint: str = "", code: str = "") -> Why:
    """A reason that has no cause of its own. The page has no room for it."""
    return Why(Cause.DESCRIBED, code=code, words=words, hint=hint)


class Sentence(NamedTuple):
    reason: str  # "" when it is not known here
    hint: str
    asks: bool  # the daemon has more words

    def __str__(self) -> str:
        return f"{self.reason} ({self.hint})" if self.hint else self.reason


NONE_KEEPS = "so no rank keeps it"
_UNKNOWN = "the connection to pccheckd ended before it reported how the checkpoint ended"
_STORAGE_GONE = (
    "nothing to do: a later checkpoint goes into a new volume. Only if the storage directory "
    "itself was removed, create it again. To remove a job's checkpoints use: pccheckctl drop"
)
CHECK_DISK = "check the disk and the kernel's log"

#: Reason and hint. `{n}` is the argument, `{high}` and `{low}` are its halves of 32 bits.
_BY_CAUSE = {
    Cause.REPLACED: ("a newer checkpoint became durable first", ""),
    Cause.REPLACED_ON_ALL: ("a newer checkpoint became global first", ""),
    Cause.OTHER_RANK: ("another rank did not save this checkpoint", ""),
    Cause.ENDED_BEFORE: (
        "the trainer ended, or pccheckd stopped, before the checkpoint began", ""
    ),
    Cause.STOPPING: ("the daemon is stopping", ""),
    Cause.BAD_REQUEST: ("its request is not valid", SAME_VERSION_HINT),
    Cause.REQUEST_LOST: (
        "its request did not reach pccheckd: the process that receives it had ended",
        "see pccheckd's log",
    ),
    Cause.FENCED: (
        "a newer start of this job is running, so checkpoints of this process are not saved",
        "end this process if it is a leftover; otherwise call restore(), which loads the state of "
        "the newest start. A live start with another launch id or number of ranks must end first",
    ),
    Cause.NO_ROOM: ("no space was registered for it", ""),
    Cause.QUEUE_FULL: ("more than {n} checkpoints wait", ""),
    Cause.SLOTS_BUSY: ("every slot was busy", 'on_busy="wait" waits'),
    Cause.SLOTS_LATE: (
        "every slot is in use; a slot becomes free when rank {n} saves the checkpoints that this "
        "rank has",
        "call checkpoint() for the same steps on every rank; if only one rank saves, make its "
        "client with solo=True",
    ),
    Cause.SLOTS_PROTECTED: (
        "the remaining slots hold checkpoints of the previous run, up to sequence {n}",
        "call restore() or adopt() first, or start with fresh=True",
    ),
    Cause.SLOTS_BROKEN: (
        "no slot of its volume is usable: {n} had write errors", "check the disk"
    ),
    Cause.UNLIKE: (
        "ranks {high} and {low} have attached different tensors with replicated=True, or the same "
        "in another order",
        "attach the same modules and optimizers, in one order, on every rank. What only one rank "
        "has (an averaged model on rank 0) needs a client and a job of its own: "
        "PCcheckClient(job=..., solo=True)",
    ),
    Cause.RANK_BUSY: ("every slot of rank {n} was busy, so no rank saved it", ""),
    Cause.RANK_LACKS: (f"rank {{n}} did not save this checkpoint, {NONE_KEEPS}", ""),
    Cause.RANK_ENDED: (f"rank {{n}} ended without this checkpoint, {NONE_KEEPS}", ""),
    Cause.RANK_NEVER: (f"rank {{n}} did not ask for this checkpoint, {NONE_KEEPS}", ""),
    Cause.RANK_DROPPED: (f"another rank no longer has this checkpoint, {NONE_KEEPS}", ""),
    Cause.INTERNAL: ("an internal error of the daemon", "see the daemon's log"),
    Cause.INTERRUPTED: ("abandoned: this process was interrupted before it was copied", ""),
    Cause.RUN_ENDED: ("abandoned: the run ended before it was copied", ""),
    Cause.OVERDUE: ("abandoned: it was not copied within stall_limit_s={n:g} s", ""),
    Cause.STREAM_OVERDUE: (
        "abandoned: it was not copied within stall_limit_s, and a GPU stream waited for it", ""
    ),
    # Until the verdict on its tensors says which one.
    Cause.SOURCE_GONE: (
        "abandoned: memory of a tensor was freed or moved while it was copied", ""
    ),
    Cause.NOT_READ: (
        "its tensors could not be copied ({code}); for a GPU see nvidia-smi and dmesg", ""
    ),
    Cause.DAEMON_ENDED: ("the daemon ended before the checkpoint was durable", ""),
    Cause.FORKED: ("only the parent of a forked process learns how the checkpoint ends", ""),
    # It may be durable. What was reported as failed stays so, and is named when it is durable.
    Cause.UNKNOWN: (_UNKNOWN, "whether it is durable: pccheckctl list"),
    Cause.SAVED: (f"{_UNKNOWN}; it is durable, as sequence {{n}}", ""),
    Cause.LOST: (f"{_UNKNOWN}; it is not durable", ""),
}  # fmt: skip
#: What the page cannot say in full.
_ASKS = frozenset({Cause.OTHER_RANK, Cause.DESCRIBED, Cause.RANK_LACKS})

#: Causes of checkpoints that another rank of the job will never have.
OF_THE_GROUP = frozenset({
    Cause.OTHER_RANK, Cause.RANK_BUSY, Cause.RANK_LACKS, Cause.RANK_ENDED, Cause.RANK_NEVER,
    Cause.RANK_DROPPED,
})  # fmt: skip

_HANDLE = (
    "the trainer no longer shares the GPU memory of this checkpoint",
    "the next checkpoint shares the memory again, or is pushed",
)
_GPU_LOST = "the daemon has lost the GPU", "GPU tensors are pushed until pccheckd is restarted"
#: By the stage and the code of a failure; "" is every other code of a stage, or every stage.
_BY_CODE = {
    ("begin", "ABORTED"): ("the trainer abandoned the checkpoint before it began", ""),
    ("begin", "BAD_HANDLE"): _HANDLE,
    ("begin", "DEVICE_LOST"): _GPU_LOST,
    ("begin", "BAD_PEER"): ("the trainer violated the protocol", SAME_VERSION_HINT),
    ("copy", "BAD_HANDLE"): _HANDLE,
    ("copy", "DEVICE_LOST"): _GPU_LOST,
    ("copy", "DEVICE"): (
        "the GPU driver failed to copy it", "the kernel's log may say more: dmesg"
    ),
    ("copy", "DAMAGED"): (
        "its copy in memory changed before a new pccheckd had written it",
        "look for a process that writes into pccheckd's memory",
    ),
    ("copy", ""): (
        "the trainer ended or abandoned it, or pccheckd stopped, before its copy was complete", ""
    ),
    ("base", ""): (
        "the earlier checkpoint that holds its unchanged tensors is damaged or cannot be read",
        "the next checkpoint is written whole; run pccheckctl verify, and look at the kernel's "
        "log",
    ),
    # The volume was not in its place when the record was to be written.
    ("", "REMOVED"): (
        "the volume's file was removed or moved away, so what is saved there would be lost",
        _STORAGE_GONE,
    ),
    ("", "REPLACED"): (
        "the volume's file was replaced by another one, so what is saved would be lost",
        _STORAGE_GONE,
    ),
    ("", "TRUNCATED"): (
        "the volume's file was truncated, so what was saved there is lost", _STORAGE_GONE
    ),
    ("", "ENOSPC"): ("{stage}: the disk is full", "free space on the disk"),
}  # fmt: skip
#: Why a new pccheckd cannot continue what the one before had copied: for its log, since the trainer
#: asks what became of it.
_NOT_CONTINUED = {
    "EALREADY": "",  # it or a newer one is durable
    "ENODATA": "a part of it is neither in memory nor on the disk",
    "NO_LANE": "too many checkpoints are in flight",
    "NO_SLOT": "no slot is free",
}


def sentence(why: Why) -> Sentence:
    """Reason and hint of an end, in words."""
    if why.words:
        return Sentence(why.words, why.hint, asks=False)
    if why.cause == Cause.CODE:
        return _of_code(why.stage, why.code)
    if why.cause not in _BY_CAUSE:  # DESCRIBED
        return Sentence("", "", asks=True)
    reason, hint = _BY_CAUSE[Cause(why.cause)]
    n = why.argument
    reason = reason.format(n=n, high=int(n) >> 32, low=int(n) & 0xFFFFFFFF, code=why.code)
    return Sentence(reason, hint, asks=why.cause in _ASKS)


def _of_code(stage: str, code: str) -> Sentence:
    if not stage:
        return Sentence("", "", asks=True)
    for key in ((stage, code), (stage, ""), ("", code)):
        if key in _BY_CODE:
            reason, hint = _BY_CODE[key]
            return Sentence(reason.format(stage=stage), hint, asks=False)
    fix = fix_of(getattr(errno, code, 0)) or CHECK_DISK
    return Sentence(f"{stage}: {code}", fix, asks=stage == "begin")


def continues_not(code: str) -> str:
    """Why a copied checkpoint cannot continue; "" when nothing is lost. Other codes stand for
    themselves."""
    return _NOT_CONTINUED.get(code, code)


def fix_of(number: int, owner: str = "its uid") -> str:
    """What to do about an error of the kernel that concerns a file; "" for an unknown one. `owner`:
    the uid that pccheckd runs as."""
    if number in (errno.EACCES, errno.EPERM):
        to = f"pccheckd's user: chown {owner}, chmod u+rwX"
        flag = "; if lsattr shows i or a: chattr -i -a" if number == errno.EPERM else ""
        return f"give it, and the directories above it, to {to}{flag}"
    if number == errno.EROFS:
        return "mount the file system read-write"
    if number == errno.EFBIG:
        return "raise the limit on file sizes: ulimit -f, or LimitFSIZE= of the service"
    # The last two are of a damaged file system.
    return CHECK_DISK if number in (errno.EIO, errno.EUCLEAN, errno.EBADMSG) else ""
