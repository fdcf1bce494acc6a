/* Samples of a snapshot's device part (struct pcc_sample): where they are taken, and what they say
 * of a copy. */
#pragma once

#include "base/pcc_range.h"
#include "shared/pcc_ring.h"

/* False for ranges that overlap, do not ascend, or are empty. */
bool pcc_samples_can_be_of(const struct pcc_device_range *ranges, uint64_t count);
/* Chooses the samples of a snapshot, of which the ranges are all that it has on GPUs. Prepares
 * those of one GPU, and says where each is; what is of another GPU has length 0. */
void pcc_samples_choose(const struct pcc_page_view *view, uint64_t snapshot, uint32_t device,
                        const struct pcc_device_range *ranges, uint64_t count,
                        struct pcc_range parts_out[PCC_SAMPLES]);
/* Whether a chunk has what the trainer's streams had there. */
bool pcc_samples_agree(const struct pcc_page_view *view, uint64_t snapshot, const uint8_t *chunk,
                       uint64_t offset_bytes, uint64_t length_bytes);
