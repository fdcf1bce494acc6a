/* The client's end: one native thread that fills granted chunks from the trainer's tensors (copy
 * and checksum fused) and takes loaded data back into them, without the GIL.
 *
 * The thread also reads grants from the attach socket and notices the daemon's death (hang-up):
 * outstanding snapshots are then abandoned and every waiter returns -ECONNRESET. Any thread may
 * call; waits have deadlines (CLOCK_MONOTONIC ns). A forked child must not touch it; segments are
 * MADV_DONTFORK. */
#ifndef PCC_LINK_H
#define PCC_LINK_H

#include "pcc_shared.h"

struct pcc_link;

struct pcc_range { /* payload [offset, offset+length) lives at `address` in this process */
    uint64_t address;
    uint64_t offset_bytes;
    uint64_t length_bytes;
};

/* Duplicates both descriptors; maps the page; starts the thread. -PCC_E_BAD_PEER when the page is
 * not one. */
PCC_MUST_CHECK int pcc_link_open(int socket_fd, int page_fd, struct pcc_link **out);
/* Stops at once; what was not handed over is lost. Waiters return -ECONNRESET first. */
void pcc_link_close(struct pcc_link *link);
bool pcc_link_alive(struct pcc_link *link); /* poll of the socket, about 1 us */
uint32_t pcc_link_chunk_bytes(const struct pcc_link *link);

/* Step 1: the word of `snapshot` becomes REQUESTED (before `begin` is sent). -EBUSY when its entry
 * still belongs to an unfinished snapshot. Ids grow by one. */
PCC_MUST_CHECK int pcc_link_request(struct pcc_link *link, uint64_t snapshot);
/* Step 2: the copy itself, done by the thread once the daemon admits it. `ranges` ascending and
 * disjoint, gaps become zeros, copied during the call; `inline_ranges` are copied *bytes and all*
 * during the call (volatile buffers). `tail` (the tree) follows at tail_offset. The memory behind
 * `ranges` stays valid until pcc_link_wait(.., PCC_WAIT_READ) says so. */
PCC_MUST_CHECK int pcc_link_submit(struct pcc_link *link, uint64_t snapshot,
                                   const struct pcc_range *ranges, uint64_t range_count,
                                   const struct pcc_range *inline_ranges, uint64_t inline_count,
                                   const void *tail, uint64_t tail_bytes,
                                   uint64_t tail_offset_bytes);

enum pcc_wait_for {
    PCC_WAIT_READ,    /* the source may change: it was read, or the snapshot will never be copied */
    PCC_WAIT_COPIED,  /* the daemon vouches for it, or it ended otherwise */
    PCC_WAIT_DURABLE, /* DURABLE, GLOBAL, SUPERSEDED, or it ended otherwise */
};
/* 0, -ETIMEDOUT, -ECONNRESET (the daemon is gone). The caller reads the state afterwards. */
PCC_MUST_CHECK int pcc_link_wait(struct pcc_link *link, uint64_t snapshot, enum pcc_wait_for what,
                                 uint64_t deadline_ns);
/* REQUESTED|COPYING -> ABANDONED. True when this call won; the thread stops reading the source
 * before it returns. False: it was COPIED or refused, or it is COPYING and the source was read
 * already, so that there is nothing to let go of. */
bool pcc_link_abandon(struct pcc_link *link, uint64_t snapshot);

struct pcc_link_state {
    enum pcc_word_state word;
    enum pcc_outcome outcome;
    uint64_t sequence;
    bool source_read;
};
/* -ENOENT when the entry belongs to another snapshot by now. */
PCC_MUST_CHECK int pcc_link_state(struct pcc_link *link, uint64_t snapshot,
                                  struct pcc_link_state *out);

/* Takes the DATA messages of `load_id` and scatters them into ranges (ascending, disjoint; payload
 * outside of them is dropped) until END. Call before the daemon is asked for the load
 * (pcc_link_load_start; -EBUSY while one is open), then wait. Result: 0, the daemon's code,
 * -ETIMEDOUT, -ECONNRESET; whichever, the load is closed and nothing writes to the ranges any more.
 */
PCC_MUST_CHECK int pcc_link_load_start(struct pcc_link *link, uint64_t load_id,
                                       const struct pcc_range *ranges, uint64_t range_count);
PCC_MUST_CHECK int pcc_link_load_wait(struct pcc_link *link, uint64_t load_id,
                                      uint64_t deadline_ns);
/* Waits up to until_ns and leaves the load open: for callers that must look up now and then. True
 * when pcc_link_load_wait would return at once. */
bool pcc_link_load_ended(struct pcc_link *link, uint64_t load_id, uint64_t until_ns);

#endif
