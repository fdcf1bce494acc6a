#include "shared/pcc_exposure.h"

#include <stdlib.h>
#include <string.h>

/* -- checking -- */

/* A range of `length` at `offset` within something of `limit` bytes; never empty. */
static bool lies_within(uint64_t offset, uint64_t length, uint64_t limit)
{
    return length > 0 && pcc_is_within(offset, length, limit);
}

static const char *check_head(const struct pcc_exposure *head, uint64_t length_bytes,
                              uint32_t chunk_bytes)
{
    if (head->magic != PCC_EXPOSURE_MAGIC)
        return "not an exposure";
    if (head->allocation_count == 0 || head->allocation_count > PCC_EXPOSED_ALLOCATIONS_MAX ||
        head->range_count == 0 || head->range_count > PCC_EXPOSED_RANGES_MAX ||
        head->replica_count > PCC_EXPOSED_RANGES_MAX || head->share_count > PCC_EXPOSED_RANGES_MAX)
        return "too many or no allocations or ranges";
    const uint64_t range_count = (uint64_t)head->range_count + head->replica_count;
    const uint64_t expected =
        sizeof(*head) + (uint64_t)head->allocation_count * sizeof(struct pcc_exposed_allocation) +
        range_count * sizeof(struct pcc_exposed_range) +
        (uint64_t)head->share_count * sizeof(struct pcc_exposed_share);
    if (length_bytes != expected)
        return "its length does not fit its counts";
    if (head->device_bytes == 0 || head->device_bytes % chunk_bytes != 0 ||
        head->device_bytes / chunk_bytes > UINT32_MAX)
        return "the device part is not a number of chunks";
    return NULL;
}

/* Each device has one GPU, and no GPU is two devices. */
static const char *check_device(const struct pcc_exposed_allocation *allocation,
                                const uint8_t *uuids[PCC_DEVICES])
{
    const uint32_t device = allocation->device;

    if (device >= PCC_DEVICES)
        return "a device number is too large";
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        const bool same =
            uuids[i] != NULL && memcmp(uuids[i], allocation->uuid, sizeof(allocation->uuid)) == 0;
        if (uuids[i] != NULL && same != (i == device))
            return "devices and GPUs do not match";
    }
    uuids[device] = allocation->uuid;
    return NULL;
}

/* Counts pieces and bytes of all runs up to this one. */
static const char *check_pieces(struct pcc_exposure_view *view,
                                const struct pcc_exposed_allocation *allocation)
{
    if (allocation->length_bytes == 0)
        return "an allocation is empty";
    if (allocation->pieces == 0)
        return NULL;
    if (allocation->length_bytes % allocation->pieces != 0)
        return "the pieces of an allocation differ in length";
    view->pieces += allocation->pieces;
    if (view->pieces > PCC_EXPOSED_PIECES_MAX ||
        allocation->length_bytes > PCC_EXPOSED_RUNS_BYTES_MAX - view->run_bytes)
        return "too many pieces of memory, or too large ones";
    view->run_bytes += allocation->length_bytes;
    return NULL;
}

static const char *check_allocations(struct pcc_exposure_view *view)
{
    const uint8_t *uuids[PCC_DEVICES] = {NULL};
    const struct pcc_exposure *head = &view->head;

    for (uint32_t i = 0; i < head->allocation_count; i++) {
        const char *why = check_pieces(view, &view->allocations[i]);
        if (why == NULL)
            why = check_device(&view->allocations[i], uuids);
        if (why != NULL)
            return why;
    }
    if (head->probe_allocation >= head->allocation_count ||
        !lies_within(head->probe_offset_bytes, sizeof(head->probe),
                     view->allocations[head->probe_allocation].length_bytes))
        return "the probe lies outside of its allocation";
    return NULL;
}

static const char *check_range(const struct pcc_exposure_view *view,
                               const struct pcc_exposed_range *range)
{
    if (range->allocation >= view->head.allocation_count)
        return "a range names no allocation";
    if (!lies_within(range->allocation_offset_bytes, range->length_bytes,
                     view->allocations[range->allocation].length_bytes))
        return "a range leaves its allocation";
    if (!lies_within(range->offset_bytes, range->length_bytes, view->head.device_bytes))
        return "a range leaves the device part";
    return NULL;
}

/* Also counts every device's chunks: each chunk holds something, of one device only. */
static const char *check_ranges(struct pcc_exposure_view *view)
{
    uint64_t end = 0, chunks = 0; /* of what was checked so far */
    uint32_t device = PCC_DEVICES;

    for (uint32_t i = 0; i < view->head.range_count; i++) {
        const struct pcc_exposed_range *range = &view->ranges[i];
        const char *why = check_range(view, range);
        if (why != NULL)
            return why;
        if (range->offset_bytes < end)
            return "ranges overlap or do not ascend";
        const uint64_t first = range->offset_bytes / view->chunk_bytes;
        const bool shared = first < chunks; /* its first chunk is the last one's before */
        if (shared && view->allocations[range->allocation].device != device)
            return "a chunk holds ranges of two devices";
        if (first > chunks)
            return "a chunk is empty";
        end = range->offset_bytes + range->length_bytes;
        const uint64_t after = pcc_ceil_div(end, view->chunk_bytes);
        device = view->allocations[range->allocation].device;
        view->devices |= 1u << device;
        view->chunks[device] += (uint32_t)(after - chunks);
        chunks = after;
    }
    return chunks == view->head.device_bytes / view->chunk_bytes ? NULL : "a chunk is empty";
}

/* A replica lies on GPUs that have a part of the payload: only they have words of a snapshot. */
static const char *check_replica(const struct pcc_exposure_view *view)
{
    uint64_t end = 0;

    for (uint32_t i = 0; i < view->head.replica_count; i++) {
        const struct pcc_exposed_range *range = &view->replica[i];
        if (range->allocation >= view->head.allocation_count ||
            !lies_within(range->allocation_offset_bytes, range->length_bytes,
                         view->allocations[range->allocation].length_bytes))
            return "a range of the replica leaves its allocation";
        if ((view->devices >> view->allocations[range->allocation].device & 1u) == 0)
            return "the replica lies on a GPU without a part";
        if (range->offset_bytes < end ||
            __builtin_add_overflow(range->offset_bytes, range->length_bytes, &end))
            return "ranges of the replica overlap or do not ascend";
    }
    return NULL;
}

static const char *check_shares(const struct pcc_exposure_view *view)
{
    uint64_t end = 0;

    for (uint32_t i = 0; i < view->head.share_count; i++) {
        const struct pcc_exposed_share *share = &view->shares[i];
        if (share->offset_bytes < end ||
            !lies_within(share->offset_bytes, share->length_bytes, view->head.device_bytes) ||
            share->length_bytes > UINT64_MAX - share->replica_offset_bytes)
            return "shares overlap, do not ascend or leave the device part";
        end = share->offset_bytes + share->length_bytes;
    }
    return NULL;
}

static int compare_handles(const void *left, const void *right, void *allocations)
{
    const struct pcc_exposed_allocation *all = allocations;

    return memcmp(all[*(const uint32_t *)left].handle, all[*(const uint32_t *)right].handle,
                  sizeof(all->handle));
}

static const char *check_handles(struct pcc_exposure_view *view)
{
    const uint32_t count = view->head.allocation_count;

    for (uint32_t i = 0; i < count; i++)
        view->by_handle[i] = i;
    qsort_r(view->by_handle, count, sizeof(*view->by_handle), compare_handles, view->allocations);
    for (uint32_t i = 1; i < count; i++)
        if (compare_handles(&view->by_handle[i - 1], &view->by_handle[i], view->allocations) == 0)
            return "two allocations have one handle";
    return NULL;
}

/* A copy of the table at *at, which moves behind the table. NULL: there is no memory. */
static void *table_take(const uint8_t **at, size_t count, size_t item_bytes)
{
    void *table = calloc(count > 0 ? count : 1, item_bytes);

    if (table != NULL)
        memcpy(table, *at, count * item_bytes);
    *at += count * item_bytes;
    return table;
}

static int view_take(struct pcc_exposure_view *view, const uint8_t *bytes)
{
    const struct pcc_exposure *head = &view->head;
    const uint8_t *at = bytes + sizeof(*head);

    view->allocations = table_take(&at, head->allocation_count, sizeof(*view->allocations));
    view->ranges = table_take(&at, head->range_count, sizeof(*view->ranges));
    view->replica = table_take(&at, head->replica_count, sizeof(*view->replica));
    view->shares = table_take(&at, head->share_count, sizeof(*view->shares));
    view->by_handle = calloc(head->allocation_count, sizeof(*view->by_handle));
    return view->allocations == NULL || view->ranges == NULL || view->replica == NULL ||
                   view->shares == NULL || view->by_handle == NULL
               ? -ENOMEM
               : 0;
}

int pcc_exposure_parse(const void *bytes, uint64_t length_bytes, uint32_t chunk_bytes,
                       struct pcc_exposure_view *out, const char **why_out)
{
    struct pcc_exposure_view view = {.chunk_bytes = chunk_bytes};
    const char *why = "not an exposure";
    int error = 0;

    if (length_bytes >= sizeof(view.head) && length_bytes <= PCC_EXPOSURE_BYTES_MAX) {
        memcpy(&view.head, bytes, sizeof(view.head));
        why = check_head(&view.head, length_bytes, chunk_bytes);
    }
    if (why == NULL)
        error = view_take(&view, bytes);
    if (why == NULL && error == 0)
        why = check_allocations(&view);
    if (why == NULL && error == 0)
        why = check_ranges(&view);
    if (why == NULL && error == 0)
        why = check_replica(&view);
    if (why == NULL && error == 0)
        why = check_shares(&view);
    if (why == NULL && error == 0)
        why = check_handles(&view);
    if (why != NULL)
        error = -PCC_E_BAD_PEER;
    if (error != 0) {
        pcc_exposure_free(&view);
        *why_out = why != NULL ? why : "out of memory";
        return error;
    }
    *out = view;
    return 0;
}

void pcc_exposure_free(struct pcc_exposure_view *view)
{
    free(view->allocations);
    free(view->ranges);
    free(view->replica);
    free(view->shares);
    free(view->by_handle);
    *view = (struct pcc_exposure_view){0};
}

/* -- looking up -- */

static uint64_t range_end(const struct pcc_exposed_range *range)
{
    return range->offset_bytes + range->length_bytes;
}

/* The range that has the byte, or NULL. */
static const struct pcc_exposed_range *range_find(const struct pcc_exposed_range *ranges,
                                                  uint32_t count, uint64_t offset_bytes)
{
    uint32_t low = 0;

    while (count - low > 1) {
        const uint32_t middle = low + (count - low) / 2;
        if (ranges[middle].offset_bytes <= offset_bytes)
            low = middle;
        else
            count = middle;
    }
    return count > 0 && ranges[low].offset_bytes <= offset_bytes &&
                   offset_bytes < range_end(&ranges[low])
               ? &ranges[low]
               : NULL;
}

const struct pcc_exposed_range *pcc_exposure_at(const struct pcc_exposure_view *view,
                                                uint64_t offset_bytes)
{
    return range_find(view->ranges, view->head.range_count, offset_bytes);
}

/* Adds the ranges where another rank has the share. False when that rank has not all of it. */
static bool share_find(const struct pcc_exposed_share *share, const struct pcc_exposure_view *other,
                       struct pcc_exposure_view *out)
{
    for (uint64_t done = 0, length; done < share->length_bytes; done += length) {
        const uint64_t at = share->replica_offset_bytes + done;
        const struct pcc_exposed_range *range =
            range_find(other->replica, other->head.replica_count, at);
        if (range == NULL || out->head.range_count == PCC_EXPOSED_RANGES_MAX)
            return false;
        length = range_end(range) - at;
        if (length > share->length_bytes - done)
            length = share->length_bytes - done;
        out->ranges[out->head.range_count++] = (struct pcc_exposed_range){
            .allocation = range->allocation,
            .allocation_offset_bytes = range->allocation_offset_bytes + (at - range->offset_bytes),
            .offset_bytes = share->offset_bytes + done,
            .length_bytes = length};
    }
    return true;
}

int pcc_exposure_elsewhere(const struct pcc_exposure_view *mine,
                           const struct pcc_exposure_view *other, struct pcc_exposure_view *out)
{
    const size_t allocations_bytes = other->head.allocation_count * sizeof(*out->allocations);
    struct pcc_exposure_view view = {.head = {.allocation_count = other->head.allocation_count,
                                              .device_bytes = mine->head.device_bytes},
                                     .chunk_bytes = mine->chunk_bytes};
    bool found = mine->head.replica_id != 0 && mine->head.replica_id == other->head.replica_id &&
                 mine->head.share_count > 0;

    view.allocations = malloc(allocations_bytes);
    view.ranges = calloc(PCC_EXPOSED_RANGES_MAX, sizeof(*view.ranges));
    if (view.allocations == NULL || view.ranges == NULL) {
        pcc_exposure_free(&view);
        return -ENOMEM;
    }
    memcpy(view.allocations, other->allocations, allocations_bytes);
    for (uint32_t i = 0; found && i < mine->head.share_count; i++)
        found = share_find(&mine->shares[i], other, &view);
    if (!found || view.head.range_count == 0 || check_ranges(&view) != NULL) {
        pcc_exposure_free(&view);
        return -ENOENT;
    }
    *out = view;
    return 0;
}

/* -- walking -- */

bool pcc_exposure_next_chunk(const struct pcc_exposure_view *view, uint32_t device,
                             struct pcc_exposure_walk *walk)
{
    const uint64_t chunk_bytes = view->chunk_bytes;
    /* The chunk before has been filled: everything up to there is behind us. */
    const uint64_t from = walk->filled_bytes;

    while (walk->range < view->head.range_count &&
           (range_end(&view->ranges[walk->range]) <= from ||
            view->allocations[view->ranges[walk->range].allocation].device != device))
        walk->range++;
    if (walk->range == view->head.range_count)
        return false;
    const uint64_t start = view->ranges[walk->range].offset_bytes;
    walk->chunk_bytes = (start > from ? start : from) / chunk_bytes * chunk_bytes;
    walk->filled_bytes = walk->chunk_bytes;
    return true;
}

bool pcc_exposure_next_step(const struct pcc_exposure_view *view, struct pcc_exposure_walk *walk,
                            struct pcc_exposure_step *out)
{
    const uint64_t end = walk->chunk_bytes + view->chunk_bytes;
    const uint64_t at = walk->filled_bytes;

    if (at == end)
        return false;
    while (walk->range < view->head.range_count && range_end(&view->ranges[walk->range]) <= at)
        walk->range++;
    struct pcc_exposure_step step = {.offset_bytes = at, .allocation = PCC_EXPOSURE_ZEROS};
    uint64_t to = end;
    if (walk->range < view->head.range_count) {
        const struct pcc_exposed_range *range = &view->ranges[walk->range];
        if (range->offset_bytes > at) { /* a gap, up to it or up to the chunk's end */
            to = range->offset_bytes < end ? range->offset_bytes : end;
        } else {
            to = range_end(range) < end ? range_end(range) : end;
            step.allocation = range->allocation;
            step.allocation_offset_bytes =
                range->allocation_offset_bytes + (at - range->offset_bytes);
        }
    }
    if (step.allocation == PCC_EXPOSURE_ZEROS && to - at > PCC_EXPOSURE_ZEROS_BYTES)
        to = at + PCC_EXPOSURE_ZEROS_BYTES;
    step.length_bytes = to - at;
    walk->filled_bytes = to;
    *out = step;
    return true;
}
