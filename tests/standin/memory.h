/* What memory.c and ipc.c share: the files that device memory lies in. */
#ifndef STANDIN_MEMORY_H
#define STANDIN_MEMORY_H

#include "standin.h"

#define FILE_MAGIC 0x5952454d444e5453ull /* "STNDMERY" */

enum { HEADER_BYTES = 4096, PATH_BYTES = 4096, FRESH_BYTES_MAX = 64 << 20 };

void memory_path(char *out, uint32_t pid, uint64_t nonce);
void memory_unmap(struct memory *memory);

#endif
