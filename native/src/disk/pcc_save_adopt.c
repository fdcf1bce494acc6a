/* Continues the saves of a daemon that was killed, from the state memfd (pcc_kept.h). */

#include "disk/pcc_save_private.h"

static bool has(const struct pcc_kept_piece *piece, uint32_t flag)
{
    return (PCC_READ_ACQUIRE(&piece->flags) & flag) != 0;
}

static bool in_dram(const struct pcc_kept_piece *piece)
{
    return PCC_READ_ACQUIRE(&piece->segment) != 0;
}

/* Whether every piece is somewhere, and whether some are in the old slot only, or in the base. */
static bool is_whole(const struct pcc_kept *kept, uint32_t place, uint32_t piece_count,
                     bool *needs_slot_out, bool *needs_base_out)
{
    *needs_slot_out = *needs_base_out = false;
    for (uint32_t i = 0; i < piece_count; i++) {
        const struct pcc_kept_piece *piece = pcc_kept_piece(kept, place, i);
        if (has(piece, PCC_KEPT_REFERRED)) {
            *needs_base_out = true;
            continue;
        }
        if (!in_dram(piece) && !has(piece, PCC_KEPT_WRITTEN))
            return false;
        *needs_slot_out = *needs_slot_out || !in_dram(piece);
    }
    return true;
}

/* Its old slot, if it had one; without `needs_slot` any slot will do when the old one is not free.
 */
static int slot_take(struct pcc_saver *saver, uint32_t place, bool needs_slot, uint32_t *out)
{
    const struct pcc_kept *kept = saver->spec.kept;

    *out = PCC_READ_ACQUIRE(&pcc_kept_save(kept, place)->slot);
    if (pcc_volume_stopped(saver->volume))
        return -PCC_E_STOPPED;
    if (*out == PCC_KEPT_NO_SLOT && !needs_slot)
        return 0;
    if (pcc_volume_take_slot_again(saver->volume, *out))
        return 0;
    return needs_slot ? -ENODATA : pcc_volume_take_slot(saver->volume, out);
}

/* Slot and base. Without its base it is written whole, if all of it is in DRAM. */
static int places_take(struct pcc_saver *saver, uint32_t place, uint32_t piece_count,
                       uint32_t *slot_out, struct pcc_base *base_out, bool *has_base_out)
{
    const struct pcc_kept *kept = saver->spec.kept;
    const uint64_t base_sequence = PCC_READ_ACQUIRE(&pcc_kept_save(kept, place)->base_sequence);
    bool needs_slot, needs_base;

    if (!is_whole(kept, place, piece_count, &needs_slot, &needs_base))
        return -ENODATA;
    *has_base_out =
        base_sequence != 0 && pcc_volume_take_base_again(saver->volume, base_sequence, base_out);
    int error = !*has_base_out && (needs_base || (base_sequence != 0 && needs_slot)) ? -ENODATA : 0;
    if (error == 0)
        error = slot_take(saver, place, needs_slot, slot_out);
    if (error != 0 && *has_base_out)
        pcc_volume_leave_base(saver->volume, base_out);
    return error;
}

static void save_fill(struct pcc_save *save, const struct pcc_kept_save *kept, uint64_t tag,
                      uint32_t slot, const struct pcc_base *base)
{
    const struct pcc_save_request request = {
        .tag = tag, .payload_bytes = kept->entry.payload_bytes, .notes = kept->notes};

    pcc_save_reset(save, &request, &kept->entry, slot, base);
}

/* Whether the volume has the checkpoint, even if it is damaged by now, or a newer one. */
static bool is_durable(struct pcc_volume *volume, uint64_t sequence)
{
    struct pcc_held held;

    if (pcc_volume_superseding(volume) >= sequence)
        return true;
    if (pcc_volume_hold(volume, sequence, &held) != 0)
        return false;
    pcc_volume_release(volume, &held);
    return true;
}

int pcc_save_adopt(struct pcc_saver *saver, uint32_t place, uint64_t tag, struct pcc_save **out)
{
    const struct pcc_kept *kept = saver->spec.kept;
    struct pcc_save *save;
    struct pcc_base base;
    bool has_base;
    uint32_t slot;

    if (kept == NULL || place >= pcc_kept_header(kept)->places || !pcc_kept_is_copied(kept, place))
        return -ENOENT;
    const struct pcc_kept_save *found = pcc_kept_save(kept, place);
    const uint64_t base_sequence = PCC_READ_ACQUIRE(&found->base_sequence);
    if (!pcc_geometry_fits(&saver->geometry, found->entry.payload_bytes, base_sequence != 0))
        return -PCC_E_TOO_LARGE;
    (void)pcc_volume_take_sequence(saver->volume,
                                   found->entry.sequence); /* the next ones are above */
    if (is_durable(saver->volume, found->entry.sequence))
        return -EALREADY;
    const uint32_t pieces =
        (uint32_t)pcc_ceil_div(found->entry.payload_bytes, saver->spec.chunk_bytes);
    save = pcc_saver_take_place(saver, place, PCC_READ_ACQUIRE(&found->slot) == PCC_KEPT_NO_SLOT);
    if (save == NULL)
        return -PCC_E_NO_LANE;
    const int error = places_take(saver, place, pieces, &slot, &base, &has_base);
    if (error != 0) {
        pcc_save_leave(save);
        return error;
    }
    if (slot != PCC_READ(&found->slot))
        pcc_kept_moved(kept, place, slot, pieces);
    pcc_kept_base(kept, place, has_base ? base.entry.sequence : 0);
    save_fill(save, found, tag, slot, has_base ? &base : NULL);
    /* From the first record on. Otherwise a run that follows and has not read it could recycle it
     * (P7). */
    save->entry.flags |= PCC_SLOT_PROTECTED;
    save->adopted = true;
    *out = save;
    return 0;
}

bool pcc_save_was_referred(const struct pcc_save *save, uint32_t position)
{
    return has(pcc_kept_piece(save->lane->saver->spec.kept, save->kept_place, position),
               PCC_KEPT_REFERRED);
}

const uint64_t *pcc_save_kept_checksums(const struct pcc_save *save, uint32_t position)
{
    const struct pcc_kept_piece *piece =
        pcc_kept_piece(save->lane->saver->spec.kept, save->kept_place, position);

    return has(piece, PCC_KEPT_HASHED) ? pcc_save_checksums(save, position) : NULL;
}

bool pcc_save_matches(const struct pcc_save *save, uint32_t position, const void *bytes,
                      uint32_t length_bytes)
{
    const uint64_t *expected = pcc_save_kept_checksums(save, position);

    return expected == NULL ||
           pcc_checksums_match(bytes, length_bytes, save->lane->saver->geometry.block_bytes,
                               expected);
}

/* Each block from where it lies; neither changes before the save is sealed. */
static int read_back(const struct pcc_save *save, uint8_t *bytes, uint64_t offset_bytes,
                     uint64_t length_bytes)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint32_t block_bytes = saver->geometry.block_bytes;
    const uint64_t *bitmap =
        pcc_manifest_bitmap(save->manifest, save->request.payload_bytes, block_bytes);
    const uint64_t end_bytes = offset_bytes + length_bytes;
    int error = 0;

    for (uint64_t at = offset_bytes, next; error == 0 && at < end_bytes; at = next) {
        bool in_base = false;
        next = save->has_base ? pcc_bitmap_run(bitmap, block_bytes, at, end_bytes, &in_base)
                              : end_bytes;
        error = pcc_io_read_all(
            pcc_volume_io(saver->volume), bytes + (at - offset_bytes), next - at,
            pcc_geometry_slot_offset(&saver->geometry, in_base ? save->base.slot : save->slot) +
                at);
    }
    return error;
}

int pcc_save_found(struct pcc_save *save, uint64_t tag, uint32_t position, void *bytes)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint64_t offset = (uint64_t)position * saver->spec.chunk_bytes;

    pcc_save_lock(save);
    const bool is_it = save->active && save->request.tag == tag && position < save->piece_count;
    const uint64_t left = is_it ? save->request.payload_bytes - offset : 0;
    pcc_save_unlock(save);
    const uint32_t length =
        left < saver->spec.chunk_bytes ? (uint32_t)left : saver->spec.chunk_bytes;
    if (!is_it)
        return -PCC_E_ABORTED;
    /* What was written has its checksums. */
    if (pcc_save_kept_checksums(save, position) == NULL)
        return -PCC_E_DAMAGED;
    int error = read_back(save, bytes, offset, pcc_align_up(length, PCC_IO_ALIGN));
    if (error == 0 && !pcc_save_matches(save, position, bytes, length))
        error = -PCC_E_DAMAGED;
    if (error != 0)
        return error;
    PCC_LOCKED(&save->lane->lock);
    struct pcc_save_piece *piece = &save->pieces[position];
    if (!save->active || save->request.tag != tag || save->slot_failed ||
        piece->state != PCC_SAVE_CHUNK_ABSENT)
        return -PCC_E_ABORTED;
    *piece = (struct pcc_save_piece){.length_bytes = length,
                                     .index = UINT32_MAX,
                                     .state = PCC_SAVE_CHUNK_WRITTEN,
                                     .hashed = true,
                                     .announced = true,
                                     .uncached = true};
    save->handed_over++;
    save->written++;
    save->uncached++;
    return 0;
}
