/* Which engines there are, and how a file gets the one that was asked for. */
#include <string.h>
#include <unistd.h>

#include "io/pcc_io_file.h"

static const struct engine {
    struct pcc_io_words words;
    pcc_io_start *start;
} engines[PCC_IO_ENGINES] = {
    [PCC_IO_PWRITE] = {{"pwrite", "past the page cache", ""}, pcc_io_pwrite_start},
    [PCC_IO_MMAP] = {{"mmap", "through the page cache", "the volume cannot be mapped"},
                     pcc_io_mmap_start},
    [PCC_IO_PMEM] = {{"pmem", "to persistent memory (DAX)",
                      "no persistent memory with a DAX file system here"},
                     pcc_io_pmem_start},
};

const struct pcc_io_words *pcc_io_words_of(enum pcc_io_engine engine)
{
    return &engines[engine].words;
}

int pcc_io_engine_named(const char *name, enum pcc_io_engine *out)
{
    for (uint32_t i = 0; i < PCC_IO_ENGINES; i++)
        if (strcmp(engines[i].words.name, name) == 0) {
            *out = (enum pcc_io_engine)i;
            return 0;
        }
    return -EINVAL;
}

int pcc_io_open(int fd, const struct pcc_io_options *options, struct pcc_io **out)
{
    const struct engine *engine = &engines[options->engine];
    uint64_t size_bytes;
    int result = pcc_io_file_prepare(fd, options->allow_buffered, &size_bytes);

    if (result == 0) {
        result = engine->start(fd, size_bytes, options, out);
        if (result == -PCC_E_UNSUPPORTED && !options->strict) {
            engine = &engines[PCC_IO_PWRITE];
            result = engine->start(fd, size_bytes, options, out);
        }
    }
    if (result != 0) {
        (void)close(fd);
        return result;
    }
    result = pcc_io_throttle_open(*out, 0, out);
    if (result == 0)
        (*out)->name = engine->words.name;
    return result;
}
