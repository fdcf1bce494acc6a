/* A copier: the thread that keeps one GPU's copy engine busy. In each round it looks which chunks
 * have arrived, in the order in which they were enqueued, and lets every job enqueue one more. It
 * asks the driver and never waits in it, so that no job can hold up another one. */
#include <stdlib.h>

#include "base/pcc_thread.h"
#include "gpu/pcc_gpu.h"

#define NAP_MIN_NS 20000u
#define NAP_MAX_NS 500000u
#define QUERY_ERRORS_MAX 100u /* in sequence, until a GPU counts as lost */

static void count(_Atomic uint64_t *counter, uint64_t more)
{
    (void)atomic_fetch_add_explicit(counter, more, memory_order_relaxed); /* for display only */
}

/* -- jobs in turn -- */

static void job_append(struct pcc_gpu_jobs *jobs, struct pcc_gpu_job *job)
{
    job->next = NULL;
    if (jobs->last != NULL)
        jobs->last->next = job;
    else
        jobs->first = job;
    jobs->last = job;
}

static struct pcc_gpu_job *job_take(struct pcc_gpu_jobs *jobs)
{
    struct pcc_gpu_job *job = jobs->first;

    if (job != NULL)
        jobs->first = job->next;
    if (jobs->first == NULL)
        jobs->last = NULL;
    return job;
}

static void jobs_append(struct pcc_gpu_jobs *jobs, struct pcc_gpu_jobs *more)
{
    struct pcc_gpu_job *job;

    while ((job = job_take(more)) != NULL)
        job_append(jobs, job);
}

void pcc_gpu_job_start(struct pcc_gpu *gpu, struct pcc_gpu_job *job)
{
    PCC_LOCKED(&gpu->lock);
    job_append(&gpu->jobs, job);
    (void)pthread_cond_signal(&gpu->wake);
}

bool pcc_gpu_job_orphan(struct pcc_gpu *gpu, struct pcc_gpu_job *job)
{
    PCC_LOCKED(&gpu->lock);
    job->orphan = gpu->calling != job;
    return job->orphan;
}

/* False for an orphan, which must not be called. */
static bool call_begin(struct pcc_gpu *gpu, const struct pcc_gpu_job *job)
{
    PCC_LOCKED(&gpu->lock);
    gpu->calling = job->orphan ? NULL : job;
    return !job->orphan;
}

static void call_end(struct pcc_gpu *gpu)
{
    PCC_LOCKED(&gpu->lock);
    gpu->calling = NULL;
}

/* -- chunks under way -- */

/* The result of a chunk's copies; CUDA_ERROR_NOT_READY while they run. If not all of them were
 * enqueued, the chunk has no event of its own: the copies have ended when the stream is idle. */
static CUresult slot_query(struct pcc_gpu *gpu, const struct pcc_gpu_slot *slot)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;

    return slot->error == 0 ? cuda->event_query(slot->event) : cuda->stream_query(gpu->stream);
}

/* False while the copies run. */
static bool slot_ended(struct pcc_gpu *gpu, struct pcc_gpu_slot *slot)
{
    if (pcc_gpu_is_lost(gpu)) {
        slot->error = -PCC_E_DEVICE_LOST;
        return true;
    }
    const CUresult result = slot_query(gpu, slot);
    if (result == CUDA_SUCCESS)
        return true;
    if (result == CUDA_ERROR_NOT_READY)
        return false;
    slot->error = pcc_cuda_code(result);
    /* Any other error may come from earlier work, and copies may still be under way. The stream is
     * asked again, and answers when it is idle. */
    if (slot->error != -PCC_E_DEVICE_LOST && ++slot->errors < QUERY_ERRORS_MAX) {
        slot->error = -PCC_E_DEVICE;
        return false;
    }
    slot->error = -PCC_E_DEVICE_LOST;
    pcc_gpu_lose(gpu);
    return true;
}

static bool reap(struct pcc_gpu *gpu)
{
    bool moved = false;

    while (gpu->head != gpu->tail) {
        struct pcc_gpu_slot *slot = &gpu->slots[gpu->head % PCC_GPU_CHUNKS];
        struct pcc_gpu_job *job = slot->job;
        if (!slot_ended(gpu, slot))
            break;
        gpu->head++;
        gpu->chunks--;
        gpu->bytes -= slot->bytes;
        if (slot->error == 0)
            count(&gpu->copied_bytes, slot->bytes);
        else
            count(&gpu->failures, 1);
        if (call_begin(gpu, job)) {
            job->calls->done(job, slot->token, slot->error);
            call_end(gpu);
        }
        job->under_way--;
        moved = true;
    }
    return moved;
}

/* -- enqueueing -- */

static bool has_room(const struct pcc_gpu *gpu)
{
    return gpu->chunks < PCC_GPU_CHUNKS_MIN ||
           (gpu->chunks < PCC_GPU_CHUNKS && gpu->bytes < PCC_CUDA_AHEAD_BYTES);
}

/* The chunk is under way, or what there is of it, when it could not be enqueued as a whole. */
static void slot_take(struct pcc_gpu *gpu, struct pcc_gpu_job *job, CUresult result)
{
    struct pcc_gpu_slot *slot = &gpu->slots[gpu->tail % PCC_GPU_CHUNKS];

    if (result == CUDA_SUCCESS)
        result = gpu->device.cuda->event_record(slot->event, gpu->stream);
    int error = pcc_cuda_code(result);
    if (error == -PCC_E_DEVICE_LOST)
        pcc_gpu_lose(gpu);
    else if (error != 0)
        error = -PCC_E_DEVICE;
    job->finished = error != 0;
    slot->job = job;
    slot->token = gpu->piece.token;
    slot->bytes = job->begun_bytes;
    slot->error = error;
    slot->errors = 0;
    gpu->tail++;
    job->begun_bytes = 0;
    job->under_way++;
}

static void enqueue(struct pcc_gpu *gpu, struct pcc_gpu_job *job)
{
    const struct pcc_gpu_piece *piece = &gpu->piece;
    CUresult result = CUDA_SUCCESS;

    if (job->begun_bytes == 0) {
        job->begun_bytes = piece->chunk_bytes;
        gpu->chunks++;
        gpu->bytes += piece->chunk_bytes;
    }
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < piece->count; i++)
        result = gpu->device.cuda->copy_to_host(piece->copies[i].to, piece->copies[i].from,
                                                piece->copies[i].length_bytes, gpu->stream);
    count(&gpu->copies, piece->count);
    if (piece->last || result != CUDA_SUCCESS)
        slot_take(gpu, job, result);
}

/* The GPU is lost. */
static void job_lose(struct pcc_gpu *gpu, struct pcc_gpu_job *job)
{
    job->finished = true;
    if (job->begun_bytes > 0)
        gpu->chunks--;
    gpu->bytes -= job->begun_bytes;
    job->begun_bytes = 0;
    if (call_begin(gpu, job)) {
        job->calls->lost(job);
        call_end(gpu);
    }
}

/* One job's turn. True when something has come of it. */
static bool serve(struct pcc_gpu *gpu, struct pcc_gpu_job *job)
{
    if (job->finished)
        return false;
    if (pcc_gpu_is_lost(gpu)) {
        job_lose(gpu, job);
        return true;
    }
    if (!call_begin(gpu, job))
        return false;
    const enum pcc_gpu_verdict verdict = job->calls->next(job, &gpu->piece);
    call_end(gpu);
    if (verdict == PCC_GPU_PIECE)
        enqueue(gpu, job);
    else if (verdict == PCC_GPU_NO_MORE)
        job->finished = true;
    return verdict != PCC_GPU_NOTHING_NOW;
}

static bool is_starved(const struct pcc_gpu *gpu, const struct pcc_gpu_job *job)
{
    return !job->finished && job->begun_bytes == 0 && !has_room(gpu) && !pcc_gpu_is_lost(gpu);
}

static void job_end(struct pcc_gpu *gpu, struct pcc_gpu_job *job)
{
    if (call_begin(gpu, job)) {
        job->calls->ended(job);
        call_end(gpu);
    } else {
        free(job);
    }
}

/* Each job has one turn; those that the engine had no room for are the first in the next round. */
static bool feed(struct pcc_gpu *gpu)
{
    struct pcc_gpu_jobs now, starved = {0}, served = {0};
    struct pcc_gpu_job *job;
    bool moved = false;

    (void)pthread_mutex_lock(&gpu->lock);
    now = gpu->jobs;
    gpu->jobs = (struct pcc_gpu_jobs){0};
    (void)pthread_mutex_unlock(&gpu->lock);
    while ((job = job_take(&now)) != NULL) {
        if (is_starved(gpu, job)) {
            job_append(&starved, job);
            continue;
        }
        moved = serve(gpu, job) || moved;
        if (job->finished && job->under_way == 0)
            job_end(gpu, job);
        else
            job_append(&served, job);
    }
    PCC_LOCKED(&gpu->lock);
    jobs_append(&starved, &served);
    jobs_append(&starved, &gpu->jobs); /* came meanwhile */
    gpu->jobs = starved;
    return moved;
}

/* False when it is to end. */
static bool sleep_until_work(struct pcc_gpu *gpu, uint64_t *nap_ns, bool moved)
{
    PCC_LOCKED(&gpu->lock);
    const bool idle = gpu->jobs.first == NULL && gpu->head == gpu->tail;
    const bool go_on = !(idle && gpu->stopping);
    if (moved) {
        *nap_ns = NAP_MIN_NS;
    } else if (go_on && idle) {
        (void)pthread_cond_wait(&gpu->wake, &gpu->lock);
        *nap_ns = NAP_MIN_NS;
    } else if (go_on) {
        (void)pcc_condition_wait(&gpu->wake, &gpu->lock, pcc_now_ns() + *nap_ns);
        *nap_ns = *nap_ns < NAP_MAX_NS / 2 ? *nap_ns * 2 : NAP_MAX_NS;
    }
    return go_on;
}

void *pcc_gpu_copier_run(void *argument)
{
    struct pcc_gpu *gpu = argument;
    uint64_t nap_ns = NAP_MIN_NS;
    bool moved = true;

    const bool entered = pcc_gpu_enter(&gpu->device) == 0;
    if (!entered)
        pcc_gpu_lose(gpu);
    while (sleep_until_work(gpu, &nap_ns, moved)) {
        moved = reap(gpu);
        moved = feed(gpu) || moved;
    }
    if (entered)
        pcc_gpu_leave(&gpu->device);
    return NULL;
}
