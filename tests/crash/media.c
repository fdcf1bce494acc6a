#include "media.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <stdlib.h>
#include <string.h>

static uint64_t hash_sector(uint64_t index, const uint8_t *bytes)
{
    return XXH3_64bits_withSeed(bytes, SIM_SECTOR, index);
}

struct media *media_new(uint64_t size_bytes)
{
    struct media *media = calloc(1, sizeof *media);
    PCC_ASSERT(media);
    media->size_bytes = size_bytes;
    media->certain = malloc(size_bytes);
    media->image = aligned_alloc(4096, size_bytes);
    media->sector_hash = calloc(size_bytes / SIM_SECTOR, sizeof(uint64_t));
    PCC_ASSERT(media->certain && media->image && media->sector_hash);
    return media;
}

void media_free(struct media *media)
{
    free(media->certain);
    free(media->image);
    free(media->sector_hash);
    free(media);
}

void media_begin(struct media *media, const uint8_t *base, uint32_t unit_bytes, uint64_t seed)
{
    memcpy(media->certain, base, media->size_bytes);
    memcpy(media->image, base, media->size_bytes);
    media->unit_bytes = unit_bytes;
    media->unit_count = 0;
    media->overlapping = false;
    media->rng = rng_from(seed, 0x3ed1a);
    media->hash = 0;
    for (uint64_t i = 0; i < media->size_bytes / SIM_SECTOR; i++) {
        media->sector_hash[i] = hash_sector(i, base + i * SIM_SECTOR);
        media->hash ^= media->sector_hash[i];
    }
}

static uint64_t delta_of(const struct media *media, uint64_t offset, const uint8_t *bytes)
{
    uint64_t delta = 0;
    for (uint64_t at = 0; at < media->unit_bytes; at += SIM_SECTOR) {
        uint64_t index = (offset + at) / SIM_SECTOR;
        delta ^= media->sector_hash[index] ^ hash_sector(index, bytes + at);
    }
    return delta;
}

/* The last unit that was written to this place, or NULL. */
static struct media_unit *pending_at(struct media *media, uint64_t offset)
{
    for (uint32_t i = media->unit_count; i-- > 0;)
        if (media->units[i].offset == offset)
            return &media->units[i];
    return NULL;
}

/* A short write may end within a unit: that piece counts as not arrived, since whoever resumes the
 * write has to write it again. */
static void add_units(struct media *media, const struct sim_entry *entry, bool in_flight)
{
    uint64_t whole = entry->length / media->unit_bytes * media->unit_bytes;
    for (uint64_t at = 0; at < whole; at += media->unit_bytes) {
        const uint8_t *bytes = entry->bytes + at;
        uint64_t offset = entry->offset + at;
        bool settles = !entry->failed || (entry->arrived >> (at / media->unit_bytes) & 1);
        struct media_unit *pending = pending_at(media, offset);
        const uint8_t *there = pending ? pending->bytes : media->certain + offset;
        if (memcmp(there, bytes, media->unit_bytes) == 0) {
            /* Arrived or not, the image is the same; but a flush may vouch for this one. */
            if (pending && !in_flight)
                pending->settles |= settles;
            continue;
        }
        PCC_ASSERT(media->unit_count < MEDIA_UNITS_MAX);
        media->overlapping |= pending != NULL;
        media->units[media->unit_count++] =
            (struct media_unit){bytes, offset, delta_of(media, offset, bytes), settles, in_flight};
    }
}

static void settle(struct media *media, uint64_t offset, const uint8_t *bytes, uint64_t length)
{
    memcpy(media->certain + offset, bytes, length);
    memcpy(media->image + offset, bytes, length);
    for (uint64_t at = 0; at < length; at += SIM_SECTOR) {
        uint64_t index = (offset + at) / SIM_SECTOR;
        media->hash ^= media->sector_hash[index];
        media->sector_hash[index] = hash_sector(index, bytes + at);
        media->hash ^= media->sector_hash[index];
    }
}

static void drop_units_within(struct media *media, uint64_t offset, uint64_t length)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < media->unit_count; i++)
        if (media->units[i].offset < offset || media->units[i].offset >= offset + length)
            media->units[kept++] = media->units[i];
    media->unit_count = kept;
}

static void note_overlaps(struct media *media)
{
    media->overlapping = false;
    for (uint32_t i = 0; i < media->unit_count; i++) {
        media->units[i].delta = delta_of(media, media->units[i].offset, media->units[i].bytes);
        for (uint32_t j = 0; j < i && !media->overlapping; j++)
            media->overlapping = media->units[i].offset == media->units[j].offset;
    }
}

/* Everything pending is settled; what is in doubt as later reads saw it (a failed write) or by the
 * toss of a coin (a failed flush). */
static void flush(struct media *media)
{
    for (uint32_t i = 0; i < media->unit_count; i++) {
        const struct media_unit *unit = &media->units[i];
        if (unit->settles)
            settle(media, unit->offset, unit->bytes, media->unit_bytes);
    }
    media->unit_count = 0;
}

void media_complete(struct media *media, const struct sim_entry *entry)
{
    switch (entry->kind) {
    case SIM_WRITE:
        add_units(media, entry, false);
        break;
    case SIM_DURABLE:
        if (entry->failed) {
            add_units(media, entry, false);
            break;
        }
        drop_units_within(media, entry->offset, entry->length);
        settle(media, entry->offset, entry->bytes, entry->length);
        break;
    case SIM_FLUSH:
        if (!entry->failed) {
            flush(media);
            break;
        }
        for (uint32_t i = 0; i < media->unit_count; i++)
            media->units[i].settles &= rng_chance(&media->rng, 2);
        break;
    default:
        return;
    }
    note_overlaps(media);
}

void media_start(struct media *media, const struct sim_entry *entry)
{
    if (entry->kind == SIM_WRITE || entry->kind == SIM_DURABLE)
        add_units(media, entry, true);
}

void media_withdraw(struct media *media)
{
    while (media->unit_count > 0 && media->units[media->unit_count - 1].in_flight)
        media->unit_count--;
    note_overlaps(media);
}

static bool hidden(const struct media *media, const struct media_choice *choice, uint32_t unit)
{
    for (uint32_t later = unit + 1; later < media->unit_count; later++)
        if (media_chosen(choice, later) && media->units[later].offset == media->units[unit].offset)
            return true;
    return false;
}

uint64_t media_hash(const struct media *media, const struct media_choice *choice)
{
    uint64_t hash = media->hash;
    for (uint32_t i = 0; i < media->unit_count; i++)
        if (media_chosen(choice, i) && !(media->overlapping && hidden(media, choice, i)))
            hash ^= media->units[i].delta;
    return hash;
}

void media_apply(struct media *media, const struct media_choice *choice)
{
    for (uint32_t i = 0; i < media->unit_count; i++)
        if (media_chosen(choice, i))
            memcpy(media->image + media->units[i].offset, media->units[i].bytes, media->unit_bytes);
}

void media_revert(struct media *media, const struct media_choice *choice)
{
    for (uint32_t i = 0; i < media->unit_count; i++) {
        uint64_t offset = media->units[i].offset;
        if (media_chosen(choice, i))
            memcpy(media->image + offset, media->certain + offset, media->unit_bytes);
    }
}

void hash_set_open(struct hash_set *set, uint64_t capacity)
{
    set->keys = calloc(capacity, sizeof(uint64_t));
    PCC_ASSERT(set->keys);
    set->capacity = capacity;
    set->count = 0;
}

bool hash_set_add(struct hash_set *set, uint64_t key)
{
    key += key == 0;
    for (uint64_t at = key & (set->capacity - 1);; at = (at + 1) & (set->capacity - 1)) {
        if (set->keys[at] == key)
            return false;
        if (set->keys[at] == 0) {
            PCC_ASSERT(set->count < set->capacity / 8 * 7);
            set->keys[at] = key;
            set->count++;
            return true;
        }
    }
}

void hash_set_close(struct hash_set *set)
{
    free(set->keys);
}
