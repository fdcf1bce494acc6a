/* Copies of data that the copying CPU does not read again soon. They bypass its caches, so that a
 * line that is written whole is not read first. Faster than memcpy by about a third where memory is
 * the limit. Any thread; blocks for the copy only. */
#pragma once

#include "base/pcc_base.h"
#include "base/pcc_hash.h"

/* As memcpy; a thread that sees a later store of this thread sees what was written. */
void pcc_copy_past_cache(void *to, const void *from, size_t length_bytes);
/* The same, and *hash goes over what was stored, also when `from` changes meanwhile. */
void pcc_copy_hashed(void *to, const void *from, size_t length_bytes, struct pcc_hash *hash);
