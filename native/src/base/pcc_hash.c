#include "base/pcc_hash.h"

#include "base/pcc_xxhash.h"

_Static_assert(sizeof(XXH3_state_t) <= sizeof(struct pcc_hash), "room for the state");
_Static_assert(_Alignof(XXH3_state_t) <= _Alignof(struct pcc_hash), "and its alignment");

void pcc_hash_start(struct pcc_hash *hash)
{
    (void)XXH3_64bits_reset((XXH3_state_t *)(void *)hash->state);
}

void pcc_hash_add(struct pcc_hash *hash, const void *bytes, size_t length_bytes)
{
    XXH3_state_t *state = (void *)hash->state;

#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        pcc_hash_add_avx2(state, bytes, length_bytes);
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
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        return pcc_hash_bytes_avx2(bytes, length_bytes);
#endif
    return XXH3_64bits(bytes, length_bytes);
}
