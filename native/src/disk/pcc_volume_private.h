/* The inside of a volume, shared by pcc_volume.c (tables, slots, holds), pcc_volume_file.c (files)
 * and pcc_commit.c (records: finding, repairing, publishing).
 *
 * Locks, outermost first: publishing (held over record I/O) -> lock (tables and holds; held for
 * microseconds, never over I/O). */
#pragma once

#include "base/pcc_thread.h"
#include "disk/pcc_named_file.h"
#include "disk/pcc_volume.h"

_Static_assert(PCC_SLOTS_MAX <= 32, "a bit for each slot");

struct pcc_volume {
    struct pcc_io *io;
    bool writable;
    struct pcc_named_file file;
    struct pcc_geometry geometry;

    pthread_mutex_t publishing;
    struct pcc_record *buffer; /* aligned; guarded by publishing */

    pthread_mutex_t lock;
    struct pcc_record durable; /* sealed as replica A */
    struct pcc_record staged;  /* slots, incarnation, start_id, world_size, done, record_lost and
                                * promise count; the rest is stale */
    uint32_t free_slots;       /* bits */
    uint32_t last_slot;        /* that was taken: the next one is the first free one behind it */
    uint32_t spared;           /* bits: see pcc_volume_spare() */
    uint32_t references[PCC_SLOTS_MAX]; /* of saves in flight, to their bases */
    uint32_t suspected;        /* bits: bases of damaged checkpoints that have left the table */
    struct {                   /* see pcc_volume_judge_base() */
        uint64_t sequence;     /* of the base judged last */
        uint64_t poor;         /* of the one that no save begins with */
        uint64_t missed_bytes; /* that the last save did not find in it */
        uint64_t wasted_bytes; /* that all did not */
        uint32_t patience;     /* how often its size may be wasted */
        uint32_t rest;         /* saves that begin without one */
    } base;
    struct { /* a save of this start may begin while the record of the newest one is written */
        uint64_t incarnation;
        uint8_t id[PCC_UUID_BYTES];
    } start_before;
    uint32_t holds[PCC_SLOTS_MAX];
    bool free_on_release[PCC_SLOTS_MAX];
    struct pcc_volume_health health;
    struct pcc_volume_group group;

    _Atomic uint64_t next_sequence;
    _Atomic uint64_t superseding;    /* see pcc_volume_superseding() */
    _Atomic uint32_t given_up_count; /* of `group`; read without the lock to skip the search */
    _Atomic bool stopped;
};

/* -- pcc_commit.c -- */
/* What is on the media. `record` is the newest acceptable record, as replica A holds it. `good`
 * says for each replica of its generation whether that replica was acceptable. */
struct pcc_commit_found {
    struct pcc_record record;
    bool good[PCC_REPLICAS];
    uint32_t damaged_records;
    /* The other generation has no acceptable replica, as no crash leaves it: the newest record may
     * have been there, and with it a checkpoint that was reported durable. */
    bool record_lost;
    uint32_t unreadable[PCC_GENERATIONS]; /* replicas that a read error hides */
    int read_error;
};
PCC_MUST_CHECK int pcc_commit_find(struct pcc_io *io, struct pcc_commit_found *out);
/* Writes missing replicas of the newest record, then the record of this opening. */
PCC_MUST_CHECK int pcc_commit_opening(struct pcc_volume *volume,
                                      const struct pcc_commit_found *found);
/* With `publishing` held: the staged table becomes the next record. on_durable may be NULL. */
PCC_MUST_CHECK int pcc_commit_staged(struct pcc_volume *volume, void (*on_durable)(void *context),
                                     void *context);
/* With `lock` held: from the durable table, or what the group says. */
void pcc_commit_superseding(struct pcc_volume *volume);
/* The newest undamaged durable sequence of a table; 0 = none. */
uint64_t pcc_commit_newest(const struct pcc_record *record);
/* A volume of one of several ranks: what may go is decided for all of them together. */
bool pcc_commit_is_grouped(const struct pcc_record *record);
bool pcc_commit_gives_up(const struct pcc_volume_group *group, uint64_t sequence);
/* Bit s is set for each durable slot that may be recycled. A lone rank keeps its newest `keep`;
 * a rank of a group keeps what `group` says, whatever `keep` is. A pinned slot always stays, and
 * so do those `in_use`, and what one that stays refers to. */
uint32_t pcc_commit_expendable(const struct pcc_record *record, uint32_t keep,
                               const struct pcc_volume_group *group, uint32_t in_use);
