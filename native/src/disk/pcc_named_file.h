/* The name of an open file. Whoever removes, replaces, moves or cuts a file does not ask the
 * processes that have it open: only its path tells. */
#pragma once

#include "base/pcc_base.h"

struct pcc_named_file { /* zeroed: of a file without a name, always in place */
    char *path;
    uint64_t device;
    uint64_t inode; /* is not given to another file while this one is open */
    uint64_t size_bytes;
};

/* What fd is, which `path` was opened as. Borrows both; pcc_named_file_destroy() what it fills. */
PCC_MUST_CHECK int pcc_named_file_take(int fd, const char *path, struct pcc_named_file *out);
/* One system call. -PCC_E_REMOVED (nothing is there), -PCC_E_REPLACED (another file is),
 * -PCC_E_TRUNCATED (it is shorter than it was), or -errno when the path cannot be looked at. */
PCC_MUST_CHECK int pcc_named_file_check(const struct pcc_named_file *file);
void pcc_named_file_destroy(struct pcc_named_file *file);
