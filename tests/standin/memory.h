/* What memory.c and ipc.c share: the files that device memory lies in. */
#ifndef STANDIN_MEMORY_H
#define STANDIN_MEMORY_H

#include "standin.h"

#define FILE_MAGIC 0x5952454d444e5453ull /* "STNDMERY" */

enum { HEADER_BYTES = 4096, PATH_BYTES = 4096, FRESH_BYTES_MAX = 64 << 20 };

/* whole.c */
void whole_path(char *out, const char *kind, uint32_t device, uint32_t pid, uint64_t nonce);
uint64_t whole_free(uint32_t device); /* of a physical device */
int whole_begin(void);                /* other processes take no memory until whole_end(fd) */
void whole_end(int fd);
void whole_note(const char *kind, uint32_t device, uint64_t nonce, uint64_t length);
void whole_forget(const char *kind, uint32_t device, uint64_t nonce);

void memory_unmap(struct memory *memory);

#endif
