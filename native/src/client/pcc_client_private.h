/* The inside of a client; README.md lists the files.
 *
 * `lock` guards the jobs and the load. No thread holds it while bytes are moved or the driver is
 * called: `busy` says that the client's thread moves bytes, and `idle` is signalled when it stops.
 * `gpu_lock` guards the calls of the driver by trainers' threads. The client's thread never takes
 * `gpu_lock`, so a call of the driver that hangs there does not keep it from releasing a stream.
 * Only the client's thread touches chunks and rings. */
#pragma once

#include "base/pcc_crew.h"
#include "base/pcc_futex.h"
#include "base/pcc_thread.h"
#include "client/pcc_client.h"
#include "gpu/pcc_cuda.h"
#include "shared/pcc_ring.h"

#define PCC_HOST UINT32_MAX     /* in the place of a GPU: host memory */
#define PCC_NO_CHUNK UINT32_MAX /* the end of a list of chunks */
#define PCC_PIECES_MAX                                                                             \
    512u /* copies under way per GPU and direction; a stream's queue holds about twice that */

enum pcc_job_state {
    PCC_JOB_NONE = 0,
    PCC_JOB_REQUESTED,
    PCC_JOB_SUBMITTED, /* the trainer's memory is being read by us, or will be */
    PCC_JOB_READ,      /* the trainer's memory was read; copies may be left to hand over */
    PCC_JOB_ENDED,     /* all handed over, or given up */
};

struct pcc_source {
    struct pcc_range range;
    uint32_t device; /* or PCC_HOST */
};

static inline struct pcc_source pcc_source_on_device(const struct pcc_device_range *range)
{
    return (struct pcc_source){{range->address, range->offset_bytes, range->length_bytes},
                               range->device};
}

struct pcc_job_device { /* one GPU's part of a snapshot; the events are kept for the next one */
    CUevent marked;     /* behind all that the part depends on */
    CUevent page_used;  /* behind its samples, and the waits for it; under gpu_lock */
    CUevent copied;     /* push: behind its last copy */
    bool is_marked;
    bool aside;         /* `marked` is behind the staging */
    bool enqueued;      /* push: all copies are, and `copied` behind them */
    bool ordered;       /* the thread's own: our stream waits for `marked` */
    bool passed;        /* the thread's own: `marked` was seen to be reached */
    uint64_t end_bytes; /* push: its last range ends here in the payload; 0 = none */
};

struct pcc_job { /* one snapshot, until it is handed over; not a job of users */
    uint64_t snapshot;
    _Atomic uint32_t state; /* enum pcc_job_state; written under the lock */
    _Atomic bool stop;      /* looked at between two pieces */
    _Atomic bool host_read; /* as `state`: the trainer's host memory was read */
    bool busy;              /* the thread reads the sources now */
    bool hung_up;           /* ended by the daemon's death */
    bool asking;            /* its request is in the page, its message not in the ring yet */
    bool wanted;            /* on the disk */
    bool wanting;           /* the same, and the daemon does not know it yet */
    bool provisional;       /* not confirmed */
    bool kept;              /* its last chunk is full, and waits for that; see `last` */
    struct pcc_message last;
    int error;               /* why this side abandoned it */
    uint64_t fault;          /* memory of the trainer that was not there */
    void *memory;            /* the sources, then inline bytes and tail */
    struct pcc_image *image; /* instead of sources; NULL: there is none */
    struct pcc_source *sources;
    uint64_t source_count;
    uint64_t cursor; /* sources before this one lie before filled_bytes */
    uint64_t payload_bytes;
    uint64_t filled_bytes;  /* chunks up to here are filled, or copies into them are enqueued */
    uint64_t left_bytes;    /* not handed over yet, nor known to lie in the base */
    uint64_t offered_end;   /* the payload before this is offered, if there is a base */
    uint32_t offers;        /* that are not answered, or whose piece is still to be copied */
    uint64_t trainer_bytes; /* the trainer's memory that we read ends here in the payload */
    uint64_t host_bytes;    /* and here what of it is host memory */
    uint32_t flying;        /* chunks that copies are filling */
    uint32_t flights;       /* these, the ones that were filled so and not handed over yet, and a
                               last one that is kept */
    uint32_t pulled;        /* bits: GPUs that the daemon reads */
    uint32_t pushed;        /* bits: GPUs that were marked for the client's own copies */
    bool deferred;          /* of level DEVICE: no stream waits, but withdraws it, ... */
    bool withdrawn;         /* ... which a stream will */
    bool broken;            /* its GPU has failed, as the page says: nobody reads it here */
    uint32_t held;          /* bits: of them, those that a stream waits for */
    uint64_t deadline_ns;   /* of `held` */
    uint64_t limit_ns;      /* the same, from when the stream has come to the snapshot */
    struct pcc_job_device devices[PCC_DEVICES];
};

struct pcc_client_load {
    bool active;
    bool ended;
    bool all_sent;   /* the daemon has sent everything; `result` is the daemon's */
    bool busy;       /* the thread writes to the targets now */
    uint32_t flying; /* chunks that GPUs read from; they write to the targets */
    uint64_t id;
    uint64_t cached_bytes, read_bytes; /* taken: from the daemon's memory, and from the volume */
    int result;
    struct pcc_source *targets;
    uint64_t target_count;
};

struct pcc_client_view { /* of a segment: its addresses for one GPU */
    uint8_t *bytes;      /* pinned for this GPU alone; NULL: not pinned */
    bool tried;
};

struct pcc_client_segment {
    void *bytes;
    uint64_t length_bytes;
    uint32_t number; /* the daemon's */
    uint32_t first_chunk;
    uint32_t chunk_count;
    bool retiring; /* the daemon has asked for it back */
    struct pcc_client_view views[PCC_DEVICES];
};

struct pcc_flight { /* of a chunk: copies fill it, have filled it or read it; the thread's own */
    struct pcc_job *job;
    uint64_t offset_bytes;
    uint32_t length_bytes;
    uint32_t pieces;
    uint32_t next;   /* in its list; a chunk */
    uint32_t device; /* of the event */
    CUevent event;   /* behind the copies; kept for the chunk's next flight */
    bool loading;    /* it is in the list of that name of a GPU */
    bool damaged;    /* while it loads: TAKEN says so when the GPU has read it */
};

enum pcc_offer_state {
    PCC_OFFER_NONE = 0,
    PCC_OFFER_ASKED,
    PCC_OFFER_WANTED, /* it has changed: it is read once more, into a chunk */
};

struct pcc_offer { /* a piece that was read in place; the thread's own */
    enum pcc_offer_state state;
    struct pcc_job *job;
    uint64_t snapshot; /* of the job; the offer is over when the job has another */
    uint64_t offset_bytes;
    uint64_t length_bytes;
};

struct pcc_chunk_list { /* first in, first out */
    uint32_t first, last;
};

struct pcc_staging {
    struct pcc_staging *next; /* the smaller one that this one has replaced */
    CUdeviceptr address;
    uint64_t length_bytes; /* usable; the probe lies behind */
    uint64_t whole_bytes;
};

struct pcc_client_device {
    _Atomic bool open;   /* after that, what follows up to `loaded` is fixed */
    _Atomic bool broken; /* lost, dead or at the process's end: its calls are not tried any more */
    struct pcc_gpu_device gpu;
    CUdeviceptr page; /* as its streams see it; 0: the daemon cannot pull */
    void *page_at;    /* the page at addresses that are registered for this GPU alone; NULL: its
                         copies cannot be sampled */
    char cannot_pull[160];
    CUstream copy;           /* push */
    CUstream side;           /* staging beside the training */
    CUstream load;           /* into device memory */
    CUevent scratch, loaded; /* the second one is the thread's, behind what is on `load` */

    struct pcc_staging *staging; /* these two under gpu_lock */
    bool unfenced;               /* a stream may use the page, and no event tells when it has */

    struct pcc_chunk_list flying; /* the thread's own: in the order of `copy` */
    uint32_t pieces;              /* copies enqueued and not known to be done */
    uint64_t flying_bytes;        /* of the payload, in these */
    uint64_t progress_ns;
    struct pcc_chunk_list loading; /* these three are the same for loads, on `load` */
    uint32_t load_pieces;
    uint64_t load_progress_ns;
};

struct pcc_allocation { /* of a GPU's memory; all zero: none */
    CUdeviceptr base;
    size_t length_bytes;
};

static inline bool pcc_allocation_has(const struct pcc_allocation *allocation, CUdeviceptr address)
{
    return address - allocation->base < allocation->length_bytes;
}

struct pcc_extent { /* of the last exposure: an allocation, or a piece of virtual memory */
    CUdeviceptr base;
    uint64_t length_bytes;
    unsigned long long buffer_id;
    uint32_t device;
    bool is_piece;
};

struct pcc_exposed { /* an allocation of the last exposure, or a run of pieces */
    CUdeviceptr base;
    uint64_t length_bytes;
    uint64_t first_extent;
    unsigned long long buffer_id;
    CUipcMemHandle handle; /* of a run, its name */
    uint32_t device;
    uint32_t index;
    uint32_t pieces;
    bool is_sent; /* the daemon needs no descriptors */
};

struct pcc_client {
    struct pcc_client *next; /* in the list of open ones */
    int socket_fd;
    struct pcc_page_view view;
    _Atomic bool stop;    /* close() */
    _Atomic bool dead;    /* hang-up, or the daemon broke the protocol, or: */
    _Atomic int unmapped; /* -errno of a segment's mapping */
    pthread_t thread;

    pthread_mutex_t lock;
    pthread_cond_t idle;
    struct pcc_job jobs[PCC_SNAPSHOTS];
    uint64_t newest;    /* the largest snapshot id requested */
    uint32_t asking;    /* jobs with `asking` */
    uint32_t wanting;   /* jobs with `wanting` */
    uint32_t waiters;   /* threads inside a wait: close() lets them out first */
    _Atomic bool armed; /* some job has `held`; written under the lock */
    struct pcc_client_load load;

    /* A GPU that finishes no copy for this long, although its copies could run, counts as dead. */
    _Atomic uint64_t patience_ns;
    uint64_t close_patience_ns;   /* how long close waits for one; or a test's */
    _Atomic uint64_t ahead_bytes; /* PCC_CUDA_AHEAD_BYTES, or a test's */
    _Atomic uint32_t pins_for;    /* GPUs that segments are pinned for once they are granted; */
    _Atomic uint32_t pins_now;    /* those that have segments to be pinned. 1 << GPU */
    _Atomic uint64_t at_gate;     /* the newest snapshot whose copies a stream is to wait for */
    pthread_mutex_t gpu_lock;
    struct pcc_exposed *exposed;
    struct pcc_extent *extents;
    uint64_t exposed_count, extent_count;
    uint64_t sending; /* the extent whose descriptor is the next */
    struct pcc_client_device devices[PCC_DEVICES];
    _Atomic bool has_shares; /* of the last exposure: other ranks may have the same */
    bool leaked;             /* a GPU may still write to page or segments: they stay mapped */

    /* the thread's own */
    struct pcc_client_segment *segments; /* [chunk_capacity] */
    uint32_t segment_count;
    uint32_t retiring;          /* of them */
    uint8_t **chunk_at;         /* [chunk_capacity]; NULL = not granted */
    bool *held;                 /* [chunk_capacity]; ours to fill, or being filled */
    uint32_t *free_chunks;      /* [chunk_capacity], a stack */
    struct pcc_flight *flights; /* [chunk_capacity] */
    uint32_t free_count;
    struct pcc_chunk_list landed;        /* filled by copies, not handed over yet */
    uint32_t kept;                       /* jobs whose last chunk is */
    _Atomic uint32_t images;             /* jobs with an image; written under the lock */
    struct pcc_offer offers[PCC_OFFERS]; /* each with its row of the page's checksum table */
    uint64_t asked;                      /* the newest question of the daemon's that was taken */
    struct pcc_client_device *proving;   /* its GPU copies the answer; NULL: none is under way */
    bool polling;                        /* something of a GPU is to be asked for soon */
    struct pcc_crew crew;                /* shares the blocks of a chunk with the thread */
};

/* The daemon has ended the session: chunks are not ours any more. */
static inline bool pcc_client_ended(const struct pcc_client *client)
{
    /* Acquire pairs with the daemon's release. */
    return PCC_READ_ACQUIRE(&client->view.page->ended) != 0;
}

static inline struct pcc_client *pcc_client_enter(struct pcc_client *client)
{
    PCC_LOCKED(&client->lock);
    client->waiters++;
    return client;
}

static inline void pcc_client_leave(struct pcc_client **entered)
{
    struct pcc_client *client = *entered;

    PCC_LOCKED(&client->lock);
    client->waiters--;
    (void)pthread_cond_broadcast(&client->idle);
}

/* Until the end of the block the caller is a waiter. Before anything takes the lock. */
#define PCC_CLIENT_WAITS(client)                                                                   \
    struct pcc_client *entered_client __attribute__((cleanup(pcc_client_leave), unused)) =         \
        pcc_client_enter(client)

/* True while the word of `snapshot` can still become COPIED. */
static inline bool pcc_client_open_word(const struct pcc_client *client, uint64_t snapshot)
{
    const uint64_t word = pcc_page_word(&client->view, snapshot);

    return word == pcc_word(snapshot, PCC_WORD_REQUESTED) ||
           word == pcc_word(snapshot, PCC_WORD_COPYING);
}

/* -- pcc_client.c -- */
/* With the lock held and the job not busy: its memory goes, and no source is read. */
void pcc_client_job_end(struct pcc_job *job);
/* With the lock held: the word to ABANDONED, `error` is why. True when this call did it. */
bool pcc_client_job_abandon(struct pcc_client *client, struct pcc_job *job, int error);
/* pcc_client_abandon, and why. */
bool pcc_client_abandon_for(struct pcc_client *client, uint64_t snapshot, int error);

/* -- pcc_client_run.c -- */
void *pcc_client_run(void *client);
/* False when the daemon broke the protocol of the ring. */
PCC_MUST_CHECK bool pcc_client_tell(struct pcc_client *client, const struct pcc_message *message);

/* -- pcc_client_copy.c; called by the thread -- */
/* With lock held. */
bool pcc_client_copying(const struct pcc_client *client);
/* Fills and hands over. 1 = something was done, 0 = nothing to do, -1 = the client is of no more
 * use.
 */
PCC_MUST_CHECK int pcc_client_work(struct pcc_client *client);

struct pcc_part { /* what the next chunk of a job is made of */
    uint64_t length_bytes;
    uint32_t device; /* whose copies it takes; PCC_HOST = none */
    uint32_t pieces; /* copies */
};
/* Payload [offset, offset+length) into `out`: bytes of the sources, zeros between them; GPU memory
 * by copies on `device`. Sources before *cursor lie before the offset; the call advances it. */
CUresult pcc_client_gather(const struct pcc_job *job, uint64_t *cursor, uint8_t *out,
                           uint64_t offset_bytes, uint64_t length_bytes,
                           const struct pcc_client_device *device);
/* With lock held, after more was filled or has landed. */
void pcc_client_job_note(struct pcc_client *client, struct pcc_job *job);

/* -- pcc_client_submit.c -- */
/* With lock held: the block in the page. The client's thread sends the message. */
void pcc_client_job_ask(struct pcc_client *client, struct pcc_job *job,
                        const struct pcc_request *request);

/* -- pcc_client_image.c -- */
/* With lock held. */
bool pcc_client_image_drained(const struct pcc_job *job);
/* By the thread. With lock held: whether the image has a chunk to fill. */
bool pcc_client_image_turn(const struct pcc_client *client, const struct pcc_job *job);
/* By the thread; the job is busy. As pcc_client_work. */
PCC_MUST_CHECK int pcc_client_image_work(struct pcc_client *client, struct pcc_job *job);
/* By the thread, or when it has ended: closes the streams of images that are over, or of all. */
void pcc_client_images_release(struct pcc_client *client, bool all);

/* -- pcc_client_offer.c; called by the thread -- */
enum pcc_turn {
    PCC_TURN_NONE,
    PCC_TURN_FILL,   /* the next piece of the payload goes into a chunk */
    PCC_TURN_OFFER,  /* the next piece is read in place */
    PCC_TURN_WANTED, /* a piece that was offered goes into a chunk */
};
/* With lock held: what can be done for the job now; an offer with the last two. */
enum pcc_turn pcc_client_turn(struct pcc_client *client, struct pcc_job *job,
                              struct pcc_offer **offer_out);
uint64_t *pcc_client_offer_checksums(const struct pcc_client *client,
                                     const struct pcc_offer *offer);
/* With lock held: the next piece was read, and its checksums made. False when the daemon broke the
 * protocol. */
PCC_MUST_CHECK bool pcc_client_offer_make(struct pcc_client *client, struct pcc_job *job,
                                          struct pcc_offer *offer, uint64_t length_bytes);
/* With lock held: the offer's piece is with the daemon, or known to lie in the base. */
void pcc_client_offer_done(struct pcc_offer *offer);
void pcc_client_take_answer(struct pcc_client *client, const struct pcc_message *message);

/* -- pcc_client_push.c; called by the thread -- */
/* Enqueues the copies of a job's next chunk. 1; 0 = too early; else a code. When *taken_out is set
 * the chunk is the GPU's now, whatever the result. */
PCC_MUST_CHECK int pcc_client_enqueue(struct pcc_client *client, struct pcc_job *job,
                                      uint32_t chunk, const struct pcc_part *part, bool *taken_out);
/* Moves what is filled from a GPU's list to `landed`. 1 = something; 0 = nothing; -1 = the GPU is
 * dead. */
PCC_MUST_CHECK int pcc_client_land(struct pcc_client *client, struct pcc_client_device *device);
/* The event of a chunk, for copies on that GPU. Within PCC_CLIENT_GPU. */
PCC_MUST_CHECK CUresult pcc_client_event_ready(struct pcc_client *client, uint32_t chunk,
                                               uint32_t device);
/* Where the GPU's copies find the chunk, whose segment is pinned then; NULL: the driver does not
 * pin it, and they use chunk_at. Within PCC_CLIENT_GPU. */
uint8_t *pcc_client_pin(struct pcc_client *client, uint32_t device, uint32_t chunk);
/* By the thread, when it has nothing else to do: 1 after a segment. */
int pcc_client_pin_ahead(struct pcc_client *client);
bool pcc_client_is_pinned(const struct pcc_client_segment *segment);
/* Unless all GPUs are `quiet`, what a broken one has stays until the process ends: it may continue
 * to read, and its driver would wait for that, while the thread has other deadlines to keep. */
void pcc_client_segment_unmap(struct pcc_client *client, struct pcc_client_segment *segment,
                              bool quiet);
void pcc_client_list_add(struct pcc_client *client, struct pcc_chunk_list *list, uint32_t chunk);
uint32_t pcc_client_list_take(struct pcc_client *client, struct pcc_chunk_list *list);

/* -- pcc_client_device.c -- */
/* The open GPU, or NULL. */
struct pcc_client_device *pcc_client_device(struct pcc_client *client, uint32_t device);
struct pcc_client_entered {
    struct pcc_client_device *device;
    int error; /* 0, -PCC_E_DEVICE, -PCC_E_DEVICE_LOST */
    int mode;
};
PCC_MUST_CHECK struct pcc_client_entered pcc_client_gpu_enter(struct pcc_client_device *device);
void pcc_client_gpu_leave(struct pcc_client_entered *entered);
/* Unless gpu.error: what follows, to the end of the block, runs in the GPU's context, and so that
 * it does not break a graph that another thread records. */
#define PCC_CLIENT_GPU(gpu, device)                                                                \
    struct pcc_client_entered gpu __attribute__((cleanup(pcc_client_gpu_leave))) =                 \
        pcc_client_gpu_enter(device)
/* The one that the address lies in, as the driver says. Within PCC_CLIENT_GPU. */
struct pcc_allocation pcc_client_allocation(const struct pcc_client_device *device,
                                            CUdeviceptr address);
/* The result as a code; a lost GPU is broken from now on. */
int pcc_client_gpu_code(struct pcc_client_device *device, CUresult result);
/* Waits by asking, so that a GPU that is dead ends in an error and breaks; the client's thread
 * keeps deadlines meanwhile. Within PCC_CLIENT_GPU. */
PCC_MUST_CHECK int pcc_client_gpu_await(struct pcc_client *client, struct pcc_client_device *device,
                                        CUevent event, bool is_thread);
/* The client's thread: until no stream waits for the daemon, at most until the last deadline. */
void pcc_client_await_unarmed(struct pcc_client *client);
/* No other thread uses the client any more. */
void pcc_client_devices_close(struct pcc_client *client);

/* With gpu_lock held. */
PCC_MUST_CHECK int pcc_client_staging_make(struct pcc_client_device *device, uint64_t length_bytes);
/* Frees `first` and what it has outgrown; `cuda` NULL: only what we know of it. Within
 * PCC_CLIENT_GPU.
 */
void pcc_client_staging_free(const struct pcc_cuda *cuda, struct pcc_staging *first);

/* -- pcc_client_expose.c -- */
void pcc_client_exposure_free(struct pcc_client *client);
/* By the thread: answers the daemon's question what the GPU's memory holds (struct pcc_proof). 1
 * when something was done. */
int pcc_client_prove(struct pcc_client *client);

/* -- pcc_client_order.c -- */
/* With lock held: true when the daemon has read its part, or never will. */
bool pcc_client_pulled_read(const struct pcc_client *client, const struct pcc_job *job);
/* False when the driver has reported an error on a GPU that a deferred snapshot lies on. */
bool pcc_client_sound(struct pcc_client *client, uint64_t snapshot);
/* With lock held: streams that wait for a snapshot whose word is final go on. */
void pcc_client_release_streams(struct pcc_client *client, struct pcc_job *job);
/* Abandons what is past its deadline; the nearest one that is left, UINT64_MAX = none. */
uint64_t pcc_client_expire(struct pcc_client *client);

/* -- pcc_client_grant.c -- */
/* Maps the segments that have been granted. False at hang-up or nonsense. */
bool pcc_client_take_grants(struct pcc_client *client);
/* The daemon asks for a segment back. False for nonsense. */
bool pcc_client_take_retire(struct pcc_client *client, const struct pcc_message *message);
/* Gives back the unused chunks of the segments that the daemon has asked for, and unused segments.
 * As pcc_client_work. */
PCC_MUST_CHECK int pcc_client_retire(struct pcc_client *client);

/* -- pcc_client_load.c; called by the thread -- */
void pcc_client_take_end(struct pcc_client *client, const struct pcc_message *message);
/* With lock held: true when a load has ended, or never will. */
bool pcc_client_load_over(const struct pcc_client *client, uint64_t load_id);
/* Puts a chunk where it belongs. If the chunk is damaged, *result_out, for TAKEN, says so, and none
 * of a damaged block is in host memory. False: GPUs still read it, and it goes back when they are
 * done. */
PCC_MUST_CHECK bool pcc_client_take_data(struct pcc_client *client,
                                         const struct pcc_message *message, int32_t *result_out);
/* Gives the chunks back that a GPU has read. As pcc_client_work. */
PCC_MUST_CHECK int pcc_client_load_land(struct pcc_client *client,
                                        struct pcc_client_device *device);
/* Waits for all of them, and gives nothing back. Bounded. Streams that waited were released. */
void pcc_client_load_drain(struct pcc_client *client);
