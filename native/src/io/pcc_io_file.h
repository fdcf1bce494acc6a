/* What the engines on files share. The functions live in pcc_io_pwrite.c: the other engines take
 * from that one whatever they do not do better themselves. */
#pragma once

#include "io/pcc_io.h"

/* Is this a file that a volume may lie in? Switches the descriptor to direct I/O. */
PCC_MUST_CHECK int pcc_io_file_prepare(int fd, bool allow_buffered, uint64_t *size_bytes_out);

int64_t pcc_io_file_read(int fd, void *bytes, uint64_t length, uint64_t offset);

/* Engines on a prepared file. They own fd from success on; on failure it stays the caller's.
 * -PCC_E_UNSUPPORTED: not possible here. */
typedef int pcc_io_start(int fd, uint64_t size_bytes, const struct pcc_io_options *options,
                         struct pcc_io **out);
pcc_io_start pcc_io_pwrite_start, pcc_io_mmap_start, pcc_io_pmem_start;

/* What differs between the engines on a shared mapping of the file. */
struct pcc_mapping {
    void (*copy)(void *to, const void *from, uint64_t length);
    int flags;     /* of mmap */
    bool persists; /* what `copy` has stored is durable when it returns */
};

/* 0 or -errno, or -PCC_E_UNSUPPORTED when the file cannot be mapped with these flags. fd stays the
 * caller's on failure. */
PCC_MUST_CHECK int pcc_mapped_start(int fd, uint64_t size_bytes, const struct pcc_mapping *how,
                                    struct pcc_io **out);
