/* The channel's memory, pinned for the copies of a GPU: for as long as the trainer's memory is
 * mapped, and some time after it. Driver calls happen without the channel's lock. */
#include <time.h>

#include "pcc_channel_private.h"

/* Registering memory takes locks of the driver's that all processes of the node share: between two
 * pieces of a large pool the others have their turn. */
#define PIN_PAUSE_NS 5000000

/* With growing held. */
static void pinner_set(struct pcc_channel *channel, struct pcc_gpu *gpu)
{
    if (gpu != NULL)
        pcc_gpu_hold(gpu);
    if (channel->pull.pinner != NULL)
        pcc_gpu_put(channel->pull.pinner);
    channel->pull.pinner = gpu;
}

void pcc_channel_pin_stop(struct pcc_channel *channel)
{
    pinner_set(channel, NULL);
}

int pcc_channel_segment_pin(struct pcc_channel *channel, struct pcc_channel_segment *segment)
{
    struct pcc_gpu *gpu = channel->pull.pinner;

    /* Nothing is pulled with a lost GPU; memory for push does not depend on it. */
    if (segment->pinned_by != NULL || gpu == NULL || pcc_gpu_is_lost(gpu))
        return 0;
    const int error = pcc_gpu_pin_host(gpu, segment->memory.bytes, segment->memory.length_bytes);
    if (error != 0)
        return error;
    pcc_gpu_hold(gpu);
    pcc_channel_lock(channel);
    segment->pinned_by = gpu;
    channel->pull.pinned_bytes += segment->memory.length_bytes;
    pcc_channel_unlock(channel);
    (void)nanosleep(&(struct timespec){.tv_nsec = PIN_PAUSE_NS}, NULL);
    return 0;
}

/* With growing held, and nothing under way into it. False: the driver has not let go of it. */
static bool segment_unpin(struct pcc_channel *channel, struct pcc_channel_segment *segment)
{
    struct pcc_gpu *gpu = segment->pinned_by;
    const struct pcc_segment *memory = &segment->memory;

    if (gpu == NULL)
        return true;
    if (pcc_gpu_unpin_host(gpu, memory->bytes, memory->length_bytes) != 0)
        return false;
    pcc_channel_lock(channel);
    segment->pinned_by = NULL;
    channel->pull.pinned_bytes -= memory->length_bytes;
    pcc_channel_unlock(channel);
    pcc_gpu_put(gpu);
    return true;
}

void pcc_channel_segment_return(struct pcc_channel *channel, struct pcc_channel_segment *segment)
{
    struct pcc_segment *memory = &segment->memory;
    bool lost = false;

    for (uint32_t i = 0; i < memory->chunk_count; i++)
        lost = lost || channel->chunks[memory->first_chunk + i].state == PCC_CHUNK_LOST;
    const bool unpinned = !lost && segment_unpin(channel, segment);
    if (!unpinned && segment->pinned_by != NULL) { /* its GPU stays held, for ever */
        pcc_channel_lock(channel);
        channel->pull.pinned_bytes -= memory->length_bytes;
        pcc_channel_unlock(channel);
        segment->pinned_by = NULL;
    }
    if (lost)
        pcc_pool_abandon(channel->pool, channel->label, memory);
    else if (!unpinned)
        pcc_pool_retire(channel->pool, channel->label, memory);
    else
        pcc_pool_return(channel->pool, channel->label, memory);
}

int pcc_channel_pin_for(struct pcc_channel *channel, struct pcc_gpu *gpu)
{
    int error = 0;

    (void)pthread_mutex_lock(&channel->growing);
    pinner_set(channel, gpu);
    for (uint32_t i = 0; error == 0 && i < channel->segment_count; i++)
        error = pcc_channel_segment_pin(channel, &channel->segments[i]);
    if (error != 0)
        pinner_set(channel, NULL);
    (void)pthread_mutex_unlock(&channel->growing);
    return error;
}

void pcc_channel_rest(struct pcc_channel *channel, uint64_t unmapped_ns)
{
    if (pthread_mutex_trylock(&channel->control) != 0)
        return; /* somebody attaches or exposes */
    pcc_channel_lock(channel);
    const bool rests =
        channel->pull.maps == 0 && pcc_now_ns() - channel->pull.mapped_ns >= unmapped_ns;
    pcc_channel_unlock(channel);
    if (rests) {
        (void)pthread_mutex_lock(&channel->growing);
        pinner_set(channel, NULL);
        for (uint32_t i = 0; i < channel->segment_count; i++)
            (void)segment_unpin(channel, &channel->segments[i]);
        (void)pthread_mutex_unlock(&channel->growing);
    }
    (void)pthread_mutex_unlock(&channel->control);
}
