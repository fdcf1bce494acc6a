/* What the media may hold after a crash: a log replayed up to a position gives bytes that are
 * certain and units (pages, sectors, cache lines, words) that may have arrived or not.
 *
 * The disk assumed: units are written whole; a flush makes certain every write that completed
 * before it; a durable write makes certain only itself; a failed write or flush leaves what it
 * touched in doubt for ever: no later flush vouches for it. */
#pragma once

#include "sim_io.h"

#define MEDIA_UNITS_MAX 8192u
#define MEDIA_UNIT_MIN 8u

struct media_unit {
    const uint8_t *bytes; /* in the log */
    uint64_t offset;
    uint64_t delta; /* what applying it changes in the image's hash */
    uint32_t later; /* the next unit that was written to the same place; 0: none */
    bool settles;   /* the next flush makes it certain; false: makes it certainly lost */
    bool in_flight; /* of the operation at the crash position */
};

struct media {
    uint8_t *certain;     /* the image with no pending unit applied */
    uint8_t *image;       /* scratch: media_apply builds a crash image here */
    uint64_t *piece_hash; /* of each piece_bytes of `certain` */
    uint32_t *newest;     /* by place: its last unit + 1; 0: none */
    uint64_t hash;        /* of `certain` */
    uint64_t size_bytes;
    uint32_t unit_bytes;
    uint32_t piece_bytes;                     /* a unit, or a sector of it */
    struct media_unit units[MEDIA_UNITS_MAX]; /* in the order they were written */
    uint32_t unit_count;
    struct rng rng;
};

struct media *media_new(uint64_t size_bytes);
void media_free(struct media *media);
/* unit_bytes: what is never torn, a power of two from 8 to 4096. */
void media_begin(struct media *media, const uint8_t *base, uint32_t unit_bytes, uint64_t seed);
/* The operation completed (or failed and returned). */
void media_complete(struct media *media, const struct sim_entry *entry);
/* The operation is under way: its units become pending, until media_withdraw. */
void media_start(struct media *media, const struct sim_entry *entry);
void media_withdraw(struct media *media);

/* Bit i of chosen says that unit i arrived. */
struct media_choice {
    uint64_t bits[MEDIA_UNITS_MAX / 64];
};
static inline bool media_chosen(const struct media_choice *choice, uint32_t unit)
{
    return choice->bits[unit / 64] >> (unit % 64) & 1;
}
static inline void media_choose(struct media_choice *choice, uint32_t unit, bool arrived)
{
    uint64_t bit = 1ull << (unit % 64);
    choice->bits[unit / 64] =
        arrived ? choice->bits[unit / 64] | bit : choice->bits[unit / 64] & ~bit;
}
uint64_t media_hash(const struct media *media, const struct media_choice *choice);
/* Builds media->image; media_revert puts `certain` back. */
void media_apply(struct media *media, const struct media_choice *choice);
void media_revert(struct media *media, const struct media_choice *choice);

/* A set of 64-bit hashes, for counting distinct states. */
struct hash_set {
    uint64_t *keys;
    uint64_t capacity, count;
};
void hash_set_open(struct hash_set *set, uint64_t capacity); /* a power of two, never filled */
bool hash_set_add(struct hash_set *set, uint64_t key);       /* true when it was not there */
void hash_set_close(struct hash_set *set);
