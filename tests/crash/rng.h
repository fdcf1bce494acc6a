/* A small seeded generator: the same seed gives the same run on every machine. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct rng {
    uint64_t state;
};

static inline uint64_t rng_next(struct rng *rng) /* splitmix64 */
{
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* In [0, limit). */
static inline uint32_t rng_below(struct rng *rng, uint32_t limit)
{
    return (uint32_t)(((rng_next(rng) >> 32) * limit) >> 32);
}

static inline bool rng_chance(struct rng *rng, uint32_t one_in)
{
    return rng_below(rng, one_in) == 0;
}

static inline struct rng rng_from(uint64_t seed, uint64_t stream)
{
    struct rng rng = {seed * 0x2545f4914f6cdd1dull ^ stream};
    rng_next(&rng);
    return rng;
}
