/* Submitting: the ranges, the inline bytes and the tail of a snapshot become one ascending list of
 * sources in memory of our own. */
#include <stdlib.h>
#include <string.h>

#include "pcc_futex.h"
#include "pcc_link_private.h"

struct plan {
    struct pcc_source *sources;
    uint64_t count;
    uint8_t *room;      /* where the next copied bytes go */
    uint64_t end_bytes; /* of the payload so far */
    uint64_t trainer_bytes;
};

/* `copied` bytes move into our memory now; the others stay the trainer's and are read later. */
static bool plan_add(struct plan *plan, const struct pcc_range *range, bool copied)
{
    uint64_t end;
    const uint8_t *bytes = (const uint8_t *)(uintptr_t)range->address;

    if (range->offset_bytes < plan->end_bytes ||
        __builtin_add_overflow(range->offset_bytes, range->length_bytes, &end))
        return false;
    if (range->length_bytes == 0)
        return true;
    if (copied) {
        memcpy(plan->room, bytes, range->length_bytes);
        bytes = plan->room;
        plan->room += range->length_bytes;
    } else {
        plan->trainer_bytes = end;
    }
    plan->sources[plan->count++] = (struct pcc_source){
        .bytes = bytes, .offset_bytes = range->offset_bytes, .length_bytes = range->length_bytes};
    plan->end_bytes = end;
    return true;
}

static bool plan_merge(struct plan *plan, const struct pcc_range *ranges, uint64_t range_count,
                       const struct pcc_range *inline_ranges, uint64_t inline_count,
                       const struct pcc_range *tail)
{
    uint64_t i = 0, k = 0;

    while (i < range_count || k < inline_count) {
        const bool copied = i == range_count || (k < inline_count && inline_ranges[k].offset_bytes <
                                                                         ranges[i].offset_bytes);
        if (!plan_add(plan, copied ? &inline_ranges[k++] : &ranges[i++], copied))
            return false;
    }
    return plan_add(plan, tail, true) && plan->end_bytes > 0;
}

/* One allocation for everything that the job owns; NULL when it would not fit into memory. */
static void *memory_make(uint64_t source_count, const struct pcc_range *inline_ranges,
                         uint64_t inline_count, uint64_t tail_bytes, struct plan *plan)
{
    uint64_t bytes;

    if (__builtin_mul_overflow(source_count, sizeof(struct pcc_source), &bytes))
        return NULL;
    const uint64_t copied_at = bytes;
    for (uint64_t i = 0; i < inline_count; i++) {
        if (__builtin_add_overflow(bytes, inline_ranges[i].length_bytes, &bytes))
            return NULL;
    }
    if (__builtin_add_overflow(bytes, tail_bytes, &bytes) || bytes > SIZE_MAX / 2)
        return NULL;
    void *memory = malloc(bytes);
    if (memory != NULL)
        *plan = (struct plan){.sources = memory, .room = (uint8_t *)memory + copied_at};
    return memory;
}

/* With the lock held: 0 = the thread has it; 1 = it is over already, nothing will be read. */
static int job_start(struct pcc_link *link, uint64_t snapshot, void *memory,
                     const struct plan *plan)
{
    struct pcc_job *job = &link->jobs[snapshot % PCC_SNAPSHOTS];

    if (atomic_load_explicit(&link->dead, memory_order_relaxed))
        return -ECONNRESET;
    if (job->snapshot != snapshot)
        return -ENOENT;
    if (atomic_load_explicit(&job->state, memory_order_relaxed) != PCC_JOB_REQUESTED ||
        !pcc_link_open_word(link, snapshot))
        return 1;
    job->memory = memory;
    job->sources = plan->sources;
    job->source_count = plan->count;
    job->cursor = 0;
    job->payload_bytes = plan->end_bytes;
    job->next_bytes = 0;
    job->trainer_bytes = plan->trainer_bytes;
    atomic_store_explicit(&job->state, plan->trainer_bytes > 0 ? PCC_JOB_SUBMITTED : PCC_JOB_READ,
                          memory_order_relaxed);
    return 0;
}

int pcc_link_submit(struct pcc_link *link, uint64_t snapshot, const struct pcc_range *ranges,
                    uint64_t range_count, const struct pcc_range *inline_ranges,
                    uint64_t inline_count, const void *tail, uint64_t tail_bytes,
                    uint64_t tail_offset_bytes)
{
    struct plan plan;
    uint64_t source_count;
    const struct pcc_range tail_range = {
        .address = (uintptr_t)tail, .offset_bytes = tail_offset_bytes, .length_bytes = tail_bytes};

    if (__builtin_add_overflow(range_count, inline_count, &source_count) ||
        __builtin_add_overflow(source_count, 1, &source_count))
        return -EINVAL;
    void *memory = memory_make(source_count, inline_ranges, inline_count, tail_bytes, &plan);
    if (memory == NULL)
        return -ENOMEM;
    if (!plan_merge(&plan, ranges, range_count, inline_ranges, inline_count, &tail_range)) {
        free(memory);
        return -EINVAL;
    }
    (void)pthread_mutex_lock(&link->lock);
    const int error = job_start(link, snapshot, memory, &plan);
    (void)pthread_mutex_unlock(&link->lock);
    if (error != 0) {
        free(memory);
        return error > 0 ? 0 : error;
    }
    atomic_store_explicit(&link->view.page->ready, snapshot, memory_order_release);
    pcc_bell_ring(&link->view.page->client_bell);
    return 0;
}
