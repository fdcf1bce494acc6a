/* A seeded scheduler that drives the real saver without threads: which save gets a chunk, which
 * lane does its next unit of work, what is aborted, flagged, re-opened is drawn from the seed, so
 * that one number repeats a whole run. It plays an honest owner and holds the core to its contract;
 * what it finds broken goes to sim->breach. */
#pragma once

#include "disk/pcc_load.h"
#include "oracle.h"

#define WORKLOAD_LANES_MAX 3u
#define WORKLOAD_CHUNKS_MAX 8u

struct workload_spec {
    uint32_t slots, keep; /* N = slots - keep lanes, three at most */
    uint32_t block_bytes, chunk_bytes;
    uint32_t payload_pages_max;
    uint32_t policy_one_in; /* how seldom flags, incarnations, finish, reopen come; 0: never */
    uint32_t reuse_one_in;  /* how seldom a chunk is re-used the moment it was written; 0: never */
    uint32_t fault_one_in;  /* how seldom an action arms a transient fault; 0: never */
    uint32_t frozen_pages;  /* so much of the payloads seldom changes, as most saves say */
    uint32_t death_one_in;  /* how seldom the daemon dies in an action, and another one goes on */
};

struct live {              /* a save in flight, from its owner's side */
    struct pcc_save *save; /* NULL: not in use */
    uint32_t tag;
    uint32_t chunk_count;
    uint32_t handed, written, uncached; /* bit per chunk */
    uint32_t offered, referred, asked; /* the same: not answered, in the base, to come with bytes */
    uint8_t *memory;
    bool sealed, aborted;
};

static inline uint32_t all_chunks(const struct live *live)
{
    return (1u << live->chunk_count) - 1;
}

struct workload {
    struct workload_spec spec;
    struct rng rng;
    struct sim *sim;
    struct oracle *oracle;
    struct pcc_volume *volume;
    struct pcc_saver *saver;
    uint32_t lanes;
    uint32_t stepping; /* the lane that is at work, + 1 */
    struct live lives[WORKLOAD_LANES_MAX];
    struct pcc_kept kept; /* what the daemon leaves to the next one ... */
    uint8_t *memory;      /* ... and where it lies */
    uint64_t incarnation;
    uint64_t newest_begun; /* sequence */
    uint64_t flagged;
    uint32_t flagged_with;
    bool is_flagging;
    struct pcc_load *reading; /* a reader that takes its time */
    bool faulty;              /* a fault was armed: saves may fail */
    struct {
        uint64_t begun, durable, superseded, failed, aborted, rehomed, reopened, reads, deaths,
            adopted, based, referred, open;
    } count;
};

struct workload *workload_new(const struct workload_spec *spec, uint64_t seed);
void workload_free(struct workload *workload); /* must be closed */
/* Formats the empty media; nothing is recorded. */
PCC_MUST_CHECK int workload_format(struct workload *workload);
/* Opens volume and saver for writing on what the media hold. */
PCC_MUST_CHECK int workload_open(struct workload *workload);
void workload_run(struct workload *workload, uint32_t actions);
/* Hands over, seals and steps until everything in flight has ended. */
void workload_drain(struct workload *workload);
/* One checkpoint of `pages` pages from begin to its end; the end, or a negative error. */
int workload_save(struct workload *workload, uint32_t pages);
void workload_close(struct workload *workload); /* aborts what is not sealed; safe when not open */
/* Reads every durable checkpoint back through the open volume; compares. */
void workload_restore(struct workload *workload);

/* -- the daemon's death -- */
void workload_keep(struct workload *workload); /* empty memory, for a saver that is to be opened */
/* Whether the daemon died in it; then workload_go_on. */
bool workload_dies(struct workload *workload, void (*act)(struct workload *workload));
void workload_go_on(struct workload *workload);
int workload_open_again(struct workload *workload); /* with the memory that is there */

/* -- the moves that the scheduler chooses from -- */
int workload_begin(struct workload *workload, uint32_t pages);
void workload_feed(struct workload *workload, struct live *live); /* next chunk, or the seal */
void workload_uncache(struct workload *workload, struct live *live);
void workload_uncache_chunk(struct workload *workload, struct live *live, uint32_t index);
int workload_step(struct workload *workload, uint32_t lane); /* -EAGAIN: nothing to do */
void workload_beside(void *workload); /* data of other saves moves while a record is written */
