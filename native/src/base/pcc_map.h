/* Shared mappings of memfds, placed so that huge pages can serve them: direct writes from huge
 * pages are half as fast again as from 4 KiB ones (the block layer works page by page). */
#pragma once

#include <sys/mman.h>

#include "base/pcc_base.h"

#define PCC_HUGE_PAGE_BYTES (2ull << 20)

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* 0 or -errno; unmapped with munmap(bytes, length_bytes). Not inherited by forked children. */
PCC_MUST_CHECK static inline int pcc_map_shared(int fd, uint64_t length_bytes, void **bytes_out)
{
    const uint64_t spare = length_bytes >= PCC_HUGE_PAGE_BYTES ? PCC_HUGE_PAGE_BYTES : 0;
    /* Address space with room to move to the next huge page boundary; what is left over goes. */
    uint8_t *room = mmap(NULL, length_bytes + spare, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (room == MAP_FAILED)
        return -errno;
    const uint64_t at = (uint64_t)(uintptr_t)room;
    const uint64_t before = spare > 0 ? pcc_align_up(at, PCC_HUGE_PAGE_BYTES) - at : 0;
    uint8_t *bytes =
        mmap(room + before, length_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (bytes == MAP_FAILED) {
        const int error = -errno;
        (void)munmap(room, length_bytes + spare);
        return error;
    }
    if (before > 0)
        (void)munmap(room, before);
    if (spare > before)
        (void)munmap(bytes + length_bytes, spare - before);
    (void)madvise(bytes, length_bytes, MADV_DONTFORK);
    *bytes_out = bytes;
    return 0;
}

/* A second mapping of the same pages, for a driver that registers an address once only. NULL: none.
 * Unmapped and inherited as the first. */
static inline void *pcc_map_alias(void *bytes, uint64_t length_bytes)
{
    void *alias = mremap(bytes, 0, length_bytes, MREMAP_MAYMOVE); /* 0: the first one stays */

    if (alias == MAP_FAILED)
        return NULL;
    (void)madvise(alias, length_bytes, MADV_DONTFORK);
    return alias;
}
