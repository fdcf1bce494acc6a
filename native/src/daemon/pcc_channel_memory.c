/* A channel's memory: segments taken from the pool, pinned for GPUs, given back, and what chunks
 * hold. */
#include <stdlib.h>
#include <time.h>

#include "base/pcc_futex.h"
#include "base/pcc_numa.h"
#include "daemon/pcc_channel_private.h"

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

/* -- pinned for the copies of a GPU --
 *
 * For as long as the trainer's memory is mapped, and some time after it. The driver is called
 * without the channel's lock. */

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

/* -- taking segments back --
 *
 * Segments are taken back from a channel that is in use, the last ones first, so that indices of
 * segments and chunks stay dense. A segment goes through
 *
 *   retiring   its chunks are neither handed out nor lent any more; cached content is dropped once
 *              its save is durable, or cannot be moved to another slot anyway
 *   told       the client was asked (RETIRE), behind everything that named its chunks; one that it
 *              never got, or that went with its session, counts as returned
 *   returned   the client has unmapped it (RETURNED)
 *   empty      no saver, load, check or GPU uses a chunk; it is unpinned, unmapped and leaves the
 *              descriptor store. The state memfd does not name it: who drops content says so there
 *              first, and of ended saves nothing is read.
 *
 * Nothing waits here: whoever wants the memory calls again. A client that keeps a mapping keeps its
 * pages, too: the kernel frees them with the last one. */

#define CHUNKS_MIN 2u /* one is filled while one is written: less, and a copy could not go on */

static bool is_dead(const struct pcc_channel_chunk *chunk)
{
    return chunk->state == PCC_CHUNK_LOST || chunk->state == PCC_CHUNK_LEFT;
}

static uint32_t usable(const struct pcc_channel *channel, const struct pcc_segment *memory)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < memory->chunk_count; i++)
        count += !is_dead(&channel->chunks[memory->first_chunk + i]);
    return count;
}

/* Chunks of the segments that stay. */
static uint32_t lasting_chunks(const struct pcc_channel *channel)
{
    return channel->lasting_count < channel->segment_count
               ? channel->segments[channel->lasting_count].memory.first_chunk
               : channel->chunk_count;
}

static bool is_idle(const struct pcc_channel *channel)
{
    for (uint32_t i = 0; i < PCC_CHANNEL_VOLUMES; i++)
        if (channel->bindings[i].active > 0)
            return false;
    return true;
}

/* The first segment with a LEFT chunk goes, and those behind it. While saves are in flight that
 * would hold up the next ones: then it waits, as long as there are chunks to go on with. */
static void choose_left(struct pcc_channel *channel)
{
    uint32_t usable_count = 0;

    for (uint32_t i = 0; i < channel->lasting_count; i++)
        usable_count += usable(channel, &channel->segments[i].memory);
    if (usable_count > 0 && !is_idle(channel))
        return;
    for (uint32_t i = 0; i < lasting_chunks(channel); i++)
        if (channel->chunks[i].state == PCC_CHUNK_LEFT)
            channel->lasting_count = channel->chunks[i].segment;
}

static void choose(struct pcc_channel *channel, uint64_t bytes)
{
    choose_left(channel);

    uint32_t left = 0;
    for (uint32_t i = 0; i < channel->lasting_count; i++)
        left += usable(channel, &channel->segments[i].memory);
    while (channel->lasting_count > 0 &&
           (uint64_t)lasting_chunks(channel) * channel->spec.chunk_bytes > bytes) {
        const uint32_t last =
            usable(channel, &channel->segments[channel->lasting_count - 1].memory);
        if (left - last < CHUNKS_MIN)
            return;
        left -= last;
        channel->lasting_count--;
    }
}

static bool has(const struct pcc_channel *channel, const struct pcc_segment *memory,
                enum pcc_chunk_state state)
{
    for (uint32_t i = 0; i < memory->chunk_count; i++)
        if (channel->chunks[memory->first_chunk + i].state == state)
            return true;
    return false;
}

/* Asks the client. While a load reads a chunk, DATA may still follow and name it. */
static void tell(struct pcc_channel *channel)
{
    bool sent = false;

    for (uint32_t i = channel->lasting_count; i < channel->segment_count; i++) {
        struct pcc_channel_segment *segment = &channel->segments[i];
        if (segment->told || has(channel, &segment->memory, PCC_CHUNK_READING))
            continue;
        if (segment->granted) {
            const struct pcc_message message = {.kind = PCC_MSG_RETIRE,
                                                .chunk = segment->memory.first_chunk,
                                                .id = segment->number};
            if (channel->broken || pcc_channel_push(channel, &message) != 0)
                break; /* its session ends, and with it the grant */
            sent = true;
        }
        segment->told = true;
    }
    if (sent)
        pcc_channel_wake_client(channel);
}

int pcc_channel_take_returned(struct pcc_channel *channel, const struct pcc_message *message)
{
    for (uint32_t i = channel->lasting_count; i < channel->segment_count; i++) {
        struct pcc_channel_segment *segment = &channel->segments[i];
        if (segment->number != message->id)
            continue;
        if (!segment->told || !segment->granted || segment->memory.first_chunk != message->chunk ||
            has(channel, &segment->memory, PCC_CHUNK_GRANTED) ||
            has(channel, &segment->memory, PCC_CHUNK_LENT))
            break;
        segment->granted = false;
        return 0;
    }
    return -PCC_E_BAD_PEER;
}

/* Whether nothing of the segment is used; drops what is only cached. */
static bool empty(struct pcc_channel *channel, const struct pcc_channel_segment *segment)
{
    bool is_empty = segment->told && !segment->granted;

    for (uint32_t i = 0; i < segment->memory.chunk_count; i++) {
        const uint32_t index = segment->memory.first_chunk + i;
        const enum pcc_chunk_state state = channel->chunks[index].state;
        if (channel->chunks[index].settling)
            is_empty = false;
        if (state == PCC_CHUNK_FREE || is_dead(&channel->chunks[index]))
            continue;
        if (state != PCC_CHUNK_CACHED || !pcc_channel_uncache(channel, index))
            is_empty = false;
    }
    return is_empty;
}

/* With growing and the lock held: the last segment leaves the table, if it can. */
static bool last_leaves(struct pcc_channel *channel, struct pcc_channel_segment *out)
{
    if (channel->segment_count == channel->lasting_count)
        return false;
    const struct pcc_channel_segment *last = &channel->segments[channel->segment_count - 1];
    if (!empty(channel, last))
        return false;
    *out = *last;
    channel->segment_count--;
    channel->chunk_count = last->memory.first_chunk;
    return true;
}

/* With the lock held. */
static struct pcc_channel_holding holding(const struct pcc_channel *channel)
{
    struct pcc_channel_holding found = {
        .bytes = (uint64_t)channel->chunk_count * channel->spec.chunk_bytes,
        .lasting_bytes = (uint64_t)lasting_chunks(channel) * channel->spec.chunk_bytes};

    for (uint32_t i = channel->lasting_count; i < channel->segment_count; i++)
        found.asked += channel->segments[i].told && channel->segments[i].granted;
    return found;
}

void pcc_channel_shrink(struct pcc_channel *channel, uint64_t bytes,
                        struct pcc_channel_holding *out)
{
    struct pcc_channel_segment gone;

    (void)pthread_mutex_lock(&channel->growing);
    pcc_channel_lock(channel);
    choose(channel, bytes);
    pcc_channel_chunks_retire(channel);
    tell(channel);
    while (last_leaves(channel, &gone)) {
        pcc_channel_unlock(channel); /* nobody finds it any more, and `growing` keeps others out */
        pcc_channel_segment_return(channel, &gone);
        pcc_channel_lock(channel);
    }
    *out = holding(channel);
    pcc_channel_unlock(channel);
    (void)pthread_mutex_unlock(&channel->growing);
}
