/* What memory.c and ipc.c share: the files that device memory lies in. */
#pragma once

#include "standin.h"

#define FILE_MAGIC 0x5952454d444e5453ull /* "STNDMERY" */

#define PROCESS_KIND "process" /* files of checkpoint.c */

enum {
    HEADER_BYTES = 4096,
    PATH_BYTES = 4096,
    FRESH_BYTES_MAX = 64 << 20,
    BLOCK_BYTES = 2 << 20, /* what memory is given out in; */
    SHARED_BLOCK = 1 << 20 /* smaller allocations share blocks */
};

/* whole.c */
void whole_path(char *out, const char *kind, uint32_t device, uint32_t pid, uint64_t nonce);
uint64_t whole_free(uint32_t device); /* of a physical device */
int whole_begin(void);                /* other processes take no memory until whole_end(fd) */
void whole_end(int fd);
void whole_note(const char *kind, uint32_t device, uint64_t nonce, uint64_t length);
void whole_forget(const char *kind, uint32_t device, uint64_t nonce);

void memory_unmap(struct memory *memory);
struct file_header *memory_file_make(size_t length, uint32_t device); /* mapped, or NULL */
void memory_file_drop(struct file_header *file);
size_t memory_in_blocks(size_t length);
void open_takes_time(void);
