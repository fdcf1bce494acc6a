/* Loads: checked payload on its way back to the client. Reader threads take pieces of one chunk's
 * length in order; a piece whose chunk is still cached is checked where it lies and lent as it is,
 * any other is read from the volume into a chunk that is taken for it. */
#include <stdlib.h>
#include <string.h>

#include "base/pcc_numa.h"
#include "base/pcc_thread.h"
#include "daemon/pcc_channel_private.h"

struct piece {
    uint64_t offset_bytes;
    uint64_t length_bytes;
};

/* Chunks that one load may hold at a time: enough to keep disk and client busy. */
static uint32_t lent_max(const struct pcc_channel *channel)
{
    return 4 + 2 * channel->spec.writers_per_lane;
}

static bool over(const struct pcc_channel *channel)
{
    const struct pcc_channel_load *load = &channel->load;

    return load->stop || load->result != 0 || !channel->attached || channel->broken;
}

static void wait_for_chunk(struct pcc_channel *channel)
{
    channel->load.waiting++;
    (void)pthread_cond_wait(&channel->chunk_back, &channel->lock);
    channel->load.waiting--;
}

static bool piece_next(struct pcc_channel *channel, struct piece *out)
{
    struct pcc_channel_load *load = &channel->load;
    const uint64_t chunk_bytes = channel->spec.chunk_bytes;

    while (!over(channel) && load->lent >= lent_max(channel))
        wait_for_chunk(channel);
    if (over(channel) || load->next_bytes >= load->end_bytes)
        return false;
    uint64_t end = (load->next_bytes / chunk_bytes + 1) * chunk_bytes;
    if (end > load->end_bytes)
        end = load->end_bytes;
    *out = (struct piece){.offset_bytes = load->next_bytes, .length_bytes = end - load->next_bytes};
    load->next_bytes = end;
    return true;
}

static int64_t cached_find(const struct pcc_channel *channel, uint64_t offset_bytes)
{
    for (uint32_t i = 0; i < channel->chunk_count; i++) {
        const struct pcc_channel_chunk *chunk = &channel->chunks[i];
        if (chunk->state == PCC_CHUNK_CACHED && chunk->sequence == channel->load.cached_as &&
            chunk->offset_bytes == offset_bytes && !pcc_channel_retires(channel, chunk))
            return i;
    }
    return -1;
}

static void take(struct pcc_channel *channel, uint32_t index, bool cached)
{
    pcc_channel_chunk_set(channel, &channel->chunks[index], PCC_CHUNK_READING);
    channel->chunks[index].lent_cached = cached;
    channel->load.lent++;
}

void pcc_channel_load_put_back(struct pcc_channel *channel, uint32_t index, bool intact)
{
    struct pcc_channel_chunk *chunk = &channel->chunks[index];

    channel->load.lent--;
    if (chunk->lent_cached && intact) {
        chunk->lent_cached = false;
        pcc_channel_chunk_set(channel, chunk, PCC_CHUNK_CACHED);
    } else {
        pcc_channel_chunk_free(channel, index);
    }
    if (channel->load.waiting > 0)
        (void)pthread_cond_broadcast(&channel->chunk_back);
}

static void send(struct pcc_channel *channel, uint32_t index, const struct piece *piece)
{
    const struct pcc_message message = {.kind = PCC_MSG_DATA,
                                        .chunk = index,
                                        .id = channel->load.id,
                                        .offset_bytes = piece->offset_bytes,
                                        .length_bytes = (uint32_t)piece->length_bytes};

    pcc_channel_grant_segments(channel);
    if (over(channel) || pcc_channel_push(channel, &message) != 0) {
        pcc_channel_load_put_back(channel, index, true);
        return;
    }
    pcc_channel_chunk_set(channel, &channel->chunks[index], PCC_CHUNK_LENT);
    pcc_channel_wake_client(channel);
}

/* True when the piece's chunk was cached, intact and is on its way. The client can write to its
 * chunks at any time, so trust comes from the checksums of the volume. */
static bool send_cached(struct pcc_channel *channel, const struct piece *piece)
{
    const uint64_t chunk_bytes = channel->spec.chunk_bytes;
    const int64_t found = cached_find(channel, piece->offset_bytes / chunk_bytes * chunk_bytes);

    if (found < 0)
        return false;
    const uint32_t index = (uint32_t)found;
    const struct pcc_channel_chunk *chunk = &channel->chunks[index];
    const struct piece whole = {.offset_bytes = chunk->offset_bytes,
                                .length_bytes = chunk->length_bytes};
    take(channel, index, true);
    pcc_channel_unlock(channel);
    const int error =
        pcc_load_check(channel->load.load, chunk->bytes, whole.offset_bytes, whole.length_bytes);
    pcc_channel_lock(channel);
    if (error != 0) {
        pcc_channel_load_put_back(channel, index, false);
        return false;
    }
    send(channel, index, &whole);
    return true;
}

/* Without the lock, after a mismatch: the client may have written to the chunk. Read once more
 * where it cannot, so that only the disk's own bytes are called damaged. */
static int read_privately(struct pcc_channel *channel, uint32_t index, const struct piece *piece)
{
    const uint64_t length = pcc_align_up(piece->length_bytes, PCC_IO_ALIGN);
    void *bytes = aligned_alloc(PCC_IO_ALIGN, length);

    if (bytes == NULL)
        return -ENOMEM;
    const int error =
        pcc_load_chunk(channel->load.load, bytes, piece->offset_bytes, piece->length_bytes);
    if (error == 0)
        memcpy(channel->chunks[index].bytes, bytes, length);
    free(bytes);
    return error;
}

static int send_read(struct pcc_channel *channel, const struct piece *piece)
{
    int64_t found;

    for (;;) {
        if (over(channel))
            return 0;
        /* With nothing lent there is nothing to wait for but saves: take their chunks, too. */
        found = pcc_channel_pick(channel, channel->load.cached_as, channel->load.lent > 0);
        if (found >= 0)
            break;
        wait_for_chunk(channel);
    }
    const uint32_t index = (uint32_t)found;
    take(channel, index, false);
    pcc_channel_unlock(channel);
    int error = pcc_load_chunk(channel->load.load, channel->chunks[index].bytes,
                               piece->offset_bytes, piece->length_bytes);
    if (error == -PCC_E_DAMAGED)
        error = read_privately(channel, index, piece);
    pcc_channel_lock(channel);
    if (error != 0) {
        pcc_channel_load_put_back(channel, index, false);
        return error;
    }
    send(channel, index, piece);
    return 0;
}

static void *reader_run(void *argument)
{
    struct pcc_channel *channel = argument;
    int32_t here = PCC_NUMA_ANYWHERE;
    struct piece piece;

    pcc_numa_follow(&channel->numa_node, &here);
    pcc_channel_lock(channel);
    while (piece_next(channel, &piece)) {
        if (send_cached(channel, &piece))
            continue;
        const int error = send_read(channel, &piece);
        if (error != 0 && channel->load.result == 0) {
            channel->load.result = error;
            (void)pthread_cond_broadcast(&channel->chunk_back);
        }
    }
    pcc_channel_unlock(channel);
    return NULL;
}

/* Opens the checkpoint and cuts the range to what reads and checksums are aligned to. */
static int load_prepare(struct pcc_channel *channel)
{
    struct pcc_channel_load *load = &channel->load;
    int error = pcc_load_open(load->volume, load->sequence, &load->load);

    if (error != 0)
        return error;
    const uint64_t payload_bytes = pcc_load_entry(load->load)->payload_bytes;
    const uint64_t block_bytes = pcc_load_block_bytes(load->load);
    const uint64_t align = block_bytes > PCC_IO_ALIGN ? block_bytes : PCC_IO_ALIGN;
    if (load->end_bytes > payload_bytes || channel->spec.chunk_bytes % align != 0)
        return -EINVAL;
    load->next_bytes = load->next_bytes / align * align;
    load->end_bytes = pcc_align_up(load->end_bytes, align);
    if (load->end_bytes > payload_bytes)
        load->end_bytes = payload_bytes;
    return 0;
}

static void load_end(struct pcc_channel *channel, int error)
{
    struct pcc_channel_load *load = &channel->load;

    pcc_load_close(load->load);
    pcc_channel_lock(channel);
    load->load = NULL;
    if (load->result == 0)
        load->result = error;
    if (load->result == 0 && (over(channel) || load->next_bytes < load->end_bytes))
        load->result = -PCC_E_ABORTED;
    if (channel->attached && !channel->broken) {
        const struct pcc_message message = {
            .kind = PCC_MSG_END, .id = load->id, .result = load->result};
        if (pcc_channel_push(channel, &message) == 0)
            pcc_channel_wake_client(channel);
    }
    const struct pcc_event event = {.kind = PCC_EVENT_LOAD_ENDED,
                                    .error = load->result,
                                    .session = load->session,
                                    .id = load->id,
                                    .sequence = load->sequence};
    load->active = false;
    pcc_channel_put(channel, &event);
    pcc_channel_unlock(channel);
}

static void *leader_run(void *argument)
{
    struct pcc_channel *channel = argument;
    pthread_t helpers[PCC_LOAD_THREADS_MAX];
    uint32_t count = 0;
    const int error = load_prepare(channel);

    if (error == 0) {
        /* A helper that cannot be started only makes it slower. */
        while (count + 1 < channel->spec.writers_per_lane && count < PCC_LOAD_THREADS_MAX &&
               pcc_thread_start(&helpers[count], reader_run, channel, "pcc-load") == 0)
            count++;
        (void)reader_run(channel);
        for (uint32_t i = 0; i < count; i++)
            (void)pthread_join(helpers[i], NULL);
    }
    load_end(channel, error);
    return NULL;
}

static void leader_join(struct pcc_channel *channel)
{
    if (channel->load.joinable)
        (void)pthread_join(channel->load.leader, NULL);
    channel->load.joinable = false;
}

int pcc_channel_load(struct pcc_channel *channel, struct pcc_volume *volume, bool own,
                     uint64_t sequence, uint64_t offset_bytes, uint64_t length_bytes,
                     uint64_t load_id)
{
    uint64_t end_bytes;
    int error = 0;

    if (__builtin_add_overflow(offset_bytes, length_bytes, &end_bytes))
        return -EINVAL;
    (void)pthread_mutex_lock(&channel->control);
    pcc_channel_lock(channel);
    struct pcc_channel_load *load = &channel->load;
    if (!channel->attached || channel->broken)
        error = -ENOTCONN;
    else if (load->active)
        error = -EBUSY;
    pcc_channel_unlock(channel);
    if (error != 0)
        goto out;
    leader_join(channel); /* has put its last event: this does not wait */

    pcc_channel_lock(channel);
    load->active = true;
    load->stop = false;
    load->volume = volume;
    load->load = NULL;
    load->id = load_id;
    load->session = channel->session;
    load->sequence = sequence;
    load->cached_as = own ? sequence : 0;
    load->next_bytes = offset_bytes;
    load->end_bytes = end_bytes;
    load->result = 0;
    pcc_channel_unlock(channel);
    error = pcc_thread_start(&load->leader, leader_run, channel, "pcc-load");
    if (error == 0) {
        load->joinable = true;
    } else {
        pcc_channel_lock(channel);
        load->active = false;
        pcc_channel_unlock(channel);
    }
out:
    (void)pthread_mutex_unlock(&channel->control);
    return error;
}

void pcc_channel_load_stop(struct pcc_channel *channel)
{
    pcc_channel_lock(channel);
    channel->load.stop = true;
    (void)pthread_cond_broadcast(&channel->chunk_back);
    pcc_channel_unlock(channel);
    leader_join(channel);
}
