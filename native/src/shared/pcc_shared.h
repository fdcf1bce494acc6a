/* What a trainer and the daemon see of each other: the session page and the descriptors that pass
 * over the link. The daemon makes every memfd, sealed against resizing.
 *
 * Either side may be killed, stopped or hostile at any instruction. The daemon copies what it reads
 * once, checks it against state of its own, and never takes an offset, an index or a length from
 * here unchecked. A client that writes garbage harms only its own checkpoints.
 *
 *   struct pcc_page | ring to_client | ring to_daemon | checksum table
 *
 * The checksum table has a row for each chunk, and then PCC_OFFERS rows for what is offered.
 *
 * Both rings are single producer, single consumer, with room for every chunk, every segment, the
 * loads, the offers, the requests and what is wanted, so that an honest peer never finds one full.
 * Bells are futex words: the side that produced something increments the other's bell and wakes it
 * (FUTEX_WAKE, shared); a waiter reads the bell, looks for work, and sleeps only on the value it
 * read. */
#pragma once

#include "base/pcc_base.h"

#define PCC_PAGE_MAGIC 0x3145474150434350ull /* "PCCPAGE1" */
#define PCC_PAGE_VERSION 14u
#define PCC_SNAPSHOTS 64u /* outstanding snapshots per session; snapshot s uses entry s % 64 */
#define PCC_DEVICES 16u   /* GPUs per session, by the trainer's CUDA ordinal */
#define PCC_OFFERS 32u    /* unanswered offers per session; each has a row of checksums */

/* The snapshot word is (snapshot id << 8 | state), moved by compare-and-swap only:
 *   client: IDLE -> REQUESTED (then it sends PCC_MSG_REQUEST), REQUESTED|COPYING -> ABANDONED
 *   daemon: REQUESTED -> COPYING (it has a lane and a slot), COPYING -> VOUCHING -> COPIED,
 *           REQUESTED|COPYING -> REFUSED
 * So either the client abandons a snapshot or the daemon accepts it, never both (P4). VOUCHING
 * lasts for some instructions: the copy is complete and can no longer be abandoned. Meanwhile the
 * daemon stores for the next daemon that the snapshot is copied; COPIED follows. */
enum pcc_word_state {
    PCC_WORD_IDLE = 0,
    PCC_WORD_REQUESTED = 1,
    PCC_WORD_COPYING = 2,
    PCC_WORD_COPIED = 3,
    PCC_WORD_ABANDONED = 4,
    PCC_WORD_REFUSED = 5, /* skipped, failed or the copy broke: `outcome` says which */
    PCC_WORD_VOUCHING = 6,
};

/* The outcome is (snapshot id << 8 | checkpoint state), written by the daemon only. Numbers are
 * those of the wire's CheckpointState; GIVEN_UP, which follows DURABLE only, is of the page only.
 */
enum pcc_outcome {
    PCC_OUTCOME_REQUESTED = 0,
    PCC_OUTCOME_COPYING = 1,
    PCC_OUTCOME_COPIED = 2,
    PCC_OUTCOME_WRITING = 3,
    PCC_OUTCOME_DURABLE = 4,
    PCC_OUTCOME_GLOBAL = 5,
    PCC_OUTCOME_SUPERSEDED = 6,
    PCC_OUTCOME_SKIPPED = 7,
    PCC_OUTCOME_FAILED = 8,
    PCC_OUTCOME_GIVEN_UP = 9, /* durable here, and never on all ranks: nothing waits for GLOBAL */
};

/* Causes that the core itself gives; all of them are in pccheck_wire/ends.py. */
enum pcc_cause {
    PCC_CAUSE_CODE = 0,     /* stage and error say why */
    PCC_CAUSE_REPLACED = 1, /* a newer one became durable first */
    PCC_CAUSE_OTHER_RANK = 2,
    PCC_CAUSE_ENDED_BEFORE = 5,
    PCC_CAUSE_SLOTS_BUSY = 12,
    /* Of requests that no honest client of this version makes. */
    PCC_CAUSE_BAD_TREE = 23,
    PCC_CAUSE_BAD_TYPES = 24,
    PCC_CAUSE_BAD_LEVEL = 25, /* these three with the number as argument */
    PCC_CAUSE_BAD_KIND = 26,
    PCC_CAUSE_BAD_FLAGS = 27,
    PCC_CAUSE_WITHDRAWN = 30, /* of level DEVICE: training went on, or its place was needed */
};

struct pcc_reason {
    uint16_t cause;    /* enum pcc_cause, or the daemon's */
    uint16_t stage;    /* enum pcc_stage */
    int32_t error;     /* negative code; 0: none */
    uint64_t argument; /* of the cause: a rank, a limit, a sequence; of CODE the daemon's uid */
};

struct pcc_snapshot {
    _Atomic uint64_t word;
    _Atomic uint64_t outcome;
    _Atomic uint64_t sequence;
    _Atomic uint64_t base;  /* from COPYING on: the base's sequence; 0: nothing is offered */
    _Atomic uint64_t newer; /* of SUPERSEDED: the sequence that is durable instead, so that a client
                               knows it when the daemon has ended; 0: it was damaged since */
    /* Why it ended so. `explained` is the outcome that the reason is of, 0 while that is written:
     * the daemon stores 0, the reason, `explained`, and then the outcome, so that who sees an
     * outcome finds its reason. A reader takes the reason between two looks at `explained`, and
     * only if both show the outcome that it saw; else the daemon is writing the next state, and the
     * reader looks again. A daemon that is killed in between leaves an outcome without a reason. */
    _Atomic uint64_t explained;
    _Atomic uint64_t reason; /* cause << 48 | stage << 32 | error */
    _Atomic uint64_t argument;
};
_Static_assert(sizeof(struct pcc_snapshot) == 64, "one cache line per snapshot");

/* Pull: the order of a snapshot on one GPU, as words that its streams write and wait for (>=). The
 * words of an entry only grow, since each holds a snapshot id.
 *   ready: the trainer's stream -> daemon: all that the snapshot depends on has been computed
 *   done:  daemon -> the trainer's stream: this GPU's part was read, or never will be
 *   withdrawn: the trainer's stream -> daemon, of level DEVICE: what follows on the stream changes
 *     the memory. So a part may be read while withdrawn < snapshot <= ready, and what was read
 *     counts only if it still is so afterwards
 *   broken: the client -> daemon, of level DEVICE: the driver has reported an error, so the memory
 *     may hold anything, and is not read. The memory of another rank may be (pcc_exposed_share)
 * The daemon's CPU reads ready and writes done; a client that lets its trainer go writes done, too.
 * Words per snapshot, not one counter: snapshots may come from different streams, and letting go of
 * one must not release another. */
struct pcc_device_words {
    _Atomic uint64_t ready;
    _Atomic uint64_t done;
    _Atomic uint64_t withdrawn;
    _Atomic uint64_t broken;
};
_Static_assert(sizeof(struct pcc_device_words) == 32, "words of one GPU");

/* The request of a snapshot. The client fills the block before it sends PCC_MSG_REQUEST, and
 * changes nothing in it until the word has left REQUESTED. The daemon copies the block once and
 * checks the copy: a number that cannot be is the end of this checkpoint (REFUSED, FAILED). */
/* A checkpoint of level DEVICE is one of level MEMORY whose device part stays on the GPUs until its
 * owner wants it (PCC_MSG_WRITE), withdraws it, or has ended. */
enum pcc_level { PCC_LEVEL_DISK = 0, PCC_LEVEL_MEMORY = 1, PCC_LEVEL_DEVICE = 2 };
/* A process image has open length: payload_bytes is its bound, PCC_MSG_LENGTH comes later, and of
 * the rest of the request only step and name are not 0. */
enum pcc_kind { PCC_KIND_TENSORS = 0, PCC_KIND_IMAGE = 1 };
enum pcc_request_flags {
    PCC_REQUEST_SKIP = 1
}; /* ends SKIPPED, not waiting, without a lane or slot */

struct pcc_request {
    uint64_t snapshot; /* whose block this is */
    int64_t step;
    uint64_t payload_bytes;
    uint64_t tree_offset_bytes; /* within the payload */
    uint64_t tree_bytes;
    uint64_t map; /* the exposure that the daemon pulls the device part by; 0: none */
    /* The bytes of the payload that are of tensors that do not train. Unless 0, the checkpoint may
     * refer to an earlier one, whose slot is then kept; checksums decide what is written again. */
    uint64_t frozen_bytes;
    /* If there is such an earlier one, whole chunks of the payload before this byte are offered. */
    uint64_t offered_bytes;
    /* Where in the payload a table of the tensors' types by range lies; both 0: there is none. */
    uint64_t types_offset_bytes;
    uint64_t types_bytes;
    /* When the gate first held the trainer since the request before (CLOCK_MONOTONIC), and for how
     * long in total; for metrics and traces. */
    uint64_t held_at_ns;
    uint64_t held_ns;
    /* With `step` the name of this checkpoint, the same on every rank of a group: the sequence that
     * was restored last in this start (0: none) with the turn of its `Restored`, how often the step
     * has gone down since then, and how often the step was repeated directly. */
    uint64_t base;
    uint64_t turn;
    uint64_t descents;
    uint64_t row;
    uint64_t
        interval; /* steps between checkpoints, as should_checkpoint() chose; 0: the script does */
    /* Of replicated state: a hash of the sizes of what is divided among the ranks. Ranks with
     * another one divide it in another way, and together store no whole. 0: nothing is divided. */
    uint64_t division;
    uint32_t level;       /* enum pcc_level: where the checkpoint is to be safe */
    uint32_t kind;        /* enum pcc_kind: what the payload holds */
    uint32_t flags;       /* enum pcc_request_flags */
    uint32_t reserved[3]; /* 0 */
};
_Static_assert(sizeof(struct pcc_request) == 168, "request");

struct pcc_ring_index { /* own cache lines for producer and consumer; free-running, mod capacity */
    _Alignas(64) _Atomic uint32_t head; /* consumer */
    _Alignas(64) _Atomic uint32_t tail; /* producer */
};

enum pcc_message_kind {
    PCC_MSG_FREE = 1,     /* to client: this chunk is yours to fill */
    PCC_MSG_FULL = 2,     /* to daemon: chunk holds payload [offset, +length) of snapshot id */
    PCC_MSG_DATA = 3,     /* to client: chunk holds payload of load id; give it back */
    PCC_MSG_TAKEN = 4,    /* to daemon: load data copied out; also FREE chunks handed back unused */
    PCC_MSG_END = 5,      /* to client: load id has ended; result holds 0 or a negative code */
    PCC_MSG_RETIRE = 6,   /* to client: segment id, whose first chunk this is, has to go */
    PCC_MSG_RETURNED = 7, /* to daemon: it is unmapped, and none of its chunks is held */
    PCC_MSG_OFFER = 8,  /* to daemon: as FULL, but of a piece that was only read: its checksums are
                           in row `chunk`. It is not copied if all of it lies in the base */
    PCC_MSG_ANSWER = 9, /* to client, of each offer: result 1 = it does, 0 = copy it */
    PCC_MSG_REQUEST = 10, /* to daemon: snapshot id is requested by its block; ids only grow */
    PCC_MSG_WRITE = 11, /* to daemon, once: snapshot id, not of level DISK, is wanted on the disk */
    /* To daemon, once, of an image: its payload is [0, offset + length), and these last bytes are
     * the tree. Before this message every FULL is a whole chunk, and the last chunk comes after it.
     */
    PCC_MSG_LENGTH = 12,
};

/* `result` of FULL: the checksums are in the chunk's row of the table, or the daemon's writers make
 * them before they write. */
enum pcc_full { PCC_FULL_HASHED = 0, PCC_FULL_BARE = 1 };

/* `result` of DATA. The client checks UNCHECKED bytes against the chunk's row of the checksum table
 * while it copies them, so that they pass through memory once. If they do not match, none of that
 * block gets into host memory, what a GPU has got counts for nothing, and TAKEN has the result
 * -PCC_E_DAMAGED. The daemon then reads again, checks, and judges: a client's complaint alone never
 * makes a checkpoint count as damaged. CACHED bytes were still in the daemon's memory; others have
 * just been read from the volume. */
enum pcc_data { PCC_DATA_UNCHECKED = 0, PCC_DATA_CHECKED = 1, PCC_DATA_CACHED = 2 };

struct pcc_message {
    uint32_t kind;
    uint32_t chunk;
    uint64_t id;           /* snapshot or load */
    uint64_t offset_bytes; /* within the payload */
    uint32_t length_bytes;
    int32_t result;
};
_Static_assert(sizeof(struct pcc_message) == 32, "ring message");

/* Where what is offered ends, in whole chunks. The last chunk of a payload is never offered: by
 * keeping it the client decides when a snapshot is complete. */
static inline uint64_t pcc_offered_end(uint64_t offered_bytes, uint64_t payload_bytes,
                                       uint64_t chunk_bytes)
{
    const uint64_t most = payload_bytes > 0 ? payload_bytes - 1 : 0;

    return (offered_bytes < most ? offered_bytes : most) / chunk_bytes * chunk_bytes;
}

/* Pull: before bytes of an exposure get into chunks, which the client sees, the client shows that
 * it reads the same as the daemon does: blocks that the daemon has chosen and read, one of every
 * allocation and piece. The daemon fills in device, count and blocks, and then `asked`. The client
 * has its GPU copy the blocks into `bytes`, stores `result`, and then `answered` = `asked`. */
#define PCC_PROOF_BLOCKS 64u
#define PCC_PROOF_BYTES 256u /* of a block; it may be shorter */
struct pcc_proof_block {
    uint64_t address; /* in the client */
    uint32_t length_bytes;
    uint32_t reserved;
};
struct pcc_proof {
    _Alignas(64) _Atomic uint64_t asked; /* questions so far */
    uint32_t device;                     /* of the question */
    uint32_t count;
    struct pcc_proof_block blocks[PCC_PROOF_BLOCKS];
    /* By the daemon: the newest exposure by which it asks no more about a GPU. */
    _Atomic uint64_t proven[PCC_DEVICES];
    _Alignas(64) _Atomic uint64_t answered; /* by the client, what follows, too */
    int32_t result;
    uint8_t bytes[PCC_PROOF_BLOCKS][PCC_PROOF_BYTES];
};

/* Bytes of a snapshot's device part that the trainer's streams have copied before anything else.
 * What is pulled or pushed has to be the same there, or the snapshot fails: the trainer has changed
 * its memory meanwhile, or the driver does not do what it promises. The client chooses places;
 * length 0: none. */
#define PCC_SAMPLES 32u /* of a snapshot, on all its GPUs */
#define PCC_SAMPLE_BYTES 64u
struct pcc_sample {
    uint64_t offset_bytes; /* within the payload; in one chunk */
    uint32_t length_bytes;
    uint32_t reserved;
    uint8_t bytes[PCC_SAMPLE_BYTES];
};
_Static_assert(sizeof(struct pcc_sample) == 80, "sample");

struct pcc_page {
    uint64_t magic;
    uint32_t version;
    uint32_t page_bytes; /* of the whole mapping; up to 4 GiB */
    uint32_t chunk_bytes;
    uint32_t block_bytes;
    uint32_t chunk_capacity; /* chunk indices are below this */
    uint32_t ring_capacity;  /* power of two; see pcc_page_plan */
    uint64_t session;
    _Alignas(64) _Atomic uint32_t client_bell; /* client sleeps here */
    /* Stored once, when the session is over: */
    _Atomic uint32_t ended; /* by the daemon: no chunk is the client's to fill any more */
    _Atomic uint32_t quiet; /* by the client: nothing of it writes to a chunk any more */
    /* By the daemon: a number, which a thread of the trainer repeats in `life_told`. So the process
     * lived after the question. */
    _Atomic uint32_t life_asked;
    _Alignas(64) _Atomic uint32_t daemon_bell; /* daemon sleeps here */
    _Atomic uint32_t life_told;
    struct pcc_ring_index to_client;
    struct pcc_ring_index to_daemon;
    _Alignas(64) struct pcc_snapshot snapshots[PCC_SNAPSHOTS];
    _Alignas(64) struct pcc_device_words devices[PCC_SNAPSHOTS][PCC_DEVICES];
    _Alignas(64) struct pcc_request requests[PCC_SNAPSHOTS]; /* snapshot s uses block s % 64 */
    struct pcc_proof proof;
    _Alignas(64) struct pcc_sample samples[PCC_SNAPSHOTS][PCC_SAMPLES]; /* as the words */
};

/* Segments come over the link, a socket (SOCK_SEQPACKET) that carries nothing else: a packet and a
 * descriptor each, daemon to client.
 *
 * They go through the rings, where order is: RETIRE is behind every FREE and DATA that names a
 * chunk of the segment, and nothing names one afterwards. The client gives the chunks back that it
 * has not begun to fill (TAKEN), hands over those that it has, unmaps, and says RETURNED. Only then
 * the daemon uses the chunk numbers again, for other memory; segment numbers are never used again.
 */
#define PCC_GRANT_MAGIC 0x31544e5247434350ull /* "PCCGRNT1" */
enum pcc_grant_kind { PCC_GRANT_ADD = 1 };
struct pcc_grant {
    uint64_t magic;
    uint32_t kind;
    uint32_t segment; /* its number: 1, 2, ... within a tenant */
    uint32_t first_chunk;
    uint32_t chunk_count;
    uint64_t bytes; /* chunk_count * chunk_bytes */
};

/* Pull: which device memory a snapshot is read from. The client makes this block once per layout of
 * its state, the daemon checks every number in it and opens the handles; a request names the block
 * by its map number.
 *
 *   struct pcc_exposure | allocations | ranges | replica ranges | shares
 *
 * Ranges ascend by payload offset and do not overlap; every chunk holds some, of one GPU only; the
 * parts of a chunk that no range fills are zeros. Payload [0, device_bytes), a multiple of the
 * chunk size, is the daemon's to fill, what follows is the client's.
 *
 * Ranks that divide replicated state have all of it. The replica is a space in which each tensor
 * has the same place on all these ranks; `replica_id` names it. Ranges of the replica say where
 * this rank has the bytes of that space. Shares say which bytes of this payload are which bytes of
 * the replica; a payload with shares holds nothing else. When the memory of a dead rank cannot be
 * read, its shares are read from the memory of another rank (pcc_tenant_waiting.c). */
#define PCC_EXPOSURE_MAGIC 0x3350584547434350ull /* "PCCGEXP3" */
#define PCC_EXPOSED_ALLOCATIONS_MAX 16384u
#define PCC_EXPOSED_RANGES_MAX 262144u
#define PCC_EXPOSURE_BYTES_MAX (16u << 20)
/* Of all runs of an exposure; torch's pieces have 20 MiB, and those for small tensors 2 MiB. */
#define PCC_EXPOSED_PIECES_MAX 16384u
/* In one message: as many as the kernel passes. What did not fit it would close within recvmsg, and
 * a socket that lingers holds the caller up there. */
#define PCC_DESCRIPTORS_MAX 253u
#define PCC_EXPOSED_RUNS_BYTES_MAX (4ull << 40)
/* Ranges with less than this between them, the same in memory and payload, are exposed as one:
 * torch rounds tensors up to it, and a copy of its own for each of many small ones takes far
 * longer. */
#define PCC_EXPOSED_GAP_MAX 512u
/* Each tensor of a replica begins at a multiple of this. So one that a rank does not have leaves a
 * gap of this length, or a longer one. */
#define PCC_REPLICA_ALIGN 64u

struct pcc_exposure {
    uint64_t magic;
    uint32_t allocation_count;
    uint32_t range_count;
    uint64_t device_bytes;
    /* The first 16 bytes at this place were written by the client before it sent this: what the
     * daemon reads through its own mapping has to be equal, else handles do not mean here what they
     * mean there. */
    uint32_t probe_allocation;
    uint32_t reserved;
    uint64_t probe_offset_bytes;
    uint8_t probe[16];
    uint64_t replica_id;    /* 0: there is no replica */
    uint32_t replica_count; /* ranges of the replica */
    uint32_t share_count;
};
_Static_assert(sizeof(struct pcc_exposure) == 72, "exposure");

/* One cudaMalloc: its base, never a tensor inside. Or, with `pieces`, a run: memory of cuMemCreate,
 * mapped side by side in pieces of one length, each of which has a descriptor. The descriptors come
 * over the attach socket before the exposure, in the order of runs and pieces. A run that the
 * daemon has mapped for the previous exposure keeps its name, and has none. */
struct pcc_exposed_allocation {
    uint8_t handle[64]; /* cuIpcGetMemHandle; of a run, its name: random bytes */
    uint8_t uuid[16];   /* of the GPU */
    uint64_t length_bytes;
    uint64_t buffer_id; /* the exporter's name for it; with the handle it is never used again */
    uint64_t address;   /* where the exporter has it, for proofs */
    uint32_t device;    /* index of the words: the exporter's CUDA ordinal */
    uint32_t pieces;    /* 0: the handle opens it */
};
_Static_assert(sizeof(struct pcc_exposed_allocation) == 112, "exposed allocation");

struct pcc_exposed_range {
    uint32_t allocation;
    uint32_t reserved;
    uint64_t allocation_offset_bytes;
    uint64_t offset_bytes; /* within the payload, or the replica */
    uint64_t length_bytes;
};
_Static_assert(sizeof(struct pcc_exposed_range) == 32, "exposed range");

struct pcc_exposed_share { /* ascending by payload offset, without overlaps there */
    uint64_t replica_offset_bytes;
    uint64_t offset_bytes; /* within the payload */
    uint64_t length_bytes;
};
_Static_assert(sizeof(struct pcc_exposed_share) == 24, "exposed share");
