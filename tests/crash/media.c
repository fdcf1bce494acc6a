#include "media.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <stdlib.h>
#include <string.h>

static uint64_t hash_piece(const struct media *media, uint64_t index, const uint8_t *bytes)
{
    return XXH3_64bits_withSeed(bytes, media->piece_bytes, index);
}

static uint32_t *place_of(const struct media *media, uint64_t offset)
{
    return &media->newest[offset / media->unit_bytes];
}

struct media *media_new(uint64_t size_bytes)
{
    struct media *media = calloc(1, sizeof *media);
    PCC_ASSERT(media);
    media->size_bytes = size_bytes;
    media->certain = malloc(size_bytes);
    media->image = aligned_alloc(4096, size_bytes);
    media->piece_hash = calloc(size_bytes / MEDIA_UNIT_MIN, sizeof *media->piece_hash);
    media->newest = calloc(size_bytes / MEDIA_UNIT_MIN, sizeof *media->newest);
    PCC_ASSERT(media->certain && media->image && media->piece_hash && media->newest);
    return media;
}

void media_free(struct media *media)
{
    free(media->certain);
    free(media->image);
    free(media->piece_hash);
    free(media->newest);
    free(media);
}

void media_begin(struct media *media, const uint8_t *base, uint32_t unit_bytes, uint64_t seed)
{
    PCC_ASSERT(unit_bytes >= MEDIA_UNIT_MIN);
    memcpy(media->certain, base, media->size_bytes);
    memcpy(media->image, base, media->size_bytes);
    memset(media->newest, 0, media->size_bytes / MEDIA_UNIT_MIN * sizeof *media->newest);
    media->unit_bytes = unit_bytes;
    media->piece_bytes = unit_bytes < SIM_SECTOR ? unit_bytes : SIM_SECTOR;
    media->unit_count = 0;
    media->rng = rng_from(seed, 0x3ed1a);
    media->hash = 0;
    for (uint64_t i = 0; i < media->size_bytes / media->piece_bytes; i++) {
        media->piece_hash[i] = hash_piece(media, i, base + i * media->piece_bytes);
        media->hash ^= media->piece_hash[i];
    }
}

static uint64_t delta_of(const struct media *media, uint64_t offset, const uint8_t *bytes)
{
    uint64_t delta = 0;
    for (uint64_t at = 0; at < media->unit_bytes; at += media->piece_bytes) {
        uint64_t index = (offset + at) / media->piece_bytes;
        delta ^= media->piece_hash[index] ^ hash_piece(media, index, bytes + at);
    }
    return delta;
}

/* A short write may end within a unit: that piece counts as not arrived, since whoever resumes the
 * write has to write it again. */
static void add_units(struct media *media, const struct sim_entry *entry, bool in_flight)
{
    uint64_t doubt_bytes = sim_doubt_bytes(media->unit_bytes);
    uint64_t whole = entry->length / media->unit_bytes * media->unit_bytes;
    for (uint64_t at = 0; at < whole; at += media->unit_bytes) {
        const uint8_t *bytes = entry->bytes + at;
        uint64_t offset = entry->offset + at;
        bool settles = !entry->failed || (entry->arrived >> (at / doubt_bytes) & 1);
        uint32_t *newest = place_of(media, offset);
        struct media_unit *pending = *newest > 0 ? &media->units[*newest - 1] : NULL;
        const uint8_t *there = pending ? pending->bytes : media->certain + offset;
        if (memcmp(there, bytes, media->unit_bytes) == 0) {
            /* Arrived or not, the image is the same; but a flush may vouch for this one. */
            if (pending && !in_flight)
                pending->settles |= settles;
            continue;
        }
        PCC_ASSERT(media->unit_count < MEDIA_UNITS_MAX);
        if (pending)
            pending->later = media->unit_count;
        media->units[media->unit_count++] = (struct media_unit){
            bytes, offset, delta_of(media, offset, bytes), 0, settles, in_flight};
        *newest = media->unit_count;
    }
}

static void settle(struct media *media, uint64_t offset, const uint8_t *bytes, uint64_t length)
{
    memcpy(media->certain + offset, bytes, length);
    memcpy(media->image + offset, bytes, length);
    for (uint64_t at = 0; at < length; at += media->piece_bytes) {
        uint64_t index = (offset + at) / media->piece_bytes;
        media->hash ^= media->piece_hash[index];
        media->piece_hash[index] = hash_piece(media, index, bytes + at);
        media->hash ^= media->piece_hash[index];
    }
}

/* The units change: their places forget them, ... */
static void forget_places(struct media *media)
{
    for (uint32_t i = 0; i < media->unit_count; i++)
        *place_of(media, media->units[i].offset) = 0;
}

/* ... and learn what is left. */
static void learn_places(struct media *media)
{
    for (uint32_t i = 0; i < media->unit_count; i++) {
        struct media_unit *unit = &media->units[i];
        uint32_t *newest = place_of(media, unit->offset);
        unit->delta = delta_of(media, unit->offset, unit->bytes);
        unit->later = 0;
        if (*newest > 0)
            media->units[*newest - 1].later = i;
        *newest = i + 1;
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

/* Everything pending is settled; what is in doubt as later reads saw it (a failed write) or by the
 * toss of a coin (a failed flush). */
static void flush(struct media *media)
{
    forget_places(media);
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
        forget_places(media);
        drop_units_within(media, entry->offset, entry->length);
        settle(media, entry->offset, entry->bytes, entry->length);
        learn_places(media);
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
        break;
    }
}

void media_start(struct media *media, const struct sim_entry *entry)
{
    if (entry->kind == SIM_WRITE || entry->kind == SIM_DURABLE)
        add_units(media, entry, true);
}

void media_withdraw(struct media *media)
{
    forget_places(media);
    while (media->unit_count > 0 && media->units[media->unit_count - 1].in_flight)
        media->unit_count--;
    learn_places(media);
}

/* Where two units for one place have arrived, the later one is seen. */
static bool hidden(const struct media *media, const struct media_choice *choice, uint32_t unit)
{
    for (uint32_t later = media->units[unit].later; later > 0; later = media->units[later].later)
        if (media_chosen(choice, later))
            return true;
    return false;
}

uint64_t media_hash(const struct media *media, const struct media_choice *choice)
{
    uint64_t hash = media->hash;
    for (uint32_t i = 0; i < media->unit_count; i++)
        if (media_chosen(choice, i) && !hidden(media, choice, i))
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
