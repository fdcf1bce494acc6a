/* What a save need not write: blocks that lie unchanged in the slot of an earlier checkpoint, its
 * base. The checksums of the save are compared with those in the base's manifest, so that nothing
 * depends on what a client reports as unchanged. */
#include <stdlib.h>
#include <string.h>

#include "base/pcc_hash.h"
#include "disk/pcc_save_private.h"

/* -- what is in the base -- */

static struct pcc_known *known_read(struct pcc_saver *saver, const struct pcc_base *base)
{
    const struct pcc_slot_entry *entry = &base->entry;
    const uint64_t room = pcc_align_up(entry->manifest_bytes, PCC_IO_ALIGN);
    const uint64_t blocks = pcc_ceil_div(entry->payload_bytes, saver->geometry.block_bytes);
    struct pcc_known *known = calloc(1, sizeof *known + blocks * sizeof known->checksums[0]);
    uint8_t *manifest = aligned_alloc(PCC_IO_ALIGN, room);
    bool good = known != NULL && manifest != NULL;

    good = good && pcc_io_read_all(pcc_volume_io(saver->volume), manifest, room,
                                   pcc_geometry_slot_offset(&saver->geometry, base->slot) +
                                       pcc_align_up(entry->payload_bytes, PCC_IO_ALIGN)) == 0;
    good = good && pcc_manifest_accept(manifest, &saver->identity, base->slot, entry, NULL) == 0;
    if (good) {
        known->sequence = entry->sequence;
        known->payload_bytes = entry->payload_bytes;
        memcpy(known->checksums, manifest + sizeof(struct pcc_manifest_header),
               blocks * sizeof known->checksums[0]);
    } else {
        free(known);
        known = NULL;
    }
    free(manifest);
    return known;
}

/* With `knowing` held. */
static void known_leave(struct pcc_known *known)
{
    if (known != NULL && --known->users == 0)
        free(known);
}

const struct pcc_known *pcc_save_known(struct pcc_save *save)
{
    struct pcc_saver *saver = save->lane->saver;

    PCC_LOCKED(&saver->knowing);
    if (save->known == NULL && !save->unknown) {
        if (saver->known == NULL || saver->known->sequence != save->base.entry.sequence) {
            known_leave(saver->known);
            saver->known = known_read(saver, &save->base);
            if (saver->known != NULL)
                saver->known->users = 1;
        }
        save->known = saver->known;
        save->unknown = save->known == NULL;
        if (save->known != NULL)
            save->known->users++;
    }
    return save->known;
}

void pcc_save_forget_known(struct pcc_save *save)
{
    struct pcc_saver *saver = save->lane->saver;

    PCC_LOCKED(&saver->knowing);
    known_leave(save->known);
    save->known = NULL;
    save->unknown = false;
}

void pcc_saver_forget_known(struct pcc_saver *saver)
{
    PCC_LOCKED(&saver->knowing);
    known_leave(saver->known);
    saver->known = NULL;
}

/* -- which blocks of a save are -- */

/* All blocks of the save between two offsets, whose checksums are in its manifest. The end is that
 * of a block, or of the payload. */
static bool is_known(const struct pcc_save *save, const struct pcc_known *known, uint64_t at_bytes,
                     uint64_t end_bytes)
{
    const uint32_t block_bytes = save->lane->saver->geometry.block_bytes;
    const uint64_t *checksums = pcc_save_checksums(save, 0);

    for (uint64_t block = at_bytes / block_bytes; block * block_bytes < end_bytes; block++) {
        const uint64_t at = block * block_bytes;
        if (at >= known->payload_bytes || checksums[block] != known->checksums[block] ||
            pcc_piece_bytes(known->payload_bytes, at, block_bytes) !=
                pcc_piece_bytes(end_bytes, at, block_bytes))
            return false;
    }
    return true;
}

uint64_t pcc_save_run(const struct pcc_save *save, const struct pcc_known *known, uint64_t at_bytes,
                      uint64_t end_bytes, bool *known_out)
{
    const uint64_t unit = pcc_placing_bytes(save->lane->saver->geometry.block_bytes);
    uint64_t run_bytes = at_bytes;
    bool first = true;

    if (known == NULL) {
        *known_out = false;
        return end_bytes;
    }
    while (run_bytes < end_bytes) {
        const uint64_t next = run_bytes + unit < end_bytes ? run_bytes + unit : end_bytes;
        const bool this_one = is_known(save, known, run_bytes, next);
        if (first)
            *known_out = this_one;
        else if (this_one != *known_out)
            break;
        first = false;
        run_bytes = next;
    }
    return run_bytes;
}

void pcc_save_refer(struct pcc_save *save, uint64_t at_bytes, uint64_t end_bytes, bool referred)
{
    const uint32_t block_bytes = save->lane->saver->geometry.block_bytes;
    uint64_t *bitmap =
        pcc_manifest_bitmap(save->manifest, save->request.payload_bytes, block_bytes);

    for (uint64_t block = at_bytes / block_bytes; block * block_bytes < end_bytes; block++) {
        if (referred)
            bitmap[block / 64] |= 1ull << block % 64;
        else
            bitmap[block / 64] &= ~(1ull << block % 64);
    }
}

#define RESCUE_BYTES 65536u

int pcc_save_rescue(const struct pcc_save *save, uint32_t position, bool *lost_out)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint32_t block_bytes = saver->geometry.block_bytes;
    const uint32_t step_bytes = block_bytes < RESCUE_BYTES ? block_bytes : RESCUE_BYTES;
    const uint64_t *checksums = pcc_save_checksums(save, position);
    const uint64_t at_bytes = (uint64_t)position * saver->spec.chunk_bytes;
    const uint64_t length_bytes = save->pieces[position].length_bytes;
    const uint64_t from = pcc_geometry_slot_offset(&saver->geometry, save->base.slot) + at_bytes;
    const uint64_t to = pcc_geometry_slot_offset(&saver->geometry, save->slot) + at_bytes;
    _Alignas(PCC_IO_ALIGN) uint8_t bytes[RESCUE_BYTES]; /* nothing allocates here */
    struct pcc_hash hash;
    int result = 0;

    *lost_out = false;
    for (uint64_t at = 0; result == 0 && at < length_bytes; at += RESCUE_BYTES) {
        const uint64_t count = pcc_piece_bytes(length_bytes, at, RESCUE_BYTES);
        const uint64_t room = pcc_align_up(count, PCC_IO_ALIGN);
        result = pcc_io_read_all(pcc_volume_io(saver->volume), bytes, room, from + at);
        for (uint64_t i = 0, next; result == 0 && i < count; i = next) {
            next = i + step_bytes < count ? i + step_bytes : count;
            if ((at + i) % block_bytes == 0)
                pcc_hash_start(&hash);
            pcc_hash_add(&hash, bytes + i, next - i);
            if (((at + next) % block_bytes == 0 || at + next == length_bytes) &&
                pcc_hash_end(&hash) != checksums[(at + i) / block_bytes])
                result = -PCC_E_DAMAGED;
        }
        *lost_out = result != 0;
        if (result == 0)
            result = pcc_save_write_all(saver, bytes, room, to + at);
    }
    return result;
}

uint64_t pcc_save_referred_bytes(const struct pcc_save *save)
{
    const uint64_t payload_bytes = save->request.payload_bytes;
    const uint32_t block_bytes = save->lane->saver->geometry.block_bytes;
    uint64_t referred = 0;

    if (!save->has_base)
        return 0;
    const uint64_t *bitmap = pcc_manifest_bitmap(save->manifest, payload_bytes, block_bytes);
    for (uint64_t block = 0; block * block_bytes < payload_bytes; block++)
        if (pcc_bitmap_has(bitmap, block))
            referred += pcc_piece_bytes(payload_bytes, block * block_bytes, block_bytes);
    return referred;
}
