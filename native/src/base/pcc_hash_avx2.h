/* What pcc_hash.c calls on x86-64 processors that have AVX2; pcc_hash_avx2.c is compiled for them.
 */
#ifndef PCC_HASH_AVX2_H
#define PCC_HASH_AVX2_H

#include <stddef.h>
#include <stdint.h>

void pcc_hash_add_avx2(void *state, const void *bytes, size_t length_bytes);
uint64_t pcc_hash_bytes_avx2(const void *bytes, size_t length_bytes);

#endif
