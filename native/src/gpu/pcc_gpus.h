/* The daemon's GPUs: for each one that a trainer has exposed memory of, a context, a stream and a
 * thread (`copier`) that drives its copy engine; device to host copies only, no kernels.
 *
 * A copier serves all tenants, one chunk of each in turn, with a few chunks under way, so that no
 * trainer waits for another's and the engine is never idle. It never waits for a trainer on the
 * stream: whether a snapshot is ready is asked by the CPU. A GPU whose context is lost stays lost
 * (the driver gives it to new processes only): its copies fail, trainers have to push.
 *
 * Any thread. Contexts are made at the first exposure, never at the start, and are given back by
 * pcc_gpus_rest. */
#pragma once

#include "base/pcc_base.h"

struct pcc_gpus;

/* The driver is loaded at the first use. -ENOMEM. */
PCC_MUST_CHECK int pcc_gpus_open(struct pcc_gpus **out);
void pcc_gpus_close(struct pcc_gpus *gpus); /* every tenant must be closed */

#define PCC_GPU_NAME_BYTES 64

struct pcc_gpu_info { /* of a GPU that was used */
    uint8_t uuid[16];
    char name[PCC_GPU_NAME_BYTES];
    bool lost;
    uint64_t copied_bytes; /* since the start */
    uint64_t copies;       /* calls of the driver for them */
    uint64_t failures;
};
/* The first `capacity` GPUs that were used; how many there are. */
uint32_t pcc_gpus_info(struct pcc_gpus *gpus, struct pcc_gpu_info *out, uint32_t capacity);

/* Gives back the contexts of GPUs that nothing has used for `unused_ns`: each takes hundreds of
 * megabytes of the GPU's memory. A lost one stays. Blocks for as long as the driver does. */
void pcc_gpus_rest(struct pcc_gpus *gpus, uint64_t unused_ns);
