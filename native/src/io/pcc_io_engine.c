/* Which engines there are, and how a file gets the one that was asked for. */
#include <string.h>
#include <unistd.h>

#include "io/pcc_io_file.h"

static const char *const engine_names[PCC_IO_ENGINES] = {
    [PCC_IO_PWRITE] = "pwrite",
    [PCC_IO_MMAP] = "mmap",
    [PCC_IO_PMEM] = "pmem",
};

int pcc_io_engine_named(const char *name, enum pcc_io_engine *out)
{
    for (uint32_t i = 0; i < PCC_IO_ENGINES; i++)
        if (strcmp(engine_names[i], name) == 0) {
            *out = (enum pcc_io_engine)i;
            return 0;
        }
    return -EINVAL;
}

static int start(int fd, uint64_t size_bytes, const struct pcc_io_options *options,
                 struct pcc_io **out)
{
    switch (options->engine) {
    case PCC_IO_PWRITE:
        return pcc_io_pwrite_start(fd, size_bytes, out);
    case PCC_IO_MMAP:
        return pcc_io_mmap_start(fd, size_bytes, out);
    case PCC_IO_PMEM:
        return pcc_io_pmem_start(fd, size_bytes, options->pmem_anywhere, out);
    default:
        return -EINVAL;
    }
}

int pcc_io_open(int fd, const struct pcc_io_options *options, struct pcc_io **out)
{
    uint64_t size_bytes;
    int result = pcc_io_file_prepare(fd, options->allow_buffered, &size_bytes);

    if (result == 0) {
        result = start(fd, size_bytes, options, out);
        if (result == -PCC_E_UNSUPPORTED && !options->strict)
            result = pcc_io_pwrite_start(fd, size_bytes, out);
    }
    if (result != 0) {
        (void)close(fd);
        return result;
    }
    return pcc_io_throttle_open(*out, 0, out);
}
