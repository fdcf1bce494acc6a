/* Filling chunks and handing them over. Host memory is copied and checksummed in one pass, block by
 * block, or only checksummed where it is (pcc_client_offer.c); a chunk that a GPU fills
 * (pcc_client_push.c) is checksummed when it has landed. */
#include <string.h>

#include "base/pcc_copy.h"
#include "base/pcc_guard.h"
#include "base/pcc_hash.h"
#include "client/pcc_client_private.h"
#include "shared/pcc_sample.h"

#define PIECE_BYTES 65536u /* between two looks at whether to stop */

bool pcc_client_copying(const struct pcc_client *client)
{
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        const struct pcc_job *job = &client->jobs[i];
        if (job->snapshot != 0 && pcc_client_open_word(client, job->snapshot))
            return true;
    }
    return false;
}

/* The source that holds the payload at offset_bytes; NULL: there are zeros. *length_bytes is cut to
 * what the source, or the gap, has from there on. */
static const struct pcc_source *source_at(const struct pcc_job *job, uint64_t *cursor,
                                          uint64_t offset_bytes, uint64_t *length_bytes)
{
    while (*cursor < job->source_count &&
           pcc_range_end(&job->sources[*cursor].range) <= offset_bytes)
        ++*cursor;
    if (*cursor == job->source_count)
        return NULL;
    const struct pcc_source *source = &job->sources[*cursor];
    const bool inside = source->range.offset_bytes <= offset_bytes;
    const uint64_t end = inside ? pcc_range_end(&source->range) : source->range.offset_bytes;
    if (*length_bytes > end - offset_bytes)
        *length_bytes = end - offset_bytes;
    return inside ? source : NULL;
}

static uint64_t address_at(const struct pcc_source *source, uint64_t offset_bytes)
{
    return source->range.address + (offset_bytes - source->range.offset_bytes);
}

CUresult pcc_client_gather(const struct pcc_job *job, uint64_t *cursor, uint8_t *out,
                           uint64_t offset_bytes, uint64_t length_bytes,
                           const struct pcc_client_device *device)
{
    CUresult result = CUDA_SUCCESS;

    while (length_bytes > 0 && result == CUDA_SUCCESS) {
        uint64_t count = length_bytes;
        const struct pcc_source *source = source_at(job, cursor, offset_bytes, &count);
        if (source == NULL)
            memset(out, 0, count);
        else if (source->device == PCC_HOST)
            memcpy(out, (const void *)(uintptr_t)address_at(source, offset_bytes), count);
        else
            result = device->gpu.cuda->copy_to_host(out, address_at(source, offset_bytes), count,
                                                    device->copy);
        out += count;
        offset_bytes += count;
        length_bytes -= count;
    }
    return result;
}

/* What the next chunk is made of. */
static struct pcc_part part_next(const struct pcc_client *client, const struct pcc_job *job)
{
    struct pcc_part part = {.length_bytes = pcc_piece_bytes(job->payload_bytes, job->filled_bytes,
                                                            client->view.geometry.chunk_bytes),
                            .device = PCC_HOST};

    for (uint64_t i = job->cursor; i < job->source_count; i++) {
        const struct pcc_source *source = &job->sources[i];
        if (source->range.offset_bytes >= job->filled_bytes + part.length_bytes)
            break;
        if (source->device == PCC_HOST || pcc_range_end(&source->range) <= job->filled_bytes)
            continue;
        part.device = source->device;
        part.pieces++;
    }
    return part;
}

static void pad(uint8_t *bytes, uint64_t length_bytes)
{
    memset(bytes + length_bytes, 0, pcc_align_up(length_bytes, PCC_IO_ALIGN) - length_bytes);
}

struct filling { /* of one chunk, perhaps by several threads */
    const struct pcc_client *client;
    const struct pcc_job *job;
    uint8_t *bytes; /* NULL: it is only read */
    uint64_t *checksums;
    uint64_t offset_bytes;
    uint64_t length_bytes;
    bool guarded;
    _Atomic bool stopped;
    _Atomic int error; /* memory of the trainer was not there, and where: */
    _Atomic uint64_t fault;
};

static void copy_piece(void *hash, void *to, const void *from, uint64_t length_bytes)
{
    if (to == NULL)
        pcc_hash_add(hash, from, length_bytes);
    else
        pcc_copy_hashed(to, from, length_bytes, hash);
}

static void fail(struct filling *filling, int error, uint64_t fault)
{
    PCC_WRITE(&filling->fault, fault);
    PCC_WRITE(&filling->error, error);
    PCC_WRITE(&filling->stopped, true);
}

/* As pcc_client_gather, of host memory, with a checksum: [at, end) of the chunk. The trainer may
 * have freed its memory: without a guard the kernel reads it. */
static void digest(struct filling *filling, struct pcc_guard *guard, uint64_t *cursor,
                   struct pcc_hash *hash, uint64_t at, uint64_t end)
{
    static const uint8_t zeros[4096];
    struct pcc_guarded piece = {.copy = copy_piece, .context = hash};
    uint64_t fault;

    for (; at < end; at += piece.length) {
        piece.length = end - at;
        const struct pcc_source *source =
            source_at(filling->job, cursor, filling->offset_bytes + at, &piece.length);
        piece.from = zeros;
        if (source != NULL)
            piece.from = (const void *)(uintptr_t)address_at(source, filling->offset_bytes + at);
        else if (piece.length > sizeof zeros)
            piece.length = sizeof zeros;
        piece.to = filling->bytes != NULL ? filling->bytes + at : NULL;
        if (guard != NULL) {
            pcc_guard_expect(guard, &piece);
            copy_piece(hash, piece.to, piece.from, piece.length);
            continue;
        }
        const int error = pcc_guard_copy_slowly(&piece, &fault);
        if (error != 0) {
            fail(filling, error, fault);
            return;
        }
    }
}

static uint64_t source_from(const struct pcc_job *job, uint64_t offset_bytes)
{
    return pcc_range_find(&job->sources->range, sizeof *job->sources, job->source_count,
                          offset_bytes);
}

/* Relaxed: the thread that sets job->stop then waits for `busy` under the lock. */
static bool stops(struct filling *filling)
{
    if (PCC_READ(&filling->job->stop) || PCC_READ(&filling->client->stop) ||
        pcc_client_ended(filling->client))
        PCC_WRITE(&filling->stopped, true);
    return PCC_READ(&filling->stopped);
}

struct block {
    struct filling *filling;
    uint64_t number;
};

static void read_block(void *context, struct pcc_guard *guard)
{
    const struct block *block = context;
    struct filling *filling = block->filling;
    const uint64_t block_bytes = filling->client->view.geometry.block_bytes;
    const uint64_t start = block->number * block_bytes;
    const uint64_t end = start + pcc_piece_bytes(filling->length_bytes, start, block_bytes);
    uint64_t cursor = source_from(filling->job, filling->offset_bytes + start);
    struct pcc_hash hash;

    pcc_hash_start(&hash);
    for (uint64_t at = start; at < end; at += PIECE_BYTES) {
        if (stops(filling))
            return;
        digest(filling, guard, &cursor, &hash, at, at + pcc_piece_bytes(end, at, PIECE_BYTES));
    }
    filling->checksums[block->number] = pcc_hash_end(&hash);
}

static void fill_block(void *context, uint64_t number)
{
    struct block block = {.filling = context, .number = number};
    uint64_t fault;

    if (!block.filling->guarded)
        read_block(&block, NULL);
    else if (pcc_guard_run(read_block, &block, &fault) != 0)
        fail(block.filling, -EFAULT, fault);
}

/* A piece of the payload, of host memory: 1; 0 when it was stopped half-way; else why it cannot be
 * read. With `helped` the crew shares the work: a thread of the trainer waits, so its CPU is free.
 * While training runs, the helpers would take CPUs that training uses. They never use all CPUs,
 * because other trainers, loaders and the daemon's writers have work, too. */
static int fill(struct pcc_client *client, struct filling *filling, bool helped)
{
    const uint64_t blocks = pcc_ceil_div(filling->length_bytes, client->view.geometry.block_bytes);

    filling->guarded = pcc_guard_ready();
    pcc_crew_run(&client->crew, helped ? pcc_crew_half(&client->crew) : 0, blocks, fill_block,
                 filling);
    if (PCC_READ(&filling->stopped))
        return PCC_READ(&filling->error);
    if (filling->bytes != NULL)
        pad(filling->bytes, filling->length_bytes);
    return 1;
}

/* Oldest first, among those that the daemon has admitted and that something can be done for. */
static struct pcc_job *job_next(struct pcc_client *client, enum pcc_turn *turn_out,
                                struct pcc_offer **offer_out)
{
    struct pcc_job *best = NULL;
    struct pcc_offer *offer = NULL;

    *turn_out = PCC_TURN_NONE;
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &client->jobs[i];
        const uint32_t state = PCC_READ(&job->state);
        if (state != PCC_JOB_SUBMITTED && state != PCC_JOB_READ)
            continue;
        if (!pcc_client_open_word(client, job->snapshot)) { /* refused */
            pcc_client_release_streams(client, job);
            pcc_client_job_end(job);
            pcc_bell_ring(&client->view.page->client_bell);
        } else if (pcc_page_word(&client->view, job->snapshot) ==
                       pcc_word(job->snapshot, PCC_WORD_COPYING) &&
                   (best == NULL || job->snapshot < best->snapshot)) {
            enum pcc_turn turn = PCC_TURN_NONE;
            if (job->image == NULL)
                turn = pcc_client_turn(client, job, &offer);
            else if (pcc_client_image_turn(client, job))
                turn = PCC_TURN_FILL;
            if (turn == PCC_TURN_NONE)
                continue;
            best = job;
            *turn_out = turn;
            *offer_out = offer;
        }
    }
    return best;
}

void pcc_client_job_note(struct pcc_client *client, struct pcc_job *job)
{
    _Atomic uint32_t *bell = &client->view.page->client_bell;

    if (PCC_READ(&job->state) == PCC_JOB_SUBMITTED) {
        /* Release pairs with the acquires in pcc_client_wait: our reads came before the update that
         * the trainer makes now. */
        if (job->filled_bytes >= job->host_bytes && job->offers == 0 &&
            !PCC_READ(&job->host_read)) {
            PCC_WRITE_RELEASE(&job->host_read, true);
            pcc_bell_ring(bell);
        }
        if (job->filled_bytes >= job->trainer_bytes && job->flying == 0 && job->offers == 0) {
            PCC_WRITE_RELEASE(&job->state, PCC_JOB_READ);
            pcc_bell_ring(bell);
        }
    }
    if (job->left_bytes == 0)
        pcc_client_job_end(job);
}

/* With lock held; the last chunk of a provisional snapshot is kept. False when the daemon broke the
 * protocol. */
static bool hand_over(struct pcc_client *client, struct pcc_job *job,
                      const struct pcc_message *full)
{
    if (job->provisional && job->left_bytes == full->length_bytes) {
        job->last = *full;
        job->kept = true;
        job->flights++;
        client->kept++;
        return true;
    }
    client->held[full->chunk] = false;
    if (!pcc_client_tell(client, full))
        return false;
    job->left_bytes -= full->length_bytes;
    return true;
}

/* Last chunks that were kept go to the daemon, or come back when their snapshot was given up. As
 * pcc_client_work. */
static int release_kept(struct pcc_client *client)
{
    int moved = 0;

    if (client->kept == 0)
        return 0;
    PCC_LOCKED(&client->lock);
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &client->jobs[i];
        const bool over =
            PCC_READ(&job->state) == PCC_JOB_ENDED || !pcc_client_open_word(client, job->snapshot);
        if (!job->kept || (job->provisional && !over))
            continue;
        moved = 1;
        job->kept = false;
        job->flights--;
        client->kept--;
        if (over) {
            client->free_chunks[client->free_count++] = job->last.chunk;
            continue;
        }
        if (!hand_over(client, job, &job->last))
            return -1;
        pcc_client_job_note(client, job);
    }
    return moved;
}

/* -- chunks that a GPU fills -- */

/* With lock held: the chunk is on its way, and no longer one that can be filled. */
static void take_off(struct pcc_client *client, struct pcc_job *job, uint32_t chunk,
                     const struct pcc_part *part)
{
    struct pcc_flight *flight = &client->flights[chunk];

    flight->job = job;
    flight->offset_bytes = job->filled_bytes;
    flight->length_bytes = (uint32_t)part->length_bytes;
    flight->pieces = part->pieces;
    client->free_count--;
    client->devices[part->device].pieces += part->pieces;
    client->devices[part->device].flying_bytes += part->length_bytes;
    pcc_client_list_add(client, &client->devices[part->device].flying, chunk);
    job->flying++;
    job->flights++;
}

/* With lock held, after the chunk's copies were enqueued. */
static void part_done(struct pcc_client *client, struct pcc_job *job, const struct pcc_part *part)
{
    job->filled_bytes += part->length_bytes;
    if (part->device == PCC_HOST)
        job->cursor = source_from(job, job->filled_bytes);
    if (part->device != PCC_HOST && job->filled_bytes >= job->devices[part->device].end_bytes) {
        job->devices[part->device].enqueued = true;
        pcc_bell_ring(&client->view.page->client_bell); /* for a thread in hold */
    }
}

/* With lock held and the job not busy: this side abandons it. */
static void give_up(struct pcc_client *client, struct pcc_job *job, int error)
{
    if (!pcc_client_job_abandon(client, job, error))
        return;
    pcc_client_job_end(job);
    pcc_bell_ring(&client->view.page->daemon_bell);
    pcc_bell_ring(&client->view.page->client_bell);
}

/* Whether a chunk that GPUs have filled may be handed over. The update that has withdrawn a
 * snapshot on the device may have come before the copy: the daemon does not keep such a one. */
static bool is_right(const struct pcc_client *client, const struct pcc_flight *flight,
                     uint32_t chunk)
{
    const uint64_t snapshot = flight->job->snapshot;

    if (pcc_samples_agree(&client->view, snapshot, client->chunk_at[chunk], flight->offset_bytes,
                          flight->length_bytes))
        return true;
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        if (PCC_READ(&pcc_page_words(&client->view, snapshot, i)->withdrawn) >= snapshot)
            return true;
    }
    return false;
}

/* The oldest landed chunk goes to the daemon, whose writers make its checksums: they would keep
 * this thread from the next copies, and the trainer's CPU from training. As pcc_client_work. */
static int finish_one(struct pcc_client *client)
{
    const uint32_t chunk = client->landed.first;

    if (chunk == PCC_NO_CHUNK)
        return 0;
    const struct pcc_flight *flight = &client->flights[chunk];
    struct pcc_job *job = flight->job;
    (void)pcc_client_list_take(client, &client->landed);
    const bool right = is_right(client, flight, chunk);
    pad(client->chunk_at[chunk], flight->length_bytes);
    PCC_LOCKED(&client->lock);
    if (!right)
        give_up(client, job, -PCC_E_OTHER_BYTES);
    const uint32_t state = PCC_READ(&job->state);
    job->flights--;
    if ((state != PCC_JOB_SUBMITTED && state != PCC_JOB_READ) || PCC_READ(&job->stop)) {
        client->free_chunks[client->free_count++] = chunk; /* given up: the chunk stays ours */
        return 1;
    }
    const struct pcc_message full = {.kind = PCC_MSG_FULL,
                                     .chunk = chunk,
                                     .id = job->snapshot,
                                     .offset_bytes = flight->offset_bytes,
                                     .length_bytes = flight->length_bytes,
                                     .result = PCC_FULL_BARE};
    if (!hand_over(client, job, &full))
        return -1;
    pcc_client_job_note(client, job);
    return 1;
}

/* -- one step -- */

/* With lock held: a piece of host memory was read. As hand_over. */
static bool piece_done(struct pcc_client *client, struct pcc_job *job, enum pcc_turn turn,
                       struct pcc_offer *offer, const struct pcc_part *part)
{
    if (turn == PCC_TURN_OFFER)
        return pcc_client_offer_make(client, job, offer, part->length_bytes);
    const bool wanted = turn == PCC_TURN_WANTED;
    const struct pcc_message full = {.kind = PCC_MSG_FULL,
                                     .chunk = client->free_chunks[--client->free_count],
                                     .id = job->snapshot,
                                     .offset_bytes =
                                         wanted ? offer->offset_bytes : job->filled_bytes,
                                     .length_bytes = (uint32_t)part->length_bytes,
                                     .result = PCC_FULL_HASHED};
    if (wanted)
        pcc_client_offer_done(offer);
    return hand_over(client, job, &full);
}

/* As fill. */
static int read_piece(struct pcc_client *client, struct pcc_job *job, enum pcc_turn turn,
                      const struct pcc_offer *offer, uint64_t length_bytes, bool helped)
{
    struct filling filling = {.client = client, .job = job, .length_bytes = length_bytes};

    filling.offset_bytes = turn == PCC_TURN_WANTED ? offer->offset_bytes : job->filled_bytes;
    if (turn == PCC_TURN_OFFER) {
        filling.checksums = pcc_client_offer_checksums(client, offer);
    } else {
        const uint32_t chunk = client->free_chunks[client->free_count - 1];
        filling.bytes = client->chunk_at[chunk];
        filling.checksums = pcc_page_checksums(&client->view, chunk);
    }
    const int result = fill(client, &filling, helped);
    if (result < 0)
        job->fault = PCC_READ(&filling.fault);
    return result;
}

/* Fills one chunk, or has it filled: 2. Else as pcc_client_work. */
static int fill_one(struct pcc_client *client)
{
    bool whole = true, taken = false;
    enum pcc_turn turn;
    struct pcc_offer *offer = NULL;

    (void)pthread_mutex_lock(&client->lock);
    struct pcc_job *job = job_next(client, &turn, &offer);
    if (job == NULL) {
        (void)pthread_mutex_unlock(&client->lock);
        return 0;
    }
    job->busy = true;
    const bool helped = client->waiters > 0;
    (void)pthread_mutex_unlock(&client->lock);
    if (job->image != NULL)
        return pcc_client_image_work(client, job);

    const uint32_t chunk =
        turn == PCC_TURN_OFFER ? PCC_NO_CHUNK : client->free_chunks[client->free_count - 1];
    const struct pcc_part part =
        turn == PCC_TURN_WANTED
            ? (struct pcc_part){.length_bytes = offer->length_bytes, .device = PCC_HOST}
            : part_next(client, job);
    const int result = part.device == PCC_HOST
                           ? read_piece(client, job, turn, offer, part.length_bytes, helped)
                           : pcc_client_enqueue(client, job, chunk, &part, &taken);

    PCC_LOCKED(&client->lock);
    if (taken)
        take_off(client, job, chunk, &part);
    /* A stop that came after the last piece: the chunk stays ours. */
    if (result > 0 && !PCC_READ(&job->stop)) {
        if (part.device == PCC_HOST)
            whole = piece_done(client, job, turn, offer, &part);
        if (turn != PCC_TURN_WANTED)
            part_done(client, job, &part);
        if (whole)
            pcc_client_job_note(client, job);
    }
    job->busy = false;
    if (result < 0)
        give_up(client, job, result);
    (void)pthread_cond_broadcast(&client->idle);
    if (result == 0 && part.device != PCC_HOST)
        client->polling = true;
    if (!whole)
        return -1;
    return taken ? 2 : result != 0;
}

/* Collects what each GPU has filled and read by now. As pcc_client_work. */
static int devices_land(struct pcc_client *client)
{
    int result = 0;

    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_client_device *device = pcc_client_device(client, i);
        if (device == NULL ||
            (device->flying.first == PCC_NO_CHUNK && device->loading.first == PCC_NO_CHUNK))
            continue;
        client->polling = true;
        if (PCC_READ(&client->armed)) { /* it is not asked */
            device->progress_ns = device->load_progress_ns = pcc_now_ns();
            continue;
        }
        const int filled =
            device->flying.first != PCC_NO_CHUNK ? pcc_client_land(client, device) : 0;
        if (filled < 0)
            return -1;
        const int read =
            device->loading.first != PCC_NO_CHUNK ? pcc_client_load_land(client, device) : 0;
        if (read < 0)
            return -1;
        result |= filled | read;
    }
    return result;
}

int pcc_client_work(struct pcc_client *client)
{
    client->polling = false;
    pcc_client_images_release(client, false);
    const int released = release_kept(client);
    if (released < 0)
        return -1;
    const int landed = devices_land(client);
    if (landed < 0)
        return -1;
    const int filled = fill_one(client);
    if (filled < 0)
        return -1;
    /* The GPU first gets all copies that it can take: it works beside this thread, and hold waits
     * until the last one is enqueued. */
    if (filled == 2)
        return 1;
    const int finished = finish_one(client);
    if (finished < 0)
        return -1;
    if (released > 0 || landed > 0 || filled > 0 || finished > 0)
        return 1;
    return pcc_client_pin_ahead(client);
}
