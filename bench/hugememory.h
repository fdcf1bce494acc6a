/* Memory as the daemon's pool is: a memfd, in huge pages where the kernel has some. */
#pragma once

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/pcc_map.h"

/* Touched; NULL when there is not so much. */
static inline void *huge_memory(uint64_t length_bytes)
{
    const int fd = memfd_create("bench", MFD_CLOEXEC);
    void *bytes = NULL;

    if (fd < 0 || ftruncate(fd, (off_t)length_bytes) != 0 ||
        pcc_map_shared(fd, length_bytes, &bytes) != 0)
        return NULL;
    memset(bytes, 1, length_bytes);
    (void)madvise(bytes, length_bytes, MADV_COLLAPSE);
    return bytes;
}
