/* The saver: its memory, its threads and its lanes. What happens to a save is in pcc_save.c (what
 * owners call) and pcc_save_work.c (what is done). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "disk/pcc_save_private.h"
#include "io/pcc_pace.h"

/* The oldest work item; false when there is none. With `wait`, sleeps until there is one, and is
 * false only when the lane closes. */
static bool work_take(struct pcc_lane *lane, bool wait, uint64_t *item_out)
{
    PCC_LOCKED(&lane->lock);
    while (wait && lane->work_count == 0 && !lane->closing)
        (void)pthread_cond_wait(&lane->changed, &lane->lock);
    if (lane->work_count == 0)
        return false;
    *item_out = lane->work[lane->work_first];
    lane->work_first = (lane->work_first + 1) % lane->work_capacity;
    lane->work_count--;
    return true;
}

static void *run_lane(void *argument)
{
    struct pcc_lane *lane = argument;
    uint64_t item;

    while (work_take(lane, true, &item))
        pcc_save_work(lane, item);
    return NULL;
}

static int lane_open(struct pcc_saver *saver, uint32_t number)
{
    struct pcc_lane *lane = &saver->lanes[number];

    lane->saver = saver;
    lane->parks = number == saver->spec.lanes;
    lane->place_count = lane->parks ? PCC_SAVES_PARKED : PCC_SAVES_PER_LANE;
    (void)pthread_mutex_init(&lane->lock, NULL);
    (void)pthread_cond_init(&lane->changed, NULL);
    lane->work_capacity = lane->place_count * (lane->parks ? 1ull : saver->piece_capacity + 1ull);
    lane->work = calloc(lane->work_capacity, sizeof *lane->work);
    if (!lane->work)
        return -ENOMEM;
    for (uint32_t place = 0; place < lane->place_count; place++) {
        struct pcc_save *save = &lane->saves[place];
        save->lane = lane;
        save->place = place;
        save->kept_place = number * PCC_SAVES_PER_LANE + place;
        save->manifest = saver->spec.kept != NULL
                             ? pcc_kept_manifest(saver->spec.kept, save->kept_place)
                             : aligned_alloc(PCC_IO_ALIGN, saver->manifest_capacity_bytes);
        save->pieces = calloc(saver->piece_capacity, sizeof *save->pieces);
        if (!save->manifest || !save->pieces)
            return -ENOMEM;
        /* Touched now, not at the first checkpoint. What is kept was, and holds something. */
        if (saver->spec.kept == NULL)
            memset(save->manifest, 0, saver->manifest_capacity_bytes);
    }
    const uint32_t writers = saver->spec.writers_per_lane;
    const uint32_t threads = lane->parks && writers > 1 ? 1 : writers;
    lane->threads = calloc(threads + 1ull, sizeof *lane->threads);
    if (!lane->threads)
        return -ENOMEM;
    for (uint32_t i = 0; i < threads; i++) {
        char name[16] = "pcc-park";
        if (!lane->parks)
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
    if (lane->saver == NULL)
        return; /* never opened */
    (void)pthread_mutex_lock(&lane->lock);
    lane->closing = true;
    (void)pthread_cond_broadcast(&lane->changed);
    (void)pthread_mutex_unlock(&lane->lock);
    for (uint32_t i = 0; i < lane->thread_count; i++)
        (void)pthread_join(lane->threads[i], NULL);
    free(lane->threads);
    for (uint32_t place = 0; place < lane->place_count; place++) {
        if (lane->saver->spec.kept == NULL)
            free(lane->saves[place].manifest);
        free(lane->saves[place].pieces);
    }
    free(lane->work);
    (void)pthread_mutex_destroy(&lane->lock);
    (void)pthread_cond_destroy(&lane->changed);
}

static void saver_free(struct pcc_saver *saver)
{
    for (uint32_t i = 0; saver->lanes && i <= saver->spec.lanes; i++)
        lane_close(&saver->lanes[i]);
    free(saver->lanes);
    (void)pthread_mutex_destroy(&saver->lock);
    pcc_saver_forget_known(saver);
    (void)pthread_mutex_destroy(&saver->knowing);
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
    if (pieces > UINT32_MAX / PCC_SAVES_PARKED - 2)
        return -EINVAL;
    saver = calloc(1, sizeof *saver);
    if (!saver)
        return -ENOMEM;
    saver->volume = volume;
    saver->geometry = geometry;
    saver->spec = *spec;
    saver->piece_capacity = (uint32_t)pieces;
    saver->manifest_capacity_bytes = pcc_align_up(
        pcc_manifest_bytes(geometry.slot_stride_bytes, geometry.block_bytes, true), PCC_IO_ALIGN);
    pcc_volume_record(volume, &saver->identity);
    (void)pthread_mutex_init(&saver->lock, NULL);
    (void)pthread_mutex_init(&saver->knowing, NULL);
    (void)pthread_mutex_init(&saver->flushing, NULL);
    (void)pthread_cond_init(&saver->ended, NULL);
    saver->lanes = calloc(spec->lanes + 1ull, sizeof *saver->lanes);
    if (!saver->lanes)
        result = -ENOMEM;
    for (uint32_t i = 0; result == 0 && i <= spec->lanes; i++)
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
    if (saver->telling > 0)
        return true;
    for (uint32_t i = 0; i <= saver->spec.lanes; i++)
        for (uint32_t place = 0; place < saver->lanes[i].place_count; place++)
            if (saver->lanes[i].saves[place].used)
                return true;
    return false;
}

static bool step_any(struct pcc_saver *saver)
{
    for (uint32_t i = 0; i <= saver->spec.lanes; i++)
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
    for (uint32_t i = 0; i <= saver->spec.lanes; i++)
        for (uint32_t place = 0; place < saver->lanes[i].place_count; place++) {
            struct pcc_save *save = &saver->lanes[i].saves[place];
            if (!saver->lanes[i].parks || !pcc_save_unpark(save, true))
                pcc_save_abort(save, -PCC_E_SHUT_DOWN);
        }
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

void pcc_saver_exchange(struct pcc_save *one, struct pcc_save *other)
{
    const uint32_t kept_place = one->kept_place;
    uint8_t *manifest = one->manifest;
    struct pcc_save_piece *pieces = one->pieces;

    one->kept_place = other->kept_place;
    one->manifest = other->manifest;
    one->pieces = other->pieces;
    other->kept_place = kept_place;
    other->manifest = manifest;
    other->pieces = pieces;
}

/* With the saver's lock held. */
static struct pcc_save *place_of(struct pcc_saver *saver, uint32_t kept_place)
{
    for (uint32_t i = 0; i <= saver->spec.lanes; i++)
        for (uint32_t k = 0; k < saver->lanes[i].place_count; k++)
            if (saver->lanes[i].saves[k].kept_place == kept_place)
                return &saver->lanes[i].saves[k];
    pcc_assert_failed("a kept place", __FILE__, __LINE__);
}

struct pcc_save *pcc_saver_take_place(struct pcc_saver *saver, uint32_t kept_place, bool parked)
{
    const uint32_t first = parked ? saver->spec.lanes : 0;
    struct pcc_save *found = NULL;

    PCC_LOCKED(&saver->lock);
    for (uint32_t i = first; !found && !saver->closing && i < saver->spec.lanes + parked; i++) {
        struct pcc_lane *lane = &saver->lanes[i];
        for (uint32_t k = 0; !found && !lane->current && k < lane->place_count; k++)
            if (!lane->saves[k].used)
                found = &lane->saves[k];
    }
    if (found && kept_place != PCC_SAVE_ANY_PLACE)
        pcc_saver_exchange(found, place_of(saver, kept_place));
    if (found) {
        found->used = true;
        if (!parked) { /* what is parked holds up no reader */
            found->lane->current = found;
            pcc_pace_save_begins(saver->identity.uid);
        }
    }
    return found;
}

void pcc_save_leave_lane(struct pcc_save *save)
{
    struct pcc_saver *saver = save->lane->saver;

    if (save->lane->parks)
        return;
    PCC_LOCKED(&saver->lock);
    PCC_ASSERT(save->lane->current == save);
    save->lane->current = NULL;
    pcc_pace_save_ends(saver->identity.uid);
}

void pcc_save_leave(struct pcc_save *save)
{
    struct pcc_saver *saver = save->lane->saver;

    pcc_save_leave_lane(save);
    PCC_LOCKED(&saver->lock);
    save->used = false;
    (void)pthread_cond_broadcast(&saver->ended);
}

void pcc_save_over(struct pcc_save *save)
{
    struct pcc_saver *saver = save->lane->saver;

    (void)pthread_mutex_lock(&saver->lock);
    save->used = false;
    saver->telling++;
    (void)pthread_mutex_unlock(&saver->lock);
    if (saver->spec.events->freed)
        saver->spec.events->freed(saver->spec.owner);
    PCC_LOCKED(&saver->lock);
    saver->telling--;
    (void)pthread_cond_broadcast(&saver->ended);
}

int pcc_saver_step(struct pcc_saver *saver, uint32_t lane)
{
    uint64_t item;

    PCC_ASSERT(saver->spec.writers_per_lane == 0 && lane <= saver->spec.lanes);
    if (!work_take(&saver->lanes[lane], false, &item))
        return -EAGAIN;
    pcc_save_work(&saver->lanes[lane], item);
    return 0;
}
