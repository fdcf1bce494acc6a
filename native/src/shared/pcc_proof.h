/* Which blocks of an exposure the client has to show (struct pcc_proof): one at a random place in
 * what the daemon reads of each allocation, and of each piece of a run, for this rank or, in a
 * replica, for another one. Numbers only. */
#pragma once

#include "shared/pcc_exposure.h"

struct pcc_proof_place {
    uint64_t read_bytes;   /* of this allocation or piece */
    uint64_t offset_bytes; /* of the block, in the allocation */
    uint32_t allocation;
    uint32_t length_bytes; /* of the block, up to PCC_PROOF_BYTES */
};

/* Of the allocations of a device whose flag in `known` is not set. *out is malloc'ed. Each call
 * makes a new choice, for the same allocations and pieces in the same order. -ENOMEM, -EIO (no
 * random numbers). */
PCC_MUST_CHECK int pcc_proof_choose(const struct pcc_exposure_view *view, uint32_t device,
                                    const bool *known, struct pcc_proof_place **out,
                                    uint32_t *count_out);
/* Repeats the same eight bytes, or has no more: who cannot read it may guess it. */
bool pcc_proof_is_plain(const uint8_t *block, uint32_t length_bytes);
