/* A bounded queue of 64-bit values for any number of producers and consumers, after Vyukov: the
 * slots that are free, and the work of a lane.
 *
 * Push and pop take no lock and never block; pop_wait sleeps on a futex. The capacity is fixed at
 * init, so that nothing allocates later; a full queue answers false. FIFO. */
#ifndef PCC_QUEUE_H
#define PCC_QUEUE_H

#include <stdatomic.h>

#include "pcc_base.h"

struct pcc_queue_cell {
    _Atomic uint64_t turn;
    uint64_t value;
};

struct pcc_queue {
    struct pcc_queue_cell *cells;
    uint64_t mask;
    _Alignas(64) _Atomic uint64_t tail; /* producers */
    _Alignas(64) _Atomic uint64_t head; /* consumers */
    _Alignas(64) _Atomic uint32_t bell; /* incremented by push and close; waiters sleep on it */
    _Atomic uint32_t sleepers;
    _Atomic bool closed;
};

/* capacity: a power of two, at least 2. A zeroed queue may be destroyed. */
PCC_MUST_CHECK int pcc_queue_init(struct pcc_queue *queue, uint64_t capacity);
void pcc_queue_destroy(struct pcc_queue *queue);

PCC_MUST_CHECK bool pcc_queue_push(struct pcc_queue *queue, uint64_t value); /* false: full */
/* False when empty; also when a push that began earlier has not finished yet. */
PCC_MUST_CHECK bool pcc_queue_pop(struct pcc_queue *queue, uint64_t *out);
/* Sleeps until there is a value; false when the queue is closed and empty. */
PCC_MUST_CHECK bool pcc_queue_pop_wait(struct pcc_queue *queue, uint64_t *out);
void pcc_queue_close(struct pcc_queue *queue);           /* wakes every waiter for good */
uint64_t pcc_queue_count(const struct pcc_queue *queue); /* a snapshot, for display */

#endif
