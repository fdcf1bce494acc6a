/* The link's thread: chunks are filled here, copy and checksum in one pass over the cache. */
#include <string.h>

#include "pcc_futex.h"
#include "pcc_hash.h"
#include "pcc_link_private.h"

#define PIECE_BYTES 65536u /* copied, then hashed while it is in the second-level cache */
#define BUSY_NS 100000000u /* something is outstanding: look for a hang-up this often */
#define IDLE_NS 1000000000u

bool pcc_link_copying(const struct pcc_link *link)
{
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        const struct pcc_job *job = &link->jobs[i];
        if (job->snapshot != 0 && pcc_link_open_word(link, job->snapshot))
            return true;
    }
    return false;
}

/* Payload [offset, offset+length) into `out`: bytes of the sources, zeros between them. */
static void gather(struct pcc_job *job, uint8_t *out, uint64_t offset_bytes, uint64_t length_bytes)
{
    while (length_bytes > 0) {
        const struct pcc_source *source = &job->sources[job->cursor];
        uint64_t count = length_bytes;
        if (job->cursor == job->source_count) {
            memset(out, 0, count);
        } else if (offset_bytes < source->offset_bytes) {
            if (count > source->offset_bytes - offset_bytes)
                count = source->offset_bytes - offset_bytes;
            memset(out, 0, count);
        } else {
            const uint64_t into = offset_bytes - source->offset_bytes;
            if (into >= source->length_bytes) {
                job->cursor++;
                continue;
            }
            if (count > source->length_bytes - into)
                count = source->length_bytes - into;
            memcpy(out, source->bytes + into, count);
        }
        out += count;
        offset_bytes += count;
        length_bytes -= count;
    }
}

/* The next chunk of the payload. False when it was told to stop half-way. */
static bool fill(const struct pcc_link *link, struct pcc_job *job, uint32_t chunk,
                 uint64_t length_bytes)
{
    const struct pcc_page_geometry *geometry = &link->view.geometry;
    uint8_t *out = link->chunk_at[chunk];
    uint64_t *checksums = link->view.checksums + (size_t)chunk * geometry->blocks_per_chunk;
    struct pcc_hash hash;

    for (uint64_t block = 0; block < length_bytes; block += geometry->block_bytes) {
        const uint64_t left = length_bytes - block;
        const uint64_t end = block + (left < geometry->block_bytes ? left : geometry->block_bytes);
        pcc_hash_start(&hash);
        for (uint64_t at = block; at < end; at += PIECE_BYTES) {
            const uint64_t count = end - at < PIECE_BYTES ? end - at : PIECE_BYTES;
            /* Relaxed: who sets it then waits for `busy` under the lock. */
            if (atomic_load_explicit(&job->stop, memory_order_relaxed) ||
                atomic_load_explicit(&link->stop, memory_order_relaxed))
                return false;
            gather(job, out + at, job->next_bytes + at, count);
            pcc_hash_add(&hash, out + at, count);
        }
        checksums[block / geometry->block_bytes] = pcc_hash_end(&hash);
    }
    memset(out + length_bytes, 0, pcc_align_up(length_bytes, PCC_IO_ALIGN) - length_bytes);
    return true;
}

/* Oldest first, among those that the daemon has admitted. */
static struct pcc_job *job_next(struct pcc_link *link)
{
    struct pcc_job *best = NULL;

    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &link->jobs[i];
        const uint32_t state = atomic_load_explicit(&job->state, memory_order_relaxed);
        if (state != PCC_JOB_SUBMITTED && state != PCC_JOB_READ)
            continue;
        if (!pcc_link_open_word(link, job->snapshot)) { /* refused */
            pcc_link_job_end(job);
            pcc_bell_ring(&link->view.page->client_bell);
        } else if (pcc_link_word(link, job->snapshot) ==
                       pcc_word(job->snapshot, PCC_WORD_COPYING) &&
                   (best == NULL || job->snapshot < best->snapshot)) {
            best = job;
        }
    }
    return best;
}

/* With the lock held, after a chunk of `job` was handed over. */
static void job_advance(struct pcc_link *link, struct pcc_job *job, uint64_t length_bytes)
{
    struct pcc_page *page = link->view.page;
    const uint32_t state = atomic_load_explicit(&job->state, memory_order_relaxed);

    job->next_bytes += length_bytes;
    if (state == PCC_JOB_SUBMITTED && job->next_bytes >= job->trainer_bytes) {
        /* Release pairs with the acquire in pcc_link_wait: our reads came before the update that
         * the trainer makes now. */
        atomic_store_explicit(&job->state, PCC_JOB_READ, memory_order_release);
        if (job->snapshot > atomic_load_explicit(&page->done, memory_order_relaxed))
            atomic_store_explicit(&page->done, job->snapshot, memory_order_release);
        pcc_bell_ring(&page->client_bell);
    }
    if (job->next_bytes == job->payload_bytes)
        pcc_link_job_end(job);
}

static bool hand_over(struct pcc_link *link, const struct pcc_message *message)
{
    if (pcc_ring_push(&link->view.to_daemon, message) != 0)
        return false;
    pcc_bell_ring(&link->view.page->daemon_bell);
    return true;
}

/* Fills one chunk: 1. Nothing to do: 0. The daemon broke the protocol: -1. */
static int fill_one(struct pcc_link *link)
{
    const uint64_t chunk_bytes = link->view.geometry.chunk_bytes;
    int result = 1;

    (void)pthread_mutex_lock(&link->lock);
    struct pcc_job *job = job_next(link);
    if (job == NULL || link->free_count == 0) {
        (void)pthread_mutex_unlock(&link->lock);
        return 0;
    }
    job->busy = true;
    (void)pthread_mutex_unlock(&link->lock);

    const uint32_t chunk = link->free_chunks[link->free_count - 1];
    const uint64_t left = job->payload_bytes - job->next_bytes;
    const uint64_t length = left < chunk_bytes ? left : chunk_bytes;
    const bool filled = fill(link, job, chunk, length);
    const struct pcc_message message = {.kind = PCC_MSG_FULL,
                                        .chunk = chunk,
                                        .id = job->snapshot,
                                        .offset_bytes = job->next_bytes,
                                        .length_bytes = (uint32_t)length};

    (void)pthread_mutex_lock(&link->lock);
    /* A stop that came after the last piece: the chunk stays ours. */
    if (filled && !atomic_load_explicit(&job->stop, memory_order_relaxed)) {
        link->free_count--;
        link->held[chunk] = false;
        if (hand_over(link, &message))
            job_advance(link, job, length);
        else
            result = -1;
    }
    job->busy = false;
    (void)pthread_cond_broadcast(&link->idle);
    (void)pthread_mutex_unlock(&link->lock);
    return result;
}

static bool take_free(struct pcc_link *link, uint32_t chunk)
{
    if (chunk >= link->view.geometry.chunk_capacity)
        return false;
    /* Its segment was sent before the message, but the socket was read before that. */
    if (link->chunk_at[chunk] == NULL &&
        (!pcc_link_take_grants(link) || link->chunk_at[chunk] == NULL))
        return false;
    if (link->held[chunk])
        return false;
    link->held[chunk] = true;
    link->free_chunks[link->free_count++] = chunk;
    return true;
}

static bool take_message(struct pcc_link *link, const struct pcc_message *message)
{
    struct pcc_message answer = {.kind = PCC_MSG_TAKEN, .chunk = message->chunk, .id = message->id};

    switch (message->kind) {
    case PCC_MSG_FREE:
        return take_free(link, message->chunk);
    case PCC_MSG_DATA:
        if (message->chunk >= link->view.geometry.chunk_capacity ||
            message->length_bytes > link->view.geometry.chunk_bytes ||
            (link->chunk_at[message->chunk] == NULL &&
             (!pcc_link_take_grants(link) || link->chunk_at[message->chunk] == NULL)))
            return false;
        pcc_link_take_data(link, message);
        return hand_over(link, &answer);
    case PCC_MSG_END:
        pcc_link_take_end(link, message);
        return true;
    default:
        return false;
    }
}

static bool take_messages(struct pcc_link *link)
{
    struct pcc_message message;
    int result;

    while ((result = pcc_ring_pop(&link->view.to_client, &message)) > 0) {
        if (atomic_load_explicit(&link->stop, memory_order_relaxed))
            return true;
        if (!take_message(link, &message))
            return false;
    }
    return result == 0;
}

/* A load must not wait for chunks that lie idle here. */
static bool give_back(struct pcc_link *link)
{
    (void)pthread_mutex_lock(&link->lock);
    const bool wanted = link->load.active && !link->load.ended && !pcc_link_copying(link);
    (void)pthread_mutex_unlock(&link->lock);
    while (wanted && link->free_count > 0) {
        const uint32_t chunk = link->free_chunks[--link->free_count];
        const struct pcc_message message = {.kind = PCC_MSG_TAKEN, .chunk = chunk};
        link->held[chunk] = false;
        if (!hand_over(link, &message))
            return false;
    }
    return true;
}

/* Nobody listens any more: everything outstanding ends here. */
static void hang_up(struct pcc_link *link)
{
    (void)pthread_mutex_lock(&link->lock);
    atomic_store_explicit(&link->dead, true, memory_order_release); /* pairs with the waits */
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &link->jobs[i];
        if (job->snapshot == 0)
            continue;
        struct pcc_snapshot *entry = pcc_page_snapshot(&link->view, job->snapshot);
        if (pcc_word_move(entry, job->snapshot, PCC_WORD_REQUESTED, PCC_WORD_ABANDONED) ||
            pcc_word_move(entry, job->snapshot, PCC_WORD_COPYING, PCC_WORD_ABANDONED))
            job->hung_up = true;
        pcc_link_job_end(job);
    }
    (void)pthread_mutex_unlock(&link->lock);
    pcc_bell_ring(&link->view.page->client_bell);
}

void *pcc_link_run(void *argument)
{
    struct pcc_link *link = argument;
    _Atomic uint32_t *bell = &link->view.page->client_bell;

    for (;;) {
        const uint32_t rung = pcc_bell_read(bell);
        if (atomic_load_explicit(&link->stop, memory_order_acquire))
            return NULL;
        if (!pcc_link_take_grants(link) || !take_messages(link))
            break;
        const int filled = fill_one(link);
        if (filled < 0)
            break;
        if (filled > 0)
            continue;
        if (!give_back(link))
            break;
        (void)pthread_mutex_lock(&link->lock);
        const bool outstanding = pcc_link_copying(link) || (link->load.active && !link->load.ended);
        (void)pthread_mutex_unlock(&link->lock);
        pcc_futex_wait(bell, rung, outstanding ? BUSY_NS : IDLE_NS);
    }
    hang_up(link);
    return NULL;
}
