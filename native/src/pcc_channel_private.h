/* The inside of a channel, shared by pcc_channel.c (life, segments, admission),
 * pcc_channel_chunks.c (who holds which chunk), pcc_channel_drain.c (what the client says, what the
 * savers say) and pcc_channel_load.c.
 *
 * Locks, outermost first: control (attach, detach, load start, bind, close) -> growing -> lock ->
 * the savers' and the events' own. `lock` guards everything below unless it says otherwise; it is
 * held for microseconds and never over I/O. Savers call back without locks of theirs held. Events
 * are put under `lock`, so that those of one checkpoint come in order. */
#ifndef PCC_CHANNEL_PRIVATE_H
#define PCC_CHANNEL_PRIVATE_H

#include <pthread.h>

#include "pcc_channel.h"
#include "pcc_ring.h"

#define PCC_CHANNEL_SAVES                                                                          \
    128u /* N of every volume and 64 ended ones that messages may still name */
#define PCC_CHANNEL_VOLUMES 4u /* the bound one and grown-out ones that still have saves */
#define PCC_LOAD_THREADS_MAX 16u

enum pcc_chunk_state {
    PCC_CHUNK_FREE = 0,
    PCC_CHUNK_GRANTED, /* a FREE message is out; the client may write it */
    PCC_CHUNK_FULL,    /* with the saver */
    PCC_CHUNK_CACHED,  /* written; holds its part of a checkpoint until re-used */
    PCC_CHUNK_READING, /* a load is reading or checking it */
    PCC_CHUNK_LENT,    /* a DATA message is out */
};

struct pcc_channel_chunk {
    uint8_t *bytes;
    uint32_t segment;
    enum pcc_chunk_state state;
    bool lent_cached;      /* READING, LENT: it is CACHED again when it comes back */
    uint64_t tag;          /* of the save it belongs to; FULL and cached ones */
    uint64_t sequence;     /* of cached content; 0 = none */
    uint64_t offset_bytes; /* of cached content within its payload */
    uint32_t length_bytes;
    uint32_t payload_chunks; /* chunks of that whole payload */
    uint64_t stamp;          /* when it was filled; smaller is older */
};

struct pcc_channel_segment {
    struct pcc_segment memory;
    bool granted; /* sent to the attached client */
};

struct pcc_channel_save {
    uint64_t tag; /* serial << 8 | index; 0 = never used */
    uint64_t snapshot;
    uint64_t session;
    uint64_t sequence;
    uint64_t payload_bytes;
    uint32_t binding;
    uint32_t chunk_count;
    uint32_t received;
    struct pcc_save *save; /* NULL once ended: it is gone when `ended` returns */
    bool copied;           /* the word says COPIED */
    bool given_up;         /* aborted; messages that are under way are swallowed */
    bool writing;          /* its first chunk has gone to the disk */
    bool silent;           /* begin itself reported the failure */
    uint64_t *seen;        /* one bit per chunk; kept and grown when the entry is used again */
    uint32_t seen_words;
};

struct pcc_channel_binding {
    struct pcc_volume *volume; /* NULL = unused */
    struct pcc_saver *saver;
    uint32_t active; /* saves begun and not ended */
};

struct pcc_channel_load {
    pthread_t leader;
    bool joinable; /* leader runs or waits to be joined; guarded by control */
    bool active;
    bool stop;
    struct pcc_volume *volume;
    struct pcc_load *load;
    uint64_t id;
    uint64_t session;
    uint64_t sequence;
    uint64_t next_bytes; /* the next piece starts here */
    uint64_t end_bytes;
    uint32_t lent;    /* chunks READING or LENT */
    uint32_t waiting; /* readers asleep on chunk_back */
    int result;
};

struct pcc_channel {
    pthread_mutex_t control;
    pthread_mutex_t growing;
    pthread_mutex_t lock;
    pthread_cond_t chunk_back; /* a load waits for a chunk */
    struct pcc_pool *pool;
    struct pcc_events *events;
    struct pcc_channel_spec spec;
    struct pcc_page_geometry geometry;

    struct pcc_channel_chunk *chunks; /* [chunk_capacity] */
    uint32_t chunk_count;
    uint32_t granted_count;
    uint64_t stamp;
    struct pcc_channel_segment *segments;
    uint32_t segment_count;

    struct pcc_channel_save saves[PCC_CHANNEL_SAVES];
    uint64_t serial;
    uint64_t missing; /* chunks that admitted, incomplete snapshots still need */
    struct pcc_channel_binding bindings[PCC_CHANNEL_VOLUMES];
    uint32_t bound; /* index; PCC_CHANNEL_VOLUMES = none */

    bool attached;
    bool broken;           /* the peer broke the protocol: its ring is no longer read */
    _Atomic bool stopping; /* read by the drain thread without the lock */
    uint64_t session;
    int socket_fd;
    struct pcc_page_view view; /* the drain thread alone consumes to_daemon, without the lock */
    pthread_t drain;
    uint64_t *checksums; /* one chunk's, copied out of the page */

    struct pcc_channel_load load;
};

static inline void pcc_channel_lock(struct pcc_channel *channel)
{
    (void)pthread_mutex_lock(&channel->lock);
}

static inline void pcc_channel_unlock(struct pcc_channel *channel)
{
    (void)pthread_mutex_unlock(&channel->lock);
}

/* -- pcc_channel_chunks.c; with the lock held -- */
/* The best chunk to fill anew, CACHED ones uncached; -1 when there is none. Content of `spare` is
 * taken last. With `gently`, chunks whose save is not durable yet are left alone. */
int64_t pcc_channel_pick(struct pcc_channel *channel, uint64_t spare, bool gently);
/* Sends what segments the client has not been granted yet. */
void pcc_channel_grant_segments(struct pcc_channel *channel);
/* FREE messages for what admitted snapshots still need. Never more. */
void pcc_channel_hand_out(struct pcc_channel *channel);
/* The chunk's content is worthless from now on. */
void pcc_channel_chunk_free(struct pcc_channel *channel, uint32_t index);
/* Chunks of an ended save: what was never written or is not worth keeping becomes FREE. */
void pcc_channel_chunks_forget(struct pcc_channel *channel, uint64_t tag, bool keep_cached);
/* Pushes to the client; a full ring is a broken peer. */
int pcc_channel_push(struct pcc_channel *channel, const struct pcc_message *message);
void pcc_channel_wake_client(struct pcc_channel *channel);

/* -- pcc_channel_drain.c; with the lock held, but for run -- */
extern const struct pcc_save_events pcc_channel_save_events;
void *pcc_channel_drain_run(void *channel);
struct pcc_channel_save *pcc_channel_find(struct pcc_channel *channel, uint64_t snapshot);
void pcc_channel_give_up(struct pcc_channel *channel, struct pcc_channel_save *save, int error);
void pcc_channel_outcome(struct pcc_channel *channel, uint64_t snapshot, enum pcc_outcome outcome,
                         uint64_t sequence);
void pcc_channel_break(struct pcc_channel *channel); /* the BAD_PEER event, once */
void pcc_channel_put(struct pcc_channel *channel, const struct pcc_event *event);

/* -- pcc_channel_load.c -- */
/* With control held: ends the load in progress, if any, and joins its threads. */
void pcc_channel_load_stop(struct pcc_channel *channel);

#endif
