/* Loads on the client's side: their life. What comes is put in its place by pcc_link_scatter.c; the
 * daemon reads and checks the next chunks meanwhile. */
#include <stdlib.h>

#include "pcc_futex.h"
#include "pcc_link_private.h"

/* Host and device ranges as one ascending list of targets; NULL with *error_out. */
static struct pcc_source *targets_make(const struct pcc_range *ranges, uint64_t range_count,
                                       const struct pcc_device_range *device_ranges,
                                       uint64_t device_range_count, int *error_out)
{
    uint64_t total, end = 0, i = 0, d = 0;

    *error_out = -ENOMEM;
    if (__builtin_add_overflow(range_count, device_range_count, &total) ||
        total >= SIZE_MAX / sizeof(struct pcc_source))
        return NULL;
    struct pcc_source *targets = calloc(total + 1, sizeof(*targets));
    if (targets == NULL)
        return NULL;
    while (i + d < total) {
        struct pcc_source *target = &targets[i + d];
        if (d == device_range_count ||
            (i < range_count && ranges[i].offset_bytes <= device_ranges[d].offset_bytes)) {
            *target = (struct pcc_source){ranges[i++], PCC_HOST};
        } else {
            const struct pcc_device_range *range = &device_ranges[d++];
            *target = (struct pcc_source){
                {range->address, range->offset_bytes, range->length_bytes}, range->device};
        }
        if (target->range.offset_bytes < end ||
            __builtin_add_overflow(target->range.offset_bytes, target->range.length_bytes, &end)) {
            free(targets);
            *error_out = -EINVAL;
            return NULL;
        }
    }
    return targets;
}

/* Every GPU that the ranges name is open and in order. */
static int devices_check(struct pcc_link *link, const struct pcc_device_range *ranges,
                         uint64_t range_count)
{
    for (uint64_t i = 0; i < range_count; i++) {
        const struct pcc_link_device *device = pcc_link_device(link, ranges[i].device);
        if (device == NULL || ranges[i].reserved != 0)
            return -EINVAL;
        if (atomic_load_explicit(&device->broken, memory_order_relaxed))
            return -PCC_E_DEVICE;
    }
    return 0;
}

int pcc_link_load_start(struct pcc_link *link, uint64_t load_id, const struct pcc_range *ranges,
                        uint64_t range_count, const struct pcc_device_range *device_ranges,
                        uint64_t device_range_count)
{
    int error = devices_check(link, device_ranges, device_range_count);

    if (error != 0)
        return error;
    struct pcc_source *targets =
        targets_make(ranges, range_count, device_ranges, device_range_count, &error);
    if (targets == NULL)
        return error;
    error = 0;
    (void)pthread_mutex_lock(&link->lock);
    if (atomic_load_explicit(&link->dead, memory_order_relaxed))
        error = -ECONNRESET;
    else if (link->load.active)
        error = -EBUSY;
    else
        link->load = (struct pcc_link_load){.active = true,
                                            .id = load_id,
                                            .targets = targets,
                                            .target_count = range_count + device_range_count};
    (void)pthread_mutex_unlock(&link->lock);
    if (error != 0)
        free(targets);
    else
        pcc_bell_ring(&link->view.page->client_bell); /* chunks that lie idle here go back */
    return error;
}

void pcc_link_load_note(struct pcc_link *link, int error)
{
    struct pcc_link_load *load = &link->load;

    if (error != 0 && !load->ended) {
        load->ended = true;
        load->result = error;
    } else if (load->told && load->flying == 0) {
        load->ended = true; /* or it has failed here before */
    }
    (void)pthread_cond_broadcast(&link->idle);
    if (load->ended)
        pcc_bell_ring(&link->view.page->client_bell);
}

void pcc_link_take_end(struct pcc_link *link, const struct pcc_message *message)
{
    (void)pthread_mutex_lock(&link->lock);
    struct pcc_link_load *load = &link->load;
    /* It may have ended here already: a GPU failed. */
    if (load->active && !load->ended && !load->told && load->id == message->id) {
        load->told = true;
        load->result = message->result;
        pcc_link_load_note(link, 0);
    }
    (void)pthread_mutex_unlock(&link->lock);
}

/* True when the wait is over; the load is closed then and nothing writes to the ranges any more. */
static bool load_over(struct pcc_link *link, uint64_t load_id, uint64_t deadline_ns, int *result)
{
    bool is_over = true;
    const bool late = pcc_now_ns() >= deadline_ns;

    (void)pthread_mutex_lock(&link->lock);
    struct pcc_link_load *load = &link->load;
    const bool ours = load->active && load->id == load_id;
    if (!ours)
        *result = -ENOENT;
    else if (load->ended)
        *result = load->result; /* also -ENOENT: the checkpoint is gone */
    else if (atomic_load_explicit(&link->dead, memory_order_relaxed))
        *result = -ECONNRESET;
    else if (late)
        *result = -ETIMEDOUT;
    else
        is_over = false;
    if (is_over && ours) {
        load->ended = true;
        while (load->busy || load->flying > 0)
            (void)pthread_cond_wait(&link->idle, &link->lock);
        free(load->targets);
        load->targets = NULL;
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
        pcc_bell_sleep(&link->view.page->client_bell, rung, deadline_ns);
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
        const bool open = load->active && load->id == load_id;
        const bool over = load->ended || atomic_load_explicit(&link->dead, memory_order_relaxed);
        const bool ended = !open || (over && load->flying == 0);
        (void)pthread_mutex_unlock(&link->lock);
        if (ended || pcc_now_ns() >= until_ns)
            return ended;
        pcc_bell_sleep(&link->view.page->client_bell, rung, until_ns);
    }
}
