/* The client's end: one native thread that fills granted chunks from the trainer's tensors (copy
 * and checksum fused) and takes loaded data back into them, without the GIL. While a thread of the
 * trainer waits, helpers move host memory, too: as many as there are other CPUs, at most three.
 *
 * The thread also reads grants from the link and notices the daemon's death (hang-up):
 * outstanding snapshots are then abandoned, streams that wait for them released, and every waiter
 * returns -ECONNRESET. Any thread may call; waits have deadlines (CLOCK_MONOTONIC ns). A forked
 * child must not touch it; segments are MADV_DONTFORK.
 *
 * GPU memory, pull: the daemon copies, this side only orders the streams (pcc_client_order.c).
 * GPU memory, push: the same thread enqueues copies into granted chunks, which it pins first, and
 * hands a chunk over when its copies are done (pcc_client_push.c). */
#pragma once

#include "base/pcc_range.h"
#include "shared/pcc_shared.h"

struct pcc_client;

/* Duplicates both descriptors; maps the page; starts the thread. -PCC_E_BAD_PEER when the page is
 * not one. */
PCC_MUST_CHECK int pcc_client_open(int socket_fd, int page_fd, struct pcc_client **out);
/* Stops at once; what was not handed over is lost. Waiters return -ECONNRESET first, and waiting
 * streams are released. Blocks, for a limited time, until the GPUs no longer use the client's
 * memory; memory that a GPU may still touch is left mapped. */
void pcc_client_close(struct pcc_client *client);
bool pcc_client_alive(struct pcc_client *client); /* poll of the socket, about 1 us */
/* 0, or -errno: the link has ended because memory of the daemon's could not be mapped here. */
int pcc_client_unmapped(const struct pcc_client *client);
uint32_t pcc_client_chunk_bytes(const struct pcc_client *client);

/* Step 1: the word of `snapshot` becomes REQUESTED; the daemon learns of it with the submission.
 * -EBUSY when its entry still belongs to an unfinished snapshot. Ids grow by one. */
PCC_MUST_CHECK int pcc_client_request(struct pcc_client *client, uint64_t snapshot);

struct pcc_submission {
    const struct pcc_range *ranges;
    uint64_t range_count;
    const struct pcc_range *inline_ranges;
    uint64_t inline_count;
    const void *tail;
    uint64_t tail_bytes;
    uint64_t tail_offset_bytes;
    /* Device memory. Push: copied by the thread behind the events that pcc_client_mark recorded.
     * Pull: only what follows pulled_bytes; what is before is the daemon's to fill, from GPUs whose
     * bits are set in pulled_devices. */
    const struct pcc_device_range *device_ranges;
    uint64_t device_range_count;
    uint64_t pulled_bytes;
    uint32_t pulled_devices;
    /* A prefix that probably has not changed since an earlier snapshot. If the daemon has a base
     * for it, whole chunks of it are read in place, and copied only if their checksums are not
     * those of the base. No device memory lies there. */
    uint64_t offered_bytes;
    /* Nothing keeps the source as it is while it is read: the last chunk stays here, and so the
     * daemon cannot vouch, until pcc_client_confirm. */
    bool provisional;
    /* What the daemon is asked for. The call fills in snapshot, payload, tree and offered bytes. */
    struct pcc_request request;
};
/* Step 2: the request goes to the daemon; and the copy itself, done by the thread once the daemon
 * admits it. All kinds of ranges ascending and disjoint, together, too; gaps become zeros; the
 * lists are copied during the call. `inline_ranges` are copied *bytes and all* during the call
 * (volatile buffers). `tail` (the tree) follows at tail_offset. The memory behind `ranges` and
 * `device_ranges` stays valid until pcc_client_wait(.., PCC_WAIT_READ) says so. A chunk of the
 * payload takes ranges of one GPU only, and pulled_bytes is a number of whole chunks. -EINVAL;
 * -PCC_E_DEVICE when a GPU is broken; -EFAULT and the like when memory of `inline_ranges` is not
 * there. */
PCC_MUST_CHECK int pcc_client_submit(struct pcc_client *client, uint64_t snapshot,
                                     const struct pcc_submission *submission);

/* -- images of processes: saves of open length ------------------------------------------------- */

struct pcc_image_extent { /* bytes of a stream, and where they are in the payload */
    uint32_t stream;
    uint32_t reserved;
    uint64_t offset_bytes;
    uint64_t length_bytes;
};
/* Step 2 of an image. payload_bytes of the request is a bound; one byte of it is never used.
 * -ENOENT, -EINVAL, -ECONNRESET. */
PCC_MUST_CHECK int pcc_client_image_begin(struct pcc_client *client, uint64_t snapshot,
                                          const struct pcc_request *request);
/* Another stream, which is read until its end. The descriptor, a pipe, is duplicated and made
 * non-blocking. All streams are closed when the image ends in any way, so the writer gets EPIPE.
 * -ENOENT when the image has ended. An image that outgrows its bound is abandoned with -EFBIG. */
PCC_MUST_CHECK int pcc_client_image_stream(struct pcc_client *client, uint64_t snapshot, int fd,
                                           uint32_t number, bool bulk);
/* After PCC_WAIT_DRAINED: where the streams are, in the order of the payload. malloc'ed. */
PCC_MUST_CHECK int pcc_client_image_extents(struct pcc_client *client, uint64_t snapshot,
                                            struct pcc_image_extent **out, uint64_t *out_count);
uint64_t pcc_client_image_bytes(struct pcc_client *client, uint64_t snapshot); /* so far */
/* The tree follows the streams, and the length is known. -EBUSY when a stream has not ended. */
PCC_MUST_CHECK int pcc_client_image_end(struct pcc_client *client, uint64_t snapshot,
                                        const void *tail, uint64_t tail_bytes);

/* -- GPUs, by this process's CUDA ordinal ------------------------------------------------------ */

struct pcc_device_copy { /* on one GPU, into its staging memory */
    uint64_t address;
    uint64_t staging_offset_bytes;
    uint64_t length_bytes;
};

/* Readies the GPU for this client: its primary context, streams, and a mapping of the page's words.
 * Once per device; later calls return at once. -PCC_E_NO_DRIVER, -PCC_E_DEVICE. */
PCC_MUST_CHECK int pcc_client_device_open(struct pcc_client *client, uint32_t device);
/* "" or why the daemon cannot pull from this GPU, in words: no stream memory operations, or the
 * page cannot be mapped for it. */
const char *pcc_client_device_cannot_pull(struct pcc_client *client, uint32_t device);
/* The client's device memory for copies made on the device, at least that long. It moves when it
 * has to grow (the previous memory stays until pcc_client_staging_trim). -ENOMEM. */
PCC_MUST_CHECK int pcc_client_staging(struct pcc_client *client, uint32_t device,
                                      uint64_t length_bytes, uint64_t *address_out);
/* The GPU is going to copy from or to granted memory: segments are pinned for it when nothing else
 * is to be done: those that are there, or come together next; with `later`, all that are granted
 * from now on. Without this call each is pinned before its first copy. */
void pcc_client_pin_for(struct pcc_client *client, uint32_t device, bool later);
void pcc_client_staging_trim(struct pcc_client *client); /* frees what staging has outgrown */
/* Enqueues the copies, with few launches, on a stream of the client that first waits for the
 * trainer's `stream`. Then `stream` waits for the copies; with `aside` it does not, and training
 * continues beside them. No copy overlaps another. What was staged before must have been read. */
PCC_MUST_CHECK int pcc_client_stage(struct pcc_client *client, uint32_t device, uint64_t stream,
                                    const struct pcc_device_copy *copies, uint64_t copy_count,
                                    bool aside);
/* Before what the snapshot depends on is staged or marked, once for each of its GPUs: `stream`
 * copies a few bytes of these ranges, which are all that the snapshot has of GPUs, in the order of
 * the payload. What daemon or client copy later has to have the same bytes there, or the snapshot
 * fails. Does nothing when the page cannot be mapped for the GPU, or when a stream has yet to come
 * to an earlier snapshot that had the same entry of the page. */
PCC_MUST_CHECK int pcc_client_sample(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                                     uint64_t stream, const struct pcc_device_range *ranges,
                                     uint64_t range_count);
/* Between request and submit, once for each GPU that the snapshot reads, or twice, with and without
 * `pull`, where the daemon reads a part and the client the rest; when all that the snapshot
 * depends on is enqueued on `stream` (or on the stream of the last `aside` stage). */
PCC_MUST_CHECK int pcc_client_mark(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                                   uint64_t stream, bool pull, bool aside);
/* The gate: what is enqueued on `stream` from now on runs after this GPU's part of the snapshot was
 * read (staged aside: after it was staged). The stream waits, not the caller; but for push the
 * caller waits until all copies are enqueued: a stream that waits for copies that cannot be
 * launched while it waits would wait forever. At the deadline the client's thread abandons the
 * snapshot, which releases the stream. The time that the stream needs for earlier work does not
 * count. 0, -ETIMEDOUT (the caller abandons), -PCC_E_DEVICE. */
PCC_MUST_CHECK int pcc_client_hold(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                                   uint64_t stream, uint64_t deadline_ns);
/* In the place of a stream: what pcc_client_stage enqueues from now on waits until the snapshot, if
 * that was staged, was read. */
#define PCC_STAGING UINT64_MAX
/* Waits up to until_ns, for callers that must look up now and then. True when pcc_client_hold would
 * not make its caller wait. */
bool pcc_client_hold_ready(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                           uint64_t stream, uint64_t until_ns);
/* False while a stream that was marked for the snapshot has not reached the mark: it is busy with
 * what the trainer enqueued before, which may take long. */
bool pcc_client_reached(struct pcc_client *client, uint64_t snapshot);
/* True while the stream records a CUDA graph: nothing may be enqueued on it then. */
PCC_MUST_CHECK int pcc_client_capturing(struct pcc_client *client, uint32_t device, uint64_t stream,
                                        bool *out);
/* State that several ranks have, in a space where it has the same places on all of them: where this
 * rank has it, and which bytes of this payload are which bytes of the replica. Zeroed: there is
 * none. */
struct pcc_client_replica {
    uint64_t id;
    const struct pcc_device_range *ranges; /* ascending by their offset in the replica */
    uint64_t range_count;
    const struct pcc_range *shares; /* of the payload; `address` is the place in the replica */
    uint64_t share_count;
};
/* The exposure (pcc_shared.h) of these ranges: one handle per allocation, or a run of pieces with
 * descriptors; neighbours in memory and payload made one range. *out_bytes is malloc'ed.
 * -PCC_E_BAD_HANDLE when memory has neither (a pool), -PCC_E_TOO_LARGE when there are too many.
 * Ranges ascend by payload offset. `replica`: what other ranks may be given. The probe is written
 * into the staging memory of the first range's GPU. `known`: the daemon has accepted the exposure
 * before, whose runs need no descriptors. */
PCC_MUST_CHECK int pcc_client_expose(struct pcc_client *client,
                                     const struct pcc_device_range *ranges, uint64_t range_count,
                                     uint64_t device_bytes,
                                     const struct pcc_client_replica *replica, bool known,
                                     uint8_t **out_bytes, uint64_t *out_length);
/* After -PCC_E_BAD_HANDLE: out[i] = 1 for each range whose memory has neither. -EINVAL, -ENOMEM,
 * -PCC_E_DEVICE. */
PCC_MUST_CHECK int pcc_client_unshareable(struct pcc_client *client,
                                          const struct pcc_device_range *ranges,
                                          uint64_t range_count, uint8_t *out);
/* The next descriptors that the daemon needs for the last exposure, the caller's to close, also
 * after an error; none: these were all. -PCC_E_BAD_HANDLE, -PCC_E_DEVICE. */
PCC_MUST_CHECK int pcc_client_descriptors(struct pcc_client *client, int *fds, uint32_t capacity,
                                          uint32_t *count_out);
/* Whether all memory of the last pcc_client_expose is still the very same: freed and allocated
 * again it may have its old address. True when nothing was exposed. */
bool pcc_client_exposure_holds(struct pcc_client *client);

enum pcc_wait_for {
    PCC_WAIT_READ,      /* the source may change: it was read, GPUs' parts too, or the snapshot will
                           never be copied */
    PCC_WAIT_HOST_READ, /* the same for the host's part of the source */
    PCC_WAIT_COPIED,    /* the daemon vouches for it, or it ended otherwise */
    PCC_WAIT_DURABLE,   /* DURABLE, GLOBAL, SUPERSEDED, or it ended otherwise */
    PCC_WAIT_GLOBAL,    /* GLOBAL, SUPERSEDED, or it ended otherwise */
    PCC_WAIT_DRAINED,   /* all that the client sends is handed over, or it ended; of an image, every
                           stream that it was given has ended */
    PCC_WAIT_LOAD,      /* of a load, not a snapshot: pcc_client_load_wait would return at once */
};
/* 0, -ETIMEDOUT, -ECONNRESET (the daemon is gone). The caller reads the state afterwards. */
PCC_MUST_CHECK int pcc_client_wait(struct pcc_client *client, uint64_t id, enum pcc_wait_for what,
                                   uint64_t deadline_ns);
/* A provisional snapshot becomes like any other: the source was not changed before it was read, and
 * from now on something holds changes back. */
void pcc_client_confirm(struct pcc_client *client, uint64_t snapshot);
/* A snapshot of level MEMORY or DEVICE, from its request on, is to be written: the thread tells the
 * daemon, once it knows of the snapshot. One of level DEVICE is pulled now, unless a hold has
 * withdrawn it. When its GPU has failed, it is abandoned. False: its GPU has failed, nobody reads
 * it here, and the daemon looks for it with other ranks once the session has ended. Nothing happens
 * when the call is repeated, when the entry belongs to another snapshot by now, or when the
 * snapshot has ended or is on its way to the disk. */
bool pcc_client_write(struct pcc_client *client, uint64_t snapshot);
/* REQUESTED|COPYING -> ABANDONED. True when this call won; streams that wait for it are released,
 * and the thread stops reading the source before it returns (bounded for a GPU that does not
 * answer). False: it is COPIED or REFUSED, or nothing of a COPYING one is left to read and it is
 * not provisional. */
bool pcc_client_abandon(struct pcc_client *client, uint64_t snapshot);

struct pcc_client_state {
    enum pcc_word_state word;
    enum pcc_outcome outcome;
    uint64_t sequence;
    uint64_t newer;           /* of SUPERSEDED, see pcc_shared.h; else 0 */
    struct pcc_reason reason; /* of the outcome */
    bool source_read;
    int error;      /* why the client itself abandoned it: -ETIMEDOUT (the deadline of a hold),
                       -PCC_E_DEVICE, -PCC_E_DEVICE_LOST, -ECONNRESET, and what reading the trainer's
                       memory ended with: -EFAULT, -EMFILE, -ENOMEM; else 0 */
    uint64_t fault; /* the address in it, 0 = none */
};
/* -ENOENT when the entry belongs to another snapshot by now. */
PCC_MUST_CHECK int pcc_client_state(struct pcc_client *client, uint64_t snapshot,
                                    struct pcc_client_state *out);

/* Takes the DATA messages of `load_id` and scatters them into ranges (ascending, disjoint; payload
 * outside of them is dropped) until END. Call before the daemon is asked for the load
 * (pcc_client_load_start; -EBUSY while one is open), then wait. Device ranges, disjoint with the
 * others, too, are filled by copies from the chunks on the client's stream; these are complete when
 * the wait returns. Result: 0, the daemon's code, -PCC_E_DEVICE, -PCC_E_DEVICE_LOST, -ETIMEDOUT,
 * -ECONNRESET; whichever, the load is closed and nothing writes to the ranges any more. */
PCC_MUST_CHECK int pcc_client_load_start(struct pcc_client *client, uint64_t load_id,
                                         const struct pcc_range *ranges, uint64_t range_count,
                                         const struct pcc_device_range *device_ranges,
                                         uint64_t device_range_count);
PCC_MUST_CHECK int pcc_client_load_wait(struct pcc_client *client, uint64_t load_id,
                                        uint64_t deadline_ns);
/* How many bytes the newest load has taken from chunks in the daemon's memory, and how many from
 * the volume; whole chunks, of which the ranges may take a part. */
void pcc_client_loaded(struct pcc_client *client, uint64_t *cached_bytes, uint64_t *read_bytes);
