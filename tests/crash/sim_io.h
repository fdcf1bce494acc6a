/* A disk in memory behind the storage interface: it records what was written, flushed and
 * acknowledged, in order, and fails the n-th operation when told to.
 *
 * What a crash may leave on the media is not decided here: the log is, by media.h. Single-threaded.
 */
#pragma once

#include <setjmp.h>

#include "disk/pcc_format.h"
#include "io/pcc_io.h"
#include "rng.h"

#define SIM_SECTOR 512u
#define SIM_SEQUENCES_MAX 1024u
#define SIM_OPERATIONS_MAX 200000u /* one session needs some hundreds: more is a hang */

/* What the engines promise of their writes, at its weakest. */
enum sim_model {
    SIM_DIRECT, /* pwrite: pieces of a write in any order, torn between sectors */
    SIM_MAPPED, /* mmap: pages go out at any time, in any order, also in the middle of a store; an
                   error of that is told once, by the next flush or record, whosever page it was */
    SIM_PMEM,   /* pmem: stores in any order and in any part until the fence; a flush, here */
    SIM_MODELS,
};
extern const char *const sim_model_names[SIM_MODELS];

enum sim_kind { SIM_WRITE, SIM_DURABLE, SIM_FLUSH, SIM_ACK, SIM_RETAIN, SIM_DAMAGED };

/* Which part of the protocol an operation belongs to; what happens just before or during it is a
 * gap that crashes must hit. */
enum sim_part {
    PART_CHUNK, /* payload into a slot never used before in this session */
    PART_REUSE, /* payload into a slot that an earlier checkpoint held */
    PART_MOVED, /* payload after a write or flush error, into another slot */
    PART_MANIFEST,
    PART_FLUSH,
    PART_SAVE_A, /* the record that publishes a checkpoint */
    PART_ACK,
    PART_SAVE_B,
    PART_OPEN_A, /* the record of an opening, also after a crash: repair */
    PART_OPEN_B,
    PART_POLICY_A, /* flags, incarnation, done, quarantine */
    PART_POLICY_B,
    PART_RETAIN, /* only marks that a pinned checkpoint may not go from here on, or that one is
                    going to be flagged damaged */
    PART_COUNT,
};
extern const char *const sim_part_names[PART_COUNT];

enum sim_purpose { PURPOSE_SAVE, PURPOSE_OPEN, PURPOSE_POLICY };

struct sim_entry {
    enum sim_kind kind;
    enum sim_part part;
    bool failed; /* reported as failed: what it touched is in doubt until written again */
    uint64_t offset;
    uint64_t length;
    uint8_t *bytes;
    uint64_t arrived;  /* failed writes: bit per sim_doubt_bytes, what a later read saw of it */
    uint64_t sequence; /* of SIM_ACK; SIM_RETAIN (0: nothing retained any more); SIM_DAMAGED: what
                          is the newest from here on */
};

enum sim_fault_kind {
    FAULT_NONE,
    FAULT_EIO,    /* any operation */
    FAULT_ENOSPC, /* any write */
    FAULT_SHORT,  /* any transfer moves less than asked */
    FAULT_ZERO,   /* any transfer moves nothing */
    FAULT_EINTR,  /* any operation */
    FAULT_DATA,   /* EIO, writes into slots only */
    FAULT_FLUSH,  /* EIO, flushes only */
    FAULT_RECORD, /* EIO, durable writes only */
    FAULT_READ,   /* EIO, reads only */
    FAULT_BEHIND, /* a write is good, its write-back is not: SIM_MAPPED only */
    FAULT_KINDS,
};
extern const char *const sim_fault_names[FAULT_KINDS];

struct sim_fault {
    enum sim_fault_kind kind;
    uint64_t at; /* counts the operations that this kind can hit, from 1 */
    bool persistent;
};

enum sim_mutant { /* broken protocols that need no change of the core */
                  SIM_SOUND,
                  SIM_NO_FLUSH,   /* no first flush: the record overtakes its data */
                  SIM_NO_DURABLE, /* no second flush: acknowledged while still in the drive's cache
                                   */
                  SIM_WRONG_SLOT, /* now and then a write goes one slot too far */
                  SIM_NO_REPLICA, /* records are written once, at the head only */
};

struct sim {
    struct pcc_io io; /* first member */
    uint8_t *image;   /* what reads see */
    uint8_t *base;    /* what was on the media when the log began */
    uint64_t size_bytes;
    struct rng rng;
    struct pcc_geometry geometry;
    enum sim_model model;
    uint32_t tear_bytes; /* what is never torn: a unit of media.h */
    bool unreported;     /* a write-back failed, and nobody was told yet */

    bool recording;
    struct sim_entry *log;
    uint32_t log_count, log_capacity;

    struct sim_fault fault;
    uint64_t fault_seen; /* operations that the fault's kind could have hit */
    uint64_t fault_hits;
    uint64_t operations;

    enum sim_mutant mutant;
    enum sim_purpose purpose;
    void (*beside)(void *owner); /* what other threads do while a record is being written */
    void *owner;
    bool is_beside;
    jmp_buf death;
    uint64_t dies_in; /* moments before and after operations until the process dies; 0: it lives */
    bool moving;      /* a save of this session met an error in a slot */
    bool slot_used[PCC_SLOTS_MAX];
    bool slot_bad[PCC_SLOTS_MAX]; /* a write failed there: nobody may write there again */
    bool record_bad; /* a record write failed: nothing may be published before a reopen */
    bool acknowledged[SIM_SEQUENCES_MAX];
    uint64_t last_ack;  /* newest sequence acknowledged since the log began, and not damaged */
    uint64_t top_ack;   /* the same, damaged or not */
    bool lenient;       /* a mutant is at work: only crashes are to convict it */
    const char *breach; /* the first rule the core broke, or NULL */
};

struct sim *sim_new(uint64_t size_bytes, uint64_t seed);
void sim_free(struct sim *sim);
/* The media holds these bytes (borrowed; NULL: what reads see now); the log starts afresh. */
void sim_restart(struct sim *sim, const uint8_t *media);
/* What a reopened volume forgets: quarantine that never reached a record, the stopped publisher. */
void sim_reopened(struct sim *sim);
void sim_set_fault(struct sim *sim, enum sim_fault_kind kind, uint64_t at, bool persistent);
void sim_mark(struct sim *sim, enum sim_kind kind, uint64_t sequence);
void sim_breach(struct sim *sim, const char *what); /* the first one is kept */
enum sim_model sim_model_named(const char *name);   /* NULL: SIM_DIRECT */
/* Errors strike sectors at least, however finely a crash may tear. */
static inline uint64_t sim_doubt_bytes(uint64_t unit_bytes)
{
    return unit_bytes > SIM_SECTOR ? unit_bytes : SIM_SECTOR;
}

/* A read-only view of an image, for recovery: one sector may be unreadable (UINT64_MAX: none). */
struct sim_view {
    struct pcc_io io; /* first member */
    const uint8_t *image;
    uint64_t bad_sector;
};
void sim_view_open(struct sim_view *view, const uint8_t *image, uint64_t size_bytes,
                   uint64_t bad_sector);

/* The simulation that acknowledgements are recorded in (see hooks.c). */
extern struct sim *sim_current;
/* Session-independent time and randomness: hooks.c answers for the kernel. */
void hooks_seed(uint64_t seed);
void hooks_died(void); /* the process that was in the middle of a record */
