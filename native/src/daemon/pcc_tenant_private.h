/* The inside of a tenant; README.md lists the files.
 *
 * Locks, outermost first: control (attach, detach, expose, load start, bind, close) -> growing ->
 * lock -> the savers', the GPUs' and the events' own. `lock` guards everything below unless it says
 * otherwise; it is held for microseconds and never over I/O or a call of the CUDA driver. Savers
 * and copiers hold none of their own locks when they call back. Events are put under `lock`, so
 * that the events of one checkpoint come in order. */
#pragma once

#include "base/pcc_futex.h"
#include "base/pcc_process.h"
#include "base/pcc_thread.h"
#include "daemon/pcc_source.h"
#include "daemon/pcc_tenant.h"
#include "gpu/pcc_gpu.h"
#include "shared/pcc_exposure.h"
#include "shared/pcc_proof.h"
#include "shared/pcc_ring.h"

/* N of every volume, and 64 ended saves that messages may still name. */
#define PCC_TENANT_SAVES 128u
#define PCC_TENANT_VOLUMES 4u /* the bound one and grown-out ones that still have saves */

enum pcc_chunk_state {
    PCC_CHUNK_FREE = 0,
    PCC_CHUNK_GRANTED, /* a FREE message is out; the client may write it */
    PCC_CHUNK_FULL,    /* with the saver */
    PCC_CHUNK_CACHED,  /* written; holds its part of a checkpoint until re-used */
    PCC_CHUNK_READING, /* a load is reading or checking it */
    PCC_CHUNK_LENT,    /* a DATA message is out */
    PCC_CHUNK_PULLED, /* a GPU copies into it; whatever becomes of its save, until that has ended */
    PCC_CHUNK_LOST,   /* a lost GPU may still write to it: never used again */
    PCC_CHUNK_LEFT,   /* a client of a session before may still write to it: the same */
};

struct pcc_tenant_chunk {
    uint8_t *bytes;
    uint32_t segment;
    enum pcc_chunk_state state;             /* set by pcc_tenant_chunk_set() alone */
    struct pcc_tenant_chunk *next, *before; /* in one of the tenant's lists; NULL: in none */
    bool lent_cached;      /* READING, LENT: it is CACHED again when it comes back */
    bool lent_unchecked;   /* LENT: the client checks it */
    uint64_t lent_to;      /* LENT: the load, which may have ended */
    bool settling;         /* its bytes are being checked, whatever becomes of its save */
    uint64_t tag;          /* of the save it belongs to; FULL and cached ones */
    uint64_t sequence;     /* of cached content; 0 = none */
    uint64_t offset_bytes; /* of cached or lent content within its payload */
    uint32_t length_bytes;
};

/* What may be filled again, in this order. Chunks of retiring segments are in no list. */
enum pcc_chunk_list {
    PCC_CHUNKS_FREE,   /* the one that was freed last comes first */
    PCC_CHUNKS_ENDED,  /* CACHED, its save is over; the oldest comes first */
    PCC_CHUNKS_FLIGHT, /* CACHED, its save could still have to write it elsewhere; the same */
    PCC_CHUNK_LISTS,
};

struct pcc_tenant_pin {
    struct pcc_gpu *gpu; /* held; NULL: none */
    uint8_t *bytes;      /* the segment at addresses that are pinned for this GPU alone */
};

struct pcc_tenant_segment {
    struct pcc_segment memory;
    uint32_t number; /* never used again in this tenant */
    bool granted;    /* sent to the attached client, and not returned */
    bool asked;      /* to be returned; it is not sent to a client any more */
    /* For GPUs that read into it. Written under growing and lock, read under one. */
    struct pcc_tenant_pin pins[PCC_DEVICES];
};

struct pcc_tenant_save {
    uint64_t tag; /* serial << 8 | index; 0 = never used */
    uint64_t snapshot;
    uint64_t session;
    uint64_t sequence;
    uint64_t payload_bytes;
    uint64_t base;          /* that it may refer to; 0 = none */
    uint64_t offered_bytes; /* the payload before this is offered first; 0 = nothing */
    uint32_t binding;
    uint32_t chunk_count;
    uint32_t received;
    uint32_t referred;     /* of them, those that were not copied */
    bool is_open;          /* an image, and payload_bytes is its bound */
    struct pcc_save *save; /* NULL once ended: it is gone when `ended` returns */
    bool copied;           /* the word says VOUCHING or COPIED */
    bool aborted;          /* messages that are under way are dropped */
    int abort_error;       /* why */
    uint32_t gpus;         /* bits: its trainer's, whose words tell of it, whoever's are read */
    uint32_t device;       /* of OTHER_MEMORY */
    bool writing;          /* its first chunk has gone to the disk */
    bool silent;           /* its owner knows how it ended: no event */
    bool wanted;           /* it is parked, and WANTED was reported */
    bool immovable;        /* a chunk of it was re-used: it cannot move to another slot */
    uint64_t *seen;        /* one bit per chunk; kept and grown when the entry is used again */
    uint32_t seen_words;
    struct pcc_source sources[PCC_SOURCES]; /* of its payload, in order */
};

struct pcc_tenant_import { /* an allocation of the trainer's, mapped here; shared by maps */
    struct pcc_gpu *gpu;
    uint8_t handle[sizeof(CUipcMemHandle)];
    uint64_t buffer_id;
    CUdeviceptr address;
    uint64_t length_bytes; /* as the driver says */
    uint32_t pieces;       /* that are mapped side by side; 0: the handle was opened */
    uint32_t holders;      /* maps */
    bool proven;           /* of a handle: the trainer reads what we read; the drain thread's own */
};

struct pcc_tenant_map { /* one exposure, opened */
    uint64_t number;
    struct pcc_exposure_view view;
    struct pcc_gpu *gpus[PCC_DEVICES];
    struct pcc_tenant_import **imports; /* by allocation */
    uint32_t proven;  /* bits: GPUs whose part is the trainer's, for all snapshots to come */
    uint32_t holders; /* being the one exposed last, and each save that is pulled through it */
    bool left_behind;
    struct pcc_tenant *lender;   /* the other rank whose memory this is; NULL: it is the tenant's */
    struct pcc_tenant_map *lent; /* the lender's map, held: it has gpus and imports */
    struct pcc_tenant_map *next;
};

struct pcc_tenant_part; /* of a save, on one GPU: pcc_source_pull.c */

struct pcc_tenant_proof {       /* the one that is under way; the drain thread's own */
    struct pcc_tenant_map *map; /* held; NULL: there is none */
    uint64_t tag;               /* of the save that waits for it */
    uint32_t device;
    uint32_t count;
    struct pcc_proof_place *places;
    uint8_t *bytes;    /* what the daemon read there: PCC_PROOF_BYTES for each */
    uint32_t next;     /* the first place of the question */
    uint32_t asked;    /* how many it names */
    uint32_t tries;    /* questions about these that had a wrong answer */
    uint64_t question; /* its number, in this session */
    uint64_t deadline_ns;
    bool waits; /* a deferred save is to be asked about when its stream has come to it */
};

struct pcc_tenant_pull {
    pthread_cond_t part_ended;
    uint32_t life_asked;           /* the last question whether the trainer lives: its number */
    struct pcc_tenant_map *map;    /* exposed last; NULL = none */
    struct pcc_tenant_map *unused; /* without a holder: to be closed without the lock */
    struct pcc_tenant_part *parts; /* that copiers have */
    struct pcc_gpu *pinners[PCC_DEVICES]; /* guarded by growing: new segments are pinned for them;
                                             held */
    uint64_t limit_ns;                    /* how long a GPU may take to end what is under way */
    uint64_t pinned_bytes;
    uint64_t exposed_bytes;
    uint32_t mappings;
    uint32_t pieces;
    uint32_t maps;      /* that are not closed */
    uint64_t mapped_ns; /* until then there was one */
    struct pcc_tenant_proof proof;
    uint32_t distrusted; /* bits: GPUs that are not pulled any more in this session */
    /* The sequence that the GPUs of this session held when its process had ended: nothing changes
     * that memory any more. 0: none. */
    uint64_t whole_at_end;
    uint32_t readers; /* other ranks that read this memory just now: nothing is judged meanwhile */
};

struct pcc_tenant_binding {
    struct pcc_volume *volume; /* NULL = unused */
    struct pcc_saver *saver;
    struct pcc_kept kept; /* bytes NULL: nothing is kept */
    uint64_t kept_id;
    uint32_t active; /* saves begun and not ended */
    bool lost;       /* a save has failed because the volume's file is gone: no other begins */
};

struct pcc_tenant_load {
    pthread_t leader;
    bool joinable; /* leader runs or waits to be joined; guarded by control */
    bool active;
    bool stop;
    struct pcc_volume *volume;
    struct pcc_load *load;
    uint64_t id;
    uint64_t session;
    uint64_t sequence;
    uint64_t cached_as;  /* the sequence of chunks that hold it; 0: it is another rank's */
    uint64_t next_bytes; /* the next piece starts here */
    uint64_t end_bytes;
    uint32_t lent; /* chunks READING or LENT */
    /* Chunks are checked here, because the client cannot, or has found one that is damaged. */
    bool careful;
    int result;
};

struct pcc_tenant_wait {        /* a requested snapshot without a lane and a slot */
    struct pcc_request request; /* copied out of the page, and checked */
    struct pcc_number number;   /* sequence 0: it has none yet */
    bool wanted;                /* as of a save */
};

struct pcc_tenant_queue {                        /* of the attached session */
    struct pcc_tenant_wait waits[PCC_SNAPSHOTS]; /* the oldest one first */
    uint32_t count;
    uint32_t unnoted; /* REQUESTED events that the loop has not noted */
    uint64_t newest;  /* the largest snapshot id that was requested */
    bool look;        /* the first snapshot is to be tried */
    int reported;     /* the code of the last WAITS event, until the loop answers; 0 = none */
    bool crowded;     /* the next message is `message`, once `unnoted` allows it */
    struct pcc_message message;
};

struct pcc_tenant {
    pthread_mutex_t control;
    pthread_mutex_t growing;
    pthread_mutex_t lock;
    pthread_cond_t chunk_back; /* a load waits for a chunk */
    struct pcc_pool *pool;
    struct pcc_events *events;
    struct pcc_gpus *gpus; /* NULL: nothing is ever pulled */
    struct pcc_tenant_spec spec;
    char label[PCC_POOL_LABEL_MAX + 1];
    struct pcc_page_geometry geometry;

    struct pcc_tenant_chunk *chunks; /* [chunk_capacity] */
    uint32_t chunk_count;
    struct pcc_tenant_chunk lists[PCC_CHUNK_LISTS]; /* each a ring through this head */
    uint64_t looked_at;                             /* chunks, by pick: tests bound it */
    uint32_t granted_count;
    struct pcc_tenant_segment *segments;
    uint32_t segment_count;
    uint32_t
        lasting_count; /* of them; those behind are retiring: their chunks are not filled again */
    uint32_t segment_number; /* the last one given */

    struct pcc_tenant_save saves[PCC_TENANT_SAVES];
    uint64_t serial;
    uint64_t missing; /* chunks that clients still have to fill */
    struct pcc_tenant_binding bindings[PCC_TENANT_VOLUMES];
    uint32_t bound; /* index; PCC_TENANT_VOLUMES = none */

    bool attached;
    bool broken;           /* the peer broke the protocol: its ring is no longer read */
    _Atomic bool stopping; /* read by the drain thread without the lock */
    uint64_t session;
    int trainer_fd; /* of the attached session: readable when its process has ended; -1 */
    int socket_fd;
    struct pcc_page_view view; /* the drain thread alone consumes to_daemon, without the lock */
    pthread_t drain;
    uint64_t *checksums; /* one chunk's, copied out of the page */

    struct pcc_tenant_queue queue;
    struct pcc_tenant_policy policy;
    uint64_t last_sequence; /* no later sequence of this tenant is as low, in any volume */

    struct pcc_tenant_load load;
    struct pcc_tenant_pull pull;
};

static inline void pcc_tenant_lock(struct pcc_tenant *tenant)
{
    (void)pthread_mutex_lock(&tenant->lock);
}

static inline void pcc_tenant_unlock(struct pcc_tenant *tenant)
{
    (void)pthread_mutex_unlock(&tenant->lock);
}

/* With the lock held: the chunk is to go with its segment. */
static inline bool pcc_tenant_retires(const struct pcc_tenant *tenant,
                                      const struct pcc_tenant_chunk *chunk)
{
    return chunk->segment >= tenant->lasting_count;
}

/* With the lock held: its owner is attached, so that it has a page. */
static inline bool pcc_tenant_of_session(const struct pcc_tenant *tenant,
                                         const struct pcc_tenant_save *save)
{
    return tenant->attached && save->session == tenant->session;
}

/* The source of the piece at this offset of the payload. */
static inline struct pcc_source *pcc_source_at(struct pcc_tenant_save *save, uint64_t offset_bytes)
{
    uint32_t i = 0;

    while (i + 1 < PCC_SOURCES && offset_bytes >= save->sources[i].to_bytes)
        i++;
    return &save->sources[i];
}

/* -- pcc_tenant_chunks.c; with the lock held -- */
/* The chunk enters this state, and the list that goes with it. */
void pcc_tenant_chunk_set(struct pcc_tenant *tenant, struct pcc_tenant_chunk *chunk,
                          enum pcc_chunk_state state);
/* All lists are empty: there are no chunks. */
void pcc_tenant_lists_clear(struct pcc_tenant *tenant);
/* `count` chunks from `first` on are FREE, and are used after those that already were. */
void pcc_tenant_chunks_add(struct pcc_tenant *tenant, uint32_t first, uint32_t count);
/* Chunks of retiring segments leave the lists: after each change of lasting_count. */
void pcc_tenant_chunks_retire(struct pcc_tenant *tenant);
/* A chunk to fill: a free one, else the oldest cached one; -1 when there is none. It is FREE
 * until the caller sets another state. Content of `spare` is taken last. With `gently`, chunks
 * whose save is not durable yet are left alone. */
int64_t pcc_tenant_pick(struct pcc_tenant *tenant, uint64_t spare, bool gently);
/* Sends what segments the client has not been granted yet. */
void pcc_tenant_grant_segments(struct pcc_tenant *tenant);
/* The same, and loads look again: chunks may have become free. */
void pcc_tenant_pass_on(struct pcc_tenant *tenant);
/* Its content is dropped, if it may be. */
bool pcc_tenant_uncache(struct pcc_tenant *tenant, uint32_t index);
/* The chunk holds this part of the save's payload, and is FULL. */
void pcc_tenant_chunk_fill(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                           uint32_t index, uint64_t offset_bytes, uint32_t length_bytes);
/* What it holds goes to the saver, which copies the checksums, or makes them (NULL). Codes of
 * pcc_save_chunk. */
PCC_MUST_CHECK int pcc_tenant_hand_over(struct pcc_tenant *tenant,
                                        const struct pcc_tenant_save *save, uint32_t index,
                                        const uint64_t *checksums);
/* The save with that tag, until it ends; or NULL. */
struct pcc_tenant_save *pcc_tenant_save_of(struct pcc_tenant *tenant, uint64_t tag);
/* The chunk's content is worthless from now on. */
void pcc_tenant_chunk_free(struct pcc_tenant *tenant, uint32_t index);
/* Chunks of an ended save: what was never written or is not worth keeping becomes FREE. */
void pcc_tenant_chunks_forget(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                              bool keep_cached);
/* Pushes to the client; a full ring is a broken peer. */
int pcc_tenant_push(struct pcc_tenant *tenant, const struct pcc_message *message);
void pcc_tenant_wake_client(struct pcc_tenant *tenant);

/* -- pcc_tenant_drain.c; with the lock held, but for run -- */
extern const struct pcc_save_events pcc_tenant_save_events;
void *pcc_tenant_drain_run(void *tenant);
struct pcc_tenant_save *pcc_tenant_find(struct pcc_tenant *tenant, uint64_t snapshot);
void pcc_tenant_abort(struct pcc_tenant *tenant, struct pcc_tenant_save *save, int error);
void pcc_tenant_outcome(struct pcc_tenant *tenant, uint64_t snapshot,
                        const struct pcc_tenant_end *end);
/* COPYING, COPIED or WRITING. */
void pcc_tenant_outcome_moves(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                              enum pcc_outcome outcome);
/* Of a save, or (NULL) of none that has begun. */
void pcc_tenant_sources_abandon(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                                struct pcc_source sources[PCC_SOURCES]);
void pcc_tenant_break(struct pcc_tenant *tenant); /* the BAD_PEER event, once */
void pcc_tenant_put(struct pcc_tenant *tenant, struct pcc_event event);
/* The chunk is filled and handed over. */
void pcc_tenant_chunk_to_save(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                              uint32_t index, uint64_t offset_bytes, uint32_t length_bytes,
                              const uint64_t *checksums);
/* The piece at offset_bytes has come, or is being compared; or (false) it has to come after all. */
void pcc_tenant_seen(const struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                     uint64_t offset_bytes, bool seen);
/* Counts the piece at offset_bytes, which was not seen before, as received. */
void pcc_tenant_received(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                         uint64_t offset_bytes);
/* After each received piece: the end of the copy, if it was the last one. -PCC_E_BAD_PEER when the
 * client has overwritten the word. */
int pcc_tenant_copy_check(struct pcc_tenant *tenant, struct pcc_tenant_save *save);

/* -- pcc_tenant_queue.c; with the lock held, but for run -- */
/* The drain thread tries the first one again. */
void pcc_tenant_queue_look(struct pcc_tenant *tenant);
/* The drain thread: begins what can begin. True: a deferred save may stand in the way, and nobody
 * rings when a stream withdraws it. */
bool pcc_tenant_queue_run(struct pcc_tenant *tenant);
/* The session ends: everything that waits is refused. */
void pcc_tenant_queue_end(struct pcc_tenant *tenant);
/* A PCC_MSG_REQUEST. Codes of take_full. */
int pcc_tenant_take_request(struct pcc_tenant *tenant, const struct pcc_message *message);
/* A PCC_MSG_WRITE: what is unknown, has ended or is on its way to the disk is not reported. */
void pcc_tenant_take_write(struct pcc_tenant *tenant, const struct pcc_message *message);

/* As pcc_tenant_refuse, for what has left the queue, with a session attached. */
bool pcc_tenant_refuse_begun(struct pcc_tenant *tenant, uint64_t snapshot,
                             const struct pcc_tenant_end *end);
/* An entry of `saves` that nothing uses, for a payload of that many chunks; NULL. */
struct pcc_tenant_save *pcc_tenant_save_take(struct pcc_tenant *tenant, uint32_t chunk_count);
/* The entry becomes the save that has begun as `saved` in the volume bound last. */
void pcc_tenant_save_enter(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                           struct pcc_save *saved, const struct pcc_save_request *request,
                           uint64_t sequence, const struct pcc_source sources[PCC_SOURCES]);
/* Whether a source is at work on a save of that binding; PCC_TENANT_VOLUMES: on any. */
bool pcc_tenant_is_filled(const struct pcc_tenant *tenant, uint32_t binding);

/* -- pcc_tenant_waiting.c -- */
/* With the lock held: parked saves of the earlier daemon are written as far as there is room. */
void pcc_tenant_adopted_write(struct pcc_tenant *tenant);
/* With the lock held: deferred saves that were withdrawn end. True while some are left. */
bool pcc_tenant_deferred_look(struct pcc_tenant *tenant);
/* With the lock held: the oldest one ends, because this request needs its place, once the streams
 * have come to the request. False: there is none. */
bool pcc_tenant_deferred_yield(struct pcc_tenant *tenant, const struct pcc_request *request);
/* With the lock held: its owner wants it on the disk, so it is pulled now. */
void pcc_tenant_deferred_want(struct pcc_tenant *tenant, struct pcc_tenant_save *save);
/* Without locks, once the drain thread has ended: pulls the last step of a trainer whose process
 * has ended, or whose GPU has failed. As pcc_tenant_detach. */
int32_t pcc_tenant_last_step(struct pcc_tenant *tenant, struct pcc_tenant *const *others,
                             uint32_t count);

/* -- pcc_tenant_memory.c -- */
/* With growing held. */
void pcc_tenant_segment_add(struct pcc_tenant *tenant, const struct pcc_tenant_segment *fresh);

/* With the lock held: the client says that it has unmapped a segment. 0 or -PCC_E_BAD_PEER. */
int pcc_tenant_take_returned(struct pcc_tenant *tenant, const struct pcc_message *message);

/* All segments, and those that come later, are pinned for the copies of these GPUs, which the
 * caller uses; without success none that comes later is. */
PCC_MUST_CHECK int pcc_tenant_pin_for(struct pcc_tenant *tenant,
                                      struct pcc_gpu *const gpus[PCC_DEVICES]);
/* With growing held, or when closing: segments that come later are pinned for them; NULL: for none.
 */
void pcc_tenant_pinners_set(struct pcc_tenant *tenant, struct pcc_gpu *const gpus[PCC_DEVICES]);
/* With the lock held: where the GPU's copies find the chunk; NULL: it is not pinned for the GPU. */
uint8_t *pcc_tenant_pinned(const struct pcc_tenant *tenant, uint32_t index,
                           const struct pcc_gpu *gpu);
/* Gives a segment back, unpinned, or leaves it be. With growing held, or when closing. */
void pcc_tenant_segment_return(struct pcc_tenant *tenant, struct pcc_tenant_segment *segment);

/* -- pcc_tenant.c; with control held -- */
/* The saver of a binding that has its volume's state memfd, or none; then it is the bound one. */
PCC_MUST_CHECK int pcc_tenant_binding_open(struct pcc_tenant *tenant, uint32_t index,
                                           struct pcc_volume *volume);
/* The binding of a volume, PCC_TENANT_VOLUMES when there is none; NULL finds an unused one. */
uint32_t pcc_tenant_binding_find(const struct pcc_tenant *tenant, const struct pcc_volume *volume);

/* -- pcc_source_kept.c; with control held -- */
/* A fresh state memfd for a binding, if the pool keeps any. */
PCC_MUST_CHECK int pcc_tenant_kept_make(struct pcc_tenant *tenant,
                                        struct pcc_tenant_binding *binding,
                                        struct pcc_volume *volume);
void pcc_tenant_kept_drop(struct pcc_tenant *tenant, struct pcc_tenant_binding *binding);

/* -- pcc_tenant_expose.c -- */
/* With the lock held: one holder less. Accepts NULL. */
void pcc_tenant_map_put(struct pcc_tenant *tenant, struct pcc_tenant_map *map);
/* Without locks: closes the maps without a holder. */
void pcc_tenant_maps_close(struct pcc_tenant *tenant);
/* Without locks: another tenant does not hold this map of the lender any more. */
void pcc_tenant_lent_put(struct pcc_tenant *lender, struct pcc_tenant_map *lent);

/* -- pcc_tenant_prove.c -- */
/* The drain thread, without locks: has the client show that it reads what is to be pulled for the
 * first time. True when something was done. */
bool pcc_tenant_prove(struct pcc_tenant *tenant);
/* With the lock held, by the drain thread or once it has ended. */
void pcc_tenant_proof_drop(struct pcc_tenant *tenant);

/* -- pcc_source_pull.c; with the lock held, a session attached -- */
/* The word of the snapshot is final: the streams of all GPUs may continue. */
void pcc_pull_release_streams(struct pcc_tenant *tenant, uint64_t snapshot);
/* What the words of a deferred save say: whether its GPUs hold all of it now. BROKEN: the driver
 * has reported an error, and they may hold anything. */
enum pcc_pull_words { PCC_PULL_NOT_READY, PCC_PULL_WHOLE, PCC_PULL_WITHDRAWN, PCC_PULL_BROKEN };
enum pcc_pull_words pcc_pull_words(const struct pcc_tenant *tenant,
                                   const struct pcc_tenant_save *save);
/* A deferred save is pulled like any other from now on. */
void pcc_pull_start(struct pcc_tenant *tenant, struct pcc_tenant_save *save);
/* A deferred save is to be pulled through this map, in place of its own. -ENOMEM. */
PCC_MUST_CHECK int pcc_pull_through(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                                    struct pcc_tenant_map *map);
/* Once the drain thread has ended: pulls a deferred save, for `limit_ns` at most, and releases the
 * lock meanwhile. True: all is read. */
PCC_MUST_CHECK bool pcc_pull_all(struct pcc_tenant *tenant, struct pcc_tenant_save *save);
/* After pcc_pull_all, and if the memory was WHOLE all the time: what was read counts. True: the
 * save is copied. */
PCC_MUST_CHECK bool pcc_pull_accept(struct pcc_tenant *tenant, struct pcc_tenant_save *save);

/* -- pcc_source_push.c; with the lock held -- */
/* FREE messages for what clients still have to fill. Never more. */
void pcc_push_hand_out(struct pcc_tenant *tenant);
/* The client has filled a chunk; the client offers a piece. 0 or -PCC_E_BAD_PEER. */
int pcc_push_take_full(struct pcc_tenant *tenant, const struct pcc_message *message);
int pcc_push_take_offer(struct pcc_tenant *tenant, const struct pcc_message *message);
int pcc_push_take_length(struct pcc_tenant *tenant, const struct pcc_message *message);

/* -- pcc_tenant_load.c -- */
/* With the lock held: a chunk that a load has borrowed comes back. */
void pcc_tenant_load_put_back(struct pcc_tenant *tenant, uint32_t index, bool intact);
/* With control held: ends the load in progress, if any, and joins its threads. */
void pcc_tenant_load_stop(struct pcc_tenant *tenant);
