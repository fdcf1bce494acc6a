/* The DRAM pool: the budget M, and the segments (sealed memfds of up to 256 MiB) cut from it.
 *
 * A segment belongs to one tenant and is never handed to another: it is destroyed and its room
 * goes back to the budget, so that no byte changes tenant (the kernel zeroes new pages). Pages are
 * touched once, here, and never punched or truncated. Any thread; making a segment blocks while its
 * pages are touched.
 *
 * With a descriptor store, whatever is made with a label is put there before it is used, and
 * removed when it is destroyed: `LABEL-segment-ID`, `LABEL-state-ID`, ID in 16 hexadecimal digits
 * that are never given out again. */
#pragma once

#include "pool/pcc_store.h"

#define PCC_SEGMENT_BYTES_MAX (256ull << 20)

struct pcc_pool;

struct pcc_segment {
    int fd;
    uint8_t *bytes;
    uint64_t length_bytes;
    uint64_t id; /* in the descriptor store; 0 = it is not there */
    uint32_t first_chunk;
    uint32_t chunk_count;
};

#define PCC_POOL_LABEL_MAX 64u

PCC_MUST_CHECK int pcc_pool_open(uint64_t budget_bytes, struct pcc_pool **out);
/* From now on, before the first segment. Takes the store. */
void pcc_pool_keep(struct pcc_pool *pool, struct pcc_store *store);
struct pcc_store_usage pcc_pool_stored(struct pcc_pool *pool); /* zeros without a store */
void pcc_pool_close(struct pcc_pool *pool);                    /* every segment must be back */
void pcc_pool_usage(struct pcc_pool *pool, uint64_t *budget_out, uint64_t *used_out);
/* `label` says whose it is; "" is for memory that need not outlive us. What the store has no room
 * for is used all the same (id 0). -PCC_E_NO_MEMORY when the budget is used up, -ENOMEM when the
 * machine is. */
PCC_MUST_CHECK int pcc_pool_take(struct pcc_pool *pool, uint64_t length_bytes, const char *label,
                                 struct pcc_segment *out);
/* A segment that an earlier daemon put into the store as `id`. Takes `fd` on success. -EINVAL when
 * no pccheckd made it: not sealed, not whole, too large; -PCC_E_NO_MEMORY. */
PCC_MUST_CHECK int pcc_pool_adopt(struct pcc_pool *pool, int fd, uint64_t id, const char *label,
                                  struct pcc_segment *out);
/* It is not used after all: the descriptor is the caller's again, and stays in the store. */
void pcc_pool_unadopt(struct pcc_pool *pool, struct pcc_segment *segment);
/* Removes a descriptor from the store that is not used. */
void pcc_pool_unstore(struct pcc_pool *pool, const char *name);
/* A state memfd, outside of the budget. *id_out is 0, and nothing is made, without a store or when
 * it has no room. */
PCC_MUST_CHECK int pcc_pool_state_make(struct pcc_pool *pool, const char *label,
                                       uint64_t length_bytes, uint64_t *id_out, void **bytes_out);
/* Maps a state memfd that was found; closes nothing. -EINVAL as above. */
PCC_MUST_CHECK int pcc_pool_state_map(int fd, void **bytes_out, uint64_t *length_out);
void pcc_pool_state_drop(struct pcc_pool *pool, const char *label, uint64_t id, void *bytes,
                         uint64_t length_bytes);
/* `label`: as for take or adopt. */
void pcc_pool_return(struct pcc_pool *pool, const char *label, struct pcc_segment *segment);
/* The same for one that the CUDA driver still has registered: its addresses are not used again. */
void pcc_pool_retire(struct pcc_pool *pool, const char *label, struct pcc_segment *segment);
/* A lost GPU may still write to it: stays mapped and counted until the process ends. */
void pcc_pool_abandon(struct pcc_pool *pool, const char *label, struct pcc_segment *segment);
/* A new sealed memfd, outside the budget. */
PCC_MUST_CHECK int pcc_memfd_make(const char *name, uint64_t length_bytes, int *fd_out,
                                  void **bytes_out);
