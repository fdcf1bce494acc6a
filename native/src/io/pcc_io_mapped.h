/* A volume's file as one shared mapping: what the engines `mmap` and `pmem` have in common. */
#ifndef PCC_IO_MAPPED_H
#define PCC_IO_MAPPED_H

#include "io/pcc_guard.h"
#include "io/pcc_io_file.h"

struct pcc_mapped_io {
    struct pcc_io io; /* first member */
    int fd;
    uint8_t *bytes;
    pcc_guard_copy_function *copy;
    bool persists; /* what `copy` has stored is durable when it returns */
};

/* 0 or -errno, or -PCC_E_UNSUPPORTED when the file cannot be mapped with these flags. fd stays the
 * caller's on failure. */
PCC_MUST_CHECK int pcc_mapped_start(int fd, uint64_t size_bytes, int map_flags,
                                    const struct pcc_mapped_io *how, struct pcc_io **out);

int64_t pcc_mapped_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset);
int64_t pcc_mapped_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset);
int64_t pcc_mapped_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                 uint64_t offset);
int pcc_mapped_flush(struct pcc_io *io);
void pcc_mapped_close(struct pcc_io *io);

#endif
