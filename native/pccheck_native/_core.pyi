"""Types of the compiled module. Every call that blocks or moves bytes releases the GIL.

Failures raise OSError (kernel errors) or NativeError (ours; .code_name is e.g. "DAMAGED").
Sizes are bytes, times are CLOCK_MONOTONIC nanoseconds, deadlines are absolute ones. Ranges are
packed little-endian u64 triples (address, offset, length), ascending and disjoint by offset; device
ranges are packed "<QQQII" (address, offset, length, CUDA ordinal, 0), ascending and disjoint, too.

`close()` may be called several times. It forbids new calls (ValueError). The object is freed when
calls in other threads have ended and no tenant borrows it. A forked child may not use what its
parent opened (ValueError).
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, final

_Path = str | bytes | os.PathLike[str]
_Packed = bytes | bytearray | memoryview

class NativeError(Exception):
    code: int  # negative, as in Event.error
    code_name: str

FORMAT_VERSION: int
SNAPSHOTS: int
SLOTS_MAX: int
GIVEN_UP_MAX: int
JOB_BYTES_MAX: int
DEVICES: int  # GPUs per session; CUDA ordinals are below it
EXPOSURE_BYTES_MAX: int
EXPOSED_PIECES_MAX: int
DESCRIPTORS_MAX: int
ENGINES: tuple[tuple[str, str, str], ...]  # name, how it writes, why a volume got pwrite instead
SLOT_IMAGE: int  # a process image; otherwise tensors
SLOT_PROTECTED: int
SLOT_PINNED: int
SLOT_QUARANTINED: int
SLOT_DAMAGED: int
SLOT_OFFERED: int  # other nodes may count on it
SLOT_HEALTHY: int  # marks of a user or a check
SLOT_NOT_FINITE: int
SLOT_GLOBAL: int  # this node knows that all nodes had it
WORD_REQUESTED: int
WORD_COPYING: int
WORD_COPIED: int
WORD_ABANDONED: int
WORD_REFUSED: int
LEVEL_DISK: int  # where a checkpoint is to be safe: written, ...
LEVEL_MEMORY: int  # ... copied and parked, ...
LEVEL_DEVICE: int  # ... or on the GPU until its process ends
SAVES_PARKED: int  # checkpoints that one volume has parked, at most
CAUSE_REPLACED: int  # of pccheck_wire.ends
CAUSE_OTHER_RANK: int
OUTCOME_GIVEN_UP: int  # in ClientState.outcome, beside the numbers of CheckpointState
#: Results of Client.load_wait, and NativeError.code. It has all PCC_E_* codes of pcc_base.h.
E_DAMAGED: int
E_UNREADABLE: int
E_NO_DRIVER: int
E_DEVICE: int
E_DEVICE_LOST: int
E_BAD_HANDLE: int

class SlotEntry(NamedTuple):
    slot: int
    flags: int  # SLOT_*
    sequence: int  # 0 = no durable checkpoint here
    step: int
    incarnation: int
    world_size: int
    payload_bytes: int
    tree_offset: int
    tree_bytes: int
    wall_ns: int
    base: int  # the sequence of the checkpoint in whose slot its unchanged blocks lie; 0: none
    start: bytes  # the id of the start that saved it, 16 bytes; zeros: not known
    digest: bytes  # of its manifest, 16 bytes

class VolumeInfo(NamedTuple):
    uuid: bytes
    job: str
    uid: int
    rank: int
    world_size: int
    slots: int
    keep: int
    block_bytes: int
    slot_bytes: int
    payload_capacity: int  # largest payload that a slot takes
    volume_bytes: int
    record_number: int
    next_sequence: int
    incarnation: int
    done: bool
    stopped: bool
    free_slots: int
    valid_replicas: int
    repaired_replicas: int
    damaged_records: int
    record_lost: bool  # and perhaps a checkpoint with it, since the newest one
    start: bytes  # the id of the newest start, 16 bytes; zeros: not known
    promise: tuple[int, bytes, bytes]  # number, start, digest of its list; number 0: none

def volume_bytes_for(
    payload_capacity: int, slots: int, block_bytes: int = ..., record_stride: int = ...
) -> int: ...
def create_volume(
    path: _Path,
    *,
    uid: int,
    job: str,
    rank: int,
    world_size: int,
    slots: int,
    keep: int,
    payload_capacity: int,
    next_sequence: int = 1,
    incarnation: int = 0,
    block_bytes: int = ...,
    record_stride: int = ...,
    allow_buffered: bool = False,
    start: bytes = ...,  # the id of `incarnation`
) -> None: ...
def tensor_geometry(api: object, tensors: list[Any]) -> bytes:
    """Addresses, shapes, strides, types and devices, through the library's DLPack exchange capsule
    (`__dlpack_c_exchange_api__`). Raises what the library raises for what it cannot describe."""

def same_geometry(api: object, tensors: list[Any], then: bytes) -> bool:
    """Whether tensor_geometry() would return `then`; False when in doubt."""

def integers(getter: object, tensors: list[Any]) -> bytes:
    """The integer or bool that the descriptor `getter` of a class gives for each tensor, as int64
    in the machine's byte order. Faster than attributes, which Python looks up for each tensor."""

def same_items(holders: list[dict[Any, Any]] | list[list[Any]], then: tuple[object, ...]) -> bool:
    """Whether dicts or lists hold exactly these objects: each one's keys and values in turn, or its
    items, then the dict or list itself. By identity: a "no" may mean equal objects."""

def same_values(
    dicts: list[dict[Any, Any]], keys: tuple[object, ...], then: tuple[object, ...]
) -> bool:
    """Whether every dict holds these objects under the keys: all of the first dict, and so on."""

@final
class Volume:
    def __init__(
        self,
        path: _Path,
        *,
        writable: bool,
        allow_buffered: bool = False,
        engine: str = "pwrite",
        fd: int = -1,
    ) -> None:
        """`engine` is pwrite, mmap or pmem; pwrite it is where that one cannot be had. `fd`: the
        file, open; it is closed with the volume, and if this raises."""

    @property
    def engine(self) -> str: ...  # what it is
    @property
    def bytes_per_second(self) -> int: ...  # the limit; 0 = none
    def limit(self, bytes_per_second: int, /) -> None: ...  # from now on; waits for no disk
    def require_in_place(self) -> None:
        """Raises NativeError REMOVED, REPLACED or TRUNCATED unless the file that it was opened from
        is the one at its path, and whole."""
    def info(self) -> VolumeInfo: ...
    def table(self) -> list[SlotEntry]: ...  # one per slot, of the newest durable record
    def flag(self, sequence: int, *, set: int = 0, clear: int = 0, now: bool = False) -> None: ...
    def spare(self, sequence: int, spared: bool) -> None: ...  # until closed; waits for no disk
    def begin_incarnation(self, incarnation: int, world_size: int, start: bytes = ...) -> None:
        """Durable on return. `start`: its id, 16 bytes."""
    def promise(self, number: int, start: bytes, list_digest: bytes) -> None:
        """What this node promised to a start, durable on return. OSError EINVAL unless
        (number, start) rises."""
    def finish(self, keep: int, /) -> None: ...  # only the newest stay; durable on return
    def set_group(self, *, oldest: int, newest: int, given_up: Sequence[int]) -> None: ...
    def has_expendable(self) -> bool: ...  # whether a slot may be recycled now
    def is_full(self) -> bool: ...  # no slot is free, may be recycled, or becomes free by itself
    def recycle(self) -> None: ...  # durably, when no slot is free
    def own_bytes(self, sequence: int, /) -> int: ...  # of its payload, not in its base's slot
    def name(self, sequence: int, /) -> tuple[int, int, int]: ...  # base, descents, row
    def manifest(self, sequence: int, /) -> bytes: ...  # verified; for another node
    def read(self, sequence: int, offset: int, length: int) -> bytes: ...  # verified; for trees
    def read_into(
        self, sequence: int, ranges: _Packed, threads: int = 2, chunk_bytes: int = ...
    ) -> None:
        """Verified, parallel read into memory; ranges as for Client.submit."""
    def read_blocks(self, sequence: int, offset: int, length: int, into: Any) -> None:
        """Reads whole blocks, unchecked, into memory that is aligned to 4096 bytes and has room for
        as many. UNREADABLE; OSError EINVAL for what is not whole blocks."""

    def verify(self, sequence: int, /) -> None: ...  # DAMAGED, UNREADABLE
    def close(self) -> None:
        """From now on its methods raise ValueError. The file is closed when the last of them has
        returned, in other threads too, and no tenant is bound to it."""
    @property
    def closed(self) -> bool: ...  # its file is closed

def manifest_facts(manifest: _Packed, digest: bytes, /) -> tuple[int, int, int, int]:
    """Of the manifest of a checkpoint on another node, which must have this digest: the bytes of
    the payload, the place of the tree, its bytes, and the bytes of a block. NativeError DAMAGED."""

def manifest_place(manifest: bytes, blocks: _Packed, offset: int, ranges: _Packed, /) -> None:
    """Checks whole blocks of the payload that begin at `offset`, and fills ranges of memory with
    what these want of them. `manifest_facts` has accepted the manifest. NativeError DAMAGED."""

@final
class Pool:
    def __init__(
        self, budget_bytes: int, *, store: str = "", store_limit: int = 0, stored: int = 0
    ) -> None:
        """`store`: the service manager's notify socket; what is stored there outlives us."""

    def usage(self) -> tuple[int, int]: ...  # budget, used
    def stored(self) -> tuple[int, int, int]: ...  # now, at most, how often it had no room
    def unstore(self, name: str) -> None: ...
    def close(self) -> None: ...

class SaveTimes(NamedTuple):
    begin: int
    first_write: int
    sealed: int
    written: int
    flushed: int
    durable: int
    ended: int

class SaveRequest(NamedTuple):
    """As struct pcc_request of pcc_shared.h."""

    step: int
    payload_bytes: int
    tree_offset: int
    tree_bytes: int
    skip: bool  # on_busy
    level: int  # LEVEL_*: where it is to be safe
    map: int
    held_at_ns: int
    held_ns: int
    base: int
    turn: int
    descents: int
    row: int
    interval: int
    division: int
    taken_ns: int  # CLOCK_MONOTONIC
    cause: int  # of pccheck_wire.ends, why the core has refused it; 0: it has not
    argument: int

class Event(NamedTuple):
    #: requested begun waits refused copied writing durable superseded given_up failed load_ended
    #: bad_peer detached wanted
    kind: str
    tenant: int
    session: int
    id: int
    sequence: int
    slot: int
    error: int  # 0 or negative code
    error_name: str  # "" or e.g. "EIO", "ABORTED"
    stage: str  # "" or begin, copy, base, write, flush, publish
    rehomed: int
    payload_bytes: int  # of a copied one: an image has a bound until then
    copied_bytes: int  # into DRAM, by the save that has ended
    written_bytes: int  # to the volume, by that save
    times: SaveTimes
    request: SaveRequest | None  # of a "requested" one

@final
class Events:
    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def take(self) -> list[Event]: ...  # oldest first; never blocks
    def close(self) -> None: ...

class GpuInfo(NamedTuple):
    uuid: bytes
    name: str
    lost: bool
    copied_bytes: int
    copies: int
    failures: int

def cuda_missing() -> str:
    """Why there is no usable CUDA driver, in words; "" when there is one. Loads it."""

def cuda_driver() -> tuple[int, int]:
    """The newest CUDA version that the driver supports (12080 is 12.8) and how many GPUs there are.
    Loads it. NativeError NO_DRIVER."""

@final
class Gpus:
    """The GPUs that trainers expose memory of. The driver is loaded at the first use of one."""

    def __init__(self) -> None: ...
    def info(self) -> list[GpuInfo]: ...
    def rest(self, unused_s: float, /) -> None: ...  # releases contexts unused for so long
    def close(self) -> None: ...

class TenantUsage(NamedTuple):
    bytes: int
    free_chunks: int
    granted_chunks: int
    full_chunks: int
    cached_chunks: int
    lent_chunks: int
    left_chunks: int  # never used again; shrink gives them back
    in_flight: int  # saves that have not ended, parked ones too
    pinned_bytes: int
    exposed_bytes: int
    mappings: int
    pieces: int
    parked: int  # saves of level memory, copied or being copied, that nothing writes

class KeptState(NamedTuple):
    uuid: bytes
    uid: int
    job: str
    rank: int
    chunk_bytes: int
    block_bytes: int
    lanes: int
    copied: list[tuple[int, set[int]]]  # sequence, segments that it lies in

def kept_state(fd: int) -> KeptState: ...  # OSError EINVAL, NativeError DAMAGED NEWER_FORMAT

@final
class Tenant:
    def __init__(
        self,
        pool: Pool,
        events: Events,
        *,
        id: int,
        chunk_bytes: int,
        block_bytes: int,
        chunk_capacity: int,
        lanes: int,
        writers: int,
        gpus: Gpus | None = None,
        label: str = "",  # of its memory in the descriptor store; "" = not stored
        foreign: bool = False,  # its trainers are another user's than this process
    ) -> None: ...
    def bind(
        self, volume: Volume, state_fd: int = -1, state_id: int = 0
    ) -> list[tuple[int, int, int, int, int, int, int, str]]:
        """With a state memfd of a daemon before: what it had copied, newest first, as (sequence,
        step, incarnation, payload_bytes, tree_offset, tree_bytes, world_size, why not). What was
        parked is parked again, and the tenant writes it by itself, the newest first, when lanes and
        slots are free; until then write() and drop() may come first."""

    def adopt(self, fd: int, id: int) -> None: ...  # takes fd when it does not raise
    def settle(self) -> None: ...  # checks what was adopted, gives it to the writers; blocks
    def unbind(self, volume: Volume, /) -> None: ...  # EBUSY while it has saves
    def attach(self, socket_fd: int, session: int, pid: int = 0) -> int:
        """The page's descriptor, the caller's. `pid`: the trainer as named here, 0 = unknown."""

    def detach(self, others: Sequence[Tenant]) -> int | None:
        """Blocks for the drain. When the last step could not be read from the trainer's own GPU
        memory: the index of the one of `others`, ranks of the job, from whose it was read."""

    def grow(self, bytes: int, /) -> int: ...  # the bytes that it has now
    def shrink(self, bytes: int, /) -> tuple[int, int, int]:
        """Takes memory back, with a trainer or without, a step further each time: the bytes held
        now, those that stay, and the segments that the client was asked for and still has."""

    def release_memory(self) -> None: ...  # EBUSY unless detached and idle
    def rest(self, unmapped_s: float, /) -> None: ...  # unpins segments unused by GPUs for so long
    def expose(self, map: int, exposure: bytes, descriptors: bytes = b"") -> str:
        """Nothing when the daemon can pull by this exposure, else why not, in words. The exposure
        before is gone either way. `descriptors`: C ints, of the runs that are new; the caller
        closes them."""

    def policy(
        self,
        *,
        held: bool = False,  # no save begins
        numbers: bool = False,  # of a rank alone: a save takes the next sequence of its volume
        incarnation: int = 0,
        world_size: int = 1,
        above: int = 0,  # sequences from now on are larger
    ) -> None:
        """What the queue needs to begin saves without a question."""

    def noted(self) -> None: ...  # once for each "requested" event of the attached session
    def number(
        self, snapshot: int, sequence: int, incarnation: int, world_size: int, marks: int = 0,
        name: tuple[int, int, int] = ...,
    ) -> None:  # fmt: skip
        """Of a save that is requested or being copied. The record that makes it durable has the
        `marks` (SLOT_OFFERED, SLOT_HEALTHY, SLOT_NOT_FINITE, SLOT_GLOBAL), and its manifest the
        `name`: base, descents, row. OSError EINVAL: the sequence is too low, or no such mark."""

    def retry(self) -> None: ...  # a slot may be free: the first of the queue tries again
    # Why it ended so: `cause` and `argument` of pccheck_wire.ends, or a negative code of `begin`.
    # Returns whether it was not copied yet.
    def refuse(
        self, snapshot: int, outcome: int, sequence: int = 0, newer: int = 0, *, cause: int = 0,
        error: int = 0, argument: int = 0,
    ) -> bool: ...  # fmt: skip
    def set_outcome(
        self, snapshot: int, outcome: int, sequence: int = 0, newer: int = 0, *, cause: int = 0,
        error: int = 0, argument: int = 0,
    ) -> None: ...  # fmt: skip
    def write(self, sequence: int, /) -> None:
        """A parked save is written from now on, and its events follow. Nothing happens when nothing
        of that sequence is parked. OSError EBUSY while it is being copied; NativeError NO_LANE,
        NO_SLOT, STOPPED: it stays parked."""

    def drop(
        self, sequence: int, outcome: int, newer: int = 0, *, cause: int = 0, argument: int = 0
    ) -> bool:
        """A parked save that is copied is forgotten, also for the next daemon, and its chunks are
        free; no event follows. The page of its session shows how it ended. False when no such save
        is parked (any more)."""

    def load(
        self,
        volume: Volume,
        sequence: int,
        offset: int,
        length: int,
        load_id: int,
        own: bool = True,  # what this tenant has cached of the sequence is of this volume
    ) -> None: ...
    def usage(self) -> TenantUsage: ...
    def close(self) -> None: ...

class ClientState(NamedTuple):
    word: int  # WORD_*
    outcome: int
    sequence: int
    newer: int  # of a superseded one: the sequence that is durable instead; 0: not known
    source_read: bool
    error: int  # why the client itself gave it up: 0 or a negative code
    error_name: str  # "" or e.g. "ETIMEDOUT" (of a hold), "DEVICE", "EFAULT" (of memory)
    fault: int  # the address of memory that could not be read; 0: all could
    # Why the daemon ended it so (pccheck_wire.ends):
    cause: int
    stage: str  # "" or begin, copy, base, write, flush, publish
    code: str  # "" or e.g. "EIO", "ABORTED"
    argument: int

@final
class Client:
    """The client's end. `close()` returns with its thread gone."""

    def __init__(self, socket_fd: int, page_fd: int) -> None: ...
    def alive(self) -> bool: ...
    @property
    def unmapped(self) -> int: ...  # 0, or the errno: it ended, since memory could not be mapped
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def loaded(self) -> tuple[int, int]:
        """Bytes that the newest load took from the daemon's memory, and from the volume."""

    def request(self, snapshot: int, /) -> None: ...  # OSError EBUSY when its entry is taken
    def submit(
        self,
        snapshot: int,
        ranges: _Packed,
        inline_ranges: _Packed,
        tail: _Packed,
        tail_offset: int,
        device_ranges: _Packed = b"",
        pulled_bytes: int = 0,
        pulled_devices: int = 0,  # bit mask
        *,
        provisional: bool = False,
        offered_bytes: int = 0,  # a prefix: copied only if it differs from the daemon's base
        step: int = 0,  # this and what follows: the request, see struct pcc_request
        skip: bool = False,
        map: int = 0,
        frozen_bytes: int = 0,
        held_at_ns: int = 0,
        held_ns: int = 0,
        base: int = 0,
        turn: int = 0,
        descents: int = 0,
        row: int = 0,
        interval: int = 0,
        division: int = 0,
        level: int = 0,
    ) -> None:
        """Requests the snapshot and starts the copy. `provisional`: the daemon cannot vouch for it
        before confirm()."""
    def image_begin(self, snapshot: int, bound_bytes: int, step: int, frozen_bytes: int) -> None:
        """Requests the snapshot, a process image of less than `bound_bytes`. It ends abandoned with
        EFBIG if it becomes longer. With `frozen_bytes` > 0 it may refer to an earlier image."""

    def image_stream(self, snapshot: int, fd: int, number: int, bulk: bool) -> None:
        """A pipe that is read to its end; `fd` is duplicated. What is not `bulk` is collected in
        memory, and comes behind what is. OSError ENOENT when the image has ended."""

    def image_extents(self, snapshot: int, /) -> list[tuple[int, int, int]]:
        """Stream number, offset in the payload and length of each piece, in the order of the
        payload, once all streams have ended; else OSError EBUSY. No further stream is taken."""

    def image_bytes(self, snapshot: int, /) -> int: ...  # of the payload so far
    def image_end(self, snapshot: int, tail: _Packed) -> None:
        """The tree follows what the streams had, and the payload is complete."""

    def device_open(self, device: int, /) -> str:
        """Readies a GPU for this client; "" or why the daemon cannot pull from it. NativeError
        NO_DRIVER, DEVICE."""

    def pin_for(self, device: int, *, later: bool = False) -> None:
        """The GPU is going to copy from or to granted memory, which is pinned ahead: what is there,
        with `later` also what is granted from now on."""

    def staging(self, device: int, nbytes: int) -> int: ...  # address; MemoryError
    def staging_trim(self) -> None: ...
    def stage(self, device: int, stream: int, copies: _Packed, *, aside: bool = False) -> None:
        """Copies on the device into its staging: packed <QQQ (address, staging offset, length)."""

    def sample(self, snapshot: int, device: int, stream: int, device_ranges: _Packed) -> None:
        """The stream copies a few bytes of these ranges, packed <QQQII (address, offset, length,
        GPU, 0), all that the snapshot has of GPUs. A copy with other bytes fails the snapshot."""

    def mark(
        self, snapshot: int, device: int, stream: int, *, pull: bool, aside: bool = False
    ) -> None: ...
    def hold(self, snapshot: int, device: int, stream: int | None, deadline_ns: int) -> bool:
        """The stream waits for the snapshot's copy; None: what is staged from now on waits until
        the staged snapshot was read. False when the deadline passed before that could be
        enqueued."""

    def reached(self, snapshot: int, /) -> bool:
        """False while a marked stream is still busy with what came before the snapshot."""

    def capturing(self, device: int, stream: int) -> bool: ...
    def expose(
        self, device_ranges: _Packed, device_bytes: int, known: bool = False, replica_id: int = 0,
        replica: _Packed = b"", shares: _Packed = b"",
    ) -> bytes:  # fmt: skip
        """The exposure of these ranges. `known`: the daemon has the exposure before. NativeError
        BAD_HANDLE when memory cannot be shared."""

    def unshareable(self, device_ranges: _Packed, /) -> bytes:
        """A byte for each range: 1 when its memory cannot be shared. NativeError."""

    def descriptors(self) -> list[int]:
        """The next that the daemon needs for the last exposure, at most DESCRIPTORS_MAX, the
        caller's to close; [] after the last. NativeError."""

    def exposure_holds(self) -> bool:
        """Whether the memory of the last exposure is still what it was then, and not other memory
        at the same addresses."""

    def wait(self, snapshot: int, what: str, deadline_ns: int) -> bool:
        """For "read", "host_read" (what lies on GPUs may not have been read yet), "copied",
        "durable" or "global", or "drained" (all that this process sends is handed over);
        False = deadline passed."""

    def confirm(self, snapshot: int, /) -> None:
        """The source of a provisional snapshot was not changed before it was read."""

    def write(self, snapshot: int, /) -> bool:
        """A snapshot of level memory, from its request on, is wanted on the disk: the daemon gets a
        "wanted" event, once. Nothing happens when it has ended or is being written. False: its GPU
        has failed, and the daemon looks for it with other ranks once this session has ended."""

    def abandon(self, snapshot: int, /) -> bool: ...
    def state(self, snapshot: int, /) -> ClientState | None: ...
    def load_start(self, load_id: int, ranges: _Packed, device_ranges: _Packed = b"") -> None: ...
    def load_wait(self, load_id: int, deadline_ns: int) -> int:
        """0 or the daemon's code; TimeoutError, ConnectionResetError. However it ends, nothing
        writes to the ranges afterwards."""
    def close(self) -> None: ...
