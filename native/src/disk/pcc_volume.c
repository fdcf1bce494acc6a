#include <stdlib.h>
#include <string.h>

#include "disk/pcc_volume_private.h"

#define PATIENCE_MAX 1024u
#define REST_MAX 63u

/* -- opening and closing -- */

static void find_free(struct pcc_volume *volume)
{
    volume->last_slot = volume->geometry.slot_count - 1;
    for (uint32_t slot = 0; slot < volume->geometry.slot_count; slot++) {
        const struct pcc_slot_entry *entry = &volume->durable.slots[slot];
        if (entry->state == PCC_SLOT_FREE && (entry->flags & PCC_SLOT_QUARANTINED) == 0)
            volume->free_slots |= 1u << slot;
    }
}

int pcc_volume_open_io(struct pcc_io *io, bool writable, struct pcc_volume **out)
{
    struct pcc_commit_found found;
    struct pcc_volume *volume = calloc(1, sizeof *volume);
    int result = -ENOMEM;

    if (!volume) {
        pcc_io_close(io);
        return result;
    }
    volume->io = io;
    volume->writable = writable;
    (void)pthread_mutex_init(&volume->publishing, NULL);
    (void)pthread_mutex_init(&volume->lock, NULL);
    volume->buffer = aligned_alloc(PCC_IO_ALIGN, PCC_RECORD_BYTES);
    if (!volume->buffer)
        goto fail;
    result = pcc_commit_find(io, &found);
    if (result != 0)
        goto fail;
    volume->geometry = pcc_record_geometry(&found.record);
    volume->durable = volume->staged = found.record;
    volume->staged.record_lost |= found.record_lost;
    if (!writable) /* no record of this opening will say so */
        volume->durable.record_lost = volume->staged.record_lost;
    volume->health.valid_replicas = (uint32_t)found.good[0] + (uint32_t)found.good[1];
    volume->health.damaged_records = found.damaged_records;
    atomic_init(&volume->next_sequence, found.record.next_sequence);
    pcc_commit_superseding(volume);
    if (writable) {
        result = pcc_commit_opening(volume, &found);
        if (result != 0)
            goto fail;
    }
    find_free(volume);
    *out = volume;
    return 0;
fail:
    pcc_volume_close(volume);
    return result;
}

void pcc_volume_close(struct pcc_volume *volume)
{
    if (!volume)
        return;
    pcc_io_close(volume->io);
    (void)pthread_mutex_destroy(&volume->publishing);
    (void)pthread_mutex_destroy(&volume->lock);
    pcc_named_file_destroy(&volume->file);
    free(volume->buffer);
    free(volume);
}

/* -- looking -- */

void pcc_volume_record(struct pcc_volume *volume, struct pcc_record *durable_out)
{
    PCC_LOCKED(&volume->lock);
    *durable_out = volume->durable;
}

struct pcc_volume_health pcc_volume_health(struct pcc_volume *volume)
{
    PCC_LOCKED(&volume->lock);
    return volume->health;
}

struct pcc_geometry pcc_volume_geometry(const struct pcc_volume *volume)
{
    return volume->geometry;
}

struct pcc_io *pcc_volume_io(struct pcc_volume *volume)
{
    return volume->io;
}

uint32_t pcc_volume_free_slots(struct pcc_volume *volume)
{
    PCC_LOCKED(&volume->lock);
    return (uint32_t)__builtin_popcount(volume->free_slots);
}

bool pcc_volume_stopped(struct pcc_volume *volume)
{
    /* Acquire: pairs with the release where a record write failed. */
    return PCC_READ_ACQUIRE(&volume->stopped);
}

int pcc_volume_in_place(const struct pcc_volume *volume)
{
    return pcc_named_file_check(&volume->file);
}

uint64_t pcc_volume_superseding(struct pcc_volume *volume)
{
    /* Acquire: pairs with the release in pcc_commit_superseding(). */
    return PCC_READ_ACQUIRE(&volume->superseding);
}

bool pcc_volume_gives_up(struct pcc_volume *volume, uint64_t sequence)
{
    /* Relaxed: a save that misses a new list looks again before its record. */
    if (PCC_READ(&volume->given_up_count) == 0)
        return false;
    PCC_LOCKED(&volume->lock);
    return pcc_commit_gives_up(&volume->group, sequence);
}

static int find_sequence(const struct pcc_record *record, uint64_t sequence, uint32_t *slot_out)
{
    *slot_out = pcc_record_find(record, sequence);
    return *slot_out < PCC_SLOTS_MAX ? 0 : -ENOENT;
}

/* -- policy -- */

/* With `lock` held. A checkpoint that the record under way drops is not found. */
static int find_lasting(const struct pcc_volume *volume, uint64_t sequence, uint32_t *slot_out)
{
    uint32_t staged_slot;

    int result = find_sequence(&volume->durable, sequence, slot_out);
    if (result == 0)
        result = find_sequence(&volume->staged, sequence, &staged_slot);
    PCC_ASSERT(result != 0 || *slot_out == staged_slot);
    return result;
}

/* With `lock` held: the bases of saves in flight. */
static uint32_t in_use(const struct pcc_volume *volume)
{
    uint32_t mask = 0;

    for (uint32_t slot = 0; slot < volume->geometry.slot_count; slot++)
        if (volume->references[slot] > 0)
            mask |= 1u << slot;
    return mask;
}

/* With `lock` held. */
static uint32_t expendable(const struct pcc_volume *volume, uint32_t keep,
                           const struct pcc_volume_group *group)
{
    const uint32_t spared = volume->spared | pcc_record_bases(&volume->staged, volume->spared);

    return pcc_commit_expendable(&volume->staged, keep, group, in_use(volume)) & ~spared;
}

int pcc_volume_publish_staged(struct pcc_volume *volume)
{
    if (!volume->writable)
        return -EROFS;
    PCC_LOCKED(&volume->publishing);
    return pcc_commit_staged(volume, NULL, NULL);
}

int pcc_volume_flag(struct pcc_volume *volume, uint64_t sequence, uint32_t set, uint32_t clear,
                    bool now)
{
    const uint32_t allowed = PCC_SLOT_LASTING | PCC_SLOT_DAMAGED | PCC_SLOT_MARKS;
    uint32_t slot;

    if (!volume->writable)
        return -EROFS;
    if (((set | clear) & ~allowed) != 0 || (set & clear) != 0)
        return -EINVAL;
    (void)pthread_mutex_lock(&volume->lock);
    const int result = find_lasting(volume, sequence, &slot);
    if (result == 0) {
        struct pcc_slot_entry *entry = &volume->staged.slots[slot];
        entry->flags = (entry->flags | set) & ~clear;
        pcc_commit_superseding(volume);
    }
    (void)pthread_mutex_unlock(&volume->lock);
    return result == 0 && now ? pcc_volume_publish_staged(volume) : result;
}

int pcc_volume_spare(struct pcc_volume *volume, uint64_t sequence, bool spared)
{
    uint32_t slot;

    if (!volume->writable)
        return -EROFS;
    PCC_LOCKED(&volume->lock);
    const int result = find_lasting(volume, sequence, &slot);
    if (result == 0)
        volume->spared = spared ? volume->spared | 1u << slot : volume->spared & ~(1u << slot);
    return result;
}

int pcc_volume_begin_incarnation(struct pcc_volume *volume, uint64_t incarnation,
                                 const uint8_t start_id[PCC_UUID_BYTES], uint32_t world_size)
{
    if (!volume->writable)
        return -EROFS;
    (void)pthread_mutex_lock(&volume->lock);
    if (volume->staged.incarnation != incarnation) {
        volume->start_before.incarnation = volume->staged.incarnation;
        memcpy(volume->start_before.id, volume->staged.start_id, PCC_UUID_BYTES);
    }
    volume->staged.incarnation = incarnation;
    memcpy(volume->staged.start_id, start_id, PCC_UUID_BYTES);
    volume->staged.world_size = world_size;
    volume->staged.done = 0;
    (void)pthread_mutex_unlock(&volume->lock);
    return pcc_volume_publish_staged(volume);
}

void pcc_volume_start_id(struct pcc_volume *volume, uint64_t incarnation,
                         uint8_t out[PCC_UUID_BYTES])
{
    memset(out, 0, PCC_UUID_BYTES);
    PCC_LOCKED(&volume->lock);
    if (volume->staged.incarnation == incarnation)
        memcpy(out, volume->staged.start_id, PCC_UUID_BYTES);
    else if (volume->start_before.incarnation == incarnation)
        memcpy(out, volume->start_before.id, PCC_UUID_BYTES);
}

int pcc_volume_promise(struct pcc_volume *volume, const struct pcc_promise *promise)
{
    if (!volume->writable)
        return -EROFS;
    if (promise->number == 0)
        return -EINVAL;
    (void)pthread_mutex_lock(&volume->lock);
    const struct pcc_promise *before = &volume->staged.promise;
    const bool rises = promise->number > before->number ||
                       (promise->number == before->number &&
                        memcmp(promise->start_id, before->start_id, PCC_UUID_BYTES) > 0);
    if (rises)
        volume->staged.promise = *promise;
    (void)pthread_mutex_unlock(&volume->lock);
    return rises ? pcc_volume_publish_staged(volume) : -EINVAL;
}

/* -- one of several ranks -- */

int pcc_volume_set_group(struct pcc_volume *volume, const struct pcc_volume_group *group)
{
    if (group->oldest > group->newest || group->given_up_count > PCC_GIVEN_UP_MAX)
        return -EINVAL;
    PCC_LOCKED(&volume->lock);
    volume->group = *group;
    pcc_commit_superseding(volume);
    PCC_WRITE(&volume->given_up_count, group->given_up_count);
    return 0;
}

bool pcc_volume_has_expendable(struct pcc_volume *volume)
{
    PCC_LOCKED(&volume->lock);
    return expendable(volume, volume->staged.keep, &volume->group) != 0;
}

bool pcc_volume_is_full(struct pcc_volume *volume)
{
    PCC_LOCKED(&volume->lock);
    for (uint32_t slot = 0; slot < volume->geometry.slot_count; slot++) {
        const struct pcc_slot_entry *entry = &volume->staged.slots[slot];
        const bool is_durable = entry->state == PCC_SLOT_DURABLE &&
                                volume->durable.slots[slot].sequence == entry->sequence;
        if (!is_durable && (entry->flags & PCC_SLOT_QUARANTINED) == 0)
            return false; /* free; or a save, a reader or the record under way has it */
    }
    return expendable(volume, volume->staged.keep, &volume->group) == 0;
}

/* -- slots -- */

/* With `lock` held. */
static void push_free(struct pcc_volume *volume, uint32_t slot)
{
    PCC_ASSERT((volume->free_slots >> slot & 1u) == 0);
    volume->free_slots |= 1u << slot;
}

/* With `lock` held: the slots of `mask` leave the staged table; the record that says so is not
 * durable yet. */
static void drop(struct pcc_volume *volume, uint32_t mask)
{
    for (uint32_t slot = 0; slot < volume->geometry.slot_count; slot++) {
        struct pcc_slot_entry *entry = &volume->staged.slots[slot];
        if ((mask >> slot & 1u) == 0)
            continue;
        /* Its damage may be its base's, and its flag leaves the table with it. */
        if ((entry->flags & PCC_SLOT_DAMAGED) != 0)
            volume->suspected |= pcc_record_bases(&volume->staged, 1u << slot);
        memset(entry, 0, sizeof *entry);
    }
    volume->suspected &= ~mask;
}

/* Both replicas of a record without these slots are durable. */
static void free_dropped(struct pcc_volume *volume, uint32_t mask)
{
    PCC_LOCKED(&volume->lock);
    for (uint32_t slot = 0; slot < volume->geometry.slot_count; slot++) {
        if ((mask >> slot & 1u) == 0)
            continue;
        if (volume->holds[slot] > 0)
            volume->free_on_release[slot] = true;
        else
            push_free(volume, slot);
    }
}

static int drop_expendable(struct pcc_volume *volume, uint32_t keep, bool done)
{
    int result = 0;

    if (!volume->writable)
        return -EROFS;
    PCC_LOCKED(&volume->publishing);
    (void)pthread_mutex_lock(&volume->lock);
    struct pcc_volume_group group = volume->group;
    if (done) {
        volume->staged.done = 1;
        /* A run that did not read the previous run's checkpoints does not drop them by its end
         * (P7). */
        group.oldest = group.newest;
    }
    const uint32_t dropped = expendable(volume, done ? keep : volume->staged.keep, &group);
    drop(volume, dropped);
    (void)pthread_mutex_unlock(&volume->lock);
    if (done || dropped != 0)
        result = pcc_commit_staged(volume, NULL, NULL);
    if (result == 0)
        free_dropped(volume, dropped);
    return result;
}

int pcc_volume_finish(struct pcc_volume *volume, uint32_t keep)
{
    return volume->writable && keep == 0 ? -EINVAL : drop_expendable(volume, keep, true);
}

int pcc_volume_recycle(struct pcc_volume *volume)
{
    return drop_expendable(volume, 0, false);
}

uint64_t pcc_volume_take_sequence(struct pcc_volume *volume, uint64_t wanted)
{
    uint64_t next = PCC_READ(&volume->next_sequence);
    uint64_t taken;

    do {
        taken = wanted != 0 ? wanted : next;
        if (taken < next)
            return 0;
    } while (!atomic_compare_exchange_weak_explicit(&volume->next_sequence, &next, taken + 1,
                                                    memory_order_relaxed, memory_order_relaxed));
    return taken;
}

/* With `lock` held: slots in quarantine are used again when every other slot holds a checkpoint
 * that must be kept. The cause may have been a cable, and every completion is checked anyway. */
static void reuse_quarantined(struct pcc_volume *volume)
{
    for (uint32_t slot = 0; slot < volume->geometry.slot_count; slot++) {
        const struct pcc_slot_entry *entry = &volume->staged.slots[slot];
        if (entry->state != PCC_SLOT_DURABLE && (entry->flags & PCC_SLOT_QUARANTINED) == 0)
            return; /* a save or a reader has it, and it becomes free */
    }
    /* A spared checkpoint is dropped first. */
    if (pcc_commit_expendable(&volume->staged, volume->staged.keep, &volume->group,
                              in_use(volume)) != 0)
        return;
    for (uint32_t slot = 0; slot < volume->geometry.slot_count; slot++) {
        struct pcc_slot_entry *entry = &volume->staged.slots[slot];
        if ((entry->flags & PCC_SLOT_QUARANTINED) == 0)
            continue;
        entry->flags &= ~PCC_SLOT_QUARANTINED;
        push_free(volume, slot);
    }
}

int pcc_volume_take_slot(struct pcc_volume *volume, uint32_t *slot_out)
{
    const uint32_t count = volume->geometry.slot_count;

    if (!volume->writable)
        return -EROFS;
    if (pcc_volume_stopped(volume))
        return -PCC_E_STOPPED;
    PCC_LOCKED(&volume->lock);
    if (volume->free_slots == 0)
        reuse_quarantined(volume);
    for (uint32_t i = 1; i <= count; i++) {
        const uint32_t slot = (volume->last_slot + i) % count;
        if ((volume->free_slots >> slot & 1u) == 0)
            continue;
        volume->free_slots &= ~(1u << slot);
        *slot_out = volume->last_slot = slot;
        return 0;
    }
    return -PCC_E_NO_SLOT;
}

bool pcc_volume_take_slot_again(struct pcc_volume *volume, uint32_t slot)
{
    if (!volume->writable || slot >= volume->geometry.slot_count)
        return false;
    PCC_LOCKED(&volume->lock);
    const bool found = (volume->free_slots >> slot & 1u) != 0;
    volume->free_slots &= ~(1u << slot);
    return found;
}

void pcc_volume_return_slot(struct pcc_volume *volume, uint32_t slot)
{
    PCC_ASSERT(slot < volume->geometry.slot_count);
    PCC_LOCKED(&volume->lock);
    push_free(volume, slot);
}

void pcc_volume_quarantine_slot(struct pcc_volume *volume, uint32_t slot)
{
    PCC_ASSERT(slot < volume->geometry.slot_count);
    PCC_LOCKED(&volume->lock);
    PCC_ASSERT(volume->staged.slots[slot].state == PCC_SLOT_FREE);
    volume->staged.slots[slot].flags |= PCC_SLOT_QUARANTINED;
}

/* -- bases -- */

/* With `lock` held. Damage of a checkpoint that refers to a base may be damage of the base. */
static bool is_sound_base(const struct pcc_volume *volume, uint64_t sequence)
{
    const struct pcc_record *staged = &volume->staged;
    const uint32_t base = pcc_record_find(staged, sequence);

    if (base == PCC_SLOTS_MAX || staged->slots[base].base_sequence != 0 ||
        (volume->suspected >> base & 1u) != 0)
        return false;
    for (uint32_t slot = 0; slot < staged->slot_count; slot++)
        if ((staged->slots[slot].flags & PCC_SLOT_DAMAGED) != 0 &&
            (slot == base || (pcc_entry_has_base(&staged->slots[slot]) &&
                              staged->slots[slot].base_sequence == sequence)))
            return false;
    return true;
}

/* With `lock` held. The base for the next save; 0: none. */
static uint64_t base_to_take(const struct pcc_volume *volume)
{
    uint64_t newest = 0, base = 0;

    for (uint32_t slot = 0; slot < volume->staged.slot_count; slot++) {
        const struct pcc_slot_entry *entry = &volume->staged.slots[slot];
        if (entry->state != PCC_SLOT_DURABLE || (entry->flags & PCC_SLOT_DAMAGED) != 0 ||
            entry->sequence <= newest || pcc_commit_gives_up(&volume->group, entry->sequence))
            continue;
        newest = entry->sequence;
        base = entry->base_sequence == 0   ? newest
               : pcc_entry_has_base(entry) ? entry->base_sequence
                                           : 0;
    }
    return base;
}

/* With `lock` held. A base takes a slot for as long as it is referred to. Beside it, and beside
 * what is pinned or protected with its bases, a volume needs a slot for the newest checkpoint, one
 * for a checkpoint that becomes protected for the next run, and one for the next save. */
static bool has_room_for_base(const struct pcc_volume *volume, uint32_t base)
{
    const struct pcc_record *staged = &volume->staged;
    uint32_t lasting = 0;

    for (uint32_t slot = 0; slot < staged->slot_count; slot++)
        if ((staged->slots[slot].flags & PCC_SLOT_LASTING) != 0)
            lasting |= 1u << slot;
    const uint32_t staying = lasting | pcc_record_bases(staged, lasting) | 1u << base;
    return staged->slot_count - staged->keep >= 2 &&
           (uint32_t)__builtin_popcount(staying) + 3 <= staged->slot_count;
}

/* With `lock` held. */
static bool take_base(struct pcc_volume *volume, uint64_t sequence, struct pcc_base *out)
{
    uint32_t slot;

    /* Durable, and not dropped by the record that is being written. */
    if (sequence == 0 || find_lasting(volume, sequence, &slot) != 0 ||
        !is_sound_base(volume, sequence))
        return false;
    volume->references[slot]++;
    *out = (struct pcc_base){.slot = slot, .entry = volume->durable.slots[slot]};
    return true;
}

bool pcc_volume_take_base(struct pcc_volume *volume, struct pcc_base *out)
{
    PCC_LOCKED(&volume->lock);
    const uint64_t sequence = base_to_take(volume);
    const uint32_t slot = pcc_record_find(&volume->staged, sequence);
    if (slot == PCC_SLOTS_MAX || sequence == volume->base.poor || !has_room_for_base(volume, slot))
        return false;
    if (volume->base.rest > 0) {
        volume->base.rest--;
        return false;
    }
    return take_base(volume, sequence, out);
}

bool pcc_volume_take_base_again(struct pcc_volume *volume, uint64_t sequence, struct pcc_base *out)
{
    PCC_LOCKED(&volume->lock);
    return take_base(volume, sequence, out);
}

void pcc_volume_leave_base(struct pcc_volume *volume, const struct pcc_base *base)
{
    PCC_LOCKED(&volume->lock);
    PCC_ASSERT(volume->references[base->slot] > 0);
    volume->references[base->slot]--;
}

/* With `lock` held. Blocks that the new base lacks, too, change each time, or lie beside bytes that
 * do: a further base is less likely to help. */
static void begin_judging(struct pcc_volume *volume, uint64_t sequence, uint64_t missed_bytes)
{
    const bool is_no_better = missed_bytes > volume->base.missed_bytes / 2;
    const bool was_replaced = volume->base.poor != 0 && volume->base.poor == volume->base.sequence;

    if (!was_replaced || !is_no_better)
        volume->base.patience = 1;
    else if (volume->base.patience < PATIENCE_MAX)
        volume->base.patience *= 2;
    volume->base.sequence = sequence;
    volume->base.wasted_bytes = 0;
}

void pcc_volume_judge_base(struct pcc_volume *volume, const struct pcc_base *base,
                           uint64_t frozen_bytes, uint64_t referred_bytes)
{
    const uint64_t sequence = base->entry.sequence;
    const uint64_t missed_bytes = frozen_bytes > referred_bytes ? frozen_bytes - referred_bytes : 0;

    PCC_LOCKED(&volume->lock);
    if (volume->base.sequence != sequence)
        begin_judging(volume, sequence, missed_bytes);
    volume->base.missed_bytes = missed_bytes;
    volume->base.wasted_bytes += missed_bytes;
    /* Where most has changed in one base after the other, it changes each time, and a base costs
     * the trainer a second look at all of it. */
    if (missed_bytes > frozen_bytes / 2 && volume->base.poor != sequence)
        volume->base.rest =
            volume->base.patience <= REST_MAX ? volume->base.patience - 1 : REST_MAX;
    if (missed_bytes > frozen_bytes / 2 ||
        (missed_bytes > 0 && volume->base.wasted_bytes / volume->base.patience >= frozen_bytes))
        volume->base.poor = sequence;
}

/* -- the publisher -- */

/* With both locks held, no other record is under way: both tables hold the same checkpoints, and
 * the staged one also damage flags that wait for the next record. A group's checkpoints become
 * durable in any order, because other ranks may lack the newest one of this rank. */
static enum pcc_published published_as(const struct pcc_volume *volume,
                                       const struct pcc_slot_entry *entry)
{
    const bool is_grouped = entry->world_size > 1 || pcc_commit_is_grouped(&volume->staged);
    const uint64_t sequence = entry->sequence;

    if (is_grouped && pcc_commit_gives_up(&volume->group, sequence))
        return PCC_PUBLISH_GIVEN_UP;
    const uint64_t newest = is_grouped ? volume->group.newest : pcc_commit_newest(&volume->staged);
    if (sequence < newest)
        return PCC_PUBLISH_SUPERSEDED;
    if (pcc_entry_has_base(entry) && !is_sound_base(volume, entry->base_sequence))
        return PCC_PUBLISH_BASE_LOST;
    return PCC_PUBLISHED;
}

/* With `publishing` held: the entry enters the staged table, unless it is not to be published. */
static enum pcc_published stage(struct pcc_volume *volume, uint32_t slot,
                                const struct pcc_slot_entry *entry, uint32_t *dropped_out)
{
    struct pcc_slot_entry *const place = &volume->staged.slots[slot];

    PCC_LOCKED(&volume->lock);
    const enum pcc_published published = published_as(volume, entry);
    if (published == PCC_PUBLISH_SUPERSEDED || published == PCC_PUBLISH_GIVEN_UP)
        push_free(volume, slot);
    if (published != PCC_PUBLISHED)
        return published;
    PCC_ASSERT(place->state == PCC_SLOT_FREE && place->flags == 0);
    *place = *entry;
    place->wall_ns = pcc_wall_ns();
    volume->staged.record_lost = 0;
    *dropped_out = expendable(volume, volume->staged.keep, &volume->group);
    PCC_ASSERT((*dropped_out >> slot & 1u) == 0);
    drop(volume, *dropped_out);
    return PCC_PUBLISHED;
}

int pcc_volume_publish(struct pcc_volume *volume, uint32_t slot, const struct pcc_slot_entry *entry,
                       enum pcc_published *out, void (*on_durable)(void *context), void *context)
{
    uint32_t dropped;

    PCC_ASSERT(volume->writable && slot < volume->geometry.slot_count);
    PCC_ASSERT(entry->state == PCC_SLOT_DURABLE && entry->sequence > 0);
    PCC_LOCKED(&volume->publishing);
    /* The file is checked first: its removal explains more than a stopped volume. */
    int result = pcc_volume_in_place(volume);
    if (result != 0) {
        pcc_volume_return_slot(volume, slot);
        return result;
    }
    if (pcc_volume_stopped(volume))
        return -PCC_E_STOPPED;
    *out = stage(volume, slot, entry, &dropped);
    if (*out != PCC_PUBLISHED)
        return 0;
    result = pcc_commit_staged(volume, on_durable, context);
    if (result == 0)
        free_dropped(volume, dropped);
    return result;
}

/* -- readers -- */

/* With `lock` held. */
static void hold(struct pcc_volume *volume, uint32_t slot, struct pcc_slot_entry *entry_out)
{
    volume->holds[slot]++;
    *entry_out = volume->durable.slots[slot];
}

int pcc_volume_hold(struct pcc_volume *volume, uint64_t sequence, struct pcc_held *out)
{
    PCC_LOCKED(&volume->lock);
    const int result = find_sequence(&volume->durable, sequence, &out->slot);
    if (result != 0)
        return result;
    hold(volume, out->slot, &out->entry);
    if (pcc_entry_has_base(&out->entry)) {
        /* The record was accepted: it is there. */
        out->base.slot = pcc_record_find(&volume->durable, out->entry.base_sequence);
        hold(volume, out->base.slot, &out->base.entry);
    }
    return 0;
}

/* With `lock` held. */
static void release(struct pcc_volume *volume, uint32_t slot)
{
    PCC_ASSERT(slot < volume->geometry.slot_count && volume->holds[slot] > 0);
    volume->holds[slot]--;
    /* It left the table while it was held: the last one to release it frees it. */
    if (volume->holds[slot] == 0 && volume->free_on_release[slot]) {
        volume->free_on_release[slot] = false;
        push_free(volume, slot);
    }
}

void pcc_volume_release(struct pcc_volume *volume, const struct pcc_held *held)
{
    PCC_LOCKED(&volume->lock);
    release(volume, held->slot);
    if (pcc_entry_has_base(&held->entry))
        release(volume, held->base.slot);
}
