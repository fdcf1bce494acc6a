#include "disk/pcc_format.h"

#include <string.h>

#include "base/pcc_crc.h"
#include "base/pcc_xxhash.h"

#define BLOCK_BYTES_MAX (1u << 26)
#define RECORD_STRIDE_MAX (1u << 20)
#define RECORD_AREAS (PCC_GENERATIONS * PCC_REPLICAS)
/* Those that this version understands, of those that a reader must. */
#define MUST_KNOWN                                                                                 \
    (PCC_SLOT_IMAGE | PCC_SLOT_LASTING | PCC_SLOT_QUARANTINED | PCC_SLOT_DAMAGED |                 \
     PCC_SLOT_FOREIGN | PCC_SLOT_OFFERED)

static bool is_power_of_two(uint64_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

static bool is_zero(const void *bytes, size_t length_bytes)
{
    const uint8_t *at = bytes;

    return length_bytes == 0 || (at[0] == 0 && memcmp(at, at + 1, length_bytes - 1) == 0);
}

static bool block_bytes_are_sound(uint32_t block_bytes)
{
    return is_power_of_two(block_bytes) && block_bytes >= PCC_BLOCK_BYTES_MIN &&
           block_bytes <= BLOCK_BYTES_MAX;
}

static bool geometry_is_sound(const struct pcc_geometry *geometry)
{
    uint64_t slots_bytes, expected;

    if (!is_power_of_two(geometry->record_stride_bytes) ||
        geometry->record_stride_bytes < PCC_RECORD_STRIDE_MIN ||
        geometry->record_stride_bytes > RECORD_STRIDE_MAX)
        return false;
    if (!block_bytes_are_sound(geometry->block_bytes))
        return false;
    if (geometry->slot_count == 0 || geometry->slot_count > PCC_SLOTS_MAX ||
        geometry->slot_stride_bytes == 0 ||
        geometry->slot_stride_bytes % geometry->record_stride_bytes != 0)
        return false;
    if (__builtin_mul_overflow(geometry->slot_stride_bytes, (uint64_t)geometry->slot_count,
                               &slots_bytes) ||
        __builtin_add_overflow(slots_bytes, RECORD_AREAS * geometry->record_stride_bytes,
                               &expected))
        return false;
    /* Offsets are handed to the kernel as signed numbers. */
    return expected == geometry->volume_bytes && expected <= (uint64_t)INT64_MAX;
}

int pcc_geometry_plan(uint64_t payload_capacity_bytes, uint32_t slot_count, uint32_t block_bytes,
                      uint64_t record_stride_bytes, struct pcc_geometry *out)
{
    /* Far below any overflow of the sums that follow. */
    if (payload_capacity_bytes == 0 || payload_capacity_bytes > (1ull << 50) ||
        !block_bytes_are_sound(block_bytes) || !is_power_of_two(record_stride_bytes) ||
        record_stride_bytes > RECORD_STRIDE_MAX || slot_count == 0 || slot_count > PCC_SLOTS_MAX)
        return -EINVAL;
    const uint64_t manifest = pcc_manifest_bytes(payload_capacity_bytes, block_bytes, true);
    if (manifest > UINT32_MAX)
        return -EINVAL;
    const uint64_t content =
        pcc_align_up(payload_capacity_bytes, PCC_IO_ALIGN) + pcc_align_up(manifest, PCC_IO_ALIGN);
    struct pcc_geometry geometry = {
        .record_stride_bytes = record_stride_bytes,
        .slot_stride_bytes = pcc_align_up(content, record_stride_bytes),
        .slot_count = slot_count,
        .block_bytes = block_bytes,
    };
    geometry.volume_bytes =
        RECORD_AREAS * record_stride_bytes + slot_count * geometry.slot_stride_bytes;
    if (!geometry_is_sound(&geometry))
        return -EINVAL;
    *out = geometry;
    return 0;
}

uint64_t pcc_geometry_record_offset(const struct pcc_geometry *geometry, uint32_t generation,
                                    uint32_t replica)
{
    PCC_ASSERT(generation < PCC_GENERATIONS && replica < PCC_REPLICAS);
    if (replica == 0)
        return generation * geometry->record_stride_bytes;
    return geometry->volume_bytes - (PCC_GENERATIONS - generation) * geometry->record_stride_bytes;
}

uint64_t pcc_geometry_slot_offset(const struct pcc_geometry *geometry, uint32_t slot)
{
    PCC_ASSERT(slot < geometry->slot_count);
    return PCC_GENERATIONS * geometry->record_stride_bytes + slot * geometry->slot_stride_bytes;
}

bool pcc_geometry_fits(const struct pcc_geometry *geometry, uint64_t payload_bytes, bool has_base)
{
    if (payload_bytes > geometry->slot_stride_bytes)
        return false;
    const uint64_t manifest = pcc_manifest_bytes(payload_bytes, geometry->block_bytes, has_base);
    return manifest <= UINT32_MAX &&
           pcc_align_up(payload_bytes, PCC_IO_ALIGN) + pcc_align_up(manifest, PCC_IO_ALIGN) <=
               geometry->slot_stride_bytes;
}

uint64_t pcc_manifest_bytes(uint64_t payload_bytes, uint32_t block_bytes, bool has_base)
{
    const uint64_t blocks = pcc_ceil_div(payload_bytes, block_bytes);
    const uint64_t words = blocks + (has_base ? pcc_ceil_div(blocks, 64) : 0);

    return sizeof(struct pcc_manifest_header) + words * sizeof(uint64_t);
}

uint64_t *pcc_manifest_bitmap(void *manifest, uint64_t payload_bytes, uint32_t block_bytes)
{
    uint64_t *words =
        (uint64_t *)(void *)((uint8_t *)manifest + sizeof(struct pcc_manifest_header));

    return words + pcc_ceil_div(payload_bytes, block_bytes);
}

uint64_t pcc_bitmap_run(const uint64_t *bitmap, uint32_t block_bytes, uint64_t at_bytes,
                        uint64_t end_bytes, bool *in_base_out)
{
    const uint64_t unit = pcc_placing_bytes(block_bytes);
    const bool in_base = pcc_bitmap_has(bitmap, at_bytes / block_bytes);

    do {
        at_bytes += unit;
    } while (at_bytes < end_bytes && pcc_bitmap_has(bitmap, at_bytes / block_bytes) == in_base);
    *in_base_out = in_base;
    return at_bytes < end_bytes ? at_bytes : end_bytes;
}

uint32_t pcc_record_find(const struct pcc_record *record, uint64_t sequence)
{
    for (uint32_t slot = 0; slot < record->slot_count; slot++)
        if (record->slots[slot].state == PCC_SLOT_DURABLE &&
            record->slots[slot].sequence == sequence)
            return slot;
    return PCC_SLOTS_MAX;
}

uint32_t pcc_record_bases(const struct pcc_record *record, uint32_t mask)
{
    uint32_t bases = 0;

    for (uint32_t slot = 0; slot < record->slot_count; slot++) {
        const struct pcc_slot_entry *entry = &record->slots[slot];
        if ((mask >> slot & 1u) == 0 || !pcc_entry_has_base(entry))
            continue;
        const uint32_t base = pcc_record_find(record, entry->base_sequence);
        if (base < PCC_SLOTS_MAX)
            bases |= 1u << base;
    }
    return bases;
}

struct pcc_geometry pcc_record_geometry(const struct pcc_record *record)
{
    return (struct pcc_geometry){
        .volume_bytes = record->volume_bytes,
        .record_stride_bytes = record->record_stride_bytes,
        .slot_stride_bytes = record->slot_stride_bytes,
        .slot_count = record->slot_count,
        .block_bytes = record->block_bytes,
    };
}

void pcc_record_seal(struct pcc_record *record, uint32_t generation, uint32_t replica)
{
    const struct pcc_geometry geometry = pcc_record_geometry(record);

    record->generation = generation;
    record->replica = replica;
    record->offset_bytes = pcc_geometry_record_offset(&geometry, generation, replica);
    record->crc32c = pcc_crc32c(0, record, offsetof(struct pcc_record, crc32c));
}

/* A base stays in the table as long as the entries that refer to it, and has no base itself. */
static bool base_is_sound(const struct pcc_record *record, const struct pcc_slot_entry *entry)
{
    if ((entry->flags & PCC_SLOT_FOREIGN) != 0)
        return entry->base_sequence != 0;
    if (entry->base_sequence == 0)
        return true;
    if (entry->base_sequence >= entry->sequence)
        return false;
    const uint32_t base = pcc_record_find(record, entry->base_sequence);
    return base < PCC_SLOTS_MAX && record->slots[base].base_sequence == 0;
}

static bool entry_is_sound(const struct pcc_record *record, const struct pcc_geometry *geometry,
                           uint32_t slot)
{
    const struct pcc_slot_entry *entry = &record->slots[slot];

    if (entry->state == PCC_SLOT_FREE) {
        struct pcc_slot_entry rest = *entry;
        rest.flags &= ~PCC_SLOT_QUARANTINED;
        return is_zero(&rest, sizeof rest);
    }
    if (entry->state != PCC_SLOT_DURABLE || (entry->flags & PCC_SLOT_QUARANTINED) != 0)
        return false;
    if (entry->sequence == 0 || entry->sequence >= record->next_sequence)
        return false;
    for (uint32_t other = 0; other < slot; other++)
        if (record->slots[other].sequence == entry->sequence)
            return false;
    const bool has_base = entry->base_sequence != 0;
    return base_is_sound(record, entry) && entry->payload_bytes > 0 &&
           pcc_geometry_fits(geometry, entry->payload_bytes, has_base) &&
           entry->manifest_bytes ==
               pcc_manifest_bytes(entry->payload_bytes, record->block_bytes, has_base) &&
           pcc_is_within(entry->tree_offset_bytes, entry->tree_bytes, entry->payload_bytes);
}

static bool knows_its_flags(const struct pcc_record *record)
{
    for (uint32_t slot = 0; slot < record->slot_count; slot++)
        if ((record->slots[slot].flags & PCC_SLOT_MUST & ~MUST_KNOWN) != 0)
            return false;
    return true;
}

/* Without a promise there is no start and no list. */
static bool promise_is_sound(const struct pcc_promise *promise)
{
    return promise->number != 0 || is_zero(promise, sizeof *promise);
}

int pcc_record_accept(const struct pcc_record *record, uint64_t offset_bytes)
{
    if (record->magic != PCC_RECORD_MAGIC)
        return -PCC_E_NOT_A_VOLUME;
    if (record->crc32c != pcc_crc32c(0, record, offsetof(struct pcc_record, crc32c)))
        return -PCC_E_DAMAGED;
    if (record->format_version == 0)
        return -PCC_E_DAMAGED;
    if (record->format_version != PCC_FORMAT_VERSION)
        return record->format_version < PCC_FORMAT_VERSION ? -PCC_E_OLDER_FORMAT
                                                           : -PCC_E_NEWER_FORMAT;
    const struct pcc_geometry geometry = pcc_record_geometry(record);
    if (record->record_bytes != PCC_RECORD_BYTES ||
        record->checksum_algorithm != PCC_CHECKSUM_XXH3_64 || !geometry_is_sound(&geometry))
        return -PCC_E_DAMAGED;
    if (record->record_number == 0 || record->replica >= PCC_REPLICAS ||
        record->generation != record->record_number % PCC_GENERATIONS ||
        record->offset_bytes != offset_bytes ||
        offset_bytes != pcc_geometry_record_offset(&geometry, record->generation, record->replica))
        return -PCC_E_DAMAGED;
    if (record->keep == 0 || record->keep >= record->slot_count || record->next_sequence == 0 ||
        record->job_bytes > PCC_JOB_BYTES_MAX ||
        !is_zero(record->job + record->job_bytes, PCC_JOB_BYTES_MAX - record->job_bytes) ||
        !promise_is_sound(&record->promise))
        return -PCC_E_DAMAGED;
    if (!knows_its_flags(record))
        return -PCC_E_UNKNOWN_FLAG;
    for (uint32_t slot = 0; slot < record->slot_count; slot++)
        if (!entry_is_sound(record, &geometry, slot))
            return -PCC_E_DAMAGED;
    if (!is_zero(&record->slots[record->slot_count],
                 (PCC_SLOTS_MAX - record->slot_count) * sizeof record->slots[0]))
        return -PCC_E_DAMAGED;
    return 0;
}

static void manifest_digest(const void *manifest, uint64_t manifest_bytes,
                            uint8_t digest_out[PCC_DIGEST_BYTES])
{
    XXH128_canonical_t canonical;

    _Static_assert(sizeof canonical == PCC_DIGEST_BYTES, "digest");
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(manifest, manifest_bytes));
    memcpy(digest_out, canonical.digest, PCC_DIGEST_BYTES);
}

static bool section_is_sound(const struct pcc_section *section, uint64_t payload_bytes)
{
    return section->bytes == 0
               ? section->offset_bytes == 0
               : pcc_is_within(section->offset_bytes, section->bytes, payload_bytes);
}

bool pcc_notes_are_sound(const struct pcc_manifest_notes *notes, uint64_t payload_bytes)
{
    return section_is_sound(&notes->statistics, payload_bytes) &&
           section_is_sound(&notes->dtypes, payload_bytes);
}

static struct pcc_manifest_header manifest_header(const struct pcc_record *volume, uint32_t slot,
                                                  const struct pcc_manifest_notes *notes,
                                                  const struct pcc_slot_entry *entry)
{
    struct pcc_manifest_header header = {
        .magic = PCC_MANIFEST_MAGIC,
        .format_version = PCC_FORMAT_VERSION,
        .header_bytes = sizeof header,
        .slot = slot,
        .block_bytes = volume->block_bytes,
        .sequence = entry->sequence,
        .step = entry->step,
        .payload_bytes = entry->payload_bytes,
        .block_count = pcc_ceil_div(entry->payload_bytes, volume->block_bytes),
        .tree_offset_bytes = entry->tree_offset_bytes,
        .tree_bytes = entry->tree_bytes,
        .checksum_algorithm = PCC_CHECKSUM_XXH3_64,
        .kind = (entry->flags & PCC_SLOT_IMAGE) != 0,
        .incarnation = entry->incarnation,
        .world_size = entry->world_size,
        .base_sequence = entry->base_sequence,
        .notes = *notes,
    };

    memcpy(header.volume_uuid, volume->volume_uuid, PCC_UUID_BYTES);
    memcpy(header.start_id, entry->start_id, PCC_UUID_BYTES);
    return header;
}

void pcc_manifest_seal(void *manifest, const struct pcc_record *volume, uint32_t slot,
                       const struct pcc_manifest_notes *notes, const uint64_t *block_checksums,
                       struct pcc_slot_entry *entry)
{
    const struct pcc_manifest_header header = manifest_header(volume, slot, notes, entry);
    uint8_t *const list = (uint8_t *)manifest + sizeof header;
    const uint64_t manifest_bytes =
        pcc_manifest_bytes(entry->payload_bytes, volume->block_bytes, entry->base_sequence != 0);

    PCC_ASSERT(manifest_bytes <= UINT32_MAX && pcc_notes_are_sound(notes, entry->payload_bytes));
    memcpy(manifest, &header, sizeof header);
    if ((const void *)block_checksums != (const void *)list)
        memmove(list, block_checksums, header.block_count * sizeof *block_checksums);
    entry->manifest_bytes = (uint32_t)manifest_bytes;
    manifest_digest(manifest, manifest_bytes, entry->manifest_digest);
}

/* Only blocks that the base has, as long there, and a whole piece of what is read at once. */
static bool bitmap_is_sound(const uint64_t *bitmap, const struct pcc_slot_entry *entry,
                            const struct pcc_slot_entry *base, uint32_t block_bytes)
{
    const uint64_t blocks = pcc_ceil_div(entry->payload_bytes, block_bytes);
    const uint64_t together = pcc_placing_bytes(block_bytes) / block_bytes;

    for (uint64_t block = 0; block < blocks; block++) {
        const uint64_t at = block * block_bytes;
        const bool referred = pcc_bitmap_has(bitmap, block);
        if (referred && (at >= base->payload_bytes ||
                         pcc_piece_bytes(base->payload_bytes, at, block_bytes) !=
                             pcc_piece_bytes(entry->payload_bytes, at, block_bytes)))
            return false;
        if (block % together != 0 && referred != pcc_bitmap_has(bitmap, block - 1))
            return false;
    }
    return blocks % 64 == 0 || bitmap[blocks / 64] >> blocks % 64 == 0;
}

/* What the header says beyond the entry. */
static int accept_notes(const struct pcc_manifest_notes *notes, const struct pcc_slot_entry *entry)
{
    const bool is_foreign = (entry->flags & PCC_SLOT_FOREIGN) != 0;

    if (!pcc_notes_are_sound(notes, entry->payload_bytes) ||
        is_foreign == is_zero(notes->base_volume, PCC_UUID_BYTES))
        return -PCC_E_DAMAGED;
    return is_foreign ? -PCC_E_FOREIGN_BASE : 0;
}

int pcc_manifest_accept(const void *manifest, const struct pcc_record *volume, uint32_t slot,
                        const struct pcc_slot_entry *entry, const struct pcc_slot_entry *base)
{
    const struct pcc_manifest_header *found = manifest;
    uint8_t digest[PCC_DIGEST_BYTES];

    if (entry->manifest_bytes != pcc_manifest_bytes(entry->payload_bytes, volume->block_bytes,
                                                    entry->base_sequence != 0) ||
        pcc_entry_has_base(entry) != (base != NULL))
        return -PCC_E_DAMAGED;
    manifest_digest(manifest, entry->manifest_bytes, digest);
    const struct pcc_manifest_header expected = manifest_header(volume, slot, &found->notes, entry);
    if (memcmp(digest, entry->manifest_digest, sizeof digest) != 0 ||
        memcmp(manifest, &expected, offsetof(struct pcc_manifest_header, reserved)) != 0)
        return -PCC_E_DAMAGED;
    const int result = accept_notes(&found->notes, entry);
    if (result != 0 || base == NULL)
        return result;
    const uint64_t *bitmap =
        pcc_manifest_bitmap((void *)(uintptr_t)manifest, entry->payload_bytes, volume->block_bytes);
    return bitmap_is_sound(bitmap, entry, base, volume->block_bytes) ? 0 : -PCC_E_DAMAGED;
}

int pcc_manifest_trust(const void *manifest, uint64_t manifest_bytes,
                       const uint8_t digest[PCC_DIGEST_BYTES])
{
    const struct pcc_manifest_header *found = manifest;
    uint8_t actual[PCC_DIGEST_BYTES];

    if (manifest_bytes < sizeof *found)
        return -PCC_E_DAMAGED;
    manifest_digest(manifest, manifest_bytes, actual);
    if (memcmp(actual, digest, sizeof actual) != 0 || found->magic != PCC_MANIFEST_MAGIC ||
        found->format_version != PCC_FORMAT_VERSION || found->header_bytes != sizeof *found ||
        !block_bytes_are_sound(found->block_bytes) || found->payload_bytes == 0 ||
        manifest_bytes !=
            pcc_manifest_bytes(found->payload_bytes, found->block_bytes, found->base_sequence != 0))
        return -PCC_E_DAMAGED;
    return pcc_is_within(found->tree_offset_bytes, found->tree_bytes, found->payload_bytes)
               ? 0
               : -PCC_E_DAMAGED;
}

void pcc_checksums_make(const void *bytes, uint64_t length_bytes, uint32_t block_bytes,
                        uint64_t *out)
{
    for (uint64_t at = 0; at < length_bytes; at += block_bytes)
        *out++ = pcc_hash_bytes((const uint8_t *)bytes + at,
                                pcc_piece_bytes(length_bytes, at, block_bytes));
}

bool pcc_checksums_match(const void *bytes, uint64_t length_bytes, uint32_t block_bytes,
                         const uint64_t *expected)
{
    for (uint64_t at = 0; at < length_bytes; at += block_bytes)
        if (pcc_hash_bytes((const uint8_t *)bytes + at,
                           pcc_piece_bytes(length_bytes, at, block_bytes)) != *expected++)
            return false;
    return true;
}
