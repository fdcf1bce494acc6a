/* XXH3 once more, compiled for AVX2: called only where the processor has it. The state is the same
 * as without. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "base/pcc_hash.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define XXH_VECTOR 2 /* XXH_AVX2 */
#include "base/pcc_xxhash.h"

void pcc_hash_add_avx2(void *state, const void *bytes, size_t length_bytes)
{
    (void)XXH3_64bits_update(state, bytes, length_bytes);
}

uint64_t pcc_hash_bytes_avx2(const void *bytes, size_t length_bytes)
{
    return XXH3_64bits(bytes, length_bytes);
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
