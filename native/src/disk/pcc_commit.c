/* Commit records: which one counts when a volume is opened, and how the next one is written.
 *
 * The order that durability rests on: replica A durable, acknowledged, replica B durable, and only
 * then may a slot that the record no longer names be used again (pcc_volume.c). Any error on the
 * way stops the volume: what is on the media is unknown until it is read again. */
#include <stdlib.h>
#include <string.h>

#include "disk/pcc_volume_private.h"

uint64_t pcc_commit_newest(const struct pcc_record *record)
{
    uint64_t newest = 0;

    for (uint32_t slot = 0; slot < record->slot_count; slot++) {
        const struct pcc_slot_entry *entry = &record->slots[slot];
        if (entry->state == PCC_SLOT_DURABLE && (entry->flags & PCC_SLOT_DAMAGED) == 0 &&
            entry->sequence > newest)
            newest = entry->sequence;
    }
    return newest;
}

/* -- what to keep -- */

/* Undamaged ones come before damaged ones, newer before older. */
static bool is_worth_more(const struct pcc_slot_entry *one, const struct pcc_slot_entry *other)
{
    const bool damaged = (one->flags & PCC_SLOT_DAMAGED) != 0;
    const bool other_damaged = (other->flags & PCC_SLOT_DAMAGED) != 0;

    return damaged != other_damaged ? other_damaged : one->sequence > other->sequence;
}

static uint32_t rank_of(const struct pcc_record *record, uint32_t slot)
{
    uint32_t rank = 0;

    for (uint32_t other = 0; other < record->slot_count; other++)
        if (other != slot && record->slots[other].state == PCC_SLOT_DURABLE &&
            is_worth_more(&record->slots[other], &record->slots[slot]))
            rank++;
    return rank;
}

bool pcc_commit_is_grouped(const struct pcc_record *record)
{
    if (record->world_size > 1)
        return true;
    /* A start of one rank: which of these all ranks have only the group knows. */
    for (uint32_t slot = 0; slot < record->slot_count; slot++)
        if (record->slots[slot].state == PCC_SLOT_DURABLE && record->slots[slot].world_size > 1)
            return true;
    return false;
}

bool pcc_commit_gives_up(const struct pcc_volume_group *group, uint64_t sequence)
{
    for (uint32_t i = 0; i < group->given_up_count; i++)
        if (group->given_up[i] == sequence)
            return true;
    return false;
}

static bool is_kept(const struct pcc_record *record, uint32_t slot, uint32_t keep,
                    const struct pcc_volume_group *group)
{
    const struct pcc_slot_entry *entry = &record->slots[slot];

    if ((entry->flags & PCC_SLOT_LASTING) != 0)
        return true;
    if (pcc_commit_is_grouped(record))
        return entry->sequence >= group->oldest && !pcc_commit_gives_up(group, entry->sequence);
    return rank_of(record, slot) < keep;
}

/* With no slot left, the next checkpoint may have this one's. A lone rank never gives away its best
 * one, and a group not its newest common one, nor what may yet become common. */
static bool is_dispensable(const struct pcc_record *record, uint32_t slot,
                           const struct pcc_volume_group *group)
{
    const struct pcc_slot_entry *entry = &record->slots[slot];

    if ((entry->flags & PCC_SLOT_LASTING) != 0)
        return false;
    return pcc_commit_is_grouped(record) ? entry->sequence < group->newest
                                         : rank_of(record, slot) > 0;
}

/* Something that stays may yet become common: its slot comes free when the other ranks follow. */
static bool is_waiting_for_ranks(const struct pcc_record *record, uint32_t staying,
                                 const struct pcc_volume_group *group)
{
    if (!pcc_commit_is_grouped(record))
        return false;
    for (uint32_t slot = 0; slot < record->slot_count; slot++)
        if ((staying >> slot & 1u) != 0 && record->slots[slot].sequence > group->newest)
            return true;
    return false;
}

/* The one worth least of `mask` that may go; PCC_SLOTS_MAX when none may. */
static uint32_t find_worst(const struct pcc_record *record, uint32_t mask,
                           const struct pcc_volume_group *group)
{
    uint32_t worst = PCC_SLOTS_MAX;

    for (uint32_t slot = 0; slot < record->slot_count; slot++) {
        const struct pcc_slot_entry *entry = &record->slots[slot];
        if ((mask >> slot & 1u) == 0 || !is_dispensable(record, slot, group))
            continue;
        if (worst == PCC_SLOTS_MAX || is_worth_more(&record->slots[worst], entry))
            worst = slot;
    }
    return worst;
}

uint32_t pcc_commit_expendable(const struct pcc_record *record, uint32_t keep,
                               const struct pcc_volume_group *group, uint32_t in_use)
{
    uint32_t durable = 0, kept = 0;

    for (uint32_t slot = 0; slot < record->slot_count; slot++) {
        if (record->slots[slot].state != PCC_SLOT_DURABLE)
            continue;
        durable |= 1u << slot;
        if (is_kept(record, slot, keep, group))
            kept |= 1u << slot;
    }
    PCC_ASSERT((in_use & ~durable) == 0);
    /* A base stays as long as the last one that refers to it. */
    uint32_t bases = in_use | pcc_record_bases(record, kept);
    if (is_waiting_for_ranks(record, kept | bases, group))
        return durable & ~(kept | bases);
    /* The next checkpoint needs a slot: when all slots are kept, the one worth least goes. A slot
     * in quarantine is not kept: pcc_volume_take_slot uses it before anything durable goes. */
    while ((uint32_t)__builtin_popcount(kept | bases) >= record->slot_count) {
        const uint32_t worst = find_worst(record, kept & ~bases, group);
        if (worst == PCC_SLOTS_MAX)
            break;
        kept &= ~(1u << worst);
        bases = in_use | pcc_record_bases(record, kept);
    }
    return durable & ~(kept | bases);
}

/* -- writing -- */

/* Seals the buffer for one position, checks it as a reader would, and makes it durable there. */
static int write_replica(struct pcc_volume *volume, uint32_t replica)
{
    struct pcc_record *record = volume->buffer;
    const uint32_t generation = (uint32_t)(record->record_number % PCC_GENERATIONS);

    pcc_record_seal(record, generation, replica);
    PCC_ASSERT(pcc_record_accept(record, record->offset_bytes) == 0);
    int result =
        pcc_io_write_durable_all(volume->io, record, PCC_RECORD_BYTES, record->offset_bytes);
    /* A record that is durable in a file without its name is lost, too. */
    if (result == 0)
        result = pcc_volume_in_place(volume);
    if (result != 0)
        /* Release: pairs with the acquire in pcc_volume_stopped(). */
        PCC_WRITE_RELEASE(&volume->stopped, true);
    return result;
}

static void prepare(struct pcc_volume *volume)
{
    struct pcc_record *next = volume->buffer;

    PCC_LOCKED(&volume->lock);
    *next = volume->staged;
    next->record_number = volume->durable.record_number + 1;
    next->previous_hash = pcc_hash_bytes(&volume->durable, sizeof volume->durable);
    /* Sequences that were given out but never published are passed over as well. */
    next->next_sequence = PCC_READ(&volume->next_sequence);
}

/* With `lock` held: the newest durable sequence without a damage flag, neither on the media nor
 * among the flags that wait for the next record. */
static uint64_t newest_sound(const struct pcc_volume *volume)
{
    struct pcc_record record = volume->durable;

    for (uint32_t slot = 0; slot < record.slot_count; slot++)
        if (volume->staged.slots[slot].sequence == record.slots[slot].sequence)
            record.slots[slot].flags |= volume->staged.slots[slot].flags & PCC_SLOT_DAMAGED;
    return pcc_commit_newest(&record);
}

void pcc_commit_superseding(struct pcc_volume *volume)
{
    const uint64_t sequence =
        pcc_commit_is_grouped(&volume->durable) ? volume->group.newest : newest_sound(volume);
    /* Release: pairs with the acquire in pcc_volume_superseding(). */
    PCC_WRITE_RELEASE(&volume->superseding, sequence);
}

int pcc_commit_staged(struct pcc_volume *volume, void (*on_durable)(void *context), void *context)
{
    if (PCC_READ_ACQUIRE(&volume->stopped))
        return -PCC_E_STOPPED;
    prepare(volume);
    int result = write_replica(volume, 0);
    if (result != 0)
        return result;
    (void)pthread_mutex_lock(&volume->lock);
    volume->durable = *volume->buffer;
    pcc_commit_superseding(volume);
    (void)pthread_mutex_unlock(&volume->lock);
    if (on_durable)
        on_durable(context);
    return write_replica(volume, 1);
}

int pcc_commit_opening(struct pcc_volume *volume, const struct pcc_commit_found *found)
{
    /* A generation of which neither replica can be read may hold the newest record. Writing would
     * destroy it, though the next attempt to read it might succeed. */
    for (uint32_t generation = 0; generation < PCC_GENERATIONS; generation++)
        if (found->unreadable[generation] == PCC_REPLICAS)
            return found->read_error;
    PCC_LOCKED(&volume->publishing);
    /* First writes what is missing of the newest record. Otherwise, while the next record is
     * written, a single replica might be the only intact one. */
    for (uint32_t replica = 0; replica < PCC_REPLICAS; replica++) {
        if (found->good[replica])
            continue;
        *volume->buffer = found->record;
        const int result = write_replica(volume, replica);
        if (result != 0)
            return result;
        volume->health.repaired_replicas++;
    }
    volume->staged.boot_epoch++;
    return pcc_commit_staged(volume, NULL, NULL);
}

/* -- finding -- */

struct search {
    struct pcc_io *io;
    struct pcc_record *buffer;
    struct pcc_commit_found *found;
    bool any;        /* found->record holds an acceptable one */
    bool looks_like; /* something with our magic was there */
    int refused;     /* why an intact record is not for this version; 0: none is */
    int read_error;
    bool valid[PCC_GENERATIONS];
    bool have_other; /* the acceptable record of the other generation, for the chain */
    struct pcc_record other;
};

/* Reads one position; true when an acceptable record is in the buffer. */
static bool read_position(struct search *search, uint64_t offset)
{
    if (offset % PCC_IO_ALIGN != 0 ||
        !pcc_is_within(offset, PCC_RECORD_BYTES, search->io->size_bytes))
        return false;
    int result = pcc_io_read_all(search->io, search->buffer, PCC_RECORD_BYTES, offset);
    if (result != 0) {
        search->read_error = result;
        return false;
    }
    result = pcc_record_accept(search->buffer, offset);
    search->looks_like |= result != -PCC_E_NOT_A_VOLUME;
    if (result == -PCC_E_OLDER_FORMAT || result == -PCC_E_NEWER_FORMAT ||
        result == -PCC_E_UNKNOWN_FLAG)
        search->refused = result;
    return result == 0;
}

/* Any acceptable record tells the geometry. Position 0 is the same whatever the stride. Strides are
 * tried upwards: up to the true one, all positions lie in the record areas, so that no payload,
 * which is the user's, is ever taken for a record. */
static bool find_geometry(struct search *search, struct pcc_geometry *out)
{
    const uint64_t size = search->io->size_bytes / PCC_IO_ALIGN * PCC_IO_ALIGN;

    if (read_position(search, 0)) {
        *out = pcc_record_geometry(search->buffer);
        return true;
    }
    for (uint64_t stride = PCC_RECORD_STRIDE_MIN; stride <= PCC_RECORD_STRIDE_DEFAULT;
         stride *= 2) {
        const uint64_t positions[] = {stride, size - 2 * stride, size - stride};
        if (size < 4 * stride)
            break;
        for (size_t i = 0; i < sizeof positions / sizeof positions[0]; i++) {
            if (!read_position(search, positions[i]))
                continue;
            *out = pcc_record_geometry(search->buffer);
            return true;
        }
    }
    return false;
}

static void take_position(struct search *search, const struct pcc_geometry *geometry,
                          uint32_t generation, uint32_t replica)
{
    const uint64_t offset = pcc_geometry_record_offset(geometry, generation, replica);
    struct pcc_commit_found *found = search->found;

    search->read_error = 0;
    if (!read_position(search, offset)) {
        found->damaged_records++;
        if (search->read_error != 0) {
            found->unreadable[generation]++;
            found->read_error = search->read_error;
        }
        return;
    }
    search->valid[generation] = true;
    if (search->any && search->buffer->record_number < found->record.record_number) {
        search->have_other = true;
        search->other = *search->buffer;
        return;
    }
    if (!search->any || search->buffer->record_number > found->record.record_number) {
        search->have_other = search->any;
        search->other = found->record;
        search->any = true;
        found->record = *search->buffer;
        found->good[0] = found->good[1] = false;
    }
    found->good[replica] = true;
}

/* The hash of the record before: a mismatch means that a write between the two was lost. */
static bool chain_is_broken(const struct search *search)
{
    struct pcc_record before = search->other;

    if (!search->have_other || before.record_number + 1 != search->found->record.record_number)
        return false;
    pcc_record_seal(&before, before.generation, 0);
    return pcc_hash_bytes(&before, sizeof before) != search->found->record.previous_hash;
}

/* A volume whose second generation was never written is whole: number 1 is its first record. */
static bool is_blank(struct search *search, const struct pcc_geometry *geometry,
                     uint32_t generation, uint32_t replica)
{
    const uint64_t offset = pcc_geometry_record_offset(geometry, generation, replica);

    return pcc_io_read_all(search->io, search->buffer, PCC_RECORD_BYTES, offset) == 0 &&
           search->buffer->magic == 0;
}

static int find_newest(struct search *search)
{
    struct pcc_commit_found *found = search->found;
    struct pcc_geometry geometry;

    if (!find_geometry(search, &geometry)) {
        if (search->refused != 0)
            return search->refused;
        if (search->looks_like)
            return -PCC_E_DAMAGED;
        return search->read_error != 0 ? search->read_error : -PCC_E_NOT_A_VOLUME;
    }
    /* Behind the last record there is padding only: a file without it is whole. */
    if (pcc_geometry_record_offset(&geometry, PCC_GENERATIONS - 1, PCC_REPLICAS - 1) +
            PCC_RECORD_BYTES >
        search->io->size_bytes)
        return -PCC_E_TRUNCATED;
    for (uint32_t generation = 0; generation < PCC_GENERATIONS; generation++)
        for (uint32_t replica = 0; replica < PCC_REPLICAS; replica++)
            take_position(search, &geometry, generation, replica);
    if (search->refused != 0)
        return search->refused;
    if (!search->any) /* it was there a moment ago */
        return found->read_error != 0 ? found->read_error : -PCC_E_DAMAGED;
    if (chain_is_broken(search))
        found->damaged_records++;
    found->record_lost = !search->valid[0] || !search->valid[1];
    if (found->record.record_number == 1)
        for (uint32_t replica = 0; replica < PCC_REPLICAS; replica++)
            if (found->damaged_records > 0 && is_blank(search, &geometry, 0, replica)) {
                found->damaged_records--;
                found->record_lost = false;
            }
    pcc_record_seal(&found->record, found->record.generation, 0);
    return 0;
}

int pcc_commit_find(struct pcc_io *io, struct pcc_commit_found *out)
{
    struct search search = {.io = io, .found = out};

    memset(out, 0, sizeof *out);
    search.buffer = aligned_alloc(PCC_IO_ALIGN, PCC_RECORD_BYTES);
    if (!search.buffer)
        return -ENOMEM;
    const int result = find_newest(&search);
    free(search.buffer);
    return result;
}
