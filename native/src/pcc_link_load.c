/* Loads on the client's side: DATA chunks are scattered into the ranges as they come. */
#include <stdlib.h>
#include <string.h>

#include "pcc_futex.h"
#include "pcc_link_private.h"

#define SLICE_NS 100000000u

static bool ascending(const struct pcc_range *ranges, uint64_t range_count)
{
    uint64_t end = 0;

    for (uint64_t i = 0; i < range_count; i++) {
        if (ranges[i].offset_bytes < end ||
            __builtin_add_overflow(ranges[i].offset_bytes, ranges[i].length_bytes, &end))
            return false;
    }
    return true;
}

int pcc_link_load_start(struct pcc_link *link, uint64_t load_id, const struct pcc_range *ranges,
                        uint64_t range_count)
{
    int error = 0;

    if (range_count > SIZE_MAX / sizeof(*ranges) || !ascending(ranges, range_count))
        return -EINVAL;
    struct pcc_range *copy = calloc(range_count + 1, sizeof(*copy));
    if (copy == NULL)
        return -ENOMEM;
    if (range_count > 0)
        memcpy(copy, ranges, range_count * sizeof(*copy));
    (void)pthread_mutex_lock(&link->lock);
    if (atomic_load_explicit(&link->dead, memory_order_relaxed))
        error = -ECONNRESET;
    else if (link->load.active)
        error = -EBUSY;
    else
        link->load = (struct pcc_link_load){
            .active = true, .id = load_id, .ranges = copy, .range_count = range_count};
    (void)pthread_mutex_unlock(&link->lock);
    if (error != 0)
        free(copy);
    else
        pcc_bell_ring(&link->view.page->client_bell); /* chunks that lie idle here go back */
    return error;
}

/* The first range that ends behind offset. */
static uint64_t range_from(const struct pcc_link_load *load, uint64_t offset_bytes)
{
    uint64_t low = 0, high = load->range_count;

    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (load->ranges[middle].offset_bytes + load->ranges[middle].length_bytes <= offset_bytes)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void scatter(const struct pcc_link_load *load, const uint8_t *bytes, uint64_t offset_bytes,
                    uint64_t length_bytes)
{
    const uint64_t end = offset_bytes + length_bytes;

    for (uint64_t i = range_from(load, offset_bytes);
         i < load->range_count && load->ranges[i].offset_bytes < end; i++) {
        const struct pcc_range *range = &load->ranges[i];
        const uint64_t from =
            range->offset_bytes > offset_bytes ? range->offset_bytes : offset_bytes;
        const uint64_t range_end = range->offset_bytes + range->length_bytes;
        const uint64_t to = range_end < end ? range_end : end;
        memcpy((uint8_t *)(uintptr_t)range->address + (from - range->offset_bytes),
               bytes + (from - offset_bytes), to - from);
    }
}

void pcc_link_take_data(struct pcc_link *link, const struct pcc_message *message)
{
    uint64_t end;

    (void)pthread_mutex_lock(&link->lock);
    struct pcc_link_load *load = &link->load;
    const bool wanted = load->active && !load->ended && load->id == message->id &&
                        !__builtin_add_overflow(message->offset_bytes, message->length_bytes, &end);
    load->busy = wanted;
    (void)pthread_mutex_unlock(&link->lock);
    if (!wanted)
        return; /* of a load that timed out */
    scatter(load, link->chunk_at[message->chunk], message->offset_bytes, message->length_bytes);
    (void)pthread_mutex_lock(&link->lock);
    load->busy = false;
    (void)pthread_cond_broadcast(&link->idle);
    (void)pthread_mutex_unlock(&link->lock);
}

void pcc_link_take_end(struct pcc_link *link, const struct pcc_message *message)
{
    (void)pthread_mutex_lock(&link->lock);
    if (link->load.active && link->load.id == message->id) {
        link->load.ended = true;
        link->load.result = message->result;
    }
    (void)pthread_mutex_unlock(&link->lock);
    pcc_bell_ring(&link->view.page->client_bell);
}

/* True when the wait is over; the load is closed then and nothing writes to the ranges any more. */
static bool load_over(struct pcc_link *link, uint64_t load_id, uint64_t deadline_ns, int *result)
{
    bool is_over = true;
    const bool late = pcc_now_ns() >= deadline_ns;

    (void)pthread_mutex_lock(&link->lock);
    struct pcc_link_load *load = &link->load;
    if (!load->active || load->id != load_id)
        *result = -ENOENT;
    else if (load->ended)
        *result = load->result;
    else if (atomic_load_explicit(&link->dead, memory_order_relaxed))
        *result = -ECONNRESET;
    else if (late)
        *result = -ETIMEDOUT;
    else
        is_over = false;
    if (is_over && *result != -ENOENT) {
        load->ended = true;
        while (load->busy)
            (void)pthread_cond_wait(&link->idle, &link->lock);
        free(load->ranges);
        load->ranges = NULL;
        load->active = false;
    }
    (void)pthread_mutex_unlock(&link->lock);
    return is_over;
}

int pcc_link_load_wait(struct pcc_link *link, uint64_t load_id, uint64_t deadline_ns)
{
    int result = 0;

    pcc_link_enter(link);
    for (;;) {
        const uint32_t rung = pcc_bell_read(&link->view.page->client_bell);
        if (load_over(link, load_id, deadline_ns, &result))
            break;
        const uint64_t now = pcc_now_ns();
        const uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
        pcc_futex_wait(&link->view.page->client_bell, rung, left < SLICE_NS ? left : SLICE_NS);
    }
    pcc_link_leave(link);
    return result;
}

bool pcc_link_load_ended(struct pcc_link *link, uint64_t load_id, uint64_t until_ns)
{
    for (;;) {
        const uint32_t rung = pcc_bell_read(&link->view.page->client_bell);
        (void)pthread_mutex_lock(&link->lock);
        const struct pcc_link_load *load = &link->load;
        const bool ended = !load->active || load->id != load_id || load->ended ||
                           atomic_load_explicit(&link->dead, memory_order_relaxed);
        (void)pthread_mutex_unlock(&link->lock);
        const uint64_t now = pcc_now_ns();
        if (ended || now >= until_ns)
            return ended;
        const uint64_t left = until_ns - now;
        pcc_futex_wait(&link->view.page->client_bell, rung, left < SLICE_NS ? left : SLICE_NS);
    }
}
