/* Going on with the saves of a daemon that was killed, out of the state memfd (pcc_kept.h). */
#include <string.h>

#include "disk/pcc_pace.h"
#include "disk/pcc_save_private.h"

static bool on_disk(const struct pcc_kept_piece *piece)
{
    return (atomic_load_explicit(&piece->flags, memory_order_acquire) & PCC_KEPT_WRITTEN) != 0;
}

static bool in_dram(const struct pcc_kept_piece *piece)
{
    return atomic_load_explicit(&piece->segment, memory_order_acquire) != 0;
}

/* Whether every piece is somewhere, and whether some are in the old slot only. */
static bool is_whole(const struct pcc_kept *kept, uint32_t place, uint32_t piece_count,
                     bool *needs_slot_out)
{
    *needs_slot_out = false;
    for (uint32_t i = 0; i < piece_count; i++) {
        const struct pcc_kept_piece *piece = pcc_kept_piece(kept, place, i);
        if (!in_dram(piece) && !on_disk(piece))
            return false;
        *needs_slot_out = *needs_slot_out || !in_dram(piece);
    }
    return true;
}

/* The very slot if it has to be, else any, the old one first. */
static int slot_take(struct pcc_saver *saver, uint32_t place, uint32_t piece_count, uint32_t *out)
{
    const struct pcc_kept *kept = saver->spec.kept;
    bool needs_slot;

    if (!is_whole(kept, place, piece_count, &needs_slot))
        return -ENODATA;
    *out = atomic_load_explicit(&pcc_kept_save(kept, place)->slot, memory_order_acquire);
    if (pcc_volume_stopped(saver->volume))
        return -PCC_E_STOPPED;
    if (pcc_volume_take_slot_again(saver->volume, *out))
        return 0;
    return needs_slot ? -ENODATA : pcc_volume_take_slot(saver->volume, out);
}

static void save_fill(struct pcc_save *save, const struct pcc_kept_save *kept, uint64_t tag,
                      uint32_t slot)
{
    const struct pcc_save_request request = {.tag = tag,
                                             .step = kept->step,
                                             .incarnation = kept->incarnation,
                                             .world_size = kept->world_size,
                                             .payload_bytes = kept->payload_bytes,
                                             .tree_offset_bytes = kept->tree_offset_bytes,
                                             .tree_bytes = kept->tree_bytes};

    pcc_save_reset(save, &request, kept->sequence, slot);
}

/* The volume says so itself, even if the one that it has is damaged by now. */
static bool is_durable(struct pcc_volume *volume, uint64_t sequence)
{
    struct pcc_slot_entry entry;
    uint32_t slot;

    if (pcc_volume_superseding(volume) >= sequence)
        return true;
    if (pcc_volume_hold(volume, sequence, &slot, &entry) != 0)
        return false;
    pcc_volume_release(volume, slot);
    return true;
}

int pcc_save_adopt(struct pcc_saver *saver, uint32_t place, uint64_t tag, struct pcc_save **out)
{
    const struct pcc_kept *kept = saver->spec.kept;
    struct pcc_save *save;
    uint32_t slot;

    if (kept == NULL || place >= saver->spec.lanes * PCC_SAVES_PER_LANE ||
        !pcc_kept_is_copied(kept, place))
        return -ENOENT;
    const struct pcc_kept_save *found = pcc_kept_save(kept, place);
    if (!pcc_geometry_fits(&saver->geometry, found->payload_bytes))
        return -PCC_E_TOO_LARGE;
    (void)pcc_volume_take_sequence(saver->volume, found->sequence); /* the next ones are above */
    if (is_durable(saver->volume, found->sequence))
        return -EALREADY;
    const uint32_t pieces = (uint32_t)pcc_ceil_div(found->payload_bytes, saver->spec.chunk_bytes);
    save = pcc_saver_take_place(saver, place);
    if (save == NULL)
        return -PCC_E_NO_LANE;
    const int error = slot_take(saver, place, pieces, &slot);
    if (error != 0) {
        pcc_save_leave_lane(save);
        pcc_save_leave_place(save);
        return error;
    }
    if (slot != atomic_load_explicit(&found->slot, memory_order_relaxed))
        pcc_kept_moved(kept, place, slot, pieces);
    save_fill(save, found, tag, slot);
    /* From the first record on, or a run that follows and has not read it could recycle it before
     * anybody can say so (P7). */
    save->entry.flags = PCC_SLOT_PROTECTED;
    *out = save;
    return 0;
}

const uint64_t *pcc_save_kept_checksums(const struct pcc_save *save, uint32_t position)
{
    const struct pcc_kept_piece *piece =
        pcc_kept_piece(save->lane->saver->spec.kept, save->kept_place, position);

    return (atomic_load_explicit(&piece->flags, memory_order_acquire) & PCC_KEPT_HASHED) != 0
               ? pcc_save_checksums(save, position)
               : NULL;
}

bool pcc_save_matches(const struct pcc_save *save, uint32_t position, const void *bytes,
                      uint32_t length_bytes)
{
    const uint64_t *expected = pcc_save_kept_checksums(save, position);

    return expected == NULL ||
           pcc_checksums_match(bytes, length_bytes, save->lane->saver->geometry.block_bytes,
                               expected);
}

int pcc_save_found(struct pcc_save *save, uint64_t tag, uint32_t position, void *bytes)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint64_t offset = (uint64_t)position * saver->spec.chunk_bytes;

    pcc_save_lock(save);
    const bool is_it = save->active && save->request.tag == tag && position < save->piece_count;
    const uint64_t left = is_it ? save->request.payload_bytes - offset : 0;
    const uint64_t at = pcc_geometry_slot_offset(&saver->geometry, save->slot) + offset;
    pcc_save_unlock(save);
    const uint32_t length =
        left < saver->spec.chunk_bytes ? (uint32_t)left : saver->spec.chunk_bytes;
    if (!is_it)
        return -PCC_E_ABORTED;
    /* What was written has its checksums. */
    if (pcc_save_kept_checksums(save, position) == NULL)
        return -PCC_E_DAMAGED;
    int error = pcc_io_read_all(pcc_volume_io(saver->volume), bytes,
                                pcc_align_up(length, PCC_IO_ALIGN), at);
    if (error == 0 && !pcc_save_matches(save, position, bytes, length))
        error = -PCC_E_DAMAGED;
    if (error != 0)
        return error;
    pcc_save_lock(save);
    struct pcc_save_piece *piece = &save->pieces[position];
    error = -PCC_E_ABORTED;
    if (save->active && save->request.tag == tag && !save->slot_failed &&
        piece->state == PCC_SAVE_CHUNK_ABSENT) {
        *piece = (struct pcc_save_piece){.length_bytes = length,
                                         .index = UINT32_MAX,
                                         .state = PCC_SAVE_CHUNK_WRITTEN,
                                         .hashed = true,
                                         .announced = true,
                                         .uncached = true};
        save->handed_over++;
        save->written++;
        save->uncached++;
        error = 0;
    }
    pcc_save_unlock(save);
    return error;
}
