/* The daemon's end of push: one tenant per (uid, job, rank). It owns the segments and what each
 * chunk holds, feeds the savers, and outlives the trainer: a detached tenant keeps its cached
 * chunks for recovery from DRAM.
 *
 * A chunk is FREE -> GRANTED (a FREE message is out) -> FULL (validated, with the saver) -> CACHED
 * (written; re-used oldest first) -> FREE; loads borrow FREE or CACHED chunks (LENT). The drain
 * thread, one per attached session, is the only consumer of to_daemon; everything the client says
 * is checked against this table. A chunk that a client still had to fill when its session ended is
 * LEFT, unless it has closed or its process has ended: that process may write to it at any time.
 * A LEFT chunk is never used again, and its segment goes back to the kernel.
 *
 * Pull: chunks of a payload's device part are filled by the GPU's copier (pcc_gpus.h) out of memory
 * that the trainer exposed, without passing through the client (pcc_source_pull.c).
 *
 * Events go to the daemon's loop (pcc_events). */
#pragma once

#include "disk/pcc_load.h"
#include "disk/pcc_save.h"
#include "events/pcc_events.h"
#include "gpu/pcc_gpus.h"
#include "pool/pcc_pool.h"
#include "shared/pcc_shared.h"

struct pcc_tenant;

struct pcc_tenant_spec {
    uint64_t id;
    uint32_t chunk_bytes;
    uint32_t block_bytes;
    uint32_t chunk_capacity;   /* of all segments together */
    uint32_t lanes;            /* N per volume */
    uint32_t writers_per_lane; /* p */
    const char *label;         /* of its memory in the descriptor store; NULL or "": not kept */
    bool foreign;              /* its trainers are another user's than this process */
};

/* Borrows pool, events and gpus (NULL: CPU tensors only). */
PCC_MUST_CHECK int pcc_tenant_open(struct pcc_pool *pool, struct pcc_events *events,
                                   struct pcc_gpus *gpus, const struct pcc_tenant_spec *spec,
                                   struct pcc_tenant **out);
/* Drains sealed saves; returns segments. If something is still parked and the descriptor store has
 * it, all of the memory stays there for the next daemon. */
void pcc_tenant_close(struct pcc_tenant *tenant);

/* New saves go to `volume`; saves in flight continue on the previous volume. Borrows volume. */
PCC_MUST_CHECK int pcc_tenant_bind(struct pcc_tenant *tenant, struct pcc_volume *volume);
/* Forgets a volume that is no longer the bound one, or any when idle. -EBUSY while it has saves, or
 * one of them is being settled. */
PCC_MUST_CHECK int pcc_tenant_unbind(struct pcc_tenant *tenant, struct pcc_volume *volume);

/* -- what a daemon that was killed has left in the descriptor store; before the first session -- */

struct pcc_kept_outcome { /* a save that it had copied */
    struct pcc_slot_entry entry;
    int error; /* 0: it continues; codes of pcc_save_adopt; -EBADMSG: its chunks cannot be */
};
#define PCC_KEPT_OUTCOMES_MAX 64u

/* A segment by its id in the store, for bind_kept to find saves in. Chunks that belong to none are
 * LEFT, since a client of the earlier daemon may still fill them. Takes `fd` on success. Codes of
 * pcc_pool_adopt, -EBUSY when it is too late, -ENOSPC when there are more than chunk_capacity. */
PCC_MUST_CHECK int pcc_tenant_adopt(struct pcc_tenant *tenant, int fd, uint64_t id);
/* pcc_tenant_bind to a volume with its state memfd: what was copied continues as saves of session
 * 0 whose snapshot is their sequence; settle then checks their chunks. Without I/O. What was parked
 * stays parked, and is written by itself, the newest first, as lanes and slots become free.
 * `outcomes` has room for PCC_KEPT_OUTCOMES_MAX. -PCC_E_DAMAGED, -PCC_E_NEWER_FORMAT, -EINVAL when
 * the state is not one of this volume in a tenant like this; the caller binds without it then. */
PCC_MUST_CHECK int pcc_tenant_bind_kept(struct pcc_tenant *tenant, struct pcc_volume *volume,
                                        int fd, uint64_t id, struct pcc_kept_outcome *outcomes,
                                        uint32_t *count_out);
/* Checks what was adopted against its checksums, oldest first, and hands it to the savers; a save
 * with a chunk that was changed meanwhile ends FAILED, "copy", DAMAGED. Blocks. */
void pcc_tenant_settle(struct pcc_tenant *tenant);

/* A trainer connected: a fresh page. page_fd_out is the caller's to send and close. Segments are
 * granted over socket_fd (duplicated) by the next grow or before they are first used, so that the
 * handshake's answer comes before them. `pid` is the trainer as the kernel names it here, 0 when
 * unknown: it tells when the process has ended. -EBUSY when one is attached. */
PCC_MUST_CHECK int pcc_tenant_attach(struct pcc_tenant *tenant, int socket_fd, uint64_t session,
                                     int32_t pid, int *page_fd_out);
/* The trainer is gone: drains what is in the ring, seals what is complete, aborts the rest,
 * takes granted chunks back if nothing can still write to them (they are LEFT else), closes its GPU
 * mappings. DETACHED follows as an event. Blocks for the drain, for GPU copies under way, and five
 * seconds at most for the end of a process. Copies a last step that is on the trainer's GPUs. If
 * that memory cannot be read, it copies the step from one of the `others`, tenants of ranks of the
 * job (NULLs are skipped), and returns the index of that one; else -1. */
int32_t pcc_tenant_detach(struct pcc_tenant *tenant, struct pcc_tenant *const *others,
                          uint32_t count);
/* Adds segments until the tenant has at least `bytes` of chunks or the budget ends; what it now
 * has goes to *granted_out. 0 also when less was granted. Blocks (page faults). */
PCC_MUST_CHECK int pcc_tenant_grow(struct pcc_tenant *tenant, uint64_t bytes,
                                   uint64_t *granted_out);
struct pcc_tenant_holding {
    uint64_t bytes;         /* of all segments */
    uint64_t lasting_bytes; /* without those that are being taken back */
    uint32_t asked;         /* segments that the client was asked for and has not returned */
};
/* Takes segments back, the last ones first, until at most `bytes` are left, with a trainer or
 * without, and never below two chunks; and from the first one on that has LEFT chunks, once no save
 * is in flight or nothing else is there. Does what can be done now: their chunks are not filled
 * again, the client is asked, and unused segments go. Called again and again until
 * `lasting_bytes` is all there is; until then nothing grows. What was begun is not taken back.
 * Waits for a grow, and blocks for the unmapping. */
void pcc_tenant_shrink(struct pcc_tenant *tenant, uint64_t bytes, struct pcc_tenant_holding *out);
/* Detached and idle only: gives every segment back; -EBUSY otherwise. */
PCC_MUST_CHECK int pcc_tenant_release_memory(struct pcc_tenant *tenant);
/* Unpins the segments when no GPU memory was mapped here for `unmapped_ns`, so that the GPU they
 * were pinned for can be given back (pcc_gpus_rest). What is exposed next pins them again. Blocks.
 */
void pcc_tenant_rest(struct pcc_tenant *tenant, uint64_t unmapped_ns);

/* Pull: takes over the exposure `map` (struct pcc_exposure; a positive number of the client's) in
 * place of the previous one, which copies under way still use. Checks every number, opens handles
 * and maps pieces that are not mapped yet, closes those that nothing uses any more, pins the
 * tenant's memory, and reads the probe back. `descriptors` are those of the runs that the previous
 * map lacks; the caller closes them. Blocks. -PCC_E_BAD_PEER (nonsense), -PCC_E_NO_DRIVER,
 * -PCC_E_BAD_HANDLE (a handle that does not open, or means something else here; another number of
 * descriptors), -PCC_E_OTHER_MEMORY (a proof has failed in this session), -PCC_E_DEVICE,
 * -PCC_E_DEVICE_LOST, -ENOMEM, -ENOTCONN; after an error the previous map is gone, too. `reason`
 * gets words. */
struct pcc_descriptors {
    const int *fds;
    uint64_t count;
};
#define PCC_REASON_BYTES 192u
PCC_MUST_CHECK int pcc_tenant_expose(struct pcc_tenant *tenant, uint64_t map, const void *bytes,
                                     uint64_t length_bytes,
                                     const struct pcc_descriptors *descriptors,
                                     char reason[PCC_REASON_BYTES]);

/* -- requests: the drain thread takes them, and begins them in order (pcc_tenant_queue.c) -- */

struct pcc_tenant_end { /* what the page shows of a snapshot */
    enum pcc_outcome outcome;
    uint64_t sequence;
    uint64_t newer; /* of SUPERSEDED: the sequence that is durable or global instead; else 0 */
    struct pcc_reason reason;
};

/* What the queue needs to begin saves without asking the loop. Until the first call nothing is
 * held, and every number is asked for. */
struct pcc_tenant_policy {
    bool held;            /* nothing begins: the first one WAITS for EBUSY */
    bool numbers;         /* a rank alone: each save takes the next sequence of its volume ... */
    uint64_t incarnation; /* ... in this start ... */
    uint32_t world_size;  /* ... of so many ranks */
    uint64_t above;       /* every sequence that is taken from now on is larger */
};
void pcc_tenant_policy(struct pcc_tenant *tenant, const struct pcc_tenant_policy *policy);
/* The loop has read a REQUESTED event of the attached session. To be called once for each. */
void pcc_tenant_noted(struct pcc_tenant *tenant);
/* Numbers a requested snapshot: one that waits, or one that is being copied, which is COPIED only
 * with a number. Nothing happens when it has ended. Codes of pcc_save_number: the caller refuses.
 */
PCC_MUST_CHECK int pcc_tenant_number(struct pcc_tenant *tenant, uint64_t snapshot,
                                     const struct pcc_number *number);
/* Ends a snapshot that waits or is being copied: the outcome is set and the word REFUSED. False
 * when it is copied or has ended, as its events say. A copy in progress is given up, and no event
 * follows. */
bool pcc_tenant_refuse(struct pcc_tenant *tenant, uint64_t snapshot,
                       const struct pcc_tenant_end *end);
/* The queue tries its first snapshot again, because a slot may be free. If that snapshot still
 * waits, another WAITS event follows. */
void pcc_tenant_retry(struct pcc_tenant *tenant);
/* Later outcomes (DURABLE, GLOBAL, SUPERSEDED, FAILED) of a snapshot of the attached session. The
 * tenant sets COPIED, WRITING, DURABLE, SUPERSEDED and FAILED by itself. */
void pcc_tenant_set_outcome(struct pcc_tenant *tenant, uint64_t snapshot,
                            const struct pcc_tenant_end *end);

/* -- parked saves, of level MEMORY: copied, and not written (pcc_tenant_waiting.c) -- */

/* Has the parked save of that sequence written: WRITING, DURABLE and the others follow as for any
 * save, also when its session is over. 0 also when nothing of that sequence is parked. -EBUSY while
 * it is being copied; -PCC_E_NO_LANE, -PCC_E_NO_SLOT, -PCC_E_STOPPED: it stays parked. */
PCC_MUST_CHECK int pcc_tenant_write(struct pcc_tenant *tenant, uint64_t sequence);
/* Forgets the parked save of that sequence, for the next daemon, too, and frees its chunks. The
 * page of its session shows `end`; no event follows. False when no copied one of that sequence is
 * parked (any more). */
bool pcc_tenant_drop(struct pcc_tenant *tenant, uint64_t sequence,
                     const struct pcc_tenant_end *end);

/* Sends payload [offset, +length) of `sequence` to the attached client as DATA messages, from
 * cached chunks where they are still there, else from the volume; END and LOAD_ENDED close it. The
 * client checks the bytes; after a complaint they are read again and checked before they are sent.
 * `own`: the volume is one that this tenant saves to; what is cached of the same sequence is not
 * another rank's. One load at a time per tenant (-EBUSY). Returns at once. */
PCC_MUST_CHECK int pcc_tenant_load(struct pcc_tenant *tenant, struct pcc_volume *volume, bool own,
                                   uint64_t sequence, uint64_t offset_bytes, uint64_t length_bytes,
                                   uint64_t load_id);

struct pcc_tenant_usage {
    uint64_t bytes, free_chunks, granted_chunks, full_chunks, cached_chunks, lent_chunks;
    uint64_t left_chunks;   /* never used again; pcc_tenant_shrink gives them back */
    uint64_t pinned_bytes;  /* of the segments */
    uint64_t exposed_bytes; /* of the trainer's GPU memory that is mapped here */
    uint32_t mappings;      /* of allocations and runs */
    uint32_t pieces;        /* of the runs */
    uint32_t in_flight;     /* saves that have not ended ... */
    uint32_t parked;        /* ... and of them, those that are parked */
};
void pcc_tenant_usage(struct pcc_tenant *tenant, struct pcc_tenant_usage *out);
