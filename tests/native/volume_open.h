/* Opening a volume file as the daemon does, by the engine pwrite, on any file system. */
#pragma once

#include "disk/pcc_volume.h"

/* bytes_per_second 0: unlimited. */
static inline int volume_open(const char *path, bool writable, uint64_t bytes_per_second,
                              struct pcc_volume **out)
{
    const struct pcc_io_options options = {.allow_buffered = true};
    const int result = pcc_volume_open_at(path, writable, &options, out);

    if (result == 0)
        pcc_io_limit(pcc_volume_io(*out), bytes_per_second);
    return result;
}
