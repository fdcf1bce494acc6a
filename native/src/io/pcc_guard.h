/* Stores to a mapped file that may fail. If the kernel cannot bring in the page of a store (an
 * error of the disk, a file that was cut short, no block left), it sends SIGBUS, which would end
 * the daemon for one bad sector of one tenant. Here the result is -EIO instead.
 *
 * Any thread. One handler for the process, installed with the first guard. Other signals go to the
 * previous handler of SIGBUS. A handler that is installed later must do the same for this one. */
#ifndef PCC_GUARD_H
#define PCC_GUARD_H

#include "base/pcc_base.h"

typedef void pcc_guard_copy_function(void *to, const void *from, uint64_t length);

PCC_MUST_CHECK int pcc_guard_install(void); /* 0 or -errno; again is free */
/* copy(to, from, length); -EIO when a page of `to` or `from` could not be had: `to` then holds any
 * part of it. `copy` may hold no lock. */
PCC_MUST_CHECK int pcc_guard_copy(pcc_guard_copy_function *copy, void *to, const void *from,
                                  uint64_t length);

#endif
