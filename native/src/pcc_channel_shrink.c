/* Taking segments back from a channel that is in use, the last ones first, so that indices of
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
#include "pcc_channel_private.h"
#include "pcc_futex.h"

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
