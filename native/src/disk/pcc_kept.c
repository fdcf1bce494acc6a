#include "disk/pcc_kept.h"

#include <string.h>

#ifdef PCC_KEPT_WATCHED
__attribute__((weak)) void pcc_kept_stored(void)
{
}
#else
static inline void pcc_kept_stored(void)
{
}
#endif

#define HEADER_BYTES 4096u
#define PLACES_MAX (2u * PCC_SLOTS_MAX + 16u) /* of lanes, and for what is parked */
#define CHUNK_BYTES_MAX (1u << 30)

/* Releases: what stands before one in the program is in memory when it is. */
static void store64(_Atomic uint64_t *to, uint64_t value)
{
    PCC_WRITE_RELEASE(to, value);
    pcc_kept_stored();
}

static void store32(_Atomic uint32_t *to, uint32_t value)
{
    PCC_WRITE_RELEASE(to, value);
    pcc_kept_stored();
}

/* -- layout -- */

static bool plan(struct pcc_kept *kept, const struct pcc_kept_shape *shape)
{
    if (shape->places == 0 || shape->places > PLACES_MAX || shape->chunk_bytes == 0 ||
        shape->chunk_bytes > CHUNK_BYTES_MAX || shape->chunk_bytes % PCC_IO_ALIGN != 0 ||
        shape->block_bytes < PCC_BLOCK_BYTES_MIN || shape->chunk_bytes % shape->block_bytes != 0 ||
        shape->slot_stride_bytes == 0 || shape->slot_stride_bytes >> 56 != 0)
        return false;
    const uint64_t pieces = pcc_ceil_div(shape->slot_stride_bytes, shape->chunk_bytes);
    if (pieces > UINT32_MAX)
        return false;
    kept->piece_capacity = (uint32_t)pieces;
    kept->manifest_at = pcc_align_up(
        sizeof(struct pcc_kept_save) + pieces * sizeof(struct pcc_kept_piece), PCC_IO_ALIGN);
    kept->place_bytes =
        kept->manifest_at +
        pcc_align_up(pcc_manifest_bytes(shape->slot_stride_bytes, shape->block_bytes, true),
                     PCC_IO_ALIGN);
    kept->length_bytes = HEADER_BYTES + shape->places * kept->place_bytes;
    return true;
}

uint64_t pcc_kept_bytes(const struct pcc_kept_shape *shape)
{
    struct pcc_kept kept;

    return plan(&kept, shape) ? kept.length_bytes : 0;
}

void pcc_kept_make(struct pcc_kept *kept, void *bytes, const struct pcc_kept_shape *shape,
                   const struct pcc_record *volume)
{
    PCC_ASSERT(plan(kept, shape));
    kept->bytes = bytes;
    struct pcc_kept_header *header = pcc_kept_header(kept);
    header->version = PCC_KEPT_VERSION;
    header->places = shape->places;
    header->chunk_bytes = shape->chunk_bytes;
    header->block_bytes = shape->block_bytes;
    header->slot_stride_bytes = shape->slot_stride_bytes;
    memcpy(header->volume_uuid, volume->volume_uuid, PCC_UUID_BYTES);
    header->uid = volume->uid;
    header->rank = volume->rank;
    header->job_bytes = volume->job_bytes;
    memcpy(header->job, volume->job, PCC_JOB_BYTES_MAX);
    header->total_bytes = kept->length_bytes;
    header->magic = PCC_KEPT_MAGIC;
}

int pcc_kept_accept(struct pcc_kept *kept, void *bytes, uint64_t length_bytes)
{
    const struct pcc_kept_header *header = bytes;

    if (length_bytes < HEADER_BYTES || header->magic != PCC_KEPT_MAGIC)
        return -PCC_E_DAMAGED;
    if (header->version != PCC_KEPT_VERSION)
        return -PCC_E_NEWER_FORMAT;
    const struct pcc_kept_shape shape = {.places = header->places,
                                         .chunk_bytes = header->chunk_bytes,
                                         .block_bytes = header->block_bytes,
                                         .slot_stride_bytes = header->slot_stride_bytes};
    if (header->job_bytes == 0 || header->job_bytes > PCC_JOB_BYTES_MAX || !plan(kept, &shape) ||
        kept->length_bytes != length_bytes || header->total_bytes != length_bytes)
        return -PCC_E_DAMAGED;
    kept->bytes = bytes;
    return 0;
}

static uint8_t *place_at(const struct pcc_kept *kept, uint32_t place)
{
    return kept->bytes + HEADER_BYTES + place * kept->place_bytes;
}

struct pcc_kept_save *pcc_kept_save(const struct pcc_kept *kept, uint32_t place)
{
    return (struct pcc_kept_save *)(void *)place_at(kept, place);
}

struct pcc_kept_piece *pcc_kept_piece(const struct pcc_kept *kept, uint32_t place,
                                      uint32_t position)
{
    return (struct pcc_kept_piece *)(void *)(place_at(kept, place) + sizeof(struct pcc_kept_save)) +
           position;
}

uint8_t *pcc_kept_manifest(const struct pcc_kept *kept, uint32_t place)
{
    return place_at(kept, place) + kept->manifest_at;
}

bool pcc_kept_is_copied(const struct pcc_kept *kept, uint32_t place)
{
    const struct pcc_kept_save *save = pcc_kept_save(kept, place);
    const struct pcc_slot_entry *entry = &save->entry;
    const uint64_t commit = PCC_READ_ACQUIRE(&save->commit);
    const uint64_t room = pcc_kept_header(kept)->slot_stride_bytes;

    return commit != 0 && commit == entry->sequence && entry->state == PCC_SLOT_DURABLE &&
           entry->payload_bytes > 0 && entry->payload_bytes <= room &&
           pcc_is_within(entry->tree_offset_bytes, entry->tree_bytes, entry->payload_bytes) &&
           (entry->flags & ~(PCC_SLOT_IMAGE | PCC_SLOT_MARKS)) == 0 &&
           pcc_notes_are_sound(&save->notes, entry->payload_bytes);
}

/* -- the writer -- */

void pcc_kept_begin(const struct pcc_kept *kept, uint32_t place, const struct pcc_slot_entry *entry,
                    const struct pcc_manifest_notes *notes, uint32_t slot, uint32_t piece_count,
                    uint64_t base_sequence)
{
    if (kept == NULL)
        return;
    struct pcc_kept_save *save = pcc_kept_save(kept, place);
    store64(&save->commit, 0);
    /* The entry must not be seen with the commit before it. */
    atomic_thread_fence(memory_order_release);
    memset(pcc_kept_piece(kept, place, 0), 0, piece_count * sizeof(struct pcc_kept_piece));
    pcc_kept_entry(kept, place, entry, notes);
    store64(&save->base_sequence, base_sequence);
    store32(&save->slot, slot);
}

void pcc_kept_entry(const struct pcc_kept *kept, uint32_t place, const struct pcc_slot_entry *entry,
                    const struct pcc_manifest_notes *notes)
{
    if (kept == NULL)
        return;
    pcc_kept_save(kept, place)->entry = *entry;
    pcc_kept_save(kept, place)->notes = *notes;
}

void pcc_kept_base(const struct pcc_kept *kept, uint32_t place, uint64_t base_sequence)
{
    if (kept != NULL)
        store64(&pcc_kept_save(kept, place)->base_sequence, base_sequence);
}

void pcc_kept_chunk(const struct pcc_kept *kept, uint32_t place, uint32_t position,
                    uint64_t segment, uint32_t chunk, bool hashed)
{
    if (kept == NULL)
        return;
    struct pcc_kept_piece *piece = pcc_kept_piece(kept, place, position);
    store32(&piece->flags, hashed ? PCC_KEPT_HASHED : 0);
    piece->chunk = chunk;
    store64(&piece->segment, segment);
}

static void flag(const struct pcc_kept *kept, uint32_t place, uint32_t position, uint32_t set)
{
    if (kept == NULL)
        return;
    (void)atomic_fetch_or_explicit(&pcc_kept_piece(kept, place, position)->flags, set,
                                   memory_order_release);
    pcc_kept_stored();
}

static void unflag(const struct pcc_kept *kept, uint32_t place, uint32_t position, uint32_t cleared)
{
    if (kept == NULL)
        return;
    (void)atomic_fetch_and_explicit(&pcc_kept_piece(kept, place, position)->flags, ~cleared,
                                    memory_order_release);
    pcc_kept_stored();
}

void pcc_kept_hashed(const struct pcc_kept *kept, uint32_t place, uint32_t position)
{
    flag(kept, place, position, PCC_KEPT_HASHED);
}

void pcc_kept_written(const struct pcc_kept *kept, uint32_t place, uint32_t position)
{
    flag(kept, place, position, PCC_KEPT_WRITTEN);
}

void pcc_kept_referred(const struct pcc_kept *kept, uint32_t place, uint32_t position,
                       bool referred)
{
    if (referred)
        flag(kept, place, position, PCC_KEPT_HASHED | PCC_KEPT_REFERRED);
    else
        unflag(kept, place, position, PCC_KEPT_REFERRED);
}

void pcc_kept_reused(const struct pcc_kept *kept, uint32_t place, uint32_t position)
{
    if (kept == NULL)
        return;
    store64(&pcc_kept_piece(kept, place, position)->segment, 0);
    /* The next user of the memory writes to it after this. */
    atomic_thread_fence(memory_order_seq_cst);
}

void pcc_kept_moved(const struct pcc_kept *kept, uint32_t place, uint32_t slot,
                    uint32_t piece_count)
{
    if (kept == NULL)
        return;
    for (uint32_t i = 0; i < piece_count; i++)
        unflag(kept, place, i, PCC_KEPT_WRITTEN);
    store32(&pcc_kept_save(kept, place)->slot, slot);
}

void pcc_kept_copied(const struct pcc_kept *kept, uint32_t place)
{
    if (kept != NULL)
        store64(&pcc_kept_save(kept, place)->commit, pcc_kept_save(kept, place)->entry.sequence);
}

void pcc_kept_end(const struct pcc_kept *kept, uint32_t place)
{
    if (kept != NULL)
        store64(&pcc_kept_save(kept, place)->commit, 0);
}
