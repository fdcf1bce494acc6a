/* The inside of the GPUs, shared by pcc_gpus.c (which GPUs, what is done on the caller's thread),
 * pcc_gpus_map.c (memory in pieces), pcc_gpus_copier.c (the thread) and the tenants' pull
 * (pcc_tenant_expose.c, pcc_source_pull.c).
 *
 * Locks, outermost first: a tenant's -> the registry's -> a GPU's own. A GPU's lock is held for
 * microseconds and never over a call of the driver; copiers call jobs without it. */
#pragma once

#include <pthread.h>

#include "gpu/pcc_cuda.h"
#include "gpu/pcc_gpus.h"

#define PCC_GPUS_MAX 64u
/* Under way on one GPU at a time, up to PCC_CUDA_AHEAD_BYTES: enough to keep its engine busy while
 * the copier sleeps, and no more, since chunks under way are taken from the pool. */
#define PCC_GPU_CHUNKS 8u
#define PCC_GPU_CHUNKS_MIN 2u
/* Copies that one job enqueues before the next one has its turn. */
#define PCC_GPU_COPIES 128u

struct pcc_gpu;
struct pcc_gpu_job;

struct pcc_gpu_copy {
    CUdeviceptr from;
    void *to; /* pinned, for a copier */
    uint64_t length_bytes;
};

struct pcc_gpu_piece { /* a chunk, or the next part of one with very many copies */
    uint32_t token;    /* the owner's name for the chunk */
    uint32_t count;
    uint64_t chunk_bytes;
    bool last; /* of its chunk */
    struct pcc_gpu_copy copies[PCC_GPU_COPIES];
};

enum pcc_gpu_verdict { PCC_GPU_NOTHING_NOW, PCC_GPU_PIECE, PCC_GPU_NO_MORE };

struct pcc_gpu_calls { /* by the copier, one at a time per GPU; they take the tenant's lock */
    /* What to copy next. A chunk that was begun is finished or closed with an empty last piece. */
    enum pcc_gpu_verdict (*next)(struct pcc_gpu_job *job, struct pcc_gpu_piece *out);
    /* The copies of a chunk have ended. -PCC_E_DEVICE_LOST: whether they have is not known, and the
     * memory must never be used again. After an error there is no `next`. */
    void (*done)(struct pcc_gpu_job *job, uint32_t token, int error);
    /* The GPU is lost: no `next` any more; a chunk that was begun is in the state named above. */
    void (*lost)(struct pcc_gpu_job *job);
    /* No more and nothing under way: the job is the owner's again. */
    void (*ended)(struct pcc_gpu_job *job);
};

/* A part of one checkpoint on one GPU; malloc'ed by its owner, first member of what it is. */
struct pcc_gpu_job {
    const struct pcc_gpu_calls *calls;
    struct pcc_gpu *gpu;
    struct pcc_gpu_job *next; /* everything from here on is the copier's */
    uint32_t under_way;
    uint64_t begun_bytes; /* of a chunk that is begun and whose last piece is not enqueued; or 0 */
    bool finished;
    bool orphan; /* guarded by the GPU's lock */
};

struct pcc_gpu_slot { /* a chunk under way */
    struct pcc_gpu_job *job;
    CUevent event;
    uint64_t bytes;
    uint32_t token;
    int error;       /* it has failed, or not all of it was enqueued: the stream's end counts */
    uint32_t errors; /* that queries gave */
};

struct pcc_gpu_jobs {
    struct pcc_gpu_job *first, *last;
};

struct pcc_gpu {
    CUuuid uuid; /* these three are fixed before the GPU is in the table */
    char name[PCC_GPU_NAME_BYTES];
    bool open; /* guarded by `making`: what follows down to the lock is there while it is */
    struct pcc_gpu_device device;
    _Atomic bool lost;
    _Atomic uint64_t copied_bytes, copies, failures;
    struct pcc_gpu *left_behind; /* the next one */

    pthread_mutex_t reading; /* one probe or proof at a time */
    CUstream side;           /* for them */
    uint8_t *landing;        /* pinned; where they land */
    bool landing_pinned;

    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stopping;
    uint32_t users;           /* maps and pinned segments; without any the context may go */
    uint64_t unused_ns;       /* since when there are none */
    struct pcc_gpu_jobs jobs; /* in turn */
    const struct pcc_gpu_job *calling;

    CUstream stream; /* from here on the copier's alone */
    struct pcc_gpu_slot slots[PCC_GPU_CHUNKS];
    uint32_t head, tail; /* free-running */
    uint32_t chunks;     /* begun and not done */
    uint64_t bytes;
    struct pcc_gpu_piece piece;
};

/* -- pcc_gpus.c; any thread -- */
#define PCC_GPU_LANDING_BYTES 65536u

/* The GPU with that UUID, readied for its first user: context, streams, copier. The caller is a
 * user of it from now on. -ENODEV, -EBUSY (it admits one process only), -PCC_E_DEVICE_LOST,
 * -PCC_E_DEVICE, -ENOMEM. */
PCC_MUST_CHECK int pcc_gpus_use(struct pcc_gpus *gpus, const uint8_t uuid[16],
                                struct pcc_gpu **out);
/* For a user of the GPU: one user more, one less. */
void pcc_gpu_hold(struct pcc_gpu *gpu);
void pcc_gpu_put(struct pcc_gpu *gpu);
/* The result as a code; within the context. A reported loss of the context is checked by another
 * call, which would also fail: a handle of one trainer must not take the GPU from the others. */
int pcc_gpu_code(struct pcc_gpu *gpu, CUresult result);
struct pcc_gpu_answers { /* of the driver, when a handle does not open */
    CUresult first;
    CUresult second; /* of another way to ask how long the memory is; or CUDA_SUCCESS */
};
/* Opens an IPC handle; *length_out is what can be read from *address_out on, as the driver says.
 * -PCC_E_BAD_HANDLE with *answers_out, -PCC_E_DEVICE_LOST, -ENOMEM. */
PCC_MUST_CHECK int pcc_gpu_import(struct pcc_gpu *gpu, const uint8_t handle[64],
                                  CUdeviceptr *address_out, uint64_t *length_out,
                                  struct pcc_gpu_answers *answers_out);
/* Maps pieces of one length, a descriptor for each, side by side and to be read only. The caller
 * closes the descriptors; nothing else stays open. As pcc_gpu_import. */
PCC_MUST_CHECK int pcc_gpu_map(struct pcc_gpu *gpu, const int *fds, uint32_t count,
                               uint64_t piece_bytes, CUdeviceptr *address_out,
                               struct pcc_gpu_answers *answers_out);
/* These three do nothing to a lost GPU: its driver may wait forever. */
void pcc_gpu_import_close(struct pcc_gpu *gpu, CUdeviceptr address);
void pcc_gpu_unmap(struct pcc_gpu *gpu, CUdeviceptr address, uint32_t count, uint64_t piece_bytes);
PCC_MUST_CHECK int pcc_gpu_unpin_host(struct pcc_gpu *gpu, void *bytes, uint64_t length);
/* Reads up to PCC_GPU_LANDING_BYTES of device memory in all, beside the copier and into any memory;
 * bounded. */
PCC_MUST_CHECK int pcc_gpu_read(struct pcc_gpu *gpu, const struct pcc_gpu_copy *copies,
                                uint32_t count);
PCC_MUST_CHECK int pcc_gpu_pin_host(struct pcc_gpu *gpu, void *bytes, uint64_t length);

static inline bool pcc_gpu_is_lost(const struct pcc_gpu *gpu)
{
    /* Acquire pairs with pcc_gpu_lose. */
    return PCC_READ_ACQUIRE(&gpu->lost);
}

static inline void pcc_gpu_lose(struct pcc_gpu *gpu)
{
    PCC_WRITE_RELEASE(&gpu->lost, true);
}

/* -- pcc_gpus_copier.c -- */
void *pcc_gpu_copier_run(void *gpu);
/* Gives a job to the copier. */
void pcc_gpu_job_start(struct pcc_gpu *gpu, struct pcc_gpu_job *job);
/* The GPU is lost and does not answer: the job is not called any more, and its memory is the
 * copier's. False while it is being called. With the owner's lock held. */
PCC_MUST_CHECK bool pcc_gpu_job_orphan(struct pcc_gpu *gpu, struct pcc_gpu_job *job);
