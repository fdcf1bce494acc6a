/* Futex words in shared memory and the bells built on them.
 *
 * A bell is a counter: the side that produced something increments it and wakes the sleepers; a
 * waiter reads the bell, looks for work, and sleeps only on the value it read, so that no ring is
 * missed. The words lie in memory that another process maps: no FUTEX_PRIVATE_FLAG. A hostile peer
 * may set a bell back, so every sleep is bounded. Any thread; wait blocks, the rest does not. */
#pragma once

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/pcc_base.h"

/* Returns when woken, when *word is not `expected`, at the timeout or for no reason: look again. */
static inline void pcc_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns)
{
    const struct timespec timeout = {
        .tv_sec = (time_t)(timeout_ns / 1000000000u),
        .tv_nsec = (long)(timeout_ns % 1000000000u),
    };
    (void)syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, NULL, 0);
}

/* The value to sleep on. Acquire: pairs with the release in pcc_bell_ring, so that what was
 * produced before the ring is seen by the look that follows. */
static inline uint32_t pcc_bell_read(_Atomic uint32_t *bell)
{
    return PCC_READ_ACQUIRE(bell);
}

/* Sleeps until the bell rings, but not beyond until_ns. A thread that waits for another process
 * checks every PCC_BELL_SLICE_NS whether that process still runs. */
#define PCC_BELL_SLICE_NS 100000000u
static inline void pcc_bell_sleep(_Atomic uint32_t *bell, uint32_t rung, uint64_t until_ns)
{
    const uint64_t now = pcc_now_ns();
    const uint64_t left = until_ns > now ? until_ns - now : 0;

    pcc_futex_wait(bell, rung, left < PCC_BELL_SLICE_NS ? left : PCC_BELL_SLICE_NS);
}

static inline void pcc_bell_ring(_Atomic uint32_t *bell)
{
    (void)atomic_fetch_add_explicit(bell, 1, memory_order_release); /* pairs with pcc_bell_read */
    (void)syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
