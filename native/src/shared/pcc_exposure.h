/* What a trainer exposed of its GPUs (pcc_shared.h), taken apart and checked. Numbers only: nothing
 * is opened here. A checked exposure never changes, so that any thread may read it. */
#pragma once

#include "shared/pcc_shared.h"

struct pcc_exposure_view {
    struct pcc_exposure head;
    struct pcc_exposed_allocation *allocations;
    struct pcc_exposed_range *ranges;
    struct pcc_exposed_range *replica;
    struct pcc_exposed_share *shares;
    uint32_t *by_handle;          /* numbers of allocations, their handles ascending */
    uint32_t chunk_bytes;         /* of the tenant it was checked for */
    uint32_t devices;             /* one bit for each that has chunks */
    uint64_t pieces, run_bytes;   /* of all runs */
    uint32_t chunks[PCC_DEVICES]; /* of the payload's device part */
};

/* Copies and checks `bytes`; it is freed with pcc_exposure_free. On return every offset and length
 * in it may be added and used without a further check, but for the true lengths of allocations.
 * -PCC_E_BAD_PEER, and a static text that says why; -ENOMEM. */
PCC_MUST_CHECK int pcc_exposure_parse(const void *bytes, uint64_t length_bytes,
                                      uint32_t chunk_bytes, struct pcc_exposure_view *out,
                                      const char **why_out);
void pcc_exposure_free(struct pcc_exposure_view *view); /* a zeroed one, too */
/* A view of the payload of `mine` whose ranges lie in the allocations of another rank: all shares
 * of `mine`, as the replica of `other` has them. -ENOENT when `other` has not all of them, or when
 * a chunk would be empty or of two devices; -ENOMEM. */
PCC_MUST_CHECK int pcc_exposure_elsewhere(const struct pcc_exposure_view *mine,
                                          const struct pcc_exposure_view *other,
                                          struct pcc_exposure_view *out);
/* The range that has this byte of the payload, or NULL. */
const struct pcc_exposed_range *pcc_exposure_at(const struct pcc_exposure_view *view,
                                                uint64_t offset_bytes);

/* How a device's chunks are walked, in order, and within a chunk the copies that fill it. */
struct pcc_exposure_walk {
    uint32_t range;        /* the first one that is not done with */
    uint64_t chunk_bytes;  /* payload offset of the chunk */
    uint64_t filled_bytes; /* payload offset: what comes before, in this chunk, is done with */
};
struct pcc_exposure_step { /* payload [offset, +length) comes from there, or is zeros */
    uint64_t offset_bytes;
    uint64_t length_bytes;
    uint64_t allocation_offset_bytes;
    uint32_t allocation; /* PCC_EXPOSURE_ZEROS */
};
#define PCC_EXPOSURE_ZEROS UINT32_MAX
/* Zeros come in steps of at most this: the copier that makes them has other saves to serve. */
#define PCC_EXPOSURE_ZEROS_BYTES (1u << 20)

/* Before the first chunk of a device: {0}. False when there is no further chunk. */
bool pcc_exposure_next_chunk(const struct pcc_exposure_view *view, uint32_t device,
                             struct pcc_exposure_walk *walk);
/* False when the chunk is filled. */
bool pcc_exposure_next_step(const struct pcc_exposure_view *view, struct pcc_exposure_walk *walk,
                            struct pcc_exposure_step *out);
