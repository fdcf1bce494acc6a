/* The daemon dies, and the next one goes on in the memory of the one before (pcc_kept.h): the power
 * stays on, so that the disk has every write that was made, flushed or not. */
#include "workload.h"

#include <stdlib.h>
#include <string.h>

void workload_keep(struct workload *workload)
{
    struct pcc_kept_shape shape =
        pcc_kept_shape_of(&workload->sim->geometry, workload->lanes, workload->spec.chunk_bytes);
    struct pcc_record record;
    pcc_volume_record(workload->volume, &record);
    if (!workload->memory)
        workload->memory = aligned_alloc(PCC_IO_ALIGN, pcc_kept_bytes(&shape));
    PCC_ASSERT(workload->memory);
    memset(workload->memory, 0, pcc_kept_bytes(&shape));
    pcc_kept_make(&workload->kept, workload->memory, &shape, &record);
}

bool workload_dies(struct workload *workload, void (*act)(struct workload *workload))
{
    if (setjmp(workload->sim->death) != 0)
        return true;
    act(workload);
    return false;
}

static void live_drop(struct live *live)
{
    free(live->memory);
    *live = (struct live){0};
}

/* What was in its memory alone is gone. Its structs stay as they were: nothing may run in them. */
static void abandon(struct workload *workload)
{
    struct sim *sim = workload->sim;
    sim->dies_in = 0;
    sim->is_beside = false;
    sim->purpose = PURPOSE_POLICY;
    const bool unreported = sim->unreported; /* the next one's flush says so */
    sim_reopened(sim);
    sim->unreported = unreported;
    sim_mark(sim, SIM_RETAIN, 0); /* a flag that no record has is forgotten */
    hooks_died();
    workload->reading = NULL;
    workload->saver = NULL;
    workload->volume = NULL;
    workload->stepping = 0;
    workload->is_flagging = false;
}

static struct live *live_in(struct workload *workload, uint32_t place)
{
    const struct pcc_kept_save *found = pcc_kept_save(&workload->kept, place);
    for (uint32_t i = 0; i < WORKLOAD_LANES_MAX; i++) {
        struct live *live = &workload->lives[i];
        const struct oracle_save *save = &workload->oracle->saves[live->tag];
        if (live->memory && save->sequence == found->entry.sequence &&
            save->request.step == found->entry.step)
            return live;
    }
    return NULL;
}

static int hand_over_again(struct workload *workload, struct live *live, uint32_t place)
{
    const uint32_t chunk_bytes = workload->spec.chunk_bytes;
    const uint64_t payload_bytes = workload->oracle->saves[live->tag].request.payload_bytes;
    for (uint32_t i = 0; i < live->chunk_count; i++) {
        const struct pcc_kept_piece *piece = pcc_kept_piece(&workload->kept, place, i);
        const uint64_t left = payload_bytes - (uint64_t)i * chunk_bytes;
        uint8_t *bytes = live->memory + (size_t)i * chunk_bytes;
        const struct pcc_chunk chunk = {.bytes = bytes,
                                        .payload_offset_bytes = (uint64_t)i * chunk_bytes,
                                        .length_bytes =
                                            left < chunk_bytes ? (uint32_t)left : chunk_bytes,
                                        .index = i,
                                        .segment = live->tag + 1,
                                        .segment_chunk = i,
                                        .checksums = pcc_save_kept_checksums(live->save, i)};
        int result = -PCC_E_DAMAGED;
        if (pcc_save_was_referred(live->save, i)) {
            struct pcc_chunk offer = chunk;
            offer.bytes = NULL;
            result = pcc_save_chunk(live->save, &offer);
        } else if (atomic_load(&piece->segment) == 0) {
            live->written |= 1u << i;
            live->uncached |= 1u << i;
            result = pcc_save_found(live->save, live->tag, i, bytes);
        } else if (pcc_save_matches(live->save, i, bytes, chunk.length_bytes)) {
            result = pcc_save_chunk(live->save, &chunk);
        }
        if (result != 0)
            return result;
    }
    return pcc_save_seal(live->save);
}

static void adopt(struct workload *workload, struct live *live, uint32_t place)
{
    const uint64_t sequence = workload->oracle->saves[live->tag].sequence;
    const int result = pcc_save_adopt(workload->saver, place, live->tag, &live->save);
    if (sequence > workload->newest_begun)
        workload->newest_begun = sequence;
    if (result == 0) {
        live->handed = all_chunks(live);
        live->written = live->uncached = live->offered = 0;
        workload->count.adopted++;
        if (hand_over_again(workload, live, place) == 0)
            return;
        if (!workload->faulty)
            sim_breach(workload->sim, "a part of a copied save was not there");
        live->sealed = false;
        live->aborted = true;
        pcc_save_abort(live->save, -PCC_E_DAMAGED);
        return;
    }
    if (result != -EALREADY && !workload->faulty)
        sim_breach(workload->sim, "a copied save did not go on");
    pcc_kept_end(&workload->kept, place);
    live_drop(live);
}

/* The newest copied save below `below`; its place, or `places`. */
static uint32_t newest_copied(const struct pcc_kept *kept, uint64_t below)
{
    const uint32_t places = pcc_kept_header(kept)->places;
    uint32_t newest = places;
    for (uint32_t i = 0; i < places; i++)
        if (pcc_kept_is_copied(kept, i) && pcc_kept_save(kept, i)->entry.sequence < below &&
            (newest == places ||
             pcc_kept_save(kept, i)->entry.sequence > pcc_kept_save(kept, newest)->entry.sequence))
            newest = i;
    return newest;
}

static void take_over(struct workload *workload)
{
    const uint32_t places = pcc_kept_header(&workload->kept)->places;
    bool copied[WORKLOAD_LANES_MAX] = {false};
    for (uint32_t place = 0; place < places; place++) {
        struct live *live =
            pcc_kept_is_copied(&workload->kept, place) ? live_in(workload, place) : NULL;
        if (live)
            copied[live - workload->lives] = true;
    }
    for (uint32_t i = 0; i < WORKLOAD_LANES_MAX; i++)
        if (!copied[i])
            live_drop(&workload->lives[i]);
    if (workload_open_again(workload) != 0) {
        if (!workload->faulty)
            sim_breach(workload->sim, "a volume does not open after its daemon's death");
        for (uint32_t i = 0; i < WORKLOAD_LANES_MAX; i++)
            live_drop(&workload->lives[i]);
        return;
    }
    uint64_t below = UINT64_MAX;
    uint32_t place;
    while ((place = newest_copied(&workload->kept, below)) < places) {
        below = pcc_kept_save(&workload->kept, place)->entry.sequence;
        struct live *live = live_in(workload, place);
        if (live)
            adopt(workload, live, place);
        else
            sim_breach(workload->sim, "a save is kept that has ended");
    }
}

void workload_go_on(struct workload *workload)
{
    do {
        abandon(workload);
        workload->count.deaths++;
        if (rng_chance(&workload->rng, 3)) /* the next one dies, too, in the middle of that */
            workload->sim->dies_in = 1 + rng_below(&workload->rng, 16);
    } while (workload_dies(workload, take_over));
    workload->sim->dies_in = 0;
}
