/* Submitting: the ranges, the inline bytes and the tail of a snapshot become one ascending list of
 * sources in memory of our own. */
#include <stdlib.h>
#include <string.h>

#include "base/pcc_guard.h"
#include "client/pcc_client_private.h"

struct plan {
    struct pcc_client *client;
    uint64_t chunk_bytes;
    struct pcc_allocation allocation; /* that the last device source lies in */
    struct pcc_source *sources;
    uint64_t count;
    uint8_t *room;      /* where the next copied bytes go */
    uint64_t end_bytes; /* of the payload so far */
    uint64_t trainer_bytes;
    uint64_t host_bytes;
    uint32_t devices; /* bits */
    uint64_t device_end_bytes[PCC_DEVICES];
    bool guarded;
    int error;      /* why plan_merge fails */
    uint64_t fault; /* the address of memory to copy that was not there */
};

/* Asks the driver when it is another allocation than last time. */
static bool same_allocation(struct plan *plan, const struct pcc_source *last,
                            const struct pcc_source *source)
{
    struct pcc_client_device *device = pcc_client_device(plan->client, source->device);

    if (!pcc_allocation_has(&plan->allocation, last->range.address)) {
        if (device == NULL)
            return false;
        PCC_CLIENT_GPU(gpu, device);
        if (gpu.error != 0)
            return false;
        plan->allocation = pcc_client_allocation(device, last->range.address);
    }
    return pcc_allocation_has(&plan->allocation, source->range.address);
}

/* A GPU's copy engine gets pieces as large as possible. But no copy may run across two allocations,
 * even if they are neighbours. */
static bool plan_extend(struct plan *plan, const struct pcc_source *source)
{
    struct pcc_source *last = plan->count > 0 ? &plan->sources[plan->count - 1] : NULL;

    if (last == NULL || source->device == PCC_HOST || last->device != source->device ||
        last->range.offset_bytes + last->range.length_bytes != source->range.offset_bytes ||
        last->range.address + last->range.length_bytes != source->range.address ||
        !same_allocation(plan, last, source))
        return false;
    last->range.length_bytes += source->range.length_bytes;
    return true;
}

/* A chunk has one event, so one GPU fills it. */
static bool shares_chunk(const struct plan *plan, const struct pcc_source *source)
{
    if (source->device == PCC_HOST)
        return false;
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        if ((plan->devices >> i & 1) != 0 && i != source->device &&
            (plan->device_end_bytes[i] - 1) / plan->chunk_bytes ==
                source->range.offset_bytes / plan->chunk_bytes)
            return true;
    }
    return false;
}

static void copy_plainly(void *context, void *to, const void *from, uint64_t length_bytes)
{
    (void)context;
    memcpy(to, from, length_bytes);
}

/* The trainer may have freed its memory, in another thread or by cutting a file that it maps. */
static bool plan_copy(struct plan *plan, const struct pcc_range *range)
{
    const struct pcc_guarded bytes = {.copy = copy_plainly,
                                      .to = plan->room,
                                      .from = (const void *)(uintptr_t)range->address,
                                      .length = range->length_bytes};

    const int error = plan->guarded ? pcc_guard_copy(&bytes, &plan->fault)
                                    : pcc_guard_copy_slowly(&bytes, &plan->fault);
    if (error != 0)
        plan->error = error;
    return error == 0;
}

/* With `copied` the bytes are copied into the client's memory now; else they are read later, where
 * they are. */
static bool plan_add(struct plan *plan, struct pcc_source source, bool copied)
{
    uint64_t end;

    if (source.range.offset_bytes < plan->end_bytes ||
        __builtin_add_overflow(source.range.offset_bytes, source.range.length_bytes, &end))
        return false;
    if (source.range.length_bytes == 0)
        return true;
    if (copied) {
        if (!plan_copy(plan, &source.range))
            return false;
        source.range.address = (uintptr_t)plan->room;
        plan->room += source.range.length_bytes;
    } else if (source.device == PCC_HOST) {
        plan->trainer_bytes = plan->host_bytes = end;
    } else {
        if (shares_chunk(plan, &source))
            return false;
        plan->trainer_bytes = plan->device_end_bytes[source.device] = end;
        plan->devices |= 1u << source.device;
    }
    if (copied || !plan_extend(plan, &source))
        plan->sources[plan->count++] = source;
    plan->end_bytes = end;
    return true;
}

/* Takes the ranges of the three lists in the order of the payload. */
static bool plan_merge(struct plan *plan, const struct pcc_submission *from)
{
    uint64_t i = 0, k = 0, d = 0;

    while (i < from->range_count || k < from->inline_count || d < from->device_range_count) {
        const struct pcc_range *host = i < from->range_count ? &from->ranges[i] : NULL;
        const struct pcc_range *copied = k < from->inline_count ? &from->inline_ranges[k] : NULL;
        const struct pcc_device_range *device =
            d < from->device_range_count ? &from->device_ranges[d] : NULL;
        const bool is_copied =
            copied != NULL && (host == NULL || copied->offset_bytes < host->offset_bytes);
        const struct pcc_range *next = is_copied ? copied : host;
        if (device != NULL && (next == NULL || device->offset_bytes <= next->offset_bytes)) {
            if (device->device >= PCC_DEVICES || device->reserved != 0 ||
                !plan_add(plan, pcc_source_on_device(device), false))
                return false;
            d++;
        } else if (plan_add(plan, (struct pcc_source){*next, PCC_HOST}, is_copied)) {
            *(is_copied ? &k : &i) += 1;
        } else {
            return false;
        }
    }
    const struct pcc_source tail = {
        {(uintptr_t)from->tail, from->tail_offset_bytes, from->tail_bytes}, PCC_HOST};
    return plan_add(plan, tail, true) && plan->end_bytes > 0;
}

/* One allocation for everything that the job owns; NULL when it would not fit into memory. */
static void *memory_make(const struct pcc_submission *from, struct plan *plan)
{
    uint64_t bytes;

    if (__builtin_add_overflow(from->range_count, from->inline_count, &bytes) ||
        __builtin_add_overflow(bytes, from->device_range_count, &bytes) ||
        __builtin_add_overflow(bytes, 1, &bytes) ||
        __builtin_mul_overflow(bytes, sizeof(struct pcc_source), &bytes))
        return NULL;
    const uint64_t copied_at = bytes;
    for (uint64_t i = 0; i < from->inline_count; i++) {
        if (__builtin_add_overflow(bytes, from->inline_ranges[i].length_bytes, &bytes))
            return NULL;
    }
    if (__builtin_add_overflow(bytes, from->tail_bytes, &bytes) || bytes > SIZE_MAX / 2)
        return NULL;
    void *memory = malloc(bytes);
    if (memory != NULL) {
        plan->sources = memory;
        plan->room = (uint8_t *)memory + copied_at;
    }
    return memory;
}

/* With the lock held: what the job reads of GPUs was marked for us, or for the daemon. */
static int devices_check(struct pcc_client *client, const struct pcc_job *job, uint32_t pushed,
                         uint32_t pulled)
{
    const uint32_t read = pushed | pulled;

    if ((job->pushed & read) != pushed || (job->pulled & read) != pulled)
        return -EINVAL;
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        if ((read >> i & 1) != 0 && PCC_READ(&client->devices[i].broken))
            return -PCC_E_DEVICE;
    }
    return 0;
}

void pcc_client_job_ask(struct pcc_client *client, struct pcc_job *job,
                        const struct pcc_request *request)
{
    struct pcc_request *block = pcc_page_request(&client->view, job->snapshot);

    *block = *request;
    block->snapshot = job->snapshot;
    job->asking = true;
    client->asking++;
}

static void request_write(struct pcc_client *client, struct pcc_job *job,
                          const struct pcc_submission *from)
{
    struct pcc_request request = from->request;

    request.payload_bytes = job->payload_bytes;
    request.tree_offset_bytes = from->tail_offset_bytes;
    request.tree_bytes = from->tail_bytes;
    request.offered_bytes = from->offered_bytes;
    pcc_client_job_ask(client, job, &request);
}

/* With the lock held: 0 = the thread has it; 1 = it is over already, nothing will be read. */
static int job_start(struct pcc_client *client, uint64_t snapshot, void *memory,
                     const struct plan *plan, const struct pcc_submission *from)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    if (PCC_READ(&client->dead))
        return -ECONNRESET;
    if (job->snapshot != snapshot)
        return -ENOENT;
    if (PCC_READ(&job->state) != PCC_JOB_REQUESTED || !pcc_client_open_word(client, snapshot))
        return 1;
    const int error = devices_check(client, job, plan->devices, from->pulled_devices);
    if (error != 0)
        return error;
    job->memory = memory;
    job->sources = plan->sources;
    job->source_count = plan->count;
    job->cursor = 0;
    job->payload_bytes = plan->end_bytes;
    job->filled_bytes = from->pulled_bytes;
    job->left_bytes = plan->end_bytes - from->pulled_bytes;
    job->trainer_bytes = plan->trainer_bytes;
    job->host_bytes = plan->host_bytes;
    job->offered_end =
        plan->devices == 0 && from->pulled_bytes == 0
            ? pcc_offered_end(from->offered_bytes, plan->end_bytes, plan->chunk_bytes)
            : 0;
    job->provisional = from->provisional;
    job->deferred = from->request.level == PCC_LEVEL_DEVICE;
    for (uint32_t i = 0; i < PCC_DEVICES; i++)
        job->devices[i].end_bytes = plan->device_end_bytes[i];
    request_write(client, job, from);
    PCC_WRITE(&job->state, PCC_JOB_SUBMITTED);
    pcc_client_job_note(client, job);
    return 0;
}

int pcc_client_submit(struct pcc_client *client, uint64_t snapshot,
                      const struct pcc_submission *submission)
{
    struct plan plan = {.client = client,
                        .chunk_bytes = client->view.geometry.chunk_bytes,
                        .end_bytes = submission->pulled_bytes,
                        .guarded = pcc_guard_ready(),
                        .error = -EINVAL};

    if (submission->pulled_bytes % plan.chunk_bytes != 0 ||
        (submission->pulled_bytes > 0) != (submission->pulled_devices > 0) ||
        submission->pulled_devices >> PCC_DEVICES != 0)
        return -EINVAL;
    void *memory = memory_make(submission, &plan);
    if (memory == NULL)
        return -ENOMEM;
    const bool merged = plan_merge(&plan, submission);
    (void)pthread_mutex_lock(&client->lock);
    if (client->jobs[snapshot % PCC_SNAPSHOTS].snapshot == snapshot)
        client->jobs[snapshot % PCC_SNAPSHOTS].fault = plan.fault;
    const int error = merged ? job_start(client, snapshot, memory, &plan, submission) : plan.error;
    (void)pthread_mutex_unlock(&client->lock);
    if (error != 0) {
        free(memory);
        return error > 0 ? 0 : error;
    }
    pcc_bell_ring(&client->view.page->client_bell);
    return 0;
}

/* Tells the daemon that the snapshot's GPUs may hold anything. False when no other rank can have
 * the snapshot on its GPUs, or when a stream withdraws it. */
static bool report_broken(struct pcc_client *client, uint64_t snapshot)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    PCC_LOCKED(&client->lock);
    if (!PCC_READ(&client->has_shares) || job->snapshot != snapshot || !job->deferred ||
        job->withdrawn)
        return false;
    job->broken = true;
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        if ((job->pulled >> device & 1u) != 0)
            PCC_WRITE(&pcc_page_words(&client->view, snapshot, device)->broken, snapshot);
    return true;
}

bool pcc_client_write(struct pcc_client *client, uint64_t snapshot)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    if (!pcc_client_sound(client, snapshot)) {
        if (report_broken(client, snapshot))
            return false;
        (void)pcc_client_abandon_for(client, snapshot, -PCC_E_DEVICE_LOST);
        return true;
    }
    PCC_LOCKED(&client->lock);
    if (job->snapshot == snapshot && !job->withdrawn)
        job->deferred = false; /* from now on streams wait for it */
    if (job->snapshot == snapshot && snapshot != 0 && !job->wanted && !job->withdrawn) {
        job->wanted = job->wanting = true;
        client->wanting++;
    }
    pcc_bell_ring(&client->view.page->client_bell);
    return true;
}

void pcc_client_confirm(struct pcc_client *client, uint64_t snapshot)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    (void)pthread_mutex_lock(&client->lock);
    if (job->snapshot == snapshot)
        job->provisional = false;
    (void)pthread_mutex_unlock(&client->lock);
    pcc_bell_ring(&client->view.page->client_bell); /* the rings are the thread's */
}
