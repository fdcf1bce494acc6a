/* The inside of a link, shared by pcc_link.c (life, requests, waits), pcc_link_copy.c (the thread:
 * grants, messages, filling chunks) and pcc_link_load.c.
 *
 * `lock` guards the jobs, the load and `spare`; it is never held while bytes are moved: `busy` says
 * that the thread is moving some, and `idle` is signalled when it stops. Chunks and rings are the
 * thread's alone. */
#ifndef PCC_LINK_PRIVATE_H
#define PCC_LINK_PRIVATE_H

#include <pthread.h>

#include "pcc_link.h"
#include "pcc_ring.h"

enum pcc_job_state {
    PCC_JOB_NONE = 0,
    PCC_JOB_REQUESTED,
    PCC_JOB_SUBMITTED, /* the trainer's memory is being read, or will be */
    PCC_JOB_READ,      /* the trainer's memory was read; memory of ours may be left to hand over */
    PCC_JOB_ENDED,     /* all handed over, or given up */
};

struct pcc_source { /* payload [offset, offset+length) */
    const uint8_t *bytes;
    uint64_t offset_bytes;
    uint64_t length_bytes;
};

struct pcc_job {
    uint64_t snapshot;
    _Atomic uint32_t state; /* enum pcc_job_state; written under the lock */
    _Atomic bool stop;      /* looked at between two pieces */
    bool busy;              /* the thread reads the sources now */
    bool hung_up;           /* ended by the daemon's death */
    void *memory;           /* the sources, then inline bytes and tail */
    struct pcc_source *sources;
    uint64_t source_count;
    uint64_t cursor; /* sources before this one lie before next_bytes */
    uint64_t payload_bytes;
    uint64_t next_bytes;    /* handed over up to here */
    uint64_t trainer_bytes; /* the trainer's memory ends here in the payload */
};

struct pcc_link_load {
    bool active;
    bool ended;
    bool busy; /* the thread writes to the ranges now */
    uint64_t id;
    int result;
    struct pcc_range *ranges;
    uint64_t range_count;
};

struct pcc_link_segment {
    void *bytes;
    uint64_t length_bytes;
};

struct pcc_link {
    struct pcc_link *next; /* in the list of pcc_link_fork.c */
    int socket_fd;
    struct pcc_page_view view;
    _Atomic bool stop; /* close() */
    _Atomic bool dead; /* hang-up, or the daemon broke the protocol */
    pthread_t thread;

    pthread_mutex_t lock;
    pthread_cond_t idle;
    struct pcc_job jobs[PCC_SNAPSHOTS];
    uint64_t newest;  /* the largest snapshot id requested */
    uint32_t waiters; /* threads inside a wait: close() lets them out first */
    struct pcc_link_load load;

    /* the thread's own */
    struct pcc_link_segment *segments; /* [chunk_capacity] */
    uint32_t segment_count;
    uint8_t **chunk_at;    /* [chunk_capacity]; NULL = not granted */
    bool *held;            /* [chunk_capacity]; ours to fill */
    uint32_t *free_chunks; /* [chunk_capacity], a stack */
    uint32_t free_count;
};

static inline uint64_t pcc_link_word(const struct pcc_link *link, uint64_t snapshot)
{
    /* Acquire pairs with the daemon's moves. */
    return atomic_load_explicit(&pcc_page_snapshot(&link->view, snapshot)->word,
                                memory_order_acquire);
}

static inline void pcc_link_enter(struct pcc_link *link)
{
    (void)pthread_mutex_lock(&link->lock);
    link->waiters++;
    (void)pthread_mutex_unlock(&link->lock);
}

static inline void pcc_link_leave(struct pcc_link *link)
{
    (void)pthread_mutex_lock(&link->lock);
    link->waiters--;
    (void)pthread_cond_broadcast(&link->idle);
    (void)pthread_mutex_unlock(&link->lock);
}

/* True while the word of `snapshot` can still become COPIED. */
static inline bool pcc_link_open_word(const struct pcc_link *link, uint64_t snapshot)
{
    const uint64_t word = pcc_link_word(link, snapshot);

    return word == pcc_word(snapshot, PCC_WORD_REQUESTED) ||
           word == pcc_word(snapshot, PCC_WORD_COPYING);
}

/* -- pcc_link.c -- */
/* With the lock held and the job not busy: its memory goes, nobody reads its sources any more. */
void pcc_link_job_end(struct pcc_job *job);

/* -- pcc_link_fork.c -- */
void pcc_link_remember(struct pcc_link *link);
void pcc_link_forget(struct pcc_link *link);

/* -- pcc_link_copy.c -- */
void *pcc_link_run(void *link);
/* With lock held. */
bool pcc_link_copying(const struct pcc_link *link);

/* -- pcc_link_grant.c -- */
/* Maps the segments that have been granted. False at hang-up or nonsense. */
bool pcc_link_take_grants(struct pcc_link *link);

/* -- pcc_link_load.c; called by the thread -- */
void pcc_link_take_data(struct pcc_link *link, const struct pcc_message *message);
void pcc_link_take_end(struct pcc_link *link, const struct pcc_message *message);

#endif
