"""Why a checkpoint ended: one table of reasons, for the daemon's log and the trainer's handle.

The session page holds cause, stage, error code and argument (`struct pcc_reason`), and both sides
make the same sentence of them. What needs more words (a path, another rank's failure) has
`asks`: the daemon answers `Describe` with the whole of it."""

from __future__ import annotations

import enum
import errno
from typing import NamedTuple

from .basics import SAME_VERSION_HINT

NONE_KEEPS = "so no rank keeps it"
CHECK_DISK = "check the disk and the kernel's log"
_UNKNOWN = "the connection to pccheckd ended before it reported how the checkpoint ended"
_CLIENT = 1 << 15


class Cause(enum.IntEnum):
    """A number of 16 bits, with reason and hint. In a reason `{n}` is the argument, `{high}` and
    `{low}` are its halves of 32 bits. Those of `enum pcc_cause` are the native core's, too;
    those from _CLIENT on never stand in the page: the client itself ended the checkpoint."""

    def __new__(cls, number: int, reason: str = "", hint: str = "") -> Cause:
        made = int.__new__(cls, number)
        made._value_ = number
        made.reason, made.hint = reason, hint
        return made

    reason: str
    hint: str

    CODE = 0  # stage and code say why
    REPLACED = 1, "a newer checkpoint became durable first"
    OTHER_RANK = 2, "another rank did not save this checkpoint"  # the core knows no more of it
    DESCRIBED = 3  # the words are the daemon's
    REPLACED_ON_ALL = 4, "a newer checkpoint became global first"
    ENDED_BEFORE = 5, "the trainer ended, or pccheckd stopped, before the checkpoint began"
    STOPPING = 6, "the daemon is stopping"
    FENCED = (
        9, "a newer start of this job is running, so checkpoints of this process are not saved",
        "end this process if it is a leftover; otherwise call restore(), which loads the state of "
        "the newest start. A live start with another launch id or number of ranks must end first",
    )  # fmt: skip
    NO_ROOM = 10, "no space was registered for it"
    SLOTS_BUSY = 12, "every slot was busy", 'on_busy="wait" waits'
    SLOTS_LATE = (
        13, "every slot is in use; a slot becomes free when rank {n} saves the checkpoints that "
        "this rank has",
        "call checkpoint() for the same steps on every rank; if only one rank saves, make its "
        "client with solo=True",
    )  # fmt: skip
    SLOTS_PROTECTED = (
        14, "the remaining slots hold checkpoints of the previous run, up to sequence {n}",
        "call restore() or adopt() first, or start with fresh=True",
    )  # fmt: skip
    SLOTS_BROKEN = 15, "no slot of its volume is usable: {n} had write errors", "check the disk"
    UNLIKE = (
        16, "ranks {high} and {low} have attached different tensors with replicated=True, or the "
        "same in another order",
        "attach the same modules and optimizers, in one order, on every rank. What only one rank "
        "has (an averaged model on rank 0) needs a client and a job of its own: "
        "PCcheckClient(job=..., solo=True)",
    )  # fmt: skip
    RANK_BUSY = 17, "every slot of rank {n} was busy, so no rank saved it"
    RANK_LACKS = 18, f"rank {{n}} did not save this checkpoint, {NONE_KEEPS}"
    RANK_ENDED = 19, f"rank {{n}} ended without this checkpoint, {NONE_KEEPS}"
    RANK_NEVER = 20, f"rank {{n}} did not ask for this checkpoint, {NONE_KEEPS}"
    RANK_DROPPED = 21, f"another rank no longer has this checkpoint, {NONE_KEEPS}"
    INTERNAL = 22, "an internal error of the daemon", "see the daemon's log"
    BAD_TREE = 23, "the tree does not lie in the payload", SAME_VERSION_HINT
    BAD_TYPES = 24, "the table of types does not lie in the payload", SAME_VERSION_HINT
    BAD_LEVEL = (
        25, "this pccheckd saves it to disk or memory, and not to level {n}", SAME_VERSION_HINT
    )  # fmt: skip
    BAD_KIND = 26, "this pccheckd saves tensors only, and not kind {n}", SAME_VERSION_HINT
    BAD_FLAGS = 27, "it sets flags that this pccheckd does not know ({n})", SAME_VERSION_HINT
    REPLACED_IN_MEMORY = 28, "a newer checkpoint, step {n}, is in memory on all ranks"
    MEMORY_BUSY = (
        29, "the DRAM of rank {n} has no room for one more checkpoint beside those in memory",
        "raise --dram of pccheckd: checkpoints in memory take three times the state of each rank",
    )  # fmt: skip
    WITHDRAWN = (
        30, 'training went on, or its place was needed: to="device" is for the death of this '
        "process before the next update only",
    )  # fmt: skip

    INTERRUPTED = (_CLIENT + 1, "abandoned: this process was interrupted before it was copied")
    RUN_ENDED = _CLIENT + 2, "abandoned: the run ended before it was copied"
    OVERDUE = _CLIENT + 3, "abandoned: it was not copied within stall_limit_s={n:g} s"
    STREAM_OVERDUE = (
        _CLIENT + 4,
        "abandoned: it was not copied within stall_limit_s, and a GPU stream waited for it",
    )
    SOURCE_GONE = (  # until the verdict on its tensors says which one
        _CLIENT + 5, "abandoned: memory of a tensor was freed or moved while it was copied"
    )  # fmt: skip
    NOT_READ = (
        _CLIENT + 6,
        "its tensors could not be copied ({code}); for a GPU see nvidia-smi and dmesg",
    )
    DAEMON_ENDED = _CLIENT + 7, "the daemon ended before the checkpoint was durable"
    FORKED = _CLIENT + 8, "only the parent of a forked process learns how the checkpoint ends"
    # It may be durable. What was reported as failed stays so, and is named when it is durable.
    UNKNOWN = _CLIENT + 9, _UNKNOWN, "whether it is durable: pccheckctl list"
    SAVED = _CLIENT + 10, f"{_UNKNOWN}; it is durable, as sequence {{n}}"
    LOST = _CLIENT + 11, f"{_UNKNOWN}; it is not durable"


#: What the page cannot say in full.
_ASKS = frozenset({Cause.OTHER_RANK, Cause.DESCRIBED, Cause.RANK_LACKS})
#: Causes of checkpoints that another rank of the job will never have.
OF_THE_GROUP = frozenset({
    Cause.OTHER_RANK, Cause.RANK_BUSY, Cause.RANK_LACKS, Cause.RANK_ENDED, Cause.RANK_NEVER,
    Cause.RANK_DROPPED, Cause.MEMORY_BUSY,
})  # fmt: skip


class Why(NamedTuple):
    """Why a checkpoint ended so, as the page has it. What `_ASKS` names has `words` and `hint`."""

    cause: int = Cause.CODE
    argument: float = 0  # of the cause: a rank, a limit, a sequence; of CODE the daemon's uid
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


_STORAGE_GONE = (
    "nothing to do: a later checkpoint goes into a new volume. Only if the storage directory "
    "itself was removed, create it again. To remove a job's checkpoints use: pccheckctl drop"
)
_HANDLE = (
    "the trainer no longer shares the GPU memory of this checkpoint",
    "the next checkpoint shares the memory again, or is pushed",
)
_OTHER_MEMORY = (
    "the trainer did not show that it reads what pccheckd reads in its GPU memory",
    "tensors of that GPU are pushed until the trainer connects again; run pccheckctl doctor --gpu, "
    "and report what it says with the driver's version",
)
_GPU_LOST = "the daemon has lost the GPU", "GPU tensors are pushed until pccheckd is restarted"
#: By the stage and the code of a failure; "" is every other code of a stage, or every stage.
_BY_CODE = {
    ("begin", "ABORTED"): ("the trainer abandoned the checkpoint before it began", ""),
    ("begin", "BAD_HANDLE"): _HANDLE,
    ("begin", "DEVICE_LOST"): _GPU_LOST,
    ("begin", "OTHER_MEMORY"): _OTHER_MEMORY,
    ("begin", "BAD_PEER"): ("the trainer violated the protocol", SAME_VERSION_HINT),
    ("copy", "BAD_HANDLE"): _HANDLE,
    ("copy", "DEVICE_LOST"): _GPU_LOST,
    ("copy", "OTHER_MEMORY"): _OTHER_MEMORY,
    ("copy", "OTHER_BYTES"): (
        "other bytes were copied from the GPU than the trainer had there",
        "a tensor that nothing guards was changed during the copy, or the process had ended and "
        "the driver did not keep its memory; otherwise the driver is to blame: report its version",
    ),
    ("copy", "ETIMEDOUT"): (
        "the trainer did not show in time that it can read the GPU memory that it shares",
        "look whether the trainer is stopped, or its GPU hangs",
    ),
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
    if why.cause == Cause.CODE and why.stage:
        return _of_code(why.stage, why.code, int(why.argument))
    try:
        cause = Cause(why.cause)
    except ValueError:  # a newer daemon's
        cause = Cause.DESCRIBED
    n = why.argument
    reason = cause.reason.format(n=n, high=int(n) >> 32, low=int(n) & 0xFFFFFFFF, code=why.code)
    return Sentence(reason, cause.hint, asks=not reason or cause in _ASKS)


def _of_code(stage: str, code: str, uid: int) -> Sentence:
    for key in ((stage, code), (stage, ""), ("", code)):
        if key in _BY_CODE:
            reason, hint = _BY_CODE[key]
            return Sentence(reason.format(stage=stage), hint, asks=False)
    fix = fix_of(getattr(errno, code, 0), uid) or CHECK_DISK
    return Sentence(f"{stage}: {code}", fix, asks=stage == "begin")


def continues_not(code: str) -> str:
    """Why a copied checkpoint cannot continue; "" when nothing is lost. Other codes stand for
    themselves."""
    return _NOT_CONTINUED.get(code, code)


def fix_of(number: int, uid: int) -> str:
    """What to do about an error of the kernel that concerns a file; "" for an unknown one. `uid`:
    the one that pccheckd runs as."""
    if number in (errno.EACCES, errno.EPERM):
        to = f"pccheckd's user: chown {uid}, chmod u+rwX"
        flag = "; if lsattr shows i or a: chattr -i -a" if number == errno.EPERM else ""
        return f"give it, and the directories above it, to {to}{flag}"
    if number == errno.EROFS:
        return "mount the file system read-write"
    if number == errno.EFBIG:
        return "raise the limit on file sizes: ulimit -f, or LimitFSIZE= of the service"
    # The last two are of a damaged file system.
    return CHECK_DISK if number in (errno.EIO, errno.EUCLEAN, errno.EBADMSG) else ""
