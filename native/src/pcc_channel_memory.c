/* A channel's memory: segments taken from the pool and given back, and what its chunks hold. */
#include <stdlib.h>

#include "pcc_channel_private.h"
#include "pcc_futex.h"
#include "pcc_numa.h"

void pcc_channel_segment_add(struct pcc_channel *channel, const struct pcc_channel_segment *fresh)
{
    const uint32_t chunk_bytes = channel->spec.chunk_bytes;
    const struct pcc_segment *segment = &fresh->memory;

    pcc_channel_lock(channel);
    PCC_ASSERT(channel->lasting_count == channel->segment_count);
    const uint32_t index = channel->segment_count++;
    channel->lasting_count++;
    struct pcc_channel_segment *added = &channel->segments[index];
    *added = *fresh;
    added->number = ++channel->segment_number;
    added->memory.first_chunk = channel->chunk_count;
    added->memory.chunk_count = (uint32_t)(segment->length_bytes / chunk_bytes);
    for (uint32_t i = 0; i < added->memory.chunk_count; i++) {
        channel->chunks[channel->chunk_count++] = (struct pcc_channel_chunk){
            .bytes = segment->bytes + (size_t)i * chunk_bytes, .segment = index};
    }
    pcc_channel_chunks_add(channel, added->memory.first_chunk, added->memory.chunk_count);
    atomic_store_explicit(&channel->numa_node, segment->numa_node, memory_order_relaxed);
    pcc_channel_grant_segments(channel);
    pcc_channel_hand_out(channel);
    if (channel->load.waiting > 0)
        (void)pthread_cond_broadcast(&channel->chunk_back);
    pcc_channel_unlock(channel);
}

/* The next segment's length: what is wanted, cut to a segment, to the table and to the budget. */
static uint64_t segment_length(struct pcc_channel *channel, uint64_t wanted_bytes)
{
    const uint64_t chunk_bytes = channel->spec.chunk_bytes;
    uint64_t budget, used;

    pcc_pool_usage(channel->pool, &budget, &used);
    uint64_t chunks = pcc_ceil_div(wanted_bytes, chunk_bytes);
    const uint64_t most = PCC_SEGMENT_BYTES_MAX / chunk_bytes;
    if (chunks > (most > 0 ? most : 1))
        chunks = most > 0 ? most : 1;
    if (chunks > channel->spec.chunk_capacity - channel->chunk_count)
        chunks = channel->spec.chunk_capacity - channel->chunk_count;
    if (chunks > (budget - used) / chunk_bytes)
        chunks = (budget - used) / chunk_bytes;
    return chunks * chunk_bytes;
}

/* With growing held: the driver does not pin. Push does well without, so the memory is used; but
 * nothing is pulled any more: the next exposure pins first, and is refused with words. */
static void pull_stop(struct pcc_channel *channel)
{
    pcc_channel_pin_stop(channel);
    pcc_channel_lock(channel);
    if (channel->pull.map != NULL)
        pcc_channel_map_put(channel, channel->pull.map); /* the drain thread closes it */
    channel->pull.map = NULL;
    if (channel->attached)
        pcc_bell_ring(&channel->view.page->daemon_bell);
    pcc_channel_unlock(channel);
}

/* With growing held. Near the GPU that reads into it, and pinned for it; else near the trainer. */
static int segment_make(struct pcc_channel *channel, uint64_t length,
                        struct pcc_channel_segment *out)
{
    const struct pcc_gpu *gpu = channel->pull.pinner;

    *out = (struct pcc_channel_segment){0};
    const int32_t node = gpu != NULL
                             ? gpu->device.numa_node
                             : atomic_load_explicit(&channel->trainer_node, memory_order_relaxed);
    int error = pcc_pool_take(channel->pool, length, node, channel->label, &out->memory);
    if (error != 0)
        return error;
    if (pcc_channel_segment_pin(channel, out) != 0)
        pull_stop(channel);
    return 0;
}

int pcc_channel_grow(struct pcc_channel *channel, uint64_t bytes, uint64_t *granted_out)
{
    struct pcc_channel_segment segment;
    int error = 0;

    (void)pthread_mutex_lock(&channel->growing);
    /* Who changes the table of segments holds `growing`. */
    uint64_t have = (uint64_t)channel->chunk_count * channel->spec.chunk_bytes;
    /* What retires leaves from the end of the table first. */
    while (have < bytes && channel->lasting_count == channel->segment_count) {
        const uint64_t length = segment_length(channel, bytes - have);
        if (length == 0)
            break;
        error = segment_make(channel, length, &segment);
        if (error == -PCC_E_NO_MEMORY)
            continue; /* another channel was faster: ask for what is left */
        if (error != 0)
            break;
        pcc_channel_segment_add(channel, &segment);
        have += length;
    }
    pcc_channel_lock(channel);
    pcc_channel_grant_segments(channel); /* those of a session before, too */
    pcc_channel_unlock(channel);
    (void)pthread_mutex_unlock(&channel->growing);
    if (error == -PCC_E_NO_MEMORY || error == -ENOMEM)
        error = 0;
    if (error == 0)
        *granted_out = have;
    return error;
}

int pcc_channel_release_memory(struct pcc_channel *channel)
{
    uint32_t count = 0;
    bool busy;

    (void)pthread_mutex_lock(&channel->control);
    (void)pthread_mutex_lock(&channel->growing);
    pcc_channel_lock(channel);
    busy = channel->attached || channel->load.active || channel->settling != NULL;
    for (uint32_t i = 0; i < PCC_CHANNEL_VOLUMES; i++)
        busy = busy || channel->bindings[i].active > 0;
    if (!busy) {
        count = channel->segment_count;
        channel->segment_count = channel->lasting_count = 0;
        channel->chunk_count = 0;
        pcc_channel_lists_clear(channel);
        atomic_store_explicit(&channel->numa_node, PCC_NUMA_ANYWHERE, memory_order_relaxed);
    }
    pcc_channel_unlock(channel);
    /* Nobody finds them any more, and `growing` keeps new ones away while they are unmapped. */
    for (uint32_t i = 0; i < count; i++)
        pcc_channel_segment_return(channel, &channel->segments[i]);
    if (!busy)
        pcc_channel_pin_stop(channel); /* the next session may have no use for it */
    (void)pthread_mutex_unlock(&channel->growing);
    (void)pthread_mutex_unlock(&channel->control);
    return busy ? -EBUSY : 0;
}

static bool holds_content(const struct pcc_channel_chunk *chunk)
{
    return chunk->state == PCC_CHUNK_CACHED ||
           ((chunk->state == PCC_CHUNK_READING || chunk->state == PCC_CHUNK_LENT) &&
            chunk->lent_cached);
}

bool pcc_channel_cached(struct pcc_channel *channel, uint64_t sequence)
{
    uint32_t held = 0, of = 0;

    pcc_channel_lock(channel);
    for (uint32_t i = 0; i < channel->chunk_count; i++) {
        const struct pcc_channel_chunk *chunk = &channel->chunks[i];
        if (chunk->sequence != sequence || !holds_content(chunk) ||
            pcc_channel_retires(channel, chunk))
            continue;
        held++;
        of = chunk->payload_chunks;
    }
    pcc_channel_unlock(channel);
    return sequence != 0 && held > 0 && held == of;
}

void pcc_channel_usage(struct pcc_channel *channel, struct pcc_channel_usage *out)
{
    struct pcc_channel_usage usage = {0};

    pcc_channel_lock(channel);
    usage.bytes = (uint64_t)channel->chunk_count * channel->spec.chunk_bytes;
    for (uint32_t i = 0; i < channel->chunk_count; i++) {
        switch (channel->chunks[i].state) {
        case PCC_CHUNK_FREE:
            usage.free_chunks++;
            break;
        case PCC_CHUNK_GRANTED:
        case PCC_CHUNK_PULLED: /* somebody may write to it */
            usage.granted_chunks++;
            break;
        case PCC_CHUNK_FULL:
            usage.full_chunks++;
            break;
        case PCC_CHUNK_CACHED:
            usage.cached_chunks++;
            break;
        case PCC_CHUNK_READING:
        case PCC_CHUNK_LENT:
            usage.lent_chunks++;
            break;
        case PCC_CHUNK_LOST:
            break;
        case PCC_CHUNK_LEFT:
            usage.left_chunks++;
            break;
        }
    }
    for (uint32_t i = 0; i < PCC_CHANNEL_VOLUMES; i++)
        usage.in_flight += channel->bindings[i].active;
    usage.pinned_bytes = channel->pull.pinned_bytes;
    usage.exposed_bytes = channel->pull.exposed_bytes;
    usage.mappings = channel->pull.mappings;
    usage.numa_node = atomic_load_explicit(&channel->numa_node, memory_order_relaxed);
    pcc_channel_unlock(channel);
    *out = usage;
}
