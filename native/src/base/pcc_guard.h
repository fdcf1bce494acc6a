/* Copies that may fail. When the kernel cannot bring in a page (memory that was freed, a file that
 * was cut short, an error of the disk, no block left), it sends SIGSEGV or SIGBUS, which would end
 * the process. Here the result is an error instead.
 *
 * Any thread that does not block these signals. One handler for the process, installed once; other
 * faults go to the handler before. A handler that is installed later (faulthandler, a JVM) gets our
 * faults, too. Ours is not installed again after that one: each might then call the other for ever.
 * Until such a handler is gone the guard is not ready, and callers use pcc_guard_copy_slowly. */
#pragma once

#include "base/pcc_base.h"

struct pcc_guard { /* the memory that may be missing now */
    volatile uintptr_t to, from;
    volatile uint64_t length;
};

struct pcc_guarded { /* one copy */
    void (*copy)(void *context, void *to, const void *from, uint64_t length);
    void *context;
    void *to; /* NULL: it is only read */
    const void *from;
    uint64_t length;
};

PCC_MUST_CHECK int pcc_guard_install(void); /* 0 or -errno; again is free */
/* Installs, and says whether our handlers are still there. Two system calls. */
PCC_MUST_CHECK bool pcc_guard_ready(void);
/* work(context, guard), which holds no lock, and before each copy calls pcc_guard_expect. -EFAULT
 * and the address when a page of that copy is missing: the work ended there. Costs nanoseconds. */
PCC_MUST_CHECK int pcc_guard_run(void (*work)(void *context, struct pcc_guard *guard),
                                 void *context, uint64_t *fault_out);
static inline void pcc_guard_expect(struct pcc_guard *guard, const struct pcc_guarded *what)
{
    guard->length = what->length;
    guard->from = (uintptr_t)what->from;
    guard->to = what->to != NULL ? (uintptr_t)what->to : guard->from;
}
/* One copy: copy(context, to, from, length). After an error `to` holds any part of it. */
PCC_MUST_CHECK int pcc_guard_copy(const struct pcc_guarded *what, uint64_t *fault_out);
/* The same while the guard is not ready, of bytes that the kernel has read before: for `from`
 * alone, and several times slower. Also -EMFILE, -ENOMEM and the like. */
PCC_MUST_CHECK int pcc_guard_copy_slowly(const struct pcc_guarded *what, uint64_t *fault_out);
