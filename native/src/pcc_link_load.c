/* Loads on the client's side: DATA chunks are scattered into host and device memory as they come.
 * The daemon reads and checks the next ones meanwhile. */
#include <stdlib.h>
#include <string.h>

#include "pcc_futex.h"
#include "pcc_link_private.h"

#define SLICE_NS 100000000u

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
            *target = (struct pcc_source){ranges[i].address, ranges[i].offset_bytes,
                                          ranges[i].length_bytes, PCC_HOST};
            i++;
        } else {
            *target = (struct pcc_source){device_ranges[d].address, device_ranges[d].offset_bytes,
                                          device_ranges[d].length_bytes, device_ranges[d].device};
            d++;
        }
        if (target->offset_bytes < end ||
            __builtin_add_overflow(target->offset_bytes, target->length_bytes, &end)) {
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

/* The first target that ends behind offset. */
static uint64_t target_from(const struct pcc_link_load *load, uint64_t offset_bytes)
{
    uint64_t low = 0, high = load->target_count;

    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (load->targets[middle].offset_bytes + load->targets[middle].length_bytes <= offset_bytes)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A part of a chunk to where it belongs. On a GPU it is enqueued. Between pcc_link_gpu_enter and
 * leave of that GPU. */
static CUresult put(const struct pcc_link *link, const struct pcc_source *target, uint64_t into,
                    const uint8_t *bytes, uint64_t length_bytes)
{
    if (length_bytes == 0)
        return CUDA_SUCCESS;
    if (target->device == PCC_HOST) {
        memcpy((uint8_t *)(uintptr_t)target->address + into, bytes, length_bytes);
        return CUDA_SUCCESS;
    }
    const struct pcc_link_device *device = &link->devices[target->device];
    return device->gpu.cuda->copy_to_device(target->address + into, bytes, length_bytes,
                                            device->load);
}

/* The chunk's bytes that belong to one place, host memory or a GPU. */
static CUresult scatter(const struct pcc_link *link, const struct pcc_message *message,
                        uint32_t place)
{
    const struct pcc_link_load *load = &link->load;
    const uint8_t *bytes = link->chunk_at[message->chunk];
    const uint64_t start = message->offset_bytes, end = start + message->length_bytes;
    CUresult result = CUDA_SUCCESS;

    for (uint64_t i = target_from(load, start);
         result == CUDA_SUCCESS && i < load->target_count && load->targets[i].offset_bytes < end;
         i++) {
        const struct pcc_source *target = &load->targets[i];
        if (target->device != place)
            continue;
        const uint64_t target_end = target->offset_bytes + target->length_bytes;
        const uint64_t from = target->offset_bytes > start ? target->offset_bytes : start;
        const uint64_t to = target_end < end ? target_end : end;
        result = put(link, target, from - target->offset_bytes, bytes + (from - start), to - from);
    }
    return result;
}

/* Which GPUs some of the chunk belongs to, as bits. */
static uint32_t places(const struct pcc_link_load *load, uint64_t start, uint64_t end)
{
    uint32_t bits = 0;

    for (uint64_t i = target_from(load, start);
         i < load->target_count && load->targets[i].offset_bytes < end; i++) {
        if (load->targets[i].device != PCC_HOST)
            bits |= 1u << load->targets[i].device;
    }
    return bits;
}

/* Enqueues what belongs to one GPU and waits for it: the chunk goes back to the daemon then. */
static int scatter_to_device(struct pcc_link *link, const struct pcc_message *message,
                             uint32_t index)
{
    struct pcc_link_device *device = &link->devices[index];
    int mode;

    if (atomic_load_explicit(&device->broken, memory_order_relaxed))
        return -PCC_E_DEVICE;
    pcc_link_await_unarmed(link);
    int error = pcc_link_gpu_enter(device, &mode);
    if (error != 0)
        return error;
    (void)pcc_link_pin(link, index, message->chunk);
    const CUresult result = scatter(link, message, index);
    /* Also after a refusal: the copies before it read the chunk. */
    error = pcc_link_gpu_code(device, device->gpu.cuda->event_record(device->loaded, device->load));
    if (error == 0)
        error = pcc_link_gpu_await(link, device, device->loaded, true);
    else
        atomic_store_explicit(&device->broken, true, memory_order_relaxed);
    pcc_link_gpu_leave(device, mode);
    return error != 0 ? error : pcc_link_gpu_code(device, result);
}

void pcc_link_take_data(struct pcc_link *link, const struct pcc_message *message)
{
    uint64_t end;
    int error = 0;

    (void)pthread_mutex_lock(&link->lock);
    struct pcc_link_load *load = &link->load;
    const bool wanted = load->active && !load->ended && load->id == message->id &&
                        !__builtin_add_overflow(message->offset_bytes, message->length_bytes, &end);
    load->busy = wanted;
    (void)pthread_mutex_unlock(&link->lock);
    if (!wanted)
        return; /* of a load that timed out */
    const uint32_t devices = places(load, message->offset_bytes, end);
    for (uint32_t i = 0; error == 0 && i < PCC_DEVICES; i++) {
        if ((devices >> i & 1) != 0)
            error = scatter_to_device(link, message, i);
    }
    (void)scatter(link, message, PCC_HOST);
    (void)pthread_mutex_lock(&link->lock);
    load->busy = false;
    if (error != 0) {
        load->ended = true;
        load->result = error;
    }
    (void)pthread_cond_broadcast(&link->idle);
    (void)pthread_mutex_unlock(&link->lock);
    if (error != 0)
        pcc_bell_ring(&link->view.page->client_bell);
}

void pcc_link_take_end(struct pcc_link *link, const struct pcc_message *message)
{
    (void)pthread_mutex_lock(&link->lock);
    /* It may have ended here already: a GPU failed. */
    if (link->load.active && !link->load.ended && link->load.id == message->id) {
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
