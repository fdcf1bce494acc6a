/* The DRAM pool: the budget M, and the segments (sealed memfds of up to 256 MiB) cut from it.
 *
 * A segment belongs to one channel and is never handed to another: it is destroyed and its room
 * goes back to the budget, so that no byte changes tenant (the kernel zeroes new pages). Pages are
 * touched once, here, and never punched or truncated. Any thread; making a segment blocks while its
 * pages are touched. */
#ifndef PCC_POOL_H
#define PCC_POOL_H

#include "pcc_base.h"

#define PCC_SEGMENT_BYTES_MAX (256ull << 20)

struct pcc_pool;

struct pcc_segment {
    int fd;
    uint8_t *bytes;
    uint64_t length_bytes;
    uint32_t first_chunk;
    uint32_t chunk_count;
};

PCC_MUST_CHECK int pcc_pool_open(uint64_t budget_bytes, struct pcc_pool **out);
void pcc_pool_close(struct pcc_pool *pool); /* every segment must be back */
void pcc_pool_usage(struct pcc_pool *pool, uint64_t *budget_out, uint64_t *used_out);
/* From the memory of `numa_node` if it has room (-1: wherever).
 * -PCC_E_NO_MEMORY when the budget is used up, -ENOMEM when the machine is. */
PCC_MUST_CHECK int pcc_pool_take(struct pcc_pool *pool, uint64_t length_bytes, int numa_node,
                                 struct pcc_segment *out);
void pcc_pool_return(struct pcc_pool *pool, struct pcc_segment *segment);
/* The same for one that the CUDA driver has not let go of: its addresses are not used again. */
void pcc_pool_retire(struct pcc_pool *pool, struct pcc_segment *segment);
/* A lost GPU may still write to it: stays mapped and counted until the process ends. */
void pcc_pool_abandon(struct pcc_pool *pool, struct pcc_segment *segment);
/* A sealed memfd of our making outside the budget: the session page. */
PCC_MUST_CHECK int pcc_memfd_make(const char *name, uint64_t length_bytes, int *fd_out,
                                  void **bytes_out);

#endif
