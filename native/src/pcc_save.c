#include "pcc_save.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pcc_save_private.h"
#include "pcc_thread.h"

static void lock(struct pcc_save *save)
{
    (void)pthread_mutex_lock(&save->lock);
}

static void unlock(struct pcc_save *save)
{
    (void)pthread_mutex_unlock(&save->lock);
}

/* -- opening and closing -- */

static void *run_lane(void *argument)
{
    struct pcc_lane *lane = argument;
    uint64_t item;

    while (pcc_queue_pop_wait(&lane->work, &item))
        pcc_save_work(lane, item);
    return NULL;
}

static uint64_t power_of_two_above(uint64_t value)
{
    uint64_t power = 2;

    while (power < value)
        power *= 2;
    return power;
}

static int lane_open(struct pcc_saver *saver, uint32_t number)
{
    struct pcc_lane *lane = &saver->lanes[number];

    lane->saver = saver;
    /* Every piece and one step of each place. */
    if (pcc_queue_init(&lane->work, power_of_two_above(PCC_SAVES_PER_LANE *
                                                       (saver->piece_capacity + 1ull))) != 0)
        return -ENOMEM;
    for (uint32_t place = 0; place < PCC_SAVES_PER_LANE; place++) {
        struct pcc_save *save = &lane->saves[place];
        save->lane = lane;
        save->place = place;
        (void)pthread_mutex_init(&save->lock, NULL);
        save->manifest = aligned_alloc(PCC_IO_ALIGN, saver->manifest_capacity_bytes);
        save->pieces = calloc(saver->piece_capacity, sizeof *save->pieces);
        if (!save->manifest || !save->pieces)
            return -ENOMEM;
        /* Touched now, not at the first checkpoint. */
        memset(save->manifest, 0, saver->manifest_capacity_bytes);
    }
    lane->threads = calloc(saver->spec.writers_per_lane + 1ull, sizeof *lane->threads);
    if (!lane->threads)
        return -ENOMEM;
    for (uint32_t i = 0; i < saver->spec.writers_per_lane; i++) {
        char name[16];
        (void)snprintf(name, sizeof name, "pcc-write-%u.%u", number % 100, i % 100);
        const int result = pcc_thread_start(&lane->threads[i], run_lane, lane, name);
        if (result != 0)
            return result;
        lane->thread_count++;
    }
    return 0;
}

static void lane_close(struct pcc_lane *lane)
{
    if (lane->thread_count > 0)
        pcc_queue_close(&lane->work);
    for (uint32_t i = 0; i < lane->thread_count; i++)
        (void)pthread_join(lane->threads[i], NULL);
    free(lane->threads);
    for (uint32_t place = 0; place < PCC_SAVES_PER_LANE; place++) {
        free(lane->saves[place].manifest);
        free(lane->saves[place].pieces);
        if (lane->saves[place].lane)
            (void)pthread_mutex_destroy(&lane->saves[place].lock);
    }
    pcc_queue_destroy(&lane->work);
}

static void saver_free(struct pcc_saver *saver)
{
    for (uint32_t i = 0; saver->lanes && i < saver->spec.lanes; i++)
        lane_close(&saver->lanes[i]);
    free(saver->lanes);
    (void)pthread_mutex_destroy(&saver->lock);
    (void)pthread_mutex_destroy(&saver->flushing);
    (void)pthread_cond_destroy(&saver->ended);
    free(saver);
}

int pcc_saver_open(struct pcc_volume *volume, const struct pcc_saver_spec *spec,
                   struct pcc_saver **out)
{
    const struct pcc_geometry geometry = pcc_volume_geometry(volume);
    struct pcc_saver *saver;
    int result = 0;

    if (spec->lanes == 0 || spec->lanes > PCC_SLOTS_MAX || spec->chunk_bytes == 0 ||
        spec->chunk_bytes % PCC_IO_ALIGN != 0 || spec->chunk_bytes % geometry.block_bytes != 0)
        return -EINVAL;
    const uint64_t pieces = pcc_ceil_div(geometry.slot_stride_bytes, spec->chunk_bytes);
    if (pieces > UINT32_MAX / PCC_SAVES_PER_LANE - 2)
        return -EINVAL;
    saver = calloc(1, sizeof *saver);
    if (!saver)
        return -ENOMEM;
    saver->volume = volume;
    saver->geometry = geometry;
    saver->spec = *spec;
    saver->piece_capacity = (uint32_t)pieces;
    saver->manifest_capacity_bytes =
        pcc_align_up(pcc_manifest_bytes(geometry.slot_stride_bytes, geometry.block_bytes),
                     PCC_IO_ALIGN);
    pcc_volume_record(volume, &saver->identity);
    (void)pthread_mutex_init(&saver->lock, NULL);
    (void)pthread_mutex_init(&saver->flushing, NULL);
    (void)pthread_cond_init(&saver->ended, NULL);
    saver->lanes = calloc(spec->lanes, sizeof *saver->lanes);
    if (!saver->lanes)
        result = -ENOMEM;
    for (uint32_t i = 0; result == 0 && i < spec->lanes; i++)
        result = lane_open(saver, i);
    if (result != 0) {
        saver_free(saver);
        return result;
    }
    *out = saver;
    return 0;
}

static bool has_places_in_use(const struct pcc_saver *saver)
{
    for (uint32_t i = 0; i < saver->spec.lanes; i++)
        for (uint32_t place = 0; place < PCC_SAVES_PER_LANE; place++)
            if (saver->lanes[i].saves[place].used)
                return true;
    return false;
}

static bool step_any(struct pcc_saver *saver)
{
    for (uint32_t i = 0; i < saver->spec.lanes; i++)
        if (pcc_saver_step(saver, i) == 0)
            return true;
    return false;
}

void pcc_saver_close(struct pcc_saver *saver)
{
    if (!saver)
        return;
    (void)pthread_mutex_lock(&saver->lock);
    saver->closing = true;
    (void)pthread_mutex_unlock(&saver->lock);
    for (uint32_t i = 0; i < saver->spec.lanes; i++)
        for (uint32_t place = 0; place < PCC_SAVES_PER_LANE; place++)
            pcc_save_abort(&saver->lanes[i].saves[place], -PCC_E_SHUT_DOWN);
    while (saver->spec.writers_per_lane == 0 && step_any(saver)) {
    }
    (void)pthread_mutex_lock(&saver->lock);
    while (has_places_in_use(saver)) {
        PCC_ASSERT(saver->spec.writers_per_lane > 0);
        (void)pthread_cond_wait(&saver->ended, &saver->lock);
    }
    (void)pthread_mutex_unlock(&saver->lock);
    saver_free(saver);
}

/* -- lanes -- */

/* A free lane with a free place, taken; NULL when there is none. */
static struct pcc_save *take_lane(struct pcc_saver *saver)
{
    struct pcc_save *found = NULL;

    (void)pthread_mutex_lock(&saver->lock);
    for (uint32_t i = 0; !found && !saver->closing && i < saver->spec.lanes; i++) {
        struct pcc_lane *lane = &saver->lanes[i];
        if (lane->current)
            continue;
        for (uint32_t place = 0; !found && place < PCC_SAVES_PER_LANE; place++)
            if (!lane->saves[place].used)
                found = &lane->saves[place];
    }
    if (found) {
        found->used = true;
        found->lane->current = found;
        saver->in_flight++;
    }
    (void)pthread_mutex_unlock(&saver->lock);
    return found;
}

void pcc_save_leave_lane(struct pcc_save *save)
{
    struct pcc_saver *saver = save->lane->saver;

    (void)pthread_mutex_lock(&saver->lock);
    PCC_ASSERT(save->lane->current == save && saver->in_flight > 0);
    save->lane->current = NULL;
    saver->in_flight--;
    (void)pthread_mutex_unlock(&saver->lock);
}

void pcc_save_leave_place(struct pcc_save *save)
{
    struct pcc_saver *saver = save->lane->saver;

    (void)pthread_mutex_lock(&saver->lock);
    save->used = false;
    (void)pthread_cond_broadcast(&saver->ended);
    (void)pthread_mutex_unlock(&saver->lock);
}

uint32_t pcc_saver_in_flight(struct pcc_saver *saver)
{
    (void)pthread_mutex_lock(&saver->lock);
    const uint32_t in_flight = saver->in_flight;
    (void)pthread_mutex_unlock(&saver->lock);
    return in_flight;
}

int pcc_saver_step(struct pcc_saver *saver, uint32_t lane)
{
    uint64_t item;

    PCC_ASSERT(saver->spec.writers_per_lane == 0 && lane < saver->spec.lanes);
    if (!pcc_queue_pop(&saver->lanes[lane].work, &item))
        return -EAGAIN;
    pcc_save_work(&saver->lanes[lane], item);
    return 0;
}

/* -- saves -- */

static void save_reset(struct pcc_save *save, const struct pcc_save_request *request,
                       uint64_t sequence, uint32_t slot)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint64_t manifest_bytes =
        pcc_manifest_bytes(request->payload_bytes, saver->geometry.block_bytes);

    lock(save);
    PCC_ASSERT(!save->active && !save->has_slot);
    save->request = *request;
    save->sequence = sequence;
    save->slot = slot;
    save->has_slot = true;
    save->piece_count = (uint32_t)pcc_ceil_div(request->payload_bytes, saver->spec.chunk_bytes);
    PCC_ASSERT(save->piece_count <= saver->piece_capacity);
    memset(save->pieces, 0, save->piece_count * sizeof *save->pieces);
    memset(save->manifest + manifest_bytes, 0,
           pcc_align_up(manifest_bytes, PCC_IO_ALIGN) - manifest_bytes);
    save->handed_over = save->written = save->uncached = save->pending = save->moves = 0;
    save->last_step = PCC_SAVE_STEP_NONE;
    save->sealed = save->superseded = save->slot_failed = save->slot_doubtful = false;
    save->durable = save->quarantined = save->failed = false;
    save->error = 0;
    save->stage = NULL;
    save->flush_failures =
        atomic_load_explicit(&save->lane->saver->flush_failures, memory_order_relaxed);
    save->entry = (struct pcc_slot_entry){
        .state = PCC_SLOT_DURABLE,
        .sequence = sequence,
        .step = request->step,
        .incarnation = request->incarnation,
        .payload_bytes = request->payload_bytes,
        .world_size = request->world_size,
        .tree_offset_bytes = request->tree_offset_bytes,
        .tree_bytes = request->tree_bytes,
    };
    save->times = (struct pcc_save_times){.begin = pcc_now_ns()};
    save->active = true;
    unlock(save);
}

int pcc_save_begin(struct pcc_saver *saver, const struct pcc_save_request *request,
                   struct pcc_save **out, uint64_t *sequence_out)
{
    uint32_t slot;

    if (request->payload_bytes == 0 || request->tree_offset_bytes > request->payload_bytes ||
        request->tree_bytes > request->payload_bytes - request->tree_offset_bytes)
        return -EINVAL;
    if (!pcc_geometry_fits(&saver->geometry, request->payload_bytes))
        return -PCC_E_TOO_LARGE;
    if (pcc_volume_stopped(saver->volume))
        return -PCC_E_STOPPED;
    struct pcc_save *save = take_lane(saver);
    if (!save)
        return -PCC_E_NO_LANE;
    const int result = pcc_volume_take_slot(saver->volume, &slot);
    if (result != 0) {
        pcc_save_leave_lane(save);
        pcc_save_leave_place(save);
        return result;
    }
    const uint64_t sequence = pcc_volume_next_sequence(saver->volume);
    save_reset(save, request, sequence, slot);
    *out = save;
    *sequence_out = sequence;
    return 0;
}

int pcc_save_chunk(struct pcc_save *save, const struct pcc_chunk *chunk)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint64_t chunk_bytes = saver->spec.chunk_bytes;
    const uint64_t payload_bytes = save->request.payload_bytes;
    const uint64_t offset = chunk->payload_offset_bytes;
    int result = -EINVAL;

    PCC_ASSERT((uintptr_t)chunk->bytes % PCC_IO_ALIGN == 0);
    if (offset % chunk_bytes != 0 || offset >= payload_bytes)
        return -EINVAL;
    const uint64_t left = payload_bytes - offset;
    if (chunk->length_bytes != (left < chunk_bytes ? left : chunk_bytes))
        return -EINVAL;
    const uint32_t position = (uint32_t)(offset / chunk_bytes);
    uint8_t *const checksums = save->manifest + sizeof(struct pcc_manifest_header) +
                               offset / saver->geometry.block_bytes * sizeof(uint64_t);
    lock(save);
    struct pcc_save_piece *piece = &save->pieces[position];
    if (!save->active) {
        result = -PCC_E_ABORTED;
    } else if (piece->state == PCC_SAVE_CHUNK_ABSENT && !save->sealed) {
        memcpy(checksums, chunk->checksums,
               pcc_ceil_div(chunk->length_bytes, saver->geometry.block_bytes) * sizeof(uint64_t));
        piece->bytes = chunk->bytes;
        piece->length_bytes = chunk->length_bytes;
        piece->index = chunk->index;
        piece->state = PCC_SAVE_CHUNK_HELD;
        save->handed_over++;
        /* On the way to another slot, the move itself queues what is here by then. */
        if (!save->failed && !save->slot_failed && !save->slot_doubtful)
            pcc_save_queue_piece(save, position);
        result = 0;
    }
    unlock(save);
    return result;
}

int pcc_save_seal(struct pcc_save *save)
{
    int result = 0;

    lock(save);
    if (!save->active) {
        result = -PCC_E_ABORTED;
    } else if (save->sealed || save->handed_over < save->piece_count) {
        result = -EINVAL;
    } else {
        save->sealed = true;
        save->times.sealed = pcc_now_ns();
        pcc_save_advance(save);
    }
    unlock(save);
    return result;
}

void pcc_save_abort(struct pcc_save *save, int error)
{
    lock(save);
    if (save->active && !save->sealed && !save->failed) {
        save->failed = true;
        save->error = error;
        save->stage = "copy";
        pcc_save_advance(save);
    }
    unlock(save);
}

/* With the save's lock held. */
static bool uncache_piece(struct pcc_save *save, uint32_t index)
{
    struct pcc_save_piece *piece = NULL;

    for (uint32_t i = 0; !piece && i < save->piece_count; i++)
        if (save->pieces[i].index == index && save->pieces[i].state != PCC_SAVE_CHUNK_ABSENT &&
            !save->pieces[i].uncached)
            piece = &save->pieces[i];
    if (!piece)
        return true;
    /* Not on the disk in the present slot, or not going to stay there: its bytes are needed. */
    if (piece->state != PCC_SAVE_CHUNK_WRITTEN || save->slot_failed || save->slot_doubtful)
        return false;
    piece->uncached = true;
    save->uncached++;
    return true;
}

bool pcc_save_uncache(struct pcc_saver *saver, uint64_t tag, uint32_t index)
{
    bool result = true;

    for (uint32_t i = 0; i < saver->spec.lanes; i++) {
        for (uint32_t place = 0; place < PCC_SAVES_PER_LANE; place++) {
            struct pcc_save *save = &saver->lanes[i].saves[place];
            lock(save);
            const bool found = save->active && save->request.tag == tag;
            if (found)
                result = uncache_piece(save, index);
            unlock(save);
            if (found)
                return result;
        }
    }
    return true;
}
