#include "pcc_hash.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define PCC_HASH_AVX2 1
#define XXH_X86DISPATCH
#define XXH_DISPATCH_AVX2 1
#define XXH_TARGET_AVX2 __attribute__((target("avx2")))
#endif
#include "pcc_xxhash.h"

_Static_assert(sizeof(XXH3_state_t) <= sizeof(struct pcc_hash), "room for the state");
_Static_assert(_Alignof(XXH3_state_t) <= _Alignof(struct pcc_hash), "and its alignment");

#ifdef PCC_HASH_AVX2

static XXH_TARGET_AVX2 void add_avx2(XXH3_state_t *state, const void *bytes, size_t length_bytes)
{
    (void)XXH3_update(state, bytes, length_bytes, XXH3_accumulate_512_avx2, XXH3_scrambleAcc_avx2);
}

static XXH_TARGET_AVX2 uint64_t long_avx2(const void *bytes, size_t length_bytes)
{
    return XXH3_hashLong_64b_internal(bytes, length_bytes, XXH3_kSecret, sizeof(XXH3_kSecret),
                                      XXH3_accumulate_512_avx2, XXH3_scrambleAcc_avx2);
}

#endif

void pcc_hash_start(struct pcc_hash *hash)
{
    (void)XXH3_64bits_reset((XXH3_state_t *)(void *)hash->state);
}

void pcc_hash_add(struct pcc_hash *hash, const void *bytes, size_t length_bytes)
{
    XXH3_state_t *state = (void *)hash->state;

#ifdef PCC_HASH_AVX2
    if (__builtin_cpu_supports("avx2")) {
        add_avx2(state, bytes, length_bytes);
        return;
    }
#endif
    (void)XXH3_64bits_update(state, bytes, length_bytes);
}

uint64_t pcc_hash_end(const struct pcc_hash *hash)
{
    return XXH3_64bits_digest((const XXH3_state_t *)(const void *)hash->state);
}

uint64_t pcc_hash_bytes(const void *bytes, size_t length_bytes)
{
#ifdef PCC_HASH_AVX2
    if (length_bytes > XXH3_MIDSIZE_MAX && __builtin_cpu_supports("avx2"))
        return long_avx2(bytes, length_bytes);
#endif
    return XXH3_64bits(bytes, length_bytes);
}
