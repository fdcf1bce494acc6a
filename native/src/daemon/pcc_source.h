/* Who fills the chunks of a save. Each stretch of the payload has one source: pcc_source_push.c
 * (the client), pcc_source_pull.c (GPUs), pcc_source_kept.c (memory that an earlier daemon left).
 *
 * A source takes chunks with pcc_tenant_pick, and delivers each piece with pcc_tenant_received,
 * pcc_tenant_chunk_to_save and pcc_tenant_copy_check; a source that fails calls pcc_tenant_abort.
 * With the tenant's lock held, a verb neither waits, nor does I/O, nor calls a driver. */
#pragma once

#include "disk/pcc_save.h"

#define PCC_SOURCES 2u /* of one save: what the daemon reads by itself comes before the rest */

struct pcc_source;
struct pcc_tenant;
struct pcc_tenant_save;

struct pcc_source_ops { /* NULL: there is nothing to do */
    /* Lock held, before there is a save: takes a stretch from from_bytes on, which may be empty,
     * and all that the source needs for it. `name`: of what is read, in the source's own numbers.
     * Codes as of `begin` in pcc_tenant_queue.c; after an error nothing is taken. */
    int (*begin)(struct pcc_tenant *tenant, struct pcc_source *source, uint64_t name,
                 struct pcc_save_request *request);
    /* Lock held: the pieces in [from, to) of the payload are to be filled, in any order. First all
     * that is not offered, later each piece that the base lacks. Cannot fail. */
    void (*want)(struct pcc_tenant *tenant, struct pcc_tenant_save *save, struct pcc_source *source,
                 uint64_t from_bytes, uint64_t to_bytes);
    /* Lock held: tells the owner whether the base has the piece that it offered. Or an error. */
    int (*answer)(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                  uint64_t offset_bytes, bool in_base);
    /* Lock held; again when the save ends; without a save when there will be none. Nothing more is
     * wanted, and the owner may change its bytes. What is under way may still arrive, and is
     * dropped: chunks that it fills stay the source's until then. */
    void (*abandon)(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                    struct pcc_source *source);
    /* Lock held: these parts were read while the owner lived, so the owner may change them. */
    void (*drained)(struct pcc_tenant *tenant, const struct pcc_tenant_save *save, uint32_t parts);
    /* No lock, control held: the session is over, its saves are copied or given up. Waits, for a
     * bounded time, until nothing fills chunks; what may still be written to is LEFT or LOST. */
    void (*leave)(struct pcc_tenant *tenant);
};

struct pcc_source {                   /* guarded by the tenant's lock */
    const struct pcc_source_ops *ops; /* NULL: there is none */
    uint64_t from_bytes, to_bytes;    /* its stretch of the payload: whole chunks, or the end */
    uint32_t parts, read;             /* a bit for each part that counts if its owner lived after */
    uint32_t asked, judged;           /* of those: the owner was asked; it has answered */
    uint32_t proven;                  /* pull: parts that may be read: their owner can read them */
    struct pcc_tenant_map *map; /* pull: what is read; while a part is unproven, or under way */
    bool deferred;              /* pull: nothing is read before its owner wants it, or has ended */
    uint32_t users;             /* threads at work: meanwhile the save's entry is not reused */
    uint32_t wanted;            /* pieces that have not come; of push and kept */
    union {                     /* what is read */
        struct pcc_tenant_part *pulled; /* a part for each GPU, before anything is wanted */
        uint32_t kept_place;            /* where the state memfd has the save */
    };
};

extern const struct pcc_source_ops pcc_source_push, pcc_source_pull, pcc_source_kept;
