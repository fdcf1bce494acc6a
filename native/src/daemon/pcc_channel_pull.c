/* Pull: the device part of a checkpoint, filled by the GPUs' copiers. A save has one part per GPU;
 * a part waits until the trainer's stream has said `ready`, then fills chunk after chunk. What was
 * read is judged by the drain thread (pcc_channel_admit.c). */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/pcc_futex.h"
#include "daemon/pcc_channel_private.h"

/* Chunks of a checkpoint that is not durable yet are taken only when fewer than this many are under
 * way: one that is copied and one for the engine to go on with. */
#define CHUNKS_AHEAD 2u
#define ORPHAN_RETRY_NS 10000000u

struct pcc_channel_part {
    struct pcc_gpu_job job; /* first member: an orphan is freed through it */
    struct pcc_channel *channel;
    struct pcc_channel_part *next;
    struct pcc_channel_save *save; /* its entry stays ours until `ended` */
    struct pcc_channel_map *map;   /* held by the save */
    uint32_t device;
    bool ready;
    uint32_t left;      /* chunks that have not arrived */
    uint32_t under_way; /* chunks taken that have not arrived */
    int64_t chunk;      /* being enqueued; -1 = none */
    struct pcc_exposure_walk walk;
};

static struct pcc_channel_part *part_of(struct pcc_gpu_job *job)
{
    return (struct pcc_channel_part *)(void *)job;
}

/* -- what copiers ask; with the lock held where it says so -- */

static bool is_over(const struct pcc_channel_part *part)
{
    return part->save->save == NULL || part->save->given_up;
}

/* With the lock held: whether the next chunk may be copied. */
static enum pcc_gpu_verdict may_go_on(struct pcc_channel_part *part)
{
    struct pcc_channel *channel = part->channel;
    struct pcc_channel_save *save = part->save;

    if (is_over(part))
        return PCC_GPU_NO_MORE;
    if (!channel->attached || channel->broken)
        return PCC_GPU_NOTHING_NOW; /* detach gives it up */
    struct pcc_snapshot *entry = pcc_page_snapshot(&channel->view, save->snapshot);
    /* Acquire pairs with the client's move to ABANDONED. */
    if (atomic_load_explicit(&entry->word, memory_order_acquire) !=
        pcc_word(save->snapshot, PCC_WORD_COPYING)) {
        pcc_channel_give_up(channel, save, -PCC_E_ABORTED);
        return PCC_GPU_NO_MORE;
    }
    if (!part->ready) {
        _Atomic uint64_t *ready =
            &pcc_page_words(&channel->view, save->snapshot, part->device)->ready;
        /* Acquire pairs with the stream's write, which is behind a fence for the whole system. */
        part->ready = atomic_load_explicit(ready, memory_order_acquire) >= save->snapshot;
    }
    return part->ready ? PCC_GPU_PIECE : PCC_GPU_NOTHING_NOW;
}

/* With the lock held: the next chunk of the payload, and one of ours for it. */
static enum pcc_gpu_verdict chunk_take(struct pcc_channel_part *part)
{
    struct pcc_channel *channel = part->channel;
    const enum pcc_gpu_verdict verdict = may_go_on(part);

    if (verdict != PCC_GPU_PIECE)
        return verdict;
    if (!pcc_exposure_next_chunk(&part->map->view, part->device, &part->walk))
        return PCC_GPU_NO_MORE;
    const int64_t index = pcc_channel_pick(channel, 0, part->under_way >= CHUNKS_AHEAD);
    if (index < 0)
        return PCC_GPU_NOTHING_NOW;
    struct pcc_channel_chunk *chunk = &channel->chunks[index];
    if (channel->segments[chunk->segment].pinned_by == NULL) {
        /* The driver would copy by itself, and all who share the copier wait for that. */
        pcc_channel_give_up(channel, part->save, -PCC_E_DEVICE);
        return PCC_GPU_NO_MORE;
    }
    pcc_channel_chunk_set(channel, chunk, PCC_CHUNK_PULLED);
    chunk->tag = part->save->tag;
    chunk->offset_bytes = part->walk.chunk_bytes;
    part->under_way++;
    part->chunk = index;
    return PCC_GPU_PIECE;
}

/* The copies that fill the chunk, as many as fit; what no range fills becomes zeros here, a little
 * at a time. The chunk is ours, the map does not change: no lock. */
static void piece_fill(struct pcc_channel_part *part, struct pcc_gpu_piece *out)
{
    uint8_t *bytes = part->channel->chunks[part->chunk].bytes;
    uint64_t zeroed_bytes = 0;
    struct pcc_exposure_step step;

    while (out->count < PCC_GPU_COPIES && zeroed_bytes < PCC_EXPOSURE_ZEROS_BYTES) {
        out->last = !pcc_exposure_next_step(&part->map->view, &part->walk, &step);
        if (out->last)
            return;
        uint8_t *to = bytes + (step.offset_bytes - part->walk.chunk_bytes);
        if (step.allocation == PCC_EXPOSURE_ZEROS) {
            memset(to, 0, step.length_bytes);
            zeroed_bytes += step.length_bytes;
            continue;
        }
        const struct pcc_channel_import *import = part->map->imports[step.allocation];
        out->copies[out->count++] =
            (struct pcc_gpu_copy){.from = import->address + step.allocation_offset_bytes,
                                  .to = to,
                                  .length_bytes = step.length_bytes};
    }
}

static enum pcc_gpu_verdict on_next(struct pcc_gpu_job *job, struct pcc_gpu_piece *out)
{
    struct pcc_channel_part *part = part_of(job);

    pcc_channel_lock(part->channel);
    const enum pcc_gpu_verdict verdict = part->chunk < 0 ? chunk_take(part) : PCC_GPU_PIECE;
    const bool over = is_over(part);
    pcc_channel_unlock(part->channel);
    if (verdict != PCC_GPU_PIECE)
        return verdict;
    out->token = (uint32_t)part->chunk;
    out->chunk_bytes = part->channel->spec.chunk_bytes;
    out->count = 0;
    out->last = over; /* the rest of the chunk does not matter any more */
    if (!over)
        piece_fill(part, out);
    if (out->last)
        part->chunk = -1;
    return PCC_GPU_PIECE;
}

/* With the lock held: a chunk of a save that goes on. */
static void chunk_arrived(struct pcc_channel_part *part, uint32_t index)
{
    struct pcc_channel *channel = part->channel;
    struct pcc_channel_save *save = part->save;
    const uint64_t offset = channel->chunks[index].offset_bytes;

    pcc_channel_received(channel, save, offset);
    pcc_channel_chunk_to_save(channel, save, index, offset, channel->spec.chunk_bytes, NULL);
    if (part->left > 0 || save->given_up || !channel->attached)
        return;
    /* The drain thread looks whether the trainer lives: that may wait for the trainer's own locks,
     * and a copier has others to serve. */
    save->read |= 1u << part->device;
    pcc_bell_ring(&channel->view.page->daemon_bell);
}

/* With the lock held: chunks may have become free. */
static void pass_on(struct pcc_channel *channel)
{
    pcc_channel_hand_out(channel);
    if (channel->load.waiting > 0)
        (void)pthread_cond_broadcast(&channel->chunk_back);
}

static void on_done(struct pcc_gpu_job *job, uint32_t token, int error)
{
    struct pcc_channel_part *part = part_of(job);
    struct pcc_channel *channel = part->channel;

    part->left--;
    part->under_way--;
    if (part->chunk == (int64_t)token) /* it was not enqueued as a whole */
        part->chunk = -1;
    pcc_channel_lock(channel);
    if (error == 0 && !is_over(part))
        chunk_arrived(part, token);
    else if (error == -PCC_E_DEVICE_LOST)
        pcc_channel_chunk_set(channel, &channel->chunks[token], PCC_CHUNK_LOST);
    else
        pcc_channel_chunk_free(channel, token);
    if (error != 0)
        pcc_channel_give_up(channel, part->save, error);
    pass_on(channel);
    pcc_channel_unlock(channel);
}

static void on_lost(struct pcc_gpu_job *job)
{
    struct pcc_channel_part *part = part_of(job);
    struct pcc_channel *channel = part->channel;

    pcc_channel_lock(channel);
    if (part->chunk >= 0)
        pcc_channel_chunk_set(channel, &channel->chunks[part->chunk], PCC_CHUNK_LOST);
    part->chunk = -1;
    pcc_channel_give_up(channel, part->save, -PCC_E_DEVICE_LOST);
    pcc_channel_unlock(channel);
}

static void part_unlink(struct pcc_channel *channel, const struct pcc_channel_part *part,
                        struct pcc_channel_part *next)
{
    struct pcc_channel_part **at = &channel->pull.parts;

    while (*at != part)
        at = &(*at)->next;
    *at = next;
}

/* With the lock held: a copier has one part less of the save. */
static void part_left(struct pcc_channel *channel, struct pcc_channel_save *save)
{
    if (--save->pulls > 0)
        return;
    pcc_channel_map_put(channel, save->map);
    save->map = NULL;
    if (channel->pull.unused != NULL && channel->attached) /* the drain thread closes it */
        pcc_bell_ring(&channel->view.page->daemon_bell);
}

static void on_ended(struct pcc_gpu_job *job)
{
    struct pcc_channel_part *part = part_of(job);
    struct pcc_channel *channel = part->channel;

    pcc_channel_lock(channel);
    part_unlink(channel, part, part->next);
    part_left(channel, part->save);
    (void)pthread_cond_broadcast(&channel->pull.part_ended);
    pcc_channel_unlock(channel);
    free(part);
}

static const struct pcc_gpu_calls calls = {
    .next = on_next, .done = on_done, .lost = on_lost, .ended = on_ended};

/* -- begin and end -- */

static bool has_lost(const struct pcc_channel_map *map)
{
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        if (map->gpus[device] != NULL && pcc_gpu_is_lost(map->gpus[device]))
            return true;
    return false;
}

int pcc_channel_pull_prepare(struct pcc_channel *channel, uint64_t map_number,
                             const struct pcc_save_request *request, struct pcc_channel_part **out)
{
    struct pcc_channel_map *map = channel->pull.map;
    struct pcc_channel_part *parts = NULL;

    if (map == NULL || map->number != map_number)
        return -PCC_E_BAD_HANDLE;
    if (has_lost(map))
        return -PCC_E_DEVICE_LOST;
    /* What follows the device part is the client's, the tree always. */
    if (map->view.head.device_bytes > request->tree_offset_bytes ||
        map->view.head.device_bytes > request->payload_bytes)
        return -EINVAL;
    for (uint32_t device = 0; device < PCC_DEVICES; device++) {
        if (map->view.chunks[device] == 0)
            continue;
        struct pcc_channel_part *part = calloc(1, sizeof(*part));
        if (part == NULL) {
            pcc_channel_pull_drop(parts);
            return -ENOMEM;
        }
        *part = (struct pcc_channel_part){.job = {.calls = &calls},
                                          .channel = channel,
                                          .next = parts,
                                          .map = map,
                                          .device = device,
                                          .left = map->view.chunks[device],
                                          .chunk = -1};
        parts = part;
    }
    *out = parts;
    return 0;
}

void pcc_channel_pull_drop(struct pcc_channel_part *parts)
{
    while (parts != NULL) {
        struct pcc_channel_part *next = parts->next;
        free(parts);
        parts = next;
    }
}

void pcc_channel_pull_start(struct pcc_channel *channel, struct pcc_channel_save *save,
                            struct pcc_channel_part *parts)
{
    if (parts == NULL)
        return;
    struct pcc_channel_map *map = parts->map;
    map->holders++;
    save->map = map;
    save->device_bytes = map->view.head.device_bytes;
    save->devices = map->view.devices;
    const uint32_t chunks = (uint32_t)(save->device_bytes / channel->spec.chunk_bytes);
    save->wanted -= chunks;
    channel->missing -= chunks;
    while (parts != NULL) {
        struct pcc_channel_part *part = parts;
        parts = part->next;
        part->save = save;
        part->next = channel->pull.parts;
        channel->pull.parts = part;
        save->pulls++;
        pcc_gpu_job_start(map->gpus[part->device], &part->job);
    }
}

/* Maps that a GPU which never answered may still read through, for as long as the process lives. */
static struct {
    pthread_mutex_t lock;
    struct pcc_channel_map *first;
} left_behind = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void map_leave(struct pcc_channel_map *map)
{
    if (map->left_behind)
        return;
    map->left_behind = true;
    map->holders++; /* so that nobody closes it */
    (void)pthread_mutex_lock(&left_behind.lock);
    map->next = left_behind.first;
    left_behind.first = map;
    (void)pthread_mutex_unlock(&left_behind.lock);
}

/* With the lock held: the GPU has not ended its copies in time, and nobody waits for it any more.
 * Its chunks and its mappings stay as they are, for ever. */
static void part_orphan(struct pcc_channel *channel, struct pcc_channel_part *part)
{
    struct pcc_channel_map *map = part->map;
    struct pcc_channel_save *save = part->save;
    struct pcc_channel_part *next = part->next; /* read while the part is ours */
    struct pcc_gpu *gpu = map->gpus[part->device];

    pcc_gpu_lose(gpu);
    if (!pcc_gpu_job_orphan(gpu, &part->job))
        return; /* it is being called just now */
    part_unlink(channel, part, next);
    for (uint32_t i = 0; i < channel->chunk_count; i++)
        if (channel->chunks[i].state == PCC_CHUNK_PULLED && channel->chunks[i].tag == save->tag)
            pcc_channel_chunk_set(channel, &channel->chunks[i], PCC_CHUNK_LOST);
    map_leave(map);
    part_left(channel, save);
}

static void wait_until(struct pcc_channel *channel, uint64_t deadline_ns)
{
    const struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                                   .tv_nsec = (long)(deadline_ns % 1000000000u)};

    (void)pthread_cond_timedwait(&channel->pull.part_ended, &channel->lock, &until);
}

void pcc_channel_pull_end(struct pcc_channel *channel)
{
    if (channel->gpus == NULL)
        return;
    pcc_channel_lock(channel);
    if (channel->pull.map != NULL)
        pcc_channel_map_put(channel, channel->pull.map);
    channel->pull.map = NULL;
    uint64_t deadline_ns = pcc_now_ns() + channel->pull.limit_ns;
    while (channel->pull.parts != NULL) {
        wait_until(channel, deadline_ns);
        if (pcc_now_ns() < deadline_ns)
            continue;
        for (struct pcc_channel_part *part = channel->pull.parts, *next; part != NULL;
             part = next) {
            next = part->next;
            part_orphan(channel, part);
        }
        deadline_ns = pcc_now_ns() + ORPHAN_RETRY_NS;
    }
    pcc_channel_unlock(channel);
    pcc_process_close(&channel->pull.trainer);
    pcc_channel_maps_close(channel);
}
