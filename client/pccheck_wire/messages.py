"""The messages between a process and the daemon; PROTOCOL.md describes them.

Attach socket (AF_UNIX, SOCK_SEQPACKET): `Hello` -> `Welcome` | `Failure`. An observer then sends
`Request`s over the same socket; a trainer sends them over ZeroMQ to `Welcome.endpoint`.
Every message is one msgpack map with the key "t" naming its type. Fields with defaults may be
missing; unknown fields are refused within one protocol version.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

from .errors import UsageError

#: A job name becomes a directory name: these characters only, not starting with a dot.
JOB_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
RANKS_MAX = 65536


def require_job_name(name: str) -> None:
    """Raises UsageError."""
    if not re.fullmatch(JOB_PATTERN, name):
        raise UsageError(
            f"{name[:140]!r} is not a valid job name",
            hint="use letters, digits, '.', '_' and '-', at most 128, not starting with '.' or '-'",
        )


class CheckpointState(enum.IntEnum):
    """requested -> copying -> copied -> writing -> durable -> global, or an end."""

    REQUESTED = 0
    COPYING = 1
    COPIED = 2
    WRITING = 3
    DURABLE = 4
    GLOBAL = 5
    SUPERSEDED = 6
    SKIPPED = 7
    FAILED = 8

    def __str__(self) -> str:
        return self.name.lower()


class Message:
    """Base of every message: the name of its type on the wire."""

    __slots__ = ()
    TAG: ClassVar[str]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(other) == _values(self)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in _values(self).items())
        return f"{type(self).__name__}({shown})"


def _values(message: Any) -> dict[str, object]:
    return {item.name: getattr(message, item.name) for item in fields(message)}


_M = TypeVar("_M", bound=Message)


@dataclass_transform(frozen_default=True)
def message(tag: str) -> Callable[[type[_M]], type[_M]]:
    """A dataclass that goes over the wire under this tag. Nothing may change its fields, which mypy
    checks. `dataclass` makes only the constructor: to make all methods of all messages was the
    slowest import of pccheckd."""

    def make(kind: type[_M]) -> type[_M]:
        kind.TAG = tag
        return dataclass(slots=True, eq=False, repr=False)(kind)

    return make


class Role(enum.StrEnum):
    """What a connection is for."""

    TRAINER = "trainer"  # owns the volume of (uid, job, rank) while it lives
    READER = "reader"  # may Open and Read any volume of its uid (root: of any uid); saves nothing
    OBSERVER = "observer"  # requests over the attach socket only; no session page


# -- attach ------------------------------------------------------------------------------------


@message("hello")
class Hello(Message):
    """First packet of every connection. The daemon compares `protocol` before all else."""

    protocol: int
    role: Role
    version: str
    pid: int
    job: str = ""
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    #: Equal for all ranks of one start of the job, different for the next (torchrun's run id and
    #: restart count); "" lets the daemon decide.
    launch: str = ""
    fresh: bool = False
    solo: bool = False
    replicated: bool = False  # all ranks have the same state
    images: bool = False  # saves images of processes, which have jobs of their own
    #: A random number of the training process. Its reconnects repeat the number.
    process: bytes = b""
    #: `Welcome.incarnation` and `start` of the previous session, if this is a reconnect.
    incarnation: int = 0
    start: bytes = b""
    #: The `Welcome.storage` of the previous session: another directory has other checkpoints. An
    #: observer's is any text if it wants to know which directory the daemon serves.
    storage: str = ""
    #: The sequence that the state was restored from; 0: no checkpoint existed, or `fresh`; None:
    #: not restored yet.
    restored: int | None = None
    #: uid whose job a READER reads (root only); -1 = its own.
    uid: int = -1


@message("welcome")
class Welcome(Message):
    """The handshake's success; comes with the descriptors of page and link (not for observers)."""

    protocol: int
    version: str
    session: int
    token: bytes  # 16 random bytes; in every Request of this session
    endpoint: str  # ipc:// address for a trainer's requests
    pid: int  # the daemon's
    incarnation: int = 0  # of the start that the peer is a member of: its number, ...
    start: bytes = b""  # ... and its random id, 16 bytes
    chunk_bytes: int = 0
    #: How this daemon can take GPU tensors: "pull", or "push" and why.
    transfer: str = "push"
    transfer_reason: str = ""
    #: Distinguishes storage directories, until the next boot: layout.identity; for an observer that
    #: asks layout.number, or "" while the directory is missing.
    storage: str = ""
    #: The newest durable step of this volume, when it has one.
    newest_step: int | None = None
    #: The newest step of a run before that the peer has not restored, and that is kept for it, or
    #: will be when it is durable (P7).
    protected_step: int | None = None
    #: With "push": the daemon may be able to pull later, and an `Expose` is worth trying then.
    transfer_later: bool = False
    #: What the daemon runs in, and ends with: pccheck_native.places.
    places: list[str] = field(default_factory=list)


@message("failure")
class Failure(Message):
    """What went wrong: of a Hello, of a Request. The client raises it as a `PccheckError`."""

    code: str
    message: str
    hint: str = ""
    retryable: bool = False


# -- requests ----------------------------------------------------------------------------------


#: Of a rank that keeps checkpoints in memory only: one that is being copied, one that is copied on
#: all ranks, one that is being written.
STATES_IN_MEMORY = 3

#: A `Carry` is answered within this time, also when there is nothing to do.
CARRY_LIMIT_S = 5.0
#: How the text of an operation's error begins while the job's store cannot be found yet.
NOT_YET = "not yet"


@message("register")
class Register(Message):
    """Makes room: a volume whose slots hold `payload_bytes`, and DRAM. -> `Registered`."""

    payload_bytes: int
    failed: int = 0  # checkpoints of this client that failed and that no daemon has counted yet
    levels: int = 1  # where its checkpoints are to be safe: bit n of level n


@message("registered")
class Registered(Message):
    slots: int
    keep: int
    in_flight: int  # N
    granted_bytes: int  # DRAM of this session so far; more may follow
    effective_in_flight: float  # about 1 + M/m, at most N
    volume: str  # path, for the log
    absent: list[int] = field(default_factory=list)  # ranks of this start without a live process
    incarnation: int = 0  # of the start that the peer is a member of now
    start: bytes = b""
    expected_bytes: int = 0  # DRAM in the end, while the others claim what they claim now
    note: str = ""  # what the daemon's owner should know; one rank of a node gets it


@message("expose")
class Expose(Message):
    """Shares device memory for pull: the exposure of pcc_shared.h in pieces of up to 4096 bytes,
    over several messages (`more`: another one of this map follows). -> `Done` | `Failure`, after
    which nothing is exposed and the client pushes."""

    map: int
    data: list[bytes]
    more: bool = False
    descriptors: int = 0  # that were sent for this map, with `Lend`


@message("lend")
class Lend(Message):
    """Descriptors of GPU memory, with this packet, for the exposure `map` that follows over
    ZeroMQ. Over the attach socket only. No reply: a refusal is that of the exposure."""

    map: int
    count: int  # in this packet


@message("chose")
class Chose(Message):
    """How the session transfers its tensors from now on, and why; for `status`. No reply."""

    transfer: str  # "push" or "pull"
    reason: str


@message("describe")
class Describe(Message):
    """Why a snapshot is in its state. With `sequence`: what became of this rank's checkpoint of an
    earlier session, whose daemon ended before it reported that. -> `Described`."""

    snapshot: int
    sequence: int = 0


@message("described")
class Described(Message):
    snapshot: int
    state: CheckpointState
    sequence: int
    step: int
    reason: str = ""
    hint: str = ""
    newer_sequence: int = 0
    newer_step: int | None = None


@message("skipped")
class Skipped(Message):
    """A checkpoint that recovery skipped, and why."""

    sequence: int  #: 0: not known; a volume may have held newer checkpoints
    step: int
    reason: str


@message("open")
class Open(Message):
    """Chooses the checkpoint to recover: the newest valid one, of `step` if given, and older than
    sequence `before` if given. -> `Opened` | `Empty` | `Writing` | `Failure`."""

    step: int | None = None
    before: int | None = None
    #: The rank can use the parts of any ranks (replicated state, or DTensors), so a checkpoint of
    #: another number of ranks is accepted.
    any_world_size: bool = False
    #: Of a job on several nodes: all its ranks restore now, by the same call.
    together: bool = False
    # The user's words in restore(), for a start that would be refused without them:
    start: str = ""  # whose checkpoints continue: the beginning of its id in hex, or "newest"
    without: list[str] = field(default_factory=list)  # nodes that will not come back


@message("part")
class Part(Message):
    """A rank's payload of a group's checkpoint."""

    rank: int
    payload_bytes: int
    tree_offset: int
    tree_bytes: int


@message("far_node")
class FarNode(Message):
    """A node from which a checkpoint is read (`pccheck_native.nodes.peer`)."""

    host: str  # for people
    addresses: list[str]
    fingerprint: bytes
    token: bytes


@message("far_part")
class FarPart(Message):
    """A rank's part that lies on other nodes."""

    rank: int
    nodes: list[int]  # each has a copy: places in `Opened.nodes`
    digests: list[bytes]  # of these copies' manifests


@message("opened")
class Opened(Message):
    #: Fields of CheckpointId, in its order; the peer's session has the uid and the job.
    rank: int
    sequence: int
    step: int
    incarnation: int
    world_size: int
    start: bytes
    digest: bytes
    payload_bytes: int
    tree_offset: int
    tree_bytes: int
    skipped: list[Skipped] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)  # of a group: every rank's payload
    wall_ns: int = 0  # when it became durable, since 1970
    warnings: list[str] = field(default_factory=list)  # of the nodes; one rank of a node gets them
    # Of a job on several nodes, when this node lacks parts. If `rank` is among them, its lengths
    # are 0 here: its manifest has them.
    nodes: list[FarNode] = field(default_factory=list)
    far: list[FarPart] = field(default_factory=list)
    name: list[int] = field(default_factory=list)  # of the checkpoint in its start: base, ...
    #: Of replicated state that is read elsewhere: the ranks of each copy, that of `rank` first.
    copies: list[list[int]] = field(default_factory=list)


@message("empty")
class Empty(Message):
    """The volume was read and holds nothing, or no volume exists."""

    skipped: list[Skipped] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@message("writing")
class Writing(Message):
    """`Open` cannot be answered yet, because checkpoints that it might choose are still being
    written. Comes after some seconds; the client asks again."""

    step: int  # of the newest
    checkpoints: int  # how many are being written, on all ranks of the job
    total_bytes: int  # their payload
    left_bytes: int  # the part of it that is copied to DRAM and not written


@message("waiting")
class Waiting(Message):
    """`Open` cannot be answered yet, because other nodes of the job have not answered. Comes after
    some seconds; the client asks again."""

    reason: str  # names whom this node waits for


@message("read")
class Read(Message):
    """Sends payload [offset, offset+length) of the opened sequence through the page; the client
    checks it. -> `Done` at once; the page's END message has the result. A damaged sequence is
    flagged, and the client asks `Open(before=sequence)` next."""

    load: int
    sequence: int
    offset: int
    length: int
    rank: int | None = None  # of the same job; None: the peer's own


@message("restored")
class Restored(Message):
    """The state of `sequence` is in place (0: the volume was empty). Ends P7's protection.

    `base` is what restore() has put into the attached state, so that the next checkpoint comes from
    it. 0: the state was not changed (an empty volume), or not by this client (recover(), adopt()).
    `turn` grows when the process has trained, or requested a checkpoint, since its last restore; 0:
    never in this start. -> `Joined`"""

    sequence: int
    base: int = 0
    turn: int = 0


@message("pin")
class Pin(Message):
    """With `pinned` no rank recycles the durable checkpoint of `step`; without, it may be recycled
    again. -> `Done`"""

    step: int
    pinned: bool = True


@message("carry")
class Carry(Message):
    """Of a trainer whose job has several nodes: this lane (0, and 1 for operations that wait) has
    nothing to do, and `results` are those of the operations of `batch`. `packing.pieces` made
    `results`, of which this message has those from byte `at` on. With `more` another one follows
    and there is no answer; else -> `Carried`, after at most CARRY_LIMIT_S."""

    lane: int
    batch: int = 0  # of a `Carried`; 0: there are no results
    results: list[bytes] = field(default_factory=list)
    at: int = 0
    more: bool = False


@message("carried")
class Carried(Message):
    """What this trainer is to do in the job's torch store, one after the other: see PROTOCOL.md.
    `packing.pieces` made `operations`; [] if there is nothing to do."""

    batch: int = 0  # grows with each answer that has operations
    operations: list[bytes] = field(default_factory=list)


@message("pause")
class Pause(Message):
    """A snapshot of these processes is to be taken, and a connection to the daemon cannot be in it.
    The daemon tells their clients to disconnect, and lets none of them connect again until the
    connection of this request has ended. Asked again and again. -> `Paused`."""

    pids: list[int]


@message("paused")
class Paused(Message):
    left: int  # clients that are still connected
    jobs: list[str] = field(default_factory=list)  # theirs


@message("make_way")
class MakeWay(Message):
    """To a trainer or reader, over its attach socket, unasked: disconnect, and connect again."""


@message("goodbye")
class Goodbye(Message):
    """Orderly end; with `done` the volume is trimmed to its newest checkpoint. -> `Done`."""

    done: bool = False
    failed: int = 0  # as in `Register`


@message("joined")
class Joined(Message):
    """The request was carried out."""

    incarnation: int  # of the start that the peer is a member of now
    start: bytes = b""


@message("done")
class Done(Message):
    """The request was carried out; there is nothing else to answer."""


@message("status")
class Status(Message):
    """-> `Report` with the document that `pccheckctl status --json` prints."""


@message("servers")
class ListServers(Message):
    """-> `Report`: of the peer's jobs on several nodes (root: of all), where each node lets the
    others read, with the tokens for that; also after the job."""


@message("list")
class ListVolumes(Message):
    """-> `Report`: checkpoints of the peer's uid (root: of all), optionally of one job."""

    job: str = ""


@message("verify")
class Verify(Message):
    """Reads and checks one checkpoint (sequence 0: every one) of a volume. -> `Report`."""

    job: str
    rank: int = 0
    sequence: int = 0
    uid: int = -1
    #: A part of each checkpoint: "5%" of its pieces, chosen by `seed`, or "2/20"; "" is everything.
    subset: str = ""
    seed: int = 0


@message("trace")
class Trace(Message):
    """The times of the checkpoints of the last seconds. -> `Report`."""

    last_s: float = 60.0


@message("config")
class ConfigShow(Message):
    """-> `Report`: the daemon's configuration, and where each value came from."""


@message("drop")
class Drop(Message):
    """Removes the volumes of a job without a connected client (`rank` None: of all ranks); with
    `dry_run` only lists them. Allowed for their owner and root. -> `Report`."""

    job: str
    rank: int | None = None
    uid: int = -1
    dry_run: bool = False


@message("report")
class Report(Message):
    """A JSON-able document; its own "schema" key versions it."""

    document: dict[str, object]


RequestBody = (
    Register | Expose | Lend | Chose | Describe | Open | Read | Restored | Pin | Carry | Pause
    | Goodbye | Status
    | ListServers | ListVolumes | Verify | Trace | Drop | ConfigShow
)  # fmt: skip
#: The answers to requests, except Failure, which clients raise.
Answer = (
    Registered
    | Described
    | Opened
    | Empty
    | Writing
    | Waiting
    | Joined
    | Carried
    | Paused
    | Done
    | Report
)
ReplyBody = Answer | Failure


@message("request")
class Request(Message):
    """The envelope of a request. The reply has the same `number`; 0 means no reply is wanted."""

    number: int
    token: bytes
    body: RequestBody


@message("reply")
class Reply(Message):
    number: int
    body: ReplyBody
