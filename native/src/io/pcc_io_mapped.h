/* A volume's file as one shared mapping: what the engines `mmap` and `pmem` have in common. */
#ifndef PCC_IO_MAPPED_H
#define PCC_IO_MAPPED_H

#include "io/pcc_guard.h"
#include "io/pcc_io_file.h"

struct pcc_mapping { /* in what the two differ */
    const char *name;
    pcc_guard_copy_function *copy;
    int flags;     /* of mmap */
    bool persists; /* what `copy` has stored is durable when it returns */
};

/* 0 or -errno, or -PCC_E_UNSUPPORTED when the file cannot be mapped with these flags. fd stays the
 * caller's on failure. */
PCC_MUST_CHECK int pcc_mapped_start(int fd, uint64_t size_bytes, const struct pcc_mapping *how,
                                    struct pcc_io **out);

#endif
