/* XXH3-64, at once or while data is copied, with the widest vector
 * instructions that the running machine has (a generic build of XXH3 reaches 60 % of them). Any
 * thread, each with a state of its own; nothing blocks or allocates. */
#pragma once

#include "base/pcc_base.h"

struct pcc_hash {
    _Alignas(64) uint8_t state[576];
};

void pcc_hash_start(struct pcc_hash *hash);
void pcc_hash_add(struct pcc_hash *hash, const void *bytes, size_t length_bytes);
uint64_t pcc_hash_end(const struct pcc_hash *hash);
/* The same over one piece of memory, unseeded. */
uint64_t pcc_hash_bytes(const void *bytes, size_t length_bytes);

/* For pcc_hash.c only, on x86-64 processors that have AVX2: pcc_hash_avx2.c is compiled for them.
 */
void pcc_hash_add_avx2(void *state, const void *bytes, size_t length_bytes);
uint64_t pcc_hash_bytes_avx2(const void *bytes, size_t length_bytes);
