/* What owners of chunks call, on any thread. */
#include <string.h>

#include "disk/pcc_save_private.h"

void pcc_save_reset(struct pcc_save *save, const struct pcc_save_request *request,
                    const struct pcc_slot_entry *entry, uint32_t slot, const struct pcc_base *base)
{
    const struct pcc_saver *saver = save->lane->saver;

    PCC_LOCKED(&save->lane->lock);
    PCC_ASSERT(!save->active && !save->has_slot);
    memset(&save->active, 0, sizeof *save - offsetof(struct pcc_save, active));
    save->request = *request;
    save->entry = *entry;
    save->slot = slot;
    save->has_slot = slot != PCC_KEPT_NO_SLOT;
    save->piece_count = (uint32_t)pcc_ceil_div(request->payload_bytes, saver->spec.chunk_bytes);
    PCC_ASSERT(save->piece_count <= saver->piece_capacity);
    memset(save->pieces, 0, save->piece_count * sizeof *save->pieces);
    save->has_base = base != NULL;
    if (base != NULL)
        save->base = *base;
    save->flush_failures = PCC_READ(&save->lane->saver->flush_failures);
    save->times.begin = pcc_now_ns();
    save->active = true;
}

static struct pcc_slot_entry entry_of(struct pcc_volume *volume,
                                      const struct pcc_save_request *request, uint64_t sequence)
{
    struct pcc_slot_entry entry = {
        .state = PCC_SLOT_DURABLE,
        .flags = request->flags,
        .sequence = sequence,
        .step = request->step,
        .incarnation = request->incarnation,
        .payload_bytes = request->payload_bytes,
        .world_size = request->world_size,
        .tree_offset_bytes = request->tree_offset_bytes,
        .tree_bytes = request->tree_bytes,
    };

    pcc_volume_start_id(volume, request->incarnation, entry.start_id);
    return entry;
}

static bool is_possible(const struct pcc_save_request *request)
{
    return request->payload_bytes > 0 &&
           pcc_is_within(request->tree_offset_bytes, request->tree_bytes, request->payload_bytes) &&
           (request->flags & ~(PCC_SLOT_IMAGE | PCC_SLOT_MARKS)) == 0 &&
           pcc_notes_are_sound(&request->notes, request->payload_bytes);
}

/* What the save may refer to, with nothing referred to yet. Reads nothing: its caller has locks. */
static bool begin_base(struct pcc_save *save, const struct pcc_save_request *request,
                       struct pcc_base *out)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint32_t block_bytes = saver->geometry.block_bytes;
    const uint64_t blocks = pcc_ceil_div(request->payload_bytes, block_bytes);

    if (request->parked || request->frozen_bytes == 0 ||
        !pcc_geometry_fits(&saver->geometry, request->payload_bytes, true) ||
        !pcc_volume_take_base(saver->volume, out))
        return false;
    memset(pcc_manifest_bitmap(save->manifest, request->payload_bytes, block_bytes), 0,
           pcc_ceil_div(blocks, 64) * sizeof(uint64_t));
    return true;
}

int pcc_save_begin(struct pcc_saver *saver, const struct pcc_save_request *request,
                   struct pcc_save **out, uint64_t *sequence_out)
{
    struct pcc_base base;
    uint32_t slot = PCC_KEPT_NO_SLOT;

    if (!is_possible(request))
        return -EINVAL;
    if (!pcc_geometry_fits(&saver->geometry, request->payload_bytes, false))
        return -PCC_E_TOO_LARGE;
    if (pcc_volume_stopped(saver->volume))
        return -PCC_E_STOPPED;
    struct pcc_save *save = pcc_saver_take_place(saver, PCC_SAVE_ANY_PLACE, request->parked);
    if (!save)
        return -PCC_E_NO_LANE;
    const int result = request->parked ? 0 : pcc_volume_take_slot(saver->volume, &slot);
    if (result != 0) {
        pcc_save_leave(save);
        return result;
    }
    const uint64_t sequence =
        request->unnumbered ? 0 : pcc_volume_take_sequence(saver->volume, request->sequence);
    if (sequence == 0 && !request->unnumbered) {
        if (!request->parked)
            pcc_volume_return_slot(saver->volume, slot);
        pcc_save_leave(save);
        return -EINVAL;
    }
    const bool has_base = begin_base(save, request, &base);
    const struct pcc_slot_entry entry = entry_of(saver->volume, request, sequence);
    pcc_save_reset(save, request, &entry, slot, has_base ? &base : NULL);
    pcc_kept_begin(saver->spec.kept, save->kept_place, &entry, &request->notes, slot,
                   save->piece_count, has_base ? base.entry.sequence : 0);
    *out = save;
    *sequence_out = sequence;
    return 0;
}

int pcc_save_number(struct pcc_save *save, const struct pcc_number *number)
{
    struct pcc_manifest_notes *notes = &save->request.notes;
    const struct pcc_saver *saver = save->lane->saver;

    PCC_LOCKED(&save->lane->lock);
    if (!save->active)
        return -PCC_E_ABORTED;
    if (save->entry.sequence != 0 || number->sequence == 0 ||
        (number->marks & ~PCC_SLOT_MARKS) != 0 ||
        pcc_volume_take_sequence(saver->volume, number->sequence) == 0)
        return -EINVAL;
    save->entry.sequence = number->sequence;
    save->entry.incarnation = number->incarnation;
    save->entry.world_size = number->world_size;
    save->entry.flags |= number->marks;
    notes->name_base = number->name_base;
    notes->name_descents = number->name_descents;
    notes->name_row = number->name_row;
    pcc_volume_start_id(saver->volume, number->incarnation, save->entry.start_id);
    pcc_kept_entry(saver->spec.kept, save->kept_place, &save->entry, notes);
    return 0;
}

uint64_t pcc_save_base(const struct pcc_save *save)
{
    return save->has_base ? save->base.entry.sequence : 0;
}

/* With the lane's lock held: it was not handed over before. */
static void piece_take(struct pcc_save *save, uint32_t position, const struct pcc_chunk *chunk)
{
    const struct pcc_saver *saver = save->lane->saver;
    struct pcc_save_piece *piece = &save->pieces[position];

    if (chunk->checksums != NULL && chunk->checksums != pcc_save_checksums(save, position))
        memcpy(pcc_save_checksums(save, position), chunk->checksums,
               pcc_ceil_div(chunk->length_bytes, saver->geometry.block_bytes) * sizeof(uint64_t));
    piece->hashed = chunk->checksums != NULL;
    piece->bytes = chunk->bytes;
    piece->offered = chunk->bytes == NULL;
    piece->length_bytes = chunk->length_bytes;
    piece->index = chunk->index;
    piece->state = PCC_SAVE_CHUNK_HELD;
    save->handed_over++;
    if (piece->offered) { /* for the next daemon it is nowhere yet, or where it was */
        save->offered++;
    } else {
        pcc_kept_chunk(saver->spec.kept, save->kept_place, position, chunk->segment,
                       chunk->segment_chunk, piece->hashed);
        save->copied_bytes += chunk->length_bytes;
    }
    /* On the way to another slot, the move itself queues what is here by then. */
    if (!save->lane->parks && !save->failed && !save->slot_failed && !save->slot_doubtful)
        pcc_save_queue_piece(save, position);
}

/* With the lane's lock held. */
static bool fits_payload(const struct pcc_save *save, const struct pcc_chunk *chunk)
{
    const uint64_t chunk_bytes = save->lane->saver->spec.chunk_bytes;
    const uint64_t payload_bytes = save->request.payload_bytes;
    const uint64_t offset = chunk->payload_offset_bytes;

    if (offset % chunk_bytes != 0 || offset >= payload_bytes)
        return false;
    const uint64_t room = pcc_piece_bytes(payload_bytes, offset, chunk_bytes);
    return save->request.is_open ? chunk->length_bytes > 0 && chunk->length_bytes <= room
                                 : chunk->length_bytes == room;
}

int pcc_save_chunk(struct pcc_save *save, const struct pcc_chunk *chunk)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint32_t position = (uint32_t)(chunk->payload_offset_bytes / saver->spec.chunk_bytes);

    PCC_ASSERT((uintptr_t)chunk->bytes % PCC_IO_ALIGN == 0);
    PCC_LOCKED(&save->lane->lock);
    if (!save->active)
        return -PCC_E_ABORTED;
    if (!fits_payload(save, chunk) || save->sealed)
        return -EINVAL;
    const struct pcc_save_piece *piece = &save->pieces[position];
    const bool may_offer = save->has_base && chunk->checksums != NULL && !piece->asked;
    if (piece->state != PCC_SAVE_CHUNK_ABSENT || (chunk->bytes == NULL && !may_offer))
        return -EINVAL;
    piece_take(save, position, chunk);
    return 0;
}

/* With the lane's lock held: every piece lies in a payload of this length, as long as it is there.
 */
static bool pieces_fit(const struct pcc_save *save, uint64_t payload_bytes)
{
    const uint64_t chunk_bytes = save->lane->saver->spec.chunk_bytes;

    for (uint32_t i = 0; i < save->piece_count; i++)
        if (save->pieces[i].state != PCC_SAVE_CHUNK_ABSENT &&
            (i * chunk_bytes >= payload_bytes ||
             save->pieces[i].length_bytes !=
                 pcc_piece_bytes(payload_bytes, i * chunk_bytes, chunk_bytes)))
            return false;
    return true;
}

/* With the lane's lock held: the bitmap comes to lie behind the checksums that there are. */
static void take_length(struct pcc_save *save, const struct pcc_save_request *request)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint32_t block_bytes = saver->geometry.block_bytes;
    const uint64_t blocks = pcc_ceil_div(request->payload_bytes, block_bytes);

    if (save->has_base)
        memmove(pcc_manifest_bitmap(save->manifest, request->payload_bytes, block_bytes),
                pcc_manifest_bitmap(save->manifest, save->request.payload_bytes, block_bytes),
                pcc_ceil_div(blocks, 64) * sizeof(uint64_t));
    save->request = *request;
    save->piece_count = (uint32_t)pcc_ceil_div(request->payload_bytes, saver->spec.chunk_bytes);
    save->entry.payload_bytes = request->payload_bytes;
    save->entry.tree_offset_bytes = request->tree_offset_bytes;
    save->entry.tree_bytes = request->tree_bytes;
    pcc_kept_entry(saver->spec.kept, save->kept_place, &save->entry, &request->notes);
}

int pcc_save_set_length(struct pcc_save *save, const struct pcc_save_length *length)
{
    PCC_LOCKED(&save->lane->lock);
    struct pcc_save_request request = save->request;
    request.is_open = false;
    request.payload_bytes = length->payload_bytes;
    request.tree_offset_bytes = length->tree_offset_bytes;
    request.tree_bytes = length->tree_bytes;
    request.notes.statistics = length->statistics;
    request.notes.dtypes = length->dtypes;
    if (!save->active)
        return -PCC_E_ABORTED;
    if (!save->request.is_open || request.payload_bytes > save->request.payload_bytes ||
        !is_possible(&request) || !pieces_fit(save, request.payload_bytes))
        return -EINVAL;
    take_length(save, &request);
    return 0;
}

int pcc_save_seal(struct pcc_save *save)
{
    PCC_LOCKED(&save->lane->lock);
    if (!save->active)
        return -PCC_E_ABORTED;
    if (save->sealed || save->request.is_open || save->entry.sequence == 0 ||
        save->handed_over < save->piece_count)
        return -EINVAL;
    pcc_kept_copied(save->lane->saver->spec.kept, save->kept_place);
    save->sealed = true;
    save->times.sealed = pcc_now_ns();
    pcc_save_advance(save);
    return 0;
}

void pcc_save_abort(struct pcc_save *save, int error)
{
    PCC_LOCKED(&save->lane->lock);
    if (save->active && !save->sealed && !save->failed) {
        save->failed = true;
        save->error = error;
        save->stage = PCC_STAGE_COPY;
        pcc_save_advance(save);
    }
}

/* With the lane's lock held. */
static bool uncache_piece(struct pcc_save *save, uint32_t position)
{
    struct pcc_save_piece *piece = &save->pieces[position];

    PCC_ASSERT(position < save->piece_count);
    if (piece->state == PCC_SAVE_CHUNK_ABSENT || piece->uncached)
        return true;
    /* Not on the disk in the present slot, or not going to stay there: its bytes are needed. */
    if (piece->state != PCC_SAVE_CHUNK_WRITTEN || save->slot_failed || save->slot_doubtful)
        return false;
    pcc_kept_reused(save->lane->saver->spec.kept, save->kept_place, position);
    piece->uncached = true;
    save->uncached++;
    return true;
}

bool pcc_save_uncache(struct pcc_saver *saver, uint64_t tag, uint32_t position)
{
    for (uint32_t i = 0; i < saver->spec.lanes; i++) {
        for (uint32_t place = 0; place < PCC_SAVES_PER_LANE; place++) {
            struct pcc_save *save = &saver->lanes[i].saves[place];
            PCC_LOCKED(&save->lane->lock);
            if (save->active && save->request.tag == tag)
                return uncache_piece(save, position);
        }
    }
    return true;
}

/* -- parked: it stays in the chunks that it was copied to, until it is written or dropped -- */

bool pcc_save_is_parked(const struct pcc_save *save)
{
    return save->lane->parks;
}

/* With the locks of both lanes held. For the next daemon it is parked until its slot is stored; all
 * of it is in DRAM before and after. */
static void take_over(struct pcc_save *save, struct pcc_save *parked, uint32_t slot)
{
    const struct pcc_saver *saver = save->lane->saver;

    pcc_saver_exchange(save, parked);
    memcpy(&save->active, &parked->active, sizeof *save - offsetof(struct pcc_save, active));
    parked->active = false;
    save->slot = slot;
    save->has_slot = true;
    save->flush_failures = PCC_READ(&saver->flush_failures);
    pcc_kept_moved(saver->spec.kept, save->kept_place, slot, save->piece_count);
    for (uint32_t i = 0; i < save->piece_count; i++)
        pcc_save_queue_piece(save, i);
}

int pcc_save_write(struct pcc_save *parked, struct pcc_save **out)
{
    struct pcc_saver *saver = parked->lane->saver;
    uint32_t slot;

    if (pcc_volume_stopped(saver->volume))
        return -PCC_E_STOPPED;
    struct pcc_save *save = pcc_saver_take_place(saver, PCC_SAVE_ANY_PLACE, false);
    if (!save)
        return -PCC_E_NO_LANE;
    const int result = pcc_volume_take_slot(saver->volume, &slot);
    if (result != 0) {
        pcc_save_leave(save);
        return result;
    }
    pcc_save_lock(parked);
    const bool sealed = parked->active && parked->sealed && !parked->failed;
    if (sealed) {
        pcc_save_lock(save);
        take_over(save, parked, slot);
        pcc_save_unlock(save);
        *out = save;
    }
    pcc_save_unlock(parked);
    if (!sealed)
        pcc_volume_return_slot(saver->volume, slot);
    pcc_save_leave(sealed ? parked : save);
    return sealed ? 0 : -EBUSY;
}

bool pcc_save_unpark(struct pcc_save *parked, bool kept)
{
    pcc_save_lock(parked);
    const bool sealed = parked->active && parked->sealed && !parked->failed;
    if (sealed) {
        parked->active = false;
        if (!kept)
            pcc_kept_end(parked->lane->saver->spec.kept, parked->kept_place);
    }
    pcc_save_unlock(parked);
    if (sealed)
        pcc_save_leave(parked);
    return sealed;
}

bool pcc_save_drop(struct pcc_save *parked)
{
    return pcc_save_unpark(parked, false);
}
